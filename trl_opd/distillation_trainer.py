"""On-policy distillation: TRL's `DistillationTrainer` with our rollout accounting, denominators and loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import TrainingArguments

from . import heads
from ._trl import (
    adapters_on_the_head,
    get_config_model_id,
    keep_4bit_gradients_right,
    leave_step_out,
    upgrade_config,
)
from .checks.dropout import turn_off_dropout
from .checks.preflight import say_or_raise
from .config_checks import check_order_of_prompts, check_pieces, why_not_smoothed
from .configs import DistillationConfig
from .data.collate import AHEAD, NUM_ITEMS, OFF_POLICY, POSITIONS, SAMPLED, SIZES, TEACHER, from_trl
from .data.report import MaskReport
from .errors import RunError
from .layouts import check_layout, check_student
from .losses.objectives import Settings as LossSettings
from .losses.reduce import global_mean
from .new_tokens import add_tokens
from .rollout import parse_schedule
from .rollout_trainer import RolloutTrainer
from .student_setup import open_adapter, set_up_tokenizer
from .teacher_setup import (
    TeacherTokens,
    compare_tokens,
    find_teacher,
    place_anchor,
    place_teacher,
    restrict_sampling,
    whether_rows_leave,
)
from .teachers.ahead import Share
from .teachers.local import LocalTeacher
from .types import FusedOutput, TrainedPositions

logger = get_logger(__name__)

MAX_EMPTY_STEPS = 3
MODEL_INPUTS = ("input_ids", "attention_mask", SIZES)
ANCHOR = LossSettings("divergence", beta=0.0, metrics=False)  # KL(base ‖ p), at temperature 1 whatever the rest has
SPREAD = ("reward",)  # metrics of which variance and quantiles are logged as well
METRIC_NAMES = {"entropy": "entropy"}  # TRL's own name; the others are logged as `distill/<name>`


class DistillationTrainer(RolloutTrainer, trl.DistillationTrainer):
    """`trl.DistillationTrainer` with the same arguments: the student writes, the teacher grades every token.

    Every prompt is used once an epoch, a resumed run repeats nothing, and the loss is Σ divergence ÷ N with N counted
    over the whole step after the rollout. Raises `ValueError` before any data is read where there is no teacher, where
    it is the student's own object, or where the two do not share their token ids.
    """

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: DistillationConfig | TrainingArguments | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list | None = None,
    ):
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = upgrade_config(args, DistillationConfig, f"{name.split('/')[-1]}-Distillation")
        if tools:
            raise ValueError(
                "`tools` are not supported: a tool's output is not the student's to learn. Leave them out."
            )
        parallel = getattr(args, "parallelism_config", None)
        if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
            raise ValueError(
                "Context and sequence parallelism (`parallelism_config`) are not supported for distillation, which "
                "counts whole rows. Use DDP, FSDP or DeepSpeed ZeRO."
            )
        check_order_of_prompts(args)
        if why := why_not_smoothed(args):  # our own config refuses it; TRL's has always let it pass
            logger.warning(why)
        check_layout(args, model, peft_config, quantization_config)
        model, processing_class = open_adapter(
            model, processing_class, args, quantization_config=quantization_config, peft_config=peft_config
        )
        model, processing_class, peft_config = add_tokens(
            model, processing_class, args, quantization_config=quantization_config, peft_config=peft_config
        )
        start = model  # where the anchor begins: its name, or the model itself
        quantization_config = quantization_config if isinstance(model, str) else None
        processing_class = set_up_tokenizer(model, processing_class, args, args.eos_token)
        teacher = find_teacher(model, teacher_model, args, peft_config)
        # TRL gets no teacher: it would compare sizes only, where ids have to be compared
        with adapters_on_the_head():
            super().__init__(
                model=model,
                teacher_model=None,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
            )
        check_student(self)
        if self._is_vlm:
            raise ValueError("Models that take images are not supported for distillation. Use a text model.")
        tokens = TeacherTokens()
        if teacher is not None:
            tokens = compare_tokens(self.model, self._tokenizer, teacher, args.trust_remote_code)
        self.teacher_chat_template, self._shared_ids = tokens.chat_template, tokens.shared_ids
        self._flat = self._leaves_out_padding(self.model, "student")
        self._rows_leave = whether_rows_leave(self)
        restrict_sampling(self, teacher, self._shared_ids)
        self.teacher, self.anchor = place_teacher(teacher, self), place_anchor(start, self)
        self._all_flat = self._flat and self.teacher.flat and (self.anchor is None or self.anchor.flat)
        self.teacher_model = getattr(self.teacher, "wrapped", None)
        self._beside = tuple(m.unwrapped for m in (self.teacher, self.anchor) if isinstance(m, LocalTeacher))

        check_pieces(self)
        self._start_accounting()
        self._settings = args.loss_settings()
        self._sft_settings = LossSettings("cross_entropy", label_smoothing=args.label_smoothing_factor)
        keep_4bit_gradients_right(self.model)
        self.dropout_turned_off = 0
        if args.disable_dropout is not False:
            self.dropout_turned_off = turn_off_dropout(self.model, adapters_too=True)
        self.data_reports: list[MaskReport] = []
        if train_dataset is not None:
            self.train_dataset = self._prepare_train(train_dataset)
        if eval_dataset is not None:
            self.eval_dataset = self._prepare_evals(eval_dataset)
        say_or_raise(self)
        self._empty_steps = 0
        self._shares = {}
        self._eval_batches = 0
        self._schedule: list[tuple[float, int]] = []
        if args.completion_length_schedule is not None:
            self._schedule = parse_schedule(args.completion_length_schedule, args.max_completion_length)

    # --- loss ------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Σ divergence over the completions' tokens ÷ N. `num_items_in_batch` of `Trainer`, counted before the
        rollout, is not used; nor are labels given to either model.

        A batch of TRL's, from a script that calls this itself, is scored as TRL does: ÷ `num_items_in_batch` where it
        is given, else ÷ its own tokens. Nothing of it is logged.
        """
        if POSITIONS not in inputs:
            batch = from_trl(inputs)
            out = self._in_wrapped_forward(model, self._score, batch, batch[POSITIONS])
            given = num_items_in_batch is not None
            count, share = (num_items_in_batch, self.accelerator.num_processes) if given else (len(batch[POSITIONS]), 1)
            loss = global_mean(out.loss_sum, count, share)
            return (loss, None) if return_outputs else loss
        loss = self._sum_of_pieces(model, inputs, lambda piece: self._loss(model, dict(piece)))
        return (loss, None) if return_outputs else loss

    def _loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        positions, num_items, ahead = inputs.pop(POSITIONS), inputs.pop(NUM_ITEMS, None), inputs.pop(AHEAD, None)
        score = self._score if ahead is None else partial(self._score, ahead=ahead)
        out = self._in_wrapped_forward(model, score, inputs, positions)
        sums, tokens = self._sums[self._mode], len(positions)
        for name, values in out.metrics.items():
            if name in SPREAD:
                sums.add_spread(f"distill/{name}", values)
            else:
                sums.add(METRIC_NAMES.get(name, f"distill/{name}"), values.sum(), values.numel())
        if self._mode == "eval":
            self._count_evaluated(out.per_token, positions, inputs["labels"].size(0))
            return global_mean(out.loss_sum, tokens)
        sums.add("distill/num_tokens_per_step", num_items, 1)
        self._count_tokens(inputs)
        if not self._step_tokens and self.is_deepspeed_enabled:
            leave_step_out(self.accelerator, model)
        return global_mean(out.loss_sum, num_items, self.accelerator.num_processes)

    def _score(
        self, unwrapped: Any, batch: dict[str, Any], positions: TrainedPositions, ahead: Share | None = None
    ) -> FusedOutput:
        """Σ objective + `sft_weight` · Σ −log p (rows the student did not write) + `anchor_weight` · Σ KL(base ‖ p).

        `ahead` is the batch's share of what the teacher is run on at once.
        """
        off_policy, sampled = batch.pop(OFF_POLICY, None), batch.pop(SAMPLED, None)
        shown = batch.pop(TEACHER, None) or {**batch, POSITIONS: positions}

        def scored(batch: dict[str, Any]) -> tuple[torch.Tensor, heads.Head]:
            return self.teacher.states(unwrapped, batch, batch[POSITIONS])

        # the teacher first: what it needs along the way is gone before the student keeps its activations
        teacher_hidden, teacher_head = scored(shown) if ahead is None else ahead.states(scored)
        hidden = heads.predicting_states(unwrapped, batch, positions, self._flat)
        head = heads.head_of(unwrapped)
        out = heads.token_loss(
            self._settings,
            hidden,
            head,
            targets=positions.targets,
            teacher_hidden=teacher_hidden,
            teacher_head=teacher_head,
            sampled_log_probs=sampled,
            shared_ids=self._shared_ids_on(hidden.device),
            ranks=self._ranks,
        )
        total, metrics = out.loss_sum, dict(out.metrics)
        if self.args.sft_weight and off_policy is not None:
            targets = positions.targets[off_policy]
            sft = heads.token_loss(self._sft_settings, hidden[off_policy], head, targets=targets, ranks=self._ranks)
            total, metrics["sft_loss"] = total + self.args.sft_weight * sft.loss_sum, sft.per_token
        if self.anchor is not None and self.args.anchor_weight:
            base_hidden, base_head = self.anchor.states(unwrapped, batch, positions)
            anchor = heads.token_loss(
                ANCHOR,
                hidden,
                head,
                teacher_hidden=base_hidden,
                teacher_head=base_head,
                ranks=self._ranks,
            )
            total, metrics["anchor_kl"] = total + self.args.anchor_weight * anchor.loss_sum, anchor.per_token
        return FusedOutput(total, out.per_token, metrics)

    def _log_probs(self, unwrapped: Any, batch: dict[str, Any], positions: TrainedPositions) -> FusedOutput:
        """−log p at the temperature of sampling, of the tokens that stand at the positions."""
        inputs = {key: batch[key] for key in MODEL_INPUTS}
        hidden = heads.predicting_states(unwrapped, inputs, positions, self._flat)
        settings = LossSettings("cross_entropy", temperature=self.temperature)
        return heads.token_loss(
            settings,
            hidden,
            heads.head_of(unwrapped),
            targets=positions.targets,
            shared_ids=self._shared_ids_on(hidden.device),
            ranks=self._ranks,
        )

    def _shared_ids_on(self, device: torch.device) -> Any:
        if isinstance(self._shared_ids, torch.Tensor) and self._shared_ids.device != device:
            self._shared_ids = self._shared_ids.to(device)
        return self._shared_ids

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch. A whole step without a trained token changes no weight; three in a row are an error."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._step % self.args.gradient_accumulation_steps == 0:
            self._end_step(empty=not self._step_tokens, had_rows=bool(self._step_rows))
        return loss

    def _end_step(self, empty: bool, had_rows: bool) -> None:
        self._metrics["train"]["distill/empty_steps"].append(float(empty))
        if had_rows:  # a step of filler rows alone, at an epoch's end, says nothing about the completions
            self._empty_steps = self._empty_steps + 1 if empty else 0
        if empty:
            self.optimizer.zero_grad(set_to_none=True)  # a zero gradient would still move weights by Adam's momentum
        if self._empty_steps == MAX_EMPTY_STEPS:
            raise RunError(
                f"{MAX_EMPTY_STEPS} steps in a row, up to step {self.state.global_step + 1}, had no token to train: "
                "every completion is empty or masked. Raise `max_completion_length`, set "
                "`mask_truncated_completions: false`, and look at what the student writes (`log_completions: true`)."
            )

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> tuple:
        """TRL's, but under no label the rows could bring."""
        with torch.no_grad():
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's, on raw rows too: a dataset passed here is prepared as the constructor prepares its own."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prepare_evals(eval_dataset)
        return super().evaluate(eval_dataset, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """One model gives one value: every evaluation samples from the same seeds."""
        self._eval_batches = 0
        return super().evaluation_loop(*args, **kwargs)
