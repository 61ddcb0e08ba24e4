"""Padding, and the strict checks on a batch while it is still on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..masking import check_batch, trained_positions
from ..types import IGNORE_INDEX, Rollout

POSITIONS = "trained_positions"  # the batch's key for its `TrainedPositions`
OFF_POLICY = "off_policy"  # for the positions in rows that the student did not write
NUM_ITEMS = "num_items_in_batch"  # for N, the trained tokens of the whole optimizer step
SAMPLED = "sampled_log_probs"  # for the log-probabilities that the tokens were sampled with
TEACHER = "teacher"  # for the batch that the teacher is shown in this one's place


@dataclass(frozen=True)
class CheckedCollator:
    """A collator that checks the mask rules on what `inner` made and notes where its trained tokens are.

    Raises `ValueError` naming row and position where a rule is broken and `strict` is set.
    """

    inner: Callable[[Sequence[Any]], dict[str, Any]]
    strict: bool = True
    note_positions: bool = True

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        batch = self.inner(rows)
        if isinstance(batch.get("labels"), torch.Tensor) and isinstance(batch.get("input_ids"), torch.Tensor):
            # position 0 has no label to learn; the loss never trains it either
            labels = batch["labels"].clone()
            labels[:, 0] = IGNORE_INDEX
            if self.strict:
                check_batch(batch["input_ids"], labels, batch.get("attention_mask"))
            if self.note_positions:
                batch[POSITIONS] = trained_positions(labels)
        return batch


def pad_rows(rows: Sequence[Mapping[str, Any]], pad_token_id: int, multiple_of: int | None = None) -> dict[str, Any]:
    """Rows with `input_ids` and `labels`, padded on the right to the longest.

    Returns `input_ids`, `attention_mask`, `labels` (B, T) and the `TrainedPositions` of the labels, all on the CPU.
    """
    longest = max(len(row["input_ids"]) for row in rows)
    if multiple_of:
        longest += -longest % multiple_of
    input_ids = torch.full((len(rows), longest), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for b, row in enumerate(rows):
        length = len(row["input_ids"])
        input_ids[b, :length] = torch.tensor(row["input_ids"])
        attention_mask[b, :length] = 1
        labels[b, :length] = torch.tensor(row["labels"])
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": labels,
        POSITIONS: trained_positions(labels),
    }


def pad_rollout(rollout: Rollout, indices: Sequence[int], pad_token_id: int, multiple_of: int | None) -> dict[str, Any]:
    """Some rows of a rollout as one micro-batch, as `pad_rows` does.

    `off_policy` (M,) int64 says which of its N trained positions stand in rows that the student did not write.
    `teacher` is the batch that the teacher is shown, where its prompts differ: its trained positions are the same
    tokens in the same order.
    """

    def padded(prompts: list[list[int]]) -> dict[str, Any]:
        rows = [
            {
                "input_ids": prompts[i] + rollout.completion_ids[i],
                "labels": [IGNORE_INDEX] * len(prompts[i]) + rollout.labels[i],
            }
            for i in indices
        ]
        return pad_rows(rows, pad_token_id, multiple_of)

    batch = padded(rollout.prompt_ids)
    off_policy = torch.tensor([not rollout.on_policy[i] for i in indices])
    batch[OFF_POLICY] = off_policy[batch[POSITIONS].rows].nonzero().squeeze(1)
    if rollout.teacher_prompt_ids is not None:
        batch[TEACHER] = padded(rollout.teacher_prompt_ids)
    return batch
