"""Linear layers of a decoding step on a CPU, where the weights are read for a handful of tokens.

`F.linear` computes x Wᵀ; for 2 to 32 tokens the BLAS of a CPU reads W faster in W xᵀ (docs/speed.md has the figures).
The numbers are the same sums, rounded in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

MOST_TOKENS = 32


@contextmanager
def fast_on_few_tokens(model: nn.Module) -> Iterator[None]:
    """Within it, the model's fp32 linear layers on a CPU run 2 to 32 tokens as W xᵀ, where no gradient is taken.

    Layers whose forward something else has replaced, and sharded ones, are left alone.
    """
    changed = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and _is_plain(layer)]
    for layer in changed:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward  # the class has it


def _is_plain(layer: nn.Linear) -> bool:
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    weight = layer.weight.data
    return type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """(..., in) -> (..., out)."""
    tokens = x.shape[:-1].numel()
    if not 2 <= tokens <= MOST_TOKENS or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return linear(x, layer.weight, layer.bias)
    out = (layer.weight @ x.reshape(tokens, -1).t()).t()
    out = out.contiguous() if layer.bias is None else (out + layer.bias).contiguous()
    return out.reshape(*x.shape[:-1], -1)
