"""Which key an error of somebody else's code is about, where it does not say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .errors import UsageError
from .shown import excerpt

# what a wrong value makes of code that does not expect it
OTHERS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, ImportError, OSError, RuntimeError)


def blamed(error: Exception, values: Mapping[str, Any], work_without: Callable[[str], Any]) -> Exception:
    """The error to raise in the place of one of `OTHERS` that came of these values.

    One that names a key says enough. Otherwise `work_without(key)` does the same without a key, and the first key
    without which it goes well is the one.
    """
    if isinstance(error, ValueError) and any(re.search(rf"\b{re.escape(key)}\b", str(error)) for key in values):
        return error
    said = str(error).strip().rstrip(".") or type(error).__name__
    for key, value in values.items():
        try:
            work_without(key)
        except (*OTHERS, UsageError):
            continue
        return ValueError(f"{key} is {excerpt(str(value))[1:-1]}, which cannot be used: {said}. Set another value")
    return ValueError(f"these values cannot be used together: {said}. Take out what it speaks of")
