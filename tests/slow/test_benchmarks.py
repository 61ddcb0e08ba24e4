"""The benchmarks of steps and of a start, from end to end, on models so small that a step's times say nothing."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gkd
import train_step

ROOT = Path(__file__).parents[2]
GKD = next(work for work in train_step.TINY if work.gkd)
pytestmark = pytest.mark.slow


def run(*options):
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "train_step.py"),
        "--table",
        "tiny",
        "--windows",
        "1",
        *options,
    ]
    return subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
    )


def test_both_sides_agree_and_a_table_is_printed():
    done = run("--force")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| distill tiny") or line.startswith("| sft")]
    assert len(lines) == 6 and lines[:3] == lines[3:]  # as they come, and in the table
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells[0] == "distill tiny ← tiny teacher, full, with generation" and float(cells[1]) > 0
    assert float(cells[5]) > 100 and float(cells[7]) > 0
    cells = [cell.strip() for cell in lines[1].strip("|").split("|")]
    assert cells[0] == "distill tiny ← tiny teacher, full, with generation, against GKDTrainer, 4 × 1"
    assert float(cells[2]) > 0 and cells[3:5] == ["–", "–"] and float(cells[6]) > 100


def test_operations_are_counted():
    done = run("--flops", "--only", "sft")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "GFLOP a step" in done.stdout and "trl / ours" in done.stdout


def test_time_a_token_is_compared_with_larger_sizes():
    done = run("--growth", "--force", "--only", "distill")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ms a trained token; 4 x length: ") == done.stdout.count("4 x batch: ") == 2


@pytest.mark.parametrize(
    "change",
    [{}, {"batch": 2, "accumulation": 2}, {"checkpointing": True}, {"lora": True}, {"generate": False}],
    ids=str,
)
def test_losses_and_gradients_are_those_of_gkd(change, tmp_path):
    """At the settings that benchmarks/gkd.py writes down, and with no factor between them."""
    work = replace(GKD, **change)
    trainers, _, _ = train_step.build(work, str(tmp_path))
    assert trainers["trl"].temperature == 0.9 and trainers["trl"].beta == 0.5  # its defaults
    assert trainers["trl"].generation_config.use_cache is not work.checkpointing
    for window in range(work.windows):
        ours, theirs = (train_step.take_step(side, trainers, work, window) for side in ("ours", "trl"))
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5) and theirs.loss > 1e-3
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5) and theirs.grad_norm > 1e-3


@pytest.mark.parametrize("setting", [{"beta": 0.6}, {"temperature": 0.9}], ids=str)
def test_no_time_beside_gkd_where_the_settings_differ(setting, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setitem(gkd.OURS, name, value)
    with pytest.raises(SystemExit, match=r"against GKDTrainer.*: loss is .* with trl, so no time is shown"):
        train_step.measure(GKD, 1, {"ours": 1.0, "trl": 1.0})


def test_gkd_must_have_written_what_it_was_given(tmp_path):
    trainers, rows, _ = train_step.build(GKD, str(tmp_path), ("trl",))
    first = next(iter(rows.answers))
    rows.answers[first] = [*rows.answers[first][:-1], 7]
    with pytest.raises(AssertionError, match="GKDTrainer did not write the completion it was given"):
        train_step.take_step("trl", trainers, GKD, 0)


def test_a_start_is_measured():
    command = [sys.executable, str(ROOT / "benchmarks" / "start.py"), "--runs", "1", "--job", "sft", "--force"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("| sft"))
    first, end, imports = (float(cell) for cell in line.strip("|").split("|")[1:])
    assert imports > 0 and 0 < first <= end  # `imports` is the time of another process
