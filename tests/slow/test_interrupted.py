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
    third = stopped / "checkpoint-3"
    wait_for(third.exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (stopped / "model.safetensors").exists()

    done = subprocess.run(command(job, folder, stopped), env=env, check=True, capture_output=True, text=True)
    assert "resumed from" in done.stdout and "checkpoint-" in done.stdout
    state = json.loads((stopped / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    assert_same_weights(stopped, straight)


def wait_for(condition):
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def assert_same_weights(ours, theirs):
    ours, theirs = (load_file(path / "model.safetensors") for path in (ours, theirs))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("processes, number, code", [(1, signal.SIGINT, 130), (2, signal.SIGTERM, 1)])
def test_a_signal_saves_and_the_next_start_goes_on(folder, processes, number, code):
    """Two processes are torchrun's to end: it reports 1 whatever they returned, and sends its own signal as well."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    straight, stopped = folder / "straight", folder / "stopped"
    flags = ["--max_steps", "40", "--save_steps", "100"]
    subprocess.run([*command("sft", folder, straight, processes), *flags], env=env, check=True, capture_output=True)
    process = subprocess.Popen(
        [*command("sft", folder, stopped, processes), *flags], env=env, stderr=subprocess.PIPE, text=True
    )
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "0/40" in line or "1/40" in line:  # the bar has begun
            process.send_signal(number)
            break
    lines += process.stderr.readlines()
    said = "".join(lines)
    assert process.wait() == code, said[-3000:]
    assert f"{signal.Signals(number).name}: finishing this step" in said
    (saved,) = stopped.glob("checkpoint-*")
    assert int(saved.name.split("-")[1]) < 40 and not (stopped / "model.safetensors").exists()
    again = [*command("sft", folder, stopped, processes), *flags]
    done = subprocess.run(again, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_weights(stopped, straight)


def test_a_second_run_in_the_folder_is_refused(folder):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    output = folder / "output"
    first = subprocess.Popen(
        [*command("sft", folder, output), "--max_steps", "100000"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for((output / "_lock").exists)
        second = subprocess.run(command("sft", folder, output), env=env, capture_output=True, text=True)
        assert second.returncode == 2 and f"in use by another run (process {first.pid}" in second.stderr
    finally:
        first.kill()
        first.wait()


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
    assert_same_weights(stopped, straight)
