"""One process, DDP, DeepSpeed ZeRO-2 and ZeRO-3, FSDP2: the same losses, gradients and weights, and the same after a
resume, on a CPU with two processes.

One launch a layout trains all the cells of `layout_run.py`; another one resumes them from the checkpoints that are
under FOLDER/LAYOUT/CELL/run. What is measured is printed (`pytest -rP`).
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from layout_run import CELLS, IN_SHARDS, NOT_SHARDED, RESUMED, STEPS
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import qwen3, tokenizer
from transformers import AutoModelForCausalLM

from trl_opd import shipped

SCRIPT = Path(__file__).with_name("layout_run.py")
pytestmark = pytest.mark.slow

# layout -> (accelerate config that it is started with, class that wraps the model, ZeRO stage)
LAYOUTS = {
    "ddp": (None, "DistributedDataParallel", 0),
    "zero2": ("zero2", "DeepSpeedEngine", 2),
    "zero3": ("zero3", "DeepSpeedEngine", 3),
    "fsdp2": ("fsdp", "FSDP", 0),  # FSDP2 makes a subclass of the model's own: FSDPQwen3ForCausalLM
}
WITHOUT_DEEPSPEED = (  # it builds an extension when it is first used
    "deepspeed is not installed: pip install trl-opd[deepspeed]"
    if importlib.util.find_spec("deepspeed") is None
    else "there is no C++ compiler, which DeepSpeed needs on a CPU"
    if shutil.which("g++") is None
    else ""
)
needs_deepspeed = pytest.mark.skipif(bool(WITHOUT_DEEPSPEED), reason=WITHOUT_DEEPSPEED)
EACH = [
    pytest.param(layout, cell, marks=[needs_deepspeed] if layout.startswith("zero") else [])
    for layout in LAYOUTS
    for cell in CELLS
    if layout == "ddp" or cell not in NOT_SHARDED
]


def showing(feature, layouts, pairs):
    """The pairs of layout and cell, with the mark that the plain cells of these layouts show a feature."""
    shown = []
    for pair in pairs:
        layout, (job, model, _) = pair.values[0], pair.values[1].split("-")
        marks = [pytest.mark.feature(feature, job=job, model=model)] if job in ("sft", "distill") else []
        shown.append(pytest.param(*pair.values, marks=[*pair.marks, *(marks if layout in layouts else [])]))
    return shown


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """`launched(layout, phase)`: a folder a cell, after one launch that is made when it is first asked for."""
    folder = tmp_path_factory.mktemp("layouts")
    models = {
        "student-tied": qwen3(0),
        "student-untied": qwen3(0, tie_word_embeddings=False),
        "teacher": qwen3(1, hidden=48),
        "teacher-wide": qwen3(1, hidden=48, vocab_size=272, tie_word_embeddings=False),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "student-tied"), lora).save_pretrained(
        folder / "adapter"
    )
    tokenizer().save_pretrained(folder / "adapter")

    @cache
    def launch(layout, phase):
        if phase == "resume":
            launch(layout, "train")
        cells = RESUMED if phase == "resume" else [c for c in CELLS if layout in ("one", "ddp") or c not in NOT_SHARDED]
        said = run([*launcher(layout, folder), str(SCRIPT), str(folder), layout, phase, *cells])
        return folder / layout, said

    return launch


def launcher(layout, folder):
    if layout == "one":
        return [sys.executable]
    if LAYOUTS[layout][0] is None:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    config = yaml.safe_load((shipped.ACCELERATE / f"{LAYOUTS[layout][0]}.yaml").read_text())
    path = folder / f"{layout}.yaml"
    path.write_text(yaml.safe_dump(config | {"use_cpu": True}))
    flags = ["--config_file", str(path), "--num_processes", "2", "--main_process_port", "0"]
    return [sys.executable, "-m", "accelerate.commands.launch", *flags]


def run(command, timeout=1500):
    """What a command said. Its exit code says little: processes may abort at exit, after they wrote their results."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **streams) as process:
        try:
            return process.communicate(timeout=timeout)[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            raise


def result(launched, layout, cell, phase="train"):
    folder, said = launched(layout, phase)
    path = folder / cell / f"{phase}.json"
    assert path.exists(), f"{layout} {cell} was not trained to its end:\n{said[-5000:]}"
    return json.loads(path.read_text()), folder / cell / phase


def weights(folder):
    return {name: weight for file in sorted(folder.glob("*.safetensors")) for name, weight in load_file(file).items()}


def loaded(folder, cell):
    """The saved model in a fresh object, every weight of it from the file."""
    if "-full-" in cell:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        return model
    base = AutoModelForCausalLM.from_pretrained(folder.parents[2] / f"student-{cell.rpartition('-')[2]}")
    return PeftModel.from_pretrained(base, folder)


def difference(ours, theirs):
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))


def largest_difference(ours, theirs, start):
    """Of all weights: by how much two updates differ, by the largest number in that update, or in units of rounding
    where the update is smaller than that."""
    worst = 0.0
    for name, weight in theirs.items():
        moved = (weight - start[name]).abs().max().item()
        rounding = 4 * torch.finfo(weight.dtype).eps * weight.abs().max().item()
        worst = max(worst, (ours[name] - weight).abs().max().item() / max(moved, rounding / 1e-4))
    return worst


@pytest.mark.parametrize("layout, cell", showing("Weights saved whole under ZeRO-3", ("zero3",), EACH))
def test_a_layout_trains_as_one_process_does(launched, layout, cell):
    (two, folder), (one, reference) = result(launched, layout, cell), result(launched, "one", cell)
    _, wrapper, stage = LAYOUTS[layout]
    assert (two["world_size"], two["zero_stage"], one["world_size"]) == (2, stage, 1)
    assert len(two["wrappers"]) == len(one["wrappers"]) == STEPS
    assert all(name.startswith(wrapper) for name in two["wrappers"]) and not one["wrappers"][0].startswith(wrapper)

    pairs = list(zip(two["log"], one["log"], strict=True))
    assert len(pairs) == STEPS and all(b["grad_norm"] > 0 for _, b in pairs if not b.get("distill/empty_steps"))
    found = {
        name: difference([a[name] for a, _ in pairs], [b[name] for _, b in pairs]) for name in ("loss", "grad_norm")
    }
    assert [a.get("num_tokens") for a, _ in pairs] == [b.get("num_tokens") for _, b in pairs]
    found["eval_loss"] = difference(two["eval_loss"], one["eval_loss"])
    assert two["loss_dtypes"] == one["loss_dtypes"] == ["torch.float32"]
    if cell.startswith("bf16"):  # each layout rounds in its own places: weights, gradients, or neither
        print(layout, cell, {name: f"{value:.0e}" for name, value in found.items()})
        assert all(value < 2e-2 for value in found.values()), found
        return

    places = folder, reference, reference.with_name("start")
    ours, theirs, start = (loaded(place, cell).state_dict() for place in places)
    assert ours.keys() == theirs.keys() == start.keys()
    if "-full-" in cell:
        assert weights(folder).keys() == weights(reference).keys()  # nothing twice
    found["weights"] = largest_difference(ours, theirs, start)
    print(layout, cell, {name: f"{value:.0e}" for name, value in found.items()})
    assert all(value < 1e-4 for value in found.values()), found
    assert any(not torch.equal(theirs[name], start[name]) for name in theirs)


@pytest.mark.parametrize("layout, cell", [pair for pair in EACH if pair.values[1] == "empty-full-tied"])
def test_a_step_without_a_trained_token_moves_no_weight(launched, layout, cell):
    log = result(launched, layout, cell)[0]["log"]
    assert [entry["distill/empty_steps"] for entry in log] == [0.0, 1.0, 0.0]
    assert log[1]["loss"] == log[1]["grad_norm"] == 0.0
    # that the weights did not move shows in the third step, which the test above compares


@pytest.mark.parametrize("layout, cell", [pair for pair in EACH if pair.values[1] == "distill-full-untied"])
def test_every_prompt_is_asked_once_an_epoch(launched, layout, cell):
    for asked in (result(launched, name, cell)[0]["asked"] for name in ("one", layout)):
        windows = zip(*asked, strict=True)
        first, second, _ = ([tuple(prompt) for share in window for prompt in share] for window in windows)
        assert sorted(Counter([*first, *second]).values()) == [1] * 6 + [2]  # 7 prompts; one fills the last window


@pytest.mark.parametrize("layout, cell", [("one", cell) for cell in RESUMED])
def test_one_process_goes_on_to_the_same_weights(launched, layout, cell):
    assert_resumed(launched, layout, cell)


@pytest.mark.parametrize(
    "layout, cell", [pair for pair in EACH if pair.values[1] in ("merged-full-tied", "uneven-lora-tied")]
)
def test_ranks_merge_micro_batches_each_as_it_can(launched, layout, cell):
    """Each has four micro-batches a step; those that are left without a row come first."""
    for rows in result(launched, layout, cell)[0]["rows"]:
        steps = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        assert len(steps) == STEPS and all(sum(step) == 4 for step in steps)
        assert all(step[-1] and sorted(step, key=bool) == step for step in steps)
    passes = [sum(map(bool, rows)) for rows in result(launched, layout, cell)[0]["rows"]]
    assert min(passes) < 4 * STEPS, passes


ON_NEW_PROCESSES = [pair for pair in EACH if pair.values[1] in RESUMED]


@pytest.mark.parametrize("layout, cell", showing("Resuming under ZeRO", ("zero2", "zero3"), ON_NEW_PROCESSES))
def test_new_processes_go_on_to_the_same_weights(launched, layout, cell):
    assert_resumed(launched, layout, cell)


def assert_resumed(launched, layout, cell):
    (resumed, ours), (straight, theirs) = result(launched, layout, cell, "resume"), result(launched, layout, cell)
    assert len(resumed["wrappers"]) == STEPS - RESUMED[cell]  # it did not start over
    ours, theirs = weights(ours), weights(theirs)
    assert theirs and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    names = ("loss", "grad_norm", "num_tokens")
    assert [[e.get(n) for n in names] for e in resumed["log"]] == [[e.get(n) for n in names] for e in straight["log"]]


@pytest.mark.parametrize("layout", ["zero3", "fsdp2"])
def test_what_stays_in_shards_is_in_shards(launched, layout):
    """The cells that are saved whole from shards really had shards in their checkpoints."""
    if layout == "zero3" and WITHOUT_DEEPSPEED:
        pytest.skip(WITHOUT_DEEPSPEED)
    for cell in set(IN_SHARDS) & set(RESUMED):
        result(launched, layout, cell)
        checkpoint = launched(layout, "train")[0] / cell / "run" / "checkpoint-2"
        if layout == "fsdp2":
            assert (checkpoint / "pytorch_model_fsdp_0").is_dir() and not list(checkpoint.glob("*.safetensors"))
        elif "-full-" in cell:
            assert not list(checkpoint.glob("*.safetensors"))
