"""What is pushed to the Hub, and where to: seen by stand-ins for the functions that would reach it."""

import os
import time
from types import SimpleNamespace

import pytest
import transformers
import yaml
from tiny import qwen3, tokenizer
from training import QUIET, text_rows

from trl_opd import hub
from trl_opd.run import run


@pytest.fixture
def hub_calls(monkeypatch):
    """Every call that would have reached the Hub. An upload takes its time: until there is a newer checkpoint that took
    the place of its own, or for a second."""
    calls = []

    def upload_folder(**kwargs):
        step, until = int(kwargs["folder_path"].rsplit("-", 1)[1]), time.monotonic() + 1
        while time.monotonic() < until and not os.path.isdir(kwargs["folder_path"].replace(f"-{step}", f"-{step + 1}")):
            time.sleep(0.02)
        if time.monotonic() < until:
            time.sleep(0.5)
        calls.append(("upload_folder", kwargs | {"files": sorted(os.listdir(kwargs["folder_path"]))}))

    commits = [SimpleNamespace(commit_id="last"), SimpleNamespace(commit_id="first")]
    monkeypatch.setattr(hub.huggingface_hub, "list_repo_commits", lambda repo, token: commits)
    monkeypatch.setattr(
        hub.huggingface_hub, "create_branch", lambda repo, **kwargs: calls.append(("create_branch", kwargs))
    )
    monkeypatch.setattr(hub.huggingface_hub, "upload_folder", upload_folder)
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda self: setattr(self, "hub_model_id", "me/model"))
    monkeypatch.setattr(transformers.Trainer, "_push_from_checkpoint", lambda self, folder: None)
    monkeypatch.setattr(
        transformers.Trainer, "push_to_hub", lambda self, *_, **kwargs: calls.append(("push_to_hub", kwargs))
    )
    return calls


@pytest.fixture
def start(tmp_path):
    def start(**recipe):
        qwen3().save_pretrained(tmp_path / "student")
        tokenizer().save_pretrained(tmp_path / "student")
        text_rows(4).to_json(tmp_path / "rows.jsonl")
        values = {
            "model_name_or_path": str(tmp_path / "student"),
            "dataset_name": str(tmp_path / "rows.jsonl"),
            "output_dir": str(tmp_path / "out"),
            "max_steps": 2,
            "save_strategy": "steps",
            "save_steps": 1,
            "save_total_limit": 1,
            "push_to_hub": True,
        }
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(QUIET | values | recipe))
        return run("sft", ["--config", str(tmp_path / "r.yaml")])

    return start


@pytest.mark.feature("`push_to_hub`", job="sft", model="full")
def test_a_recipe_pushes_each_checkpoint_to_its_branch(start, hub_calls, caplog):
    """open-r1's callback: branches from the first commit, no optimizer state. Each save deletes the checkpoint before
    it, and waits until that is pushed."""
    with caplog.at_level("INFO", "trl_opd"):
        start(callbacks=["push_to_hub_revision"], hub_model_revision="v01.00")
    branches = [f"v01.00-step-{step:09d}" for step in (1, 2)]
    made = [kwargs for name, kwargs in hub_calls if name == "create_branch"]
    assert [kwargs["branch"] for kwargs in made] == ["v01.00", *branches]
    assert all(kwargs["revision"] == "first" and kwargs["exist_ok"] for kwargs in made[1:])
    uploads = [kwargs for name, kwargs in hub_calls if name == "upload_folder"]
    assert [kwargs["revision"] for kwargs in uploads] == branches
    for step, kwargs in enumerate(uploads, 1):
        assert kwargs["folder_path"].endswith(f"checkpoint-{step}") and kwargs["repo_id"] == "me/model"
        assert {"model.safetensors", "optimizer.pt"} <= set(kwargs["files"]) and "*.pt" in kwargs["ignore_patterns"]
    assert f"pushed a checkpoint to me/model, branch {branches[1]}" in caplog.text
    assert [name for name, _ in hub_calls][-1] == "push_to_hub"


def test_a_push_that_fails_is_said_and_training_goes_on(start, hub_calls, monkeypatch, caplog):
    def fail(**kwargs):
        raise OSError("the Hub is away\nand more")

    monkeypatch.setattr(hub.huggingface_hub, "upload_folder", fail)
    trainer = start(hub_push_checkpoints=True)
    assert trainer.state.global_step == 2
    assert "not pushed to branch main-step-000000001: the Hub is away" in caplog.text
    assert "2 checkpoints were not pushed: main-step-000000001, main-step-000000002" in caplog.text


def test_nothing_is_pushed_unless_asked(start, hub_calls, capsys):
    start(callbacks=["push_to_hub_revision", "mine"], push_to_hub=False, max_steps=1)
    assert hub_calls == []
    said = capsys.readouterr().err
    assert "nothing is pushed without `push_to_hub: true`" in said and "not used: mine" in said


def test_the_branch_of_a_push_is_made(hub_calls):
    for push, revision in ((True, "v01.00"), (False, "v01.00"), (True, None)):
        args = SimpleNamespace(push_to_hub=push, hub_revision=revision, hub_token=None)
        hub.make_branch(SimpleNamespace(args=args, hub_model_id="me/m", is_world_process_zero=lambda: True))
    assert hub_calls == [("create_branch", {"branch": "v01.00", "token": None, "exist_ok": True})]


def test_the_model_card_of_a_push_names_the_dataset(start, hub_calls, monkeypatch, tmp_path):
    """A file of the user's own is nothing to a reader of the card; a dataset on the Hub is."""
    start(max_steps=1)
    assert hub_calls[-1] == ("push_to_hub", {"dataset_name": None})
    rows = text_rows(4)
    monkeypatch.setattr("trl_opd.run.load_splits", lambda name, *_, **__: {"train": rows})
    start(max_steps=1, dataset_name="them/rows", output_dir=str(tmp_path / "other"))
    assert hub_calls[-1] == ("push_to_hub", {"dataset_name": "them/rows"})
