"""`torch_compile`: backbones are compiled where the loss is computed.

accelerate compiles the forward of the wrapped model, and the loss runs another function in its place. Rollouts call the
backbones as they are: rows that grow a token a call would be compiled again and again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend
from torch import nn

from . import heads
from ._trl import called_through, compiled_call

logger = get_logger(__name__)


class CompiledBackbones:
    """The backbones of a run as `torch.compile` has made them, each compiled at its first call."""

    def __init__(self, options: dict[str, Any] | None = None):
        """`options` are those of `torch.compile`; `None` compiles nothing."""
        self._options = options
        self._calls: dict[int, tuple[nn.Module, Any]] = {}

    def used(self, *models: Any) -> AbstractContextManager[None]:
        """Within it, calls of these unwrapped models' backbones are compiled ones."""
        if self._options is None:
            return nullcontext()
        calls = []
        for model in models:
            backbone = heads.causal_lm(model).base_model
            if id(backbone) not in self._calls:
                self._calls[id(backbone)] = backbone, torch.compile(compiled_call(backbone), **self._options)
            calls.append(self._calls[id(backbone)])
        return called_through(calls)


def backbones_for(trainer: Any) -> CompiledBackbones:
    """What `torch_compile` asks for; where it cannot be, that is said."""
    plugin = trainer.accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:
        return CompiledBackbones()
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        logger.warning("torch_compile: the loss is computed without it under DeepSpeed and FSDP.")
        return CompiledBackbones()
    options = {key: value for key, value in plugin.to_kwargs().items() if key != "use_regional_compilation"}
    return CompiledBackbones(options)
