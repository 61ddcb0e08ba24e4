"""Whether optimizer and schedule can be made of their settings: `Trainer` makes them when everything is loaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ..blame import OTHERS


def check_optimizer(args: Any) -> None:
    """Make both for one number. Raises `ValueError` naming the settings that they were made of."""
    try:
        cls, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args)
        # those of other packages may want a GPU, or the model
        made = cls if cls.__module__.startswith("torch.") else torch.optim.SGD
        optimizer = made([torch.nn.Parameter(torch.zeros(1))], **(kwargs if made is cls else {"lr": 0.1}))
    except OTHERS as error:
        raise ValueError(_message(args, error, ("optim", "optim_args"))) from error
    try:
        transformers.get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=1,
            num_training_steps=10,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except OTHERS as error:
        raise ValueError(_message(args, error, ("lr_scheduler_type", "lr_scheduler_kwargs"))) from error


def _message(args: Any, error: Exception, names: tuple[str, ...]) -> str:
    values = ", ".join(f"`{name}: {getattr(value := getattr(args, name), 'value', value)}`" for name in names)
    return f"{values} cannot be used: {str(error).strip().rstrip('.') or type(error).__name__}. Set other values."
