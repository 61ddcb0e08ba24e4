"""What `from trl import ...` gives: TRL's classes, or ours in their places."""

from __future__ import annotations

CHOICES = ("ours", "trainers", "trl")
_PAIRS = (("SFTTrainer", "SFTConfig"), ("DistillationTrainer", "DistillationConfig"))


def exchange(classes: str) -> None:
    """Put what `classes` names into `trl`: our trainers and configs, our trainers alone, or nothing of ours."""
    assert classes in CHOICES, classes
    if classes == "trl":
        return
    import trl

    import trl_opd

    for trainer, config in _PAIRS:
        for name in (trainer, config) if classes == "ours" else (trainer,):
            setattr(trl, name, getattr(trl_opd, name))
