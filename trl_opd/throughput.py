"""Tokens per second and peak memory, as they are logged: the time of training, without evaluations and saves."""

from __future__ import annotations

import resource
import sys
import time

import torch

_GIB = 2**30


class Stopwatch:
    """Seconds of training since the last log. What is not training is taken out by who does it."""

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        """Run, if it does not yet."""
        if self._since is None:
            self._since = time.perf_counter()

    def lap(self) -> float | None:
        """Seconds since `start` or the last lap, and begin the next; `None` where it does not run."""
        since, now = self._since, time.perf_counter()
        if since is None:
            return None
        self._since = now
        return now - since

    def leave_out(self, began: float) -> None:
        """Take out the time from `began` (by `time.perf_counter`), or from a lap after it, until now."""
        if self._since is not None:
            self._since += time.perf_counter() - max(began, self._since)

    def stop(self) -> None:
        self._since = None


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held, GiB: what torch has allocated on its accelerator, or on a CPU what the
    process has had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    if device.type != "cpu" and hasattr(module := getattr(torch, device.type, None), "max_memory_allocated"):
        return module.max_memory_allocated() / _GIB  # type: ignore[union-attr]
    unit = 1 if sys.platform == "darwin" else 1024  # of `ru_maxrss`
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
