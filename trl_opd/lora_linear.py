"""LoRA on a linear layer in fewer passes: scaling and sums are done inside the matrix products.

peft computes x Wᵀ + s · (x Aᵀ) Bᵀ with a product, a product, a scaled copy and a sum of the whole output, and autograd
scales and adds up as much again. Here the second product adds into the first, forward and backward. The numbers are the
same sums, rounded less often.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn
from torch.autograd.function import once_differentiable


def use_lora_linear(model: nn.Module) -> int:
    """Let the model's LoRA layers run as `LoraLinear`, and return how many there are. Names and weights stay."""
    layers = [module for module in model.modules() if type(module) is Linear]
    for layer in layers:
        layer.__class__ = LoraLinear
    return len(layers)


class LoraLinear(Linear):
    """peft's LoRA layer, which adds up inside its products where one plain adapter on a plain, frozen layer is all that
    there is to compute, in one dtype; as peft does in all other cases."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        adapter = None if args or kwargs else self._only_adapter(x)
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        base, a, b = self.base_layer, self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return _LoraLinear.apply(x, base.weight, base.bias, a, b, self.scaling[adapter])

    def _only_adapter(self, x: torch.Tensor) -> str | None:
        """The adapter's name, where the layer is x Wᵀ + bias + s · (x Aᵀ) Bᵀ and nothing else."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if len(names) != 1 or self.disable_adapters or self.merged or names[0] in self.lora_variant:
            return None
        base, a, b, dropout = self.base_layer, self.lora_A[names[0]], self.lora_B[names[0]], self.lora_dropout[names[0]]
        drops = dropout.training and not isinstance(dropout, nn.Identity)
        if (
            drops
            or not all(_is_plain(layer, x.dtype) for layer in (base, a, b))
            or torch.is_autocast_enabled(x.device.type)
        ):
            return None
        frozen = all(not parameter.requires_grad for parameter in base.parameters())
        return names[0] if frozen and a.bias is None and b.bias is None else None


def _is_plain(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether calling it is its product and nothing else: no hook, no other forward, no weight that is a shard."""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or layer.weight.dtype != dtype:
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer.weight.data) is torch.Tensor and not any(hooks)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scaling):  # type: ignore[override]
        rows = x.reshape(-1, x.size(-1))
        low = rows @ a.t()  # (N, r)
        out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
        out.addmm_(low, b.t(), alpha=scaling)
        ctx.save_for_backward(rows, weight, a, b, low)
        ctx.scaling = scaling
        return out.view(*x.shape[:-1], out.size(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[override]
        rows, weight, a, b, low = ctx.saved_tensors
        grad = gradient.reshape(-1, gradient.size(-1))
        of_x, _, _, of_a, of_b, _ = ctx.needs_input_grad
        grad_low = (grad @ b).mul_(ctx.scaling)  # (N, r)
        grad_x = None
        if of_x:
            grad_x = (grad @ weight).addmm_(grad_low, a).view(*gradient.shape[:-1], a.size(1))
        grad_a = grad_low.t() @ rows if of_a else None
        grad_b = (grad.t() @ low).mul_(ctx.scaling) if of_b else None
        return grad_x, None, None, grad_a, grad_b, None
