"""Padding that need not be computed: rows end to end, for attention that knows where one ends.

FlashAttention does, and SDPA on a CPU (`row_attention`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from .types import RowSizes, TrainedPositions

_ATTENTION_ONLY = {"full_attention", "sliding_attention"}


def why_padded(backbone: Any, attention: str, device: str, by_lengths: bool) -> str:
    """Why rows must stay padded for a model with this attention implementation; empty where padding can go.

    `device` is the type of the one it runs on, `by_lengths` whether its attention goes by the lengths of rows alone
    (`_trl.attends_by_lengths`).
    """
    layers = set(getattr(backbone.config, "layer_types", None) or ()) - _ATTENTION_ONLY
    parameters = inspect.signature(backbone.forward).parameters
    flash, sdpa = "flash" in attention, attention == "sdpa"
    reasons = {
        f"attention is {attention}, and only FlashAttention and SDPA know where a row ends": not (flash or sdpa),
        "SDPA knows where a row ends on a CPU only": sdpa and device != "cpu",
        "its attention is not known to go by lengths alone": sdpa and not by_lengths,
        "its tokens see later ones": sdpa and not _is_causal(backbone),
        f"it has layers of {', '.join(sorted(layers))}": bool(layers),
        "it has convolutions, which would run across rows": any(isinstance(m, nn.Conv1d) for m in backbone.modules()),
        "its forward takes no positions": "position_ids" not in parameters,
        "its forward takes no sequence lengths": all(p.kind is not p.VAR_KEYWORD for p in parameters.values()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def looks_ahead(config: Any) -> bool:
    """Whether a model's config lets tokens attend to later ones."""
    return bool(getattr(config, "use_bidirectional_attention", None)) or getattr(config, "is_causal", True) is False


def _is_causal(backbone: Any) -> bool:
    """Whether neither the model's config nor any of its layers lets tokens attend to later ones."""
    layers = all(getattr(module, "is_causal", True) is not False for module in backbone.modules())
    return layers and not looks_ahead(backbone.config.get_text_config())


def flattened(
    inputs: dict[str, Any], positions: TrainedPositions, sizes: RowSizes
) -> tuple[dict[str, Any], TrainedPositions]:
    """Rows (B, T), padded on the right, as one row (1, Σ tokens) and the trained positions in it.

    Positions start anew with every row; `cu_seq_lens_*` (B + 1,) int32 and `max_length_*` say where rows end, as
    transformers' FlashAttention takes them. No attention mask is left. Waits for no device.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    total = sum(sizes.tokens)
    lengths = mask.sum(1)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    rows = torch.repeat_interleave(torch.arange(ids.size(0), device=ids.device), lengths, output_size=total)
    columns = torch.arange(total, device=ids.device) - starts[rows]
    cu_seq_lens = pad(ends, (1, 0)).to(torch.int32)
    longest = max(sizes.tokens)
    flat = {
        key: value
        for key, value in inputs.items()
        if not (isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape[:2])
    }
    flat |= {
        "input_ids": ids[rows, columns].unsqueeze(0),
        "position_ids": columns.unsqueeze(0),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    width = max(ids.size(1) - positions.start, 1)
    predicting = starts[positions.rows] + positions.start - 1 + positions.index % width
    return flat, TrainedPositions(1, predicting, positions.rows, positions.targets)
