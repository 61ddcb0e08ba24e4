"""Tokens and keys, kept out of what is printed, logged or saved. Standard library only.

What counts as one: the value of a field or flag by one of these names, of an environment variable by such a name, and
what looks like a token of the Hub.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

HIDDEN = "<hidden>"
# `eos_token`, `pad_token` and their like are tokens of a vocabulary, and no secrets
_NAME = re.compile(r"(^|_)(hub_token|auth_token|access_token|api_key|secret|password|credentials?)$|^token$", re.I)
_VARIABLE = re.compile(r"(TOKEN|API_KEY|SECRET|SECRET_KEY|ACCESS_KEY|PASSWORD)$")
_LOOKS_LIKE_ONE = re.compile(r"\bhf_[A-Za-z0-9]{16,}\b")
_SHORTEST = 8  # a shorter value would be found in words that it is not

_known: set[str] = set()  # values that were given to this process, to be found wherever they turn up


def is_secret(name: str) -> bool:
    """Whether a field, key or flag by this name holds a secret."""
    return bool(_NAME.search(name.lstrip("-").replace("-", "_")))


def remember(values: Iterable[Any]) -> None:
    """Hide these values from now on, wherever `without_secrets` meets them."""
    _known.update(value for value in values if isinstance(value, str) and len(value) >= _SHORTEST)


def found_in(value: Any) -> list[Any]:
    """The values of secret keys in a mapping, at any depth."""
    if isinstance(value, Mapping):
        inner = [found for key, part in value.items() if not is_secret(str(key)) for found in found_in(part)]
        return inner + [part for key, part in value.items() if is_secret(str(key))]
    return [found for part in value for found in found_in(part)] if isinstance(value, (list, tuple)) else []


def found_in_command(argv: Sequence[str]) -> list[str]:
    """The values of secret flags on a command line."""
    return [part.partition("=")[2] if part.startswith("--") else part for part, secret in _marked(argv) if secret]


def masked(value: Any) -> Any:
    """A copy of nested mappings and lists in which every secret reads `<hidden>`."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if is_secret(str(key)) and part is not None else masked(part) for key, part in value.items()
        }
    return [masked(part) for part in value] if isinstance(value, (list, tuple)) else value


def masked_command(argv: Sequence[str]) -> list[str]:
    """A command line in which the values of secret flags read `<hidden>`."""
    return [
        (part.partition("=")[0] + "=" + HIDDEN if part.startswith("--") else HIDDEN) if secret else part
        for part, secret in _marked(argv)
    ]


def without_secrets(text: str) -> str:
    """A text in which every secret that is known here reads `<hidden>`."""
    in_environment = {value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= _SHORTEST}
    for value in sorted(_known | in_environment, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _LOOKS_LIKE_ONE.sub(HIDDEN, text)


def _marked(argv: Sequence[str]) -> Iterable[tuple[str, bool]]:
    """Each part of a command line, and whether it holds a secret: all that follows such a flag, up to the next one."""
    hidden = False
    for part in argv:
        flag, equals, _ = part.partition("=")
        if part.startswith("--"):
            hidden = is_secret(flag)
            yield part, hidden and bool(equals)
        else:
            yield part, hidden


class SecretsStayHere:
    """Mixed into a config, before transformers': its secrets go into no pickle and no `to_dict()`.

    `Trainer` saves its arguments whole, as `training_args.bin`, with every checkpoint and pushes the file; trackers log
    `to_dict()`. Copies in memory keep the secrets, since a push needs them.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: None if is_secret(name) else masked(value) if isinstance(value, dict) else value
            for name, value in self.__dict__.items()
        }

    def __copy__(self) -> Any:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __repr__(self) -> str:
        values = masked({field.name: getattr(self, field.name, None) for field in fields(self)})  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()  # type: ignore[misc]
        return {name: masked(value) if isinstance(value, dict) else value for name, value in values.items()}
