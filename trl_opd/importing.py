"""Imports of the large libraries, with the garbage collector out of their way."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def for_good() -> Iterator[None]:
    """Import inside: what is imported lives as long as the process, and the garbage collector never looks at it.

    Torch, transformers and TRL make about a million objects, and the collector would go through all of them again and
    again while they are made, at every full collection of a run, and at exit. It does nothing where transformers is
    there already: what a script or a notebook has made since may be garbage one day.
    """
    if "transformers" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
