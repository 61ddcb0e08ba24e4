"""Keys of older recipes and commands -> what they are today, or why they do nothing now, said in one table.

Old is what open-r1, alignment-handbook, TRL 0.9 to 0.22 and transformers 4 took. Recipe and command line follow the
same rules, and what was typed wins over the recipe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .configs import DistillationConfig
from .errors import UsageError
from .grpo_keys import take_grpo
from .key_rules import Became, Reading, Rule, environment, is_true, listed, renamed, unused, where_true, within
from .old_values import change_values, keep_old_habits, take_mixture
from .shown import printable


def translate(job: str, recipe: dict[str, Any], argv: Sequence[str]) -> Reading:
    """Recipe and command line in today's keys. Raises `UsageError` for a value that never was one."""
    reading = Reading(job, recipe, argv)
    take_mixture(reading)
    old = reading.apply(rules_of(job)) or reading.mixture is not None
    change_values(reading)
    if job == "distill":
        take_grpo(reading)
    elif old:
        reading.chatml = True
        keep_old_habits(reading)
    return reading


def rules_of(job: str) -> dict[str, Rule]:
    """The table of a job."""
    return COMMON | (SFT if job == "sft" else DISTILL)


def show(job: str, rows: Iterable[tuple[str, str]]) -> None:
    """The table on stderr, from the main process. A terminal folds long lines, a file gets them whole."""
    rows = list(rows)
    if not rows or os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
        return
    table = Table(title=f"trl-opd {job}: keys of an older time, or that this machine changes", title_justify="left")
    for column in ("asked", "today"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(stderr=True, width=None if sys.stderr.isatty() else 240).print(table)


# --- rules of one key ------------------------------------------------------------------------------------------------

# `warmup_steps` below 1 is a share of the steps, and 1 is one step: this is all of them, for up to 10^9 steps
ALL_STEPS = 1 - 1e-9


def _warmup_ratio(reading: Reading, key: str, value: Any) -> Became:
    try:
        ratio = float(value)
    except (TypeError, ValueError):
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise UsageError(f"warmup_ratio is {value!r}; it must be a share of the steps, from 0 to 1.")
    if ratio == 1:
        return Became({"warmup_steps": ALL_STEPS}, "all steps (1 would be one step)")
    return Became({"warmup_steps": ratio}, "below 1 it is a share of the steps")


def _tokenizer(reading: Reading, key: str, value: Any) -> Became:
    if value == reading.get("model_name_or_path"):
        return Became(note="not used: it is the model's own")
    reading.tokenizer = str(value)
    return Became(note="the tokenizer is loaded from there")


def _hub_organization(reading: Reading, key: str, value: Any) -> Became:
    name = reading.get("hub_model_id") or reading.get("push_to_hub_model_id")
    reading.typed("push_to_hub_model_id", take=True)
    reading.recipe.pop("push_to_hub_model_id", None)
    name = name or os.path.basename(str(reading.get("output_dir", "")).rstrip("/"))
    reading.put("hub_model_id", f"{value}/{str(name).split('/')[-1]}")
    return Became(note=f"`hub_model_id: {reading.recipe['hub_model_id']}`")


def _callbacks(reading: Reading, key: str, value: Any) -> Became:
    names = listed(value)
    others = [str(name) for name in names if name != PUSH_CALLBACK]
    note = (
        f"not used: {', '.join(others) or 'none is named'}: pass callbacks to the trainer in Python"
        if others or not names
        else ""
    )
    if PUSH_CALLBACK not in names:
        return Became(note=note)
    pushes = is_true(reading.get("push_to_hub")) or is_true(reading.get("push_to_hub_revision"))
    idle = "" if pushes else "nothing is pushed without `push_to_hub: true`"
    return Became({"hub_push_checkpoints": True}, "; ".join(filter(None, [idle, note])))


def _max_new_tokens(reading: Reading, key: str, value: Any) -> Became:
    fields = DistillationConfig.__dataclass_fields__
    changed = [
        f"`{name}` (was {old}, is {fields[name].default})"
        for name, old in GKD_DEFAULTS.items()
        if name != "max_completion_length" and not reading.asked(name)
    ]
    note = "GKDTrainer had other defaults for what is not set here: " + ", ".join(changed) if changed else ""
    return Became({"max_completion_length": value}, note)


def _template_file(reading: Reading, key: str, value: Any) -> Became:
    if not os.path.isfile(value):
        raise UsageError(f"chat_template_path: there is no file {value}. Set a .jinja file, or `chat_template`.")
    with open(value, encoding="utf-8") as file:
        reading.put("chat_template", file.read())
    return Became(note="`chat_template` holds that file's text")


def _dataset_splits(reading: Reading, key: str, value: Any) -> Became:
    splits = listed(value)
    if not all(isinstance(split, str) for split in splits):
        raise UsageError(f"dataset_splits is {value!r}; it must be a list of names.")
    named = {
        f"dataset_{kind}_split": next((split for split in splits if kind in split), None) for kind in ("train", "test")
    }
    return Became({name: split for name, split in named.items() if split is not None})


PUSH_CALLBACK = "push_to_hub_revision"
_MACHINE = unused("torch and accelerate decide it")
_WITHOUT_PACKING = unused("rollouts are not packed")
_GKD_LENGTH = unused("prompts are bounded by `max_prompt_length`, completions by `max_completion_length`")
_ASSISTANT = unused("what the completion holds is trained, always")

# What TRL's GKDTrainer took where a recipe did not say, and `DistillationTrainer` takes otherwise
GKD_DEFAULTS = {"temperature": 0.9, "lmbda": 0.5, "beta": 0.5, "max_completion_length": 128}

COMMON: dict[str, Rule] = {
    # the model
    "torch_dtype": renamed("dtype"),
    "use_flash_attention_2": where_true({"attn_implementation": "flash_attention_2"}),
    "use_liger": renamed("use_liger_kernel"),
    "gradient_checkpointing_use_reentrant": within("gradient_checkpointing_kwargs", "use_reentrant"),
    "tokenizer_name_or_path": _tokenizer,
    "base_model_revision": unused("an adapter's own config names its base"),
    "resize_to_multiple_of": renamed("pad_embeddings_to_multiple_of"),
    "additional_special_tokens": lambda reading, key, value: Became({"added_special_tokens": listed(value)}),
    "model_code_revision": unused("`model_revision` is the revision of the code too"),
    # the dataset
    "dataset_config_name": renamed("dataset_config"),
    "dataset_train_name": renamed("dataset_train_split"),
    "dataset_test_name": renamed("dataset_test_split"),
    "dataset_splits": _dataset_splits,
    "dataset_configs": lambda reading, key, value: Became({"dataset_config": listed(value)[0]}),
    "preprocessing_num_workers": renamed("dataset_num_proc"),
    "auto_insert_empty_system_msg": where_true({"system_prompt": ""}),
    "truncation_side": unused("of what is too long, `overflow` (sft) and `prompt_overflow` (distill) decide"),
    # the run
    "overwrite_output_dir": unused(
        "nothing is ever deleted; a run goes on from the last checkpoint there, unless `resume_from_checkpoint: false`"
    ),
    "warmup_ratio": _warmup_ratio,
    "evaluation_strategy": renamed("eval_strategy"),
    "per_gpu_train_batch_size": renamed("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": renamed("per_device_eval_batch_size"),
    "adafactor": where_true({"optim": "adafactor"}),
    "no_cuda": where_true({"use_cpu": True}),
    "save_safetensors": unused("weights are always saved as safetensors"),
    "logging_dir": environment("TENSORBOARD_LOGGING_DIR"),
    "include_inputs_for_metrics": where_true({"include_for_metrics": ["inputs"]}),
    "include_tokens_per_second": where_true({"include_num_input_tokens_seen": True}),
    "dispatch_batches": within("accelerator_config", "dispatch_batches"),
    "split_batches": within("accelerator_config", "split_batches"),
    "fsdp_min_num_params": within("fsdp_config", "min_num_params"),
    "fsdp_transformer_layer_cls_to_wrap": within("fsdp_config", "transformer_layer_cls_to_wrap"),
    "torchdynamo": renamed("torch_compile_backend"),
    "xpu_backend": renamed("ddp_backend"),
    "sharded_ddp": unused("fairscale is gone: set `fsdp`, or start with a DeepSpeed config"),
    "tp_size": unused("set `parallelism_config`"),
    "past_index": unused("no model keeps such states now"),
    "ray_scope": unused("there is no hyperparameter search"),
    "use_legacy_prediction_loop": unused("there is one evaluation loop"),
    **dict.fromkeys(["use_mps_device", "jit_mode_eval", "use_ipex", "tpu_num_cores", "tpu_metrics_debug"], _MACHINE),
    **dict.fromkeys(["fp16_opt_level", "fp16_backend", "half_precision_backend", "mp_parameters"], _MACHINE),
    # the Hub and trackers
    "push_to_hub_model_id": renamed("hub_model_id"),
    "push_to_hub_organization": _hub_organization,
    "push_to_hub_token": renamed("hub_token"),
    "hub_model_revision": renamed("hub_revision"),
    "push_to_hub_revision": where_true({"push_to_hub": True}, "the branch is `hub_revision`"),
    "overwrite_hub_revision": unused("a push adds a commit to the branch"),
    "callbacks": _callbacks,
    "wandb_entity": environment("WANDB_ENTITY"),
    "wandb_project": environment("WANDB_PROJECT"),
    "wandb_run_group": environment("WANDB_RUN_GROUP"),
}

SFT: dict[str, Rule] = {
    "max_seq_length": renamed("max_length"),
    "text_column": renamed("dataset_text_field"),
    "group_by_length": where_true({"train_sampling_strategy": "group_by_length"}),
    "dataset_batch_size": unused("rows are tokenized one by one, on `dataset_num_proc` processes"),
    "num_of_sequences": unused("`packing` packs whole rows to `max_length`"),
    "chars_per_token": unused("`packing` counts tokens"),
}

DISTILL: dict[str, Rule] = {
    "max_new_tokens": _max_new_tokens,
    "group_by_length": unused("prompts come in the order of the seed"),
    "chat_template_path": _template_file,
    **dict.fromkeys(["max_length", "max_seq_length"], _GKD_LENGTH),
    **dict.fromkeys(["packing", "packing_strategy", "eval_packing", "padding_free"], _WITHOUT_PACKING),
    **dict.fromkeys(["num_of_sequences", "chars_per_token"], _WITHOUT_PACKING),
    **dict.fromkeys(["completion_only_loss", "assistant_only_loss"], _ASSISTANT),
    **dict.fromkeys(["dataset_text_field", "text_column"], unused("the prompt's column is `dataset_prompt_column`")),
    **dict.fromkeys(["dataset_kwargs", "dataset_batch_size"], unused("prompts are tokenized one by one")),
    **dict.fromkeys(["truncation_mode"], unused("`prompt_overflow` says what becomes of long prompts")),
    **dict.fromkeys(["pad_token"], unused("padding is never seen; the tokenizer's own serves")),
    "activation_offloading": unused("it is for sft only"),
    "vllm_max_model_len": renamed("vllm_max_model_length"),
    "vllm_guided_decoding_regex": renamed("vllm_structured_outputs_regex"),
    "vllm_device": unused("vLLM shares the training GPUs (`vllm_mode: colocate`) or is a server of its own"),
    "vllm_dtype": unused("vLLM takes the model's"),
    "vllm_enable_prefix_caching": unused("vLLM does it by itself"),
    "use_transformers_paged": unused("generation is transformers' own, or `use_vllm: true`"),
    "wandb_log_unique_prompts": renamed("log_unique_prompts"),
}
