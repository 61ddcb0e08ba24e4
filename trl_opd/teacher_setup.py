"""A teacher from its name to a wrapped, frozen model beside the student."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import AutoTokenizer

from ._trl import create_model_from_path, get_config_model_id, prepare_deepspeed
from .checks.pair import check_token_ids

logger = get_logger(__name__)


def load_teacher(teacher: Any, args: Any) -> torch.nn.Module:
    """A teacher given by name, loaded as TRL loads it, or the model itself.

    Raises `ValueError` naming the key where there is no such model, or where load arguments come with a loaded one.
    """
    if not isinstance(teacher, str):
        if args.teacher_model_init_kwargs:
            raise ValueError(
                "`teacher_model_init_kwargs` loads a teacher by name; the teacher given is a model already."
            )
        return teacher
    kwargs = dict(args.teacher_model_init_kwargs or {})
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    kwargs.setdefault("dtype", None)
    if args.teacher_model_revision is not None:
        kwargs.setdefault("revision", args.teacher_model_revision)
    if args.distributed_state is not None and args.distributed_state.num_processes > 1:
        kwargs["device_map"] = None
    try:
        return create_model_from_path(teacher, **kwargs)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"`teacher_model_name_or_path: {teacher}` is neither a folder with a model nor a model on the Hub that can "
            f"be reached: {reason}"
        ) from error


def compare_tokenizers(student_tokenizer: Any, teacher: torch.nn.Module, trust_remote_code: bool) -> str | None:
    """Hold that student and teacher mean the same token by the same id; returns the teacher's chat template.

    Raises `ValueError` with the first ids that differ. A teacher whose tokenizer cannot be found is said in a warning.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            get_config_model_id(teacher.config), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        logger.warning(f"The teacher's token ids were not compared with the student's: {reason}")
        return None
    check_token_ids(student_tokenizer, tokenizer)
    return tokenizer.chat_template


def wrap_teacher(teacher: torch.nn.Module, trainer: Any) -> Any:
    """The teacher placed, and sharded where the student is."""
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(teacher, trainer.accelerator)
    return trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
