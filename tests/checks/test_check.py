"""`trl-opd check`: a recipe looked at up to its first loss; ok, warnings and errors with their fix."""

import json

import pytest
import yaml
from tiny import llama, qwen3, tokenizer
from training import text_rows

from trl_opd.cli.main import main

MESSAGES = [
    {"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "yes"}]} for n in (1, 9, 30)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("check")
    qwen3().save_pretrained(path / "student")
    teacher = qwen3(1)
    teacher.generation_config.eos_token_id = 5
    teacher.save_pretrained(path / "stops-elsewhere")
    llama(max_position_embeddings=40).save_pretrained(path / "short")
    for name in ("student", "stops-elsewhere", "short"):
        tokenizer().save_pretrained(path / name)
    text_rows(7).to_json(path / "rows.jsonl")
    (path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MESSAGES))
    (path / "some-bad.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*MESSAGES, {"messages": [{"role": "user", "content": "x"}]}])
    )
    return path


@pytest.fixture
def check(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")

    def run(job, *argv, **flags):
        recipe = {
            "model_name_or_path": "student",
            "dataset_name": "chat.jsonl",
            "output_dir": str(tmp_path / "out"),
            "max_steps": 20,
            "per_device_train_batch_size": 2,
            "report_to": "none",
            "gradient_checkpointing": False,
        }
        if job == "distill":
            recipe |= {"teacher_model_name_or_path": "stops-elsewhere", "max_completion_length": 4}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | flags))
        code = main(["check", job, "--config", str(tmp_path / "recipe.yaml"), *argv])
        assert not (tmp_path / "out").exists()  # nothing is trained or written
        return code, *capsys.readouterr()

    return run


def test_a_good_recipe(check, tmp_path):
    code, out, _ = check("sft", "--html", str(tmp_path / "check.html"))
    assert code == 0
    for text in ("3 rows read, 3 kept", "rendering turn by turn", "trained and stopped at: <|im_end|>", "first loss"):
        assert text in out, text
    assert "⟦yes<|im_end|>⟧" in out and "error" not in out
    html = (tmp_path / "check.html").read_text()
    assert "<mark>yes</mark>" in html and "first loss" in html


def test_rows_that_cannot_be_trained(check):
    code, out, _ = check("sft", dataset_name="some-bad.jsonl")
    assert code == 1 and "1 of 4 rows of the train dataset cannot be trained" in out
    code, out, _ = check("sft", dataset_name="some-bad.jsonl", bad_rows="drop")
    assert code == 0 and "warning" in out and "1 rows dropped: no assistant turn" in out


def test_lengths_steps_and_stop_tokens(check):
    code, out, _ = check("sft", model_name_or_path="short", dataset_name="rows.jsonl")
    assert (
        code == 1
        and "longer than the model's 40 positions" in out
        and "set `max_length: 40` with `overflow: drop`" in out
    )
    code, out, _ = check("sft", max_steps=3, warmup_steps=5)
    assert code == 0 and "all of them are warm-up" in out


def test_a_distill_recipe(check):
    code, out, _ = check("distill", dataset_name="rows.jsonl")
    assert code == 0 and "lengths may explode" in out and "rollouts stop at <|im_end|>" in out
    code, out, _ = check("distill", dataset_name="rows.jsonl", max_completion_length=600)
    assert code == 1 and "and 600 new ones are longer than the model's 512 positions" in out


def test_usage(check, capsys):
    code, _, err = check("sft", "--learning_rrate", "1")
    assert code == 2 and "did you mean `--learning_rate`?" in err
    with pytest.raises(SystemExit) as stop:
        main(["check", "grpo"])
    assert stop.value.code == 2
