"""Several processes on a CPU from each way of starting, and the package as it is installed from its wheel."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny import qwen3, tokenizer
from training import text_rows

from trl_opd import shipped

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-c", "import sys; from trl_opd.cli.main import main; sys.exit(main())"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    for name, seed in (("student", 0), ("teacher", 1)):
        qwen3(seed).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    text_rows(8).to_json(tmp_path / "rows.jsonl")
    return tmp_path


def run(command, folder, **environment):
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def flags(job):
    """Without `use_cpu`: that two processes meet must not depend on it."""
    values = {
        "model_name_or_path": "student",
        "dataset_name": "rows.jsonl",
        "output_dir": "out",
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
    }
    if job == "distill":
        values |= {"teacher_model_name_or_path": "teacher", "max_completion_length": 4}
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


STARTS = {
    "--num_processes": ("sft", lambda job: [*CLI, job, "--num_processes", "2"]),
    "cpu2": ("distill", lambda job: [*CLI, job, "--accelerate_config", "cpu2"]),
    "accelerate launch": (
        "sft",
        lambda job: [*ACCELERATE, "--config_file", str(shipped.ACCELERATE / "cpu2.yaml"), "-m", f"trl_opd.run_{job}"],
    ),
    "torchrun": ("distill", lambda job: [*TORCHRUN, "-m", f"trl_opd.run_{job}"]),
}


@pytest.mark.parametrize("how", STARTS)
def test_two_processes_train_together(folder, how):
    job, command = STARTS[how]
    done = run([*command(job), *flags(job)], folder)
    assert (folder / "out" / "model.safetensors").exists(), done.stderr[-3000:]  # processes may abort at exit
    assert "2 rows each (1 × 1 accumulated × 2 processes)" in done.stdout, done.stdout
    state = json.loads((folder / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 1


def test_a_launcher_that_starts_fewer_is_an_error(folder):
    (folder / "multi_cpu.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    done = run([*ACCELERATE, "--config_file", "multi_cpu.yaml", "-m", "trl_opd.run_sft", *flags("sft")], folder)
    assert done.returncode != 0 and "started one, as it does for MULTI_CPU" in done.stderr
    done = run([sys.executable, "-m", "trl_opd.run_sft", *flags("sft")], folder, TRL_OPD_NUM_PROCESSES="2")
    assert done.returncode == 2 and "2 processes were asked for and the launcher started 1" in done.stderr
    assert not (folder / "out").exists()


# how a run is started, and the exit code of a wrong recipe: a launcher has its own
WAYS = {
    "trl-opd": ([*CLI, "sft"], 2),
    "--num_processes": ([*CLI, "sft", "--num_processes", "2"], 2),
    "python -m": ([sys.executable, "-m", "trl_opd.run_sft"], 2),
    "accelerate launch": (
        [*ACCELERATE, "--config_file", str(shipped.ACCELERATE / "cpu2.yaml"), "-m", "trl_opd.run_sft"],
        1,
    ),
    "torchrun": ([*TORCHRUN, "-m", "trl_opd.run_sft"], 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_unknown_key_is_an_error_once_from_every_way_of_starting(folder, way):
    command, code = WAYS[way]
    (folder / "recipe.yaml").write_text("learning_rrate: 1.0e-5\noutput_dir: out\n")
    done = run([*command, "--config", "recipe.yaml"], folder)
    assert done.returncode == code, done.stderr[-2000:]
    assert done.stderr.count("did you mean `learning_rate`?") == 1, done.stderr[-2000:]
    assert code == 1 or "torch.distributed" not in done.stderr  # nothing was started
    assert not (folder / "out").exists()


def test_processes_that_do_not_meet_are_an_error(folder):
    """accelerate then takes each for a run of its own, without a word."""
    done = run([*TORCHRUN, "-m", "trl_opd.run_sft", *flags("sft")], folder, ACCELERATE_USE_CPU="false")
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stderr.count("says that there are 2 processes and this run has 1") == 1, done.stderr[-2000:]
    assert not (folder / "out").exists()


def test_the_wheel_brings_its_recipes(folder):
    """Built from a copy, so that nothing is left in the clone; installed alone in an empty folder."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "trl_opd", source / "trl_opd", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for command in (
        [*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist")],
        [*pip, "install", "--no-deps", "--no-index", "--target", str(site), "--find-links", "dist", "trl-opd"],
    ):
        done = run(command, folder)
        assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trl_opd/recipes").rglob("*") if path.is_file()}
    assert data <= inside and "trl_opd/recipes.py" in inside

    done = run([*CLI, "recipes", "list"], folder, PYTHONPATH=str(site))
    assert done.returncode == 0 and all(name in done.stdout for name in shipped.recipe_names())
    check = (
        "import trl_opd; from trl_opd import recipes, shipped; assert trl_opd.__file__.startswith(sys.argv[1]);"
        "path = shipped.find_recipe('tiny/sft/config_smoke.yaml'); assert path.startswith(sys.argv[1]);"
        "print(recipes.parse('sft', ['--config', path]).training.max_steps)"
    )
    done = run([sys.executable, "-c", "import sys;" + check, str(site)], folder, PYTHONPATH=str(site))
    assert done.stdout.strip() == "4", done.stderr
    path = str(site / "trl_opd/recipes/tiny/sft/config_smoke.yaml")
    values = ["--model_name_or_path", "student", "--dataset_name", "rows.jsonl", "--output_dir", "out"]
    done = run([*CLI, "sft", "--config", path, *values], folder, PYTHONPATH=str(site))
    assert done.returncode == 0 and (folder / "out" / "model.safetensors").exists(), done.stderr[-3000:]
