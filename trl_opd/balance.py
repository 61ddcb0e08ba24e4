"""Which rows share a micro-batch: those of about one length, so that little of it is padding, and as many as fit.

Rows never move between optimizer steps, and the denominator is the whole step's, so no gradient changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .masking import trained_end
from .types import Rollout

# What a pass costs besides its tokens, in tokens. On a CPU, with 135 million parameters, the products of a micro-batch
# of n tokens took the time of n + 106. Not measured on a GPU.
PASS_TOKENS = 128


def micro_batches(
    lengths: Sequence[int],
    parts: int,
    *,
    steps: int = 1,
    balance: bool = True,
    merge: bool = False,
    flat: bool = False,
) -> list[list[int]]:
    """Row indices of a window cut into `parts` micro-batches of the same number of rows.

    The window holds `steps` optimizer steps, one after the other. With `balance` the rows of each are sorted by
    `lengths`, the longest in front, so that what runs out of memory does so at once; else they stay in order. With
    `merge` those of a balanced step are then cut by tokens (`sizes_by_tokens`), which with `flat` are run unpadded.
    """
    cut: list[list[int]] = []
    for step in _equal_parts(range(len(lengths)), steps):
        rows = longest_first(step, lengths) if balance else step
        sizes = [len(rows) * steps // parts] * (parts // steps)
        if balance and merge:
            sizes = sizes_by_tokens([lengths[row] for row in rows], sizes, flat)
        taken = iter(rows)
        cut += [[next(taken) for _ in range(size)] for size in sizes]
    return cut


def sizes_by_tokens(lengths: Sequence[int], sizes: Sequence[int], flat: bool = False) -> list[int]:
    """How many rows, the longest first, each micro-batch takes in the place of `sizes`; empty ones come first.

    None has more tokens than the largest one has, padded. Within this they are the cut that takes the least time, where
    a pass costs `PASS_TOKENS` besides its tokens: few full ones in the place of many short ones. Padding counts, but
    with `flat`, where rows stand end to end.
    """
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    most = max(size * lengths[start] for start, size in zip(starts, sizes, strict=True))
    pass_tokens = PASS_TOKENS
    while len(found := _cheapest(lengths, most, pass_tokens, flat)) > len(sizes):
        pass_tokens *= 2
    return [0] * (len(sizes) - len(found)) + found


def _cheapest(lengths: Sequence[int], most: int, pass_tokens: int, flat: bool) -> list[int]:
    """Sizes of the stretches of sorted rows whose tokens and passes cost least, each within `most` tokens; of those
    that cost the same, the ones whose largest is smallest."""
    count = len(lengths)
    before = [0, *accumulate(lengths)]
    best = [(0, 0)] * (count + 1)  # cost, and tokens of the largest stretch, of the best cut of the rows from here on
    ends = [0] * count
    for first in reversed(range(count)):
        choices = []
        for end in range(first + 1, count + 1):
            tokens = before[end] - before[first] if flat else (end - first) * lengths[first]
            if tokens > most:
                break
            cost, largest = best[end]
            choices.append(((pass_tokens + tokens + cost, max(tokens, largest)), end))
        best[first], ends[first] = min(choices)
    sizes, first = [], 0
    while first < count:
        sizes.append(ends[first] - first)
        first = ends[first]
    return sizes


def deal(shares: Sequence[Rollout], rank: int, steps: int) -> Rollout:
    """One rank's rows of a window, after the rows of all ranks were sorted by length, step by step, and dealt out.

    Without it a rank with long rows keeps the others waiting. `shares` are the ranks' rows, the same number each.
    """
    each = len(shares[0].completion_ids)
    lengths = [length for share in shares for length in row_lengths(share)]
    own: list[int] = []
    for step in _equal_parts(range(each), steps):
        rows = [r * each + row for r in range(len(shares)) for row in step]
        own += longest_first(rows, lengths)[rank :: len(shares)]

    def picked(name: str) -> list:
        column = [row for share in shares for row in getattr(share, name)]
        return [column[row] for row in own]

    columns = ("prompt_ids", "completion_ids", "labels", "weights", "on_policy")
    shown = None if shares[0].teacher_prompt_ids is None else picked("teacher_prompt_ids")
    return Rollout(**{name: picked(name) for name in columns}, teacher_prompt_ids=shown)


def row_lengths(rollout: Rollout) -> list[int]:
    """Tokens of each row that the models run on (`pad_rollout`): the teacher's too, where its prompts are others."""
    lengths = [trained_end(labels) for labels in rollout.labels]
    tokens = [len(prompt) + length if length else 1 for prompt, length in zip(rollout.prompt_ids, lengths, strict=True)]
    if rollout.teacher_prompt_ids is None:
        return tokens
    shown = zip(tokens, rollout.teacher_prompt_ids, lengths, strict=True)
    return [mine + (len(prompt) + length if length else 1) for mine, prompt, length in shown]


def longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Rows sorted by their entry in `lengths`; those of one length stay in order."""
    return sorted(rows, key=lambda row: -lengths[row])


def _equal_parts(rows: Sequence[int], parts: int) -> list[list[int]]:
    size = len(rows) // parts
    assert size * parts == len(rows), f"{len(rows)} rows cannot be cut into {parts} equal parts"
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]
