"""The head's part of a step: trl_opd's one-pass head beside TRL's chunked functions and plain full logits.

    python benchmarks/head.py [--device cuda] [--pairs 3] [--vocab 49152] [--tokens 256] [--write docs/benchmarks.md]

Half of the N positions are trained. `trl` is TRL's function called as its trainer calls it on this device (on a CPU
over all N positions), `trl compacted` the same over the trained positions only, `full` plain logits of those and
autograd, `bound` the matrix products alone that no way of computing can leave out. Gradients are compared before
anything is timed. All sides take turns in one process; the figures are medians, the ratios medians of the pairs'
ratios. Peak memory is measured in a child process a side (on a GPU by the allocator): what the pass takes beside its
inputs and, where the head trains, beside the gradient of its weight. Looks first whether other work is going on.
"""

import argparse
import multiprocessing
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import torch
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from trl_opd.losses import fused_linear_loss

SIZES = {49152: 576, 151936: 896}
Side = Callable[[], torch.Tensor]


class Inputs:
    """Random states of N positions, of which every second is trained, and two heads of one size."""

    def __init__(self, vocab: int, tokens: int, objective: str, head: str, device: str, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        width = SIZES[vocab]
        self.objective, self.device, self.trained_head = objective, device, head == "trained"
        self.hidden = rand(tokens, width).requires_grad_()
        self.weight = rand(vocab, width).mul_(width**-0.5).requires_grad_(self.trained_head)
        self.teacher_hidden, self.teacher_weight = rand(tokens, width), rand(vocab, width).mul_(width**-0.5)
        self.targets = torch.randint(vocab, (tokens,), generator=generator).to(device)
        self.index = torch.arange(0, tokens, 2, device=device)

    @property
    def kl(self) -> bool:
        return self.objective == "reverse_kl"

    def ours(self, metrics: bool = True) -> torch.Tensor:
        teacher = {"teacher_hidden": self.teacher_hidden[self.index], "teacher_weight": self.teacher_weight}
        return fused_linear_loss(
            "divergence" if self.kl else "cross_entropy",
            self.hidden[self.index],
            self.weight,
            targets=self.targets[self.index],
            metrics=metrics,
            **(teacher if self.kl else {}),
        ).loss_sum

    def trl(self, compacted: bool = False) -> torch.Tensor:
        compacted = compacted or self.device != "cpu"
        rows = self.index if compacted else torch.arange(len(self.hidden), device=self.device)
        if self.kl:
            per_token, _ = ChunkedDivergenceFunction.apply(
                self.hidden[rows], self.weight, None, self.teacher_hidden[rows], self.teacher_weight, None, 1.0
            )
        else:
            log_probs = ChunkedLogProbFunction.apply(
                self.hidden[rows],
                self.weight,
                None,
                self.targets[rows],
                1.0,
                _CHUNKED_LOGPROB_CHUNK_SIZE,
                None,
                1.0,
                ("log_probs", "entropy", "is_top1"),
            )[0]
            per_token = -log_probs
        return per_token.sum() if compacted else per_token[self.index].sum()

    def full(self) -> torch.Tensor:
        log_p = torch.log_softmax((self.hidden[self.index] @ self.weight.t()).float(), -1)
        if not self.kl:
            return -log_p.gather(1, self.targets[self.index].unsqueeze(1)).sum()
        log_q = torch.log_softmax((self.teacher_hidden[self.index] @ self.teacher_weight.t()).float(), -1)
        return (log_p.exp() * (log_p - log_q)).sum()

    def bound(self) -> None:
        """The products alone: student logits, teacher logits, gradient of the states, gradient of the head."""
        states, weight = self.hidden.detach()[self.index], self.weight.detach()
        logits = states @ weight.t()
        if self.kl:
            logits = self.teacher_hidden[self.index] @ self.teacher_weight.t()
        logits @ weight
        if self.trained_head:
            logits.t() @ states

    def step(self, side: Side) -> tuple[torch.Tensor, ...]:
        wanted = [self.hidden, self.weight] if self.trained_head else [self.hidden]
        loss = side()
        return () if loss is None else torch.autograd.grad(loss, wanted)

    def sides(self) -> dict[str, Side]:
        sides = {"ours": self.ours, "trl": self.trl, "full": self.full, "bound": self.bound}
        if self.device == "cpu":  # elsewhere TRL compacts by itself
            sides["trl compacted"] = lambda: self.trl(compacted=True)
        sides["no metrics"] = lambda: self.ours(metrics=False)
        return sides


def check_gradients(inputs: Inputs) -> float:
    """The largest relative distance between our gradients and each other side's; an error where one is off."""
    ours, worst = inputs.step(inputs.ours), 0.0
    low = inputs.hidden.dtype != torch.float32
    for name, side in inputs.sides().items():
        for mine, theirs in zip(ours, inputs.step(side), strict=False):
            distance = ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item()
            assert distance < (2e-2 if low else 1e-4), f"our gradient and that of {name} are {distance:.1e} apart"
            worst = max(worst, distance)
    return worst


def peak_memory(size: tuple, name: str) -> float:
    """MiB that one pass of a side takes beside its inputs and the weight's gradient."""
    if size[4] == "cuda":
        return _peak_of(size, name)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_peak_of, (size, name))


def _peak_of(size: tuple, name: str) -> float:
    inputs = Inputs(*size)
    before = common.start_peak(inputs.device)
    inputs.step(inputs.sides()[name])
    taken = common.peak(inputs.device) - before
    weight = inputs.weight.numel() * inputs.weight.element_size() if inputs.trained_head else 0
    return (taken - weight) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--vocab", type=int, choices=list(SIZES))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    args = parser.parse_args()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    busy = common.refuse_a_busy_machine(args.force)
    header = ["V", "N", "objective", "head", "ours, s", "trl / ours", "compacted / ours", "full / ours", "ours / bound"]
    header += ["metrics", *(f"{side}, MiB" for side in measured(args.device))]
    sizes = [
        (vocab, tokens, objective, head, args.device, dtype)
        for vocab in ([args.vocab] if args.vocab else SIZES)
        for tokens in ([args.tokens] if args.tokens else (256, 1024))
        for objective in ("reverse_kl", "cross_entropy")
        for head in ("frozen", "trained")
    ]
    # before anything is allocated here, which children would inherit and fill unseen
    memory = {size: [peak_memory(size, side) for side in measured(args.device)] for size in sizes}
    lines = []
    for size in sizes:
        lines.append(row(size, memory[size], args.pairs))
        print("| " + " | ".join(map(str, lines[-1])) + " |", flush=True)
    text = f"{common.table(header, lines)}\n\n{common.environment(args.device, busy)}"
    print(f"\n{text}")
    if args.write:
        common.write_table(args.write, f"head, {args.device}", text)


def measured(device: str) -> list[str]:
    return ["ours", "trl", "trl compacted", "full"] if device == "cpu" else ["ours", "trl", "full"]


def row(size: tuple, memory: list[float], pairs: int) -> list[object]:
    inputs = Inputs(*size)
    check_gradients(inputs)  # and warms every side up
    sides = inputs.sides()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(pairs):
        for name, side in sides.items():
            times[name].append(common.seconds(partial(inputs.step, side), inputs.device))

    def ratio(over: str, under: str = "ours") -> str:
        if over not in times:
            return "–"
        return f"{statistics.median(a / b for a, b in zip(times[over], times[under], strict=True)):.2f}"

    cells = [*size[:4], f"{statistics.median(times['ours']):.3f}", ratio("trl"), ratio("trl compacted"), ratio("full")]
    cells += [ratio("ours", "bound"), ratio("ours", "no metrics")]
    return [*cells, *(f"{mib:.0f}" for mib in memory)]


if __name__ == "__main__":
    main()
