"""What an older recipe says in several keys at once, or in values: mixtures, values that are gone, what this machine
does not have, and the habits of that time.
"""

from __future__ import annotations

import transformers.utils as transformers_utils

from ._trl import is_accelerator_there
from .data.mixture import MIXER, MIXTURE, read_mixer, read_mixture
from .key_rules import Reading, is_true, listed, parsed

# (key, value that is gone) -> its value today
VALUES = {("optim", "adamw_hf"): "adamw_torch", ("packing_strategy", "ffd"): "bfd"}
STRATEGIES = ("eval_strategy", "save_strategy", "logging_strategy")
ATTENTION = "attn_implementation"
_NO_FLASH = "`sdpa`: there is no flash attention on this machine"


def take_mixture(reading: Reading) -> None:
    """`dataset_mixture` or `dataset_mixer`, unless a `--dataset_name` was typed over it."""
    key = next((key for key in (MIXTURE, MIXER) if reading.asked(key)), None)
    if key is None:
        return
    typed = reading.typed(key, take=True)
    value = parsed(reading.recipe.pop(key, None) if typed is None else typed)
    configs, splits = reading.get("dataset_configs"), reading.get("dataset_splits")
    if typed is None and reading.typed("dataset_name") is not None:
        reading.say(key, "not used: `--dataset_name` is set")
        return
    name = reading.recipe.pop("dataset_name", None)
    if name is not None:
        reading.say("dataset_name", f"not used: the `{key}` beside it is, as then", name)
    if key == MIXTURE:
        reading.mixture = read_mixture(value)
        reading.say(key, f"mixed as then: {len(reading.mixture.datasets)} datasets, seed {reading.mixture.seed}")
        return
    for name in ("dataset_configs", "dataset_splits"):
        reading.typed(name, take=True)
        reading.recipe.pop(name, None)
    reading.mixture = read_mixer(
        value, None if splits is None else listed(splits), None if configs is None else listed(configs)
    )
    reading.say(key, "mixed as then: the first rows of each, by its share; shuffled with seed 42")


def change_values(reading: Reading) -> None:
    """Values that mean nothing today, or nothing on this machine."""
    for key in STRATEGIES:
        if reading.recipe.get(key) is False:  # YAML reads a bare `no` as false
            reading.recipe[key] = "no"
    for (key, old), new in VALUES.items():
        if reading.get(key) == old:
            reading.put(key, new)
            reading.say(key, f"`{key}: {new}`", old)
    attention = reading.get(ATTENTION)
    if isinstance(attention, str) and not _has_attention(attention):
        reading.put(ATTENTION, "sdpa")
        reading.say(ATTENTION, _NO_FLASH, attention)
    if is_true(reading.get("use_liger_kernel")) and not transformers_utils.is_liger_kernel_available():
        reading.put("use_liger_kernel", False)
        reading.say("use_liger_kernel", "`false`: liger_kernel is not installed (pip install liger-kernel)", True)
    for key in ("model_init_kwargs", "teacher_model_init_kwargs"):
        _change_load_arguments(reading, key)
    if reading.asked("benchmarks") and not reading.asked("benchmark_command"):
        way = "`benchmark_command`, as `lighteval accelerate model_name={model} {task}`"
        reading.say("benchmarks", f"not run: set {way}; no jobs are started", reading.get("benchmarks"))
    kwargs = parsed(reading.get("dataset_kwargs"))
    if isinstance(kwargs, dict) and kwargs.keys() - {"skip_prepare_dataset"}:
        gone = sorted(kwargs.keys() - {"skip_prepare_dataset"})
        reading.put("dataset_kwargs", {name: value for name, value in kwargs.items() if name not in gone} or None)
        reading.say("dataset_kwargs", f"not used: {', '.join(gone)}; special tokens come from template and tokenizer")


def _change_load_arguments(reading: Reading, key: str) -> None:
    """`torch_dtype`, and an attention that is not there, inside the arguments a model is loaded with."""
    kwargs = parsed(reading.get(key))
    if not isinstance(kwargs, dict):
        return
    changed = {"dtype" if name == "torch_dtype" else name: value for name, value in kwargs.items()}
    if "torch_dtype" in kwargs:
        reading.say(f"{key}.torch_dtype", f"`dtype: {kwargs['torch_dtype']}`", kwargs["torch_dtype"])
    attention = kwargs.get(ATTENTION)
    if isinstance(attention, str) and not _has_attention(attention):
        changed[ATTENTION] = "sdpa"
        reading.say(f"{key}.{ATTENTION}", _NO_FLASH, attention)
    if changed != kwargs:
        reading.put(key, changed)


def _has_attention(name: str) -> bool:
    """Whether an attention can be had; of others than flash attention `transformers` judges."""
    if not name.startswith("flash_attention_"):
        return True
    check = getattr(transformers_utils, f"is_flash_attn_{name.removeprefix('flash_attention_')}_available", None)
    # `kernels` brings flash attention from the Hub
    return is_accelerator_there() and (check is None or check() or transformers_utils.is_kernels_available())


def keep_old_habits(reading: Reading) -> None:
    """Rows were cut without a word then, which stays, counted; and every turn was trained, which does not stay."""
    if not reading.asked("overflow"):
        reading.recipe["overflow"] = "cut"
        reading.say("(not set)", "`overflow: cut`: longer rows are cut and counted, as in this recipe's time")
    if reading.asked("system_prompt"):
        reading.say("system_prompt", "put before conversations that have none; open-r1's sft kept it for benchmarks")
    if not reading.asked("train_on", "completion_only_loss", "assistant_only_loss"):
        reading.say(
            "(not set)", "`train_on: assistant`: of `messages` every turn was trained then; now `train_on: all`"
        )
