"""Rows of a dataset -> checked `Example`s. What a row must hold, and what is said where it does not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..shown import visible
from ..types import Example, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
SFT_FORMATS = "`prompt` and `completion`, or `messages`, or `text`"


class BadRow(ValueError):
    """A row that cannot be trained. `reason` is short, the same for all rows of a kind, and is what is counted."""

    def __init__(self, reason: str, column: str, found: Any, expected: str):
        shown = repr(found)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(visible(f"column `{column}`: {reason}; found {shown}, expected {expected}"))
        self.reason = visible(f"{reason} (column `{column}`)")


class DatasetError(ValueError):
    """What is wrong with a dataset as a whole."""

    def __init__(self, message: str):
        super().__init__(visible(message))


@dataclass(frozen=True)
class RowFormat:
    """How rows are read. `prompt_column` (open-r1's `dataset_prompt_column`) names the column of the prompt, whose text
    is then one user turn; `system_prompt` goes before conversations that have none, and makes text prompts a user turn.
    """

    text_field: str = "text"
    prompt_column: str | None = None
    system_prompt: str | None = None

    @property
    def prompt(self) -> str:
        return self.prompt_column or "prompt"

    @property
    def chats(self) -> bool:
        """Whether a text prompt is a user turn."""
        return self.prompt_column is not None or self.system_prompt is not None


def dataset_kind(
    columns: Iterable[str], sample: Mapping[str, Any], row_format: RowFormat | None = None, *, prompts_only: bool
) -> str:
    """Which kind of `Example` the rows are, from the column names and the first row.

    Raises `DatasetError` naming the columns that are there and those that are needed.
    """
    columns, fmt = list(columns), row_format or RowFormat()
    text_field = fmt.text_field
    conversational = isinstance(sample.get(fmt.prompt), (list, tuple)) or fmt.chats
    if prompts_only:
        if fmt.prompt in columns:
            return "prompt_messages" if conversational else "prompt"
        if fmt.prompt_column is None and ("messages" in columns or "conversations" in columns):
            return "messages"
        raise DatasetError(f"The dataset has no column `{fmt.prompt}` (or `messages`); its columns are {columns}.")
    if fmt.prompt in columns and "completion" in columns:
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


def read_row(row: Mapping[str, Any], kind: str, row_format: RowFormat | None = None) -> Example:
    """Check one row of a given kind. Raises `BadRow` naming the column, what was found and what is expected."""
    fmt = row_format or RowFormat()
    extra: dict[str, Any] = {"tools": _tools(row), "template_kwargs": _template_kwargs(row)}
    if kind == "text":
        return Example(kind, completion=_text(row, fmt.text_field))
    if kind == "prompt":
        return Example(kind, prompt=_text(row, fmt.prompt))
    if kind == "prompt_messages":
        return Example(kind, prompt=_prompt_messages(row, fmt), **extra)
    if kind == "prompt_completion":
        return Example(kind, prompt=_text(row, fmt.prompt, may_be_empty=True), completion=_text(row, "completion"))
    if kind == "messages":
        column = _conversation_column(row)
        return Example(kind, completion=_with_system(_with_assistant(_messages(row, column), column), fmt), **extra)
    if kind == "prompt_completion_messages":
        if isinstance(row.get("completion"), str) and fmt.chats:
            completion = [{"role": "assistant", "content": _text(row, "completion")}]
        else:
            completion = _with_assistant(_messages(row, "completion"), "completion")
        return Example(kind, prompt=_prompt_messages(row, fmt), completion=completion, **extra)
    raise AssertionError(f"unknown kind of row {kind!r}")


def read_prompt(row: Mapping[str, Any], kind: str, row_format: RowFormat | None = None) -> Example:
    """The prompt of a row for distillation. A `messages` row gives what comes before its last assistant turn."""
    fmt = row_format or RowFormat()
    if kind != "messages":
        return read_row(row, kind, fmt)
    column = _conversation_column(row)
    messages = _with_system(_messages(row, column), fmt)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadRow("nothing comes before the assistant turn", column, row.get(column), "a user turn")
    return Example("prompt_messages", prompt=messages, tools=_tools(row))


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The row's tools, as a list or as the JSON of one."""
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise BadRow("no JSON", "tools", tools, "a list of tools, or its JSON") from None
    if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(t, Mapping) for t in tools)):
        raise BadRow("not a list of tools", "tools", tools, "a list of mappings, or its JSON")
    return None if tools is None else list(tools)


def _template_kwargs(row: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise BadRow("not a mapping", "chat_template_kwargs", kwargs, "names and values for the chat template")
    return {str(name): value for name, value in kwargs.items() if value is not None}


def _conversation_column(row: Mapping[str, Any]) -> str:
    return "messages" if row.get("messages") is not None or "conversations" not in row else "conversations"


def _prompt_messages(row: Mapping[str, Any], fmt: RowFormat) -> list[Message]:
    if fmt.chats and isinstance(row.get(fmt.prompt), str):
        return _with_system([{"role": "user", "content": _text(row, fmt.prompt)}], fmt)
    return _with_system(_messages(row, fmt.prompt), fmt)


def _with_system(messages: list[Message], fmt: RowFormat) -> list[Message]:
    if fmt.system_prompt is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": fmt.system_prompt}, *messages]


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
    role = clean.get("role")
    role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unexpected role", column, message.get("role", message.get("from")), f"one of {', '.join(ROLES)}")
    clean["role"] = role
    content = clean.get("content")
    if isinstance(content, (list, tuple)):
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if any(kind != "text" for kind in kinds) or len(texts) < len(kinds):
            raise BadRow("content that is not text, for a text model", column, kinds, "text parts only")
        content = clean["content"] = "".join(texts)
    calls = clean.get("tool_calls")
    if calls is not None and not (isinstance(calls, (list, tuple)) and all(isinstance(c, Mapping) for c in calls)):
        raise BadRow("not a list of calls", column, calls, 'a list of {"function": {"name": ..., "arguments": ...}}')
    if content is None and not calls:
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
