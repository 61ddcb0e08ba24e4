"""What `from trl import ...` gives: TRL's classes, or ours in their places."""

from __future__ import annotations

CHOICES = ("ours", "trainers", "trl")
_PAIRS = (("SFTTrainer", "SFTConfig"), ("DistillationTrainer", "DistillationConfig"))


COPY = "-copy"  # the same checkpoint under another name


def exchange(classes: str, other_teacher: bool = False) -> None:
    """Put what `classes` names into `trl`: our trainers and configs, our trainers alone, or nothing of ours.

    With `other_teacher` a test that takes the student's checkpoint as its teacher, which ours refuse, gets a copy of it
    by another name: what such a test is about is then seen.
    """
    assert classes in CHOICES, classes
    if classes == "trl":
        return
    import trl

    import trl_opd

    for trainer, config in _PAIRS:
        for name in (trainer, config) if classes == "ours" else (trainer,):
            setattr(trl, name, getattr(trl_opd, name))
    if other_teacher:
        trl.DistillationTrainer = _with_other_teacher(trl_opd.DistillationTrainer)


def _with_other_teacher(trainer_class: type) -> type:
    class DistillationTrainer(trainer_class):
        def __init__(self, model, teacher_model=None, *args, **kwargs):
            if isinstance(model, str) and teacher_model == model:
                teacher_model += COPY
            super().__init__(model, teacher_model, *args, **kwargs)

    return DistillationTrainer
