"""Weights and gradients that are not finite, by name."""

from __future__ import annotations

from torch import nn

_SHOWN = 5


def nonfinite_parameters(model: nn.Module, gradients: bool = False) -> dict[str, tuple[int, int]]:
    """How many numbers of each parameter (or of its gradient) are not finite, and of how many; finite ones left out."""
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.grad if gradients else parameter
        if values is None or not values.is_floating_point():  # quantised ones have a meaning of their own
            continue
        bad = int((~values.detach().isfinite()).sum())
        if bad:
            found[name] = (bad, values.numel())
    return found


def listed(found: dict[str, tuple[int, int]]) -> str:
    """`name: 3 of 1,024 numbers`, the first few."""
    lines = [f"{name}: {bad:,} of {total:,} numbers" for name, (bad, total) in list(found.items())[:_SHOWN]]
    more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "\n".join(lines + more)
