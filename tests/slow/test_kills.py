"""Killed at random moments, some inside a save, and started again: weights and logs of a run that never stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import qwen3, tokenizer
from training import text_rows

pytestmark = pytest.mark.slow
KILLS = 20


@pytest.mark.parametrize("job", ["distill", "sft"])
def test_twenty_kills(tmp_path, job):
    for name, seed in (("student", 0), ("teacher", 1)):
        qwen3(seed).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    text_rows(7).to_json(tmp_path / "rows.jsonl")
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    script = Path(__file__).with_name("kill_run.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, job, str(KILLS), "0"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads((tmp_path / f"{job}-kills.json").read_text())
    print(job, counts)
    assert counts["kills"] >= KILLS and counts["inside a save"] >= 3 and counts["went on"] >= KILLS // 2
    assert counts["weights equal"] == counts["logs equal"] == counts["trials"]
