"""Rows as people see them: what is trained stands out, and dataset text can do nothing."""

import io

from rich.console import Console
from tiny import tokenizer

from trl_opd.checks.samples import Piece, as_html, as_terminal, page, pieces
from trl_opd.data.rows import read_row
from trl_opd.data.tokenize import Tokenization
from trl_opd.shown import visible

EVIL = "</mark></pre><script>alert(1)</script> \x1b[31mred\x1b[0m \u202eright to left [bold]no[/bold]"


def row(answer):
    tok = tokenizer()
    messages = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": answer}]
    tokenized = Tokenization(tok).row(read_row({"messages": messages}, "messages"))
    return pieces(tok, tokenized.input_ids, tokenized.labels)


def test_trained_and_special_text_are_told_apart():
    trained = [(p.text, p.special) for p in row("four") if p.trained]
    assert trained == [("four", False), ("<|im_end|>", True)]
    assert [p.text for p in row("é日😀") if p.trained and not p.special] == ["é日😀"]  # bytes are decoded together


def test_markup_and_escapes_are_text():
    shown = as_html(row(EVIL))
    assert "<script" not in shown and shown.count("<pre") == 1 and shown.count("</pre>") == 1
    assert "&lt;script&gt;" in shown and "\x1b" not in shown and "\\x1b[31m" in shown and "\\u202e" in shown
    assert shown.count("<mark>") == shown.count("</mark>") == 2  # the answer and its stop token


def test_the_terminal_shows_trained_text_without_colour():
    out = io.StringIO()
    Console(file=out, no_color=True, width=200).print(as_terminal(row(EVIL)))
    text = out.getvalue()
    assert "⟦</mark>" in text and "<|im_end|>⟧" in text and "[bold]no[/bold]" in text
    assert "\x1b[31m" not in text and "\\x1b[31m" in text


def test_long_text_is_shown_by_its_ends_where_asked():
    long = [Piece("ab" * 500, True, False)]
    assert as_terminal(long).plain == "⟦" + "ab" * 500 + "⟧"
    assert as_terminal(long, longest=8).plain == "⟦abab … 992 characters … abab⟧"


def test_the_page_is_self_contained():
    html = page("check <sft>", [("error", "rows", EVIL)], [row("four")])
    assert "<script" not in html and "http" not in html.replace("http-equiv", "")
    assert "default-src 'none'" in html and "check &lt;sft&gt;" in html
    assert "overflow-wrap: anywhere" in html  # long rows wrap


def test_newlines_and_tabs_stay():
    assert visible("a\n\tb\x07\x9b") == "a\n\tb\\x07\\x9b"
