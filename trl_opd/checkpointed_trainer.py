"""A trainer's checkpoints: staged and published whole, gone on from exactly, and never lost to a failed save."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from . import checkpoints, resume, run_lock
from .errors import RunError
from .fingerprint import fingerprint, versions
from .layouts import whole_weights, without_tied_copies
from .types import RowSizes, TrainedPositions

logger = logging.getLogger(__name__)


class CheckpointedTrainer:
    """Mixed into a trainer, before it."""

    args: Any
    state: Any
    accelerator: Any
    model: Any
    is_world_process_zero: Callable[[], bool]
    is_local_process_zero: Callable[[], bool]

    _is_staging = False
    _failed_saves = 0
    _save_error: Exception | None = None
    _compared: str | None = None  # a checkpoint that was found to be whole, and this run's
    _fingerprint: dict[str, Any] | None = None
    _branched_at: int | None = None  # the step that training started from, until its first save

    # --- going on --------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.train`. A checkpoint is taken only if it is complete and of the same recipe and data.

        `True` takes the newest such one. Raises `UsageError` otherwise, and where another process trains into
        `output_dir`.
        """
        checkpoint: str | None = None
        locked = self.is_world_process_zero() and run_lock.take(self.args.output_dir)
        try:
            if resume_from_checkpoint and resume_from_checkpoint == self._compared:
                checkpoint, self._compared = self._compared, None  # looked at when the trainer was built
            elif resume_from_checkpoint:
                anyway = self.args.resume_anyway
                checkpoint = resume.claim(self.args.output_dir, resume_from_checkpoint, anyway=anyway)
                self.compare_with(checkpoint)
            self._branched_at = (checkpoints.step_of(checkpoint) if checkpoint else None) or 0
            return super().train(checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            if locked:
                run_lock.release(self.args.output_dir)

    def compare_with(self, checkpoint: str | None) -> None:
        """Raise `UsageError` with the differences where a checkpoint is of another recipe or other data."""
        if checkpoint is not None:
            anyway = self.args.resume_anyway
            resume.on_main_process(lambda: resume.compare(checkpoint, self._own_fingerprint(), anyway=anyway))
            self._compared = checkpoint

    def _own_fingerprint(self) -> dict[str, Any]:
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self)
        return self._fingerprint

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint, first = kwargs["resume_from_checkpoint"], kwargs["epoch"] == kwargs["epochs_trained"]
        if checkpoint is not None and first:
            self._go_on_with_own_state(Path(checkpoint))
        return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _go_on_with_own_state(self, checkpoint: Path) -> None:
        manifest, path = checkpoints.read_manifest(checkpoint), self._own_state_file(checkpoint)
        if manifest is None or not path.is_file():
            return  # another tool's checkpoint
        if manifest.get("processes") != self.accelerator.num_processes:  # `resume_anyway`
            if self.is_world_process_zero():
                logger.warning(
                    f"{checkpoint} is of {manifest.get('processes')} processes and this run has "
                    f"{self.accelerator.num_processes}: what was counted since its last log, and the rest of its "
                    "rollout if there was one, are not taken over"
                )
            return
        device = self.accelerator.device
        place = "cpu" if device.type == "cpu" else device  # torch knows no "cpu:0" here
        with torch.serialization.safe_globals([TrainedPositions, RowSizes]):
            self._load_own_state(torch.load(path, map_location=place, weights_only=True))

    def _own_state(self) -> dict[str, Any]:
        """What this process has to keep beside transformers' state, for `torch.load` with `weights_only`."""
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Take back what `_own_state` gave."""

    def _own_state_file(self, folder: Path) -> Path:
        return folder / f"trl_opd_state_{self.accelerator.process_index}.pt"

    # --- saving ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer`'s, as a folder that `from_pretrained` reads, whatever the layout keeps its checkpoints as."""
        with nullcontext() if self._is_staging else whole_weights(self):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, without_tied_copies(self.accelerator.unwrap_model(self.model), state_dict))  # type: ignore[misc]

    def _get_output_dir(self, trial: Any) -> str:
        place = super()._get_output_dir(trial)  # type: ignore[misc]
        return os.path.join(place, checkpoints.STAGING) if self._is_staging else place

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._is_staging:  # what is staged is pushed when it is published
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Written to `_staging`, sealed, renamed. What goes wrong on any rank is known to all before the rename."""
        output_dir = Path(super()._get_output_dir(trial))  # type: ignore[misc]
        staged = output_dir / checkpoints.STAGING / f"checkpoint-{self.state.global_step}"
        final, best_before = output_dir / staged.name, self.state.best_model_checkpoint
        if self.is_local_process_zero():
            shutil.rmtree(staged.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        whole = self._on_every_rank_done(lambda: self._stage(model, trial, staged))
        if whole and self.state.best_model_checkpoint and Path(self.state.best_model_checkpoint) == staged:
            self.state.best_model_checkpoint = str(final)
        whole = whole and self._on_every_rank_done(lambda: self._publish(staged, output_dir, self.args.should_save))
        # still there on a node that does not share its disk with the first: it keeps its own part
        apart = self.is_local_process_zero() and staged.is_dir()
        whole = whole and self._on_every_rank_done(lambda: self._publish(staged, output_dir, apart))
        if not whole:
            self.state.best_model_checkpoint = best_before
            self._report_failed_save(output_dir)
            return
        self._branched_at = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _stage(self, model: Any, trial: Any, staged: Path) -> None:
        self._is_staging = True
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._is_staging = False
        state = {} if self.args.save_only_model else self._own_state()
        if state:
            torch.save(state, self._own_state_file(staged))

    def _on_every_rank_done(self, work: Callable[[], None]) -> bool:
        """Whether `work()` could write on all ranks; why it could not here is kept in `_save_error`."""
        self._save_error = None
        try:
            work()
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _is_of_writing(error):
                raise
            self._save_error = error
        failed = torch.tensor([self._save_error is not None], device=self.accelerator.device)
        return not bool(self.accelerator.gather(failed).any())

    def _publish(self, staged: Path, output_dir: Path, here: bool) -> None:
        if not here:
            return
        if self.is_world_process_zero():
            self.state.save_to_json(str(staged / checkpoints.STATE))  # now that the best one has its final name
        processes = self.accelerator.num_processes
        facts = {"step": self.state.global_step, "processes": processes, "versions": versions()}
        checkpoints.seal(staged, **facts, fingerprint=self._own_fingerprint())
        if self._branched_at is not None and (moved := checkpoints.set_aside(output_dir, self._branched_at)):
            logger.warning(
                f"{', '.join(path.name for path in moved)} of an earlier run moved to {moved[0].parent}: this run "
                f"started from step {self._branched_at}"
            )
        final = checkpoints.publish(staged, output_dir)
        best = self.state.best_model_checkpoint
        checkpoints.rotate(output_dir, self.args.save_total_limit, {final} | ({Path(best)} if best else set()))
        shutil.rmtree(staged.parent, ignore_errors=True)

    def _report_failed_save(self, output_dir: Path) -> None:
        """Raise `RunError`, or with `on_save_error: continue` say it, count it and go on."""
        self._failed_saves += 1
        if self.is_local_process_zero():
            shutil.rmtree(output_dir / checkpoints.STAGING, ignore_errors=True)
        whole = checkpoints.checkpoints(output_dir)
        left = f"{whole[0].name} and earlier ones are untouched" if whole else "there is no earlier one"
        error = self._save_error
        why = f"{type(error).__name__}: {error}" if error is not None else "another process says why"
        said = f"the checkpoint of step {self.state.global_step} was not written to {output_dir} ({why}); {left}"
        free = f"{shutil.disk_usage(output_dir).free / 1e9:.1f} GB are free" if output_dir.is_dir() else "it is gone"
        advice = f"{free} there. Make room, lower `save_total_limit`, or set `save_only_model: true`"
        if self.args.on_save_error == "stop":
            raise RunError(f"{said}. {advice}, and start again; `on_save_error: continue` would train on without it")
        logger.warning(f"{said}. {advice}. Training goes on; failed saves so far: {self._failed_saves}")


def _is_of_writing(error: RuntimeError) -> bool:
    """Whether `torch.save` could not write: it says so in a `RuntimeError`."""
    return any(sign in str(error) for sign in ("PytorchStreamWriter", "inline_container", "Parent directory"))
