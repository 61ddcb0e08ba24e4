"""Sampling in which rows that have ended leave the batch, and their keys and values with them.

`generate` goes on computing rows that have ended until the last one has. Which tokens a row can get, and with which
probability, is untouched: logits processors and stopping criteria are the ones that `generate` prepared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode

# what makes a logits processor that holds a tensor with a row for each of the batch, and where it does nothing
_OF_THE_BATCH = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "guidance_scale": 1.0,
    "watermarking_config": None,
}
_CACHE_NAMES = ("cache", "past_key_values")  # transformers has renamed it


def why_rows_stay(model: Any, config: GenerationConfig) -> str:
    """Why rows that have ended cannot leave the batch of a causal language model; empty where they can."""
    own = model.generation_config
    asked = lambda name: getattr(config, name, None) or getattr(own, name, None)  # noqa: E731
    mode = config.get_generation_mode()
    held = [f"`{name}`" for name, plain in _OF_THE_BATCH.items() if (asked(name) or plain) != plain]
    layers = DynamicCache(config=model.config).layers
    reasons = {
        "the model's `generate` was replaced": "generate" in vars(model),
        f"generation is {mode.value}": mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH),
        "there is no cache": config.use_cache is False,
        "`cache_implementation` is set": bool(asked("cache_implementation")),
        "several sequences a prompt are asked for": (asked("num_return_sequences") or 1) > 1,
        f"{' and '.join(held)} keep a state of the whole batch": bool(held),
        "the cache holds more than keys and values": any(
            type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@contextmanager
def ended_rows_leave(model: Any) -> Iterator[None]:
    """Within it, `model.generate` samples by `sample_and_leave`; one that was replaced on this model is left alone."""
    if "generate" in vars(model):
        yield
        return
    model.generate = partial(model.generate, custom_generate=sample_and_leave)
    try:
        yield
    finally:
        del model.generate  # the class has it


def sample_and_leave(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> torch.Tensor:
    """The decoding loop of `generate` (its `custom_generate`): prompts (B, T), padded on the left, to (B, T + new).

    Rows that end before the longest are filled with the pad token, as `generate` fills them.
    """
    name = next(name for name in _CACHE_NAMES if kwargs.get(name) is not None)
    cache, mask, positions = kwargs[name], kwargs.get("attention_mask"), kwargs.get("position_ids")
    fixed = {key: kwargs[key] for key in ("logits_to_keep",) if key in kwargs}
    rows = torch.arange(input_ids.size(0), device=input_ids.device)  # of the batch that are still written
    ended: list[tuple[torch.Tensor, torch.Tensor]] = []
    ids, step = input_ids, input_ids  # what there is, (b, t), and what the cache lacks
    while True:
        inputs = {"input_ids": step, "attention_mask": mask, "position_ids": positions, name: cache} | fixed
        inputs = {key: value for key, value in inputs.items() if value is not None}
        logits = model(**inputs, use_cache=True, return_dict=True).logits[:, -1].float()  # (b, V)
        scores = logits_processor(ids, logits)
        if generation_config.do_sample:
            token = torch.multinomial(scores.softmax(-1), num_samples=1)
        else:
            token = scores.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
        done = stopping_criteria(ids, None)
        if done.any():
            ended.append((rows[done], ids[done]))
            left = (~done).nonzero().squeeze(1)
            if not len(left):
                break
            cache.batch_select_indices(left)
            rows, ids, token = rows[left], ids[left], token[left]
            mask, positions = (None if x is None else x[left] for x in (mask, positions))
        step = token
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if positions is not None:
            positions = positions[:, -1:] + 1
    written = input_ids.new_full((input_ids.size(0), ids.size(1)), generation_config.pad_token_id)
    for where, tokens in ended:
        written[where, : tokens.size(1)] = tokens
    return written
