"""Losses as pure tensor functions: no model, no config, no logging."""

from .divergence import forward_kl, generalized_jsd, jensen_shannon, reverse_kl
from .fused import HeadTransform, chunked_module_loss, fused_linear_loss
from .reduce import global_mean, row_sums
from .reference import compute_prompt_length, sft_loss, token_divergence

__all__ = [
    "HeadTransform",
    "chunked_module_loss",
    "compute_prompt_length",
    "forward_kl",
    "fused_linear_loss",
    "generalized_jsd",
    "global_mean",
    "jensen_shannon",
    "reverse_kl",
    "row_sums",
    "sft_loss",
    "token_divergence",
]
