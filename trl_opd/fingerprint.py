"""What a run is made of: recipe, weights' shapes and data, in a form that can be compared with a checkpoint's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import accelerate
import datasets
import peft
import torch
import transformers
import trl
from datasets import Dataset

from .layouts import layout_name

# fields that decide where things go, how fast, and what is logged, saved or evaluated, but not what is trained
FREE = {
    "output_dir", "overwrite_output_dir", "do_train", "do_eval", "do_predict", "run_name", "project", "report_to",
    "resume_from_checkpoint", "resume_anyway", "on_save_error", "on_nonfinite", "disable_tqdm", "debug",
    "remove_unused_columns", "use_cpu", "local_rank", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "include_num_input_tokens_seen", "include_for_metrics", "prediction_loss_only",
    "batch_eval_metrics", "skip_memory_metrics", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "strict_masks", "per_device_eval_batch_size", "dataset_num_proc", "model_init_kwargs", "teacher_model_init_kwargs",
    "deepspeed", "fsdp", "fsdp_config", "accelerator_config", "parallelism_config", "auto_find_batch_size",
    "enable_jit_checkpoint",
    "restore_callback_states_from_checkpoint", "num_completions_to_print", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "balance_micro_batches", "per_device_max_tokens", "teacher_max_tokens", "benchmarks", "benchmark_command",
}  # fmt: skip
FREE_BEGINNINGS = ("logging_", "log_", "save_", "eval_", "hub_", "push_", "ddp_", "torch_compile", "vllm_")


def fingerprint(trainer: Any) -> dict[str, Any]:
    """`{"recipe": {field: value}, "data": {…}, "model": {…}}` of a trainer, all of it JSON."""
    values = {field.name: getattr(trainer.args, field.name, None) for field in dataclasses.fields(trainer.args)}
    recipe = {name: _plain(value) for name, value in values.items() if _decides(name)}
    recipe["num_processes"] = trainer.accelerator.num_processes
    recipe["layout"] = layout_name(trainer.accelerator.state)  # each has checkpoint files of its own
    inner = trainer.accelerator.unwrap_model(trainer.model)
    adapters = getattr(inner, "peft_config", {})
    return {
        "recipe": recipe,
        "model": {
            "name": str(getattr(inner.config, "_name_or_path", "")),
            # ZeRO-3 leaves an empty tensor in place of what it has sharded, with the shape beside it
            "parameters": _digest(
                sorted((n, *getattr(p, "ds_shape", p.shape), p.requires_grad) for n, p in inner.named_parameters())
            ),
            "adapters": {name: _adapter(config) for name, config in adapters.items()},
        },
        "data": data_fingerprint(trainer.train_dataset),
    }


def data_fingerprint(rows: Any) -> dict[str, Any]:
    """Number of rows and SHA-256 of what they hold, as prepared; a stream cannot be looked at."""
    if not isinstance(rows, Dataset):
        return {"rows": "streamed", "sha256": "not taken of a stream"}
    digest = hashlib.sha256(json.dumps(sorted(rows.column_names)).encode())
    for batch in rows.with_format("arrow").select_columns(sorted(rows.column_names)).iter(batch_size=1000):
        for record in batch.combine_chunks().to_batches():
            digest.update(record.serialize())
    return {"rows": len(rows), "sha256": digest.hexdigest()}


def versions() -> dict[str, str]:
    """The libraries that a checkpoint depends on."""
    modules = (torch, transformers, trl, accelerate, peft, datasets)
    return {module.__name__: module.__version__ for module in modules}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """What differs, one line each: `learning_rate: 0.0001 in the checkpoint, 0.0002 now`.

    A key that only one of the two knows is passed over: another version of a library has it.
    """
    lines = []
    for key in before:
        if key not in now or before[key] == now[key]:
            continue
        name = f"{within}{key}"
        if isinstance(before[key], Mapping) and isinstance(now[key], Mapping):
            lines += differences(before[key], now[key], f"{name}.")
        else:
            lines.append(
                f"{name.removeprefix('recipe.')}: {_short(before[key])} in the checkpoint, {_short(now[key])} now"
            )
    return lines


def _decides(name: str) -> bool:
    return name not in FREE and not name.startswith(FREE_BEGINNINGS)


def _plain(value: Any) -> Any:
    """`value` as JSON would give it back."""
    return json.loads(json.dumps(value, default=str, sort_keys=True))


def _adapter(config: Any) -> dict[str, Any]:
    known = {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}
    return _plain({key: v for key, v in known.items() if key not in ("base_model_name_or_path", "inference_mode")})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
