"""What happened to the rows of a dataset, counted: nothing is dropped or cut without the user seeing it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class DataReport:
    """Counts over one dataset. `rows` were read; `dropped` counts by reason; `cut` were shortened to `max_length`."""

    name: str
    streamed: bool = False
    rows: int = 0
    kept: int = 0
    cut: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The report as a person reads it, one fact a line."""
        if self.streamed:
            return [f"{self.name}: streamed, each row checked as it is read"]
        share = f"{self.trained_tokens:,} of {self.tokens:,} tokens trained" if self.tokens else "prompts only"
        lines = [f"{self.name}: {self.rows:,} rows read, {self.kept:,} kept, {share}"]
        lines += [f"{self.name}: {n:,} rows dropped: {reason}" for reason, n in self.dropped.most_common()]
        if self.cut:
            lines.append(f"{self.name}: {self.cut:,} rows cut at max_length, so they end without a stop token")
        return lines
