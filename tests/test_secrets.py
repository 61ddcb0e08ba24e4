"""Tokens and keys reach no output, no log and no file."""

import copy
import io
import logging
import pickle

import pytest
import torch
import yaml
from tiny import qwen3, tokenizer
from training import text_rows

from trl_opd import DistillationConfig, SFTConfig, launch, process_log, recipes, secrets
from trl_opd.cli.main import main

TOKEN = "s3cret-" + "x" * 20  # not of the Hub's own form: found by where it stands, not by how it looks
HUB = "hf_" + "A1b2C3d4" * 4


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(secrets, "_known", set())


def test_which_names_are_secrets():
    for name in ("hub_token", "--push-to-hub-token", "token", "wandb_api_key", "aws_secret", "password"):
        assert secrets.is_secret(name), name
    for name in ("eos_token", "pad_token", "num_tokens", "max_new_tokens", "tokenizer", "hub_model_id", "key"):
        assert not secrets.is_secret(name), name


def test_values_are_hidden_wherever_they_turn_up(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("MY_TOKEN", "short")  # too short to be looked for: it would be found in words
    secrets.remember([TOKEN, None, "ab"])
    text = f"{TOKEN} and {HUB}, 0123456789abcdef; ab, a short one, hf_model"
    assert secrets.without_secrets(text) == "<hidden> and <hidden>, <hidden>; ab, a short one, hf_model"


def test_commands_and_recipes():
    argv = ["--hub_token", TOKEN, "--lr", "1", f"--hub-token={TOKEN}", "--token", TOKEN, "more", "--eos_token", "x"]
    assert secrets.found_in_command(argv) == [TOKEN, TOKEN, TOKEN, "more"]
    assert TOKEN not in str(secrets.masked_command(argv)) and secrets.masked_command(argv)[-2:] == ["--eos_token", "x"]
    recipe = {"hub_token": TOKEN, "env": {"HF_TOKEN": "a"}, "model_init_kwargs": {"token": HUB, "x": [{"api_key": 1}]}}
    assert set(secrets.found_in(recipe)) == {HUB, 1, TOKEN}
    masked = secrets.masked(recipe)
    assert masked["model_init_kwargs"] == {"token": "<hidden>", "x": [{"api_key": "<hidden>"}]}
    assert recipe["hub_token"] == TOKEN  # a copy was made


@pytest.mark.parametrize("cls", [SFTConfig, DistillationConfig])
def test_a_config_keeps_its_secrets_out_of_pickles_and_trackers_but_not_out_of_copies(tmp_path, cls):
    kwargs = {"token": HUB, "revision": "main"}
    args = cls(str(tmp_path), hub_token=TOKEN, model_init_kwargs=kwargs, report_to="none", bf16=False)
    file = io.BytesIO()
    torch.save(args, file)
    assert TOKEN.encode() not in file.getvalue() and HUB.encode() not in file.getvalue()
    loaded = pickle.loads(pickle.dumps(args))
    assert loaded.hub_token is None and loaded.model_init_kwargs["revision"] == "main"
    assert (loaded.output_dir, loaded.learning_rate) == (args.output_dir, args.learning_rate)
    for said in (str(args.to_dict()), args.to_json_string(), str(args.to_sanitized_dict()), str(args), repr(args)):
        assert TOKEN not in said
    assert HUB not in str(args.to_dict()) + str(args.to_sanitized_dict()) + args.to_json_string()
    assert copy.copy(args).hub_token == copy.deepcopy(args).hub_token == args.hub_token == TOKEN
    assert args.model_init_kwargs == kwargs


def test_a_run_leaves_them_nowhere(tmp_path, capfd, monkeypatch):
    """By flag, recipe and environment; every file of the output folder is searched."""
    monkeypatch.setenv("HF_TOKEN", "env-" + "y" * 20)
    qwen3().save_pretrained(tmp_path / "student")
    tokenizer().save_pretrained(tmp_path / "student")
    text_rows(4).to_json(tmp_path / "rows.jsonl")
    recipe = {
        "model_name_or_path": str(tmp_path / "student"),
        "dataset_name": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "model_init_kwargs": {"token": HUB},
        "push_to_hub_token": "not used, since the flag wins",
        "max_steps": 1,
        "save_steps": 1,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["sft", "--config", str(tmp_path / "recipe.yaml"), "--hub_token", TOKEN]) == 0
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"training_args.bin", "README.md", "trainer_state.json", "manifest.json"}
    said = "".join(capfd.readouterr())
    for value in (TOKEN, HUB, "env-" + "y" * 20, "not used, since"):
        assert value not in said
        assert [path.name for path in files if value.encode() in path.read_bytes()] == []


def test_errors_tables_and_logs(tmp_path, capsys, monkeypatch):
    (tmp_path / "r.yaml").write_text(f"hub_token: {TOKEN}\nmax_seq_length: 7\nbad_rows: {TOKEN}\n")
    assert main(["sft", "--config", str(tmp_path / "r.yaml"), "--debug"]) == 1
    err = capsys.readouterr().err
    assert "bad_rows is '<hidden>'" in err and "Traceback" in err and TOKEN not in err
    assert main(["sft", "--hub_token", TOKEN, TOKEN + "2", "--max_steps", TOKEN]) == 2
    assert TOKEN not in capsys.readouterr().err
    (tmp_path / "r.yaml").write_text(f"push_to_hub_token: {TOKEN}\nhub_token: 'a: b': c\n")
    assert main(["sft", "--config", str(tmp_path / "r.yaml")]) == 2
    assert TOKEN not in capsys.readouterr().err
    secrets.remember([TOKEN])
    record = logging.LogRecord("trl_opd", logging.WARNING, "", 0, "with %s", (TOKEN,), None)
    assert process_log.Printable("%(message)s").format(record) == "with <hidden>"


def test_the_launchers_command_is_shown_without_them(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(launch.os, "execve", lambda *call: started.append(call[1]))
    launch.start("sft", launch.Request("cpu2", 2, ["--hub_token", TOKEN, "--max_steps", "1"]))
    err = capsys.readouterr().err
    assert "--hub_token '<hidden>' --max_steps 1" in err and TOKEN not in err and TOKEN in started[0]


def test_what_the_recipe_sets_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    (tmp_path / "r.yaml").write_text(f"env: {{WANDB_API_KEY: {TOKEN}}}\noutput_dir: a\n")
    recipes.parse("sft", ["--config", str(tmp_path / "r.yaml")])
    assert secrets.without_secrets(f"key {TOKEN}") == "key <hidden>"
