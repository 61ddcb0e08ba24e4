"""A teacher from its name to something that scores tokens: loaded, compared with the student, placed beside it."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from transformers import AutoTokenizer, BitsAndBytesConfig

from . import heads
from ._trl import create_model_from_path, get_config_model_id, is_accelerator_there, prepare_deepspeed
from .checks.pair import check_not_the_same, check_token_ids, shared_token_ids
from .generation import why_rows_stay
from .layouts import gathered
from .student_setup import open_on_base
from .summary import numel
from .teachers.adapter import AdapterTeacher
from .teachers.local import LocalTeacher, freeze

logger = get_logger(__name__)

_ADAPTER_NAME = "teacher"


@dataclass(frozen=True)
class TeacherTokens:
    """What was found when the tokenizers were compared. `shared_ids` is `None` where all ids are shared."""

    chat_template: str | None = None
    shared_ids: int | torch.Tensor | None = None


def find_teacher(student: Any, teacher: Any, args: Any, peft_config: Any) -> torch.nn.Module | None:
    """The teacher's own model, frozen, or `None` where it is the student's base. Called before any data is read.

    Raises `ValueError` where the teacher that `teacher_kind` asks for is not there or cannot be one.
    """
    kind = args.teacher_kind
    teacher = teacher if teacher is not None else args.teacher_model_name_or_path
    if kind == "model":
        if teacher is None:
            raise ValueError(
                "There is no teacher. Pass `teacher_model`, or set `teacher_model_name_or_path` to a folder or a model "
                "on the Hub; or set `teacher_kind: base` to learn from the student's own base."
            )
        revision = (args.model_init_kwargs or {}).get("revision") or "main"
        other_revision = (args.teacher_model_revision or "main") != revision
        check_not_the_same(student, teacher, knows_more=other_revision or args.teacher_prompt_column is not None)
        return freeze(load_teacher(teacher, args))
    if peft_config is None and not isinstance(student, PeftModel):
        raise ValueError(
            f"`teacher_kind: {kind}` switches the adapter on the student's base, and the student has none. Set "
            "`use_peft: true` (or pass `peft_config`), or load a teacher of its own: `teacher_kind: model`."
        )
    if kind == "base" and teacher is not None:
        raise ValueError(
            "`teacher_kind: base` is the student's own base; `teacher_model_name_or_path` is another model. Leave one "
            "of them out."
        )
    if kind == "adapter" and not (isinstance(teacher, str) and os.path.isfile(f"{teacher}/adapter_config.json")):
        raise ValueError(
            f"`teacher_kind: adapter` needs `teacher_model_name_or_path` to be a folder with an adapter "
            f"(adapter_config.json); it is {teacher!r}."
        )
    return None


def load_teacher(teacher: Any, args: Any) -> torch.nn.Module:
    """A teacher given by name, or the model itself. A folder with an adapter is loaded on its base.

    Raises `ValueError` naming the key where there is no such model, or where load arguments come with a loaded one.
    """
    if not isinstance(teacher, str):
        if args.teacher_model_init_kwargs or args.teacher_load_in_4bit or args.teacher_load_in_8bit:
            raise ValueError(
                "`teacher_model_init_kwargs`, `teacher_load_in_4bit` and `teacher_load_in_8bit` load a teacher by "
                "name; the teacher given is a model already."
            )
        return teacher
    kwargs = dict(args.teacher_model_init_kwargs or {})
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = torch.bfloat16 if is_accelerator_there() and not args.use_cpu else "auto"
    if args.teacher_model_revision is not None:
        kwargs.setdefault("revision", args.teacher_model_revision)
    if args.distributed_state is not None and args.distributed_state.num_processes > 1:
        kwargs["device_map"] = None
    if args.teacher_load_in_4bit or args.teacher_load_in_8bit:
        kwargs["quantization_config"] = _quantized(args, kwargs["dtype"])
    try:
        if os.path.isfile(f"{teacher}/adapter_config.json"):
            return _merged(teacher, kwargs)
        return create_model_from_path(teacher, **kwargs)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"`teacher_model_name_or_path: {teacher}` is neither a folder with a model nor a model on the Hub that can "
            f"be reached: {reason}"
        ) from error


def _quantized(args: Any, dtype: Any) -> BitsAndBytesConfig:
    if args.teacher_load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = dtype if isinstance(dtype, torch.dtype) else torch.float32
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def _merged(folder: str, kwargs: dict[str, Any]) -> torch.nn.Module:
    """A base with its adapter merged in; a quantised base keeps it beside, since merging would round it."""
    model = open_on_base(folder, **kwargs)
    return model if "quantization_config" in kwargs else model.merge_and_unload()


def compare_tokens(student: Any, tokenizer: Any, teacher: torch.nn.Module, trust_remote_code: bool) -> TeacherTokens:
    """Hold that student and teacher mean the same token by the same id.

    Raises `ValueError` with the first ids that differ, and where the vocabularies differ in size but the teacher's
    tokenizer cannot be found. Otherwise a teacher without one is said in a warning.
    """
    sizes = heads.head_of(student).vocab_size, heads.head_of(teacher).vocab_size
    try:
        theirs = AutoTokenizer.from_pretrained(get_config_model_id(teacher.config), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"The student's head has {sizes[0]:,} ids and the teacher's {sizes[1]:,}. Which they share is read "
                f"from the tokenizers, and the teacher's was not found: {reason}. Save it in the teacher's folder."
            ) from error
        logger.warning(f"The teacher's token ids were not compared with the student's: {reason}")
        return TeacherTokens()
    check_token_ids(tokenizer, theirs)
    shared = shared_token_ids(tokenizer, theirs, *sizes)
    if shared is not None:
        count = shared if isinstance(shared, int) else len(shared)
        logger.warning(
            f"The student's head has {sizes[0]:,} ids and the teacher's {sizes[1]:,}: loss and sampling use the "
            f"{count:,} tokens they share."
        )
    return TeacherTokens(theirs.chat_template, shared)


def restrict_sampling(trainer: Any, teacher: Any, shared_ids: int | torch.Tensor | None) -> None:
    """Let rollouts hold shared ids only, whoever writes them: one model cannot grade what it has no id for."""
    if shared_ids is None:
        return
    shared = set(range(shared_ids)) if isinstance(shared_ids, int) else set(shared_ids.tolist())
    largest = max(heads.head_of(model).vocab_size for model in (trainer.model, teacher))
    others = [i for i in range(largest) if i not in shared]
    if not others:
        return
    if trainer.use_vllm:
        raise ValueError(
            f"Student and teacher differ in {len(others):,} ids, and rollouts by vLLM cannot leave "
            "them out here. Set `use_vllm: false`, or choose a teacher of the same vocabulary size."
        )
    stops = set(trainer.eos_token_ids)
    if not stops - set(others):
        names = ", ".join(trainer._tokenizer.convert_ids_to_tokens(sorted(stops)))
        raise ValueError(
            f"The student stops at {names}, which the teacher has no id for: it could not be sampled, and no rollout "
            "would end. Set `eos_token` to a token that both have, or choose a teacher that was trained with this one."
        )
    asked = trainer.generation_config.suppress_tokens or []
    trainer.generation_config.suppress_tokens = sorted({*asked, *others})


def whether_rows_leave(trainer: Any) -> bool:
    """Whether rows that have ended leave the rollout's batch; where they were to and cannot, the reason is logged."""
    args, on_cpu = trainer.args, trainer.accelerator.device.type == "cpu"
    if args.use_vllm or args.ended_rows_leave is False or (args.ended_rows_leave is None and not on_cpu):
        return False
    why_not = why_rows_stay(trainer.model, trainer.generation_config)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        why_not = "DeepSpeed and FSDP need every process to run as many passes as the others"
    if why_not:
        logger.info(f"rollouts: rows that have ended stay in the batch: {why_not}")
    return not why_not


def place_teacher(teacher: torch.nn.Module | None, trainer: Any) -> LocalTeacher | AdapterTeacher:
    """What scores tokens: a model of its own, placed and sharded as the student is, or an adapter's switch."""
    args = trainer.args
    if teacher is not None:
        return _placed(teacher, trainer, "teacher")
    if args.teacher_kind == "base":
        return AdapterTeacher(flat=trainer._flat)
    trainer.model.load_adapter(args.teacher_model_name_or_path, _ADAPTER_NAME, is_trainable=False)
    _save_without(trainer.model, _ADAPTER_NAME)
    return AdapterTeacher(_ADAPTER_NAME, trainer._flat)


def place_anchor(student: Any, trainer: Any) -> LocalTeacher | AdapterTeacher | None:
    """The frozen base for `anchor_weight`: the student with its adapter off, or a second copy of what it started as."""
    if not trainer.args.anchor_weight:
        return None
    if isinstance(trainer.model, PeftModel):
        return AdapterTeacher(flat=trainer._flat)
    if isinstance(student, str):
        kwargs = {"trust_remote_code": trainer.args.trust_remote_code} | (trainer.args.model_init_kwargs or {})
        if trainer.accelerator.num_processes > 1:
            kwargs["device_map"] = None
        base = create_model_from_path(student, **kwargs)
    else:
        with gathered(*trainer.model.parameters()):
            base = copy.deepcopy(trainer.model)
    size = sum(numel(p) * p.element_size() for p in base.parameters()) / 2**30
    logger.info(f"anchor_weight: a second, frozen copy of the student is held ({size:.2f} GiB)")
    return _placed(freeze(base), trainer, "anchor")


def _placed(model: torch.nn.Module, trainer: Any, whose: str) -> LocalTeacher:
    flat = trainer._leaves_out_padding(model, whose)
    if trainer.is_deepspeed_enabled:
        wrapped = prepare_deepspeed(model, trainer.accelerator)
    else:
        wrapped = trainer.accelerator.prepare_model(model, evaluation_mode=True)
    return LocalTeacher(wrapped, trainer.accelerator.unwrap_model(wrapped), trainer._forward_redirection, flat)


def _save_without(model: Any, adapter: str) -> None:
    """Checkpoints hold the student's adapter alone: the teacher's is loaded from its own folder at every start."""
    save, mine = model.save_pretrained, [name for name in model.peft_config if name != adapter]

    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        return save(*args, **{"selected_adapters": mine, **kwargs})

    model.save_pretrained = save_pretrained
