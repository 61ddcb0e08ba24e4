"""Rows for rollouts: the prompt's tokens, and what may stand beside them: a reference completion, a teacher's
prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, IterableDataset

from ..types import IGNORE_INDEX
from .prepare import RowPolicy, column_of, first_row, is_kept, map_rows, settle
from .report import MaskReport, quantiles
from .rows import BadRow, DatasetError, dataset_kind, read_prompt, read_row
from .tokenize import Tokenization


@dataclass(frozen=True)
class PromptColumns:
    """What is made of a row besides `prompt_ids`.

    `references`: `reference_ids` and `reference_labels`, the row with its own completion, as SFT would train it.
    `teacher_prompt`: a column whose prompt the teacher is shown instead, as `teacher_prompt_ids`. `known_ids`: ids that
    both models have, the first so many or a set, where that is not all of them: a row with another is no good.
    """

    references: bool = False
    teacher_prompt: str | None = None
    known_ids: int | frozenset[int] | None = None


def prepare_prompts(
    dataset: Dataset,
    tokenization: Tokenization,
    policy: RowPolicy,
    *,
    name: str,
    columns: PromptColumns | None = None,
    num_proc: int | None = None,
) -> tuple[Dataset, MaskReport]:
    """Rows -> `prompt_ids` and what `columns` asks for; other columns are kept. Errors as in `prepare_sft`."""
    columns, sample = columns or PromptColumns(), first_row(dataset, name)
    kind = dataset_kind(list(sample), sample, policy.format, prompts_only=True)
    reference_kind = ""
    if columns.references:
        reference_kind = dataset_kind(list(sample), sample, policy.format, prompts_only=False)
        if reference_kind == "text":
            raise DatasetError(f"A `text` column of the {name} dataset has no completion that a prompt could have.")
    if columns.teacher_prompt is not None and columns.teacher_prompt not in sample:
        raise DatasetError(
            f"`teacher_prompt_column: {columns.teacher_prompt}` is not in the {name} dataset; its columns are "
            f"{list(sample)}."
        )
    step = _PromptStep(tokenization, policy, columns, kind, reference_kind)
    report = MaskReport(name, streamed=isinstance(dataset, IterableDataset))
    if isinstance(dataset, IterableDataset):
        return dataset.map(step.streamed).filter(is_kept).remove_columns(_MARKS), report
    mapped = map_rows(dataset, step, name, num_proc=num_proc, desc=f"Tokenizing {name} prompts")
    good = settle(mapped, policy, report)
    report.kept, report.lengths = len(good), quantiles(column_of(mapped, "length", good))
    report.cut_prompts = sum(column_of(mapped, "cut", good))
    for what in ("teacher", "reference"):
        report.longest[what] = max(column_of(mapped, f"{what}_length", good), default=0)
    if not good:
        raise DatasetError(f"No prompt of the {name} dataset is left.\n" + "\n".join(report.lines()))
    kept = mapped.remove_columns(_MARKS)
    return kept if len(good) == len(mapped) else kept.select(good), report


_MARKS = ["problem", "reason", "length", "teacher_length", "reference_length", "cut"]


@dataclass(frozen=True)
class _PromptStep:
    tokenization: Tokenization
    policy: RowPolicy
    columns: PromptColumns
    kind: str
    reference_kind: str

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            made = self._tokenize(row)
        except BadRow as bad:
            return self._nothing(f"row {index}, {bad}", bad.reason, 0)
        length, limit = len(made["prompt_ids"]), self.policy.max_length
        if limit is not None and length > limit:
            if self.policy.overflow != "truncate_left":
                return self._nothing(f"{length} tokens", self.policy.too_long, length)
            made["prompt_ids"] = made["prompt_ids"][-limit:]
            if self.columns.references:
                made |= _without_start(made["reference_ids"], made["reference_labels"], limit)
        return {**made, "problem": "", "reason": "", **_lengths(made), "cut": limit is not None and length > limit}

    def _tokenize(self, row: dict[str, Any]) -> dict[str, list[int]]:
        fmt = self.policy.format
        made = {"prompt_ids": self.tokenization.prompt(read_prompt(row, self.kind, fmt))}
        if self.columns.references:
            # of a conversation the prompt is all before its last assistant turn, so that turn is the completion
            train_on = "last_assistant" if self.reference_kind == "messages" else "assistant"
            reference = replace(self.tokenization, train_on=train_on).row(read_row(row, self.reference_kind, fmt))
            if all(label == IGNORE_INDEX for label in reference.labels):
                raise BadRow("no token of it is trained", "completion", row.get("completion"), "a completion")
            made |= {"reference_ids": reference.input_ids, "reference_labels": reference.labels}
        column = self.columns.teacher_prompt
        if column is not None:
            kind = "prompt" if self.kind == "prompt" and isinstance(row.get(column), str) else "prompt_messages"
            shown = read_row(row, kind, replace(fmt, prompt_column=column))
            made["teacher_prompt_ids"] = self.tokenization.prompt(shown)
        for what, ids in made.items():
            self._check_known(what, ids)
        return made

    def _check_known(self, what: str, ids: list[int]) -> None:
        known = self.columns.known_ids
        if known is None or what == "reference_labels":
            return
        strange = next((i for i in ids if (i >= known if isinstance(known, int) else i not in known)), None)
        if strange is not None:
            token = self.tokenization.tokenizer.convert_ids_to_tokens(strange)
            raise BadRow(
                "a token that only one of the two models has", what, f"{token} (id {strange})", "shared tokens"
            )

    def _nothing(self, problem: str, reason: str, length: int) -> dict[str, Any]:
        made: dict[str, Any] = {"prompt_ids": []}
        if self.columns.references:
            made |= {"reference_ids": [], "reference_labels": []}
        if self.columns.teacher_prompt is not None:
            made["teacher_prompt_ids"] = []
        return {**made, "problem": problem, "reason": reason, **_lengths(made), "length": length, "cut": False}

    def streamed(self, row: dict[str, Any]) -> dict[str, Any]:
        result = self(row, -1)
        policy = self.policy.overflow if result["reason"] == self.policy.too_long else self.policy.bad_rows
        if result["reason"] and policy == "error":
            raise DatasetError(f"A row of the stream cannot be used: {result['problem'].removeprefix('row -1, ')}")
        return result


def _lengths(made: dict[str, list[int]]) -> dict[str, int]:
    return {
        "length": len(made["prompt_ids"]),
        "teacher_length": len(made.get("teacher_prompt_ids", [])),
        "reference_length": len(made.get("reference_ids", [])),
    }


def _without_start(ids: list[int], labels: list[int], limit: int) -> dict[str, list[int]]:
    """A reference whose prompt, all before its first label, keeps its last `limit` tokens."""
    prompt = next(i for i, label in enumerate(labels) if label != IGNORE_INDEX)
    start = max(prompt - limit, 0)
    return {"reference_ids": ids[start:], "reference_labels": labels[start:]}
