"""Student completions: what they count for, how they are described, how they become micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from .types import Rollout


def rollout_seed(seed: int, step: int, rank: int) -> int:
    """The seed of one rank's rollout at one step: the same after a resume, different on every rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def sampling(model: torch.nn.Module, seed: int, device: torch.device) -> Iterator[None]:
    """Sample with dropout off and from `seed`, then give back the mode and the random state that were there."""
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
            torch.manual_seed(seed)
            yield
    finally:
        model.train(was_training)


def rollout_table(rollout: Rollout, stop_ids: Collection[int]) -> torch.Tensor:
    """(R, 4) int64, one row a completion: prompt length, completion length, stopped by itself, weight."""
    rows = zip(rollout.prompt_ids, rollout.completion_ids, rollout.weights, strict=True)
    return torch.tensor([[len(p), len(c), bool(c) and c[-1] in stop_ids, w] for p, c, w in rows])


def completion_metrics(table: torch.Tensor) -> dict[str, float]:
    """TRL's `completions/*` names from the `rollout_table` of all ranks, over the rows that are trained."""
    lengths, stopped = table[table[:, 3] > 0][:, 1:3].unbind(1)
    if not len(lengths):
        return {}
    terminated = lengths[stopped > 0] if stopped.any() else torch.zeros(1)
    metrics = {"completions/clipped_ratio": 1 - stopped.float().mean().item()}
    for name, values in (("", lengths.float()), ("terminated_", terminated.float())):
        metrics[f"completions/mean_{name}length"] = values.mean().item()
        metrics[f"completions/min_{name}length"] = values.min().item()
        metrics[f"completions/max_{name}length"] = values.max().item()
    return metrics


def trained_tokens(table: torch.Tensor) -> int:
    """N: the trained tokens in a `rollout_table`."""
    return int((table[:, 1] * table[:, 3]).sum())


def micro_batches(num_rows: int, parts: int) -> list[list[int]]:
    """Row indices of a window cut into `parts` micro-batches of the same number of rows, in order."""
    size = num_rows // parts
    assert size * parts == num_rows, f"a window of {num_rows} rows cannot be cut into {parts} equal micro-batches"
    return [list(range(start, start + size)) for start in range(0, num_rows, size)]
