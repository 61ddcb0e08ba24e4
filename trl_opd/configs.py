"""The two configs: TRL's, a few more fields, and checks that run before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trl

from . import config_fields
from .config_checks import (
    check_choice,
    check_mappings,
    check_max_tokens,
    check_numbers,
    check_offloading,
    check_order_of_prompts,
    check_rollouts,
    check_sampling,
    check_weights,
    resolve_precision,
)
from .data.prepare import BAD_ROWS, OVERFLOW, PROMPT_OVERFLOW
from .data.tokenize import TRAIN_ON
from .losses.objectives import Settings
from .losses.policy_gradient import REWARDS
from .nonfinite import MAX_SKIPPED, ON_NONFINITE
from .run_fields import RunFields
from .secrets import SecretsStayHere

TEACHER_KINDS = ("model", "base", "adapter")
ON_SAVE_ERROR = ("stop", "continue")
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


def _chat_template() -> Any:
    return field(
        default=None,
        metadata={
            "help": "Chat template, as Jinja text; it is saved with the tokenizer. `chatml` stands for ChatML with its "
            "two special tokens and `eos_token: <|im_end|>`, for a base model that has no template."
        },
    )


def _resume_anyway() -> Any:
    return field(
        default=False,
        metadata={"help": "Go on from a checkpoint although recipe or data have changed; what changed is listed."},
    )


def _on_save_error() -> Any:
    return field(
        default="stop",
        metadata={
            "help": "A checkpoint that cannot be written (a full disk, no permission): `stop` ends the run, `continue` "
            "trains on without it and counts it. Earlier checkpoints are untouched.",
            "choices": list(ON_SAVE_ERROR),
        },
    )


def _on_nonfinite() -> Any:
    return field(
        default="stop",
        metadata={
            "help": "A loss or gradient that is not finite: `stop` ends the run before any weight is changed, names "
            "the rows and writes the step's micro-batches to a file; `skip` leaves that step out and counts it, up to "
            f"{MAX_SKIPPED} in a row.",
            "choices": list(ON_NONFINITE),
        },
    )


def _logging_nan_inf_filter() -> Any:
    return field(
        default=False,
        metadata={
            "help": "Log the mean of earlier losses in the place of one that is not finite. Off here: `on_nonfinite` "
            "sees to those, and the filter waits for the device at every micro-batch."
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


@dataclass(repr=False)
class SFTConfig(SecretsStayHere, RunFields, trl.SFTConfig):
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
    chat_template: str | None = _chat_template()
    disable_dropout: bool | None = _disable_dropout()
    resume_anyway: bool = _resume_anyway()
    on_save_error: str = _on_save_error()
    balance_micro_batches: bool = config_fields.balance_micro_batches()
    per_device_max_tokens: int | None = config_fields.per_device_max_tokens()
    on_nonfinite: str = _on_nonfinite()
    logging_nan_inf_filter: bool = _logging_nan_inf_filter()

    def __post_init__(self) -> None:
        check_numbers(self)
        check_choice("bad_rows", self.bad_rows, BAD_ROWS)
        check_choice("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        check_choice("on_save_error", self.on_save_error, ON_SAVE_ERROR)
        check_choice("overflow", self.overflow, OVERFLOW)
        check_choice("train_on", self.train_on, TRAIN_ON)
        check_max_tokens(self)
        resolve_precision(self)
        check_offloading(self)
        super().__post_init__()
        check_mappings(self)


@dataclass(repr=False)
class DistillationConfig(SecretsStayHere, RunFields, trl.DistillationConfig):
    """`trl.DistillationConfig` and our further fields. Every TRL field keeps its name and meaning.

    Raises `ValueError` for a value outside its choices and for a precision that this machine does not have.
    """

    strict_masks: bool = _strict_masks()
    bad_rows: str = _bad_rows()
    system_prompt: str | None = _system_prompt()
    chat_template: str | None = _chat_template()
    eos_token: str | None = field(default=None, metadata={"help": "Token that ends a turn, as in `SFTConfig`."})
    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Number of processes that tokenize the prompts."}
    )
    dataset_prompt_column: str | None = field(
        default=None,
        metadata={"help": "Column that holds the prompt, where it is not `prompt`. Its text becomes one user turn."},
    )
    disable_dropout: bool | None = _disable_dropout()
    resume_anyway: bool = _resume_anyway()
    on_save_error: str = _on_save_error()
    balance_micro_batches: bool = config_fields.balance_micro_batches()
    per_device_max_tokens: int | None = config_fields.per_device_max_tokens()
    on_nonfinite: str = _on_nonfinite()
    logging_nan_inf_filter: bool = _logging_nan_inf_filter()
    objective: str = field(
        default="divergence",
        metadata={
            "help": "What is taken at every trained token: `divergence` (forward KL, reverse KL or JSD, by `beta`), "
            "`skew_forward_kl`, `skew_reverse_kl`, `tvd`, or `policy_gradient` on the token that was sampled."
        },
    )
    skew_alpha: float = field(
        default=0.1, metadata={"help": "How much of the other distribution is mixed in, for the skew objectives."}
    )
    reward: str = field(
        default="log_ratio",
        metadata={
            "help": "Reward of `policy_gradient`: `log_ratio` = log q − log p of the sampled token, `clip` that within "
            "±`reward_bound`, `tanh` of it over `reward_bound`, `power` = q^`reward_power` − p^`reward_power`.",
            "choices": list(REWARDS),
        },
    )
    reward_bound: float = field(default=5.0, metadata={"help": "Bound of the rewards `clip` and `tanh`, in nats."})
    reward_power: float = field(default=1.0, metadata={"help": "Exponent of the reward `power`."})
    importance_clip: list[float] = field(
        default_factory=lambda: [0.0, 2.0],
        metadata={"help": "Range that the detached importance ratio of `policy_gradient` is clipped to."},
    )
    loss_top_k: int = field(
        default=0,
        metadata={
            "help": "0 takes divergences over the whole vocabulary; k over the k most likely ids of either model and "
            "one bucket for all the others."
        },
    )
    anchor_weight: float | None = field(
        default=None,
        metadata={
            "help": "Weight of KL(base ‖ student) at temperature 1, base being the model the student started as."
        },
    )
    teacher_kind: str = field(
        default="model",
        metadata={
            "help": "`model`: `teacher_model_name_or_path`, a model of its own or an adapter on its base. `base`: the "
            "student's own base with the adapter off. `adapter`: a second, frozen adapter on the student's base.",
            "choices": list(TEACHER_KINDS),
        },
    )
    teacher_load_in_4bit: bool = field(
        default=False, metadata={"help": "Load the teacher in 4 bits (nf4, bitsandbytes)."}
    )
    teacher_load_in_8bit: bool = field(default=False, metadata={"help": "Load the teacher in 8 bits (bitsandbytes)."})
    lmbda: float = field(
        default=1.0,
        metadata={
            "help": "Share of rows whose completion the student writes, drawn row by row from the seed; the others use "
            "the completion of the dataset."
        },
    )
    sft_weight: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the cross-entropy on rows that the student did not write (temperature 1). Needs "
            "`lmbda` below 1."
        },
    )
    seq_kd: bool = field(
        default=False,
        metadata={
            "help": "The rows that `lmbda` leaves to others are written by the teacher, not taken from the dataset "
            "(sequence-level distillation)."
        },
    )
    teacher_prompt_column: str | None = field(
        default=None,
        metadata={
            "help": "Column with the prompt that the teacher is shown in place of the student's, with the solution in "
            "it for example. The divergence is taken on the same completion tokens."
        },
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Most tokens of a prompt; what is longer is up to `prompt_overflow`."}
    )
    prompt_overflow: str = field(
        default="error",
        metadata={
            "help": "Prompts longer than `max_prompt_length`: `error` raises once, with length quantiles; `drop` "
            "leaves them out and counts them; `truncate_left` keeps their end and counts them.",
            "choices": list(PROMPT_OVERFLOW),
        },
    )
    mask_truncated_completions: bool = field(
        default=False,
        metadata={
            "help": "Completions that reach `max_completion_length` without a stop token give no loss; they are "
            "counted. One that the length schedule cut short is not among them."
        },
    )
    completion_length_schedule: str | None = field(
        default=None,
        metadata={
            "help": "Length of rollouts by progress, as `64@0.0,256@0.3,1024@0.7`: at most 64 tokens from the start, "
            "256 from 0.3 of the steps on, 1024 from 0.7 on. `max_completion_length` is what holds otherwise."
        },
    )
    num_generations: int = field(default=1, metadata={"help": "Completions that the student writes for each prompt."})
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Micro-batches that one rollout is cut into: `gradient_accumulation_steps` (the default), or a "
            "multiple of it, so that several optimizer steps learn from one rollout."
        },
    )
    teacher_max_tokens: int | None = config_fields.teacher_max_tokens()
    ended_rows_leave: bool | None = config_fields.ended_rows_leave()
    log_token_metrics: bool = field(
        default=True,
        metadata={
            "help": "Log the teacher's entropy, forward and reverse KL and top-1 agreement beside the loss, whatever "
            "the objective."
        },
    )
    eval_mode: str = field(
        default="auto",
        metadata={
            "help": "Evaluation: `dataset` takes the divergence on the completions of the eval rows, `generate` on "
            "completions the student samples from a fixed seed. `auto` is `dataset` where every eval row has one.",
            "choices": list(EVAL_MODES),
        },
    )
    eval_accuracy: bool | None = field(
        default=None,
        metadata={
            "help": "Compare generated eval completions with the column `answer`, as text and by math-verify. Unset: "
            "where the rows have one and `eval_mode` generates."
        },
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        check_choice("bad_rows", self.bad_rows, BAD_ROWS)
        check_choice("on_save_error", self.on_save_error, ON_SAVE_ERROR)
        check_choice("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        check_choice("eval_mode", self.eval_mode, EVAL_MODES)
        check_choice("teacher_kind", self.teacher_kind, TEACHER_KINDS)
        check_choice("prompt_overflow", self.prompt_overflow, PROMPT_OVERFLOW)
        if self.temperature <= 0:
            raise ValueError(
                f"temperature is {self.temperature}; it must be above 0. It acts on sampling and on the loss."
            )
        check_weights(self)
        check_order_of_prompts(self)
        check_max_tokens(self)
        resolve_precision(self)
        super().__post_init__()
        check_mappings(self)
        if len(self.importance_clip) != 2:
            raise ValueError(f"importance_clip is {self.importance_clip}; it must be two numbers, low and high.")
        self.loss_settings()  # checks the objective's own numbers
        check_rollouts(self)
        check_sampling(self)

    def loss_settings(self) -> Settings:
        """The objective with all its numbers. Raises `ValueError` where they do not go together."""
        if self.objective == "cross_entropy":
            raise ValueError("objective is 'cross_entropy', which has no teacher: that is `trl-opd sft`.")
        return Settings(
            self.objective,
            beta=self.beta,
            temperature=self.temperature,
            skew_alpha=self.skew_alpha,
            reward=self.reward,
            reward_bound=self.reward_bound,
            reward_power=self.reward_power,
            importance_clip=(self.importance_clip[0], self.importance_clip[1]),
            top_k=self.loss_top_k,
            metrics=self.log_token_metrics,
        )
