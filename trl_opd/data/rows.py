"""Rows of a dataset -> checked `Example`s. What a row must hold, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    tools = row.get("tools") or None
    if isinstance(tools, str):
        import json

        tools = json.loads(tools)
    extra: dict[str, Any] = {"tools": tools, "template_kwargs": dict(row.get("chat_template_kwargs") or {})}
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
    return Example("prompt_messages", prompt=messages, tools=row.get("tools") or None)


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
