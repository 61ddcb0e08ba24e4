"""A checkpoint is whole or is not taken; a resumed run is the run that never stopped; a failed save loses nothing."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_distillation_trainer import LORA, build
from tiny import qwen3
from training import QUIET, Gradients, text_rows
from transformers import TrainerCallback

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer, checkpoints, run_lock
from trl_opd.errors import RunError, UsageError
from trl_opd.fingerprint import differences, fingerprint
from trl_opd.stops import StopAtSignal

JOBS = {"distill": (DistillationTrainer, DistillationConfig), "sft": (SFTTrainer, SFTConfig)}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def trainer_of(job, folder, stop=None, **kwargs):
    callbacks = [StopAt(stop)] if stop else []
    rows = kwargs.pop("rows", None) or text_rows(7)
    if job == "distill":
        trainer, _ = build(*JOBS[job], folder, fixed=False, rows=rows, **kwargs)
        for callback in callbacks:
            trainer.add_callback(callback)
        return trainer
    from tiny import tokenizer

    peft_config, eval_rows = kwargs.pop("peft_config", None), kwargs.pop("eval_rows", None)
    args = SFTConfig(str(folder), **QUIET | {"per_device_train_batch_size": 2} | kwargs)
    return SFTTrainer(
        model=qwen3(),
        args=args,
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer(),
        peft_config=peft_config,
        callbacks=[Gradients(), *callbacks],
    )


def same_weights(ours, theirs):
    theirs = theirs.state_dict()
    return all(torch.equal(weight, theirs[name]) for name, weight in ours.state_dict().items())


FOUR_STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that was stopped after 3 of its 4 steps, with a checkpoint each."""
    folder = tmp_path_factory.mktemp("saved")
    trainer_of("sft", folder, **FOUR_STEPS, stop=3).train()
    return folder


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


# --- complete or not -------------------------------------------------------------------------------------------------


def test_a_checkpoint_lists_its_files_and_nothing_else_is_left(run):
    assert sorted(path.name for path in run.iterdir()) == ["README.md", "checkpoint-1", "checkpoint-2", "checkpoint-3"]
    newest = run / "checkpoint-3"
    listed = json.loads((newest / "manifest.json").read_text())
    assert set(listed["files"]) == {path.name for path in newest.iterdir()} - {"manifest.json"}
    assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "trl_opd_state_0.pt"} <= set(listed["files"])
    assert checkpoints.newest_valid(run) == (newest, [])


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "missing file": (lambda c: (c / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "zero bytes": (lambda c: (c / "scheduler.pt").write_bytes(b""), "scheduler.pt has 0 bytes"),
    "truncated": (lambda c: cut(c / "model.safetensors"), "model.safetensors has"),
    "flipped byte": (lambda c: flip(c / "optimizer.pt"), "SHA-256 differs"),
    "foreign file": (lambda c: (c / "adapter_model.bin").write_bytes(b"x"), "was not written with it"),
    "bad JSON": (lambda c: (c / "manifest.json").write_text('{"files": '), "manifest.json cannot be read"),
    "missing rank file": (lambda c: (c / "rng_state.pth").unlink(), "rng_state.pth is missing"),
    "half-renamed": (lambda c: [p.unlink() for p in c.iterdir() if p.name != "config.json"], "holds no weights"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(run, kind, caplog):
    damage, why = DAMAGE[kind]
    damage(run / "checkpoint-3")
    with pytest.raises(UsageError, match="cannot be gone on from"):
        trainer_of("sft", run, **FOUR_STEPS).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of("sft", run, **FOUR_STEPS)
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-3 is not gone on from" in caplog.text and why in caplog.text
    assert trainer._initial_global_step == 2
    assert checkpoints.newest_valid(run) == (run / "checkpoint-4", [])


def test_only_damaged_checkpoints_are_an_error_not_a_new_start(run):
    for path in checkpoints.checkpoints(run):
        cut(path / "model.safetensors")
    with pytest.raises(UsageError, match=r"none that can be gone on from; the newest, checkpoint-3: model.safetensors"):
        trainer_of("sft", run, **FOUR_STEPS).train(resume_from_checkpoint=True)
    assert len(checkpoints.checkpoints(run)) == 3


@pytest.mark.parametrize(
    "damage, why",
    [
        (lambda c: None, None),
        (lambda c: cut(c / "optimizer.pt"), "optimizer.pt is cut short"),
        (lambda c: (c / "rng_state.pth").write_bytes(b""), "rng_state.pth is empty"),
        (lambda c: cut(c / "model.safetensors"), "model.safetensors is cut short"),
        (lambda c: cut(c / "trainer_state.json"), "trainer_state.json cannot be read"),
        (lambda c: (c / "model.safetensors").unlink(), "it holds no weights"),
        (lambda c: (c / "rng_state.pth").rename(c / "rng_state_1.pth"), "rng_state_0.pth is missing"),
    ],
)
def test_a_checkpoint_without_a_manifest_is_looked_over(run, damage, why):
    """As TRL and transformers write them."""
    newest = run / "checkpoint-3"
    (newest / "manifest.json").unlink()
    (newest / "trl_opd_state_0.pt").unlink()
    damage(newest)
    found = checkpoints.damage(newest)
    assert found is None if why is None else why in found
    trainer = trainer_of("sft", run, **FOUR_STEPS)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == (3 if why is None else 2)


def test_a_sealed_checkpoint_that_only_lacked_its_rename_is_taken(run):
    (run / "_staging").mkdir()
    (run / "checkpoint-3").rename(run / "_staging" / "checkpoint-3")
    (run / "_staging" / "checkpoint-4").mkdir()
    trainer = trainer_of("sft", run, **FOUR_STEPS)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 3 and not (run / "_staging").exists()


def test_a_save_that_was_cut_short_is_not_taken_for_another_tools(run):
    """All of transformers' files are there and ours are not yet: it would go on with other counts, without a word."""
    (run / "_staging").mkdir()
    (run / "checkpoint-3").rename(run / "_staging" / "checkpoint-3")
    for name in ("manifest.json", "trl_opd_state_0.pt"):
        (run / "_staging" / "checkpoint-3" / name).unlink()
    trainer = trainer_of("sft", run, **FOUR_STEPS)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 2 and not (run / "_staging").exists()


def test_counts_of_another_number_of_processes_are_left_with_a_word(run, caplog):
    manifest = run / "checkpoint-3" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"processes": 1', '"processes": 2'))
    trainer = trainer_of("sft", run, **FOUR_STEPS, resume_anyway=True)
    trainer.train(resume_from_checkpoint=True)
    assert "is of 2 processes and this run has 1: what was counted since its last log" in caplog.text


def test_a_model_without_its_optimizer_is_not_gone_on_from_unasked(run):
    for path in checkpoints.checkpoints(run):
        shutil.rmtree(path)
    trainer_of("sft", run, **FOUR_STEPS, stop=2, save_only_model=True).train()
    with pytest.raises(UsageError, match="saved with `save_only_model`"):
        trainer_of("sft", run, **FOUR_STEPS).train(resume_from_checkpoint=True)
    trainer = trainer_of("sft", run, **FOUR_STEPS, resume_anyway=True)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 2


# --- which are kept --------------------------------------------------------------------------------------------------


@pytest.mark.feature("`load_best_model_at_end`, `metric_for_best_model`, `save_total_limit`", job="sft", model="full")
def test_the_best_one_is_kept_and_loaded_and_never_named_by_its_staging_folder(tmp_path):
    options = {"max_steps": 5, "save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "save_strategy": "steps"}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = trainer_of("sft", tmp_path, eval_rows=text_rows(3), save_total_limit=2, **options)
    losses = []
    trainer.add_callback(EvalLosses(losses))
    trainer.train()
    best = max(range(5), key=lambda i: losses[i]) + 1
    assert best not in (4, 5), "the best must be one that rotation would have deleted"
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert {path.name for path in checkpoints.checkpoints(tmp_path)} == {f"checkpoint-{best}", "checkpoint-5"}
    assert all("_staging" not in (path / "trainer_state.json").read_text() for path in tmp_path.glob("checkpoint-*"))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best - 1])


class EvalLosses(TrainerCallback):
    def __init__(self, losses):
        self.losses = losses

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.global_step > len(self.losses):
            self.losses.append(metrics["eval_loss"])


def test_going_back_sets_newer_checkpoints_aside(run, caplog):
    """Else the next start would go on from a step 3 that this run never took."""
    trainer = trainer_of("sft", run, **FOUR_STEPS, stop=2)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-1"))
    assert "checkpoint-3" in caplog.text and "started from step 1" in caplog.text
    assert [path.name for path in checkpoints.checkpoints(run)] == ["checkpoint-2", "checkpoint-1"]
    assert sorted(path.name for path in (run / "_superseded").iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_the_limit_keeps_the_newest(tmp_path):
    trainer_of("sft", tmp_path, **FOUR_STEPS, save_total_limit=2).train()
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-3"]


def test_a_push_happens_when_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    from transformers import Trainer

    pushed = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append(os.listdir(folder)))
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, **kwargs: None)
    monkeypatch.setattr(Trainer, "_finish_current_push", lambda self: None)
    trainer = trainer_of("sft", tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.args.push_to_hub = True
    trainer.train()
    assert len(pushed) == 1 and "manifest.json" in pushed[0]


# --- going on exactly ------------------------------------------------------------------------------------------------

STRADDLING = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "logging_steps": 2}
CASES = {
    "sft": ("sft", {"gradient_accumulation_steps": 2, "logging_steps": 2}),
    "sft LoRA": ("sft", {"peft_config": LORA, "logging_steps": 3}),
    "inside a rollout": ("distill", STRADDLING),
    "inside a rollout, policy gradient": ("distill", {**STRADDLING, "objective": "policy_gradient"}),
    "LoRA": ("distill", {"peft_config": LORA, "logging_steps": 2}),
    "length schedule": ("distill", {"completion_length_schedule": "3@0,8@0.5", "logging_steps": 2}),
    "NEFTune": ("sft", {"neftune_noise_alpha": 5.0}),
}


def _resuming(name):
    job, options = CASES[name]
    model = "lora" if "peft_config" in options else "full"
    return pytest.param(name, marks=pytest.mark.feature("Resuming", job=job, model=model))


@pytest.mark.parametrize("name", map(_resuming, CASES))
def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path, name):
    """Stopped inside a logging window and, where there is one, inside a rollout: weights and logs are the same."""
    job, options = CASES[name]
    options = {"max_steps": 6, "per_device_train_batch_size": 2, **options}
    straight = trainer_of(job, tmp_path / "straight", **options)
    straight.train()
    each_step = trainer_of(job, tmp_path / "each step", **options | {"logging_steps": 1})
    each_step.train()
    losses = [log["loss"] for log in each_step.state.log_history if "loss" in log]
    for stop in (3, 5) if name == "inside a rollout" else (3,):
        folder = tmp_path / str(stop)
        trainer_of(job, folder, stop=stop, **options).train()
        resumed = trainer_of(job, folder, **options)
        result = resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == 6 and same_weights(resumed.model, straight.model)
        steps = {log["step"]: log for log in resumed.state.log_history if "loss" in log}
        timed = ("step_time", "train_runtime", "tokens_per_second", "peak_memory_gib")
        for log in (log for log in straight.state.log_history if "loss" in log):
            again = steps[log["step"]]
            assert {k: v for k, v in again.items() if k not in timed} == pytest.approx(
                {k: v for k, v in log.items() if k not in timed}, rel=1e-6
            )
        own = losses[stop:]  # the mean loss is that of this call's steps
        assert result.training_loss == pytest.approx(sum(own) / len(own), rel=1e-4)


def test_another_recipe_or_other_data_is_refused_with_the_difference(run, caplog):
    options = FOUR_STEPS
    with pytest.raises(UsageError, match=r"learning_rate: 0.001 in the checkpoint, 0.002 now"):
        trainer_of("sft", run, **options, learning_rate=2e-3).train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match=r"data.rows: 7 in the checkpoint, 6 now"):
        trainer_of("sft", run, **options, rows=text_rows(6)).train(resume_from_checkpoint=True)
    changed = text_rows(7).map(lambda row: {"completion": row["completion"][:-1] + "z"})
    with pytest.raises(UsageError, match=r"data.sha256"):
        trainer_of("sft", run, **options, rows=changed).train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match=r"model.adapters|model.parameters"):
        trainer_of("sft", run, **options, peft_config=LORA).train(resume_from_checkpoint=True)
    free = {"logging_steps": 7, "save_total_limit": 3, "report_to": "none", "run_name": "other", "max_steps": 5}
    trainer = trainer_of("sft", run, **options | free, resume_anyway=True, learning_rate=2e-3)
    trainer.train(resume_from_checkpoint=True)
    said = [r.message for r in caplog.records if "gone on from anyway" in r.message]
    assert len(said) == 1 and "learning_rate" in said[0] and "max_steps: 4" in said[0]
    assert "logging_steps" not in said[0] and "run_name" not in said[0]


def test_the_fingerprint_is_the_same_in_another_process_and_blind_to_secrets(tmp_path):
    trainer = trainer_of("distill", tmp_path, hub_token="hf_secret")
    free = {"hub_token": "hf_other", "benchmarks": ["a"], "benchmark_command": "e {task}", "hub_push_checkpoints": True}
    one, two = fingerprint(trainer), fingerprint(trainer_of("distill", tmp_path / "other", **free))
    assert differences(one, two) == [] and "hf_secret" not in json.dumps(one)
    assert one["recipe"]["beta"] == 1.0 and one["data"]["rows"] == 7


# --- saving fails ----------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk():
    """Files may not grow beyond 60 kB, as on a full disk; the model has more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


class FillDiskAt(TrainerCallback):
    def __init__(self, step, fill):
        self.step, self.fill = step, fill

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            self.fill()


def test_a_full_disk_stops_the_run_and_loses_no_checkpoint(tmp_path, full_disk):
    trainer = trainer_of("sft", tmp_path, **FOUR_STEPS, save_total_limit=1)
    trainer.add_callback(FillDiskAt(2, full_disk))
    with pytest.raises(RunError, match=r"the checkpoint of step 2 was not written.*checkpoint-1 and earlier ones"):
        trainer.train()
    assert checkpoints.newest_valid(tmp_path) == (tmp_path / "checkpoint-1", [])
    assert not (tmp_path / "_staging").exists()


def test_or_goes_on_without_it_and_counts(tmp_path, full_disk, caplog):
    trainer = trainer_of("sft", tmp_path, **FOUR_STEPS, on_save_error="continue")
    trainer.add_callback(FillDiskAt(2, full_disk))
    trainer.train()
    assert trainer.state.global_step == 4
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-1"]
    assert "failed saves so far: 3" in caplog.text


# --- one run a folder, and its end -----------------------------------------------------------------------------------

HOLD = """
import sys, time
sys.path.insert(0, {package!r})
from trl_opd import run_lock
run_lock.take({folder!r})
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_dead(tmp_path):
    package = str(Path(checkpoints.__file__).parents[1])
    code = HOLD.format(package=package, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"in use by another run \\(process {holder.pid} on"):
            run_lock.take(tmp_path)
        holder.kill()
        holder.wait()
    assert run_lock.take(tmp_path) and not run_lock.take(tmp_path)
    run_lock.release(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_training_after_its_step_with_a_checkpoint(tmp_path):
    trainer = trainer_of("sft", tmp_path, max_steps=5)

    class Send(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        on_step_begin = on_substep_end

    before = signal.getsignal(signal.SIGTERM)
    from trl_opd.stops import heeding_signals

    trainer.add_callback(Send())
    with heeding_signals(trainer) as stop:
        trainer.train()
    assert isinstance(stop, StopAtSignal) and stop.signal == signal.SIGTERM
    assert trainer.state.global_step == 3 and checkpoints.newest_valid(tmp_path).path == tmp_path / "checkpoint-3"
    assert signal.getsignal(signal.SIGTERM) == before
