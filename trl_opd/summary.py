"""The table that a run shows before it starts: what is trained, on what, for how long."""

from __future__ import annotations

import math
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from .checks.samples import as_terminal, pieces
from .heads import causal_lm
from .layouts import layout_name
from .shown import printable


def start_table(trainer: Any, teacher_name: str | None, resumed_from: str | None) -> Table:
    """A two-column table of a trainer that is about to start."""
    args = trainer.args
    table = Table(show_header=False, title=f"trl-opd: {type(trainer).__name__}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def row(name: str, text: str) -> None:
        table.add_row(name, plain(text))

    row("model", describe_model(trainer.model))
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    row("precision", f"weights {dtypes(trainer.model)}, {precision or 'no'} autocast")
    row("dropout", f"{trainer.dropout_turned_off} turned off" if trainer.dropout_turned_off else "as the model has it")
    teacher = getattr(trainer, "teacher_model", None)
    if teacher is not None:
        unwrapped = trainer.accelerator.unwrap_model(teacher)
        row("teacher", f"{teacher_name or ''} {describe_model(unwrapped)}, {dtypes(unwrapped)}".strip())
        row("divergence", f"{divergence_name(args.beta)} at temperature {args.temperature}")
    for report in trainer.data_reports:
        row("data", "\n".join(report.lines()))
    layout = layout_name(trainer.accelerator.state)
    if layout != "one process":
        row("layout", layout)
    row("steps", steps(trainer))
    row("output", args.output_dir + (f", resumed from {resumed_from}" if resumed_from else ""))
    return table


def describe_model(model: nn.Module) -> str:
    """Class and parameters, trainable of all."""
    total = sum(numel(p) for p in model.parameters())
    trainable = sum(numel(p) for p in model.parameters() if p.requires_grad)
    share = f", {trainable:,} trained ({trainable / total:.2%})" if trainable else ", frozen"
    return f"{type(causal_lm(model)).__name__}, {total:,} parameters{share}"


def numel(parameter: torch.Tensor) -> int:
    """How many numbers a parameter has; ZeRO-3 leaves an empty tensor in place of what it has sharded."""
    return getattr(parameter, "ds_numel", parameter.numel())


def dtypes(model: nn.Module) -> str:
    """The dtypes of a model's parameters, most numbers first."""
    counts: dict[str, int] = {}
    for p in model.parameters():
        name = str(p.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + numel(p)
    return ", ".join(sorted(counts, key=lambda name: -counts[name]))


def divergence_name(beta: float) -> str:
    if beta == 0:
        return "forward KL (beta 0)"
    return "reverse KL (beta 1)" if beta == 1 else f"JSD (beta {beta})"


def steps(trainer: Any) -> str:
    """How many optimizer steps, and how many rows each."""
    args, ranks = trainer.args, trainer.accelerator.num_processes
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    window = batch * accumulation * ranks
    rows = f"{window:,} rows each ({batch} × {accumulation} accumulated × {ranks} processes)"
    epochs = "" if args.max_steps > 0 else f" ({args.num_train_epochs:g} epochs)"
    return f"{total_steps(trainer):,}{epochs}, {rows}"


def total_steps(trainer: Any) -> int:
    """Optimizer steps of the whole run."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    batch = args.per_device_train_batch_size * trainer.accelerator.num_processes
    per_epoch = math.ceil(math.ceil(len(trainer.train_dataset) / batch) / args.gradient_accumulation_steps)
    return math.ceil(args.num_train_epochs * per_epoch)


def plain(text: str) -> Text:
    """Text that rich prints as it is: no markup, nothing a terminal would act on, no secrets."""
    return Text(printable(text))


def show(table: Table) -> None:
    Console(soft_wrap=False).print(table)


def show_samples(trainer: Any, n: int, longest: int | None = None) -> None:
    """The first `n` training rows, with what is trained marked; runs of text over `longest` by their ends."""
    rows = trainer.train_dataset
    if not isinstance(rows, Dataset) or "labels" not in rows.column_names or n <= 0:
        return
    console = Console()
    for i, row in enumerate(rows.select(range(min(n, len(rows))))):
        console.print(f"row {i}, trained text between ⟦ and ⟧:", style="bold")
        console.print(as_terminal(pieces(trainer._tokenizer, row["input_ids"], row["labels"]), longest))
