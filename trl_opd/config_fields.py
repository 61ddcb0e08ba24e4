"""Fields that both configs have, each with its help."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def balance_micro_batches() -> Any:
    return field(
        default=True,
        metadata={
            "help": "Sort the rows of an optimizer step by length before they are cut into micro-batches, each padded "
            "to its own longest row, and run short rows together while they have no more tokens than the longest ones. "
            "Changes no gradient."
        },
    )


def per_device_max_tokens() -> Any:
    return field(
        default=None,
        metadata={
            "help": "Most tokens, with the padding that is run, in one pass of training: a micro-batch with "
            "more is run in pieces of whole rows. Changes no gradient. A longer row is a piece by itself."
        },
    )


def teacher_max_tokens() -> Any:
    return field(
        default=None,
        metadata={
            "help": "Let the teacher score several micro-batches of a step at once: as many as have no more tokens "
            "than this, with the padding that is run. Its states of their trained tokens are held meanwhile. "
            "Unset: one at a time, as the student. Changes no gradient."
        },
    )


def ended_rows_leave() -> Any:
    return field(
        default=None,
        metadata={
            "help": "Rows of a rollout that have ended leave the batch while the others are written. Unset: on a CPU; "
            "on a GPU it was not measured."
        },
    )
