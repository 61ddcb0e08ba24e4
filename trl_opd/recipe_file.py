"""A recipe as it stands in its file: plain YAML, read without running or growing anything, or refused with the line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from .errors import UsageError

_MERGE = "tag:yaml.org,2002:merge"
MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_VALUES = 10_000  # with every alias (`*name`) counted as all that it stands for


def read_recipe(path: str) -> dict[str, Any]:
    """A YAML file that holds a mapping of texts. Raises `UsageError` naming the file, the line, and what to change."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"recipe {path}: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"recipe {path} is longer than {MAX_BYTES:,} bytes. Set `--config` to a YAML file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"recipe {path}, line {line}: a byte that is not UTF-8. Save the file as UTF-8") from error
    try:
        _check_depth(text)
        recipe = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise UsageError(f"recipe {path} is not valid YAML: {_said(error)}") from error
    except ValueError as error:  # a date or a number that YAML takes for one, and that none is
        raise UsageError(f"recipe {path} is not valid YAML: {error}. Put such a value in quotes") from error
    if not isinstance(recipe, dict) or not recipe:
        raise UsageError(f"recipe {path} holds no `key: value` lines. Set at least `output_dir: ...`")
    if _count(recipe, {}) > MAX_VALUES:
        raise UsageError(f"recipe {path} stands for more than {MAX_VALUES:,} values: write out its aliases (`*name`)")
    for key, value in recipe.items():
        if not isinstance(key, str):
            raise UsageError(f"recipe {path}: the key `{key}` is no text. Put it in quotes, or take it out")
        if not all(_is_text(text) for text in _texts([key, value])):
            what = "a character of code 0, or half of a surrogate pair"
            raise UsageError(f"recipe {path}: `{key}` holds {what}, which no text may hold. Take it out")
    return recipe


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(part)


def _is_text(text: str) -> bool:
    return "\0" not in text and not any(0xD800 <= ord(character) < 0xE000 for character in text)


def _check_depth(text: str) -> None:
    """Raise where brackets or blocks are nested so deep that composing them would not end well."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
            if depth > MAX_DEPTH:
                said = f"nested more than {MAX_DEPTH} deep"
                mark: Any = event.start_mark
                raise yaml.constructor.ConstructorError(None, None, said, mark)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1


def _count(value: Any, known: dict[int, int]) -> int:
    """How many values there are when every alias is written out; one that holds itself has no end."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = MAX_VALUES + 1  # what it is to itself
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(value)]


def _said(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the lines themselves: they may hold a token."""
    if not isinstance(error, yaml.MarkedYAMLError):
        reason = str(getattr(error, "reason", "") or error).splitlines()[0]
        return f"{reason}. Take that character out"
    mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or "it cannot be read"
    fix = "Expected is `key: value`, one a line, with quotes around what has special characters"
    if "could not determine a constructor for the tag" in problem:
        fix = "Tags (`!name`) are not supported: take it out"
    elif "appears twice" in problem:
        fix = "Take one of them out"
    elif "nested" in problem:
        fix = "A recipe is a list of keys"
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{problem}. {fix}"


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets the last of two equal keys win without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        keys = [key.value if key.tag == _MERGE else self.construct_object(key, deep=True) for key, _ in node.value]
        seen: set[Any] = set()
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if key_node.tag == _MERGE:  # `<<: *name`, which the others win over
                continue
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
