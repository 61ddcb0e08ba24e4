"""Whether a completion has the right answer: the same text, or the same mathematics as `math-verify` reads it."""

from __future__ import annotations

import importlib.util

ANSWER = "answer"  # the column of an eval row that holds it


def can_verify() -> bool:
    """Whether `math-verify` is installed (`pip install trl-opd[math]`)."""
    return importlib.util.find_spec("math_verify") is not None


def is_right(completion: str, answer: str) -> bool:
    """Whether a completion gives the answer: it is that text, or its last expression equals it (`1/2`, `0.5`)."""
    completion, answer = completion.strip(), str(answer).strip()
    if completion == answer:
        return True
    from math_verify import parse, verify

    # without their timeouts, which use signals and so only work in a main thread
    gold, found = (parse(text, parsing_timeout=None) for text in (answer, completion))
    return bool(gold) and bool(found) and verify(gold, found, timeout_seconds=None)
