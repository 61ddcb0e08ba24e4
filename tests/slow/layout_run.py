"""One optimizer step (or one epoch) of either trainer, run alone or by torchrun: what came out goes to a file.

python layout_run.py OUT JOB FULL_OR_LORA BATCH ACCUMULATION

JOB is sft, distill, mixed (rows of the dataset among the student's, with cross-entropy and an anchor), base (the
student's base as teacher) or pieces (distill within a number of tokens).
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from peft import LoraConfig
from tiny import qwen3, tokenizer
from training import QUIET, Gradients, answers_for, fixed_completions, text_rows

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

torch.set_num_threads(1)


class Layout(Gradients):
    """Notes how the model was wrapped while training."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        super().on_pre_optimizer_step(args, state, control, model=model, **kwargs)
        self.wrapper = type(trainer.model_wrapped).__name__


out, job, kind, batch, accumulation = sys.argv[1:6]
rows, tok, recorder = text_rows(7), tokenizer(), Layout()
lora = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
arguments = QUIET | {
    "use_cpu": True,
    "per_device_train_batch_size": int(batch),
    "gradient_accumulation_steps": int(accumulation),
    "num_train_epochs": 1,
}
common = {
    "model": qwen3(),
    "processing_class": tok,
    "peft_config": lora if kind == "lora" else None,
    "callbacks": [recorder],
    "eval_dataset": rows,
}
if job == "sft":
    arguments["train_sampling_strategy"] = "sequential"
    trainer = SFTTrainer(args=SFTConfig(out + ".d", **arguments), train_dataset=rows, **common)
else:
    cls = fixed_completions(DistillationTrainer, answers_for(rows, tok))
    if job == "mixed":
        arguments |= {"lmbda": 0.5, "sft_weight": 0.3, "anchor_weight": 0.2}
    if job == "pieces":
        arguments |= {"per_device_max_tokens": 50}
    if job == "base":
        arguments |= {"teacher_kind": "base"}
    args = DistillationConfig(out + ".d", max_completion_length=64, **arguments)
    teacher = None if job == "base" else qwen3(1, hidden=48)
    trainer = cls(
        args=args,
        teacher_model=teacher,
        train_dataset=rows if job == "mixed" else rows.remove_columns("completion"),
        **common,
    )
trainer.train()
evaluated = trainer.evaluate()["eval_loss"]
asked = [getattr(trainer, "asked", [])]
if dist.is_initialized():
    asked = [None] * dist.get_world_size()
    dist.all_gather_object(asked, getattr(trainer, "asked", []))
if trainer.is_world_process_zero():
    result = {
        "world_size": trainer.accelerator.num_processes,
        "wrapper": recorder.wrapper,
        "gradients": recorder.steps,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "eval_loss": evaluated,
        "asked": asked,
    }
    torch.save(result, out)
