"""The order of rows: each once an epoch, whatever the number of processes, and the same after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from ..rollout import uniform
from ..types import IGNORE_INDEX

T = TypeVar("T")


class Slot(NamedTuple):
    """One place in a window of rows. `row` indexes the dataset; `weight` is 0 for a row that only fills the last
    window; `first` is false for the repeats of a window, one a further micro-batch, which bring no row; `draw` is the
    place's own number in [0, 1), for what is decided row by row."""

    row: int
    weight: int
    first: bool
    draw: float = 0.0


class WindowSampler(Sampler[Slot]):
    """Windows of `window` places, each yielded `repeats` times: for a rollout once to be written, then once a further
    micro-batch. Every row takes `copies` places beside each other.

    The order of epoch e is the permutation seeded with `seed + e`, cut into windows; the last one is filled with the
    epoch's first rows at weight 0. Nothing else decides it, so it does not depend on how many processes share a
    window, nor on where a run was stopped. `window` must be a multiple of `copies`. `ranks` and `steps` are how a
    window is used (see `by_rank`).
    """

    def __init__(
        self,
        data: Sized,
        *,
        window: int,
        repeats: int,
        seed: int,
        shuffle: bool = True,
        copies: int = 1,
        ranks: int = 1,
        steps: int = 1,
    ):
        assert window % copies == 0, f"a window of {window} places cannot hold whole groups of {copies}"
        self.num_rows, self.rows_a_window, self.copies, self.repeats = len(data), window // copies, copies, repeats
        self.seed, self.shuffle, self.epoch, self.ranks, self.steps = seed, shuffle, 0, ranks, steps

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        """The rows of this epoch in order, each once."""
        if not self.shuffle:
            return list(range(self.num_rows))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_rows, generator=generator).tolist()

    def __iter__(self) -> Iterator[Slot]:
        order = self.order()
        for start in range(0, len(order), self.rows_a_window):
            rows = [(row, 1) for row in order[start : start + self.rows_a_window]]
            rows += [(order[i % len(order)], 0) for i in range(self.rows_a_window - len(rows))]
            places = by_rank([(*row, copy) for row in rows for copy in range(self.copies)], self.ranks, self.steps)
            for repeat in range(self.repeats):
                for row, weight, copy in places:
                    yield Slot(row, weight, repeat == 0, uniform(self.seed, self.epoch, row, copy))

    def __len__(self) -> int:
        return -(-self.num_rows // self.rows_a_window) * self.rows_a_window * self.copies * self.repeats


def by_rank(window: Sequence[T], ranks: int, steps: int) -> list[T]:
    """A window for several optimizer steps in the order it is handed out in: all that the first rank gets, then the
    second. Each rank gets an equal part of every step, so that a step holds the same rows for any number of ranks.
    """
    size = len(window) // (ranks * steps)
    assert size * ranks * steps == len(window), f"a window of {len(window)} places for {ranks} ranks and {steps} steps"
    starts = [(step * ranks + rank) * size for rank in range(ranks) for step in range(steps)]
    return [place for start in starts for place in window[start : start + size]]


class PromptRows(Dataset):
    """Prompts looked up by `Slot`, with their weight and draw. A repeat's slot brings `None`: its rows are in the
    buffer."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, slot: Slot) -> dict[str, Any] | None:
        return {**self.rows[slot.row], "weight": slot.weight, "draw": slot.draw} if slot.first else None


class LabelledRows(Dataset):
    """Rows with `labels` looked up by `Slot`: a row of weight 0 has every label masked."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, slot: Slot) -> dict[str, Any]:
        return self.__getitems__([slot])[0]

    def __getitems__(self, slots: Sequence[Slot]) -> list[dict[str, Any]]:
        rows = self.rows.__getitems__([slot.row for slot in slots])
        return [
            row if slot.weight else {**row, "labels": [IGNORE_INDEX] * len(row["labels"])}
            for row, slot in zip(rows, slots, strict=True)
        ]


class PromptStream(IterableDataset):
    """The same windows over a streaming dataset, in the stream's own order."""

    def __init__(
        self, rows: Any, *, window: int, repeats: int, seed: int, copies: int = 1, ranks: int = 1, steps: int = 1
    ):
        self.rows, self.rows_a_window, self.repeats = rows, window // copies, repeats
        self.seed, self.copies, self.epoch, self.ranks, self.steps = seed, copies, 0, ranks, steps

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        held: list[dict[str, Any]] = []
        for number, row in enumerate(self.rows):
            held.append({**row, "weight": 1, "number": number})
            if len(held) == self.rows_a_window:
                yield from self._window(held)
                held = []
        if held:
            missing = self.rows_a_window - len(held)
            yield from self._window(held + [{**held[i % len(held)], "weight": 0} for i in range(missing)])

    def _window(self, held: list[dict[str, Any]]) -> Iterator[dict[str, Any] | None]:
        places = []
        for row in held:
            number = row.pop("number")
            places += [{**row, "draw": uniform(self.seed, self.epoch, number, copy)} for copy in range(self.copies)]
        yield from by_rank(places, self.ranks, self.steps)
        yield from [None] * (self.rows_a_window * self.copies * (self.repeats - 1))
