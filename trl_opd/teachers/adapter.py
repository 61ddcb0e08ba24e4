"""Teachers that are the student's own weights under another adapter, or under none: no second copy of the base."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..heads import Head, head_of, predicting_states
from ..rollout import continue_prompts
from ..types import TrainedPositions


@contextmanager
def switched(model: Any, adapter: str | None) -> Iterator[None]:
    """A `PeftModel` under a frozen adapter, or with adapters off (`None`): in eval mode, then all as it was.

    Which parameters train is put back as well: peft's own switches turn it on and off along the way.
    """
    trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    active = list(model.base_model.active_adapters)
    model.eval()
    try:
        if adapter is None:
            with model.disable_adapter():
                yield
        else:
            model.base_model.set_adapter(adapter)
            yield
    finally:
        if adapter is not None:
            model.base_model.set_adapter(active)
        for parameter, trained in trains:
            parameter.requires_grad_(trained)
        for module, training in modes:
            module.training = training


class AdapterTeacher:
    """The student's base with its adapter off (`adapter=None`: the `base` teacher), or under a second, frozen
    adapter; `flat` leaves out padding (`predicting_states`)."""

    def __init__(self, adapter: str | None = None, flat: bool = False):
        self.adapter, self.flat = adapter, flat

    def states(
        self, student: nn.Module, batch: dict[str, Any], positions: TrainedPositions
    ) -> tuple[torch.Tensor, Head]:
        """States that predict the trained tokens, (N, H), without gradient, and the head that scores them.

        Must run inside the student's wrapped forward.
        """
        with torch.no_grad(), switched(student, self.adapter):
            hidden = predicting_states(student, batch, positions, self.flat)
            head = head_of(student)
        if not head.plain:  # its own adapter must be switched too, whenever it is called
            head = replace(head, module=_Switched(student, head.module, self.adapter))
        return hidden, head

    def write(self, student: nn.Module, prompts: list[list[int]], config: Any, **stops: Any) -> list[list[int]]:
        """Completions of its own, sampled by a `GenerationConfig` (see `continue_prompts`)."""
        with switched(student, self.adapter):
            return continue_prompts(student, prompts, config, **stops)


class _Switched:
    """A head that is called under the teacher's adapter."""

    def __init__(self, model: nn.Module, head: nn.Module, adapter: str | None):
        self.model, self.head, self.adapter = model, head, adapter

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        with switched(self.model, self.adapter):
            return self.head(states)
