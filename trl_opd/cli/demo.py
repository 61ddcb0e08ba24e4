"""`trl-opd demo`: needs no network, no GPU and no files."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="trl-opd demo",
        description="Trains a tiny teacher, a student on its rollouts, then distills on-policy; about two minutes.",
        epilog="examples:\n  trl-opd demo\n  trl-opd demo --output_dir runs/demo --seed 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights, the order, the sampling")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # models this small are slower on two threads than on one
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import warnings

    from trl_opd import importing

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    with importing.for_good():
        import torch

        from trl_opd.demo.pipeline import demo

    torch.set_num_threads(1)
    demo(args.output_dir, args.seed)
    return 0
