"""The two sides of a training step: TRL's trainers and ours, on the same rows, completions and weights."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
import trl.trainer.distillation_trainer
import trl.trainer.utils
from datasets import Dataset, disable_progress_bars
from gkd import OURS, Answers, make_gkd
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    TrainerCallback,
)

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

disable_progress_bars()

SMOLLM2 = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152)
QWEN = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, layers=24),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2, layers=28),
    "7B": dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4, layers=28),
}
TINY = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, vocab_size=512)
LORA = dict(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclass(frozen=True)
class Work:
    """One row of the table. `mean` and `longest` are tokens of completions (distill) or of rows (sft), of which
    `trained` is the share that is trained."""

    job: str
    student: str
    teacher: str | None
    lora: bool
    batch: int
    accumulation: int
    mean: int
    longest: int
    trained: float = 1.0
    device: str = "cpu"
    generate: bool = False
    windows: int = 3
    compact: bool = True  # whether TRL is timed compacted too; on a GPU it compacts by itself
    gkd: bool = False  # TRL's side is its GKDTrainer
    memory: bool = True  # whether peak memory is measured too, on a CPU in a process for each side
    checkpointing: bool = False  # gradient checkpointing on a CPU; it is always on on a GPU

    @property
    def name(self) -> str:
        models = f"{self.student} ← {self.teacher}" if self.teacher else self.student
        name = f"{self.job} {models}, {'LoRA' if self.lora else 'full'}{', with generation' * self.generate}"
        name += f", against GKDTrainer, {self.batch} × {self.accumulation}" if self.gkd else ""
        return name + ", checkpointing" * self.checkpointing

    @property
    def rows(self) -> int:
        return self.batch * self.accumulation

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16


def make_model(name: str, work: Work) -> Any:
    """A model of random weights with a real one's shape."""
    torch.manual_seed(0)
    if name.startswith("SmolLM2"):
        layers = 15 if name.endswith("/2") else 30
        config = LlamaConfig(**SMOLLM2, num_hidden_layers=layers, tie_word_embeddings=True)
    elif name.startswith("tiny"):
        config = LlamaConfig(**TINY, num_hidden_layers=4 if name.endswith("teacher") else 2, tie_word_embeddings=True)
    else:
        shape = dict(QWEN[name])
        layers = shape.pop("layers")
        config = Qwen2Config(**shape, num_hidden_layers=layers, vocab_size=151936, tie_word_embeddings=name != "7B")
    with torch.device(work.device):
        return AutoModelForCausalLM.from_config(config, dtype=work.dtype)


def vocab_of(work: Work) -> int:
    return {"S": 49152, "t": 512}.get(work.student[0], 151936)


def lengths(count: int, mean: int, longest: int, rng: random.Random) -> list[int]:
    """Log-normal lengths (sigma 0.8) with about this mean."""
    middle = mean * 2.718281828 ** (-(0.8**2) / 2)
    return [min(max(int(rng.lognormvariate(0.0, 0.8) * middle), 2), longest) for _ in range(count)]


@dataclass
class Rows:
    """What both sides train on: a dataset, and for distill the completion of each prompt."""

    dataset: Dataset
    answers: Answers = field(default_factory=dict)


def make_rows(work: Work, tok: Any, vocab_size: int) -> Rows:
    rng, count = random.Random(1), work.rows * work.windows
    written = lengths(count, work.mean, work.longest, rng)
    ids = lambda n: [rng.randrange(10, vocab_size) for _ in range(n)]  # noqa: E731  above all stop tokens
    if work.job == "sft":
        rows = []
        for length in written:
            trained = max(int(length * work.trained), 1)
            row = [*ids(length - 1), tok.eos_token_id]
            rows.append({"input_ids": row, "labels": [-100] * (length - trained) + row[-trained:]})
        return Rows(Dataset.from_list(rows))
    prompts = [" ".join(f"t{i}" for i in ids(rng.randint(15, 45))) for _ in range(count)]
    answers = {
        tuple(tok(prompt)["input_ids"]): [*ids(length - 1), tok.eos_token_id]
        for prompt, length in zip(prompts, written, strict=True)
    }
    return Rows(Dataset.from_list([{"prompt": prompt} for prompt in prompts]), answers)


class Clock(TrainerCallback):
    """Seconds from the fetching of a step's rows to the end of its optimizer step."""

    def __init__(self, device: str):
        self.device, self.begin, self.seconds = device, 0.0, 0.0

    def start(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.begin


def with_answers(trainer_class: type, answers: Answers, generate: bool) -> type:
    """A trainer whose completions are given. With `generate` the student writes them all the same, token by token."""

    class Given(trainer_class):  # type: ignore[misc, valid-type]
        def _generate_single_turn(self, prompt_ids: list, *args: Any, **kwargs: Any) -> list[list[int]]:
            given = [answers[tuple(ids)] for ids in prompt_ids]
            if generate:
                written = super()._generate_single_turn(prompt_ids, *args, **kwargs)
                assert written == given, "generation did not write the completions it was given"
            return given

    return Given


def dictate(model: Any, answers: Answers, pad_token_id: int) -> None:
    """Let `model.generate` write the given completions: every other token becomes impossible."""
    following = {}
    for prompt, answer in answers.items():
        for i, token in enumerate(answer):
            following[(*prompt, *answer[:i])] = token

    def only(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -float("inf"))
        for b, row in enumerate(input_ids.tolist()):
            start = next(i for i, token in enumerate(row) if token != pad_token_id)
            forced[b, following.get(tuple(row[start:]), pad_token_id)] = 0.0
        return forced

    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    processors = inner._get_logits_processor

    def with_dictation(*args: Any, **kwargs: Any) -> Any:
        found = processors(*args, **kwargs)
        found.append(only)
        return found

    inner._get_logits_processor = with_dictation


def make_trainer(side: str, work: Work, rows: Rows, tok: Any, teacher: Any, out: str) -> Any:
    """A trainer of `ours` or of `trl` that does one step a `train()`, at learning rate 0: its weights never change."""
    ours = side == "ours"
    arguments = {
        "output_dir": out, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "bf16": work.device == "cuda", "use_cpu": work.device == "cpu", "learning_rate": 0.0, "weight_decay": 0.0,
        "gradient_checkpointing": work.checkpointing or work.device == "cuda", "max_steps": 1, "log_level": "error",
        "per_device_train_batch_size": work.batch, "gradient_accumulation_steps": work.accumulation,
        "shuffle_dataset": False,
    }  # fmt: skip
    common = {"model": make_model(work.student, work), "processing_class": tok, "train_dataset": rows.dataset}
    common["peft_config"] = LoraConfig(**LORA) if work.lora else None
    if work.job == "sft":
        trainer_class, config_class = (SFTTrainer, SFTConfig) if ours else (trl.SFTTrainer, trl.SFTConfig)
        arguments |= {"max_length": None, "train_sampling_strategy": "sequential"}
        trainer = trainer_class(args=config_class(**arguments), **common)
    elif work.gkd and not ours:
        trainer = make_gkd(common, arguments, rows.answers, teacher, work.longest, work.generate)
    else:
        trainer_class = with_answers(
            DistillationTrainer if ours else trl.DistillationTrainer, rows.answers, work.generate
        )
        config_class = DistillationConfig if ours else trl.DistillationConfig
        arguments |= {"max_completion_length": work.longest, **(OURS if work.gkd else {})}
        trainer = trainer_class(args=config_class(**arguments), teacher_model=teacher, **common)
    if work.generate:
        dictate(trainer.model, rows.answers, tok.pad_token_id)
    trainer.remove_callback(PrinterCallback)
    trainer.clock = Clock(work.device)
    trainer.add_callback(trainer.clock)
    fetch = trainer.get_batch_samples

    def timed(*args: Any, **kwargs: Any) -> Any:
        trainer.clock.start()
        return fetch(*args, **kwargs)

    trainer.get_batch_samples = timed
    trainer.all_rows = trainer.train_dataset
    return trainer


@dataclass(frozen=True)
class Step:
    """What one optimizer step took and gave."""

    seconds: float
    loss: float
    grad_norm: float


def run_step(trainer: Any, work: Work, window: int) -> Step:
    """One optimizer step on one window of rows."""
    first = window * work.rows
    trainer.train_dataset = trainer.all_rows.select(range(first, first + work.rows))
    trainer.train()
    log = next(entry for entry in reversed(trainer.state.log_history) if "loss" in entry)
    return Step(trainer.clock.seconds, log["loss"], float(log["grad_norm"]))


@contextmanager
def compacted() -> Iterator[None]:
    """TRL with its head run on trained positions only, as it does by itself where it uses Triton."""
    modules = (trl.trainer.distillation_trainer, trl.trainer.utils)
    before = [module._use_triton for module in modules]
    try:
        for module in modules:
            module._use_triton = lambda device: True
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module._use_triton = function


def make_tokenizer(vocab_size: int) -> Any:
    """`t5 t17` for the ids 5 and 17, so that every id of the model is a token."""
    vocab = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, vocab_size)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
