"""`trl-opd demo`, as a newcomer runs it."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from trl_opd import recipes

pytestmark = pytest.mark.slow


def test_the_demo_distills_a_student_that_is_clearly_better(tmp_path):
    command = [sys.executable, "-c", "from trl_opd.cli.main import main; main()", "demo", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) >= {"teacher", "sft", "distill", "held_out", "seconds"}
    assert results["held_out"] >= 200 and results["teacher"] >= 0.9
    assert results["distill"] >= results["sft"] + 0.15
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "exact match on 256 held-out problems" in done.stdout
    for stage, job in (("teacher", "sft"), ("sft", "sft"), ("distill", "distill")):
        assert (tmp_path / stage / "model.safetensors").exists()
        settings = recipes.parse(job, ["--config", str(tmp_path / f"{stage}.yaml")])  # the recipe it ran
        assert settings.training.output_dir == str(tmp_path / stage)
    assert not list(tmp_path.rglob("*.part"))
    assert yaml.safe_load((tmp_path / "distill.yaml").read_text())["beta"] == 1.0
