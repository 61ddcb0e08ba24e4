"""A GRPO recipe as a source of prompts for distillation: what keeps its meaning, and what has no part in it."""

from __future__ import annotations

import os
from typing import Any

from .configs import DistillationConfig
from .errors import UsageError
from .key_rules import Reading

_REWARD = "not used: the teacher grades every token, no reward does"
_LOSS = "not used: a part of GRPO's loss"

# fmt: off
REWARD_KEYS = [
    "reward_funcs", "reward_weights", "reward_model_name_or_path", "scale_rewards", "multi_objective_aggregation",
    "cosine_min_value_wrong", "cosine_max_value_wrong", "cosine_min_value_correct", "cosine_max_value_correct",
    "cosine_max_len", "repetition_n_grams", "repetition_max_penalty", "max_completion_len", "soft_punish_cache",
    "code_language", "code_eval_test_batch_size", "code_eval_scoring_mode", "code_provider",
    "parallel_code_exec_per_proc", "e2b_router_url", "morph_router_url", "ioi_provider",
]
LOSS_KEYS = [
    "epsilon", "epsilon_high", "delta", "num_iterations", "importance_sampling_level", "use_liger_loss",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "top_entropy_quantile", "entropy_coef",
    "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
    "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos",
    "vespo_lambda_neg", "off_policy_mask_threshold", "use_bias_correction_kl", "num_generations_eval",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_cap", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
]
# fmt: on
# no other recipe has these: they tell a GRPO recipe
GRPO_ONLY: dict[str, str] = dict.fromkeys(REWARD_KEYS, _REWARD) | dict.fromkeys(LOSS_KEYS, _LOSS)
# recipes for other trainers have these too
LOSS_CHOICES = ("loss_type", "router_aux_loss_coef", "cast_lm_head_to_fp32")

# What TRL's GRPOTrainer took where a recipe did not say, and distillation takes otherwise
GRPO_DEFAULTS = {"num_generations": 8, "max_prompt_length": 512, "max_completion_length": 256}


def take_grpo(reading: Reading) -> None:
    """Take GRPO's keys out of a recipe for `distill`, in place. Raises `UsageError` for sizes that do not fit."""
    is_grpo = reading.asked(*GRPO_ONLY)
    for key in [key for key in dict.fromkeys([*reading.recipe, *reading.flags()]) if key in GRPO_ONLY]:
        _drop(reading, key, GRPO_ONLY[key])
    if reading.asked("generation_batch_size"):
        _take_generation_batch(reading)
    for key in LOSS_CHOICES:
        if reading.asked(key):
            _drop(reading, key, "not used: `objective` and `beta` are what chooses the loss here")
    if not is_grpo:
        return
    if reading.typed("beta") is None and reading.asked("beta"):
        default = DistillationConfig.__dataclass_fields__["beta"].default
        why = f"not used: it is GRPO's KL coefficient; ours, the kind of divergence, stays {default} (`--beta` sets it)"
        _drop(reading, "beta", why)
    if reading.asked("max_prompt_length") and not reading.asked("prompt_overflow"):
        reading.recipe["prompt_overflow"] = "truncate_left"
        value = reading.get("max_prompt_length")
        reading.say("max_prompt_length", "and `prompt_overflow: truncate_left`: the end is kept, as in GRPO", value)
    _fit_generations(reading)
    _say_defaults(reading)


def _drop(reading: Reading, key: str, why: str) -> None:
    typed, in_recipe = reading.typed(key, take=True), reading.recipe.pop(key, None)
    reading.say(key, why, in_recipe if typed is None else typed)


def processes() -> int:
    """How many processes the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _sizes(reading: Reading) -> tuple[int, int] | None:
    """Micro-batch of all processes and micro-batches of a rollout; `None` where one is no number, said later."""
    try:
        per_device = int(reading.get("per_device_train_batch_size", 8))
        parts = int(reading.get("steps_per_generation", reading.get("gradient_accumulation_steps", 1)))
    except (TypeError, ValueError):
        return None
    return per_device * processes(), parts


def _take_generation_batch(reading: Reading) -> None:
    value, sizes = reading.get("generation_batch_size"), _sizes(reading)
    if sizes is None:
        return
    if not str(value).isdigit() or int(value) % sizes[0]:
        raise UsageError(
            f"generation_batch_size is {value}; it must be a multiple of {sizes[0]} (per_device_train_batch_size × "
            f"{processes()} processes). Set `steps_per_generation` instead."
        )
    steps = int(value) // sizes[0]
    _drop(reading, "generation_batch_size", f"`steps_per_generation: {steps}`")
    reading.put("steps_per_generation", steps)


def _fit_generations(reading: Reading) -> None:
    """A rollout that cannot be shared out evenly, on fewer processes than the recipe was made for, gets the nearest
    number of completions a prompt: batch and memory stay."""
    asked, sizes = reading.get("num_generations"), _sizes(reading)
    if sizes is None or reading.typed("num_generations") is not None or not isinstance(asked, int) or asked < 1:
        return
    window = sizes[0] * sizes[1]
    if window % asked == 0:
        return
    nearest = min((n for n in range(1, window + 1) if window % n == 0), key=lambda n: (abs(n - asked), -n))
    reading.put("num_generations", nearest)
    whole = next((n for n in range(2, asked + 1) if window * n // processes() % asked == 0), None)
    reading.say(
        "num_generations",
        f"`num_generations: {nearest}`: a rollout on {processes()} process{'es' * (processes() > 1)} holds {window} "
        f"completions, no multiple of {asked}" + (f"; on {whole} processes it is one" if whole else ""),
        asked,
    )


def _say_defaults(reading: Reading) -> None:
    fields: dict[str, Any] = DistillationConfig.__dataclass_fields__
    changed = [
        f"`{name}` (was {old}, is {fields[name].default})"
        for name, old in GRPO_DEFAULTS.items()
        if not reading.asked(name)
    ]
    if str(reading.get("use_vllm")).lower() == "true" and not reading.asked("vllm_mode"):
        changed.append(f"`vllm_mode` (was server, is {fields['vllm_mode'].default})")
    if changed:
        reading.say("(not set)", "GRPOTrainer had other defaults: " + ", ".join(changed))
