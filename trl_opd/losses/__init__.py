"""Losses as pure tensor functions: no model, no config, no logging."""

from .divergence import (
    forward_kl,
    generalized_jsd,
    jensen_shannon,
    log_probs,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
    total_variation,
)
from .fused import HeadTransform, chunked_module_loss, fused_linear_loss
from .objectives import OBJECTIVES, Block, Settings, divergence_objective
from .policy_gradient import importance_ratio, score_function_loss, token_reward
from .reduce import global_mean, row_sums
from .reference import compute_prompt_length, sft_loss, token_divergence
from .sparse import bucket_log_probs, top_k_support, union_support

__all__ = [
    "OBJECTIVES",
    "Block",
    "HeadTransform",
    "Settings",
    "bucket_log_probs",
    "chunked_module_loss",
    "compute_prompt_length",
    "divergence_objective",
    "forward_kl",
    "fused_linear_loss",
    "generalized_jsd",
    "global_mean",
    "importance_ratio",
    "jensen_shannon",
    "log_probs",
    "reverse_kl",
    "row_sums",
    "score_function_loss",
    "sft_loss",
    "skew_forward_kl",
    "skew_reverse_kl",
    "token_divergence",
    "token_reward",
    "top_k_support",
    "total_variation",
    "union_support",
]
