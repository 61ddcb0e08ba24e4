"""The teacher's own micro-batches: it scores several of the student's at once, when the first of them is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..data.collate import POSITIONS
from ..data.pieces import joined
from ..heads import Head

States = tuple[torch.Tensor, Head]
Run = Callable[[dict[str, Any]], States]


class Ahead:
    """Micro-batches that the teacher is run on at once, when the first of them asks."""

    def __init__(self, batches: Sequence[dict[str, Any]]):
        self._batches = batches
        self._states: States | None = None

    def states(self, run: Run) -> States:
        """States of all trained positions, one micro-batch after the other, and the head."""
        if self._states is None:
            self._states, self._batches = run(joined(self._batches)), ()
        return self._states


@dataclass(frozen=True)
class Share:
    """The trained positions of one micro-batch, or of a piece of it, among those of an `Ahead`."""

    ahead: Ahead
    positions: slice

    def part(self, positions: slice) -> Share:
        """These of its positions."""
        start = self.positions.start
        return Share(self.ahead, slice(start + positions.start, start + positions.stop))

    def states(self, run: Run) -> States:
        """The states (N, H') of these positions, and the head."""
        hidden, head = self.ahead.states(run)
        return hidden[self.positions], head


def shares(batches: Sequence[dict[str, Any]], stretches: Sequence[Sequence[int]]) -> dict[int, Share]:
    """The `Share` of every micro-batch, by its number, of these stretches of a step's micro-batches."""
    found: dict[int, Share] = {}
    for stretch in stretches:
        ahead, start = Ahead([batches[i] for i in stretch]), 0
        for i in stretch:
            end = start + len(batches[i][POSITIONS])
            found[i], start = Share(ahead, slice(start, end)), end
    return found
