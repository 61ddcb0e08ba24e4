"""What is wrong with a file of JSON lines, by line: pyarrow says it of a block of them, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROW = 'One row a line, as in {"prompt": "2 + 2 =", "completion": "4"}'


def begins_with_a_row(path: Path) -> bool:
    """Whether the first thing in a file is a mapping or a list."""
    with open(path, "rb") as file:
        return next((line.lstrip()[:1] in (b"{", b"[") for line in file if line.strip()), False)


def first_problem(path: Path) -> str | None:
    """The first line that is no row, why, and what one looks like; `None` where every line is one."""
    try:
        with open(path, "rb") as file:
            if file.read(1) == b"[":  # a list of rows, over several lines
                file.seek(0)
                return _of_list(file.read())
            file.seek(0)
            rows = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows += 1
                    if problem := _of_row(line):
                        return f"line {number}: {problem}. {ROW}"
            return None if rows else f"it holds no row. {ROW}"
    except OSError as error:
        return f"{error.strerror}. Look at its permissions"


def _of_list(text: bytes) -> str | None:
    problem = _of_row(text, list)
    if problem:
        return f"{problem}. {ROW}, or a list of such"
    for number, row in enumerate(json.loads(text)):
        if not isinstance(row, dict):
            return f"row {number}: {_kind(row)}, not a mapping. {ROW}, or a list of such"
    return None


def _of_row(line: bytes, wanted: type = dict) -> str | None:
    try:
        text = line.decode("utf-8")
        row = json.loads(text, object_pairs_hook=_unique)
        text.encode()
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is not UTF-8"
    except UnicodeEncodeError:
        return "half of a surrogate pair (\\ud800 to \\udfff by itself), which no text may hold"
    except json.JSONDecodeError as error:
        return f"no JSON ({error.msg}, column {error.colno})"
    except (RecursionError, ValueError) as error:  # nested too deep, a number of thousands of digits, a key twice
        return "nested too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    return None if isinstance(row, wanted) else f"{_kind(row)}, not a mapping"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return row


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
