"""How a run is spread over processes: what cannot work is found at start, and what is saved can be loaded anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from ._trl import gather_on_save, maybe_gather_lm_head_ctx
from .launch import check_all_met
from .student_setup import is_adapter_folder


def layout_name(state: Any) -> str:
    """What an `AcceleratorState` says: `one process`, `DDP`, `ZeRO-3`, `FSDP2`."""
    if state.deepspeed_plugin is not None:
        return f"ZeRO-{state.deepspeed_plugin.zero_stage}"
    fsdp = getattr(state, "fsdp_plugin", None)
    if fsdp is not None:
        return f"FSDP{fsdp.fsdp_version}"
    return "DDP" if state.num_processes > 1 else "one process"


def shards_weights(state: Any) -> bool:
    """Whether the layout of an `AcceleratorState` cuts weights into shards, so that every rank must take part in every
    use of them: ZeRO-3 and FSDP."""
    plugin = state.deepspeed_plugin
    return (plugin is not None and plugin.zero_stage == 3) or getattr(state, "fsdp_plugin", None) is not None


def gathered(*parameters: torch.Tensor | None) -> AbstractContextManager[Any]:
    """Makes parameters whole that ZeRO-3 has sharded; the others are whole anyway. All ranks must enter it."""
    return maybe_gather_lm_head_ctx(*(parameter for parameter in parameters if hasattr(parameter, "ds_status")))


# --- at start ------------------------------------------------------------------------------------------------------


def check_layout(args: Any, model: Any, peft_config: Any, quantization_config: Any) -> None:
    """Refuse what cannot train, or cannot save what it trained, before anything is loaded.

    Raises `UsageError` where processes did not meet, and `ValueError` for a layout that would not be the one asked for
    or would save nothing.
    """
    check_all_met(args.world_size)
    if _is_set("ACCELERATE_USE_CPU") and (args.deepspeed or _is_set("ACCELERATE_USE_DEEPSPEED")):
        raise ValueError(
            "DeepSpeed is asked for and the environment variable ACCELERATE_USE_CPU is set: accelerate would train "
            "with DDP. Unset it, and set `use_cpu: true` to try DeepSpeed on a CPU."
        )
    if not _asks_for_fsdp(args):
        return
    if args.distributed_state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise ValueError(
            "FSDP is asked for, and this run is on a CPU: accelerate would not shard anything, nor say so. Use "
            "GPUs, or an accelerate config without FSDP (`cpu2`: two processes on a CPU)."
        )
    has_adapter = peft_config is not None or isinstance(model, PeftModel) or is_adapter_folder(model)
    if has_adapter and _fsdp_version(args) == 1:
        raise ValueError(
            "FSDP1 saves an adapter without its weights. Set `fsdp_version: 2` in the accelerate config (`version: 2` "
            "in `fsdp_config`), or train the adapter with DDP or DeepSpeed ZeRO."
        )
    if getattr(quantization_config, "load_in_8bit", False) or getattr(model, "is_loaded_in_8bit", False):
        raise ValueError(
            "FSDP cannot shard weights in 8 bits. Set `load_in_4bit: true` in place of `load_in_8bit`, or train with "
            "DDP or DeepSpeed ZeRO."
        )


def check_student(trainer: Any) -> None:
    """Refuse a student that its layout cannot hold. Raises `ValueError`."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None or not isinstance(trainer.model, PeftModel):
        return
    embedding, head = trainer.model.get_input_embeddings(), trainer.model.get_output_embeddings()
    shared = head is not None and embedding.weight is head.weight
    on_it = [name for name, module in (("embed_tokens", embedding), ("lm_head", head)) if _is_adapted(module)]
    if shared and on_it:
        raise ValueError(
            f"FSDP2 cannot shard an adapter on `{on_it[0]}` where embedding and head share their weight "
            "(`tie_word_embeddings`). Take it out of `lora_target_modules`, or train with DDP or DeepSpeed ZeRO."
        )


def _is_adapted(module: Any) -> bool:
    return isinstance(module, BaseTunerLayer)


def _asks_for_fsdp(args: Any) -> bool:
    return bool(args.fsdp) or _is_set("ACCELERATE_USE_FSDP")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")


def _fsdp_version(args: Any) -> int:
    asked = (args.fsdp_plugin_args or {}).get("fsdp_version")
    return int(asked or os.environ.get("FSDP_VERSION", "1"))  # accelerate's own default


# --- saved weights ---------------------------------------------------------------------------------------------------


@contextmanager
def whole_weights(trainer: Any) -> Iterator[None]:
    """Let `save_model` write weights that `from_pretrained` reads, where the layout is set to keep shards."""
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        kept = fsdp.state_dict_type, fsdp.state_dict_config, fsdp.optim_state_dict_config
        fsdp.state_dict_config = fsdp.optim_state_dict_config = None
        fsdp.set_state_dict_type("FULL_STATE_DICT")
        try:
            yield
        finally:
            fsdp.state_dict_type, fsdp.state_dict_config, fsdp.optim_state_dict_config = kept
    elif trainer.is_deepspeed_enabled and shards_weights(trainer.accelerator.state):
        with gather_on_save(trainer.deepspeed):
            yield
    else:
        yield


def without_tied_copies(model: Any, weights: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    """A state dict without the weights that are another one's under a second name.

    `save_pretrained` leaves them out where both names hold one tensor; ZeRO-2 and FSDP2 hand it two copies.
    """
    if weights is None:
        return None
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: weight for name, weight in weights.items() if tied.get(name) not in weights}
