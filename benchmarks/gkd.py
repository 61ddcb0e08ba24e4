"""TRL's GKDTrainer as the other side of a distillation step.

Its loss and gradients are those of DistillationTrainer, with no factor between them, where

- ours has `beta` 0.5, its default (`beta` means the same in both), and `temperature` 1: its own 0.9 acts on sampling
  alone, since its `compute_loss` does not hand it on to the loss;
- each row of the dataset holds the completion that the student is made to write: its loss is divided by the dataset's
  count of completion tokens, on-policy too, ours by the count of those that were written;
- `lmbda` is 1, or 0 where nothing is generated: it then trains the dataset's completions, the same ones. At its default
  of 0.5 it would draw one of the two for every micro-batch.

It generates for a micro-batch at a time, where the other trainers do for a whole step, and without a cache of keys and
values where gradient checkpointing is on, as it is by default.
"""

import copy
from typing import Any

from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer

Answers = dict[tuple[int, ...], list[int]]  # the completion of each prompt, in ids

OURS = {"beta": 0.5, "temperature": 1.0}  # what our side is set to beside it
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"  # the contents' ids and nothing else


def conversations(answers: Answers, tok: Any) -> Dataset:
    """The rows its collator wants: it reads the prompt's ids back from them, and the answer's as labels."""
    rows = []
    for pair in answers.items():
        texts = [" ".join(tok.convert_ids_to_tokens(list(ids))) for ids in pair]
        messages = zip(("user", "assistant"), texts, strict=True)
        rows.append({"messages": [{"role": role, "content": text} for role, text in messages]})
    return Dataset.from_list(rows)


def checked(answers: Answers) -> type[GKDTrainer]:
    """A GKDTrainer that is sure to train the completions it was given: those ids, and no other label."""

    class Checked(GKDTrainer):
        @staticmethod
        def generate_on_policy_outputs(*args: Any) -> Any:
            ids, mask, labels = GKDTrainer.generate_on_policy_outputs(*args)  # (B, T) all three
            for row, kept, label in zip(ids, mask.bool(), labels, strict=True):
                prompt = tuple(row[kept & (label == -100)].tolist())
                written = label[label != -100].tolist()
                assert written == answers[prompt], "GKDTrainer did not write the completion it was given"
            return ids, mask, labels

    return Checked


def make_gkd(
    common: dict[str, Any], arguments: dict[str, Any], answers: Answers, teacher: Any, longest: int, generate: bool
) -> GKDTrainer:
    """`common` and `arguments` are what every side gets: model, tokenizer and rows, and the sizes of a step."""
    tok = copy.deepcopy(common["processing_class"])
    tok.chat_template = TEMPLATE
    common["model"].generation_config.eos_token_id = tok.eos_token_id  # it takes no stop token from its tokenizer
    args = GKDConfig(max_new_tokens=longest, lmbda=float(generate), train_sampling_strategy="sequential", **arguments)
    rows = {"processing_class": tok, "train_dataset": conversations(answers, tok)}
    return checked(answers)(args=args, teacher_model=teacher, **common | rows)
