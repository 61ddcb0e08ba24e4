"""Chat templates: a conversation -> its text, and the spans of that text which the assistant must write.

The spans come from rendering turn by turn, each rendering a prefix of the next, so any template works; nothing is
looked up by token id, so text that looks like a special token changes no label.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..types import Message
from .rows import BadRow

Span = tuple[int, int]
_EMPTY_THINK = re.compile(r"\s*<think>\s*</think>\s*\Z")


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
    spans = []
    for i in sorted(trained):
        begin = _prefix(tokenizer, messages, i, text, kwargs)
        end = _prefix(tokenizer, messages, i + 1, text, kwargs)
        # what the prompt of this turn would already hold at inference
        asked = render(tokenizer, messages[:i], generation_prompt=True, **kwargs) if i else ""
        header = max(len(os.path.commonprefix([asked, text])), begin)
        spans.append((_content_start(messages[i], text, begin, header, end), _stop(tokenizer, text, messages[i], end)))
    return text, spans


def _prefix(tokenizer: PreTrainedTokenizerBase, messages: list[Message], n: int, text: str, kwargs: Any) -> int:
    """Length of the first `n` messages' rendering, which must be a prefix of the whole."""
    if n in (0, len(messages)):
        return len(text) if n else 0
    part = render(tokenizer, messages[:n], **kwargs)
    common = len(os.path.commonprefix([part, text]))
    if part[common:].strip():
        lost = part[common:].strip()
        raise BadRow("the chat template rewrites an earlier turn once another follows", "messages", lost, _WAY_OUT)
    return common


_WAY_OUT = (
    "a template that keeps every turn (`chat_template_path`), or `train_on: last_assistant`, or rows that end at "
    "the turn to train"
)


def _content_start(message: Message, text: str, begin: int, header: int, end: int) -> int:
    content = message["content"].strip()
    start = text.find(content, header, end)
    if start < 0:  # a prefilled `<think>` is part of the content: train what is left to write
        start = text.rfind(content, begin, end)
    if start < 0:
        kept = max((part for part in content.split("</think>")), key=lambda p: p.strip() in text[begin:end])
        lost = content.replace(kept, "", 1) or content
        raise BadRow("the chat template drops this text of the assistant", "messages", lost.strip(), _WAY_OUT)
    # text that the template puts before the content is the assistant's own (a channel, its reasoning), but for an
    # injected empty think block
    between = text[header:start] if start > header else ""
    return max(start, header) if _EMPTY_THINK.match(between) or not between.strip() else header


def _stop(tokenizer: PreTrainedTokenizerBase, text: str, message: Message, end: int) -> int:
    """End of the first special token after the content, or of the turn's last visible character."""
    content_end = text.rfind(message["content"].strip(), 0, end) + len(message["content"].strip())
    stops = [
        at + len(token)
        for token in special_tokens(tokenizer)
        if (at := text.find(token, content_end, end)) >= 0
    ]
    return min(stops) if stops else content_end + len(text[content_end:end].rstrip())


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the tokens that the tokenizer marks as special, the eos token among them."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))
