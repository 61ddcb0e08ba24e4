"""Going on and pushing: what each job and model have in common. The rest: test_checkpoints.py, test_hub.py."""

import json
import os

import transformers
from feature_jobs import each, trainer_of
from test_hub import hub_calls  # noqa: F401

SAVED = {"save_strategy": "steps", "save_steps": 1}


@each("Warning on other versions at a resume")
def test_other_versions_are_said_and_the_run_goes_on(tmp_path, job, model, caplog):
    trainer_of(job, model, tmp_path, **SAVED).train()
    path = tmp_path / "checkpoint-1" / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    assert {"torch", "transformers", "trl"} <= manifest["versions"].keys()
    manifest["versions"]["torch"] = "0.1.0"
    path.write_text(json.dumps(manifest), "utf-8")
    resumed = trainer_of(job, model, tmp_path, **SAVED)
    resumed.args.max_steps = 1
    resumed.train(resume_from_checkpoint=True)
    said = [record.message for record in caplog.records if "was written by other versions" in record.message]
    assert len(said) == 1 and "torch: 0.1.0 in the checkpoint" in said[0] and "trl" not in said[0].split("versions")[1]
    assert resumed.state.global_step == 1


@each("`push_to_hub`")
def test_a_saved_checkpoint_is_pushed_whole(tmp_path, job, model, hub_calls, monkeypatch):  # noqa: F811

    pushed = []
    monkeypatch.setattr(
        transformers.Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append((folder, os.listdir(folder)))
    )
    monkeypatch.setattr(transformers.Trainer, "_finish_current_push", lambda self: None)
    trainer = trainer_of(job, model, tmp_path, push_to_hub=True, hub_model_id="me/model", **SAVED)
    trainer.train()
    trainer.push_to_hub()
    ((folder, files),) = pushed
    assert folder == str(tmp_path / "checkpoint-1")
    assert {"manifest.json", "model.safetensors" if model == "full" else "adapter_model.safetensors"} <= set(files)
    assert [name for name, _ in hub_calls] == ["push_to_hub"]
