"""The rows of on-policy distillation: prompts and evaluation sets, checked and tokenized before anything is trained."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger

from ._trl import global_then_local_main_first
from .accuracy import ANSWER, can_verify
from .configs import DistillationConfig
from .data.prepare import RowPolicy, prepare_sft
from .data.prompts import PromptColumns, prepare_prompts
from .data.rows import DatasetError, RowFormat
from .data.tokenize import Tokenization
from .token_trainer import TokenLevelTrainer

logger = get_logger(__name__)


class PromptData(TokenLevelTrainer):
    """Mixed into `trl.DistillationTrainer`, below `RolloutTrainer`: prepares the rows it trains and evaluates."""

    # what `trl.DistillationTrainer` and our own constructor bring
    args: DistillationConfig
    chat_template_kwargs: dict[str, Any]
    _tokenizer: Any
    _shared_ids: int | torch.Tensor | None

    @property
    def _tokenization(self) -> Tokenization:
        return Tokenization(self._tokenizer, template_kwargs=self.chat_template_kwargs)

    @property
    def _row_format(self) -> RowFormat:
        return RowFormat(prompt_column=self.args.dataset_prompt_column, system_prompt=self.args.system_prompt)

    def _prompt_columns(self, references: bool) -> PromptColumns:
        shared = self._shared_ids
        known = frozenset(shared.tolist()) if isinstance(shared, torch.Tensor) else shared
        return PromptColumns(references, self.args.teacher_prompt_column, known)

    @property
    def _prompt_policy(self) -> RowPolicy:
        args = self.args
        return RowPolicy(args.max_prompt_length, args.bad_rows, args.prompt_overflow, self._row_format, prompts=True)

    def _prepare_train(self, dataset: Any) -> Any:
        with global_then_local_main_first():
            dataset, report = prepare_prompts(
                dataset,
                self._tokenization,
                self._prompt_policy,
                name="train",
                columns=self._prompt_columns(references=self.args.lmbda < 1.0 and not self.args.seq_kd),
                num_proc=self.args.dataset_num_proc,
            )
        self._note_report(report)
        return dataset

    def _prepare_evals(self, datasets: Any) -> Any:
        if isinstance(datasets, dict):
            return {name: self._prepare_eval(dataset, name) for name, dataset in datasets.items()}
        return self._prepare_eval(datasets, "eval")

    def _prepare_eval(self, dataset: Any, name: str) -> Any:
        """Rows with a completion are scored on it; rows without get one from the student (see `eval_mode`)."""
        columns = set(dataset.column_names or next(iter(dataset)))
        if "prompt_ids" in columns or {"input_ids", "labels"} <= columns:
            return dataset
        has_completions = bool(columns & {"completion", "messages", "conversations", "input_ids"})
        mode = self.args.eval_mode
        if mode == "auto":
            mode = "dataset" if has_completions else "generate"
        elif mode == "dataset" and not has_completions:
            raise DatasetError(
                f"`eval_mode: dataset` needs a completion in every row of the {name} dataset; its columns are "
                f"{sorted(columns)}. Set `eval_mode: generate`, or add a column `completion`."
            )
        self._check_accuracy_can_be_had(name, columns, mode)
        what = (
            "the completions of its rows" if mode == "dataset" else "completions the student samples from a fixed seed"
        )
        logger.info(f"{name}: the divergence is taken on {what} (eval_mode {mode})")
        with global_then_local_main_first():
            if mode == "dataset" and self.args.teacher_prompt_column is None:
                policy = RowPolicy(bad_rows=self.args.bad_rows, format=self._row_format)
                dataset, report = prepare_sft(dataset, self._tokenization, policy, name=name)
            else:
                columns_of = self._prompt_columns(references=mode == "dataset")
                dataset, report = prepare_prompts(
                    dataset, self._tokenization, self._prompt_policy, name=name, columns=columns_of
                )
        self._note_report(report)
        return dataset

    def _check_accuracy_can_be_had(self, name: str, columns: set[str], mode: str) -> None:
        if self.args.eval_accuracy:
            if mode != "generate":
                raise DatasetError(
                    f"`eval_accuracy: true` needs completions of the student, but the {name} dataset is scored on its "
                    "own (`eval_mode: dataset`). Set `eval_mode: generate`."
                )
            if ANSWER not in columns:
                raise DatasetError(
                    f"`eval_accuracy: true` needs a column `{ANSWER}` in the {name} dataset; its columns are "
                    f"{sorted(columns)}."
                )
            if not can_verify():
                raise DatasetError("`eval_accuracy: true` needs math-verify. Run: pip install trl-opd[math]")
        elif self.args.eval_accuracy is None and mode == "generate" and ANSWER in columns and not can_verify():
            logger.warning(f"{name}: no accuracy, though its rows have `{ANSWER}`: pip install trl-opd[math]")
