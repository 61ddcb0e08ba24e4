"""What `trl-opd check` looks at, and a run before it starts: one finding, one function, ok / warning / error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset

from .. import summary
from ..data.templates import special_tokens
from ..heads import causal_lm
from ..types import IGNORE_INDEX
from .weights import listed, nonfinite_parameters

logger = get_logger(__name__)

OK, WARNING, ERROR = "ok", "warning", "error"
TEACHER_STOPS, CHAT_TEMPLATES = "teacher's stop tokens", "chat templates"


@dataclass(frozen=True)
class Finding:
    """`level` is ok, warning or error; `message` what was found; `fix` what to set, where there is something."""

    level: str
    name: str
    message: str
    fix: str = ""

    def cells(self) -> tuple[str, str, str]:
        return self.level, self.name, self.message + (f"\n→ {self.fix}" if self.fix else "")


def preflight(trainer: Any) -> list[Finding]:
    """Every check that needs no forward pass."""
    findings: list[Finding | None] = [check_rows(report) for report in trainer.data_reports]
    findings += [check_template(trainer), check_stop_tokens(trainer), check_lengths(trainer), check_steps(trainer)]
    findings += check_weights(trainer)
    if hasattr(trainer, "teacher"):
        findings += check_pair(trainer)
    return [finding for finding in findings if finding is not None]


def say_or_raise(trainer: Any) -> None:
    """What a trainer says of its pair when it is made: warnings logged; what cannot work raised as `ValueError`."""
    for finding in (check_lengths(trainer), *check_pair(trainer)):
        if finding is not None and finding.level == ERROR:
            raise ValueError(f"{finding.name}: {finding.message}. {finding.fix[:1].upper()}{finding.fix[1:]}.")
        if finding is not None and finding.level == WARNING:
            logger.warning(f"{finding.name}: {finding.message}. {finding.fix[:1].upper()}{finding.fix[1:]}.")


def check_rows(report: Any) -> Finding:
    """Rows read and kept; a warning where any was not used as it came."""
    return Finding(WARNING if report.warnings() else OK, f"{report.name} rows", "\n".join(report.lines()))


def check_template(trainer: Any) -> Finding | None:
    """Which chat template renders the conversations, and how trained spans were found."""
    report = trainer.data_reports[0] if trainer.data_reports else None
    if report is None or not report.template:
        return None
    rules = "; ".join(f"{n:,} rows by {rule}" for rule, n in report.rules.items())
    return Finding(OK, "chat template", f"{report.template}\n{rules}".strip())


def trained_stops(trainer: Any, rows: int = 100) -> set[int]:
    """Special tokens that end what the first rows train, by id."""
    dataset, tokenizer = trainer.train_dataset, trainer._tokenizer
    if not isinstance(dataset, Dataset) or "labels" not in dataset.column_names:
        return set()
    special = set(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer)))
    ends: set[Any] = set()
    for labels in dataset.select(range(min(len(dataset), rows)))["labels"]:
        ends.add(next((label for label in reversed(labels) if label != IGNORE_INDEX), None))
    return {end for end in ends if end in special}


def generation_stops(model: Any) -> set[int]:
    """Ids at which the model's generation config stops."""
    config = getattr(model, "generation_config", None)
    stops = config.eos_token_id if config is not None else None
    return set(stops if isinstance(stops, (list, tuple)) else [stops]) - {None}


def check_stop_tokens(trainer: Any) -> Finding:
    """Whether generation stops where training ended the completion."""
    tokenizer = trainer._tokenizer
    stops, trained = generation_stops(trainer.model), trained_stops(trainer)
    name = lambda ids: ", ".join(sorted(tokenizer.convert_ids_to_tokens(sorted(ids)))) or "nothing"  # noqa: E731
    if hasattr(trainer, "teacher_model"):
        return Finding(OK, "stop tokens", f"rollouts stop at {name(set(trainer.eos_token_ids))}")
    if not trained:
        fix = "use a tokenizer with an `eos_token`, or a chat template that ends a turn with a special token"
        return Finding(WARNING, "stop tokens", "no stop token is trained: the model will not know when to stop", fix)
    if trained - stops:
        fix = f"set `eos_token: {name(trained - stops)}`"
        return Finding(WARNING, "stop tokens", f"trained: {name(trained)}; generation stops at {name(stops)}", fix)
    return Finding(OK, "stop tokens", f"trained and stopped at: {name(trained)}")


def positions(model: Any) -> int | None:
    """How many positions a model was made for, where its config says."""
    return getattr(causal_lm(model).config.get_text_config(), "max_position_embeddings", None)


def check_lengths(trainer: Any) -> Finding | None:
    """Whether the longest row, with its completion, fits the positions of every model."""
    report = trainer.data_reports[0] if trainer.data_reports else None
    if report is None or not report.lengths:
        return None
    longest, new = report.lengths["100%"], getattr(trainer, "max_completion_length", 0) or 0
    beside = getattr(report, "longest", {})
    needs = [("the model", trainer.model, longest, new)]
    if hasattr(trainer, "teacher"):
        own = trainer.teacher_model
        teacher = trainer.model if own is None else trainer.accelerator.unwrap_model(own)
        needs.append(("the teacher", teacher, beside.get("teacher") or longest, new))
        needs += [(who, model, beside.get("reference", 0), 0) for who, model, *_ in needs]
    for name, model, tokens, more in needs:
        limit = positions(model)
        if limit is not None and tokens + more > limit:
            if more:
                what = f"a prompt of {tokens} tokens and {more} new ones are"
                fix = "set a smaller `max_completion_length`, or `max_prompt_length` with `prompt_overflow: drop`"
            elif hasattr(trainer, "teacher"):
                what, fix = f"a row of {tokens} tokens is", "leave out the longest rows"
            else:
                what = f"a row of {tokens} tokens is"
                fix = f"set `max_length: {limit}` with `overflow: drop` or `overflow: cut`"
            return Finding(ERROR, "lengths", f"{what} longer than {name}'s {limit} positions", fix)
    what = f"longest prompt {longest}, and {new} new tokens" if new else f"longest row {longest} tokens"
    return Finding(OK, "lengths", f"{what}: fits")


def check_steps(trainer: Any) -> Finding:
    """How many steps there are, and whether warm-up leaves any."""
    args, text = trainer.args, summary.steps(trainer)
    total = summary.total_steps(trainer)
    warmup = args.get_warmup_steps(total) if total else 0
    if total and warmup >= total:
        fix = "set a smaller `warmup_steps` (below 1 it is a share of the steps)"
        return Finding(WARNING, "steps", f"{text}; all of them are warm-up ({warmup})", fix)
    return Finding(OK, "steps", f"{text}; {warmup} of them warm-up")


def check_weights(trainer: Any) -> list[Finding]:
    """Whether every weight of the student, and of a teacher of its own, is a number. All that is well is one line."""
    models = [("the student" if hasattr(trainer, "teacher") else "the model", trainer.model)]
    if getattr(trainer, "teacher_model", None) is not None:
        models.append(("the teacher", trainer.accelerator.unwrap_model(trainer.teacher_model)))
    findings = []
    for name, model in models:
        bad = nonfinite_parameters(model)
        if bad:
            fix = "load it in the dtype that it was saved in, or take another checkpoint"
            findings.append(
                Finding(ERROR, "weights", f"{name} has {len(bad)} tensors that are not finite\n{listed(bad)}", fix)
            )
    return findings or [Finding(OK, "weights", "all finite")]


def check_pair(trainer: Any) -> list[Finding | None]:
    """What may not fit between student and teacher. A teacher on the student's own base fits by itself."""
    if trainer.teacher_model is None:
        return []
    return [check_teacher_stops(trainer), check_chat_templates(trainer)]


def check_teacher_stops(trainer: Any) -> Finding:
    """Where the teacher would stop, and the student does not: lengths may explode."""
    teacher = trainer.accelerator.unwrap_model(trainer.teacher_model)
    stops, mine = generation_stops(teacher), set(trainer.eos_token_ids)
    names = trainer._tokenizer.convert_ids_to_tokens
    if stops and not stops & mine:
        fix = "add the teacher's stop token to the student's `generation_config.eos_token_id`"
        message = f"the teacher stops at {names(sorted(stops))}, rollouts at {names(sorted(mine))}: lengths may explode"
        return Finding(WARNING, TEACHER_STOPS, message, fix)
    return Finding(OK, TEACHER_STOPS, f"shared: {names(sorted(stops & mine)) or 'the teacher names none'}")


def check_chat_templates(trainer: Any) -> Finding | None:
    """Whether the teacher was made for prompts that look like these."""
    theirs = trainer.teacher_chat_template
    if theirs is None or theirs == trainer._tokenizer.chat_template:
        return None
    message = "student and teacher have different chat templates; the teacher is shown the student's"
    return Finding(WARNING, CHAT_TEMPLATES, message, "use a teacher that was trained with this template")


def check_first_loss(trainer: Any) -> Finding:
    """The loss of the first micro-batch, as a run would take it; no weight is changed."""
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        inputs = trainer._prepare_inputs(batch)
        loss = float(trainer.compute_loss(trainer.model, inputs))
    if not math.isfinite(loss):
        return Finding(ERROR, "first loss", f"the first loss is {loss}", "look at the precision and the samples")
    return Finding(OK, "first loss", f"{loss:.4f}")
