"""SIGTERM and SIGINT: the step is finished, a checkpoint written, and the run ends with 143 or 130."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 3.0  # a launcher that gets a signal of the terminal's sends its processes another one


class StopAtSignal(TrainerCallback):
    """Ends training after the step in which a signal came, with a checkpoint. `signal` is what came, on any rank."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.signal = accelerator, 0
        self._came, self._at = 0, 0.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler. A second signal stops at once."""
        if self._came:
            launched = "TORCHELASTIC_RUN_ID" in os.environ
            if launched and time.monotonic() - self._at < ECHO_SECONDS:
                return
            os.write(2, b"trl-opd: stopped at once; the last checkpoint is what a new start goes on from\n")
            os._exit(128 + number)
        self._came, self._at = number, time.monotonic()
        if self.accelerator.is_main_process:
            name = signal.Signals(number).name
            os.write(2, f"\ntrl-opd: {name}: finishing this step, then saving. Again: stop at once\n".encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        came = self._came
        if self.accelerator.num_processes > 1:  # all of them stop after the same step
            flag = torch.tensor([came], device=self.accelerator.device)
            came = int(self.accelerator.gather(flag).max())
        if came:
            self.signal = came
            control.should_save = control.should_training_stop = True


@contextmanager
def heeding_signals(trainer: Any) -> Iterator[StopAtSignal]:
    """Within it a signal ends `trainer.train()` after its step; the handlers before are there again after it."""
    callback = StopAtSignal(trainer.accelerator)
    trainer.add_callback(callback)
    heeded = SIGNALS if threading.current_thread() is threading.main_thread() else ()  # Python allows no other
    before = {number: signal.signal(number, callback.note) for number in heeded}
    try:
        yield callback
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        trainer.remove_callback(callback)
        sys.stderr.flush()
