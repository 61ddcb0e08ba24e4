"""The only place that touches private names of TRL and transformers. `tests/test_trl_contract.py` holds them.

TRL moves fast: when a release renames something, this file and that test are what changes.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import trl
from packaging.version import Version
from torch import nn
from transformers import TrainingArguments
from trl.models import prepare_deepspeed
from trl.models.utils import _ForwardRedirection as ForwardRedirection
from trl.trainer.utils import (
    create_model_from_path,
    get_config_model_id,
    global_then_local_main_first,
    identity,
    maybe_gather_lm_head_ctx,
)

__all__ = [
    "ForwardRedirection",
    "adapters_on_the_head",
    "attends_by_lengths",
    "attention_of",
    "called_through",
    "compiled_call",
    "completions_shown",
    "create_model_from_path",
    "gather_on_save",
    "get_config_model_id",
    "global_then_local_main_first",
    "identity",
    "keep_4bit_gradients_right",
    "leave_step_out",
    "load_weights",
    "maybe_gather_lm_head_ctx",
    "prepare_deepspeed",
    "upgrade_config",
]

OLDEST_TRL = "1.16.0"

if Version(trl.__version__) < Version(OLDEST_TRL):
    raise ImportError(f"trl_opd needs trl>={OLDEST_TRL}; trl {trl.__version__} is installed. Run: pip install -U trl")

C = TypeVar("C", bound=TrainingArguments)

# What TrainingArguments writes in other words into `to_dict()`, so it is taken from the object itself.
_SECRET_FIELDS = ("hub_token",)


def upgrade_config(args: TrainingArguments | None, cls: type[C], default_output_dir: str, **when_upgraded: Any) -> C:
    """`args` as an instance of our config class `cls`, with the same values.

    `None` gives the defaults; a config of TRL's own class keeps every value and gets our further fields, as
    `when_upgraded` says or at their defaults; plain `TrainingArguments` are read as TRL reads them.
    """
    if args is None:
        return cls(output_dir=default_output_dir)
    if isinstance(args, cls):
        return args
    parent = next(base for base in cls.__mro__[1:] if base.__module__.startswith("trl."))
    if isinstance(args, parent):
        upgraded = object.__new__(cls)
        upgraded.__dict__.update(args.__dict__)
        for field in dataclasses.fields(cls):
            if field.name not in upgraded.__dict__:
                default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                upgraded.__dict__[field.name] = when_upgraded.get(field.name, default)
        return upgraded
    values = args.to_dict() | {name: getattr(args, name) for name in _SECRET_FIELDS}
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    return cls(**{key: value for key, value in values.items() if key in known} | when_upgraded)


@contextmanager
def adapters_on_the_head() -> Iterator[None]:
    """Let TRL's constructors take a model with LoRA on its `lm_head`.

    They refuse it since their loss reads `lm_head.weight` alone; ours calls such a head. The refusal is an `isinstance`
    of a name in their module, so that name stands for nothing here.
    """
    modules: list[Any] = [importlib.import_module(f"trl.trainer.{name}_trainer") for name in ("sft", "distillation")]
    theirs = [module.BaseTunerLayer for module in modules]
    try:
        for module in modules:
            module.BaseTunerLayer = _NoTunerLayer
        yield
    finally:
        for module, layer in zip(modules, theirs, strict=True):
            module.BaseTunerLayer = layer


class _NoTunerLayer:
    """A class that nothing is an instance of."""


def keep_4bit_gradients_right(model: nn.Module) -> int:
    """Keep 4-bit student layers off bitsandbytes' AVX512-BF16 kernel; returns how many layers there are.

    That kernel repacks the weights at the first forward in eval mode and has no backward, so every training gradient
    after a rollout or an evaluation would be wrong.
    """
    layers: list[Any] = [
        module
        for module in model.modules()
        if type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes")
    ]
    for layer in layers:
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            warnings.warn(
                "This bitsandbytes has no `support_avx512bf16_for_cpu`; check 4-bit gradients on a CPU.", stacklevel=2
            )
            break
        layer.support_avx512bf16_for_cpu = False
    return len(layers)


def attention_of(model: Any) -> str:
    """The name of a transformers model's attention implementation."""
    return model.config.get_text_config()._attn_implementation or "eager"


def attends_by_lengths(backbone: nn.Module) -> bool:
    """Whether a model's attention is said to need the lengths of its rows and nothing else: FlashAttention can take its
    place, and what the forward is given reaches it."""
    return all(getattr(backbone, f"_supports_{name}", False) is True for name in ("flash_attn", "attention_backend"))


def compiled_call(module: nn.Module) -> Callable[..., Any]:
    """What calling a module does, for `torch.compile`: what `nn.Module.compile` takes."""
    return module._call_impl


@contextmanager
def called_through(calls: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Let modules be called through these functions, as `nn.Module.compile` does for good."""
    for module, call in calls:
        module._compiled_call_impl = call
    try:
        yield
    finally:
        for module, _ in calls:
            module._compiled_call_impl = None


@contextmanager
def completions_shown(show: Callable[[str], str]) -> Iterator[None]:
    """Let TRL's table of `log_completions` print prompts and completions as `show` gives them.

    What goes to files and trackers stays as it is.
    """
    module: Any = importlib.import_module("trl.trainer.distillation_trainer")
    theirs = module.print_prompt_completions_sample

    def print_shown(prompts: list[str], completions: list[str], *args: Any, **kwargs: Any) -> None:
        theirs([show(text) for text in prompts], [show(text) for text in completions], *args, **kwargs)

    module.print_prompt_completions_sample = print_shown
    try:
        yield
    finally:
        module.print_prompt_completions_sample = theirs


def load_weights(trainer: Any, checkpoint: str) -> None:
    """Put a checkpoint's weights (its adapter, where there is one) into a trainer's model."""
    trainer._load_from_checkpoint(checkpoint)


def leave_step_out(accelerator: Any, engine: Any) -> None:
    """Let DeepSpeed take no optimizer step after this micro-batch, the last of its step. It steps within
    `accelerator.backward`, where nothing that `Trainer` calls later can hold it back."""
    accelerator.sync_gradients = False  # `Trainer` sets it back before it looks
    engine._global_grad_norm = 0.0  # what is logged; it would still be the last step's


@contextmanager
def gather_on_save(engine: Any) -> Iterator[None]:
    """Let a ZeRO-3 engine give its weights whole (`zero3_save_16bit_model`), whatever its config says."""
    config = engine._config.zero_config
    asked, config.gather_16bit_weights_on_model_save = config.gather_16bit_weights_on_model_save, True
    try:
        yield
    finally:
        config.gather_16bit_weights_on_model_save = asked


def is_accelerator_there() -> bool:
    """Whether torch sees a GPU or another accelerator."""
    return torch.cuda.is_available() or (hasattr(torch, "accelerator") and torch.accelerator.is_available())
