"""A loss or gradient of NaN on one rank of two: each stops, or leaves the step out, alike; DDP, ZeRO-2, ZeRO-3."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
import torch
import yaml

from trl_opd import shipped
from trl_opd.step_file import read_step

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None or which("g++") is None, reason="needs trl-opd[deepspeed] and a C++ compiler"
)
LAYOUTS = ["ddp", *(pytest.param(name, marks=needs_deepspeed) for name in ("zero2", "zero3"))]


def run(folder, layout):
    """What each of two ranks saw; judged by what was written, since processes may abort at exit."""
    script = [str(HERE / "nonfinite_run.py"), str(folder)]
    if layout == "ddp":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script]
    else:
        config = yaml.safe_load(Path(shipped.find_accelerate_config(layout)).read_text())
        (folder / "accelerate.yaml").write_text(yaml.safe_dump(config | {"use_cpu": True, "num_processes": 2}))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
        command = [*launch, "--main_process_port", "0", *script]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert (folder / "0").exists() and (folder / "1").exists(), done.stderr[-3000:]
    return [torch.load(folder / rank, weights_only=True) for rank in "01"]


def same(ours, theirs):
    return all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_bad_rank_is_met_by_all_alike(tmp_path, layout):
    """Steps of four rows, two a rank: step 2 has rows 4 to 7, and rank 1 the odd ones or the last ones of them."""
    ranks = run(tmp_path, layout)
    wrapper = "DistributedDataParallel" if layout == "ddp" else "DeepSpeedEngine"
    for what in ("loss", "gradient"):
        errors = [rank[what, "stop"]["error"] for rank in ranks]
        assert errors[0] == errors[1] and errors[0].startswith("step 2: the ") and "No weight was changed." in errors[0]
        assert f"{what} is not finite" in errors[0] or f"the {what} of 2 of 4 rows" in errors[0]
        step = read_step(str(tmp_path / f"{what}-stop" / "_nonfinite_step_2.safetensors"))
        assert len(step.batches) == 4 and {row["rank"] for row in step.about["rows"]} >= {1}
        assert len(step.about["rows"]) == (2 if what == "loss" else 4)
        for rank in ranks:
            stopped, skipped = rank[what, "stop"], rank[what, "skip"]
            assert stopped["layout"] == f"2 {wrapper}"
            assert len(stopped["steps"]) == 1 and same(stopped["steps"][0], stopped["now"])
            first, second, third, fourth = skipped["steps"]
            assert same(first, second) and not same(second, third) and not same(third, fourth)
            assert not skipped["error"] and all(p.isfinite().all() for p in fourth)
            assert same(fourth, ranks[0][what, "skip"]["steps"][3])
        assert ranks[0][what, "skip"]["skipped"] == [0.0, 1.0, 0.0, 0.0]
