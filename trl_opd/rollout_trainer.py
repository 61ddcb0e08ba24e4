"""The data side of on-policy distillation: prompts in order, completions from the student or the dataset, micro-batches
that are counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import IterableDataset
from torch.utils.data import DataLoader, SequentialSampler

from ._trl import completions_shown
from .accuracy import ANSWER, can_verify, is_right
from .balance import deal, micro_batches, row_lengths
from .data.collate import AHEAD, NUM_ITEMS, POSITIONS, SAMPLED, SIZES, TEACHER, pad_rollout, pad_rows
from .data.pieces import stretches
from .data.sampler import PromptRows, PromptStream, WindowSampler
from .errors import NonFiniteError
from .few_tokens import fast_on_few_tokens
from .generation import ended_rows_leave
from .layouts import shards_weights
from .losses.objectives import Settings as LossSettings
from .masking import check_batch
from .prompt_data import PromptData
from .rollout import (
    completion_metrics,
    counts_by_step,
    horizon,
    rollout_seed,
    rollout_table,
    sampling,
)
from .shown import printable
from .teachers.adapter import AdapterTeacher
from .teachers.ahead import Share, shares
from .teachers.local import LocalTeacher
from .types import IGNORE_INDEX, FusedOutput, Rollout, TrainedPositions

logger = get_logger(__name__)


class RolloutTrainer(PromptData):
    """Mixed into `trl.DistillationTrainer`, before it. Its `_generate_single_turn` is where the student writes."""

    # what `trl.DistillationTrainer` and our own constructor bring
    state: Any
    model_wrapped: Any
    train_dataset: Any
    shuffle_dataset: bool | None
    max_completion_length: int
    eos_token_ids: list[int]
    generation_config: Any
    use_vllm: bool
    vllm_generation: Any
    log_completions: bool
    teacher: LocalTeacher | AdapterTeacher
    _logs: dict[str, Any]
    _step: int
    _train_batch_size: int
    _get_dataloader: Callable[..., DataLoader]
    _generate_single_turn: Callable[..., list[list[int]]]
    _log_probs: Callable[..., FusedOutput]
    _settings: LossSettings
    _schedule: list[tuple[float, int]]
    _eval_batches: int
    _rows_leave: bool
    _shares: dict[int, Share]

    # --- data ------------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> int:
        """Micro-batches that one rollout is cut into, on each rank."""
        return self.args.steps_per_generation or self.args.gradient_accumulation_steps

    @property
    def _steps_a_window(self) -> int:
        return max(self._parts // self.args.gradient_accumulation_steps, 1)

    def get_train_dataloader(self) -> DataLoader:
        """One window of prompts a rollout, `steps_per_generation` times as many batches as `Trainer` counts on."""
        if self.args.auto_find_batch_size:
            self._train_batch_size = self._of_whole_groups(self._train_batch_size)
        parts, per_rank = self._parts, self._train_batch_size
        self._step, self._buffered_inputs = 0, None
        rows: Any = PromptRows(self.train_dataset)
        order = {
            "window": per_rank * self.accelerator.num_processes * parts,
            "repeats": parts,
            "seed": self.args.seed,
            "copies": self.args.num_generations,
            "ranks": self.accelerator.num_processes,
            "steps": self._steps_a_window,
        }
        in_order = getattr(self.args, "train_sampling_strategy", "random") == "sequential"
        shuffle = bool(self.shuffle_dataset) and not in_order
        if isinstance(self.train_dataset, IterableDataset):
            stream = self.train_dataset.shuffle(seed=self.args.seed) if shuffle else self.train_dataset
            rows = self._window_sampler = PromptStream(stream, **order)
        else:
            self._window_sampler = WindowSampler(rows, **order, shuffle=shuffle)
        return self._get_dataloader(
            dataset=rows,
            description="Training",
            batch_size=per_rank * parts,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _of_whole_groups(self, batch: int) -> int:
        """The largest batch up to this one of which a rollout holds all `num_generations` of each prompt."""
        copies, others = self.args.num_generations, self._parts * self.accelerator.num_processes
        for size in range(batch, 0, -1):
            if size * others % copies == 0:
                return size
        raise ValueError(
            f"auto_find_batch_size: no batch of {batch} rows or fewer holds whole groups of `num_generations: "
            f"{copies}`. Lower `num_generations` or `max_completion_length`, or raise `gradient_accumulation_steps`."
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
        parts, accumulation = self._parts, self.args.gradient_accumulation_steps
        due = self._step % parts
        if due == 0:
            seed = rollout_seed(self.args.seed, self.state.global_step, self.accelerator.process_index)
            self._buffered_inputs = self._roll_out(generation_batch, seed, parts)
            if parts > accumulation and self._settings.objective == "policy_gradient":
                self._note_sampled_log_probs(self._buffered_inputs)
        if due % accumulation == 0 and parts > accumulation:
            self._metrics["train"]["distill/staleness"].append(float(due // accumulation))
        assert self._buffered_inputs is not None, "a window starts at its first micro-batch"
        self._step_tokens, self._step_rows = self._window_counts[due // accumulation]
        if due % accumulation == 0:
            self._shares = self._look_ahead(self._buffered_inputs[due : due + accumulation])
        share = self._shares.pop(due % accumulation, None)
        return self._buffered_inputs[due] | ({AHEAD: share} if share else {})

    def _look_ahead(self, batches: list[dict[str, Any]]) -> dict[int, Share]:
        """Which of a step's micro-batches the teacher is run on at once (`teacher_max_tokens`)."""
        if self.args.teacher_max_tokens is None:
            return {}
        shown = [batch.get(TEACHER, batch) for batch in batches]
        rows = [batch[SIZES].tokens for batch in shown]
        sizes = [[len(tokens), max(tokens, default=0), sum(tokens)] for tokens in rows]
        if shards_weights(self.accelerator.state):  # every rank is in every pass
            table = torch.tensor(sizes, device=self.accelerator.device)
            sizes = self.accelerator.gather(table.unsqueeze(0)).amax(0).tolist()
        found = stretches(sizes, self.args.teacher_max_tokens, self.teacher.flat)
        several = [stretch for stretch in found if len(stretch) > 1]
        if not several:
            logger.warning_once(
                f"teacher_max_tokens is {self.args.teacher_max_tokens}, and no two micro-batches of a step that follow "
                "one another have so few tokens together: the teacher scores each by itself. Raise it, or leave it "
                "out. Further steps like this one are not reported."
            )
        return shares(shown, several)

    def _own_state(self) -> dict[str, Any]:
        """With what is left of a rollout, where the next step does not begin one."""
        state, due = super()._own_state(), self._step % self._parts
        if due and self._buffered_inputs is not None:
            left = [None] * due + self._buffered_inputs[due:]
            state["rollout"] = {"due": due, "micro_batches": left, "counts": [list(c) for c in self._window_counts]}
        if self.log_completions:
            state["completions"] = {name: list(self._logs[name]) for name in ("prompt", "completion")}
        return state

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)
        if rollout := state.get("rollout"):
            self._step, self._buffered_inputs = rollout["due"], rollout["micro_batches"]
            self._window_counts = [tuple(counts) for counts in rollout["counts"]]
        for name, texts in state.get("completions", {}).items():
            self._logs[name].extend(texts)

    def _note_sampled_log_probs(self, batches: list[dict[str, Any]]) -> None:
        """Keep what the student thought of its tokens when it wrote them: later steps weigh by what has changed."""
        for batch in batches:
            if not len(batch["labels"]):
                continue
            with torch.no_grad():
                parts = [
                    self._in_wrapped_forward(self.model_wrapped, self._log_probs, dict(piece), piece[POSITIONS])
                    for piece in self._pieces(batch)
                ]
            batch[SAMPLED] = torch.cat([part.per_token.neg() for part in parts])

    def _prepare_eval_inputs(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        pad = self._tokenizer.pad_token_id, self.args.pad_to_multiple_of
        if "labels" in rows[0]:
            return self._to_device(pad_rows(rows, *pad))
        if "reference_ids" in rows[0]:
            prompts, completions, labels = map(list, zip(*(_reference(row) for row in rows), strict=True))
            shown = [row["teacher_prompt_ids"] for row in rows]
            given = Rollout(prompts, completions, labels, [1] * len(rows), [False] * len(rows), shown)
            return self._to_device(pad_rollout(given, range(len(rows)), *pad))
        self._eval_batches += 1
        seed = rollout_seed(self.args.seed, -self._eval_batches, self.accelerator.process_index)
        return self._roll_out([{"weight": 1, **row} for row in rows], seed, parts=1)[0]

    def _roll_out(self, rows: list[dict[str, Any]], seed: int, parts: int) -> list[dict[str, Any]]:
        """Completions for some rows, counted over all ranks and cut into `parts` micro-batches on the device."""
        rollout = self._completed(rows, seed)
        table = rollout_table(rollout, self.eos_token_ids)
        table = self.accelerator.gather(table.to(self.accelerator.device)).cpu()  # (R of all ranks, 7)
        self._describe(rollout, table)
        if self._mode == "eval" and self.args.eval_accuracy is not False and ANSWER in rows[0] and can_verify():
            self._check_answers(rollout, [row[ANSWER] for row in rows])
        # N is counted an optimizer step: over its micro-batches, on every rank
        steps = max(parts // self.args.gradient_accumulation_steps, 1)
        self._window_counts = counts_by_step(table, self.accelerator.num_processes, steps)
        balance = self.args.balance_micro_batches and self._mode == "train"  # an evaluation counts rows in their order
        if balance and self.accelerator.num_processes > 1:
            rollout = deal(gather_object([rollout]), self.accelerator.process_index, steps)
        batches = []
        cut = micro_batches(
            row_lengths(rollout), parts, steps=steps, balance=balance, merge=self._merges, flat=self._all_flat
        )
        for i, indices in enumerate(cut):
            batch = pad_rollout(rollout, indices, self._tokenizer.pad_token_id, self.args.pad_to_multiple_of)
            if self.args.strict_masks and indices:
                check_batch(batch["input_ids"], batch["labels"], batch["attention_mask"])
            tokens = self._window_counts[i * steps // parts][0]
            batches.append(self._to_device(batch) | {NUM_ITEMS: torch.tensor(tokens, device=self.accelerator.device)})
        return batches

    def _completed(self, rows: list[dict[str, Any]], seed: int) -> Rollout:
        """Each row with its completion: the student's where its draw falls below `lmbda`, else the dataset's or the
        teacher's."""
        lmbda = self.args.lmbda if self.model.training else 1.0
        on_policy = [row.get("draw", -1.0) < lmbda for row in rows]
        prompts = [list(row["prompt_ids"]) for row in rows]
        shown = [list(row["teacher_prompt_ids"]) for row in rows] if "teacher_prompt_ids" in rows[0] else None
        self._set_horizon()
        own = [prompt for prompt, on in zip(prompts, on_policy, strict=True) if on]
        with sampling(self.model, seed, self.accelerator.device):
            written = iter(self._on_every_rank(own, prompts, self._student_completions))
        if self.args.seq_kd and lmbda < 1.0:
            asked = [prompt for prompt, on in zip(shown or prompts, on_policy, strict=True) if not on]
            with sampling(self.model, seed ^ 1, self.accelerator.device):
                dictated = iter(self._on_every_rank(asked, prompts, self._teacher_completions))
        prompt_ids, completion_ids, labels = [], [], []
        for row, prompt, on in zip(rows, prompts, on_policy, strict=True):
            if on or self.args.seq_kd:
                completion = trained = list(next(written if on else dictated))
                if on and self._is_truncated(completion):
                    trained = [IGNORE_INDEX] * len(completion)
            else:
                prompt, completion, trained = _reference(row)
            prompt_ids.append(prompt)
            completion_ids.append(completion)
            labels.append(trained if row["weight"] else [IGNORE_INDEX] * len(completion))
        return Rollout(prompt_ids, completion_ids, labels, [row["weight"] for row in rows], on_policy, shown)

    def _is_truncated(self, completion: list[int]) -> bool:
        """Whether `mask_truncated_completions` leaves a completion out: at its full length without a stop token."""
        if not (self.args.mask_truncated_completions and self.model.training):
            return False
        return len(completion) >= self.max_completion_length and completion[-1] not in self.eos_token_ids

    def _on_every_rank(self, prompts: list[list[int]], window: list[list[int]], write: Any) -> list[list[int]]:
        """`write(prompts)`. Where another rank writes, this one does too, if only to throw it away: ZeRO-3 and FSDP
        need every rank in every forward."""
        wanted = torch.tensor(len(prompts), device=self.accelerator.device)
        if not int(self.accelerator.reduce(wanted)):
            return []
        completions = write(prompts or window[:1])
        return completions if prompts else []

    def _student_completions(self, prompts: list[list[int]]) -> list[list[int]]:
        student = self.accelerator.unwrap_model(self.model_wrapped)
        try:
            leave = ended_rows_leave(student) if self._rows_leave else nullcontext()
            with leave, fast_on_few_tokens(student):
                return self._generate_single_turn(prompts, None, {})
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):  # torch's words, where there is nothing to sample from
                raise
            raise NonFiniteError(
                f"step {self.state.global_step + 1}: the student's probabilities are not finite while it writes, so "
                "its weights are not, or its activations overflow. No weight was changed by it. `trl-opd check "
                "distill` looks at the weights; go back to a checkpoint, or set `bf16: true` in the place of `fp16`.",
                everywhere=False,
            ) from error

    def _set_horizon(self) -> None:
        """The rollout's length by the schedule; an evaluation has the full one."""
        if not self._schedule:
            return
        length = self.max_completion_length
        if self._mode == "train":
            length = horizon(self._schedule, self.state.global_step / max(self.state.max_steps, 1))
            self._metrics["train"]["distill/horizon"].append(float(length))
        self.generation_config.max_new_tokens = length
        if self.use_vllm:
            self.vllm_generation.max_completion_length = length

    def _teacher_completions(self, prompts: list[list[int]]) -> list[list[int]]:
        """What the teacher writes, sampled as the student is (`seq_kd`)."""
        return self.teacher.write(
            self.accelerator.unwrap_model(self.model),
            prompts,
            self.generation_config,
            pad_token_id=self._tokenizer.pad_token_id,
            stop_ids=self.eos_token_ids,
            rows_leave=self._rows_leave,
        )

    def _check_answers(self, rollout: Rollout, answers: list[Any]) -> None:
        texts = self._tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
        right = torch.tensor([float(is_right(*pair)) for pair in zip(texts, answers, strict=True)])
        right = self.accelerator.gather_for_metrics(right.to(self.accelerator.device))
        self._sums["eval"].add("accuracy", right.sum(), right.numel())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, whose table of completions goes to the terminal."""
        with completions_shown(printable):
            super().log(logs, start_time)

    def _to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        device = self.accelerator.device
        return {
            key: self._to_device(value)
            if isinstance(value, dict)
            else value.to(device, non_blocking=True)
            if isinstance(value, (torch.Tensor, TrainedPositions))
            else value
            for key, value in batch.items()
        }

    def _describe(self, rollout: Rollout, table: torch.Tensor) -> None:
        """TRL's `completions/*` and `num_tokens`, and the texts where `log_completions` asks for them."""
        metrics = self._metrics[self._mode]
        for name, value in completion_metrics(table).items():
            metrics[name].append(value)
        counted = max(int(table[:, 5].sum()), 1)
        if self.args.lmbda < 1.0 and self._mode == "train":
            metrics["distill/on_policy_rows"].append(int(table[:, 4].sum()) / counted)
        if self.args.mask_truncated_completions:
            masked = ((table[:, 3] == 0) & (table[:, 1] > 0) & (table[:, 4] > 0)).sum()
            metrics["distill/masked_completions"].append(int(masked) / counted)
        if self._mode == "train":
            self.state.num_input_tokens_seen += int(table[:, :2].sum())
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        if self.log_completions:
            for name, ids in (("prompt", rollout.prompt_ids), ("completion", rollout.completion_ids)):
                texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
                self._logs[name].extend(gather_object(texts))


def _reference(row: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Prompt, completion and the completion's labels of a row with its own completion."""
    ids, labels = row["reference_ids"], row["reference_labels"]
    start = next(i for i, label in enumerate(labels) if label != IGNORE_INDEX)
    return ids[:start], ids[start:], labels[start:]
