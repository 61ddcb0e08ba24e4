"""What the tests of the Trainer's features share: one small run of either job, full or with LoRA."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from tiny import qwen3, tokenizer
from training import QUIET, Gradients, answers_for, fixed_completions, text_rows

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

JOBS = ("sft", "distill")
MODELS = ("full", "lora")
FEW = {"max_steps": 1, "per_device_train_batch_size": 4}


def lora():
    """A config of its own for every model: peft writes the names of one model's layers into it."""
    return LoraConfig(
        r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )


def each(name, jobs=JOBS, models=MODELS, how="tested"):
    """Run a test in these jobs and models, and note that it shows the feature in each of them."""

    def marked(test):
        test = pytest.mark.parametrize("model", models)(pytest.mark.parametrize("job", jobs)(test))
        return pytest.mark.feature(name, how=how)(test)

    return marked


def trainer_of(
    job,
    model,
    folder,
    *,
    student=None,
    teacher=None,
    rows=None,
    eval_rows=None,
    callbacks=(),
    fixed=True,
    peft_config=None,
    trainer_class=None,
    optimizers=(None, None),
    kwargs=None,
    **options,
):
    """A trainer on 4 rows, or those given. Distillation takes the rows' own completions for the student's (`fixed`),
    or samples. `kwargs` go to the constructor, `options` to the config."""
    rows = text_rows(4) if rows is None else rows
    torch.manual_seed(0)  # LoRA's first weights
    common = {
        "model": qwen3() if student is None else student,
        "train_dataset": rows,
        "eval_dataset": eval_rows,
        "processing_class": tokenizer(),
        "peft_config": (peft_config or lora()) if model == "lora" else None,
        "callbacks": list(callbacks),
        "optimizers": optimizers,
        **(kwargs or {}),
    }
    options = QUIET | FEW | options
    if job == "sft":
        return (trainer_class or SFTTrainer)(args=SFTConfig(str(folder), **options), **common)
    trainer_class = trainer_class or DistillationTrainer
    if fixed:
        trainer_class = fixed_completions(trainer_class, answers_for(rows, tokenizer()))
    if "completion" in rows.column_names and options.get("lmbda", 1.0) == 1.0:
        common["train_dataset"] = rows.remove_columns("completion")
    own = options.get("teacher_kind", "model") == "model"
    return trainer_class(
        teacher_model=(teacher or qwen3(seed=1, hidden=48)) if own else None,
        args=DistillationConfig(str(folder), **{"max_completion_length": 8} | options),
        **common,
    )


def logs(trainer, name="loss"):
    """The logs of steps, or those that hold `name`."""
    return [log for log in trainer.state.log_history if name in log]


def trained(job, model, folder, **kwargs):
    """A run; the trainer with the gradients of each step in `gradients`."""
    recorder = Gradients()
    trainer = trainer_of(job, model, folder, **kwargs | {"callbacks": [recorder, *kwargs.get("callbacks", ())]})
    trainer.train()
    trainer.gradients = recorder.steps
    return trainer
