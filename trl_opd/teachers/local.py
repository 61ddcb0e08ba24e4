"""A teacher that is a model of its own, beside the student."""

from __future__ import annotations

from torch import nn


def freeze(model: nn.Module) -> nn.Module:
    """Eval mode and no gradient for every parameter."""
    return model.eval().requires_grad_(False)


def shares_parameters(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models hold a parameter in common, so that training one would move the other."""
    mine = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in mine for parameter in other.parameters())
