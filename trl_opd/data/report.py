"""What happened to the rows of a dataset, counted: nothing is dropped or cut without the user seeing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

QUANTILES = (0, 50, 90, 99, 100)


def quantiles(values: Sequence[int]) -> dict[str, int]:
    """The values at 0, 50, 90, 99 and 100 percent, each one that occurs (nearest rank)."""
    ordered = sorted(values)
    return {f"{q}%": ordered[max(-(-q * len(ordered) // 100) - 1, 0)] for q in QUANTILES} if ordered else {}


@dataclass
class MaskReport:
    """Counts over one dataset.

    `rows` were read, `kept` are used; `dropped` counts by reason. Of the kept: `cut` were shortened to `max_length` (at
    their beginning where `cut_keeps_end`),
    `cut_prompts` to `max_prompt_length` from the left, `without_stop` end what they train without a stop token,
    `normalized` had whitespace changed by the template. `lengths` are quantiles in tokens; `longest` that of what
    stands beside a prompt (`teacher`: the prompt it is shown, `reference`: the row with its own completion); `rules`
    counts how trained spans were found.
    """

    name: str
    streamed: bool = False
    rows: int = 0
    kept: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    cut: int = 0
    cut_keeps_end: bool = False
    cut_prompts: int = 0
    without_stop: int = 0
    normalized: int = 0
    template: str = ""
    train_on: str = ""
    dropped: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    lengths: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The report as a person reads it, one fact a line."""
        if self.streamed:
            return [f"{self.name}: streamed, each row checked as it is read"]
        share = f"{self.trained_tokens:,} of {self.tokens:,} tokens trained" if self.tokens else "prompts only"
        if self.tokens:
            share += f" ({self.trained_tokens / self.tokens:.1%})"
        lines = [f"{self.name}: {self.rows:,} rows read, {self.kept:,} kept, {share}"]
        if self.lengths:
            lines.append(f"{self.name}: tokens a row: " + ", ".join(f"{q} {n:,}" for q, n in self.lengths.items()))
        return lines + self.warnings()

    def warnings(self) -> list[str]:
        """What was not used as it came, one line each."""
        counts = [(n, f"dropped: {reason}") for reason, n in self.dropped.most_common()]
        counts += [
            (self.cut_prompts, "cut at max_prompt_length: the model sees the end of their prompt"),
            (
                self.cut,
                f"cut at max_length: they {'begin later' if self.cut_keeps_end else 'end without a stop token'}",
            ),
            (
                self.without_stop - (0 if self.cut_keeps_end else self.cut),
                "without a stop token: the template or tokenizer has none to train",
            ),
            (self.normalized, "with whitespace changed by the chat template in what is trained"),
        ]
        return [f"{self.name}: {n:,} rows {what}" for n, what in counts if n > 0]

    def as_dict(self) -> dict[str, Any]:
        """The report as `mask_report.json` holds it."""
        share = self.trained_tokens / self.tokens if self.tokens else None
        return {**self.__dict__, "dropped": dict(self.dropped), "rules": dict(self.rules), "trained_share": share}
