"""What a run logs, read back from the disk of the tracker that it was logged to."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from feature_jobs import each

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a process that has made every run once, offline."""
    folder = tmp_path_factory.mktemp("trackers")
    own = {name: str(folder / name.lower()) for name in ("TRACKIO_DIR", "WANDB_DIR", "WANDB_CACHE_DIR")}
    own |= {name: str(folder / name.lower()) for name in ("WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TENSORBOARD", "WANDB"))}
    subprocess.run(
        [sys.executable, str(Path(__file__).parent / "tracker_run.py"), str(folder)],
        env=environment | own | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        cwd=folder,
        check=True,
        timeout=300,
        capture_output=True,
    )
    return folder


def logged(runs, tracker, job, model):
    """The losses as the trainer itself kept them."""
    return json.loads((runs / "losses.json").read_text())[f"{tracker}-{job}-{model}"]


@each("TensorBoard")
def test_tensorboard(runs, job, model):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (runs / "tensorboard" / f"{job}-{model}").rglob("events.out.tfevents.*")
    read = EventAccumulator(str(events)).Reload()
    losses = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert losses == [
        (step, pytest.approx(loss)) for step, loss in enumerate(logged(runs, "tensorboard", job, model), 1)
    ]
    assert len(losses) == 2 and all(event.value > 0 for event in read.Scalars("train/tokens_per_second"))


@each("Trackio")
def test_trackio(runs, job, model):
    with sqlite3.connect(runs / "trackio_dir" / "huggingface.db") as database:
        query = "SELECT metrics FROM metrics WHERE run_name = ? ORDER BY id"
        rows = [json.loads(row) for (row,) in database.execute(query, (f"{job}-{model}",))]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses == pytest.approx(logged(runs, "trackio", job, model)) and len(losses) == 2


def records(file):
    """The records of a `.wandb` file: after a header of 7 bytes, blocks of 32 KiB with chunks of checksum (4 bytes),
    length (2) and kind (1), of which 1 is whole, 2 to 4 begin, go on and end one."""
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a chunk: the rest of a block is empty
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@each("Weights & Biases, offline")
def test_wandb(runs, job, model):
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for file in (runs / "wandb_dir" / "wandb").glob("offline-run-*/*.wandb"):
        name, losses = None, []
        for record in map(Record.FromString, records(file)):
            name = record.run.display_name or name
            for item in record.history.item:
                if (item.key or ".".join(item.nested_key)) == "train/loss":
                    losses.append(json.loads(item.value_json))
        found[name] = losses
    assert len(found) == 4
    assert found[f"{job}-{model}"] == pytest.approx(logged(runs, "wandb", job, model))
