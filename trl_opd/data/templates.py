"""Chat templates: a conversation -> its text, and the spans of that text which the assistant must write.

The spans come from rendering turn by turn, each rendering a prefix of the next, so any template works; nothing is
looked up by token id, so text that looks like a special token changes no label.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..types import Message
from .rows import BadRow

Span = tuple[int, int]
_EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")
_EMPTY_THINK_AT_END = re.compile(r"<think>\s*</think>\s*\Z")


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, generation_prompt: bool = False, **kwargs: Any
) -> str:
    """The text of a conversation. Raises `BadRow` with the template's own words where it refuses the messages."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
        )
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise BadRow(f"the chat template refuses it: {error}", "messages", roles, "turns it accepts") from error


def assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], trained: Collection[int], **kwargs: Any
) -> tuple[str, list[Span]]:
    """The conversation's text and, for each trained message, the span from its first written character to the end of
    its stop token. The header, an injected empty think block, a prefilled `<think>` and the newline after the stop
    token are outside. Raises `BadRow` where the template drops or rewrites what the row asks to train.
    """
    text = render(tokenizer, messages, **kwargs)
    specials = special_tokens(tokenizer)
    spans = []
    for i in sorted(trained):
        begin = _prefix_length(_rendered(tokenizer, messages, i, kwargs), text, specials)
        end = _prefix_length(_rendered(tokenizer, messages, i + 1, kwargs), text, specials)
        content = messages[i]["content"].strip()
        if i:  # what the prompt of this turn already holds at inference
            asked = render(tokenizer, messages[:i], generation_prompt=True, **kwargs)
            header = max(_common(asked, text), begin)
            at = _find_content(content, text, begin, header, end)
            start = _written_from(text, begin, header, at)
        else:  # no template renders a conversation of nothing
            start = at = _find_content(content, text, begin, end, end)
        spans.append((start, _stop(text, at + len(content), end, specials)))
    return text, spans


_WAY_OUT = (
    "a template that keeps every turn (`chat_template_path`), or `train_on: last_assistant`, or rows that end at "
    "the turn to train"
)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Message], n: int, kwargs: Any) -> str:
    return render(tokenizer, messages[:n], **kwargs) if n else ""


def _prefix_length(part: str, text: str, specials: list[str]) -> int:
    """How much of the whole the rendering of its first messages is. Raises `BadRow` where that rendering holds
    something that the whole has not: a later turn made the template rewrite an earlier one.

    Two things may differ: an empty think block, and the special token at the very end (a `<|return|>` that becomes
    `<|end|>`, an eos after the last turn).
    """
    common = _common(part, text)
    while block := _EMPTY_THINK.match(part, common):
        part = part[:common] + part[block.end() :]
        common = _common(part, text)
    if common < len(part):  # not inside a special token: two of them may share their `<|`
        common = min(_token_start(string, common, specials) for string in (part, text))
    rest = part[common:]
    for token in specials:
        rest = rest.replace(token, "")
    if rest.strip():
        lost = part[common:].strip()
        raise BadRow("the chat template rewrites an earlier turn once another follows", "messages", lost, _WAY_OUT)
    return common


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])


def _token_start(text: str, position: int, specials: list[str]) -> int:
    """`position`, or the start of the special token of `text` that it falls into."""
    starts = (text.find(token, max(position - len(token) + 1, 0), position + len(token) - 1) for token in specials)
    return min((at for at in starts if 0 <= at < position), default=position)


def _find_content(content: str, text: str, begin: int, header: int, end: int) -> int:
    at = text.find(content, header, end)
    if at < 0:  # a prefilled `<think>` is part of the content
        at = text.rfind(content, begin, end)
    if at < 0:
        kept = max(content.split("</think>"), key=lambda piece: (piece.strip() in text[begin:end]) * len(piece.strip()))
        lost = content.replace(kept, "", 1).strip() if kept.strip() in text[begin:end] else content
        raise BadRow("the chat template drops this text of the assistant", "messages", lost, _WAY_OUT)
    return at


def _written_from(text: str, begin: int, header: int, content: int) -> int:
    """Where the assistant starts to write: after the header, but for an injected empty think block.

    Other text between header and content is its own: a channel, its reasoning. Content before the header's end is
    what the generation prompt prefills.
    """
    if content <= header:
        return header
    between = text[header:content]
    return content if not between.strip() or _EMPTY_THINK_AT_END.search(text, begin, content) else header


def _stop(text: str, content_end: int, end: int, specials: list[str]) -> int:
    """End of the first special token after the content, or of the turn's last visible character."""
    stops = [at + len(token) for token in specials if (at := text.find(token, content_end, end)) >= 0]
    if stops:
        return min(stops)
    visible = content_end + len(text[content_end:end].rstrip())
    if end < len(text) and not text[visible:end].strip():  # the one that closes this turn differs from the last turn's
        stops = [end + len(token) for token in specials if text.startswith(token, end)]
    return max(stops, default=visible)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the tokens that the tokenizer marks as special, the eos token among them."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))
