"""Per-token divergences between two rows of logits, over the full vocabulary: (N, V) x 2 -> (N,).

p = softmax(student / τ), q = softmax(teacher / τ). Logits are computed on in fp32 (fp64 stays fp64).
"""

from __future__ import annotations

import math

import torch


def check_beta(beta: float) -> None:
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; it must be in [0, 1]: 0 is forward KL, 1 reverse KL, between them JSD.")


def log_probs(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log softmax(logits / τ) over the last dimension, at least in fp32. Shape unchanged."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide / temperature, dim=-1)


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(q‖p) = Σ q (log q − log p). With p = (.5, .25, .25), q = (.25, .25, .5): .25·ln ½ + .5·ln 2 = .1733."""
    return _expectation(log_q, log_q - log_p)


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p‖q) = Σ p (log p − log q). With p = (.5, .25, .25), q = (.25, .25, .5): .5·ln 2 + .25·ln ½ = .1733."""
    return _expectation(log_p, log_p - log_q)


def log_mixture(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    """log((1−β)p + βq), for 0 < β < 1. Shape unchanged."""
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def jensen_shannon(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    """β KL(q‖m) + (1−β) KL(p‖m), m = (1−β)p + βq (GKD, arXiv 2306.13649, Eq. 1, in TRL's convention of β).

    It tends to 0 as β → 0, while β = 0 itself is forward KL: β = .01 has a gradient about a hundred times smaller.
    """
    log_m = log_mixture(log_p, log_q, beta)
    return beta * _expectation(log_q, log_q - log_m) + (1 - beta) * _expectation(log_p, log_p - log_m)


def generalized_jsd(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, beta: float = 1.0, temperature: float = 1.0
) -> torch.Tensor:
    """The divergence that `beta` selects: 0 forward KL, 1 reverse KL, between them JSD. (..., V) x 2 -> (...).

    Raises `ValueError` where `beta` is outside [0, 1].
    """
    check_beta(beta)
    log_p, log_q = log_probs(student_logits, temperature), log_probs(teacher_logits, temperature)
    if beta == 0.0:
        return forward_kl(log_p, log_q)
    if beta == 1.0:
        return reverse_kl(log_p, log_q)
    return jensen_shannon(log_p, log_q, beta)


def _expectation(log_weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    weight = log_weight.exp()
    return (weight * value.masked_fill(weight == 0, 0.0)).sum(-1)  # 0 · (−inf) counts as 0, in the gradient too
