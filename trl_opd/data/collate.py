"""Padding, and the strict checks on a batch while it is still on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..balance import longest_first, sizes_by_tokens
from ..masking import check_batch, trained_end, trained_positions
from ..types import IGNORE_INDEX, Rollout, RowSizes

POSITIONS = "trained_positions"  # the batch's key for its `TrainedPositions`
OFF_POLICY = "off_policy"  # for the positions in rows that the student did not write
NUM_ITEMS = "num_items_in_batch"  # for N, the trained tokens of the whole optimizer step
SAMPLED = "sampled_log_probs"  # for the log-probabilities that the tokens were sampled with
TEACHER = "teacher"  # for the batch that the teacher is shown in this one's place
AHEAD = "teacher_ahead"  # for its share of what the teacher is run on at once (`teachers.ahead.Share`)
ROWS = "collated_rows"  # for the rows that a batch was made of
SIZES = "row_sizes"  # for its `RowSizes`


@dataclass(frozen=True)
class CollatedRows:
    """The rows of a batch as they were before padding. Not a list, whose numbers would be taken for tensors to move."""

    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class CheckedCollator:
    """A collator that checks the mask rules on what `inner` made and notes where its trained tokens are.

    With `keep_rows` the batch holds its rows too, so that a window of batches can be `regrouped`. Raises `ValueError`
    naming row and position where a rule is broken and `strict` is set.
    """

    inner: Callable[[Sequence[Any]], dict[str, Any]]
    strict: bool = True
    note_positions: bool = True
    keep_rows: bool = False

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
                mask = batch.get("attention_mask")
                if mask is not None and mask.shape == labels.shape and bool((mask[:, 1:] <= mask[:, :-1]).all()):
                    trained = (labels != IGNORE_INDEX).sum(1)
                    batch[SIZES] = RowSizes(tuple(mask.sum(1).tolist()), tuple(trained.tolist()))
        if self.keep_rows:
            batch[ROWS] = CollatedRows(tuple(rows))
        return batch


def regrouped(
    batches: list[dict[str, Any]],
    collate: Callable[[Sequence[Any]], dict[str, Any]],
    merge: bool = False,
    flat: bool = False,
) -> list[dict]:
    """The rows of some batches in as many batches of the same sizes, sorted by length and padded anew, on the CPU.

    With `merge` they are cut by tokens (`sizes_by_tokens`), which with `flat` are run without the padding, and batches
    without a row come first.
    """
    rows = [row for batch in batches for row in batch[ROWS].rows]
    lengths = [max(len(row["input_ids"]), 1) for row in rows]  # a row that is empty is padded as well
    order = longest_first(range(len(rows)), lengths)
    sizes = [len(batch[ROWS].rows) for batch in batches]
    if merge:
        sizes = sizes_by_tokens([lengths[row] for row in order], sizes, flat)
    taken = iter(order)
    cut = [collate([rows[next(taken)] for _ in range(size)]) for size in sizes if size]
    return [without_rows(cut[0])] * sizes.count(0) + cut


def without_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with the tensors of this one and none of their rows: a micro-batch for which nothing is left to do."""
    return {key: value[:0] for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}


def pad_rows(rows: Sequence[Mapping[str, Any]], pad_token_id: int, multiple_of: int | None = None) -> dict[str, Any]:
    """Rows with `input_ids` and `labels`, padded on the right to the longest.

    Returns `input_ids`, `attention_mask`, `labels` (B, T), the `TrainedPositions` of the labels and the `RowSizes`, all
    on the CPU.
    """
    longest = max((len(row["input_ids"]) for row in rows), default=1)
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
        SIZES: RowSizes(
            tuple(len(row["input_ids"]) for row in rows),
            tuple((labels[:, 1:] != IGNORE_INDEX).sum(1).tolist()),
        ),
    }


def from_trl(batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A micro-batch as TRL's `DistillationTrainer` makes them, with `prompt_ids` and `prompt_mask` (B, P) padded on the
    left, `completion_ids` and `completion_mask` (B, C) on the right, as `pad_rows` gives them."""
    prompts, completions, trained = batch["prompt_ids"], batch["completion_ids"], batch["completion_mask"].bool()
    labels = torch.cat([torch.full_like(prompts, IGNORE_INDEX), completions.where(trained, IGNORE_INDEX)], dim=1)
    return {
        "input_ids": torch.cat([prompts, completions], dim=1),
        "attention_mask": torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        "labels": labels,
        POSITIONS: trained_positions(labels),
    }


def pad_rollout(rollout: Rollout, indices: Sequence[int], pad_token_id: int, multiple_of: int | None) -> dict[str, Any]:
    """Some rows of a rollout as one micro-batch, as `pad_rows` does.

    `off_policy` (M,) int64 says which of its N trained positions stand in rows that the student did not write.
    `teacher` is the batch that the teacher is shown, where its prompts differ: its trained positions are the same
    tokens in the same order. A row ends with its last trained token, since nothing after it is looked at; one without
    any, masked or a filler, is a single token.
    """

    def padded(prompts: list[list[int]]) -> dict[str, Any]:
        rows = []
        for i in indices:
            labels = [IGNORE_INDEX] * len(prompts[i]) + rollout.labels[i]
            end = max(trained_end(labels), 1)
            rows.append({"input_ids": (prompts[i] + rollout.completion_ids[i])[:end], "labels": labels[:end]})
        return pad_rows(rows, pad_token_id, multiple_of)

    batch = padded(rollout.prompt_ids)
    off_policy = [not rollout.on_policy[i] for i in indices]
    batch[OFF_POLICY] = torch.tensor(off_policy)[batch[POSITIONS].rows].nonzero().squeeze(1)
    batch[SIZES] = replace(batch[SIZES], off_policy=tuple(off_policy))
    if rollout.teacher_prompt_ids is not None:
        batch[TEACHER] = padded(rollout.teacher_prompt_ids)
    return batch
