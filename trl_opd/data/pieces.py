"""A micro-batch in pieces of whole rows, each within a number of tokens. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from ..types import IGNORE_INDEX, RowSizes, TrainedPositions
from .collate import AHEAD, OFF_POLICY, POSITIONS, ROWS, SAMPLED, SIZES, TEACHER


def row_cuts(lengths: Sequence[int], max_tokens: int, flat: bool = False) -> list[tuple[int, int]]:
    """Stretches of rows, [first, end), whose number times their longest stays within `max_tokens`; with `flat`, whose
    lengths add up to no more.

    Rows keep their order. One that is longer by itself is a stretch of its own.
    """
    found = stretches([(1, length, length) for length in lengths], max_tokens, flat)
    return [(stretch[0], stretch[-1] + 1) for stretch in found]


def stretches(sizes: Sequence[Sequence[int]], max_tokens: int, flat: bool) -> list[list[int]]:
    """Numbers of rows, or of batches, that follow one another and have at most `max_tokens` together.

    `sizes` are the rows of each, its longest row, and its tokens. Together they are padded to the longest of them all,
    or with `flat` not at all. One that has more by itself is alone, and one without a row belongs to none.
    """
    found: list[list[int]] = []
    rows = longest = tokens = 0
    for i, (more_rows, length, more_tokens) in enumerate(sizes):
        if not more_rows:
            continue
        rows, longest, tokens = rows + more_rows, max(longest, length), tokens + more_tokens
        if found and (tokens if flat else rows * longest) <= max_tokens:
            found[-1].append(i)
        else:
            found.append([i])
            rows, longest, tokens = more_rows, length, more_tokens
    return found


def pieces(
    batch: dict[str, Any], max_tokens: int, multiple_of: int | None = None, flat: bool = False
) -> list[dict[str, Any]]:
    """A padded batch cut into batches of the same keys, each no wider than its longest row (and `multiple_of`); `flat`
    where they are run without padding.

    The trained positions of the pieces, one after the other, are those of the batch.
    """
    lengths: Sequence[int] = batch[SIZES].tokens
    if TEACHER in batch:
        lengths = [max(both) for both in zip(lengths, batch[TEACHER][SIZES].tokens, strict=True)]
    cuts = row_cuts(lengths, max_tokens, flat)
    return [batch] if len(cuts) == 1 else [_rows(batch, first, end, multiple_of) for first, end in cuts]


def joined(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Padded batches as one, as wide as the widest: what a model is run on, with the trained positions of one after the
    other."""
    wide = max(batch["input_ids"].size(1) for batch in batches)
    whole: dict[str, Any] = {}
    for key, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORE_INDEX)):
        whole[key] = torch.cat([pad(batch[key], (0, wide - batch[key].size(1)), value=filler) for batch in batches])
    sizes = [batch[SIZES] for batch in batches]
    names = ("tokens", "trained", "off_policy")
    whole[SIZES] = RowSizes(*(tuple(x for size in sizes for x in getattr(size, name)) for name in names))
    start = min(batch[POSITIONS].start for batch in batches)
    index, rows, first = [], [], 0
    for batch in batches:
        count, width = batch["input_ids"].shape
        at: TrainedPositions = batch[POSITIONS]
        columns = at.index % max(width - at.start, 1) + at.start - start
        index.append((at.rows + first) * (wide - start) + columns)
        rows.append(at.rows + first)
        first += count
    targets = torch.cat([batch[POSITIONS].targets for batch in batches])
    whole[POSITIONS] = TrainedPositions(start, torch.cat(index), torch.cat(rows), targets)
    return whole


def _rows(batch: dict[str, Any], first: int, end: int, multiple_of: int | None) -> dict[str, Any]:
    """The rows [first, end) of a batch."""
    sizes: RowSizes = batch[SIZES]
    (num_rows, wide), width = batch["input_ids"].shape, max(sizes.tokens[first:end])
    if multiple_of:
        width = min(width + -width % multiple_of, wide)
    tokens = slice(sum(sizes.trained[:first]), sum(sizes.trained[:end]))  # of the trained ones, those in these rows
    piece: dict[str, Any] = {}
    for key, value in batch.items():
        if key == POSITIONS:
            value = _positions(value, first, tokens, wide, width)
        elif key == SIZES:
            value = RowSizes(sizes.tokens[first:end], sizes.trained[first:end], sizes.off_policy[first:end])
        elif key == SAMPLED:
            value = value[tokens]
        elif key == AHEAD:
            value = value.part(tokens)
        elif key == OFF_POLICY:
            before, until = (_count_off_policy(sizes, rows) for rows in (first, end))
            value = value[before:until] - tokens.start
        elif key == TEACHER:
            value = _rows(value, first, end, multiple_of)
        elif key == ROWS:
            continue
        elif isinstance(value, torch.Tensor) and value.shape[:2] == (num_rows, wide):
            value = value[first:end, :width]
        piece[key] = value
    return piece


def _positions(positions: TrainedPositions, row: int, tokens: slice, wide: int, width: int) -> TrainedPositions:
    start = min(positions.start, max(width - 1, 1))  # rows without a label may be shorter than the first label is far
    rows, index = positions.rows[tokens] - row, positions.index[tokens]
    columns = index % max(wide - positions.start, 1)
    return TrainedPositions(start, rows * (width - start) + columns, rows, positions.targets[tokens])


def _count_off_policy(sizes: RowSizes, rows: int) -> int:
    """Trained tokens in the first so many rows that the student did not write."""
    return sum(n for n, off in zip(sizes.trained[:rows], sizes.off_policy[:rows], strict=True) if off)
