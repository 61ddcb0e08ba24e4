"""What a supervised run asks for, read from its arguments before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.logging import get_logger

from . import heads
from .configs import SFTConfig

logger = get_logger(__name__)


def train_on(args: SFTConfig) -> str:
    """`train_on`, unless one of TRL's own flags was set: those win."""
    if args.assistant_only_loss or args.completion_only_loss:
        chosen, flag = "assistant", "assistant_only_loss" if args.assistant_only_loss else "completion_only_loss"
    elif args.completion_only_loss is False:
        chosen, flag = "all", "completion_only_loss"
    else:
        return args.train_on
    if chosen != args.train_on:
        logger.warning(f"`{flag}: {getattr(args, flag)}` wins over `train_on: {args.train_on}`: {chosen} is trained.")
    return chosen


def why_trl(trainer: Any, compute_loss_func: Callable | None) -> str:
    """Why this run needs the model's own forward, so that TRL computes the loss; empty where it does not."""
    model = trainer.model
    parallel = trainer.accelerator.parallelism_config
    inner = heads.causal_lm(model)
    reasons = {
        "compute_loss_func was passed": compute_loss_func is not None,
        "the model adds a mixture-of-experts auxiliary loss": trainer.aux_loss_enabled,
        "the model takes images": trainer._is_vlm,
        "sequences are split over ranks": parallel is not None and (parallel.cp_enabled or parallel.sp_enabled),
        "the adapter adds virtual tokens": any(
            config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()
        ),
        "the model has no backbone apart from its head": getattr(inner, "base_model", inner) is inner,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def why_as_drawn(trainer: Any, data_collator: Callable | None, whole: bool) -> str:
    """Why batches cannot be cut anew, by their rows; empty where they can. `whole`: each process makes its own."""
    reasons = {
        "`packing` or `padding_free` leaves no padding": trainer.args.packing or trainer.padding_free,
        "a `data_collator` was passed": data_collator is not None,
        "batches are cut on the main process (a stream, or `dispatch_batches`)": not whole,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
