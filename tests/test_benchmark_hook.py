"""Benchmarks after a run: a real program for each, its log and exit code kept, and a wrong command refused at start."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from tiny import qwen3, tokenizer
from training import QUIET, text_rows

from trl_opd import SFTConfig, recipes
from trl_opd.benchmark_hook import run_benchmarks
from trl_opd.cli.main import main
from trl_opd.errors import UsageError

# writes what it was given, and what a launcher had told the run; `bad` fails
PROGRAM = (
    "import json, os, sys; print(json.dumps(sys.argv[1:]), os.environ.get('WORLD_SIZE'), os.environ.get('KEPT'));"
    " sys.exit(3 if sys.argv[2] == 'bad one' else 0)"
)
COMMAND = shlex.join([sys.executable, "-c", PROGRAM.replace("{", "{{"), "model={model}", "{task}", "{system_prompt}"])


def config(tmp_path, **values):
    return SFTConfig(str(tmp_path / "out"), **QUIET, **values)


def test_each_benchmark_has_its_log_and_exit_code(tmp_path, monkeypatch, caplog):
    """No shell reads what is filled in; one that fails does not keep the next from running."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("KEPT", "kept")
    prompt = "think; first $(HOME)"
    args = config(tmp_path, benchmarks=["bad one", "lighteval|x|0"], benchmark_command=COMMAND, system_prompt=prompt)
    (tmp_path / "out").mkdir()
    results = run_benchmarks(args)
    assert json.loads((tmp_path / "out" / "benchmarks.json").read_text()) == results
    assert [(r["task"], r["exit_code"]) for r in results] == [("bad one", 3), ("lighteval|x|0", 0)]
    for result in results:
        command, printed = Path(result["log"]).read_text().splitlines()
        assert command == "$ " + shlex.join(result["command"])
        given = json.dumps([f"model={tmp_path / 'out'}", result["task"], prompt])
        assert printed == f"{given} None kept"  # a program that saw WORLD_SIZE would wait for the other process
    assert "benchmark bad one failed with exit code 3: see" in caplog.text
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_program_that_cannot_be_started_is_recorded(tmp_path):
    args = config(tmp_path, benchmarks=["a"], benchmark_command="{model}/none {task}")
    (result,) = run_benchmarks(args)
    assert result["exit_code"] == 127 and "No such file" in Path(result["log"]).read_text()


def test_without_a_command_nothing_runs(tmp_path):
    assert run_benchmarks(config(tmp_path, benchmarks=["a"])) == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "benchmarks, command, message",
    [
        (["a"], "eval {modle} {task}", r"has the field \{modle\}; it is filled in with \{model\}, \{task\}"),
        (["a"], "eval {} {task}", r"has the field \{\}"),
        (["a"], "eval {model}", r"has no \{task\}"),
        (["a"], "eval '{task}", "cannot be read: No closing quotation"),
        (["a"], "eval {task", "cannot be read: expected '}'"),
        (["a"], " ", "is empty"),
        (None, "eval {task}", "`benchmarks` names none to run"),
    ],
)
def test_a_command_that_could_not_be_filled_in_is_refused(tmp_path, benchmarks, command, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, benchmarks=benchmarks, benchmark_command=command)


def test_a_recipe_runs_its_benchmarks(tmp_path, capsys):
    qwen3().save_pretrained(tmp_path / "student")
    tokenizer().save_pretrained(tmp_path / "student")
    text_rows(4).to_json(tmp_path / "rows.jsonl")
    values = QUIET | {
        "model_name_or_path": tmp_path / "student",
        "dataset_name": tmp_path / "rows.jsonl",
        "output_dir": tmp_path / "out",
        "max_steps": 1,
    }
    flags = [part for key, value in values.items() for part in (f"--{key}", str(value))]
    wrong = ["--benchmarks", "a", "b", "--benchmark_command", "no-such-program {task}"]
    assert main(["sft", *flags, *wrong]) == 2
    assert "benchmark_command: there is no program no-such-program here" in capsys.readouterr().err
    saved = shlex.join([sys.executable, "-c", "import sys, os; print(os.listdir(sys.argv[1]))", "{model}", "{task}"])
    assert main(["sft", *flags, "--benchmarks", "a", "b", "--benchmark_command", saved]) == 0
    results = json.loads((tmp_path / "out" / "benchmarks.json").read_text())
    assert [(r["task"], r["exit_code"]) for r in results] == [("a", 0), ("b", 0)]
    assert "'model.safetensors'" in Path(results[0]["log"]).read_text()  # it is saved by then


def test_a_list_without_a_command_is_said_not_to_run(capsys):
    recipes.parse("sft", ["--output_dir", "out", "--benchmarks", "math_500"])
    said = capsys.readouterr().err
    assert "benchmarks" in said and "not run: set `benchmark_command`" in said
    with pytest.raises(UsageError, match="did you mean `--benchmark_command`"):
        recipes.parse("sft", ["--output_dir", "out", "--benchmark_comand", "x"])
