"""A whole dataset, prepared by policy: every row read, tokenized, measured and counted before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from ..types import IGNORE_INDEX
from .report import DataReport
from .rows import BadRow, DatasetError, dataset_kind, read_prompt, read_row
from .tokenize import Tokenization

BAD_ROWS = ("error", "drop")
OVERFLOW = ("error", "drop", "cut")
_SHOWN = 5


@dataclass(frozen=True)
class RowPolicy:
    """What to do with rows that cannot be trained (`bad_rows`) and with rows longer than `max_length` (`overflow`)."""

    max_length: int | None = None
    bad_rows: str = "error"
    overflow: str = "error"
    text_field: str = "text"


def prepare_sft(
    dataset: Dataset | IterableDataset,
    tokenization: Tokenization,
    policy: RowPolicy,
    *,
    name: str,
    num_proc: int | None = None,
) -> tuple[Dataset | IterableDataset, DataReport]:
    """Rows -> `input_ids` and `labels`. Raises one `DatasetError` for the whole set, with counts by reason and the
    first five rows, where a policy says `error`. A streaming dataset is checked row by row as it is read.
    """
    sample = _first(dataset, name)
    columns = list(sample)
    if "input_ids" in columns:
        kind = "tokenized"
    else:
        kind = dataset_kind(columns, sample, text_field=policy.text_field, prompts_only=False)
    step = _SFTStep(tokenization, policy, kind)
    report = DataReport(name, streamed=isinstance(dataset, IterableDataset))
    if isinstance(dataset, IterableDataset):
        return dataset.map(step.streamed, remove_columns=columns).filter(_is_kept).remove_columns(_MARKS), report
    mapped = dataset.map(
        step, with_indices=True, remove_columns=columns, num_proc=num_proc, desc=f"Tokenizing {name} dataset"
    )
    _settle(mapped, policy, report)
    report.cut = sum(mapped["cut"])
    kept = mapped.filter(_is_kept, num_proc=num_proc, desc=f"Checking {name} dataset") if report.dropped else mapped
    report.kept, report.tokens, report.trained_tokens = len(kept), sum(kept["length"]), sum(kept["trained"])
    if not report.kept:
        raise DatasetError(f"No row of the {name} dataset is left to train.\n" + "\n".join(report.lines()))
    return kept.remove_columns(_MARKS), report


def prepare_prompts(
    dataset: Dataset, tokenization: Tokenization, policy: RowPolicy, *, name: str, num_proc: int | None = None
) -> tuple[Dataset, DataReport]:
    """Rows -> `prompt_ids`, other columns kept. Errors as in `prepare_sft`."""
    sample = _first(dataset, name)
    kind = dataset_kind(list(sample), sample, text_field=policy.text_field, prompts_only=True)
    step = _PromptStep(tokenization, policy, kind)
    report = DataReport(name, streamed=isinstance(dataset, IterableDataset))
    if isinstance(dataset, IterableDataset):
        return dataset.map(step.streamed).filter(_is_kept).remove_columns(["problem", "reason"]), report
    mapped = dataset.map(step, with_indices=True, num_proc=num_proc, desc=f"Tokenizing {name} prompts")
    _settle(mapped, policy, report)
    kept = mapped.filter(_is_kept, num_proc=num_proc) if report.dropped else mapped
    report.kept = len(kept)
    if not report.kept:
        raise DatasetError(f"No prompt of the {name} dataset is left.\n" + "\n".join(report.lines()))
    return kept.remove_columns(["problem", "reason"]), report


_MARKS = ["problem", "reason", "cut", "length", "trained"]


@dataclass(frozen=True)
class _SFTStep:
    tokenization: Tokenization
    policy: RowPolicy
    kind: str

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            ids, labels = self._tokenize(row)
            return self._fit(ids, labels)
        except BadRow as bad:
            return _marked([], [], f"row {index}, {bad}", bad.reason)

    def streamed(self, row: dict[str, Any]) -> dict[str, Any]:
        result = self(row, -1)
        policy = self.policy.overflow if result["reason"].startswith("longer") else self.policy.bad_rows
        if result["reason"] and policy == "error":
            raise DatasetError(f"A row of the stream cannot be trained: {result['problem'].removeprefix('row -1, ')}")
        return result

    def _tokenize(self, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        if self.kind == "tokenized":
            return _pre_tokenized(row)
        tokenized = self.tokenization.row(read_row(row, self.kind, text_field=self.policy.text_field))
        return tokenized.input_ids, tokenized.labels

    def _fit(self, ids: list[int], labels: list[int]) -> dict[str, Any]:
        limit = self.policy.max_length
        if limit is None or len(ids) <= limit:
            if all(label == IGNORE_INDEX for label in labels):
                raise BadRow("no token of it is trained", "labels", labels[:8], f"a label that is not {IGNORE_INDEX}")
            return _marked(ids, labels)
        if self.policy.overflow != "cut":
            return _marked(ids, labels, f"{len(ids)} tokens", "longer than max_length")
        if all(label == IGNORE_INDEX for label in labels[:limit]):
            return _marked([], [], f"{len(ids)} tokens", "its prompt alone fills max_length")
        return _marked(ids[:limit], labels[:limit], cut=True)


@dataclass(frozen=True)
class _PromptStep:
    tokenization: Tokenization
    policy: RowPolicy
    kind: str

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            ids = self.tokenization.prompt(read_prompt(row, self.kind))
            return {"prompt_ids": ids, "problem": "", "reason": ""}
        except BadRow as bad:
            return {"prompt_ids": [], "problem": f"row {index}, {bad}", "reason": bad.reason}

    def streamed(self, row: dict[str, Any]) -> dict[str, Any]:
        result = self(row, -1)
        if result["reason"] and self.policy.bad_rows == "error":
            raise DatasetError(f"A row of the stream has no prompt: {result['problem'].removeprefix('row -1, ')}")
        return result


def _pre_tokenized(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Rows that bring `input_ids`, with `labels` or the masks of older TRL versions, or all tokens trained."""
    ids = row["input_ids"]
    if row.get("labels") is not None:
        labels = list(row["labels"])
    else:
        masks = [row[column] for column in ("completion_mask", "assistant_masks") if row.get(column) is not None]
        labels = [i if all(bits) else IGNORE_INDEX for i, *bits in zip(ids, *masks, strict=True)]
    if len(labels) != len(ids):
        raise BadRow("not as long as `input_ids`", "labels", len(labels), f"{len(ids)} labels")
    if labels:
        labels[0] = IGNORE_INDEX  # nothing predicts it
    return ids, labels


def _marked(
    ids: list[int], labels: list[int], problem: str = "", reason: str = "", cut: bool = False
) -> dict[str, Any]:
    trained = sum(label != IGNORE_INDEX for label in labels)
    return {
        "input_ids": ids,
        "labels": labels,
        "problem": problem,
        "reason": reason,
        "cut": cut,
        "length": len(ids),
        "trained": trained,
    }


def _is_kept(row: dict[str, Any]) -> bool:
    return not row["reason"]


def _settle(mapped: Dataset, policy: RowPolicy, report: DataReport) -> None:
    """Count the rows that have a problem and raise once for all of them where their policy is `error`."""
    report.rows = len(mapped)
    reasons = mapped["reason"]
    report.dropped = Counter(reason for reason in reasons if reason)
    too_long = [i for i, reason in enumerate(reasons) if reason == "longer than max_length"]
    bad = [i for i, reason in enumerate(reasons) if reason and reason != "longer than max_length"]
    if bad and policy.bad_rows == "error":
        counts = "; ".join(f"{n:,} × {r}" for r, n in report.dropped.most_common() if r != "longer than max_length")
        shown = "\n".join(f"  {problem}" for problem in _problems(mapped, bad))
        raise DatasetError(
            f"{len(bad):,} of {len(mapped):,} rows of the {report.name} dataset cannot be trained: {counts}.\n"
            f"{shown}\nMend them, or set `bad_rows: drop` to leave them out (they are counted)."
        )
    if too_long and policy.overflow == "error":
        lengths = sorted(mapped["length"])
        at = {q: lengths[min(int(q / 100 * len(lengths)), len(lengths) - 1)] for q in (50, 90, 99)}
        raise DatasetError(
            f"{len(too_long):,} of {len(mapped):,} rows of the {report.name} dataset are longer than "
            f"`max_length: {policy.max_length}` tokens (median {at[50]}, 90% {at[90]}, 99% {at[99]}, longest "
            f"{lengths[-1]}; first row {too_long[0]}). Set `max_length: {lengths[-1]}`, or `overflow: drop` to leave "
            "them out, or `overflow: cut` to train their beginning without a stop token."
        )


def _problems(mapped: Dataset, indices: list[int]) -> Iterator[str]:
    yield from (mapped[i]["problem"] for i in indices[:_SHOWN])
    if len(indices) > _SHOWN:
        yield f"... and {len(indices) - _SHOWN:,} more"


def _first(dataset: Dataset | IterableDataset, name: str) -> dict[str, Any]:
    sample = next(iter(dataset), None)
    if sample is None:
        raise DatasetError(f"The {name} dataset has no rows.")
    return sample
