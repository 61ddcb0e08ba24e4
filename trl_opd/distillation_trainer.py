"""On-policy distillation: TRL's `DistillationTrainer` with our rollout accounting, denominators and loss."""

from __future__ import annotations

from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader, SequentialSampler
from transformers import TrainingArguments

from . import heads
from ._trl import get_config_model_id, global_then_local_main_first, keep_4bit_gradients_right, upgrade_config
from .checks.dropout import turn_off_dropout
from .checks.pair import check_not_the_same, check_vocab_sizes
from .configs import DistillationConfig
from .data.collate import POSITIONS, pad_rollout, pad_rows
from .data.prepare import RowPolicy, prepare_prompts, prepare_sft
from .data.report import MaskReport
from .data.rows import DatasetError, RowFormat
from .data.sampler import PromptRows, PromptStream, WindowSampler
from .data.tokenize import Tokenization
from .losses.reduce import global_mean
from .masking import check_batch
from .rollout import completion_metrics, micro_batches, rollout_seed, rollout_table, sampling, trained_tokens
from .teacher_setup import compare_tokenizers, load_teacher, wrap_teacher
from .teachers.local import freeze
from .token_trainer import TokenLevelTrainer, gather_heads
from .types import Rollout, TrainedPositions

logger = get_logger(__name__)

MAX_EMPTY_STEPS = 3


class DistillationTrainer(TokenLevelTrainer, trl.DistillationTrainer):
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
        teacher_model = teacher_model if teacher_model is not None else args.teacher_model_name_or_path
        if teacher_model is None:
            raise ValueError(
                "There is no teacher. Pass `teacher_model`, or set `teacher_model_name_or_path` to a folder or a model "
                "on the Hub."
            )
        check_not_the_same(model, teacher_model)
        teacher = freeze(load_teacher(teacher_model, args))
        # TRL gets no teacher: it would compare sizes only, where ids have to be compared
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
        if self._is_vlm:
            raise ValueError("Models that take images are not supported for distillation. Use a text model.")
        check_vocab_sizes(heads.head_of(self.model).vocab_size, heads.head_of(teacher).vocab_size)
        self.teacher_chat_template = compare_tokenizers(self._tokenizer, teacher, args.trust_remote_code)
        self.teacher_model = wrap_teacher(teacher, self)

        self._start_accounting()
        keep_4bit_gradients_right(self.model)
        self.dropout_turned_off = 0
        if args.disable_dropout is not False:
            self.dropout_turned_off = turn_off_dropout(self.model, adapters_too=True)
        self.data_reports: list[MaskReport] = []
        if train_dataset is not None:
            self.train_dataset = self._prepare_train(train_dataset)
        if eval_dataset is not None:
            self.eval_dataset = self._prepare_evals(eval_dataset)
        self._empty_steps = 0
        self._eval_batches = 0

    # --- data ------------------------------------------------------------------------------------------------------

    @property
    def _tokenization(self) -> Tokenization:
        return Tokenization(self._tokenizer, template_kwargs=self.chat_template_kwargs)

    @property
    def _row_policy(self) -> RowPolicy:
        row_format = RowFormat(prompt_column=self.args.dataset_prompt_column, system_prompt=self.args.system_prompt)
        return RowPolicy(bad_rows=self.args.bad_rows, format=row_format)

    def _prepare_train(self, dataset: Any) -> Any:
        with global_then_local_main_first():
            dataset, report = prepare_prompts(
                dataset, self._tokenization, self._row_policy, name="train", num_proc=self.args.dataset_num_proc
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
        what = (
            "the completions of its rows" if mode == "dataset" else "completions the student samples from a fixed seed"
        )
        logger.info(f"{name}: the divergence is taken on {what} (eval_mode {mode})")
        prepare = prepare_sft if mode == "dataset" else prepare_prompts
        with global_then_local_main_first():
            dataset, report = prepare(dataset, self._tokenization, self._row_policy, name=name)
        self._note_report(report)
        return dataset

    def get_train_dataloader(self) -> DataLoader:
        """One window of prompts a step, `gradient_accumulation_steps` times as many batches as `Trainer` counts on."""
        accumulation, per_rank = self.args.gradient_accumulation_steps, self._train_batch_size
        window = per_rank * self.accelerator.num_processes * accumulation
        self._step, self._buffered_inputs = 0, None
        rows: Any
        if isinstance(self.train_dataset, IterableDataset):
            stream = self.train_dataset.shuffle(seed=self.args.seed) if self.shuffle_dataset else self.train_dataset
            rows = self._window_sampler = PromptStream(stream, window=window, repeats=accumulation)
        else:
            rows = PromptRows(self.train_dataset)
            self._window_sampler = WindowSampler(
                rows, window=window, repeats=accumulation, seed=self.args.seed, shuffle=bool(self.shuffle_dataset)
            )
        return self._get_dataloader(
            dataset=rows,
            description="Training",
            batch_size=per_rank * accumulation,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return self._window_sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return SequentialSampler(eval_dataset)

    # --- rollout ---------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """A window of rows -> the micro-batch that is due. The student writes once a window."""
        if not self.model.training:
            return self._prepare_eval_inputs(generation_batch)
        due = self._step % self.args.gradient_accumulation_steps
        if due == 0:
            seed = rollout_seed(self.args.seed, self.state.global_step, self.accelerator.process_index)
            self._buffered_inputs = self._roll_out(generation_batch, seed, self.args.gradient_accumulation_steps)
        assert self._buffered_inputs is not None, "a window starts at its first micro-batch"
        return self._buffered_inputs[due]

    def _prepare_eval_inputs(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        if "labels" in rows[0]:
            return self._to_device(pad_rows(rows, self._tokenizer.pad_token_id, self.pad_to_multiple_of))
        self._eval_batches += 1
        seed = rollout_seed(self.args.seed, -self._eval_batches, self.accelerator.process_index)
        return self._roll_out([{"weight": 1, **row} for row in rows], seed, parts=1)[0]

    def _roll_out(self, rows: list[dict[str, Any]], seed: int, parts: int) -> list[dict[str, Any]]:
        """Completions for some rows, counted over all ranks and cut into `parts` micro-batches on the device."""
        prompt_ids = [list(row["prompt_ids"]) for row in rows]
        with sampling(self.model, seed, self.accelerator.device):
            completion_ids = self._generate_single_turn(prompt_ids, None, {})
        rollout = Rollout(prompt_ids, [list(ids) for ids in completion_ids], [row["weight"] for row in rows])
        table = rollout_table(rollout, self.eos_token_ids)
        table = self.accelerator.gather(table.to(self.accelerator.device)).cpu()  # (R of all ranks, 4)
        self._describe(rollout, table)
        num_items = torch.tensor(trained_tokens(table), device=self.accelerator.device)
        batches = []
        for indices in micro_batches(len(rows), parts):
            batch = pad_rollout(rollout, indices, self._tokenizer.pad_token_id, self.pad_to_multiple_of)
            if self.args.strict_masks:
                check_batch(batch["input_ids"], batch["labels"], batch["attention_mask"])
            batches.append(self._to_device(batch) | {"num_items_in_batch": num_items})
        return batches

    def _to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {key: value.to(self.accelerator.device, non_blocking=True) for key, value in batch.items()}

    def _describe(self, rollout: Rollout, table: torch.Tensor) -> None:
        """TRL's `completions/*` and `num_tokens`, and the texts where `log_completions` asks for them."""
        metrics = self._metrics[self._mode]
        for name, value in completion_metrics(table).items():
            metrics[name].append(value)
        if self._mode == "train":
            self.state.num_input_tokens_seen += int(table[:, :2].sum())
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        if self.log_completions:
            for name, ids in (("prompt", rollout.prompt_ids), ("completion", rollout.completion_ids)):
                texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
                self._logs[name].extend(gather_object(texts))

    # --- loss ------------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Σ divergence over the completions' tokens ÷ N. `num_items_in_batch` of `Trainer`, counted before the
        rollout, is not used; nor are labels given to either model."""
        positions = inputs[POSITIONS]
        batch = {key: value for key, value in inputs.items() if key not in (POSITIONS, "num_items_in_batch")}
        loss_sum, per_token, entropy, _ = self._in_wrapped_forward(model, self._score, batch, positions)
        sums, tokens = self._sums[self._mode], len(positions)
        sums.add("entropy", entropy.sum(), tokens)
        if self._mode == "eval":
            self._count_evaluated(per_token, positions, batch["labels"].size(0))
            loss = global_mean(loss_sum, tokens)
        else:
            sums.add("distill/num_tokens_per_step", inputs["num_items_in_batch"], 1)
            loss = global_mean(loss_sum, inputs["num_items_in_batch"], self.accelerator.num_processes)
        return (loss, None) if return_outputs else loss

    def _score(self, unwrapped: Any, batch: dict[str, Any], positions: TrainedPositions) -> tuple:
        hidden = heads.predicting_states(unwrapped, batch, positions)
        unwrapped_teacher = self.accelerator.unwrap_model(self.teacher_model)
        with torch.no_grad():
            teacher_hidden = self._forward_redirection(
                self.teacher_model, unwrapped_teacher, heads.predicting_states, unwrapped_teacher, batch, positions
            )
        out = heads.divergence(
            hidden,
            heads.head_of(unwrapped),
            teacher_hidden,
            heads.head_of(unwrapped_teacher),
            targets=positions.targets,
            beta=self.beta,
            temperature=self.temperature,
            gather=gather_heads,
        )
        return out.loss_sum, out.per_token, out.entropy, out.correct

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch. A whole step without a trained token changes no weight; three in a row are an error."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert self._buffered_inputs is not None, "the micro-batch came from the buffer"
        if self._step % self.args.gradient_accumulation_steps == 0:
            self._end_step(empty=not int(self._buffered_inputs[0]["num_items_in_batch"]))
        return loss

    def _end_step(self, empty: bool) -> None:
        self._metrics["train"]["distill/empty_steps"].append(float(empty))
        self._empty_steps = self._empty_steps + 1 if empty else 0
        if empty:
            self.optimizer.zero_grad(set_to_none=True)  # a zero gradient would still move weights by Adam's momentum
        if self._empty_steps == MAX_EMPTY_STEPS:
            raise RuntimeError(
                f"{MAX_EMPTY_STEPS} steps in a row, up to step {self.state.global_step + 1}, had no token to train: "
                "every completion is masked. Look at `max_completion_length` and at what the student writes "
                "(`log_completions: true`)."
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
