"""Rows of a dataset -> checked `Example`s. What a row must hold, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..types import Example, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
SFT_FORMATS = "`prompt` and `completion`, or `messages`, or `text`"


class BadRow(ValueError):
    """A row that cannot be trained. `reason` is short, the same for all rows of a kind, and is what is counted."""

    def __init__(self, reason: str, column: str, found: Any, expected: str):
        shown = repr(found)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"column `{column}`: {reason}; found {shown}, expected {expected}")
        self.reason = f"{reason} (column `{column}`)"


class DatasetError(ValueError):
    """What is wrong with a dataset as a whole."""


def dataset_kind(columns: Iterable[str], sample: Mapping[str, Any], *, text_field: str, prompts_only: bool) -> str:
    """Which kind of `Example` the rows are, from the column names and the first row.

    Raises `DatasetError` naming the columns that are there and those that are needed.
    """
    columns = list(columns)
    conversational = isinstance(sample.get("prompt"), (list, tuple))
    if prompts_only:
        if "prompt" in columns:
            return "prompt_messages" if conversational else "prompt"
        if "messages" in columns or "conversations" in columns:
            return "messages"
        raise DatasetError(f"The dataset has no column `prompt` (or `messages`); its columns are {columns}.")
    if "prompt" in columns and "completion" in columns:
        return "prompt_completion_messages" if conversational else "prompt_completion"
    if "messages" in columns or "conversations" in columns:
        return "messages"
    if text_field in columns:
        return "text"
    if "prompt" in columns:
        raise DatasetError(
            f"The dataset has a column `prompt` but no `completion`; its columns are {columns}. SFT needs "
            f"{SFT_FORMATS}."
        )
    raise DatasetError(f"The dataset's columns are {columns}; SFT needs {SFT_FORMATS} (`dataset_text_field` names it).")


def read_row(row: Mapping[str, Any], kind: str, *, text_field: str = "text") -> Example:
    """Check one row of a given kind. Raises `BadRow` naming the column, what was found and what is expected."""
    tools = row.get("tools") or None
    if isinstance(tools, str):
        import json

        tools = json.loads(tools)
    extra: dict[str, Any] = {"tools": tools, "template_kwargs": dict(row.get("chat_template_kwargs") or {})}
    if kind == "text":
        return Example(kind, completion=_text(row, text_field))
    if kind == "prompt":
        return Example(kind, prompt=_text(row, "prompt"))
    if kind == "prompt_messages":
        return Example(kind, prompt=_messages(row, "prompt"), **extra)
    if kind == "prompt_completion":
        return Example(kind, prompt=_text(row, "prompt", may_be_empty=True), completion=_text(row, "completion"))
    if kind == "messages":
        column = "messages" if row.get("messages") is not None or "conversations" not in row else "conversations"
        return Example(kind, completion=_with_assistant(_messages(row, column), column), **extra)
    if kind == "prompt_completion_messages":
        prompt = _messages(row, "prompt")
        completion = _with_assistant(_messages(row, "completion"), "completion")
        return Example(kind, prompt=prompt, completion=completion, **extra)
    raise AssertionError(f"unknown kind of row {kind!r}")


def read_prompt(row: Mapping[str, Any], kind: str) -> Example:
    """The prompt of a row for distillation. A `messages` row gives what comes before its last assistant turn."""
    if kind != "messages":
        return read_row(row, kind)
    column = "messages" if row.get("messages") is not None or "conversations" not in row else "conversations"
    messages = _messages(row, column)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadRow("nothing comes before the assistant turn", column, row.get(column), "a user turn")
    return Example("prompt_messages", prompt=messages, tools=row.get("tools") or None)


def _text(row: Mapping[str, Any], column: str, may_be_empty: bool = False) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise BadRow("not a text", column, value, "a text")
    if not value.strip() and not may_be_empty:
        raise BadRow("empty" if not value else "only whitespace", column, value, "a text to train or to ask")
    return value


def _messages(row: Mapping[str, Any], column: str) -> list[Message]:
    value = row.get(column)
    if not isinstance(value, (list, tuple)) or not value:
        raise BadRow("not a list of messages", column, value, 'a list of {"role": ..., "content": ...}')
    return [_message(message, column) for message in value]


def _message(message: Any, column: str) -> Message:
    if not isinstance(message, Mapping):
        raise BadRow("a message is not a mapping", column, message, '{"role": ..., "content": ...}')
    # columns of a table hold None for keys that only other rows have
    clean = {key: value for key, value in message.items() if value is not None}
    if "from" in clean and "role" not in clean:
        clean["role"] = clean.pop("from")
        clean["content"] = clean.pop("value", None)
    role = _SHAREGPT_ROLES.get(clean.get("role", ""), clean.get("role"))
    if role not in ROLES:
        raise BadRow("unexpected role", column, message.get("role", message.get("from")), f"one of {', '.join(ROLES)}")
    clean["role"] = role
    content = clean.get("content")
    if isinstance(content, (list, tuple)):
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
        if any(kind != "text" for kind in kinds):
            raise BadRow("content that is not text, for a text model", column, kinds, "text parts only")
        content = clean["content"] = "".join(part["text"] for part in content)
    if content is None and not clean.get("tool_calls"):
        raise BadRow("a message has no content", column, dict(message), "a text")
    if content is not None and not isinstance(content, str):
        raise BadRow("content is not a text", column, content, "a text")
    clean.setdefault("content", "")
    if role == "assistant" and not clean["content"].strip() and not clean.get("tool_calls"):
        raise BadRow("an assistant turn is empty", column, content, "what the assistant must write")
    return clean


def _with_assistant(messages: list[Message], column: str) -> list[Message]:
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no assistant turn", column, [m["role"] for m in messages], "a turn to train")
    return messages
