"""How an old key becomes one of today: what a rule sees, what it gives, and the kinds of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from .data.mixture import Mixture
from .errors import UsageError
from .shown import excerpt

SECRET = "hub_token"  # never printed


@dataclass(frozen=True)
class Became:
    """Today's keys of an old one, environment variables, and a note (the reason, where there are neither)."""

    values: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    env: dict[str, str] = field(default_factory=dict)


class Reading:
    """A copy of a recipe and a command line on its way to today's keys, the `rows` of the table, and what is to be put
    into the `environment`; `chatml`: a tokenizer without a template gets one, as then."""

    def __init__(self, job: str, recipe: dict[str, Any], argv: Sequence[str]):
        self.job, self.recipe, self.argv = job, dict(recipe), list(argv)
        self.rows: list[tuple[str, str]] = []
        self.mixture: Mixture | None = None
        self.tokenizer: str | None = None
        self.environment: dict[str, str] = {}
        self.chatml = False

    def flags(self) -> list[str]:
        """Names of the flags on the command line, with underscores."""
        return [_flag(part) for part in self.argv if part.startswith("--")]

    def typed(self, name: str, take: bool = False) -> Any:
        """What follows a flag, last one first: `True`, a text or texts; `None` without it. `take` removes it."""
        value, rest, i = None, [], 0
        while i < len(self.argv):
            end = i + 1
            while end < len(self.argv) and not self.argv[end].startswith("--"):
                end += 1
            part, after = self.argv[i], self.argv[i + 1 : end]
            if part.startswith("--") and _flag(part) == name:
                texts = ([part.split("=", 1)[1]] if "=" in part else []) + after
                value = True if not texts else texts[0] if len(texts) == 1 else texts
            else:
                rest += [part, *after]
            i = end
        if take:
            self.argv = rest
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = self.typed(name)
        value = self.recipe.get(name) if value is None else value
        return default if value is None else value

    def asked(self, *names: str) -> bool:
        return any(self.get(name) is not None for name in names)

    def put(self, name: str, value: Any) -> None:
        """Another value for a key of today, wherever it was set."""
        self.typed(name, take=True)
        self.recipe[name] = value

    def say(self, key: str, text: str, value: Any = None) -> None:
        shown = key if value is None else f"{key}: {value}"
        self.rows.append((shown if len(shown) <= 48 else shown[:45] + "...", text))

    def apply(self, rules: dict[str, Rule]) -> bool:
        """Every old key by its rule. Returns whether there was one."""
        found = [key for key in dict.fromkeys([*self.recipe, *self.flags()]) if key in rules]
        for key in found:
            by_hand = self.typed(key, take=True)
            in_recipe = self.recipe.pop(key, None)
            value = in_recipe if by_hand is None else by_hand
            if value is not None:
                self._settle(key, value, rules[key](self, key, value), typed=by_hand is not None)
        return bool(found)

    def _settle(self, key: str, value: Any, became: Became, typed: bool) -> None:
        if SECRET in became.values:
            value = None
        said = []
        for new, new_value in became.values.items():
            in_recipe = self.recipe.get(new)
            other = self.typed(new)
            if other is None and not typed and _holds(in_recipe):
                other = in_recipe
            if isinstance(new_value, dict) and isinstance(in_recipe, dict):
                new_value = {**in_recipe, **new_value} if typed else {**new_value, **in_recipe}
            elif other is not None:
                self.say(key, f"not used: {_pair(new, other)} is set", value)
                return
            self.recipe[new] = new_value
            said.append(_pair(new, new_value))
        for name, text in became.env.items():
            self.environment[name] = text
            said.append(f"environment variable `{name}={text}`")
        self.say(key, "; ".join(filter(None, [", ".join(said), became.note])), value)


Rule = Callable[[Reading, str, Any], Became]


def _flag(part: str) -> str:
    return part[2:].split("=", 1)[0].replace("-", "_")


def _pair(key: str, value: Any) -> str:
    return f"`{key}`" if key == SECRET else f"`{key}: {value}`"


def _holds(value: Any) -> bool:
    """Whether today's key keeps an old one out: `warmup_steps: 0` never kept a `warmup_ratio` out."""
    return value is False or value not in (None, 0)


# --- kinds of rules --------------------------------------------------------------------------------------------------


def renamed(new: str, note: str = "") -> Rule:
    return lambda reading, key, value: Became({new: value}, note)


def unused(why: str) -> Rule:
    return lambda reading, key, value: Became(note=f"not used: {why}")


def environment(name: str) -> Rule:
    def rule(reading: Reading, key: str, value: Any) -> Became:
        if isinstance(value, (dict, list)):
            raise UsageError(f"{key} is {excerpt(str(value))[1:-1]}; it must be text.")
        return Became(env={name: str(value)})

    return rule


def where_true(values: dict[str, Any], note: str = "", off: str = "that is how it is without it") -> Rule:
    """Today's keys where the old one is true; nothing where it is false."""
    return lambda reading, key, value: Became(values, note) if is_true(value) else Became(note=f"not used: {off}")


def within(new: str, name: str) -> Rule:
    """A key that is one of a mapping today."""
    return lambda reading, key, value: Became({new: {name: parsed(value)}})


def is_true(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "1", "yes", "y", "t")


def parsed(value: Any) -> Any:
    """A typed text as YAML reads it."""
    return yaml.safe_load(value) if isinstance(value, str) else value


def listed(value: Any) -> list:
    value = parsed(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]
