"""Divergences over a support of k ids and one bucket that holds all the others.

The tail's log-probability is a logsumexp over the complement of the support, taken where the whole row is at hand:
log(1 − Σ support) is lost to rounding in fp32. Over the buckets a divergence is at least 0 and at most the full one,
and equal to it where the support is everything.
"""

from __future__ import annotations

import torch

from .divergence import FLOOR

EMPTY = FLOOR  # the log-probability of an empty bucket, for both sides alike, so that it adds 0 · (a − a) = 0


def top_k_support(log_q: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely ids of each row: (n, V) -> ids (n, k) int64, valid (n, k) bool, all true."""
    ids = log_q.topk(min(k, log_q.size(1)), dim=1).indices
    return ids, torch.ones_like(ids, dtype=torch.bool)


def union_support(log_p: torch.Tensor, log_q: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely ids of either side: (n, V) x 2 -> ids (n, 2k) int64, valid (n, 2k) bool: the first of twins.

    An id that the student prefers is always in its own bucket, so no mass can hide in the tail.
    """
    ids = torch.cat([top_k_support(log_p, k)[0], top_k_support(log_q, k)[0]], dim=1).sort(dim=1).values
    valid = torch.ones_like(ids, dtype=torch.bool)
    valid[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return ids, valid


def bucket_log_probs(log_p: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the support's ids and, last, of all the others together: (n, V) -> (n, k + 1).

    With p = (.5, .25, .25) and the support {0}: (ln .5, ln .5).
    """
    support = log_p.gather(1, ids).masked_fill(~valid, EMPTY)
    tail = log_p.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([support, tail.clamp(min=EMPTY)], dim=1)


def spread_gradient(
    bucket_gradient: torch.Tensor, buckets: torch.Tensor, log_p: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """From the gradient by bucket logits (n, k + 1) to that by z/τ (n, V): a bucket's share goes to its ids.

    The tail's goes to its ids in proportion to their probability within it. `buckets` is `bucket_log_probs(log_p, …)`.
    """
    tail = buckets[:, -1:]
    # an empty tail has nothing to share out; the exponent is then of ids that the support overwrites
    gradient = (log_p - tail).clamp_(max=0.0).exp_().mul_(bucket_gradient[:, -1:])
    gradient.scatter_(1, ids, 0.0)
    return gradient.scatter_add_(1, ids, bucket_gradient[:, :-1] * valid)
