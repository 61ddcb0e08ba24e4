"""A stopped run's step, taken again by `trl-opd check --batch`: the same rows, and where it stops being finite."""

import re

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from tiny import llama, tokenizer
from training import text_rows

from trl_opd import run
from trl_opd.checks.preflight import check_weights
from trl_opd.checks.replay import one_row
from trl_opd.cli.main import main
from trl_opd.data.collate import OFF_POLICY, POSITIONS, SAMPLED, TEACHER, pad_rollout
from trl_opd.types import Rollout


def poisoned(model):
    """NaN at a row with a 5 in its prompt, which row 5 alone has."""
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer()("5")["input_ids"][0]] = float("nan")
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay")
    models = {"student": llama(), "teacher": llama(3), "bad-student": poisoned(llama())}
    for name, model in (models | {"bad-teacher": poisoned(llama(3))}).items():
        model.save_pretrained(path / name)
        tokenizer().save_pretrained(path / name)
    text_rows(8).to_json(path / "rows.jsonl")
    return path


@pytest.fixture
def start(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    # a run of the command line would be told of bad weights before it starts
    monkeypatch.setattr(run, "stop_or_say", lambda findings: None)

    def go(*command, **flags):
        recipe = {
            "model_name_or_path": "student",
            "dataset_name": "rows.jsonl",
            "output_dir": str(tmp_path / "out"),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "report_to": "none",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "save_strategy": "no",
        }
        if "distill" in command:
            recipe |= {"teacher_model_name_or_path": "teacher", "max_completion_length": 4}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | flags))
        code = main([*command, "--config", str(tmp_path / "recipe.yaml")])
        return code, *capsys.readouterr()

    return go


def stopped(start, job, **flags):
    """A run that stops: its error and the file it names."""
    code, _, err = start(job, **flags)
    error = err[err.rindex("error: ") :]
    assert code == 1 and "Traceback" not in err and "the loss of 1 of 4 rows is not finite" in error
    assert '  row 5 of the train dataset: "5 5 5 ' in error
    return error, re.search(r"--batch (\S+) ", error).group(1)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_bad_student_of_sft(start, lora):
    flags = {"model_name_or_path": "bad-student"} | (
        {"use_peft": True, "lora_target_modules": "all-linear"} if lora else {}
    )
    _, path = stopped(start, "sft", **flags)
    code, out, _ = start("check", "sft", "--batch", path, **flags)
    assert code == 1 and "the model has 1 tensors that are not finite" in out
    assert "embed_tokens.weight: 32 of 8,320 numbers" in out
    cells = findings(out)
    for name in ("states", "log-probs", "loss", "gradient"):
        assert cells[name].startswith("not finite in 1 rows row 5 of the train dataset"), name
    assert "13 of 13 positions" in cells["states"] and "finite rows: 3," in cells["loss"]
    assert "not finite in" in cells["gradients by weight"]
    code, out, _ = start("check", "sft", "--batch", path)  # with a student that is well
    assert code == 0 and "everything is finite: it does not happen here" in out


def test_a_bad_teacher(start):
    never = {"suppress_tokens": tokenizer()("5")["input_ids"]}  # or other rows' completions might hold it
    flags = {"teacher_model_name_or_path": "bad-teacher", "generation_kwargs": never}
    _, path = stopped(start, "distill", **flags)
    code, out, _ = start("check", "distill", "--batch", path, **flags)
    assert code == 1 and "the teacher has 1 tensors that are not finite" in out
    cells = findings(out)
    assert cells["student's states"] == cells["student's log-probs"] == "finite"
    for name in ("teacher's states", "teacher's log-probs", "loss", "gradient"):
        assert cells[name].startswith("not finite in 1 rows row 5 of the train dataset"), name
    code, _, err = start("check", "sft", "--batch", path)
    assert code == 2 and "is a step of `distill`: run `trl-opd check distill`" in err


def findings(out):
    """The table that `check` prints, by name."""
    cells, name = {}, ""
    for line in out.splitlines():
        parts = [part.strip() for part in line.split("│")]
        if len(parts) == 5:
            name = parts[2] or name
            cells[name] = f"{cells.get(name, '')} {parts[3]}".strip()
    return cells


def test_a_run_does_not_start_on_weights_that_are_not_finite(start, monkeypatch):
    monkeypatch.undo()

    class Trainer:
        model = poisoned(llama())

    (finding,) = check_weights(Trainer)
    assert finding.level == "error" and "model.embed_tokens.weight: 32 of 8,320 numbers" in finding.message
    Trainer.teacher = Trainer.teacher_model = None
    Trainer.model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    assert [finding.level for finding in check_weights(Trainer)] == ["ok"]


def test_one_row_of_a_batch_keeps_its_own_positions():
    """Two rows of 1 + 2 and 2 + 3 tokens, the second not the student's: worked out by hand."""
    rollout = Rollout([[1], [2, 3]], [[4, 5], [6, 7, 8]], [[4, 5], [6, -100, 8]], [1, 1], [True, False], [[9], [9, 9]])
    batch = pad_rollout(rollout, [0, 1], 0, None) | {SAMPLED: torch.tensor([-1.0, -2.0, -3.0, -4.0])}
    first, second = one_row(batch, 0), one_row(batch, 1)
    assert first["input_ids"].tolist() == [[1, 4, 5, 0, 0]] and second["input_ids"].tolist() == [[2, 3, 6, 7, 8]]
    assert first[POSITIONS].targets.tolist() == [4, 5] and second[POSITIONS].targets.tolist() == [6, 8]
    assert first[OFF_POLICY].tolist() == [] and second[OFF_POLICY].tolist() == [0, 1]
    assert first[SAMPLED].tolist() == [-1.0, -2.0] and second[SAMPLED].tolist() == [-3.0, -4.0]
    assert second[TEACHER]["input_ids"].tolist() == [[9, 9, 6, 7, 8]] and second[TEACHER][
        POSITIONS
    ].targets.tolist() == [6, 8]
