"""Teacher and student must mean the same token by the same id, and must be two models."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..teachers.local import shares_parameters

_SHOWN = 5


def check_not_the_same(student: nn.Module | str, teacher: nn.Module | str, *, knows_more: bool = False) -> None:
    """Raise `ValueError` where the teacher is the student itself, or holds its weights (a LoRA student's base).

    The student's checkpoint, loaded a second time, is one that `knows_more` at another revision or by its own prompt.
    """
    if isinstance(student, str) and isinstance(teacher, str):
        if os.path.realpath(student) == os.path.realpath(teacher) and not knows_more:
            raise ValueError(
                f"Student and teacher are both {student}: the divergence is 0 and nothing is learned. Set "
                "`teacher_model_name_or_path` to another model, `teacher_model_revision` to another revision, or "
                "`teacher_prompt_column` to show the teacher more."
            )
        return
    if isinstance(student, str) or isinstance(teacher, str):
        return
    if student is teacher or shares_parameters(student, teacher):
        raise ValueError(
            "The teacher is the student's own object (or holds its weights), so training would move both and the "
            "divergence could only say 0. Load the teacher a second time: teacher_model=<path>."
        )


def check_token_ids(student: Any, teacher: Any) -> None:
    """Compare two tokenizers' token -> id maps. Raises `ValueError` with the first five ids that differ.

    Tokens that only one of them knows, at an id that the other does not use, are no difference.
    """
    student_ids, teacher_ids = student.get_vocab(), teacher.get_vocab()
    by_id = {i: token for token, i in teacher_ids.items()}
    wrong = sorted(
        (i, token, by_id.get(i))
        for token, i in student_ids.items()
        if by_id.get(i, token) != token or teacher_ids.get(token, i) != i
    )
    if not wrong:
        return
    lines = [
        f"  id {i}: student {token!r}, teacher {'nothing' if other is None else repr(other)}"
        for i, token, other in wrong[:_SHOWN]
    ]
    raise ValueError(
        f"Student and teacher do not share a tokenizer: {len(wrong):,} of {len(student_ids):,} token ids differ.\n"
        + "\n".join(lines)
        + "\nThe divergence compares ids one by one, so it would be taken between different tokens. Choose a teacher "
        "of the student's own family."
    )


def shared_token_ids(student: Any, teacher: Any, student_size: int, teacher_size: int) -> int | torch.Tensor | None:
    """Ids that mean the same token in both tokenizers, where the heads have different numbers of ids: the first so
    many, or sorted ids (S,). `None` where the heads are of one size: all ids are compared, padding of the vocabulary
    too.

    A vocabulary padded to another multiple (Qwen2.5: 151,936 and 152,064) shares its real tokens. Raises `ValueError`
    where nothing is shared.
    """
    if student_size == teacher_size:
        return None
    theirs = teacher.get_vocab()
    ids = sorted(i for token, i in student.get_vocab().items() if theirs.get(token) == i)
    ids = [i for i in ids if i < min(student_size, teacher_size)]
    if not ids:
        raise ValueError(
            "Student and teacher have no token id in common. Choose a teacher of the student's own family."
        )
    return len(ids) if ids[-1] == len(ids) - 1 else torch.tensor(ids)
