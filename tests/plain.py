"""Losses of whole steps from full logits, a row at a time: what the trainers' gradients must equal."""

from __future__ import annotations

from collections.abc import Callable

import torch


def row_logits(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """The model's own logits at the positions that predict the completion: (len(completion), V)."""
    logits = model(torch.tensor([prompt + completion])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def gradients_of(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by the names the trainer sees, of every parameter that trains."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def mean_over_tokens(
    rows: list[tuple[list[int], list[int]]], per_token: Callable[[list[int], list[int]], torch.Tensor]
) -> torch.Tensor:
    """Σ per_token(prompt, completion) over the rows ÷ all completion tokens."""
    return sum(per_token(p, c).sum() for p, c in rows) / sum(len(c) for _, c in rows)
