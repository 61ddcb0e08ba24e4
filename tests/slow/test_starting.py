"""Several processes on a CPU from each way of starting, and the package as it is installed from its wheel."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
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


def test_the_wheel_in_an_empty_environment(folder):
    """Built from a copy, so that nothing is left in the clone; installed in an environment that has nothing else.

    Its dependencies are this environment's, on the path but not as a site: an editable install of the clone stays out.
    """
    source, venv, empty = folder / "source", folder / "venv", folder / "empty"
    source.mkdir()
    empty.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "trl_opd", source / "trl_opd", ignore=shutil.ignore_patterns("__pycache__"))
    python = str(venv / "bin" / "python")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    built = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        *quiet,
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        "dist",
        str(source),
    ]
    for command in ([*built], [sys.executable, "-m", "venv", str(venv)]):
        done = run(command, folder)
        assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trl_opd/recipes").rglob("*") if path.is_file()}
    assert data <= inside and "trl_opd/recipes.py" in inside
    assert not any(name.startswith(("tests", "benchmarks", "examples")) for name in inside)
    done = run([python, "-m", "pip", "install", *quiet, "--no-index", str(wheel)], empty, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def in_venv(*command):
        done = run([str(venv / "bin" / command[0]), *command[1:]], empty, PYTHONPATH="")
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    where = in_venv("python", "-c", "import trl_opd.recipes, trl_opd.shipped as s; print(trl_opd.__file__, s.FOLDER)")
    assert all(Path(part).is_relative_to(site) for part in where.split()), where
    listed = in_venv("trl-opd", "recipes", "list")
    assert all(name in listed for name in shipped.recipe_names())
    in_venv("trl-opd", "recipes", "cp", "tiny/sft/config_smoke.yaml", "mine.yaml")
    assert (empty / "mine.yaml").read_bytes() == (shipped.FOLDER / "tiny/sft/config_smoke.yaml").read_bytes()
    values = ["--model_name_or_path", str(folder / "student"), "--dataset_name", str(folder / "rows.jsonl")]
    steps = ["--max_steps", "2", "--output_dir", "out"]
    in_venv("trl-opd", "sft", "--config", "tiny/sft/config_smoke.yaml", *values, *steps)
    assert json.loads((empty / "out" / "trainer_state.json").read_text())["global_step"] == 2
    assert (empty / "out" / "model.safetensors").exists()
