"""The benchmarks of steps and of a start, from end to end, on models so small that a step's times say nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    assert len(lines) == 4 and lines[:2] == lines[2:]  # as they come, and in the table
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells[0] == "distill tiny ← tiny teacher, full, with generation" and float(cells[1]) > 0
    assert float(cells[5]) > 100 and float(cells[7]) > 0


def test_operations_are_counted():
    done = run("--flops", "--only", "sft")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "GFLOP a step" in done.stdout and "trl / ours" in done.stdout


def test_time_a_token_is_compared_with_larger_sizes():
    done = run("--growth", "--force", "--only", "distill")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ms a trained token; 4 x length: " in done.stdout and "4 x batch: " in done.stdout


def test_a_start_is_measured():
    command = [sys.executable, str(ROOT / "benchmarks" / "start.py"), "--runs", "1", "--job", "sft", "--force"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("| sft"))
    first, end, imports = (float(cell) for cell in line.strip("|").split("|")[1:])
    assert 0 < imports < end and 0 < first <= end
