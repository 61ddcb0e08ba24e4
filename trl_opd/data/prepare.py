"""A whole dataset, prepared by policy: every row read, tokenized, measured and counted before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset, IterableDataset

from ..types import IGNORE_INDEX, TokenizedRow
from .report import MaskReport, quantiles
from .rows import BadRow, DatasetError, RowFormat, dataset_kind, read_row
from .tokenize import Tokenization

BAD_ROWS = ("error", "drop")
OVERFLOW = ("error", "drop", "cut")
PROMPT_OVERFLOW = ("error", "drop", "truncate_left")
_SHOWN = 5


@dataclass(frozen=True)
class RowPolicy:
    """What to do with rows that cannot be trained (`bad_rows`) and with rows longer than `max_length` (`overflow`),
    and how rows are read: `RowFormat`. For prompts alone the length is the config's `max_prompt_length`. `keep_end`
    cuts the beginning off, not the end (TRL's `truncation_mode: keep_end`)."""

    max_length: int | None = None
    bad_rows: str = "error"
    overflow: str = "error"
    format: RowFormat = field(default_factory=RowFormat)
    prompts: bool = False
    keep_end: bool = False

    @property
    def length_field(self) -> str:
        return "max_prompt_length" if self.prompts else "max_length"

    @property
    def too_long(self) -> str:
        """The reason that is counted."""
        return f"longer than {self.length_field}"


def prepare_sft(
    dataset: Dataset | IterableDataset,
    tokenization: Tokenization,
    policy: RowPolicy,
    *,
    name: str,
    num_proc: int | None = None,
) -> tuple[Dataset | IterableDataset, MaskReport]:
    """Rows -> `input_ids` and `labels`. Raises one `DatasetError` for the whole set, with counts by reason and the
    first five rows, where a policy says `error`. A streaming dataset is checked row by row as it is read.
    """
    sample = first_row(dataset, name)
    columns = list(sample)
    tokenized = "input_ids" in columns
    kind = "tokenized" if tokenized else dataset_kind(columns, sample, policy.format, prompts_only=False)
    step = _SFTStep(tokenization, policy, kind)
    report = MaskReport(
        name,
        streamed=isinstance(dataset, IterableDataset),
        template=tokenization.template_name if kind.endswith("messages") else "",
        cut_keeps_end=policy.keep_end,
        train_on="labels of the dataset" if tokenized else tokenization.train_on,
    )
    if isinstance(dataset, IterableDataset):
        return dataset.map(step.streamed, remove_columns=columns).filter(is_kept).remove_columns(_MARKS), report
    mapped = map_rows(dataset, step, name, remove_columns=columns, num_proc=num_proc, desc=f"Tokenizing {name} dataset")
    good = settle(mapped, policy, report)
    _count(mapped, good, report)
    if not good:
        raise DatasetError(f"No row of the {name} dataset is left to train.\n" + "\n".join(report.lines()))
    kept = mapped.remove_columns(_MARKS)
    return kept if len(good) == len(mapped) else kept.select(good), report


_MARKS = ["problem", "reason", "length", "cut", "trained", "stopped", "normalized", "rule"]


@dataclass(frozen=True)
class _SFTStep:
    tokenization: Tokenization
    policy: RowPolicy
    kind: str

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            return self._fit(self._tokenize(row))
        except BadRow as bad:
            return _marked(TokenizedRow([], []), f"row {index}, {bad}", bad.reason)

    def streamed(self, row: dict[str, Any]) -> dict[str, Any]:
        result = self(row, -1)
        policy = self.policy.overflow if result["reason"] == self.policy.too_long else self.policy.bad_rows
        if result["reason"] and policy == "error":
            raise DatasetError(f"A row of the stream cannot be trained: {result['problem'].removeprefix('row -1, ')}")
        return result

    def _tokenize(self, row: dict[str, Any]) -> TokenizedRow:
        if self.kind == "tokenized":
            return _pre_tokenized(row, self.tokenization.train_on, len(self.tokenization.tokenizer))
        return self.tokenization.row(read_row(row, self.kind, self.policy.format))

    def _fit(self, row: TokenizedRow) -> dict[str, Any]:
        limit, labels = self.policy.max_length, row.labels
        if limit is None or len(labels) <= limit:
            if all(label == IGNORE_INDEX for label in labels):
                raise BadRow("no token of it is trained", "labels", labels[:8], f"a label that is not {IGNORE_INDEX}")
            return _marked(row)
        if self.policy.overflow != "cut":
            return _marked(row, f"{len(labels)} tokens", self.policy.too_long)
        kept = slice(-limit, None) if self.policy.keep_end else slice(limit)
        labels = _without_first(labels[kept])
        if all(label == IGNORE_INDEX for label in labels):
            why = "nothing at its end is trained" if self.policy.keep_end else "its prompt alone fills max_length"
            return _marked(TokenizedRow([], []), f"{len(row.labels)} tokens", why)
        stopped = row.stopped and self.policy.keep_end
        return _marked(replace(row, input_ids=row.input_ids[kept], labels=labels, stopped=stopped), cut=True)


def _pre_tokenized(row: dict[str, Any], train_on: str, vocabulary: int) -> TokenizedRow:
    """Rows that bring `input_ids`, with `labels` or the masks of older TRL versions, or all tokens trained. As in TRL,
    `train_on: all` (`completion_only_loss: false`) is about the completion's mask alone."""
    ids = _whole_numbers(row, "input_ids")
    if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
        known = f"0 to {vocabulary - 1}"
        raise BadRow("ids that the tokenizer does not have", "input_ids", [min(ids), max(ids)], known)
    columns = ("completion_mask", "assistant_masks")[train_on == "all" :]
    columns = ("labels",) if row.get("labels") is not None else columns
    given = {column: _whole_numbers(row, column) for column in columns if row.get(column) is not None}
    for column, values in given.items():
        if len(values) != len(ids):
            raise BadRow("not as long as `input_ids`", column, len(values), f"{len(ids)} of them")
    labels = given.get("labels") or [
        i if all(bits) else IGNORE_INDEX for i, *bits in zip(ids, *given.values(), strict=True)
    ]
    return TokenizedRow(ids, _without_first(labels))


def _without_first(labels: list[int]) -> list[int]:
    return [IGNORE_INDEX, *labels[1:]] if labels else labels  # nothing predicts it


def _whole_numbers(row: dict[str, Any], column: str) -> list[int]:
    values = row[column]
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, int) for value in values):
        raise BadRow("not a list of whole numbers", column, values, "token ids, or a mask of 0 and 1")
    return [int(value) for value in values]


def _marked(row: TokenizedRow, problem: str = "", reason: str = "", cut: bool = False) -> dict[str, Any]:
    return {
        "input_ids": row.input_ids,
        "labels": row.labels,
        "problem": problem,
        "reason": reason,
        "length": len(row.input_ids),
        "cut": cut,
        "trained": len(row.labels) - row.labels.count(IGNORE_INDEX),
        "stopped": row.stopped,
        "normalized": row.normalized,
        "rule": row.rule,
    }


def is_kept(row: dict[str, Any]) -> bool:
    return not row["reason"]


def column_of(mapped: Dataset, mark: str, good: Sequence[int]) -> list[Any]:
    """One mark of the rows that are kept, read from the table at once."""
    values = mapped.data.column(mark).to_pylist()
    return values if len(good) == len(values) else [values[i] for i in good]


def _count(mapped: Dataset, good: Sequence[int], report: MaskReport) -> None:
    """Fill in what is counted over the rows that are kept."""
    report.kept = len(good)
    lengths = column_of(mapped, "length", good)
    report.tokens, report.trained_tokens = sum(lengths), sum(column_of(mapped, "trained", good))
    report.cut, report.normalized = sum(column_of(mapped, "cut", good)), sum(column_of(mapped, "normalized", good))
    report.without_stop = column_of(mapped, "stopped", good).count(False)
    report.rules = Counter(rule for rule in column_of(mapped, "rule", good) if rule)
    report.lengths = quantiles(lengths)


def settle(mapped: Dataset, policy: RowPolicy, report: MaskReport) -> Sequence[int]:
    """Count the rows that have a problem and raise once for all of them where their policy is `error`.

    Returns the indices of the rows that have none.
    """
    reasons = mapped.data.column("reason").to_pylist()
    report.rows = len(reasons)
    if not any(reasons):
        return range(len(reasons))
    report.dropped = Counter(reason for reason in reasons if reason)
    too_long = [i for i, reason in enumerate(reasons) if reason == policy.too_long]
    bad = [i for i, reason in enumerate(reasons) if reason and reason != policy.too_long]
    if bad and policy.bad_rows == "error":
        counts = "; ".join(f"{n:,} × {r}" for r, n in report.dropped.most_common() if r != policy.too_long)
        shown = [f"  {mapped[i]['problem']}" for i in bad[:_SHOWN]]
        if len(bad) > _SHOWN:
            shown.append(f"  ... and {len(bad) - _SHOWN:,} more")
        raise DatasetError(
            f"{len(bad):,} of {len(reasons):,} rows of the {report.name} dataset cannot be trained: {counts}.\n"
            + "\n".join(shown)
            + "\nMend them, or set `bad_rows: drop` to leave them out (they are counted)."
        )
    if too_long and policy.overflow == "error":
        lengths = quantiles(mapped.data.column("length").to_pylist())
        longest = lengths["100%"]
        ways = "`overflow: drop` to leave them out, or `overflow: cut` to train their beginning without a stop token"
        if policy.prompts:
            ways = "`prompt_overflow: drop` to leave them out, or `prompt_overflow: truncate_left` to keep their end"
        raise DatasetError(
            f"{len(too_long):,} of {len(reasons):,} rows of the {report.name} dataset are longer than "
            f"`{policy.length_field}: {policy.max_length}` tokens (median {lengths['50%']}, 90% {lengths['90%']}, 99% "
            f"{lengths['99%']}, longest {longest}; first row {too_long[0]}). Set `{policy.length_field}: {longest}`, "
            f"or {ways}."
        )
    return [i for i, reason in enumerate(reasons) if not reason]


def first_row(dataset: Dataset | IterableDataset, name: str) -> dict[str, Any]:
    try:
        sample = next(iter(dataset), None)
    except UnicodeDecodeError as error:
        raise _not_utf8(dataset, name, error) from error
    if sample is None:
        raise DatasetError(f"The {name} dataset has no rows. Set another file, folder or split.")
    return sample


def map_rows(dataset: Dataset, step: Callable[..., dict[str, Any]], name: str, **kwargs: Any) -> Dataset:
    """`dataset.map(step, with_indices=True)`. Raises `DatasetError` for text that arrow took in and Python cannot."""
    try:
        return dataset.map(step, with_indices=True, **kwargs)
    except UnicodeDecodeError as error:
        raise _not_utf8(dataset, name, error) from error


def _not_utf8(dataset: Dataset | IterableDataset, name: str, error: UnicodeDecodeError) -> DatasetError:
    where = ""
    for i in range(len(dataset) if isinstance(dataset, Dataset) else 0):
        try:
            dataset[i]
        except UnicodeDecodeError:
            where = f", row {i}"
            break
    return DatasetError(f"The {name} dataset{where}: a text is not UTF-8 ({error.reason}). Save its file as UTF-8.")
