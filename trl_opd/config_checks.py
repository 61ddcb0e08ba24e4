"""What the configs' values must be: each check raises `ValueError` with field, value, why, and what to set."""

from __future__ import annotations

import math
from typing import Any

from accelerate.logging import get_logger

from ._trl import is_accelerator_there
from .rollout import parse_schedule

logger = get_logger(__name__)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}.")


def check_weights(args: Any) -> None:
    if not 0.0 <= args.lmbda <= 1.0:
        raise ValueError(f"lmbda is {args.lmbda}; it must be in [0, 1]: the share of rows that the student writes.")
    if why := why_not_smoothed(args):
        raise ValueError(why)
    for name in ("sft_weight", "anchor_weight"):
        if (getattr(args, name) or 0.0) < 0:
            raise ValueError(f"{name} is {getattr(args, name)}; a weight must be 0 or more.")
    if args.objective == "policy_gradient" and args.lmbda < 1.0:
        raise ValueError(
            f"The objective policy_gradient averages over what the student writes, and with `lmbda: {args.lmbda}` some "
            "rows are the dataset's. Set `lmbda: 1`, or an objective that compares whole distributions."
        )
    if args.sft_weight and args.lmbda == 1.0:
        raise ValueError(
            f"sft_weight is {args.sft_weight}, but with `lmbda: 1` the student writes every completion and there is no "
            "row to take a cross-entropy on. Set `lmbda` below 1, or `sft_weight: 0`."
        )


def check_max_tokens(args: Any) -> None:
    budget = args.per_device_max_tokens
    if budget is None:
        return
    if budget < 1:
        raise ValueError(f"per_device_max_tokens is {budget}; it must be at least 1, or left out.")
    if "lomo" in str(getattr(args.optim, "value", args.optim)):
        raise ValueError(
            f"per_device_max_tokens is {budget}, but `optim: {getattr(args.optim, 'value', args.optim)}` changes the "
            "weights in the middle of a backward pass, which every piece has. Leave one of them out."
        )


def check_pieces(trainer: Any, why_whole: str = "") -> None:
    """Refuse `per_device_max_tokens` where micro-batches cannot be run in pieces; `why_whole` is a reason of the
    trainer's own."""
    budget = trainer.args.per_device_max_tokens
    if budget is None:
        return
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        why_whole = "DeepSpeed and FSDP need every process to run as many passes as the others, and pieces differ"
    if why_whole:
        raise ValueError(
            f"per_device_max_tokens is {budget}, but {why_whole}. Leave it out, and lower "
            "`per_device_train_batch_size` where memory is short."
        )


def check_rollouts(args: Any) -> None:
    if args.num_generations < 1:
        raise ValueError(f"num_generations is {args.num_generations}; every prompt needs at least one completion.")
    accumulation = args.gradient_accumulation_steps
    if args.steps_per_generation is None:
        args.steps_per_generation = accumulation
    if args.steps_per_generation < 1 or args.steps_per_generation % accumulation:
        raise ValueError(
            f"steps_per_generation is {args.steps_per_generation}; it must be a multiple of "
            f"`gradient_accumulation_steps: {accumulation}`, so that every optimizer step learns from one rollout."
        )
    window = args.per_device_train_batch_size * args.steps_per_generation * args.world_size
    if window % args.num_generations:
        raise ValueError(
            f"num_generations is {args.num_generations}, but a rollout holds {window} completions "
            f"(per_device_train_batch_size {args.per_device_train_batch_size} × steps_per_generation "
            f"{args.steps_per_generation} × {args.world_size} processes), which is no multiple of it. Set "
            f"`num_generations` to a divisor of {window}, or `per_device_train_batch_size: {args.num_generations}`."
        )
    if args.seq_kd and args.lmbda == 1.0:
        raise ValueError(
            "seq_kd is true, but with `lmbda: 1` the student writes every completion. Set `lmbda` below 1."
        )
    if args.max_prompt_length is not None and args.max_prompt_length < 1:
        raise ValueError(f"max_prompt_length is {args.max_prompt_length}; a prompt has at least one token.")
    if args.completion_length_schedule is not None:
        parse_schedule(args.completion_length_schedule, args.max_completion_length)


def check_sampling(args: Any) -> None:
    """`policy_gradient` averages over what the student would write: its samples must be the student's own."""
    own = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral = own | {
        "temperature": args.temperature,
        "do_sample": True,
        "num_beams": 1,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "no_repeat_ngram_size": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    asked = {name: getattr(args, name) for name in own} | (args.generation_kwargs or {})
    filters = {name: asked[name] for name in neutral if asked.get(name) not in (None, neutral[name])}
    if not filters:
        return
    said = ", ".join(f"`{name}: {value}`" for name, value in filters.items())
    plain = ", ".join(f"`{name}: {neutral[name]}`" for name in filters)
    if args.objective == "policy_gradient":
        raise ValueError(
            f"The objective policy_gradient needs samples of the student itself, but {said} changes them: its gradient "
            f"would be another one's. Set {plain}, or an objective that compares whole distributions."
        )
    logger.warning(f"Rollouts are sampled with {said}: the student is graded on text it seldom writes by itself.")


def resolve_precision(args: Any) -> None:
    """bf16 is TRL's default; on a machine without an accelerator it is fp32 unless bf16 was asked for."""
    if args.use_cpu or is_accelerator_there():
        return
    for name in ("bf16", "fp16", "tf32"):
        if getattr(args, name, None):
            cpu = ", or add `use_cpu: true` to train in bfloat16 on the CPU" if name == "bf16" else ""
            raise ValueError(f"`{name}: true` needs a GPU and this machine has none. Set `{name}: false`{cpu}.")
    if args.bf16 is None:
        args.bf16 = False


def check_offloading(args: Any) -> None:
    if args.activation_offloading and (args.use_cpu or not is_accelerator_there()):
        raise ValueError(
            "`activation_offloading: true` keeps activations in main memory in the place of a GPU's, and this run is "
            "on a CPU. Set `activation_offloading: false`."
        )


def check_order_of_prompts(args: Any) -> None:
    strategy = getattr(args, "train_sampling_strategy", "random")  # not there before transformers 5
    if strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy is {strategy!r}, which needs rows whose length is known, and the student has yet "
            "to write them. Set it to `random` or `sequential`; `balance_micro_batches: true` sorts what was written."
        )


def why_not_smoothed(args: Any) -> str:
    """Why `label_smoothing_factor` would do nothing in distillation; empty where it does something."""
    if not args.label_smoothing_factor or getattr(args, "sft_weight", None):  # not there in a config of TRL's
        return ""
    return (
        f"label_smoothing_factor is {args.label_smoothing_factor}, but the teacher's distribution is learnt here, not "
        "labels: it acts on the cross-entropy of `sft_weight` alone. Set `sft_weight` (with `lmbda` below 1), or "
        "`label_smoothing_factor: 0`."
    )


# (names, least, most, whether the least itself is allowed); `None` is no bound
_RANGES: list[tuple[tuple[str, ...], float, float | None, bool]] = [
    (("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps"), 0, None, True),
    (("neftune_noise_alpha", "router_aux_loss_coef", "lora_alpha"), 0, None, True),
    (("num_train_epochs", "temperature", "repetition_penalty", "reward_bound"), 0, None, False),
    (("logging_steps", "save_steps", "eval_steps", "ddp_timeout"), 0, None, False),
    (("adam_beta1", "adam_beta2", "lora_dropout"), 0, 1 - 1e-9, True),
    (("top_p",), 0, 1, False),
    (("min_p", "vllm_gpu_memory_utilization"), 0, 1, True),
    (("top_k",), -1, None, True),
    (("eval_delay", "loss_top_k"), 0, None, True),
    (
        (
            "max_length",
            "max_completion_length",
            "teacher_max_tokens",
            "save_total_limit",
            "eval_accumulation_steps",
            "dataset_num_proc",
        ),
        1,
        None,
        True,
    ),
    (("num_completions_to_print", "torch_empty_cache_steps", "pad_to_multiple_of"), 1, None, True),
    (("seed", "data_seed"), 0, 2**32 - 1, True),
    (("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1, 2**16, True),
    (("num_generations", "steps_per_generation", "lora_r"), 1, 2**16, True),
    (("dataloader_num_workers",), 0, 1024, True),
]


_LARGEST = 2**63 - 1


def check_numbers(args: Any) -> None:
    """Raise `ValueError` for a number that is none (NaN), has no end, or cannot be meant."""
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value) and not (name == "max_grad_norm" and value > 0):
            raise ValueError(f"{name} is {value}; it must be a finite number.")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"{name} is {_short(value)}; it must be at most {_LARGEST:,}.")
    for names, least, most, inclusive in _RANGES:
        for name in names:
            value = getattr(args, name, None)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue  # unset, or a text that its own reader looks at
            if value < least or (value == least and not inclusive) or (most is not None and value > most):
                lowest = f"{least} or more" if inclusive else f"above {least}"
                highest = "" if most is None else f", below {round(most)}" if most < 1 else f", at most {most:,}"
                raise ValueError(f"{name} is {_short(value)}; it must be {lowest}{highest}.")
    steps = getattr(args, "max_steps", -1)
    if isinstance(steps, int) and (steps == 0 or steps < -1):
        raise ValueError(f"max_steps is {_short(steps)}; it must be 1 or more, or -1 for `num_train_epochs`.")


_MAPPINGS = (
    "model_init_kwargs",
    "teacher_model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "gradient_checkpointing_kwargs",
    "activation_checkpointing_kwargs",
    "lr_scheduler_kwargs",
    "dataset_kwargs",
)


def check_mappings(args: Any) -> None:
    """Raise `ValueError` where names and values are wanted and there is another thing: JSON was read by now."""
    for name in _MAPPINGS:
        value = getattr(args, name, None)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r}; it must be a mapping of names to values.")


def _short(number: float) -> str:
    """A number of a thousand digits is one too, and Python does not even write it out."""
    try:
        text = str(number)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 24 else f"{text[:12]}… ({len(text)} digits)"
