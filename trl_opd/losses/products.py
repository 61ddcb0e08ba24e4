"""The fused head's three matrix products, with results in fp32 whatever the inputs' dtype.

Logits in bf16 have eight bits, and TRL's kernels note that rounding every partial product biases training. On a GPU the
product of low-precision inputs is asked for in fp32; a CPU has no such product, so a tile of the head at a time is
widened.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_TILE = 2048  # head rows that are widened at a time
_STRIP = 512  # head rows of a product on a CPU, (n, H) x (H, V): its result then stays in the cache


def project(states: torch.Tensor, head: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """(n, H), (V, H) -> logits (n, V), written into `out`."""
    if states.device.type != "cpu":
        return _wide_product(states, head.t(), out)
    states = states.to(out.dtype)
    for ids in _tiles(head.size(0), _STRIP):
        out[:, ids] = states @ head[ids].to(out.dtype).t()  # into `out` itself, whose rows lie far apart, is slower
    return out


def pull(gradient: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Gradient by the logits (n, V), head (V, H) -> by the states (n, H), in the gradient's dtype."""
    if head.dtype == gradient.dtype:
        return gradient @ head
    if gradient.device.type != "cpu":
        low, back = to_low_precision(gradient, head.dtype)
        return _wide_product(low, head, gradient.new_empty(gradient.size(0), head.size(1))).mul_(back)
    total = gradient.new_zeros(gradient.size(0), head.size(1))
    for ids in _tiles(head.size(0)):
        total.addmm_(gradient[:, ids], head[ids].to(gradient.dtype))
    return total


def accumulate(total: torch.Tensor, gradient: torch.Tensor, states: torch.Tensor) -> None:
    """`total` (V, H) += gradient (n, V)ᵀ · states (n, H), in the dtype of `total`."""
    if states.dtype == total.dtype or states.device.type == "cpu":
        total.addmm_(gradient.t(), states.to(total.dtype))
        return
    low, back = to_low_precision(gradient, states.dtype)
    for ids in _tiles(total.size(0), 16 * _TILE):  # a strip at a time: no second (V, H)
        part = total[ids]
        part += _wide_product(low[:, ids].t(), states, torch.empty_like(part)).mul_(back)


def to_low_precision(gradient: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | float]:
    """A gradient in `dtype`, and what its products must be multiplied with.

    fp16 ends at 6e-8, where a divergence's gradients are: a power of two brings the largest near 1 first. No wait for
    the device.
    """
    if dtype != torch.float16:
        return gradient.to(dtype), 1.0
    largest = gradient.abs().amax() if gradient.numel() else gradient.new_zeros(())
    exponent = torch.where(largest > 0, largest.log2().floor(), 0.0).clamp(min=-100.0)
    return (gradient * torch.exp2(-exponent)).to(dtype), torch.exp2(exponent)


def _wide_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a @ b)


def _tiles(rows: int, tile: int = _TILE) -> Iterator[slice]:
    for start in range(0, rows, tile):
        yield slice(start, min(start + tile, rows))
