"""Cells of the table of layouts, one after the other in one process or in a group of them:

python layout_run.py FOLDER LAYOUT PHASE [CELL ...]

Started alone, by torchrun or by `accelerate launch`. FOLDER holds the models; what came out goes to FOLDER/LAYOUT/CELL.
PHASE is `train` (three optimizer steps from the start) or `resume` (from one of its checkpoints to the end). A cell is
named by its job, full training or LoRA, and a head that is tied to the embedding or not.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from tiny import tokenizer
from training import QUIET, text_rows
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer
from trl_opd.losses import fused

STEPS, PROCESSES = 3, int(os.environ.get("WORLD_SIZE", 1))
CELLS = {
    "sft-full-tied": {},
    "sft-lora-untied": {},
    "distill-full-untied": {},
    "distill-lora-tied": {},
    # rows of the dataset among the student's, a teacher with more ids, and a frozen copy of a student that was loaded
    # by the caller: three models
    "mixed-full-tied": {"lmbda": 0.5, "sft_weight": 0.3, "anchor_weight": 0.2},
    # the base writes half of the rows, and grades all
    "base-lora-untied": {"teacher_kind": "base", "teacher_prompt_column": "hint", "seq_kd": True, "lmbda": 0.5},
    # two optimizer steps a rollout, the resumed run starts between them; the teacher scores micro-batches at once
    "window-full-untied": {"steps_per_generation": 4, "teacher_max_tokens": 120},
    # every completion of the second step is cut, so that it trains nothing
    "empty-full-tied": {"lmbda": 0.7, "mask_truncated_completions": True, "seed": 26},
    # heads that are called, and one that is trained as a copy
    "head-lora-untied": {},
    "copy-lora-untied": {},
    # an adapter's folder, trained further
    "folder-lora-tied": {},
    "bf16-full-untied": {"bf16": True},
    # micro-batches in pieces of so many tokens, which ranks cut differently
    "pieces-full-tied": {
        "per_device_max_tokens": 40,
        "per_device_train_batch_size": 4 // PROCESSES,
        "gradient_accumulation_steps": 1,
    },
    # steps of seven rows whose micro-batches are merged, on some ranks more than on others
    "merged-full-tied": {"gradient_accumulation_steps": 4},
    "uneven-lora-tied": {"gradient_accumulation_steps": 4, "lmbda": 0.3},
}
NOT_SHARDED = ("pieces-full-tied", "merged-full-tied", "uneven-lora-tied")  # refused, or not done, when sharded
RESUMED = {name: 2 for name in list(CELLS)[:4]} | {"window-full-untied": 1}  # from the checkpoint of which step
SFT = ("sft", "head", "copy", "folder", "bf16", "merged")
# their checkpoints, and all that `save_model` would write by itself, stay in shards
IN_SHARDS = ("sft-lora-untied", "distill-full-untied")


class Watch(TrainerCallback):
    """Notes how the model is wrapped while it trains, and for how many steps."""

    def __init__(self):
        self.wrappers = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.wrappers.append(type(self.trainer.model_wrapped).__name__)


class Asking(DistillationTrainer):
    """Notes the prompts that the student is asked to go on from."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.asked = [*getattr(self, "asked", []), [tuple(ids) for ids in prompt_ids]]
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)


def adapter(job: str) -> LoraConfig:
    if job == "head":
        return LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], task_type="CAUSAL_LM")
    saved = ["lm_head"] if job == "copy" else None
    return LoraConfig(r=4, target_modules="all-linear", modules_to_save=saved, task_type="CAUSAL_LM")


def build(cell: str, folder: Path, out: Path):
    """The trainer of a cell. Generation is real, and greedy so that it does not depend on which rank writes a row."""
    job, kind, head = cell.split("-")
    rows = text_rows(7).map(lambda row: {"hint": f"Say {row['completion'][:3]}. {row['prompt']}"})
    arguments = QUIET | {
        "output_dir": str(out / "run"),
        "use_cpu": True,
        "per_device_train_batch_size": 2 // PROCESSES,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,  # two an epoch: the third is in the second one
        "save_strategy": "steps",
        "save_steps": RESUMED.get(cell, STEPS),
        "eval_on_start": head == "untied",
        "gradient_checkpointing": kind == "lora",
        "max_grad_norm": 0.5,  # some steps are clipped
        "adam_epsilon": 1e-3,  # so large that a step is a smooth function of its gradient
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        **CELLS[cell],
    }
    watch = Watch()
    common = {
        "model": str(folder / ("adapter" if job == "folder" else f"student-{head}")),
        "processing_class": tokenizer(),
        "peft_config": adapter(job) if kind == "lora" and job != "folder" else None,
        "callbacks": [watch],
        "train_dataset": rows,
        "eval_dataset": rows,
    }
    if job in SFT:
        cls, args = SFTTrainer, SFTConfig(**arguments)
    else:
        if "teacher_kind" not in arguments:
            common["teacher_model"] = str(folder / ("teacher-wide" if job == "mixed" else "teacher"))
        arguments |= {"max_completion_length": 12, "top_k": 1, "beta": 0.5, "eval_mode": "dataset"}
        cls, args = Asking, DistillationConfig(**arguments)
    if job == "mixed":  # after the arguments, so that ZeRO-3 shards it as it loads
        common["model"] = AutoModelForCausalLM.from_pretrained(common["model"])
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate takes FSDP for a thing of GPUs and would train with DDP here
        PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}
    # adapters start from this process's random numbers: every rank must still train those of rank 0
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    trainer = watch.trainer = cls(args=args, **common)
    loss_of, watch.loss_dtypes, watch.rows = trainer.compute_loss, [], []

    def compute_loss(*inputs, **options):
        loss = loss_of(*inputs, **options)
        watch.loss_dtypes.append(str(loss.dtype))
        if trainer.model.training:
            watch.rows.append(len(inputs[1]["labels"]))
        return loss

    trainer.compute_loss = compute_loss
    return trainer, watch


def of_ranks(what: list) -> list[list]:
    everywhere = [what]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, what)
    return everywhere


def run(cell: str, folder: Path, layout: str, phase: str) -> None:
    out, in_shards = folder / layout / cell, cell in IN_SHARDS
    os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT" if in_shards else "FULL_STATE_DICT"
    os.environ["ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"] = str(not in_shards).lower()
    trainer, watch = build(cell, folder, out)
    checkpoint = str(out / "run" / f"checkpoint-{RESUMED[cell]}") if phase == "resume" else None
    if layout == "one" and phase == "train":
        trainer.save_model(str(out / "start"))
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(out / phase))
    evaluated = trainer.evaluate()["eval_loss"]
    asked, rows = of_ranks(getattr(trainer, "asked", [])), of_ranks(watch.rows)
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        result = {
            "wrappers": watch.wrappers,
            "loss_dtypes": sorted(set(watch.loss_dtypes)),
            "world_size": trainer.accelerator.num_processes,
            "zero_stage": trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else 0,
            "log": [entry for entry in history if "loss" in entry],
            "eval_loss": [entry["eval_loss"] for entry in history if "eval_loss" in entry] or [evaluated],
            "asked": asked,
            "rows": rows,
        }
        (out / f"{phase}.json").write_text(json.dumps(result))
    trainer.accelerator.free_memory()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # four tokens at a time: ranks that score more of them than others call their heads more often
    fused.CPU_CHUNK_BYTES = 4 * 260 * 4 * 2
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        # plain gloo: DeepSpeed's kernels for one machine would have to be compiled first
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    place, named, step = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    for name in sys.argv[4:] or CELLS:
        run(name, place, named, step)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
