"""The two configs: TRL's, a few more fields, and checks that run before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trl

from ._trl import is_accelerator_there
from .data.prepare import BAD_ROWS, OVERFLOW
from .data.tokenize import TRAIN_ON

EVAL_MODES = ("auto", "dataset", "generate")


def _strict_masks() -> Any:
    return field(
        default=True,
        metadata={
            "help": "Check every batch: a label equals its input token, padding is never trained, a real token "
            "precedes every trained one."
        },
    )


def _bad_rows() -> Any:
    return field(
        default="error",
        metadata={
            "help": "Rows that cannot be trained: `error` scans the whole set and raises once, with counts by reason "
            "and the first five; `drop` leaves them out and counts them.",
            "choices": list(BAD_ROWS),
        },
    )


def _system_prompt() -> Any:
    return field(
        default=None,
        metadata={
            "help": "A system message put before every conversation that has none. A text prompt then becomes one user "
            "turn."
        },
    )


def _disable_dropout() -> Any:
    return field(
        default=None,
        metadata={
            "help": "Dropout of the trained model. Unset: the backbone's is turned off, while an adapter dropout that "
            "was asked for stays in sft. `true` turns all of it off, `false` none."
        },
    )


@dataclass
class SFTConfig(trl.SFTConfig):
    """`trl.SFTConfig` and the fields that decide what is trained. Every TRL field keeps its name and meaning.

    Raises `ValueError` for a value outside its choices and for a precision that this machine does not have.
    """

    strict_masks: bool = _strict_masks()
    bad_rows: str = _bad_rows()
    overflow: str = field(
        default="error",
        metadata={
            "help": "Rows longer than `max_length`: `error` raises once, with length quantiles and a `max_length` that "
            "holds them; `drop` leaves them out and counts them; `cut` trains their beginning, without a stop token, "
            "and counts them.",
            "choices": list(OVERFLOW),
        },
    )
    train_on: str = field(
        default="assistant",
        metadata={
            "help": "What conversations train: `assistant` (every assistant turn, or those of the completion), "
            "`last_assistant`, or `all`. TRL's `completion_only_loss` and `assistant_only_loss` win where set.",
            "choices": list(TRAIN_ON),
        },
    )
    train_empty_think: bool = field(
        default=False,
        metadata={"help": "Train the empty `<think></think>` that a chat template puts before an answer without one."},
    )
    system_prompt: str | None = _system_prompt()
    disable_dropout: bool | None = _disable_dropout()

    def __post_init__(self) -> None:
        _check_choice("bad_rows", self.bad_rows, BAD_ROWS)
        _check_choice("overflow", self.overflow, OVERFLOW)
        _check_choice("train_on", self.train_on, TRAIN_ON)
        _resolve_precision(self)
        super().__post_init__()


@dataclass
class DistillationConfig(trl.DistillationConfig):
    """`trl.DistillationConfig` and our further fields. Every TRL field keeps its name and meaning.

    Raises `ValueError` for a value outside its choices and for a precision that this machine does not have.
    """

    strict_masks: bool = _strict_masks()
    bad_rows: str = _bad_rows()
    system_prompt: str | None = _system_prompt()
    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Number of processes that tokenize the prompts."}
    )
    dataset_prompt_column: str | None = field(
        default=None,
        metadata={"help": "Column that holds the prompt, where it is not `prompt`. Its text becomes one user turn."},
    )
    disable_dropout: bool | None = _disable_dropout()
    eval_mode: str = field(
        default="auto",
        metadata={
            "help": "Evaluation: `dataset` takes the divergence on the completions of the eval rows, `generate` on "
            "completions the student samples from a fixed seed. `auto` is `dataset` where every eval row has one.",
            "choices": list(EVAL_MODES),
        },
    )

    def __post_init__(self) -> None:
        _check_choice("bad_rows", self.bad_rows, BAD_ROWS)
        _check_choice("eval_mode", self.eval_mode, EVAL_MODES)
        if self.temperature <= 0:
            raise ValueError(
                f"temperature is {self.temperature}; it must be above 0. It acts on sampling and on the loss."
            )
        _resolve_precision(self)
        super().__post_init__()


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}.")


def _resolve_precision(args: Any) -> None:
    """bf16 is TRL's default; on a machine without an accelerator it is fp32 unless bf16 was asked for."""
    if args.use_cpu or is_accelerator_there():
        return
    for name in ("bf16", "fp16", "tf32"):
        if getattr(args, name, None):
            cpu = ", or add `use_cpu: true` to train in bfloat16 on the CPU" if name == "bf16" else ""
            raise ValueError(f"`{name}: true` needs a GPU and this machine has none. Set `{name}: false`{cpu}.")
    if args.bf16 is None:
        args.bf16 = False
