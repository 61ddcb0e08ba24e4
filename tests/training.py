"""What the trainer tests share: small runs, the gradients of each optimizer step, fixed completions."""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers import TrainerCallback

QUIET = {
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_grad_norm": 0.0,
    "learning_rate": 1e-3,
}

LENGTHS = (1, 40, 3, 25, 7, 12, 2)


class Gradients(TrainerCallback):
    """Keeps a copy of every trainable parameter's gradient, and its norm, before each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})


def assert_same_gradients(ours, theirs, rtol: float, atol: float = 1e-7) -> None:
    assert ours and ours.keys() == theirs.keys()
    assert sum(g.abs().sum() for g in ours.values()) > 0
    for name, gradient in ours.items():
        scale = theirs[name].abs().max().item()
        torch.testing.assert_close(
            gradient, theirs[name], rtol=rtol, atol=atol + rtol * scale, msg=lambda m, n=name: n + m
        )


def text_rows(n: int = 4) -> Dataset:
    """Prompts of different lengths with completions of 1, 40, 3, 25, ... letters."""
    return Dataset.from_list(
        [{"prompt": f"{i} " * (i % 3 + 1), "completion": "abcdefgh"[i % 8] * LENGTHS[i % 7]} for i in range(n)]
    )


def fixed_completions(trainer_class, answers: dict[tuple[int, ...], list[int]]):
    """`trainer_class` with completions looked up by prompt instead of sampled; `asked` notes the prompts."""

    class Fixed(trainer_class):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, has_tool_images=False):
            self.asked = [*getattr(self, "asked", []), [tuple(ids) for ids in prompt_ids]]
            return [answers[tuple(ids)] for ids in prompt_ids]

    return Fixed


def answers_for(dataset: Dataset, tokenizer) -> dict[tuple[int, ...], list[int]]:
    return {
        tuple(tokenizer(row["prompt"])["input_ids"]): [
            *tokenizer(row["completion"])["input_ids"],
            tokenizer.eos_token_id,
        ]
        for row in dataset
    }
