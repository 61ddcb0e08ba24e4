"""Which rows share a micro-batch: those of about one length, so that little of it is padding.

Rows never move between optimizer steps, and the denominator is the whole step's, so no gradient changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .masking import trained_end
from .types import Rollout


def micro_batches(lengths: Sequence[int], parts: int, *, steps: int = 1, balance: bool = True) -> list[list[int]]:
    """Row indices of a window cut into `parts` micro-batches of the same number of rows.

    The window holds `steps` optimizer steps, one after the other. With `balance` the rows of each are sorted by
    `lengths`, the longest in front, so that what runs out of memory does so at once; else they stay in order.
    """
    order = list(range(len(lengths)))
    if balance:
        order = [row for step in _equal_parts(order, steps) for row in longest_first(step, lengths)]
    return _equal_parts(order, parts)


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
