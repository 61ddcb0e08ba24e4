"""Per-token divergences between two rows of log-probabilities, over the full vocabulary: (N, V) x 2 -> (N,).

p = softmax(student / τ), q = softmax(teacher / τ). Each `*_gradient` is the closed form of the function above it, with
respect to the student's logits over τ: (N, V). Computed in fp32, fp64 stays fp64. The numbers in the docstrings are for
p = (.5, .25, .25) and q = (.25, .25, .5).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Given = Tensor | None  # exp of the log-probabilities, where it is at hand

FLOOR = -1e4  # the least log-probability: what cannot be said has probability 0 all the same, and 0 · FLOOR is 0


def check_beta(beta: float) -> None:
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}; it must be in [0, 1]: 0 is forward KL, 1 reverse KL, between them JSD.")


def check_alpha(alpha: float) -> None:
    if not 0.0 <= alpha < 1.0:
        raise ValueError(
            f"skew_alpha is {alpha}; it must be in [0, 1): the share of the other distribution that is mixed in. 0 is "
            "the plain KL."
        )


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / τ) over the last dimension, at least in fp32, and at least `FLOOR`. Shape unchanged.

    A logit of −∞ (a masked id) becomes `FLOOR`: nothing below multiplies 0 with −∞. NaN stays NaN.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide if temperature == 1.0 else wide / temperature, dim=-1).clamp(min=FLOOR)


def forward_kl(log_p: Tensor, log_q: Tensor, *, p: Given = None, q: Given = None) -> Tensor:
    """KL(q‖p) = Σ q (log q − log p): .25·ln ½ + .5·ln 2 = .1733."""
    return (_exp(log_q, q) * (log_q - log_p)).sum(-1)


def forward_kl_gradient(log_p: Tensor, log_q: Tensor, *, p: Given = None, q: Given = None) -> Tensor:
    """p − q: (.25, 0, −.25). Bounded, whatever the two are."""
    return _exp(log_p, p) - _exp(log_q, q)


def reverse_kl(log_p: Tensor, log_q: Tensor, *, p: Given = None, q: Given = None) -> Tensor:
    """KL(p‖q) = Σ p (log p − log q): .5·ln 2 + .25·ln ½ = .1733. Unbounded where q → 0 on what p says."""
    return (_exp(log_p, p) * (log_p - log_q)).sum(-1)


def reverse_kl_gradient(log_p: Tensor, log_q: Tensor, *, p: Given = None, q: Given = None) -> Tensor:
    """p ⊙ (log p − log q − KL): (.5·.5199, .25·−.1733, .25·−.8664) = (.2599, −.0433, −.2166)."""
    return _pull_back(_exp(log_p, p), log_p - log_q)


def log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """log((1−β)p + βq), for 0 < β < 1. Shape unchanged."""
    return torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))


def jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float, *, p: Given = None, q: Given = None) -> Tensor:
    """β KL(q‖m) + (1−β) KL(p‖m), m = (1−β)p + βq (GKD, arXiv 2306.13649, Eq. 1, in TRL's convention of β).

    It tends to 0 as β → 0, while β = 0 itself is forward KL: β = .01 has a gradient about a hundred times smaller.
    With β = .5, m = (.375, .25, .375): .5·.0425 + .5·.0425 = .0425.
    """
    log_m = log_mixture(log_p, log_q, beta)
    return beta * forward_kl(log_m, log_q, q=q) + (1 - beta) * reverse_kl(log_p, log_m, p=p)


def jensen_shannon_gradient(log_p: Tensor, log_q: Tensor, beta: float, *, p: Given = None, q: Given = None) -> Tensor:
    """(1−β) p ⊙ (log p − log m − KL(p‖m)). With β = .5: .5·(.5·.2452, .25·−.0425, .25·−.4479)."""
    return _pull_back(_exp(log_p, p), log_p - log_mixture(log_p, log_q, beta)).mul_(1 - beta)


def generalized_jsd(log_p: Tensor, log_q: Tensor, beta: float = 1.0, *, p: Given = None, q: Given = None) -> Tensor:
    """The divergence that `beta` selects: 0 forward KL, 1 reverse KL, between them JSD. (..., V) x 2 -> (...).

    Raises `ValueError` where `beta` is outside [0, 1].
    """
    check_beta(beta)
    if beta == 0.0:
        return forward_kl(log_p, log_q, q=q)
    return reverse_kl(log_p, log_q, p=p) if beta == 1.0 else jensen_shannon(log_p, log_q, beta, p=p, q=q)


def generalized_jsd_gradient(
    log_p: Tensor, log_q: Tensor, beta: float = 1.0, *, p: Given = None, q: Given = None
) -> Tensor:
    """The gradient of the divergence that `beta` selects."""
    if beta == 0.0:
        return forward_kl_gradient(log_p, log_q, p=p, q=q)
    if beta == 1.0:
        return reverse_kl_gradient(log_p, log_q, p=p)
    return jensen_shannon_gradient(log_p, log_q, beta, p=p)


def skew_forward_kl(log_p: Tensor, log_q: Tensor, alpha: float, *, p: Given = None, q: Given = None) -> Tensor:
    """KL(q ‖ αq + (1−α)p) (DistiLLM, arXiv 2402.03898). At most ln 1/α. α = 0 is forward KL.

    With α = .5, the mixture is (.375, .25, .375): .25·ln ⅔ + .5·ln 4/3 = .0425.
    """
    return forward_kl(log_p if alpha == 0.0 else log_mixture(log_p, log_q, alpha), log_q, q=q)


def skew_forward_kl_gradient(log_p: Tensor, log_q: Tensor, alpha: float, *, p: Given = None, q: Given = None) -> Tensor:
    """p ⊙ (c − Σ p c) with c = −(1−α) q/m, m = αq + (1−α)p."""
    if alpha == 0.0:
        return forward_kl_gradient(log_p, log_q, p=p, q=q)
    ratio = (log_q - log_mixture(log_p, log_q, alpha)).exp_()  # q/m, at most 1/α
    return _pull_back(_exp(log_p, p), ratio).mul_(alpha - 1)


def skew_reverse_kl(log_p: Tensor, log_q: Tensor, alpha: float, *, p: Given = None, q: Given = None) -> Tensor:
    """KL(p ‖ (1−α)q + αp) (DistiLLM, arXiv 2402.03898). At most ln 1/α. α = 0 is reverse KL.

    With α = .5, the mixture is (.375, .25, .375): .5·ln 4/3 + .25·ln ⅔ = .0425.
    """
    return reverse_kl(log_p, log_q if alpha == 0.0 else log_mixture(log_p, log_q, 1 - alpha), p=p)


def skew_reverse_kl_gradient(log_p: Tensor, log_q: Tensor, alpha: float, *, p: Given = None, q: Given = None) -> Tensor:
    """p ⊙ (c − Σ p c) with c = log p − log m − α p/m, m = (1−α)q + αp."""
    if alpha == 0.0:
        return reverse_kl_gradient(log_p, log_q, p=p)
    log_ratio = log_p - log_mixture(log_p, log_q, 1 - alpha)  # log p/m, at most ln 1/α
    return _pull_back(_exp(log_p, p), log_ratio - log_ratio.exp().mul_(alpha))


def total_variation(log_p: Tensor, log_q: Tensor, *, p: Given = None, q: Given = None) -> Tensor:
    """½ Σ |p − q|: ½ (.25 + 0 + .25) = .25. In [0, 1]."""
    return 0.5 * (_exp(log_p, p) - _exp(log_q, q)).abs().sum(-1)


def total_variation_gradient(log_p: Tensor, log_q: Tensor, *, p: Given = None, q: Given = None) -> Tensor:
    """½ p ⊙ (s − Σ p s) with s = sign(p − q): s = (1, 0, −1), Σ p s = .25, so (.1875, −.0313, −.1563)."""
    return _pull_back(_exp(log_p, p), (log_p - log_q).sign_()).mul_(0.5)


def _pull_back(p: Tensor, cost: Tensor) -> Tensor:
    """p ⊙ (c − Σ p c): from the derivative c with respect to p (up to a constant) to that with respect to z/τ."""
    return (cost - (p * cost).sum(-1, keepdim=True)).mul_(p)


def _exp(log_probs: Tensor, probs: Given) -> Tensor:
    return log_probs.exp() if probs is None else probs
