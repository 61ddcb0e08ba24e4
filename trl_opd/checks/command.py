"""`trl-opd check`: everything a run would do up to its first loss, without training anything."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from rich.table import Table

from .. import recipes, run, summary
from ..errors import UsageError
from ..step_file import read_step
from .preflight import ERROR, OK, Finding, check_first_loss, preflight
from .replay import replay
from .samples import page, pieces

_EPILOG = """examples:
  trl-opd check sft --config recipe.yaml
  trl-opd check distill --config recipe.yaml --show 5 --html check.html
  trl-opd check sft --config recipe.yaml --batch out/_nonfinite_step_12.safetensors"""


def main(argv: Sequence[str]) -> int:
    """Returns 0 where a run could start, 1 where a finding is an error, 2 for a wrong command."""
    parser = argparse.ArgumentParser(
        prog="trl-opd check",
        description="Look at a recipe, its data, masks and models without training. Other flags are those of the job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("job", choices=sorted(recipes.CONFIGS))
    parser.add_argument("--show", type=int, default=2, metavar="N", help="training rows to show (default 2)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write findings and rows to a self-contained page")
    parser.add_argument("--batch", metavar="FILE", help="take the step again that a run wrote when it stopped")
    own, rest = parser.parse_known_args(argv)
    rest, debug = run.without_debug_flag(rest)
    logging.getLogger("trl_opd").setLevel(logging.ERROR)  # what it would warn of is a finding here
    trainer = None
    try:
        settings = recipes.parse(own.job, rest)
        run.set_up_logging(settings.training, logging.ERROR)
        step = None if own.batch is None else read_step(own.batch, own.job)
        trainer, _ = run.build(settings, heed=False)
        findings = look(trainer) if step is None else replay(trainer, step)
    except run.MENDABLE as error:
        if debug or isinstance(error, UsageError):
            code = run.say_error(f"check {own.job}", error, debug)
            if isinstance(error, UsageError):
                return code
        findings = [Finding(ERROR, "start", run.in_our_words(error))]
    report(findings, trainer, own)
    return int(any(finding.level == ERROR for finding in findings))


def look(trainer: Any) -> list[Finding]:
    """Every check, and the first loss where nothing stands in its way."""
    findings = [Finding(OK, "recipe", "every key is known"), *preflight(trainer)]
    if not any(finding.level == ERROR for finding in findings):
        findings.append(check_first_loss(trainer))
    return findings


def report(findings: list[Finding], trainer: Any, own: argparse.Namespace) -> None:
    """Findings as a table, then rows; and the page where one is asked for."""
    table = Table(title=f"trl-opd check {own.job}", title_justify="left", show_lines=True)
    for column in ("", "what", "found"):
        table.add_column(column, overflow="fold")
    styles = {"ok": "green", "warning": "yellow", "error": "bold red"}
    for finding in findings:
        level, name, message = finding.cells()
        table.add_row(f"[{styles[level]}]{level}[/]", summary.plain(name), summary.plain(message))
    Console().print(table)
    if trainer is not None and own.batch is None:
        summary.show_samples(trainer, own.show)
    if own.html is not None:
        rows: list[Any] = []
        dataset = getattr(trainer, "train_dataset", None)
        if isinstance(dataset, Dataset) and "labels" in dataset.column_names:
            chosen = dataset.select(range(min(own.show, len(dataset))))
            rows = [pieces(trainer._tokenizer, row["input_ids"], row["labels"]) for row in chosen]
        elif isinstance(dataset, Dataset):
            chosen = dataset.select(range(min(own.show, len(dataset))))
            rows = [pieces(trainer._tokenizer, r["prompt_ids"], [-100] * len(r["prompt_ids"])) for r in chosen]
        staged = own.html.with_name(own.html.name + ".part")
        staged.write_text(page(f"trl-opd check {own.job}", [f.cells() for f in findings], rows), encoding="utf-8")
        staged.replace(own.html)
        print(f"written: {own.html}")
