"""A row as a person reads it: what is trained stands out, special tokens are visible, and the text cannot do harm."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.text import Text

from ..shown import printable, visible
from ..types import IGNORE_INDEX


@dataclass(frozen=True)
class Piece:
    """A run of tokens that are all trained or all not, and all special or all not."""

    text: str
    trained: bool
    special: bool


def pieces(tokenizer: Any, input_ids: Sequence[int], labels: Sequence[int]) -> list[Piece]:
    """A row, (T,) and (T,), decoded in runs; characters a terminal or browser would act on are shown as `\\x1b`."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(
        tokenizer.all_special_ids
    )
    marked = [(label != IGNORE_INDEX, i in special, i) for i, label in zip(input_ids, labels, strict=True)]
    runs = []
    for (trained, is_special), group in groupby(marked, key=lambda token: token[:2]):
        ids = [token[2] for token in group]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        runs.append(Piece(visible(text), trained, is_special))
    return runs


def as_terminal(row: list[Piece], longest: int | None = None) -> Text:
    """For rich: trained text is bold, underlined and between ⟦ and ⟧, so that it shows without colour too.

    A run of text over `longest` characters is shown by its two ends, with how much is left out.
    """
    text = Text()
    for trained, group in groupby(row, key=lambda piece: piece.trained):
        text.append("⟦" if trained else "")
        for piece in group:
            style = "bold underline green" if trained else "dim"
            text.append(_ends(piece.text, longest), style=f"{style} italic" if piece.special else style)
        text.append("⟧" if trained else "")
    return text


def _ends(text: str, longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"


def as_html(row: list[Piece]) -> str:
    """One row as HTML; every character of the dataset is escaped."""
    parts = []
    for piece in row:
        text = html.escape(piece.text)
        text = f'<span class="special">{text}</span>' if piece.special else text
        parts.append(f"<mark>{text}</mark>" if piece.trained else text)
    return f'<pre class="row">{"".join(parts)}</pre>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>trl-opd check</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }}
pre.row {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; color: #555; padding: .75rem;
  border: 1px solid #ccc; border-radius: .25rem; font: 14px/1.7 ui-monospace, monospace; }}
mark {{ background: #ffe9a8; color: #000; font-weight: 700; border-bottom: 3px solid #000; }}
.special {{ border: 1px solid #777; border-radius: .25rem; padding: 0 .2rem; font-size: .85em; }}
table {{ border-collapse: collapse; }}
td {{ border-top: 1px solid #ccc; padding: .3rem .8rem .3rem 0; vertical-align: top; white-space: pre-line;
  overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
<table>{findings}</table>
<h2>Samples</h2>
<p><mark>Bold, underlined text on a bar</mark> is trained; grey text is not. <span class="special">Framed</span> text is
a special token.</p>
{rows}
</body>
</html>
"""


def page(title: str, findings: Sequence[Sequence[str]], rows: Sequence[list[Piece]]) -> str:
    """A self-contained page: findings as rows of cells, then the samples. Loads nothing and runs nothing."""
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(printable(cell))}</td>" for cell in finding) + "</tr>"
        for finding in findings
    )
    shown = "\n".join(f"<h3>row {i}</h3>\n{as_html(row)}" for i, row in enumerate(rows))
    return _PAGE.format(title=html.escape(title), findings=cells, rows=shown)
