"""Dropout that nobody asked for: found, turned off, and said."""

from __future__ import annotations

from torch import nn


def turn_off_dropout(model: nn.Module, *, adapters_too: bool) -> int:
    """Set every dropout probability of `model` to 0; returns how many were not.

    Both `nn.Dropout` modules and the probabilities that attention layers keep as plain numbers. An adapter's dropout
    (peft's `lora_dropout`) is left alone unless `adapters_too`.
    """
    found = 0
    for name, module in model.named_modules():
        if not adapters_too and "lora_dropout" in name:
            continue
        names = ("p",) if isinstance(module, nn.Dropout) else ("attention_dropout", "attn_dropout", "dropout")
        for attribute in names:
            value = getattr(module, attribute, None)
            if isinstance(value, float) and value > 0:
                setattr(module, attribute, 0.0)
                found += 1
    return found
