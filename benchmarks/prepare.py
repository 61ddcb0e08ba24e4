"""Data preparation of 20,000 rows: trl_opd's `SFTTrainer` beside TRL's, first start and second.

    python benchmarks/prepare.py [--rows 20000] [--pairs 3] [--write docs/benchmarks.md]

Both sides prepare the same file with the same tokenizer in this process, in turns; the labels are compared first (on
conversations of one turn, where both train the completion). Looks first whether other work is going on.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import common
import datasets
import trl
from tiny import qwen3, tokenizer

from trl_opd import SFTConfig, SFTTrainer

datasets.disable_progress_bars()


def write_rows(path: Path, rows: int) -> None:
    rng = random.Random(0)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "while",
        "it",
        "thinks",
        "about",
        "numbers",
        "and",
        "words",
    ]
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            said = " ".join(rng.choices(words, k=rng.randint(5, 40)))
            wrote = " ".join(rng.choices(words, k=rng.randint(5, 80)))
            prompt = [{"role": "user", "content": f"{i} {said}"}]
            row = {"prompt": prompt, "completion": [{"role": "assistant", "content": wrote}]}
            file.write(json.dumps(row) + "\n")


def prepare(side: str, path: Path, cache: Path) -> tuple[float, datasets.Dataset]:
    """Seconds from the loaded file to a trainer that is ready, and the prepared rows."""
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    trainer_class, config_class = (SFTTrainer, SFTConfig) if side == "trl_opd" else (trl.SFTTrainer, trl.SFTConfig)
    args = config_class(str(cache / "out"), report_to="none", bf16=False, use_cpu=True, max_length=2048)
    model, tok = qwen3(), tokenizer()
    begin = time.perf_counter()
    trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=tok)
    return time.perf_counter() - begin, trainer.train_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    args = parser.parse_args()
    busy = common.refuse_a_busy_machine(args.force)
    taken: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.jsonl"
        write_rows(path, args.rows)
        for pair in range(args.pairs):
            sides = ("trl", "trl_opd") if pair % 2 else ("trl_opd", "trl")
            seconds: dict[tuple[str, str], float] = {}
            prepared = {}
            for side in sides:
                cache = Path(scratch) / f"{side}-{pair}"
                seconds[side, "first"], prepared[side] = prepare(side, path, cache)
            again: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(5):  # a second start takes a few hundredths of a second: take the median of five, in turns
                for side in sides:
                    again[side].append(prepare(side, path, Path(scratch) / f"{side}-{pair}")[0])
            seconds |= {(side, "second"): statistics.median(times) for side, times in again.items()}
            compare(prepared["trl_opd"], prepared["trl"])
            for key, value in seconds.items():
                taken.setdefault(key, []).append(value)
    lines = []
    for start, digits in (("first", 1), ("second", 2)):
        theirs, ours = taken["trl", start], taken["trl_opd", start]
        lines.append([start, *(common.spread(side, digits) for side in (theirs, ours))])
        lines[-1].append(common.spread(common.ratios(theirs, ours)))
    text = f"{args.rows:,} rows, pairs: {args.pairs}.\n\n"
    text += common.table(["start", "TRL, s", "trl_opd, s", "TRL / trl_opd"], lines)
    text += f"\n\n{common.environment('cpu', busy)}"
    print(text)
    if args.write:
        common.write_table(args.write, "prepare", text)


def compare(ours: datasets.Dataset, theirs: datasets.Dataset) -> None:
    """The same ids; the same labels but for the newline after the stop token, which TRL trains and we do not."""
    for mine, other in zip(ours.select(range(200)), theirs.select(range(200)), strict=True):
        assert mine["input_ids"] == other["input_ids"], "the two sides tokenize differently"
        assert mine["labels"][:-1] == other["labels"][:-1] and mine["labels"][-1] == -100, "the labels differ"


if __name__ == "__main__":
    main()
