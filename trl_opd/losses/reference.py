"""The losses written as plainly as they can be: full logits, autograd, no trick. What the fast path must equal."""

from __future__ import annotations

import torch

from ..masking import check_batch
from ..types import IGNORE_INDEX
from .divergence import check_beta, generalized_jsd, log_probs


def compute_prompt_length(attention_mask: torch.Tensor, labels: torch.Tensor) -> int:
    """The batch minimum of real tokens before the first labelled one, over rows that have a label.

    `attention_mask` and `labels` are (B, T). A row `[pad, pad, 7, 8, [[9]]]` has 2, on whichever side it is padded.
    Raises `ValueError` where no token is trained.
    """
    trained = labels != IGNORE_INDEX
    _require_trained(trained)
    real_before = attention_mask.cumsum(1) - attention_mask  # (B, T) real tokens before each position
    first = trained.int().argmax(1, keepdim=True)  # (B, 1)
    lengths = real_before.gather(1, first).squeeze(1)
    return int(lengths[trained.any(1)].min())


def sft_loss(
    logits: torch.Tensor, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy over the trained tokens; `logits` (B, T, V) are shifted here, the rest is (B, T).

    Returns the loss () and the number of trained tokens (). With logits that give each of 4 tokens the same
    probability, the loss is ln 4 = 1.3863 whatever the labels.

    Raises `ValueError` where no token is trained, where nothing precedes a trained token, where padding is trained,
    and where a label is not its input token.
    """
    _require_trained(labels != IGNORE_INDEX)
    check_batch(input_ids, labels, attention_mask)
    targets = labels[:, 1:]
    trained = targets != IGNORE_INDEX
    log_p = log_probs(logits[:, :-1][trained])  # (N, V)
    nll = -log_p.gather(1, targets[trained].unsqueeze(1)).squeeze(1)
    return nll.mean(), trained.sum()


def token_divergence(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean divergence over the trained tokens. Logits (B, T, V) are already aligned to `labels` (B, T): no shift.

    The teacher gets no gradient. Returns the loss () and the number of trained tokens (). Raises `ValueError` where
    no token is trained and where `beta` is outside [0, 1].
    """
    check_beta(beta)
    trained = labels != IGNORE_INDEX
    _require_trained(trained)
    log_p = log_probs(student_logits[trained], temperature)  # (N, V)
    log_q = log_probs(teacher_logits[trained].detach(), temperature)
    per_token = generalized_jsd(log_p, log_q, beta)  # (N,)
    return per_token.mean(), trained.sum()


def _require_trained(trained: torch.Tensor) -> None:
    if not trained.any():
        raise ValueError(f"No token of this batch is trained: every label is {IGNORE_INDEX}.")
