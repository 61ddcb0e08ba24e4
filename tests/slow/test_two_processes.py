"""One process and two (torchrun, gloo) see the same rows, take the same loss and the same gradients."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from training import assert_same_gradients

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def run(tmp_path, job, kind, batch, accumulation, processes):
    out = tmp_path / f"{job}-{kind}-{processes}.pt"
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, str(HERE / "layout_run.py"), str(out), job, kind, str(batch), str(accumulation)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
    )
    assert out.exists(), done.stderr[-3000:]  # judged by what was written: processes may abort at exit
    return torch.load(out, weights_only=False)


JOBS = [(job, kind) for job in ("sft", "distill", "mixed") for kind in ("full", "lora")] + [("base", "lora")]


def test_two_processes_that_cut_different_pieces_equal_one(tmp_path):
    """4 rows a step within 50 tokens: one process or two send their gradients once, after the last piece."""
    one = run(tmp_path, "pieces", "full", batch=4, accumulation=1, processes=1)
    two = run(tmp_path, "pieces", "full", batch=2, accumulation=1, processes=2)
    assert two["world_size"] == 2 and len(one["gradients"]) == len(two["gradients"]) == 2
    assert_same_gradients(two["gradients"][0], one["gradients"][0], rtol=1e-4)
    assert [log["loss"] for log in two["log"]] == pytest.approx([log["loss"] for log in one["log"]], rel=1e-4)


@pytest.mark.parametrize("job, kind", JOBS)
def test_two_processes_equal_one(tmp_path, job, kind):
    one = run(tmp_path, job, kind, batch=2, accumulation=2, processes=1)
    two = run(tmp_path, job, kind, batch=1, accumulation=2, processes=2)
    assert (one["world_size"], two["world_size"], two["wrapper"]) == (1, 2, "DistributedDataParallel")
    assert len(one["gradients"]) == len(two["gradients"]) == 2  # 7 rows, 4 a step
    # the first step; the second starts from weights that differ by rounding already
    assert_same_gradients(two["gradients"][0], one["gradients"][0], rtol=1e-4)
    for single, double in zip(one["log"], two["log"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "num_tokens"):
            assert double[name] == pytest.approx(single[name], rel=1e-4), name
    if job == "distill":
        for result in (one, two):
            windows = zip(*result["asked"], strict=True)
            prompts = Counter(prompt for window in windows for share in window for prompt in share)
            assert len(prompts) == 7 and sorted(prompts.values()) == [1] * 6 + [2]
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)
