"""SDPA over rows that stand end to end, one row at a time: no padding, and no mask over all of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def is_transformers_own() -> bool:
    """Whether `sdpa` is what transformers brings, and not what a script has registered in its place."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"] in (sdpa_attention_forward, attention_of_rows)


def attend_row_by_row() -> None:
    """Let transformers' `sdpa` attention see where rows end (`attention_of_rows`), in this process and for good.

    Without lengths it is what it was. For good, since a checkpointed layer is run again in the backward pass.
    """
    AttentionInterface.register("sdpa", attention_of_rows)


def attention_of_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' `sdpa_attention_forward`, (1, heads, T, d) -> (1, T, heads, d), of the rows that end at
    `cu_seq_lens_q` (B + 1,), as FlashAttention is given them.

    The mask (1, 1, T, T) that transformers makes of the positions is only looked at in rows longer than a sliding
    window. Rows that are padded, on a GPU, or beside a cache are left to it as they are.
    """
    if not _end_to_end(query, key, cu_seq_lens_q):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    assert cu_seq_lens_q is not None, "rows end to end have lengths"
    # a layer that does not say whether it slides (PhiMoE) may do so
    window = kwargs.get("sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    lengths, start, attended = cu_seq_lens_q.diff().tolist(), 0, []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        row, mask = slice(start, start := start + q.size(2)), None
        if window is not None and q.size(2) > window:
            assert attention_mask is not None, "transformers makes a mask of positions that start anew"
            mask = attention_mask[..., row, row]
        attended.append(sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(attended, 1), None


def _end_to_end(query: torch.Tensor, key: torch.Tensor, ends: torch.Tensor | None) -> bool:
    """Whether these are rows end to end on a CPU, where reading the lengths waits for nothing."""
    if ends is None or ends.device.type != "cpu" or query.size(0) != 1:
        return False
    return query.size(2) == key.size(2) == int(ends[-1])
