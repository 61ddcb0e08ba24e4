"""Student completions: what they count for, how they are described, how they become micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from .few_tokens import fast_on_few_tokens
from .generation import ended_rows_leave, why_rows_stay
from .types import IGNORE_INDEX, Rollout


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


def uniform(*key: int) -> float:
    """A number in [0, 1) that depends on nothing but `key`."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def continue_prompts(
    model: Any,
    prompts: list[list[int]],
    config: Any,
    *,
    pad_token_id: int,
    stop_ids: Collection[int],
    rows_leave: bool = False,
) -> list[list[int]]:
    """What a model samples after each prompt, by a `GenerationConfig`; ends with the stop token where there is one.

    With `rows_leave` those that have ended leave the batch, where they can.
    """
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_token_id] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    leave = ended_rows_leave(model) if rows_leave and not why_rows_stay(model, config) else nullcontext()
    with torch.no_grad(), leave, fast_on_few_tokens(model):
        written = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, longest:].tolist()
    ends = (next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row)) for row in written)
    return [row[:end] for row, end in zip(written, ends, strict=True)]


def rollout_table(rollout: Rollout, stop_ids: Collection[int]) -> torch.Tensor:
    """(R, 7) fp64, one row a completion: prompt length, completion length, stopped by itself, trained tokens, whether
    the student wrote it to be trained, its weight, and the share of 4-grams that repeat."""
    columns = (rollout.prompt_ids, rollout.completion_ids, rollout.labels, rollout.weights, rollout.on_policy)
    rows = zip(*columns, strict=True)
    return torch.tensor(
        [
            [len(p), len(c), bool(c) and c[-1] in stop_ids, len(y) - y.count(IGNORE_INDEX), on and w, w, repetition(c)]
            for p, c, y, w, on in rows
        ],
        dtype=torch.float64,
    )


def completion_metrics(table: torch.Tensor) -> dict[str, float]:
    """TRL's `completions/*` names from the `rollout_table` of all ranks, over rows the student wrote to be trained."""
    own = table[table[:, 4] > 0]
    lengths, stopped = own[:, 1:3].unbind(1)
    if not len(lengths):
        return {}
    terminated = lengths[stopped > 0] if stopped.any() else torch.zeros(1)
    metrics = {
        "completions/clipped_ratio": 1 - stopped.mean().item(),
        "distill/repetition": own[:, 6].mean().item(),
    }
    for name, values in (("", lengths.float()), ("terminated_", terminated.float())):
        metrics[f"completions/mean_{name}length"] = values.mean().item()
        metrics[f"completions/min_{name}length"] = values.min().item()
        metrics[f"completions/max_{name}length"] = values.max().item()
    return metrics


def counts_by_step(table: torch.Tensor, num_processes: int, steps: int) -> list[tuple[int, int]]:
    """(trained tokens, rows that count) of each optimizer step of a window, over all ranks.

    `table` is the `rollout_table` of all ranks, one after the other, each cut into `steps` equal parts in order.
    """
    parts = (
        table.reshape(num_processes, steps, -1, table.size(1)).transpose(0, 1).flatten(1, 2)
    )  # (steps, rows, columns)
    return [(int(part[:, 3].sum()), int(part[:, 5].sum())) for part in parts]


def parse_schedule(text: str, full_length: int | None) -> list[tuple[float, int]]:
    """`64@0.0,256@0.3` -> [(0.0, 64), (0.3, 256)]: the most tokens of a rollout from each share of the steps on.

    Short horizons first (POPD and TOPD, arXiv 2605.31490). Raises `ValueError` naming the part that is wrong.
    """
    steps = []
    for part in text.split(","):
        length, _, share = part.strip().partition("@")
        try:
            steps.append((float(share), int(length)))
        except ValueError:
            raise ValueError(
                f"completion_length_schedule is {text!r}; `{part.strip()}` is not `tokens@share`, as in "
                "`64@0.0,256@0.3`."
            ) from None
    shares = [share for share, _ in steps]
    if shares[0] != 0.0 or shares != sorted(set(shares)) or shares[-1] >= 1.0:
        raise ValueError(
            f"completion_length_schedule is {text!r}; its shares must start at 0.0, rise, and stay below 1."
        )
    for _, tokens in steps:
        if tokens < 1 or (full_length is not None and tokens > full_length):
            raise ValueError(
                f"completion_length_schedule is {text!r}; {tokens} is not between 1 and `max_completion_length: "
                f"{full_length}`."
            )
    return steps


def horizon(schedule: list[tuple[float, int]], progress: float) -> int:
    """The most tokens of a rollout at a share of the run in [0, 1]."""
    return [length for share, length in schedule if share <= progress][-1]


def repetition(completion: list[int], n: int = 4) -> float:
    """The share of a completion's n-grams that stood in it before: 0 for a text that never repeats, near 1 for a
    loop."""
    grams = [tuple(completion[i : i + n]) for i in range(len(completion) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
