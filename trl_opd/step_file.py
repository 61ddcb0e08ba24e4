"""The micro-batches of one optimizer step as a file of tensors, to look at that step again.

safetensors: reading it runs no code, whoever the file came from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .data.collate import NUM_ITEMS, POSITIONS, TEACHER
from .errors import UsageError
from .masking import trained_positions

KIND = "trl_opd step 1"  # what the file says it is; another layout gets another number


@dataclass(frozen=True)
class StepFile:
    """`about` says which step of what it was; `batches` are its micro-batches, of every rank, on the CPU."""

    about: dict[str, Any]
    batches: list[dict[str, Any]]


def write_step(path: str, about: Mapping[str, Any], batches: Iterable[Mapping[str, Any]]) -> None:
    """Write micro-batches as tensors `<number>.<key>` and `about` as JSON; whole or not at all."""
    tensors = {f"{i}.{name}": tensor for i, batch in enumerate(batches) for name, tensor in flat(batch).items()}
    save_file(tensors, path + ".part", metadata={"kind": KIND, "about": json.dumps(about)})
    os.replace(path + ".part", path)


def flat(batch: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """A batch's tensors, copied to the CPU (safetensors takes none that share memory), the teacher's as
    `teacher.<key>`. What labels tell is left out."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in batch.items():
        if isinstance(value, Mapping):
            tensors |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor) and name != NUM_ITEMS:
            tensors[prefix + name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors


def read_step(path: str, job: str | None = None) -> StepFile:
    """Read what `write_step` wrote, with the trained positions of each batch.

    Raises `UsageError` for another file, and for a step of another job.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--batch {path} cannot be read: {error}") from error
    if metadata.get("kind") != KIND:
        raise UsageError(f"--batch {path} is no file of a step: give one that a stopped run named in its error")
    try:
        step = StepFile(json.loads(metadata["about"]), _batches(tensors))
        theirs = step.about["job"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(f"--batch {path} is damaged ({error}): take another file of a step") from error
    if job not in (None, theirs):
        raise UsageError(f"--batch {path} is a step of `{theirs}`: run `trl-opd check {theirs}`")
    return step


def _batches(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    batches: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        inner, _, last = key.rpartition(".")
        batch = batches.setdefault(int(number), {})
        (batch.setdefault(TEACHER, {}) if inner else batch)[last] = tensor
    for batch in batches.values():
        for part in filter(None, (batch, batch.get(TEACHER))):
            if "labels" in part:
                part[POSITIONS] = trained_positions(part["labels"])
    return [batches[i] for i in sorted(batches)]
