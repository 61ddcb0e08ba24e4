"""A loss or a gradient that is not finite stops the run before the optimizer moves, or leaves that step out.

Every micro-batch adds to a flag on the device; it is read once an optimizer step, reduced over the ranks, so that all
of them decide the same. DeepSpeed moves the weights inside `backward` and fp16's scaler looks at gradients alone, so
with these two the losses are read before the step's last `backward`; a step that is to be left out then gets a gradient
of NaN, which both of them refuse to take.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object

from .data.find import find_rows
from .errors import NonFiniteError
from .metrics import MetricSums
from .shown import excerpt
from .step_file import flat, write_step
from .types import IGNORE_INDEX, TrainedPositions

logger = get_logger(__name__)

ON_NONFINITE = ("stop", "skip")
MAX_SKIPPED = 10  # steps in a row that `skip` leaves out
_SHOWN = 5


@dataclass
class MicroBatch:
    """What was scored: tensors of a micro-batch, and the loss (N,) of each of its trained tokens where it is known."""

    batch: dict[str, Any]
    positions: TrainedPositions | None
    per_token: torch.Tensor | None
    loss: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.batch["input_ids"]) if "input_ids" in self.batch else 1

    def bad_rows(self) -> list[int]:
        """Rows with a token whose loss is not finite; every row where the tokens' own losses do not tell."""
        if bool(self.loss.isfinite().all()):
            return []
        if self.positions is None or self.per_token is None:
            return list(range(self.num_rows))
        bad = set(self.positions.rows[~self.per_token.isfinite()].tolist())
        return sorted(bad) or list(range(self.num_rows))


class NonFiniteGuard:
    """Mixed into a TRL trainer, before it. Needs `_start_guard()` once TRL's constructor is done."""

    # what the trainer it is mixed into brings
    accelerator: Any
    args: Any
    optimizer: Any
    state: Any
    train_dataset: Any
    _tokenizer: Any
    _metrics: dict[str, Any]
    _sums: dict[str, MetricSums]
    _tr_loss: torch.Tensor

    def _start_guard(self) -> None:
        self._skipped_in_a_row = self._skipped_since_log = self._steps_since_log = 0
        self._in_training_step = False
        self._forget_step()
        plugin = self.accelerator.state.deepspeed_plugin if self._on_deepspeed else None
        if plugin is not None and plugin.zero_stage == 0 and self.args.on_nonfinite == "skip":
            raise ValueError(
                "`on_nonfinite: skip` needs ZeRO under DeepSpeed, which otherwise takes every gradient as it is. Set "
                "`on_nonfinite: stop`, or the config's `zero_stage` to 1 or more."
            )

    def _forget_step(self) -> None:
        self._scored: list[MicroBatch] = []
        self._loss_flag: torch.Tensor | None = None  # (), above 0 where a loss of this step is not finite
        self._refused = False  # whether this step is to be left out, decided before its last backward
        self._more_pieces = False  # whether a piece of a micro-batch is run that is not its last

    @property
    def _on_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    @property
    def _decides_early(self) -> bool:
        """Whether the losses must be read before the step's last backward (see above)."""
        return self._on_deepspeed or self.accelerator.scaler is not None

    # --- where the trainer calls in --------------------------------------------------------------------------------

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        self._forget_step()
        return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._scored and self.args.on_nonfinite == "skip":
            self._before_step = self._tr_loss.clone(), self._sums["train"].rows()
        self._in_training_step = True
        try:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._in_training_step = False

    def _note_loss(
        self,
        loss: torch.Tensor,
        batch: dict[str, Any],
        positions: TrainedPositions | None = None,
        per_token: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Take note of a training loss () before its backward, and return it: times NaN where the step must not be."""
        if not self._in_training_step or not torch.is_grad_enabled():
            return loss
        self._scored.append(MicroBatch(batch, positions, per_token, loss.detach()))
        bad = (~loss.detach().isfinite()).any().float()
        self._loss_flag = bad if self._loss_flag is None else self._loss_flag + bad
        # ranks run different numbers of pieces of a micro-batch, and all of them one that is the last
        if self._decides_early and self.accelerator.sync_gradients and not self._more_pieces:
            (bad_losses,) = self._over_ranks(self._loss_flag)
            if bad_losses:
                self._stop_or_say("loss")
                self._refused = True
                return loss * float("nan")
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Transformers' norm of the gradient, where it stands before the optimizer moves: the place to decide."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        what = "loss" if self._refused else self._what_is_bad(norm)
        if what:
            self._leave_out(what)
        else:
            self._skipped_in_a_row = 0
        self._steps_since_log += 1
        self._forget_step()
        return None if what else norm

    def _leave_out(self, what: str) -> None:
        """Let the optimizer do nothing at this step, and take back what was logged of it; or raise."""
        moved = self._on_deepspeed and not self.accelerator.optimizer_step_was_skipped
        if moved or not self._refused:
            self._stop_or_say(what, moved)
        if not self._decides_early:
            self.optimizer.zero_grad(set_to_none=True)  # a zero gradient would still move weights, by Adam's momentum
        self._skipped_in_a_row += 1
        self._skipped_since_log += 1
        loss, sums = self._before_step
        self._tr_loss.copy_(loss)
        self._sums["train"].restore(sums)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The logged loss is the mean over the steps that were taken; how many were not stands beside it."""
        if "loss" in logs and self.args.on_nonfinite == "skip":
            self._metrics["train"][f"{self._job}/nonfinite_steps"] = [float(self._skipped_since_log)]
            taken = self._steps_since_log - self._skipped_since_log
            if taken:
                logs["loss"] *= self._steps_since_log / taken
            else:
                del logs["loss"]
            self._steps_since_log = self._skipped_since_log = 0
        super().log(logs, start_time)  # type: ignore[misc]

    def _own_state(self) -> dict[str, Any]:
        counts = [self._steps_since_log, self._skipped_since_log, self._skipped_in_a_row]
        return {**super()._own_state(), "nonfinite": counts}  # type: ignore[misc]

    def _load_own_state(self, state: dict[str, Any]) -> None:
        super()._load_own_state(state)  # type: ignore[misc]
        self._steps_since_log, self._skipped_since_log, self._skipped_in_a_row = state.get("nonfinite", (0, 0, 0))

    # --- the decision ----------------------------------------------------------------------------------------------

    def _what_is_bad(self, norm: Any) -> str:
        """`loss`, `gradient` or nothing; the same on every rank. The one place that waits for the device."""
        flag = self._loss_flag
        if flag is None:
            flag = torch.zeros((), device=self.accelerator.device)
        if isinstance(norm, torch.distributed.tensor.DTensor):
            norm = norm.full_tensor()
        norm = torch.as_tensor(0.0 if norm is None else norm, dtype=torch.float32, device=flag.device)
        bad_losses, bad_norms = self._over_ranks(torch.stack([flag, (~norm.isfinite()).float()]))
        if bad_losses and not self._decides_early:
            return "loss"
        return "gradient" if bad_norms and not self._scaler_handles_it() else ""

    def _scaler_handles_it(self) -> bool:
        """Whether a gradient that is not finite is fp16's loss scale being too large, as happens and is mended."""
        scaler = self.accelerator.scaler
        if scaler is None:  # DeepSpeed has one of its own, and stops by itself where it cannot go lower
            return self.accelerator.mixed_precision == "fp16"
        return bool(scaler.get_scale() > 1.0)

    def _over_ranks(self, flags: torch.Tensor) -> list[float]:
        return self.accelerator.reduce(flags.reshape(-1), "sum").tolist()

    def _stop_or_say(self, what: str, moved: bool = False) -> None:
        """Raise `NonFiniteError`, the step's file written; or say that the step is left out. Called on every rank."""
        ranks = gather_object([self._rows_of_step(what)])
        rows, total = [row for rank, _ in ranks for row in rank], sum(number for _, number in ranks)
        step = self.state.global_step + 1
        where = _listed(rows)
        if what == "loss":
            found = f"step {step}: the loss of {len(rows)} of {total} rows is not finite"
        else:
            found = f"step {step}: the gradient is not finite, though every loss is; its {len(rows)} rows"
        found += f" (objective {self._objective})"
        if self.args.on_nonfinite == "skip" and self._skipped_in_a_row < MAX_SKIPPED and not moved:
            logger.warning(f"{found}: left out, no weight was changed (`on_nonfinite: skip`)\n{where}")
            return
        path = self._write_step(step, what, rows)
        if moved:
            kept = "DeepSpeed has changed the weights by it already: go back to the last checkpoint."
        elif self.args.on_nonfinite == "skip":
            kept = f"The {MAX_SKIPPED} steps before it were like that, and left out. None of them changed a weight."
        else:
            kept = "No weight was changed."
        raise NonFiniteError(
            f"{found}. {kept}\n{where}\nIts micro-batches are in {path}. To see where it begins, give the recipe to\n"
            f"  trl-opd check {self._job} --batch {path} --config RECIPE\n"
            "Rows that it names: leave them out. Weights: go back to a checkpoint, with a smaller `learning_rate`, a "
            "`max_grad_norm` of 1 or less, or `bf16` in the place of `fp16`. `on_nonfinite: skip` leaves such steps "
            "out, and counts them."
        )

    # --- what it was -----------------------------------------------------------------------------------------------

    @property
    def _job(self) -> str:
        return "distill" if hasattr(self, "teacher") else "sft"

    @property
    def _objective(self) -> str:
        settings = getattr(self, "_settings", None)
        if settings is None:
            return "of TRL's own code"
        return settings.objective + (f", beta {settings.beta}" if settings.objective == "divergence" else "")

    def _rows_of_step(self, what: str) -> tuple[list[dict[str, Any]], int]:
        """This rank's rows that it is about, with their places in the dataset and a bit of text; and how many there
        were."""
        found, total = [], 0
        for number, scored in enumerate(self._scored):
            total += scored.num_rows
            for row in scored.bad_rows() if what == "loss" else range(scored.num_rows):
                about = {"rank": self.accelerator.process_index, "micro_batch": number, "row": row}
                found.append(about | self.place_of_row(scored.batch, row))
        return found, total

    def place_of_row(self, batch: dict[str, Any], row: int) -> dict[str, Any]:
        """Where a batch's row stands in the dataset (`places`, empty where it cannot be told), and a bit of `text`."""
        if batch.get("input_ids") is None:
            return {"places": [], "text": ""}
        ids, mask, labels = batch["input_ids"][row], batch.get("attention_mask"), batch.get("labels")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.dim() != 2 else mask[row].bool()
        if self._job == "distill" and labels is not None:  # a completion is new; the prompt is what the dataset has
            trained = (labels[row] != IGNORE_INDEX).nonzero()
            real = real & (torch.arange(len(ids), device=ids.device) < (trained[0] if len(trained) else len(ids)))
        column = "prompt_ids" if self._job == "distill" else "input_ids"
        known = ids[real].tolist()
        return {
            "places": find_rows(self.train_dataset, column, known),
            "text": excerpt(self._tokenizer.decode(known, skip_special_tokens=True)),
        }

    def _write_step(self, step: int, what: str, rows: list[dict[str, Any]]) -> str:
        """Every rank's micro-batches in one file; its path. A name that begins with `_` is never pushed to the Hub."""
        path = os.path.join(self.args.output_dir, f"_nonfinite_step_{step}.safetensors")
        batches = [batch for rank in gather_object([[flat(m.batch) for m in self._scored]]) for batch in rank]
        if self.accelerator.is_main_process:
            os.makedirs(self.args.output_dir, exist_ok=True)
            about = {"job": self._job, "step": step, "what": what, "objective": self._objective, "rows": rows}
            write_step(path, about, batches)
        self.accelerator.wait_for_everyone()
        return path


def row_name(row: dict[str, Any]) -> str:
    """Where a row is: its place in the dataset, or else in the step."""
    if not row["places"]:
        rank = f"rank {row['rank']}, " if "rank" in row else ""
        return f"{rank}micro-batch {row['micro_batch']}, row {row['row']}"
    others = f" (and {len(row['places']) - 1} like it)" if len(row["places"]) > 1 else ""
    return f"row {row['places'][0]} of the train dataset{others}"


def _listed(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows[:_SHOWN]:
        lines.append(f"  {row_name(row)}: {row['text']}")
    if len(rows) > _SHOWN:
        lines.append(f"  ... and {len(rows) - _SHOWN} more")
    return "\n".join(lines)
