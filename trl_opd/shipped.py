"""Recipes and accelerate configs that come with the package, found by name. Standard library only."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from .errors import UsageError

FOLDER = Path(__file__).with_name("recipes")
ACCELERATE = FOLDER / "accelerate_configs"


def recipe_names() -> list[str]:
    """`Model/task/config_name.yaml` of every shipped recipe."""
    return sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*/*.yaml"))


def accelerate_names() -> list[str]:
    """What `--accelerate_config` takes besides a path: `ddp`, `zero3`, ..."""
    return sorted(path.stem for path in ACCELERATE.glob("*.yaml"))


def summary(name: str) -> str:
    """A shipped recipe in one line: its first comment."""
    with open(FOLDER / name, encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()


def find_recipe(name: str) -> str:
    """A path that exists, or else the path of the shipped recipe of that name, with or without `recipes/` and `.yaml`.

    Raises `UsageError` naming the nearest.
    """
    if os.path.exists(name):
        return name
    path = _shipped(name, recipe_names())
    if path is None:
        raise UsageError(f"recipe {name}: No such file, and {_nearest(name, recipe_names())}")
    return str(path)


def find_accelerate_config(name: str) -> str:
    """A path that exists, or else the path of a shipped accelerate config such as `zero3`. Raises `UsageError`."""
    if os.path.isfile(name):
        return name
    path = _shipped(name, accelerate_names())
    if path is None:
        raise UsageError(f"--accelerate_config {name}: No such file, and {_nearest(name, accelerate_names())}")
    return str(path)


def find_shipped(name: str) -> Path:
    """The shipped file of a recipe or accelerate config, whatever lies in the current folder. Raises `UsageError`."""
    names = [*recipe_names(), *accelerate_names()]
    path = _shipped(name, names)
    if path is None:
        raise UsageError(_nearest(name, names))
    return path


def _bare(name: str) -> str:
    """`recipes/accelerate_configs/zero3.yaml` and `zero3` are one name."""
    for prefix in ("./", "recipes/", "accelerate_configs/"):
        name = name.removeprefix(prefix)
    return name.removesuffix(".yaml")


def _shipped(name: str, names: Sequence[str]) -> Path | None:
    found = next((known for known in names if _bare(known) == _bare(name)), None)
    if found is None:
        return None
    return FOLDER / found if "/" in found else ACCELERATE / f"{found}.yaml"


def _nearest(name: str, names: Sequence[str]) -> str:
    """That nothing shipped has this name, with up to three that are near, or all of them."""
    word = Path(_bare(name)).name.removeprefix("config_")
    near = difflib.get_close_matches(name, [known for known in names if word in known], n=3, cutoff=0.0)
    near = near or difflib.get_close_matches(_bare(name), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
    return f"nothing that comes with trl-opd is called {_bare(name)}; {hint}"
