"""What each process says: one line about itself, then messages from the main process and warnings from all."""

from __future__ import annotations

import logging
import sys
from typing import Any

import datasets
import transformers
from accelerate import PartialState

from .shown import printable

logger = logging.getLogger(__name__)


def set_up_logging(args: Any, level: int = logging.INFO) -> None:
    """Messages on stderr, after a line from every process about itself; transformers and datasets by `log_level`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Printable("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    ours = logging.getLogger("trl_opd")
    ours.setLevel(level)
    logger.info(describe_process(args))
    if not PartialState().is_local_main_process:
        ours.setLevel(max(level, logging.WARNING))
    for library in (transformers, datasets):
        library.utils.logging.set_verbosity(args.get_process_log_level())


class Printable(logging.Formatter):
    """Rows of a dataset and secrets can get into any message."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def describe_process(args: Any) -> str:
    """Rank, device and precision of this process in one line; every process prints its own."""
    state = PartialState()
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    return (
        f"process rank: {state.process_index} of {state.num_processes}, device: {args.device}, n_gpu: {args.n_gpu}, "
        f"distributed training: {state.num_processes > 1} ({state.distributed_type.value}), precision: {precision}"
    )
