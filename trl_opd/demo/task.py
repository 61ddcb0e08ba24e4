"""Two-digit addition with the work written out, units first: `97+46=` -> `7+6+0=13,9+4+1=14,143`."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_COMPLETION_TOKENS = 25  # a right one has 22, the stop token among them


@dataclass(frozen=True)
class Problem:
    """One sum of two numbers below 100."""

    x: int
    y: int

    @property
    def prompt(self) -> str:
        return f"{self.x:02d}+{self.y:02d}="

    @property
    def answer(self) -> str:
        return f"{self.x + self.y:03d}"

    @property
    def completion(self) -> str:
        """Column by column with the carry, then the answer."""
        steps, carry = [], 0
        for a, b in ((self.x % 10, self.y % 10), (self.x // 10, self.y // 10)):
            total = a + b + carry
            steps.append(f"{a}+{b}+{carry}={total:02d}")
            carry = total // 10
        return ",".join([*steps, self.answer])

    def is_right(self, completion: str) -> bool:
        """Whether what follows the last comma is the answer; the work is not graded."""
        return completion.rsplit(",", 1)[-1] == self.answer


def split_problems(seed: int, held_out: int) -> tuple[list[Problem], list[Problem]]:
    """All 10,000 problems in a seeded order: (held out, for training), with nothing in common."""
    problems = [Problem(x, y) for x in range(100) for y in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[:held_out], problems[held_out:]
