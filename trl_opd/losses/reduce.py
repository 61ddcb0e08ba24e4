"""From per-token values to the scalar that is back-propagated. The only place that divides."""

from __future__ import annotations

import torch


def global_mean(loss_sum: torch.Tensor, num_tokens: torch.Tensor | int, num_processes: int = 1) -> torch.Tensor:
    """Σ per-token / N, with N the trained tokens of the whole optimizer step: every micro-batch, every rank.

    DDP, ZeRO and FSDP average gradients over `num_processes`, so each rank's share is multiplied by it. N = 0 gives a
    differentiable zero.
    """
    tokens = num_tokens.to(loss_sum).clamp(min=1) if isinstance(num_tokens, torch.Tensor) else max(num_tokens, 1)
    return loss_sum * num_processes / tokens


def row_sums(per_token: torch.Tensor, rows: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token values (N,) of rows (N,) -> sum (B,) and count (B,) per row."""
    values = per_token.new_zeros(num_rows).index_add_(0, rows, per_token)
    counts = per_token.new_zeros(num_rows).index_add_(0, rows, torch.ones_like(per_token))
    return values, counts
