"""Supervised fine-tuning: TRL's `SFTTrainer`, trained on exactly the tokens the assistant must write."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, ProcessorMixin, TrainingArguments

from . import heads
from ._trl import (
    adapters_on_the_head,
    get_config_model_id,
    global_then_local_main_first,
    keep_4bit_gradients_right,
    upgrade_config,
)
from .checks.dropout import turn_off_dropout
from .config_checks import check_offloading, check_pieces
from .configs import SFTConfig
from .data.collate import POSITIONS, ROWS, SIZES, CheckedCollator, regrouped
from .data.prepare import RowPolicy, prepare_sft
from .data.report import MaskReport
from .data.rows import RowFormat
from .data.sampler import LabelledRows, WindowSampler
from .data.tokenize import Tokenization
from .layouts import check_layout, check_student
from .losses.objectives import Settings
from .losses.reduce import global_mean
from .masking import trained_positions
from .metrics import on_device
from .new_tokens import add_tokens
from .sft_setup import train_on, why_as_drawn, why_trl
from .student_setup import open_adapter, set_up_tokenizer
from .token_trainer import TokenLevelTrainer
from .types import IGNORE_INDEX, FusedOutput, TrainedPositions

logger = get_logger(__name__)

SPLITTING = ("bfd_split", "wrapped")  # ways of packing that spread a long row over several: there is nothing to cut


class SFTTrainer(TokenLevelTrainer, trl.SFTTrainer):
    """`trl.SFTTrainer` with the same arguments, and strict masks, counted rows and one denominator a step.

    A `trl.SFTConfig` or `TrainingArguments` is taken as it is (rows over `max_length` are then cut, as TRL does, and
    counted). Raises `DatasetError` for rows that cannot be trained, before anything is.
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig | TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        optimizer_cls_and_kwargs: tuple | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable | None = None,
    ):
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        # TRL cuts what is too long without a word: a config of its own means that, and we count it
        args = upgrade_config(args, SFTConfig, f"{name.split('/')[-1]}-SFT", overflow="cut")
        check_offloading(args)
        check_layout(args, model, peft_config, quantization_config)
        model, processing_class = open_adapter(
            model, processing_class, args, quantization_config=quantization_config, peft_config=peft_config
        )
        model, processing_class, peft_config = add_tokens(
            model, processing_class, args, quantization_config=quantization_config, peft_config=peft_config
        )
        quantization_config = quantization_config if isinstance(model, str) else None
        processing_class = set_up_tokenizer(model, processing_class, args)
        self._train_on = train_on(args)
        # our masks need no {% generation %} in the template, and TRL refuses templates without it
        assistant_only, args.assistant_only_loss = args.assistant_only_loss, False
        self.data_reports: list[MaskReport] = []
        with adapters_on_the_head():
            super().__init__(
                model=model,
                args=args,
                data_collator=data_collator,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                compute_loss_func=compute_loss_func,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
                quantization_config=quantization_config,
                peft_config=peft_config,
                formatting_func=formatting_func,
            )
        args.assistant_only_loss = assistant_only
        check_student(self)
        self._start_accounting()
        dft = args.loss_type == "dft"  # which takes no label smoothing, as in TRL
        self._settings = Settings(
            "cross_entropy",
            label_smoothing=0.0 if dft else args.label_smoothing_factor,
            weight_by_probability=dft,
        )
        keep_4bit_gradients_right(self.model)
        self.dropout_turned_off = 0
        if args.disable_dropout is not False:
            self.dropout_turned_off = turn_off_dropout(self.model, adapters_too=bool(args.disable_dropout))
        self._trl_does_it, self._balance = why_trl(self, compute_loss_func), False
        if self._trl_does_it:
            logger.warning(f"The loss is computed by TRL's own code: {self._trl_does_it}.")
            check_pieces(self, f"the loss is computed by TRL's own code: {self._trl_does_it}")
            return
        self.loss_is_scaled_for_ga = True  # we divide by the tokens of the whole step ourselves
        self.model_accepts_loss_kwargs = True
        self._flat = self._all_flat = self._leaves_out_padding(self.model, "model")
        # accelerate may cut batches on the main process, where nothing but tensors can be cut
        whole = not isinstance(train_dataset, IterableDataset) and not args.accelerator_config.dispatch_batches
        why_not = why_as_drawn(self, data_collator, whole)
        check_pieces(self, why_not)
        if args.gradient_accumulation_steps == 1 and args.per_device_max_tokens is None:
            why_not = why_not or "a step is one micro-batch"
        if args.balance_micro_batches and why_not:
            logger.info(f"balance_micro_batches: batches stay as they are drawn, since {why_not}.")
        self._balance = args.balance_micro_batches and not why_not
        self.data_collator = CheckedCollator(self.data_collator, args.strict_masks, whole, keep_rows=self._balance)

    def _prepare_dataset(  # type: ignore[override]
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        columns = dataset.column_names or list(next(iter(dataset)))
        custom_format = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
        if isinstance(processing_class, ProcessorMixin) or custom_format or "seq_lengths" in columns:
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        text_field = args.dataset_text_field
        if formatting_func is not None and "input_ids" not in columns:
            dataset = dataset.map(_Formatted(formatting_func), remove_columns=columns)
            text_field = "text"
        with global_then_local_main_first():
            dataset, report = prepare_sft(
                dataset,
                Tokenization(processing_class, self._train_on, args.train_empty_think),
                RowPolicy(
                    None if packing and args.packing_strategy in SPLITTING else args.max_length,
                    args.bad_rows,
                    args.overflow,
                    RowFormat(text_field, system_prompt=args.system_prompt),
                    keep_end=args.truncation_mode == "keep_end",
                ),
                name=dataset_name,
                num_proc=args.dataset_num_proc,
            )
            self._note_report(report)
            if packing:
                if args.max_length is None:
                    raise ValueError("`packing: true` needs `max_length`: the length that rows are packed to.")
                if args.shuffle_dataset:
                    dataset = dataset.shuffle(seed=args.seed)
                dataset = trl.pack_dataset(dataset, args.max_length, args.packing_strategy)
        return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset

    def _reject_skip_prepare_without_labels(self, datasets: Any, data_collator: Any) -> None:
        super()._reject_skip_prepare_without_labels(datasets, getattr(data_collator, "inner", data_collator))

    def get_train_dataloader(self) -> DataLoader:
        """As `Trainer`'s, but every row once an epoch: what evens out the ranks has its labels masked."""
        rows = self.train_dataset
        strategy = getattr(self.args, "train_sampling_strategy", "random")  # not there before transformers 5
        own_order = strategy in ("random", "sequential")
        if not (own_order and isinstance(rows, Dataset) and "labels" in rows.column_names):
            self._window_sampler = None
            return super().get_train_dataloader()
        self._window_sampler = WindowSampler(
            rows,
            window=self._train_batch_size * self.accelerator.num_processes if self.accelerator.num_processes > 1 else 1,
            repeats=1,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            shuffle=strategy == "random",
        )
        return self._get_dataloader(
            dataset=LabelledRows(self._remove_unused_columns(rows, description="training")),
            description="Training",
            batch_size=self._train_batch_size,
            sampler_fn=lambda _: self._window_sampler,
            is_training=True,
        )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The micro-batches of a step, their rows sorted by length and cut anew (`balance_micro_batches`)."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._balance and batches:
            batches = send_to_device(regrouped(batches, self.data_collator, self._merges, self._all_flat), device)
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        """N: the trained tokens of every micro-batch of the step on every rank, whatever
        `average_tokens_across_devices` says."""
        if self._trl_does_it or not batch_samples or "labels" not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        counts = [_count(batch, device) for batch in batch_samples]
        return self.accelerator.gather(torch.stack(counts).sum()).sum() / self.get_tp_size()

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Σ −log p over the trained tokens ÷ N. The model never sees the labels.

        With `return_outputs`, and for what needs the model's own forward, the loss is TRL's.
        """
        if self._trl_does_it or return_outputs or "labels" not in inputs:
            inputs = {key: value for key, value in inputs.items() if key not in (POSITIONS, ROWS, SIZES)}
            if model.training and "input_ids" in inputs:
                self._count_tokens(inputs)
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return loss if return_outputs else self._note_loss(loss, inputs)
        return self._sum_of_pieces(model, inputs, lambda piece: self._loss(model, dict(piece), num_items_in_batch))

    def _loss(self, model: torch.nn.Module, inputs: dict[str, Any], num_items: torch.Tensor | int | None) -> Any:
        inputs.pop(ROWS, None)
        positions = inputs.pop(POSITIONS, None)
        if positions is None:
            positions = trained_positions(inputs["labels"])
        out = self._in_wrapped_forward(model, self._score, inputs, positions)
        sums, tokens, loss_sum = self._sums[self._mode], len(positions), out.loss_sum
        sums.add("entropy", out.metrics["entropy"].sum(), tokens)
        sums.add("mean_token_accuracy", out.metrics["correct"].sum(), tokens)
        if self._mode == "eval":
            self._count_evaluated(out.per_token, positions, inputs["labels"].size(0))
        else:
            self._total_train_tokens += self._count_tokens(inputs)
        if num_items is None:
            return global_mean(loss_sum, tokens)
        sums.add("sft/num_tokens_per_step", on_device(num_items, loss_sum), 1)
        return global_mean(loss_sum, num_items, self.accelerator.num_processes // self.get_tp_size())

    def _score(self, unwrapped: PreTrainedModel, inputs: dict[str, Any], positions: TrainedPositions) -> FusedOutput:
        hidden = heads.predicting_states(unwrapped, inputs, positions, self._flat)
        return heads.token_loss(
            self._settings,
            hidden,
            heads.head_of(unwrapped),
            targets=positions.targets,
            ranks=self._ranks,
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._tokens_before: Any = deepcopy(self._total_train_tokens)  # type: ignore[has-type]
        return super().train(*args, **kwargs)

    def _count_anew(self) -> None:
        super()._count_anew()
        self._total_train_tokens = deepcopy(self._tokens_before)  # a number, in the logs, where TRL's own code counts

    def _own_state(self) -> dict[str, Any]:
        """With the tokens that this process has seen."""
        return {**super()._own_state(), "num_tokens": self._total_train_tokens}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)
        self._total_train_tokens = state["num_tokens"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's names, with `num_tokens` summed over the ranks, where `Trainer` itself logs."""
        if not self._trl_does_it and ("loss" in logs or any(key.endswith("_runtime") for key in logs)):
            seen = torch.as_tensor(self._total_train_tokens, device=self.accelerator.device).reshape(1)
            self._metrics[self._mode]["num_tokens"] = [int(self.accelerator.gather(seen).sum()) // self.get_tp_size()]
        super().log(logs, start_time)


class _Formatted:
    """`formatting_func` as a step of `Dataset.map`."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"text": self.function(row)}


def _count(batch: dict[str, Any], device: torch.device) -> torch.Tensor:
    if POSITIONS in batch:
        return torch.full((), len(batch[POSITIONS]), device=device)
    return (batch["labels"][:, 1:] != IGNORE_INDEX).sum().to(device)
