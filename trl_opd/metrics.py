"""Metrics kept as (sum, count) pairs on the device; they meet the other ranks, and the CPU, only when logged."""

from __future__ import annotations

from collections.abc import Callable

import torch


class MetricSums:
    """Sums and counts by logged name. Adding never synchronises the device."""

    def __init__(self) -> None:
        self._pairs: dict[str, torch.Tensor] = {}

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | int) -> None:
        """Add a sum () and how many values are in it."""
        total = total.detach().float()
        pair = torch.stack([total, torch.as_tensor(count, dtype=torch.float32, device=total.device)])
        self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def pop_means(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Means over all ranks since the last call, by name; a name without a value is left out.

        `gather` concatenates a (1, M, 2) tensor over the ranks; every rank must hold the same names.
        """
        if not self._pairs:
            return {}
        names = sorted(self._pairs)
        sums = gather(torch.stack([self._pairs[name] for name in names]).unsqueeze(0)).sum(0).tolist()  # (M, 2)
        self._pairs = {}
        return {name: total / count for name, (total, count) in zip(names, sums, strict=True) if count}
