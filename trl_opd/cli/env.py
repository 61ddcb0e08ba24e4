"""`trl-opd env`: what a bug report needs."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

PACKAGES = (
    "trl-opd",
    "trl",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "torch",
    "deepspeed",
    "bitsandbytes",
    "vllm",
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="trl-opd env",
        description="Versions of the packages and the devices there are.",
        epilog="examples:\n  trl-opd env\n  trl-opd env > env.txt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    print(f"python        {platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        try:
            print(f"{package:<13} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package:<13} not installed")
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"devices       {', '.join(devices) or f'CPU only, {torch.get_num_threads()} threads'}")
    return 0
