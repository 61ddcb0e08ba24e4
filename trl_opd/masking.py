"""The strict mask rules: which tokens are trained, which positions predict them, and what may never happen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .types import IGNORE_INDEX, TrainedPositions


def trained_positions(labels: torch.Tensor) -> TrainedPositions:
    """Find the trained tokens of `labels` (B, T) and the hidden states that predict them.

    Labels are not shifted: `labels[b, t]` is the token at `t`, predicted by the hidden state at `t - 1`. Position 0 is
    never trained, since nothing predicts it. Works on any device, but only on the CPU without a synchronisation.
    """
    mask = labels != IGNORE_INDEX
    mask[:, 0] = False
    rows, columns = mask.nonzero(as_tuple=True)
    start = int(columns.min()) if len(columns) else max(labels.size(1) - 1, 1)
    index = rows * (labels.size(1) - start) + (columns - start)
    return TrainedPositions(start=start, index=index, rows=rows, targets=labels[rows, columns])


def select_predicting(hidden: torch.Tensor, positions: TrainedPositions) -> torch.Tensor:
    """Slice off the untrained prompt, then keep the states that predict a trained token: (B, T, H) -> (N, H)."""
    sliced = hidden[:, positions.start - 1 : hidden.size(1) - 1]
    return sliced.flatten(0, 1).index_select(0, positions.index)


def trained_end(labels: Sequence[int]) -> int:
    """How many tokens of a row (T,) a loss looks at: up to its last trained one; 0 where none is."""
    return next((t + 1 for t in range(len(labels) - 1, -1, -1) if labels[t] != IGNORE_INDEX), 0)


def check_batch(input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raise `ValueError`, naming row and position, where a (B, T) batch breaks a mask rule.

    The rules: a label equals its input token; padding is never trained; a real token precedes every trained one.
    """
    trained = labels != IGNORE_INDEX
    _refuse(trained & (labels != input_ids), labels, "the label is {label} but the input token is another one")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    _refuse(trained & (attention_mask == 0), labels, "token {label} is padding (attention mask 0) but is trained")
    real_before = attention_mask.cumsum(1) - attention_mask
    _refuse(trained & (real_before == 0), labels, "token {label} is trained but no real token precedes it")


def _refuse(bad: torch.Tensor, labels: torch.Tensor, why: str) -> None:
    if bad.any():
        row, position = (int(x) for x in bad.nonzero()[0])
        raise ValueError(
            f"Row {row}, position {position} of the batch: {why.format(label=int(labels[row, position]))}. "
            f"Mask it with {IGNORE_INDEX} in `labels`, or set `strict_masks: false` to train it all the same."
        )
