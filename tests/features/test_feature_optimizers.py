"""Optimizers and schedules: the step that was taken is the one that the optimizer, given our gradients, would take."""

import math

import pytest
import torch
from feature_jobs import each, logs, trained, trainer_of
from tiny import qwen3
from transformers import Adafactor


def trainable(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def steps_of(optimizer_class, start, gradients, **kwargs):
    """Parameters after the steps of another optimizer of this kind on the same gradients."""
    parameters = {name: torch.nn.Parameter(p.clone()) for name, p in start.items()}
    optimizer = optimizer_class(list(parameters.values()), lr=1e-3, **kwargs)
    for step in gradients:
        for name, gradient in step.items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def taken(job, model, folder, **options):
    """Parameters before and after two steps, with their gradients."""
    start = trainable(trainer_of(job, model, folder, **options).model)
    trainer = trained(job, model, folder, max_steps=2, lr_scheduler_type="constant", **options)
    return start, trainable(trainer.model), trainer


ADAFACTOR = {"scale_parameter": False, "relative_step": False}


@each("`optim: adamw_torch`")
def test_adamw(tmp_path, job, model):
    start, end, trainer = taken(job, model, tmp_path, optim="adamw_torch", weight_decay=0.0, adam_beta2=0.9)
    expected = steps_of(torch.optim.AdamW, start, trainer.gradients, weight_decay=0.0, betas=(0.9, 0.9))
    assert all(not torch.equal(start[name], end[name]) for name in start)
    torch.testing.assert_close(end, expected)


@each("`optim: adafactor`")
def test_adafactor(tmp_path, job, model):
    start, end, trainer = taken(job, model, tmp_path, optim="adafactor")
    torch.testing.assert_close(end, steps_of(Adafactor, start, trainer.gradients, **ADAFACTOR))
    assert any("exp_avg_sq_row" in state for state in trainer.optimizer.state.values())  # its factored second moment


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
@each("8-bit and paged optimizers (bitsandbytes)")
def test_bitsandbytes(tmp_path, job, model, optim):
    """Its states are 8-bit where they are large enough, and its steps near AdamW's."""
    student = qwen3(hidden=64, layers=1) if model == "full" else qwen3(hidden=128, layers=1)
    options = {"student": student, "weight_decay": 0.0}
    if model == "lora":
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=64, target_modules=["q_proj"], task_type="CAUSAL_LM")
    before = trainable(trainer_of(job, model, tmp_path, **options).model)
    student = qwen3(hidden=student.config.hidden_size, layers=1)
    trainer = trained(
        job, model, tmp_path, max_steps=2, lr_scheduler_type="constant", optim=optim, **options | {"student": student}
    )
    end = trainable(trainer.model)
    expected = steps_of(torch.optim.AdamW, before, trainer.gradients, weight_decay=0.0)
    kept = {s["state1"].dtype for s in trainer.optimizer.optimizer.state.values()}
    assert (torch.uint8 in kept) == ("8bit" in optim), kept
    for name, weight in end.items():
        moved = (expected[name] - before[name]).abs().mean()
        assert moved > 5e-4 or "lora_A" in name
        assert (weight - expected[name]).abs().mean() < 0.1 * moved + 1e-7, name


@each("`lr_scheduler_kwargs` (`cosine_with_min_lr`)")
def test_cosine_with_min_lr(tmp_path, job, model):
    """Four steps of half a cosine, from 1e-3 down to 4e-4: each log has the rate that its step was taken with."""
    trainer = trained(
        job, model, tmp_path, max_steps=4, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 4e-4}
    )
    expected = [4e-4 + 6e-4 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert [log["learning_rate"] for log in logs(trainer)] == pytest.approx(expected)
