"""Whole optimizer steps: trl_opd's trainers beside TRL's, on the same rows, completions and weights.

    python benchmarks/train_step.py [--device cuda] [--pairs 1] [--windows 3] [--only TEXT] [--flops]

Both sides are in this process and take turns, window by window (ABAB). Losses and gradient norms are compared on every
step that is timed; where they differ no time is printed. `compacted` is TRL with its head run on the trained positions
alone, as it does by itself on a GPU. `bound` is the time of the matrix products that no way of computing can leave out,
on this machine, with no padding. Peak memory on a CPU is that of a process with one side alone in it; on a GPU what a
step takes beside models and optimizer. Looks first whether other work is going on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import torch
from sides import Rows, Work, compacted, make_model, make_rows, make_tokenizer, make_trainer, run_step, vocab_of
from torch.utils.flop_counter import FlopCounterMode

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # of losses and gradient norms; bf16 keeps three digits

_DISTILL = {"job": "distill", "student": "SmolLM2-135M/2", "teacher": "SmolLM2-135M", "mean": 80, "longest": 256}
_WRITTEN = {**_DISTILL, "lora": False, "generate": True, "windows": 1, "compact": False}
_SFT = {"job": "sft", "student": "SmolLM2-135M", "teacher": None, "mean": 123, "longest": 512, "trained": 0.28}
CPU = [
    Work(**_DISTILL, lora=False, batch=2, accumulation=4, windows=2),
    Work(**_DISTILL, lora=True, batch=2, accumulation=4, windows=2),
    Work(**_SFT, lora=False, batch=4, accumulation=2, windows=1),
    Work(**_SFT, lora=True, batch=4, accumulation=2, windows=1),
    Work(**_WRITTEN, batch=2, accumulation=4, memory=False),
]
GKD = [  # takes long: without a cache every token that is written costs a pass over all before it
    Work(**_WRITTEN, batch=8, accumulation=1, gkd=True),
    Work(**_WRITTEN, batch=2, accumulation=4, gkd=True),
    Work(**_WRITTEN, batch=8, accumulation=1, gkd=True, checkpointing=True),
]
_GPU = {"device": "cuda", "batch": 4, "accumulation": 4, "mean": 300, "longest": 1024, "compact": False}
CUDA = [
    Work("distill", "0.5B", "1.5B", lora=False, **_GPU),
    Work("distill", "1.5B", "7B", lora=True, **_GPU),
    Work("sft", "1.5B", None, lora=True, trained=0.28, **_GPU),
]
_TINY = {**_WRITTEN, "student": "tiny", "teacher": "tiny teacher", "mean": 10, "longest": 24, "windows": 2}
TINY = [
    Work(**_TINY | {"compact": True}, batch=2, accumulation=2),
    Work(**_TINY, batch=4, accumulation=1, gkd=True),
    Work("sft", "tiny", None, lora=True, batch=2, accumulation=2, mean=20, longest=40, trained=0.3),
]
TABLES = {"cpu": CPU, "gkd": GKD, "cuda": CUDA, "tiny": TINY}

HEADER = ["work", "ours, s", "trl / ours", "compacted / ours", "bound / ours", "ours, MiB", "trl, MiB", "ours / trl"]


def products(work: Work, rows: Rows, models: tuple[Any, Any]) -> float:
    """Seconds of the matrix products of an average window: every linear layer forward, and backward where it is
    trained or where something before it is; the head at trained positions."""
    student, teacher = models
    total, trained = tokens(work, rows)
    each = max(total // work.windows // work.accumulation, 1)  # real tokens of a micro-batch
    n = max(trained // work.windows // work.accumulation, 1)
    taken = 0.0
    for model, learns in ((student, True), (teacher, False)):
        if model is None:
            continue
        head = model.get_output_embeddings()
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        for layer in layers:
            count = n if layer is head else each
            x = torch.randn(count, layer.in_features, device=work.device, dtype=work.dtype)
            g = torch.randn(count, layer.out_features, device=work.device, dtype=work.dtype)
            weight = layer.weight.detach()

            def multiply(x: Any = x, g: Any = g, weight: Any = weight, learns: bool = learns) -> None:
                x @ weight.t()
                if learns:
                    g @ weight
                    if not work.lora:
                        g.t() @ x

            taken += common.seconds(multiply, work.device)
    return taken * work.accumulation


def tokens(work: Work, rows: Rows) -> tuple[int, int]:
    """Real tokens, and trained ones, of all windows."""
    if work.job == "sft":
        labels = [label for row in rows.dataset["labels"] for label in row]
        return len(labels), sum(label != -100 for label in labels)
    written = sum(len(answer) for answer in rows.answers.values())
    return written + sum(len(prompt) for prompt in rows.answers), written


def sides_of(work: Work) -> list[str]:
    return ["ours", "trl", "compacted"] if work.compact else ["ours", "trl"]


def take_step(side: str, trainers: dict[str, Any], work: Work, window: int) -> Any:
    if side == "compacted":
        with compacted():
            return run_step(trainers["trl"], work, window)
    return run_step(trainers[side], work, window)


def require_agreement(work: Work, steps: dict[str, Any]) -> None:
    for side, step in steps.items():
        for what in ("loss", "grad_norm"):
            mine, other = getattr(steps["ours"], what), getattr(step, what)
            if abs(mine - other) > TOLERANCE[work.dtype] * abs(other):
                sys.exit(f"{work.name}: {what} is {mine:.6g} here and {other:.6g} with {side}, so no time is shown.")


def build(work: Work, scratch: str, wanted: tuple[str, ...] = ("ours", "trl")) -> tuple[dict[str, Any], Rows, Any]:
    tok = make_tokenizer(vocab_of(work))
    teacher = make_model(work.teacher, work).eval().requires_grad_(False) if work.teacher else None
    rows = make_rows(work, tok, vocab_of(work))
    return {side: make_trainer(side, work, rows, tok, teacher, f"{scratch}/{side}") for side in wanted}, rows, teacher


def measure(work: Work, pairs: int, memory: dict[str, float]) -> list[object]:
    with tempfile.TemporaryDirectory() as scratch:
        trainers, rows, teacher = build(work, scratch)
        student = make_model(work.student, work)
        sides = sides_of(work)
        require_agreement(work, {side: take_step(side, trainers, work, 0) for side in ("ours", "trl")})  # and warms up
        times: dict[str, list[float]] = {side: [] for side in sides}
        for pair in range(pairs):
            for window in range(work.windows):
                order = sides if (pair + window) % 2 == 0 else sides[::-1]
                steps = {side: take_step(side, trainers, work, window) for side in order}
                require_agreement(work, steps)
                for side, step in steps.items():
                    times[side].append(step.seconds)
        bound = products(work, rows, (student, teacher))
        if work.device == "cuda":
            memory = {side: beside(side, trainers, work) for side in ("ours", "trl")}
    mean = statistics.mean(times["ours"])  # the bound is that of an average window
    cells: list[object] = [work.name, common.spread(times["ours"])]
    cells += [common.spread(common.ratios(times["trl"], times["ours"]))]
    cells += [common.spread(common.ratios(times["compacted"], times["ours"])) if "compacted" in times else "–"]
    cells += ["–" if work.generate else f"{bound / mean:.2f}"]
    if not memory:
        return [*cells, "–", "–", "–"]
    mine, theirs = memory["ours"], memory["trl"]
    return [*cells, f"{mine:.0f}", f"{theirs:.0f}", f"{mine / theirs:.2f}"]


def flops(work: Work) -> str:
    """Floating point operations of matrix products in a step: they do not depend on what else the machine does."""
    with tempfile.TemporaryDirectory() as scratch:
        trainers, _, _ = build(work, scratch)
        counts = {}
        for side in sides_of(work):
            with FlopCounterMode(display=False) as counter:
                steps = [take_step(side, trainers, work, window) for window in range(work.windows)]
            counts[side] = counter.get_total_flops() / work.windows
            print(f"  {side}: loss {steps[0].loss:.6f}, gradient norm {steps[0].grad_norm:.6f}")
    said = ", ".join(f"{side} {count / 1e9:.1f} GFLOP a step" for side, count in counts.items())
    return f"{work.name}: {said}; trl / ours {counts['trl'] / counts['ours']:.2f}"


def growth(work: Work, turns: int = 2) -> str:
    """Our time per trained token at four times the length, and at four times the batch, over that of `work`."""
    sizes = {
        "as it is": work,
        "4 x length": replace(work, mean=4 * work.mean, longest=4 * work.longest),
        "4 x batch": replace(work, batch=4 * work.batch),
    }
    times: dict[str, list[float]] = {name: [] for name in sizes}
    with tempfile.TemporaryDirectory() as scratch:
        built = {name: build(size, f"{scratch}/{name}", ("ours",)) for name, size in sizes.items()}
        for turn in range(turns + 1):  # the first warms up
            for name, (trainers, rows, _) in built.items():
                taken = take_step("ours", trainers, sizes[name], 0).seconds
                if turn:
                    times[name].append(taken / tokens(sizes[name], rows)[1])
    base = times.pop("as it is")
    said = [f"{name}: {common.spread(common.ratios(taken, base))} times" for name, taken in times.items()]
    return f"{work.name}: {1e3 * statistics.median(base):.1f} ms a trained token; {', '.join(said)}"


def peak_of(work: Work, side: str) -> float:
    """MiB at the peak of a step, the process's (CPU) or the allocator's (GPU), with this side alone in it."""
    with tempfile.TemporaryDirectory() as scratch:
        trainers, _, _ = build(work, scratch, (side,))
        common.start_peak(work.device)
        take_step(side, trainers, work, 0)
        return common.peak(work.device) / 2**20


def beside(side: str, trainers: dict[str, Any], work: Work) -> float:
    """MiB that a step takes on the GPU beside what is there before it."""
    before = common.start_peak(work.device)
    take_step(side, trainers, work, 0)
    return (common.peak(work.device) - before) / 2**20


def in_a_process(table: str, work: Work, side: str) -> float:
    command = [sys.executable, __file__, "--table", table, "--only", work.name, "--peak-of", side]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{work.name}, {side}: the process that measures memory failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--table", choices=list(TABLES), help="default: that of the device")
    parser.add_argument("--pairs", type=int, default=1, help="times that every window is run on each side")
    parser.add_argument("--windows", type=int, help="windows of rows, a step each (default: that of the table)")
    parser.add_argument("--only", default="", help="only work of this name, or whose name has this in it")
    parser.add_argument("--flops", action="store_true", help="count operations, and measure no time")
    parser.add_argument("--growth", action="store_true", help="measure our time per token at four times the size")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    parser.add_argument("--peak-of", choices=["ours", "trl"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    name = args.table or args.device
    chosen = [work for work in TABLES[name] if work.name == args.only]
    chosen = chosen or [work for work in TABLES[name] if args.only in work.name]
    if args.windows:
        chosen = [replace(work, windows=args.windows) for work in chosen]
    if args.peak_of:
        print(json.dumps(peak_of(next(w for w in chosen if w.name == args.only), args.peak_of)))
        return
    if args.flops:
        for work in chosen:
            print(flops(work), flush=True)
        return
    busy = common.refuse_a_busy_machine(args.force)
    if args.growth:
        for work in chosen:
            print(growth(replace(work, windows=1)), flush=True)
        return
    lines = []
    for work in chosen:
        apart = work.device == "cpu" and work.memory
        memory = {side: in_a_process(name, work, side) for side in ("ours", "trl") if apart}
        lines.append(measure(work, args.pairs, memory))
        print("| " + " | ".join(map(str, lines[-1])) + " |", flush=True)
    text = f"{common.table(HEADER, lines)}\n\n{common.environment(args.device, busy)}"
    print(f"\n{text}")
    if args.write:
        common.write_table(args.write, f"train step, {name}", text)


if __name__ == "__main__":
    main()
