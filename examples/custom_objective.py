"""An objective of your own: a formula, one line in the table, its name in the config.

Here the squared Hellinger distance. Everything else comes with the table: the chunked head, the gradient (by autograd,
within a chunk), one denominator a step, metrics, top-k supports. Run it on what `make demo` leaves behind:

    python examples/custom_objective.py
    python examples/custom_objective.py --student MODEL --teacher MODEL --dataset prompts.jsonl --learning_rate 1e-5
"""

import argparse

import torch
from datasets import load_dataset

from trl_opd import DistillationConfig, DistillationTrainer
from trl_opd.losses import OBJECTIVES, divergence_objective


def hellinger(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """½ Σ (√p − √q)² = 1 − Σ √(p q), one value a token: (n, V) x 2 -> (n,). In [0, 1], the same either way round.

    With p = (.5, .25, .25) and q = (.25, .25, .5): .5·(.2071² + 0 + .2071²) = .0429.
    """
    # log-probabilities come in, not probabilities: halve before exp, and √p is right where p itself would underflow
    return 0.5 * ((0.5 * log_p).exp() - (0.5 * log_q).exp()).square().sum(-1)


OBJECTIVES["hellinger"] = divergence_objective(hellinger)  # before the config is made, which looks the name up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--student", default="runs/demo/sft")
    parser.add_argument("--teacher", default="runs/demo/teacher")
    parser.add_argument(
        "--dataset", default="runs/demo/data/prompts.jsonl", help="a .jsonl file with a column `prompt`"
    )
    parser.add_argument("--output", default="runs/hellinger")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--max_completion_length", type=int, default=25)
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="for the demo's tiny model")
    args = parser.parse_args()

    config = DistillationConfig(
        args.output,
        objective="hellinger",
        max_steps=args.steps,
        per_device_train_batch_size=32,
        learning_rate=args.learning_rate,
        max_completion_length=args.max_completion_length,
        logging_steps=1,
    )
    trainer = DistillationTrainer(
        model=args.student,
        teacher_model=args.teacher,
        args=config,
        train_dataset=load_dataset("json", data_files=args.dataset, split="train"),
    )
    trainer.train()
    trainer.save_model(args.output)


if __name__ == "__main__":
    main()
