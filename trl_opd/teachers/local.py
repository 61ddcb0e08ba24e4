"""A teacher that is a model of its own, beside the student."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..heads import Head, head_of, predicting_states
from ..rollout import continue_prompts
from ..types import TrainedPositions

# Runs a function of an unwrapped model as the forward of its wrapper, so that what ZeRO and FSDP sharded is whole
InForward = Callable[..., Any]


class LocalTeacher:
    """A frozen model, wrapped as the student is. `in_forward(wrapped, unwrapped, function, *args)` runs a function as
    its forward; `flat` leaves out padding (`predicting_states`)."""

    def __init__(self, wrapped: nn.Module, unwrapped: nn.Module, in_forward: InForward, flat: bool = False):
        self.wrapped, self.unwrapped, self.in_forward, self.flat = wrapped, unwrapped, in_forward, flat

    def states(
        self, student: nn.Module, batch: dict[str, Any], positions: TrainedPositions
    ) -> tuple[torch.Tensor, Head]:
        """States that predict the trained tokens, (N, H'), without gradient, and the head that scores them."""
        with torch.no_grad(), self._own_precision():
            work = predicting_states, self.unwrapped, batch, positions, self.flat
            hidden = self.in_forward(self.wrapped, self.unwrapped, *work)
        return hidden, head_of(self.unwrapped)

    def _own_precision(self) -> AbstractContextManager[Any]:
        """A teacher in 16 bits runs in its own: autocast, which is the student's, would only widen its norms."""
        dtype = next(p.dtype for p in self.unwrapped.parameters() if p.is_floating_point())
        if dtype not in (torch.float16, torch.bfloat16):
            return nullcontext()
        device = next(self.unwrapped.parameters()).device
        return torch.autocast(device.type, enabled=False)

    def write(self, student: nn.Module, prompts: list[list[int]], config: Any, **stops: Any) -> list[list[int]]:
        """Completions of its own, sampled by a `GenerationConfig` (see `continue_prompts`)."""
        return continue_prompts(self.unwrapped, prompts, config, **stops)


def freeze(model: nn.Module) -> nn.Module:
    """Eval mode and no gradient for every parameter."""
    return model.eval().requires_grad_(False)


def shares_parameters(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models hold a parameter in common, so that training one would move the other."""
    mine = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in mine for parameter in other.parameters())
