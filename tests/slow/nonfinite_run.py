"""Four steps of two ranks, with a loss or gradient of NaN on rank 1 at step 2: what each rank saw goes to a file.

python nonfinite_run.py OUT, under torchrun or accelerate launch: both, with `on_nonfinite` stop and skip, one after the
other.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from tiny import llama, tokenizer
from training import QUIET, text_rows
from transformers import TrainerCallback

from trl_opd import SFTConfig, SFTTrainer
from trl_opd.errors import NonFiniteError

torch.set_num_threads(1)
out = sys.argv[1]


def everything(model):
    """A copy of every weight, whole where ZeRO-3 has sharded it."""
    parameters = list(model.parameters())
    if hasattr(parameters[0], "ds_shape"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            return [p.detach().clone() for p in parameters]
    return [p.detach().clone() for p in parameters]


class AfterSteps(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append(everything(model))


class Bad(SFTTrainer):
    what = ""

    def _score(self, unwrapped, inputs, positions):
        scored = super()._score(unwrapped, inputs, positions)
        if self.state.global_step == 1 and self.accelerator.process_index == 1:
            if self.what == "loss":
                scored.loss_sum.data.fill_(float("nan"))
                scored.per_token.fill_(float("nan"))
            else:
                scored.loss_sum.register_hook(lambda g: g * float("nan"))
        return scored


def case(what, policy):
    arguments = QUIET | {
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "max_steps": 4,
        "lr_scheduler_type": "constant",
        "on_nonfinite": policy,
    }
    after, error = AfterSteps(), ""
    trainer = Bad(
        model=llama(),
        args=SFTConfig(f"{out}/{what}-{policy}", **arguments),
        train_dataset=text_rows(8),
        processing_class=tokenizer(),
        callbacks=[after],
    )
    trainer.what = what
    try:
        trainer.train()
    except NonFiniteError as stopped:
        error = str(stopped)
    return {
        "error": error,
        "steps": after.steps,
        "now": everything(trainer.model),
        "skipped": [log["sft/nonfinite_steps"] for log in trainer.state.log_history if "sft/nonfinite_steps" in log],
        "layout": f"{trainer.accelerator.num_processes} {type(trainer.model_wrapped).__name__}",
    }


results = {(what, policy): case(what, policy) for what in ("loss", "gradient") for policy in ("stop", "skip")}
torch.save(results, f"{out}/{os.environ['RANK']}")
dist.barrier()
