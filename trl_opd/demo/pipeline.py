"""The demo, stage by stage: teacher (sft), student on teacher rollouts (sft), the same student on-policy (distill)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from ..run import run
from .models import complete, exact_match, write_model
from .plot import plot_curves
from .task import MAX_COMPLETION_TOKENS, Problem, split_problems

HELD_OUT = 256
TEACHER_ROWS, ROLLOUTS, PROMPTS = 4000, 300, 64 * 120

COMMON = {
    "per_device_train_batch_size": 64,
    "lr_scheduler_type": "cosine",
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
TEACHER = COMMON | {"max_steps": 220, "learning_rate": 5e-3, "warmup_steps": 11, "max_length": 64}
STUDENT = COMMON | {"max_steps": 200, "learning_rate": 5e-3, "warmup_steps": 10, "max_length": 64}
DISTILL = COMMON | {
    "max_steps": 120,
    "learning_rate": 3e-3,
    "warmup_steps": 6,
    "beta": 1.0,
    "temperature": 1.0,
    "max_completion_length": MAX_COMPLETION_TOKENS,
}


def demo(output_dir: Path, seed: int) -> dict[str, Any]:
    """Run the three stages into `output_dir` and return what `results.json` holds."""
    console, begin = Console(), time.perf_counter()
    held_out, problems = split_problems(seed, HELD_OUT)
    folders = {name: output_dir / name for name in ("teacher", "sft", "distill")}
    write_model(output_dir / "init" / "teacher", hidden=96, seed=100 * seed + 1)
    write_model(output_dir / "init" / "student", hidden=64, seed=100 * seed + 2)

    rows = [{"prompt": p.prompt, "completion": p.completion} for p in problems[:TEACHER_ROWS]]
    teacher = TEACHER | {
        "model_name_or_path": output_dir / "init" / "teacher",
        "dataset_name": write_rows(output_dir / "data" / "problems.jsonl", rows),
        "output_dir": folders["teacher"],
    }
    console.rule("1/3  the teacher learns addition (sft)")
    logs = {"teacher": start("sft", teacher, output_dir / "teacher.yaml", seed)}
    written = {"teacher": complete(folders["teacher"], held_out, sample=False)}

    asked = problems[-ROLLOUTS:]
    rollouts = complete(folders["teacher"], asked, sample=True, seed=seed)
    rows = [{"prompt": p.prompt, "completion": text} for p, text in zip(asked, rollouts, strict=True)]
    student = STUDENT | {
        "model_name_or_path": output_dir / "init" / "student",
        "dataset_name": write_rows(output_dir / "data" / "rollouts.jsonl", rows),
        "output_dir": folders["sft"],
    }
    console.rule(f"2/3  the student imitates {ROLLOUTS} teacher rollouts, too few to be good (sft)")
    logs["sft"] = start("sft", student, output_dir / "sft.yaml", seed)
    written["sft"] = complete(folders["sft"], held_out, sample=False)

    distill = DISTILL | {
        "model_name_or_path": folders["sft"],
        "teacher_model_name_or_path": folders["teacher"],
        "dataset_name": write_rows(
            output_dir / "data" / "prompts.jsonl", [{"prompt": p.prompt} for p in problems[:PROMPTS]]
        ),
        "output_dir": folders["distill"],
    }
    console.rule("3/3  the student writes, the teacher grades every token (distill)")
    logs["distill"] = start("distill", distill, output_dir / "distill.yaml", seed)
    written["distill"] = complete(folders["distill"], held_out, sample=False)

    scores = {name: exact_match(texts, held_out) for name, texts in written.items()}
    results = {**scores, "held_out": HELD_OUT, "seconds": round(time.perf_counter() - begin, 1), "seed": seed}
    plot_curves(logs, scores, output_dir / "curves.png")
    write_whole(output_dir / "results.json", json.dumps(results, indent=2) + "\n")
    console.print(results_table(results, held_out, written))
    console.print(f"{output_dir}/: results.json, curves.png, and the recipes teacher.yaml, sft.yaml, distill.yaml")
    return results


def start(job: str, recipe: dict[str, Any], path: Path, seed: int) -> list[dict[str, Any]]:
    """Write the recipe and run it as `trl-opd JOB --config PATH` does; returns the trainer's log."""
    recipe = {key: str(value) if isinstance(value, Path) else value for key, value in recipe.items()}
    write_whole(path, yaml.safe_dump(recipe | {"seed": seed}, sort_keys=False))
    return run(job, ["--config", str(path)]).state.log_history


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(path.name + ".part")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, path)


def results_table(results: dict[str, Any], held_out: list[Problem], written: dict[str, list[str]]) -> Table:
    """Exact match of the three models, with what each writes for the first problem that imitation alone got wrong."""
    shown = next((i for i, problem in enumerate(held_out) if not problem.is_right(written["sft"][i])), 0)
    problem = held_out[shown]
    table = Table(title=f"exact match on {results['held_out']} held-out problems, {results['seconds']:.0f} s in all")
    table.add_column("model")
    table.add_column("exact match", justify="right")
    table.add_column(f"what it writes for {problem.prompt} (the first that sft gets wrong)")
    names = {"teacher": "teacher (sft)", "sft": "student (sft)", "distill": "student (sft, then distill)"}
    for key, name in names.items():
        text = written[key][shown]
        table.add_row(name, f"{results[key]:.3f}", f"{text}  {'right' if problem.is_right(text) else 'wrong'}")
    return table
