"""A run that is killed goes on where it was when the same command is given again, to the same weights, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from tiny import qwen3, tokenizer
from training import text_rows

pytestmark = pytest.mark.slow


def command(job, folder, output, processes=1):
    flags = {
        "model_name_or_path": folder / "student",
        "dataset_name": folder / "rows.jsonl",
        "output_dir": output,
        "max_steps": 6,
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
    }
    if job == "distill":
        flags |= {"teacher_model_name_or_path": folder / "teacher", "max_completion_length": 8}
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        flags |= {"use_cpu": True, "per_device_train_batch_size": 1}
    values = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [*launcher, "-m", f"trl_opd.run_{job}", *values]


@pytest.fixture
def folder(tmp_path):
    for name, seed in (("student", 0), ("teacher", 1)):
        qwen3(seed).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    text_rows(7).to_json(tmp_path / "rows.jsonl")  # two steps an epoch: the stop is in the second of three
    return tmp_path


@pytest.mark.parametrize("job", ["distill", "sft"])
def test_killed_after_step_3_of_6_and_started_again(folder, job):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    straight, stopped = folder / "straight", folder / "stopped"
    subprocess.run(command(job, folder, straight), env=env, check=True, capture_output=True)

    process = subprocess.Popen(
        command(job, folder, stopped), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    third = stopped / "checkpoint-3" / "trainer_state.json"  # the last file of a checkpoint
    deadline = time.monotonic() + 120
    while not (third.exists() and third.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert third.exists() and not (stopped / "model.safetensors").exists()
    for late in stopped.glob("checkpoint-[4-6]"):  # what a kill this late may have left; step 3 is what we go on from
        for file in late.iterdir():
            file.unlink()
        late.rmdir()

    done = subprocess.run(command(job, folder, stopped), env=env, check=True, capture_output=True, text=True)
    assert "checkpoint-3" in done.stdout
    state = json.loads((stopped / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    ours, theirs = (load_file(path / "model.safetensors") for path in (stopped, straight))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("job", ["distill", "sft"])
def test_two_processes_go_on_from_the_second_epoch(folder, job):
    """Two processes skip and shard the order: it must still be that of the epoch they were stopped in."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    straight, stopped = folder / "straight", folder / "stopped"
    done = subprocess.run(command(job, folder, straight, 2), env=env, capture_output=True, text=True)
    assert (straight / "model.safetensors").exists(), done.stderr[-3000:]
    assert "4 rows each (1 × 2 accumulated × 2 processes)" in done.stdout
    shutil.copytree(straight / "checkpoint-3", stopped / "checkpoint-3")
    done = subprocess.run(command(job, folder, stopped, 2), env=env, capture_output=True, text=True)
    assert (stopped / "model.safetensors").exists(), done.stderr[-3000:]
    ours, theirs = (load_file(path / "model.safetensors") for path in (stopped, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
