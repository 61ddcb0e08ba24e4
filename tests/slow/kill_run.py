"""Kills runs at random moments and starts them again until they are done. Children are forked from this process, which
has everything imported, so that a trial takes seconds. Writes `kills.json`.

    python kill_run.py FOLDER JOB KILLS SEED
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

torch.set_num_threads(1)

from trl_opd import DistillationTrainer, SFTTrainer, run  # noqa: E402, F401

STEPS = 12


def flags(job, folder, output):
    values = {
        "model_name_or_path": folder / "student",
        "dataset_name": folder / "rows.jsonl",
        "output_dir": output,
        "max_steps": STEPS,
        "save_steps": 1,
        "save_total_limit": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 5,
        "report_to": "none",
    }
    if job == "distill":
        # three steps a rollout: most checkpoints stand inside one
        values |= {"teacher_model_name_or_path": folder / "teacher", "max_completion_length": 6}
        values |= {"steps_per_generation": 6, "lmbda": 0.7}
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def start(job, folder, output):
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = run.main(job, flags(job, folder, output))
        finally:
            os._exit(code)
    return pid


def ended(pid):
    """The exit code of a child, or `None` while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def kill(pid, output, draw):
    """Kill a child around the save of a step that is drawn, every other time within it. Returns its code if it was done
    before, and whether it was saving."""
    saving = draw.random() < 0.5
    newest = max((int(path.name.split("-")[1]) for path in output.glob("checkpoint-*")), default=0)
    name = f"checkpoint-{draw.randint(min(newest + 1, STEPS), STEPS)}"
    staged, whole, pause = output / "_staging" / name, output / name, draw.uniform(0.0, 0.02 if saving else 0.15)
    while (code := ended(pid)) is None:
        if (saving and staged.exists()) or whole.exists():
            time.sleep(pause)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, any((output / "_staging").glob("checkpoint-*"))
        time.sleep(0.0005)
    return code, False


def main():
    folder, job, wanted, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    began = time.monotonic()
    straight = folder / f"{job}-straight"
    pid = start(job, folder, straight)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, Path(f"{straight}.log").read_text()[-3000:]
    expected = load_file(straight / "model.safetensors")
    history = json.loads((straight / "trainer_state.json").read_text())["log_history"]
    losses = [(log["step"], log["loss"]) for log in history if "loss" in log]
    counts = {"trials": 0, "kills": 0, "inside a save": 0, "went on": 0, "weights equal": 0, "logs equal": 0}
    draw = random.Random(seed)
    while counts["kills"] < wanted:
        trial = counts["trials"]
        output, kills = folder / f"{job}-{trial}", 0
        while True:
            pid = start(job, folder, output)
            if kills < 1 + trial % 3:
                code, inside = kill(pid, output, draw)
            else:
                code, inside = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), False
            if code is None:
                kills += 1
                counts["kills"] += 1
                counts["inside a save"] += inside
                counts["went on"] += any(output.glob("checkpoint-*"))
                continue
            assert code == 0, Path(f"{output}.log").read_text()[-3000:]
            break
        ours = load_file(output / "model.safetensors")
        counts["trials"] += 1
        counts["weights equal"] += all(torch.equal(ours[name], expected[name]) for name in expected)
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        counts["logs equal"] += [(log["step"], log["loss"]) for log in history if "loss" in log] == losses
        # a kill between the last save's rename and its deletions leaves one more than the limit
        assert not (output / "_staging").exists() and len(list(output.glob("checkpoint-*"))) in (3, 4)
    counts["seconds"] = round(time.monotonic() - began)
    (folder / f"{job}-kills.json").write_text(json.dumps(counts))
    print(job, counts)


if __name__ == "__main__":
    main()
