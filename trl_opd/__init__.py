"""Supervised fine-tuning on teacher rollouts and on-policy distillation, on TRL.

`from trl_opd import SFTConfig, SFTTrainer, DistillationConfig, DistillationTrainer`: TRL's names and arguments.
Importing this package imports neither torch nor TRL; the first use of a name does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .configs import DistillationConfig, SFTConfig
    from .distillation_trainer import DistillationTrainer
    from .sft_trainer import SFTTrainer

__version__ = "0.1.0"
__all__ = ["DistillationConfig", "DistillationTrainer", "SFTConfig", "SFTTrainer"]

_HOME = {
    "SFTConfig": "configs",
    "DistillationConfig": "configs",
    "SFTTrainer": "sft_trainer",
    "DistillationTrainer": "distillation_trainer",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
