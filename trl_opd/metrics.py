"""Metrics kept as sums and counts on the device; they meet the other ranks, and the CPU, only when logged."""

from __future__ import annotations

from collections.abc import Callable

import torch

QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
# Borders of the histograms that quantiles are read from: .0005 apart near 0, 5% apart further out, up to ±40
_BORDERS = torch.sinh(torch.linspace(-9.0, 9.0, 361, dtype=torch.float64)).mul_(0.01).float()


def on_device(number: torch.Tensor | int, like: torch.Tensor) -> torch.Tensor:
    """A number as a () tensor with the dtype and the device of another; one of Python's is written there by a kernel,
    since copying it would wait for all that the device has to do."""
    return number.to(like) if isinstance(number, torch.Tensor) else like.new_full((), number)


class MetricSums:
    """Sums and counts by logged name. Adding never synchronises the device."""

    def __init__(self) -> None:
        self._rows: dict[str, torch.Tensor] = {}  # (sum, count), and for a spread also the squares and a histogram
        self._borders_there: torch.Tensor | None = None

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | int) -> None:
        """Add a sum () and how many values are in it."""
        total = total.detach().float()
        self._add(name, torch.stack([total, on_device(count, total)]))

    def add_spread(self, name: str, values: torch.Tensor) -> None:
        """Add values (N,) of which variance and quantiles are logged too, as `<name>_variance`, `<name>_p05`, …"""
        values = values.detach().float()
        borders = self._borders(values.device)
        histogram = values.new_zeros(len(borders) + 1)
        histogram.index_add_(0, torch.bucketize(values, borders), torch.ones_like(values))
        count = on_device(values.numel(), values)
        self._add(name, torch.cat([torch.stack([values.sum(), count, values.square().sum()]), histogram]))

    def _borders(self, device: torch.device) -> torch.Tensor:
        if self._borders_there is None or self._borders_there.device != device:
            self._borders_there = _BORDERS.to(device)
        return self._borders_there

    def _add(self, name: str, row: torch.Tensor) -> None:
        self._rows[name] = self._rows[name] + row if name in self._rows else row

    def rows(self) -> dict[str, torch.Tensor]:
        """What has been added since the last `pop_means`, for `restore`."""
        return dict(self._rows)

    def restore(self, rows: dict[str, torch.Tensor]) -> None:
        """Go on from what `rows()` gave."""
        self._rows = dict(rows)

    def pop_means(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Means over all ranks since the last call, by name; a name without a value is left out.

        `gather` concatenates a (1, M) tensor over the ranks; every rank must hold the same names.
        """
        if not self._rows:
            return {}
        names = sorted(self._rows)
        widths = [self._rows[name].numel() for name in names]
        flat = torch.cat([self._rows[name] for name in names]).unsqueeze(0)
        rows = gather(flat).double().sum(0).cpu().split(widths)
        self._rows = {}
        logged: dict[str, float] = {}
        for name, row in zip(names, rows, strict=True):
            total, count = row[:2].tolist()
            if not count:
                continue
            logged[name] = total / count
            if len(row) > 2:
                logged[f"{name}_variance"] = max(float(row[2]) / count - (total / count) ** 2, 0.0)
                logged |= {f"{name}_{label}": _quantile(row[3:], share) for label, share in QUANTILES.items()}
        return logged


def _quantile(histogram: torch.Tensor, share: float) -> float:
    """The middle of the bin that holds the quantile; an outermost bin gives its border."""
    index = int(torch.searchsorted(histogram.cumsum(0), share * histogram.sum()))
    low, high = max(index - 1, 0), min(index, len(_BORDERS) - 1)
    return float(_BORDERS[low] + _BORDERS[high]) / 2
