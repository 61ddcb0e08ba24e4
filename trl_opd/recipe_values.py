"""Whether the values of a recipe are of the kinds that its keys take, said before anything uses them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import UsageError
from .shown import excerpt

_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
}


def check_kinds(where: str, values: Mapping[str, Any], classes: Iterable[type]) -> None:
    """Raise `UsageError` for a value that no class has the like of in the field of its name.

    Text is left to the parser, which reads numbers out of it; a list of texts may be one text.
    """
    hints: dict[str, Any] = {}
    for cls in classes:
        known = typing.get_type_hints(cls)
        hints |= {field.name: known[field.name] for field in dataclasses.fields(cls) if field.init}
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            wanted = _wanted(hints[name])
            raise UsageError(f"{where}: `{name}` is {_shown(value)}; it must be {wanted}. {_fix(value, wanted)}")


def _fits(value: Any, hint: Any) -> bool:
    kinds, of = typing.get_args(hint), typing.get_origin(hint)
    if of in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in kinds)
    if of is typing.Literal:
        return value in kinds
    if of is list:
        return all(_fits(part, kinds[0]) for part in value) if isinstance(value, list) else isinstance(value, str)
    if hint is dict or of is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint is type(None):
        return value is None
    if hint is bool:  # 0 and 1 are what older recipes have
        return isinstance(value, (bool, str)) or (value in (0, 1) and isinstance(value, int))
    if hint is int:
        return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
    if hint is float:
        return isinstance(value, (str, int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, dict)
    return isinstance(value, (str, hint)) if isinstance(hint, type) else True


def _wanted(hint: Any) -> str:
    of, kinds = typing.get_origin(hint), typing.get_args(hint)
    if of in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_wanted(kind) for kind in kinds if kind is not type(None)))
    if of is typing.Literal:
        return " or ".join(str(kind).lower() for kind in kinds)
    if of is list:
        return f"a list, each {_wanted(kinds[0])}"
    if dataclasses.is_dataclass(hint) or of is dict:
        return _KINDS[dict]
    return _KINDS.get(hint, "text")


def _shown(value: Any) -> str:
    kind = {dict: "a mapping", list: "a list", bool: "true or false", type(None): "null"}.get(type(value))
    if value is None:
        return "null"
    text = excerpt(str(value))[1:-1]
    return f"{text}, {kind}" if kind and not isinstance(value, bool) else text.lower() if kind else text


def _fix(value: Any, wanted: str) -> str:
    if value is None:
        return "Leave the key out for its default"
    return "Put it in quotes" if "text" in wanted and not isinstance(value, (dict, list)) else "Set it so"
