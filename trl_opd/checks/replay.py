"""`trl-opd check --batch`: the step that stopped a run, taken again piece by piece, to see where it goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import heads, resume
from .._trl import load_weights
from ..data.collate import OFF_POLICY, POSITIONS, SAMPLED, TEACHER
from ..losses.objectives import Settings
from ..losses.reduce import global_mean, row_sums
from ..masking import trained_positions
from ..nonfinite import row_name
from ..shown import excerpt
from ..step_file import StepFile
from ..types import TrainedPositions
from .preflight import ERROR, OK, Finding, check_weights
from .weights import listed, nonfinite_parameters

CROSS_ENTROPY = Settings("cross_entropy")
_SHOWN = 10


@dataclass
class Found:
    """What was seen over the whole step: bad rows by the name of the tensor, mean losses of the rows that are finite,
    weights whose gradient is bad."""

    bad: dict[str, list[str]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, tuple[int, int]] = field(default_factory=dict)

    def see(self, tensor: str, rows: list[str]) -> None:
        self.bad.setdefault(tensor, []).extend(rows)


def replay(trainer: Any, step: StepFile) -> list[Finding]:
    """Take a step again, on the weights of the checkpoint that the run would go on from; none of them is changed."""
    args = trainer.args
    checkpoint = resume.find(args.output_dir, args.resume_from_checkpoint, anyway=True)
    if checkpoint is not None:
        load_weights(trainer, checkpoint)
    findings = [_what_it_is(step, checkpoint, trainer), *check_weights(trainer)]
    found, whole = Found(), sum(len(batch[POSITIONS]) for batch in step.batches if POSITIONS in batch)
    for number, batch in enumerate(step.batches):
        _look_at(trainer, _on(trainer.accelerator.device, batch), number, max(whole, 1), found)
    for tensor, rows in found.bad.items():
        message = f"not finite in {len(rows)} rows\n" + _first(rows) if rows else "finite"
        if tensor == "loss" and found.losses:
            message += f"\nfinite rows: {len(found.losses)}, {min(found.losses):.4g} to {max(found.losses):.4g} a token"
        findings.append(Finding(ERROR if rows else OK, tensor, message))
    if found.gradients:
        message = f"not finite in {len(found.gradients)} tensors\n{listed(found.gradients)}"
        findings.append(Finding(ERROR, "gradients by weight", message))
    if all(finding.level == OK for finding in findings):
        fix = "give the weights it happened with: `--model_name_or_path`, or `--resume_from_checkpoint`"
        findings.append(Finding("warning", "result", "everything is finite: it does not happen here", fix))
    return findings


def _what_it_is(step: StepFile, checkpoint: str | None, trainer: Any) -> Finding:
    about = step.about
    rows = sum(len(batch.get("input_ids", ())) for batch in step.batches)
    weights = checkpoint or trainer.model.config._name_or_path
    text = f"step {about['step']} ({about['objective']}), whose {about['what']} was not finite: {rows} rows"
    return Finding(OK, "step", f"{text} in {len(step.batches)} micro-batches\non the weights of {weights}")


def _first(lines: list[str]) -> str:
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join(lines[:_SHOWN] + more)


# --- one micro-batch -------------------------------------------------------------------------------------------------


def _look_at(trainer: Any, batch: dict[str, Any], number: int, whole: int, found: Found) -> None:
    """Its states, log-probabilities, losses and gradients, in this order: the first that is bad is where it begins."""
    trainer.model.train()
    rows = range(len(batch["input_ids"])) if "input_ids" in batch else range(0)
    names = [_row(trainer, batch, number, row) for row in rows]
    if getattr(trainer, "_trl_does_it", "") or POSITIONS not in batch:
        _whole_loss(trainer, batch, whole, found, names)
        return
    positions = batch[POSITIONS]
    with torch.no_grad(), trainer.accelerator.autocast():
        for who, hidden, head, at in _states(trainer, batch, positions):
            found.see(f"{who}states", _rows_with(~hidden.isfinite().all(1), at, names))
            scored = heads.token_loss(
                CROSS_ENTROPY, hidden, head, targets=at.targets, shared_ids=_shared(trainer), ranks=trainer._ranks
            )
            found.see(f"{who}log-probs", _rows_with(~scored.per_token.isfinite(), at, names))
    out = _score(trainer, batch)
    found.see("loss", _bad_losses(trainer, out.per_token, positions, names))
    sums, counts = row_sums(out.per_token.float(), positions.rows, len(names))
    means = (sums / counts.clamp(min=1))[counts > 0]
    found.losses += means[means.isfinite()].tolist()
    found.see("gradient", _bad_gradients(trainer, batch, out.loss_sum, whole, names, found))


def _states(trainer: Any, batch: dict[str, Any], positions: TrainedPositions) -> Any:
    """(whose, states (N, H), head, positions) of the student, and of the teacher where there is one."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    inputs = {key: value for key, value in batch.items() if key not in (POSITIONS, OFF_POLICY, SAMPLED, TEACHER)}
    teacher = getattr(trainer, "teacher", None)
    whose = "" if teacher is None else "student's "
    yield whose, heads.predicting_states(model, inputs, positions), heads.head_of(model), positions
    if teacher is not None:
        shown = batch.get(TEACHER) or {**inputs, POSITIONS: positions}
        yield "teacher's ", *teacher.states(model, shown, shown[POSITIONS]), shown[POSITIONS]


def _score(trainer: Any, batch: dict[str, Any]) -> Any:
    inputs = {key: value for key, value in batch.items() if key != POSITIONS}
    return trainer._in_wrapped_forward(trainer.model, trainer._score, inputs, batch[POSITIONS])


def _whole_loss(trainer: Any, batch: dict[str, Any], whole: int, found: Found, names: list[str]) -> None:
    """A loss of TRL's own code: it has no tokens, so the micro-batch is taken as one."""
    inputs = {key: value for key, value in batch.items() if key != POSITIONS}
    loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(whole))
    found.see("loss", [] if bool(loss.isfinite().all()) else names)
    found.see("gradient", names if _gradients_of(trainer, loss, found) else [])


def _bad_losses(trainer: Any, per_token: torch.Tensor, positions: TrainedPositions, names: list[str]) -> list[str]:
    """Each row with a bad token: how many of its tokens, and which."""
    bad, lines = ~per_token.isfinite(), []
    for row in sorted(set(positions.rows[bad].tolist())):
        mine = positions.rows == row
        targets = positions.targets[mine & bad].tolist()
        text = excerpt(trainer._tokenizer.decode(targets), longest=40)
        lines.append(f"{names[row]}: {len(targets)} of {int(mine.sum())} tokens, {text}")
    return lines


def _bad_gradients(
    trainer: Any, batch: dict[str, Any], loss_sum: torch.Tensor, whole: int, names: list[str], found: Found
) -> list[str]:
    """The rows whose own gradient is not finite: the micro-batch is taken first, and row by row where it is bad."""
    if not _gradients_of(trainer, global_mean(loss_sum, whole), found):
        return []
    alone = Found()
    parts = ((row, one_row(batch, row)) for row in range(len(names)))
    bad = [
        names[row]
        for row, part in parts
        if len(part[POSITIONS]) and _gradients_of(trainer, global_mean(_score(trainer, part).loss_sum, whole), alone)
    ]
    return bad or [f"{name} (none of them by itself)" for name in names]


def _gradients_of(trainer: Any, loss: torch.Tensor, found: Found) -> bool:
    """Whether a loss gives a gradient that is not finite; notes of which weights."""
    trainer.model.zero_grad()
    if loss.requires_grad:
        trainer.accelerator.backward(loss)
    bad = nonfinite_parameters(trainer.model, gradients=True)
    found.gradients |= bad
    trainer.model.zero_grad()
    return bool(bad)


def one_row(batch: dict[str, Any], row: int) -> dict[str, Any]:
    """One row of a batch, padded as in it, with what is said of its trained positions."""
    rows, positions = len(batch["input_ids"]), batch[POSITIONS]
    part = {
        key: value[row : row + 1] if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows else value
        for key, value in batch.items()
        if key not in (POSITIONS, OFF_POLICY, SAMPLED, TEACHER)
    }
    part[POSITIONS] = trained_positions(part["labels"])
    mine = (positions.rows == row).nonzero().squeeze(1)
    if OFF_POLICY in batch:  # indices into the batch's positions become indices into the row's
        part[OFF_POLICY] = torch.isin(mine, batch[OFF_POLICY]).nonzero().squeeze(1)
    if SAMPLED in batch:
        part[SAMPLED] = batch[SAMPLED][mine]
    if TEACHER in batch:
        part[TEACHER] = one_row(batch[TEACHER], row)
    return part


def _rows_with(bad: torch.Tensor, positions: TrainedPositions, names: list[str]) -> list[str]:
    """Rows with a bad position (N,), each with how many of its own are."""
    lines = []
    for row in sorted(set(positions.rows[bad].tolist())):
        mine = positions.rows == row
        lines.append(f"{names[row]}: {int((mine & bad).sum())} of {int(mine.sum())} positions")
    return lines


def _row(trainer: Any, batch: dict[str, Any], number: int, row: int) -> str:
    place = trainer.place_of_row(batch, row)
    return f"{row_name({'micro_batch': number, 'row': row} | place)} {place['text']}"


def _shared(trainer: Any) -> Any:
    shared = getattr(trainer, "_shared_ids", None)
    return shared.to(trainer.accelerator.device) if isinstance(shared, torch.Tensor) else shared


def _on(device: torch.device, batch: dict[str, Any]) -> dict[str, Any]:
    move: Callable[[Any], Any] = lambda value: _on(device, value) if isinstance(value, dict) else value.to(device)  # noqa: E731
    return {key: move(value) for key, value in batch.items()}
