"""A loss or gradient that is not finite: the run stops with the weights as they were, or leaves just that step out."""

import re

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import llama, tokenizer
from training import QUIET, answers_for, fixed_completions, text_rows
from transformers import TrainerCallback

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer
from trl_opd.data.find import find_rows
from trl_opd.errors import NonFiniteError, UsageError
from trl_opd.step_file import read_step, write_step

LORA = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
ROWS = text_rows(8)
NAN = float("nan")
JOBS = pytest.mark.parametrize("job", ["sft", "distill"])
KINDS = pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])


def poisoned(model):
    """A model that gives NaN at row 5 alone, the one with a 5 in its prompt."""
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer()("5")["input_ids"][0]] = NAN
    return model


def build(job, tmp_path, student=None, teacher=None, bad_steps=(), **kwargs):
    """Four steps of two rows each, in order. In `bad_steps` the first micro-batch gives a loss of NaN."""
    peft_config, callbacks, rows = (kwargs.pop(name, None) for name in ("peft_config", "callbacks", "rows"))
    options = QUIET | {"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1} | kwargs

    class Bad(SFTTrainer if job == "sft" else DistillationTrainer):
        def _score(self, *args):
            out = super()._score(*args)
            if self.state.global_step in bad_steps:
                out.loss_sum.data.fill_(NAN)
                out.metrics["entropy"].fill_(NAN)
            return out

    common = {
        "model": student or llama(),
        "train_dataset": rows or ROWS,
        "processing_class": tokenizer(),
        "peft_config": peft_config,
        "callbacks": callbacks,
    }
    if job == "sft":
        options.setdefault("train_sampling_strategy", "sequential")
        return Bad(args=SFTConfig(str(tmp_path), **options), **common)
    options.setdefault("shuffle_dataset", False)
    args = DistillationConfig(str(tmp_path), max_completion_length=64, **options)
    cls = fixed_completions(Bad, answers_for(ROWS, tokenizer()))
    return cls(args=args, teacher_model=teacher or llama(seed=3), **common)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same(ours, theirs):
    for name, weight in ours.items():
        assert torch.equal(weight.nan_to_num(7.0), theirs[name].nan_to_num(7.0)), name


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


class AfterSteps(TrainerCallback):
    """Keeps the weights that each step leaves."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})


class AtStep(TrainerCallback):
    """Does something between the backward of some steps and the optimizer."""

    def __init__(self, steps, act):
        self.steps, self.act = steps, act

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step in self.steps:
            self.act(model, optimizer)


@KINDS
@JOBS
def test_a_bad_row_stops_the_run_before_its_step(tmp_path, job, peft_config):
    """Row 5, in the first micro-batch of step 2: error and file name it, and the weights are those after step 1."""
    poison = {"student": poisoned(llama())} if job == "sft" else {"teacher": poisoned(llama(seed=3))}
    same = {"gradient_accumulation_steps": 2, "peft_config": peft_config, "max_grad_norm": 1.0}
    after = AfterSteps()
    trainer = build(job, tmp_path, **poison, **same, callbacks=[after])
    with pytest.raises(NonFiniteError) as stop:
        trainer.train()
    text = str(stop.value)
    objective = "cross_entropy" if job == "sft" else "divergence, beta 1.0"
    assert text.startswith(
        f"step 2: the loss of 1 of 4 rows is not finite (objective {objective}). No weight was changed."
    )
    assert '\n  row 5 of the train dataset: "5 5 5 ' in text
    path = re.search(rf"trl-opd check {job} --batch (\S+) --config", text).group(1)
    assert path == str(tmp_path / "_nonfinite_step_2.safetensors")
    step = read_step(path)
    assert step.about["job"] == job and step.about["rows"][0]["places"] == [5]
    assert sum(len(batch["input_ids"]) for batch in step.batches) == 4 and len(step.batches) == 2
    assert [p.name for p in tmp_path.iterdir() if "nonfinite" in p.name] == [path.split("/")[-1]]
    assert len(after.steps) == 1
    assert_same(after.steps[0], weights(trainer))


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@JOBS
def test_a_bad_gradient_stops_the_run_though_every_loss_is_finite(tmp_path, job, max_grad_norm):
    student = llama()
    trainer = build(job, tmp_path, student=student, max_grad_norm=max_grad_norm)
    student.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * NAN if trainer.state.global_step == 1 else g)
    with pytest.raises(NonFiniteError, match="step 2: the gradient is not finite, though every loss is; its 2 rows"):
        trainer.train()
    assert all(p.isfinite().all() for p in student.parameters())
    rows = read_step(tmp_path / "_nonfinite_step_2.safetensors").about["rows"]
    assert sorted(row["places"] for row in rows) == [[2], [3]]  # by length, as they were trained


@pytest.mark.parametrize("job, peft_config", [("sft", None), ("distill", LORA)], ids=["sft-full", "distill-lora"])
def test_a_step_that_is_left_out_did_nothing(tmp_path, job, peft_config, caplog):
    """The weights equal those of a run whose step 2 had no gradient; the loss logged is the mean of the other three."""
    same = {"peft_config": peft_config, "max_grad_norm": 1.0, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    same |= {"on_nonfinite": "skip"}
    nothing = AtStep([1], lambda model, optimizer: optimizer.zero_grad(set_to_none=True))
    after = AfterSteps()
    still = build(job, tmp_path, callbacks=[nothing, after], **same)
    still.train()
    skipped = build(job, tmp_path, bad_steps=[1], logging_steps=4, **same)
    skipped.train()
    assert skipped.state.global_step == 4
    assert_same(weights(skipped), weights(still))
    assert_same(after.steps[0], after.steps[1])
    assert any(not torch.equal(weight, after.steps[3][name]) for name, weight in after.steps[2].items())
    (log,) = [log for log in skipped.state.log_history if "loss" in log]
    first, _, third, fourth = losses(still)
    assert log["loss"] == pytest.approx((first + third + fourth) / 3, rel=1e-5)
    assert log[f"{job}/nonfinite_steps"] == 1.0 and log["entropy"] > 0
    said = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(said) == 1 and "step 2: the loss of" in said[0] and "`on_nonfinite: skip`" in said[0]
    assert not list(tmp_path.glob("_nonfinite*"))


def test_a_left_out_step_has_no_loss_in_its_log(tmp_path):
    trainer = build("sft", tmp_path, bad_steps=[1], on_nonfinite="skip")
    trainer.train()
    logs = [log for log in trainer.state.log_history if "sft/nonfinite_steps" in log]
    assert [log["sft/nonfinite_steps"] for log in logs] == [0.0, 1.0, 0.0, 0.0]
    assert ["loss" in log for log in logs] == ["grad_norm" in log for log in logs] == [True, False, True, True]


def test_skip_has_an_end(tmp_path):
    """Ten bad steps in a row are left out, the eleventh stops the run; a good one between starts the count anew."""
    trainer = build("sft", tmp_path, bad_steps=[0, *range(2, 30)], on_nonfinite="skip", max_steps=30)
    with pytest.raises(NonFiniteError, match=r"step 13: .*The 10 steps before it were like that, and left out"):
        trainer.train()
    assert (tmp_path / "_nonfinite_step_13.safetensors").exists()


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_fp16_overflow_is_the_scalers_business_and_a_bad_loss_is_not(tmp_path, on_nonfinite):
    """A gradient of inf at step 2 lowers the scale and no more; a loss of NaN at step 3 is met as everywhere."""
    student = llama()
    trainer = build("sft", tmp_path, student=student, bad_steps=[2], on_nonfinite=on_nonfinite, max_grad_norm=1.0)
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = True, "fp16"
    inf = lambda g: g * float("inf") if trainer.state.global_step == 1 else g  # noqa: E731
    student.model.norm.weight.register_hook(inf)
    before = []
    trainer.add_callback(
        AtStep([1, 2, 3], lambda model, optimizer: before.append((scaler.get_scale(), weights(trainer))))
    )
    try:
        if on_nonfinite == "stop":
            with pytest.raises(NonFiniteError, match="step 3: the loss of"):
                trainer.train()
        else:
            trainer.train()
            assert trainer.state.global_step == 4 and scaler.get_scale() == 1.0
            assert_same(before[1][1], before[2][1])  # what step 3 left
            assert trainer.state.log_history[2]["sft/nonfinite_steps"] == 1.0
    finally:
        trainer.accelerator.state._mixed_precision = "no"
    assert before[0][0] == 4.0 and all(p.isfinite().all() for p in student.parameters())
    if on_nonfinite == "stop":
        assert_same(weights(trainer), before[0][1])  # nor did step 2 move them
        assert scaler.get_scale() == 2.0


def test_ranks_with_other_numbers_of_pieces_ask_one_another_as_often(tmp_path):
    """fp16 reads the losses before the last backward: once a step, in however many pieces its micro-batches run."""
    asked = []
    for budget in (None, 33):
        trainer = build("sft", tmp_path, per_device_max_tokens=budget)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = True, "fp16"
        over_ranks, calls = trainer._over_ranks, []
        trainer._over_ranks = lambda flags, to=over_ranks, calls=calls: calls.append(flags) or to(flags)
        pieces, run = trainer._pieces, []
        trainer._pieces = lambda inputs, to=pieces, run=run: run.append(len(to(inputs))) or to(inputs)
        try:
            trainer.train()
        finally:
            trainer.accelerator.state._mixed_precision = "no"
        asked.append(len(calls))
        assert budget is None or max(run) > 1
    assert asked[0] == asked[1] == 2 * trainer.state.global_step


def test_an_overflow_that_no_scale_mends_stops(tmp_path):
    student = llama()
    trainer = build("sft", tmp_path, student=student)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    trainer.accelerator.native_amp, trainer.accelerator.state._mixed_precision = True, "fp16"
    student.model.norm.weight.register_hook(lambda g: g * float("inf"))
    try:
        with pytest.raises(NonFiniteError, match="step 1: the gradient is not finite"):
            trainer.train()
    finally:
        trainer.accelerator.state._mixed_precision = "no"


def test_a_loss_of_trls_own_code_is_watched_too(tmp_path):
    """`compute_loss_func`: the rows cannot be told apart by their tokens, so both of the micro-batch are named."""
    trainer = build("sft", tmp_path)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum() * NAN
    trainer._trl_does_it = "compute_loss_func was passed"
    with pytest.raises(NonFiniteError, match="step 1: the loss of 2 of 2 rows is not finite"):
        trainer.train()


def test_a_student_that_cannot_be_sampled_from(tmp_path):
    student = llama()
    with torch.no_grad():
        student.lm_head.weight[3] = NAN
    args = DistillationConfig(str(tmp_path), max_completion_length=4, **QUIET, max_steps=1)
    trainer = DistillationTrainer(student, llama(seed=3), args, train_dataset=ROWS, processing_class=tokenizer())
    with pytest.raises(NonFiniteError, match="step 1: the student's probabilities are not finite while it writes"):
        trainer.train()


def test_the_place_of_a_row_is_the_one_it_came_with():
    rows = Dataset.from_dict({"input_ids": [[1, 2], [], [3], [1, 2], [4, 5]], "other": list("abcde")})
    kept = rows.select([4, 2, 0, 3])  # dropped and shuffled: places stay those of the rows that were read
    assert find_rows(kept, "input_ids", [1, 2]) == [0, 3] and find_rows(kept, "input_ids", [4, 5]) == [4]
    assert find_rows(kept, "input_ids", [9]) == find_rows(kept, "prompt_ids", [3]) == find_rows(None, "x", []) == []


def test_step_files(tmp_path):
    path = str(tmp_path / "step.safetensors")
    labels = torch.tensor([[-100, 5, 6], [-100, -100, 7]])
    inner = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": labels}
    write_step(
        path, {"job": "sft"}, [inner | {"weights": torch.ones(2, dtype=torch.bfloat16)}, inner | {"teacher": inner}]
    )
    step = read_step(path)
    assert step.about == {"job": "sft"} and len(step.batches) == 2
    assert torch.equal(step.batches[1]["teacher"]["labels"], labels)
    assert step.batches[0]["trained_positions"].targets.tolist() == [5, 6, 7]
    torch.save(inner, tmp_path / "other.pt")
    (tmp_path / "text").write_text("no")
    for other in ("other.pt", "text", "none"):
        with pytest.raises(UsageError, match=f"{other} cannot be read"):
            read_step(str(tmp_path / other))
