"""The demo's curves as a PNG, readable without colour."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

NAMES = {"teacher": "teacher, sft", "sft": "student, sft", "distill": "student, distill"}


def plot_curves(logs: dict[str, list[dict[str, Any]]], scores: dict[str, float], path: Path) -> None:
    """Cross-entropy of the two sft stages, divergence of the distill stage, exact match after each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for stage, axes, style in (("teacher", left, "o-"), ("sft", left, "s--"), ("distill", middle, "^-")):
        points = [(entry["step"], entry["loss"]) for entry in logs[stage] if "loss" in entry]
        axes.plot(
            *zip(*points, strict=True), style, label=NAMES[stage], color="black" if stage != "sft" else "tab:blue"
        )
    left.set(title="cross-entropy per token", xlabel="step", yscale="log")
    middle.set(title="reverse KL(student‖teacher) per token", xlabel="step", yscale="log")
    left.legend()
    middle.legend()
    bars = right.bar(
        [NAMES[k].replace(", ", "\n") for k in scores], list(scores.values()), color="lightgray", edgecolor="black"
    )
    right.bar_label(bars, fmt="%.3f")
    right.set(title="exact match, held-out problems", ylim=(0, 1.1))
    staged = path.with_name(path.name + ".part")
    figure.savefig(staged, dpi=120, format="png")
    plt.close(figure)
    os.replace(staged, path)
