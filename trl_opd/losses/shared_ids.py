"""Ids that both vocabularies have: heads, logits and targets cut to them, and gradients spread over all rows again.

They are the first so many, or sorted ids (S,), or `None` where all ids are shared.
"""

from __future__ import annotations

from typing import Any

import torch

SharedIds = int | torch.Tensor | None


def shared_rows(weight: Any, shared_ids: SharedIds) -> Any:
    """Rows (V, …) of a head -> those of the shared ids (S, …). A view where they are the first ones."""
    if weight is None or shared_ids is None:
        return weight
    return weight[:shared_ids] if isinstance(shared_ids, int) else weight.index_select(0, shared_ids)


def shared_columns(logits: Any, shared_ids: SharedIds) -> Any:
    """Logits (n, V) -> those of the shared ids (n, S)."""
    if logits is None or shared_ids is None:
        return logits
    return logits[:, :shared_ids] if isinstance(shared_ids, int) else logits.index_select(1, shared_ids)


def shared_targets(targets: torch.Tensor | None, shared_ids: SharedIds) -> torch.Tensor | None:
    """Token ids (N,) -> where they stand among the shared ids. Every target must be one of them."""
    if targets is None or not isinstance(shared_ids, torch.Tensor):
        return targets
    index = torch.searchsorted(shared_ids, targets)
    found = shared_ids[index.clamp(max=len(shared_ids) - 1)] == targets
    return torch.where(found, index, len(shared_ids))  # what is not shared points outside, where `gather` raises


def all_rows(gradient: Any, weight: Any, shared_ids: SharedIds) -> Any:
    """A gradient by shared rows (S, …) -> by all rows of `weight` (V, …), 0 for the others."""
    if gradient is None or shared_ids is None:
        return gradient
    whole = torch.zeros_like(weight, dtype=gradient.dtype)
    if isinstance(shared_ids, int):
        whole[:shared_ids] = gradient
        return whole
    return whole.index_copy_(0, shared_ids, gradient)
