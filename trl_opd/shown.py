"""Text from elsewhere, made fit to be shown: the one place. Standard library only.

Rows, completions and names of columns can hold what a terminal would act on (escape sequences), what turns the reading
order round (bidi overrides) or what cannot be encoded (lone surrogates).
"""

from __future__ import annotations

import unicodedata

from .secrets import without_secrets

_KEPT = {"\n", "\t"}  # control characters that are kept as they are
# control, format (bidi overrides among them), surrogate, private use, line and paragraph separators
_ESCAPED = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))


def visible(text: str) -> str:
    """Text in which nothing acts on a terminal or a browser: such characters are written as `\\x1b` or `\\u202e`."""
    return "".join(c if c in _KEPT or unicodedata.category(c) not in _ESCAPED else _escaped(c) for c in text)


def printable(text: str) -> str:
    """What a message is before it is printed or logged: `visible`, and without secrets."""
    return visible(without_secrets(text))


def excerpt(text: str, longest: int = 60) -> str:
    """One line of a text, as `visible` shows it and in quotes: its two ends where it is longer than `longest`."""
    shown = visible(text.replace("\n", "\\n").replace("\t", "\\t"))
    if len(shown) > longest:
        half = (longest - 3) // 2
        shown = f"{shown[:half]} … {shown[-half:]}"
    return f'"{shown}"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
