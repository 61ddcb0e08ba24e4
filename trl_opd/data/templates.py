"""Chat templates: a conversation -> its text, and the spans of that text which the assistant must write.

Order of trust: the template's own `{% generation %}` blocks; those of TRL's training template for the same family,
where it renders the same text; rendering turn by turn, each rendering a prefix of the next, which works for any
template; else an error. Nothing is looked up by token id, so text that looks like a special token changes no label.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..types import Message
from .rows import BadRow, DatasetError

Span = tuple[int, int]
_EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")
_EMPTY_THINK_AT_END = re.compile(r"<think>\s*</think>\s*\Z")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

MARKED = "the template's {% generation %} blocks"
BUNDLED = "the blocks of TRL's training template for the family"
TURN_BY_TURN = "rendering turn by turn"


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation: its `text`, a span for each trained message, by which `rule` they were found, whether
    every span ends with a stop token, and whether the template changed whitespace of what it trains."""

    text: str
    spans: list[Span]
    rule: str
    stopped: bool
    normalized: bool


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, generation_prompt: bool = False, **kwargs: Any
) -> str:
    """The text of a conversation. Raises `BadRow` with the template's own words where it refuses the messages, and
    `DatasetError` where there is no template."""
    if tokenizer.chat_template is None and "chat_template" not in kwargs:
        raise DatasetError(
            "The rows are conversations, and the tokenizer has no chat template. Set `chat_template` to a template, or "
            "to `chatml`, or start from a model that was trained on conversations."
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **kwargs
        )
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise BadRow(f"the chat template refuses it: {error}", "messages", roles, "turns it accepts") from error
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # what its expressions stumble on
        said = f"the chat template fails on it: {type(error).__name__}: {error}"
        raise BadRow(said, "messages", messages, "what its template was written for") from error


def assistant_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    trained: Collection[int],
    *,
    specials: Sequence[str] | None = None,
    train_empty_think: bool = False,
    **kwargs: Any,
) -> Conversation:
    """Where the trained messages are: each span from its first written character to the end of its stop token.

    The header, a prefilled `<think>`, the newline after the stop token and, unless `train_empty_think`, an injected
    empty think block are outside. Raises `BadRow`, showing the text, where the template drops or rewrites what the row
    asks to train.
    """
    text = render(tokenizer, messages, **kwargs)
    specials = special_tokens(tokenizer) if specials is None else specials
    blocks, rule = _generation_blocks(tokenizer, messages, text, kwargs)
    spans, stopped, normalized = [], True, False
    closers: Sequence[str]
    for i in sorted(trained):
        if blocks is not None:
            (begin, end), closers = blocks[i], _closers(tokenizer, text, blocks, specials)
        else:
            end, differs = _prefix_length(tokenizer, messages, i + 1, text, specials, kwargs)
            closers = specials if differs else []
        # what the prompt of this turn already holds at inference; no template renders a conversation of nothing
        asked = render(tokenizer, messages[:i], generation_prompt=True, **kwargs) if i else ""
        if blocks is None:
            # a text that begins with it to the letter has no earlier turn rewritten, and there is nothing to look for
            found = asked and text.startswith(asked) and text.find(messages[i]["content"].strip(), len(asked), end) >= 0
            begin = len(asked) if found else _prefix_length(tokenizer, messages, i, text, specials, kwargs)[0]
        header = max(_common(asked, text), begin) if i or blocks is not None else None
        at, content_end, exact = _find_content(tokenizer, messages, i, text, begin, header, end)
        start = at if header is None else _written_from(text, header, at, train_empty_think)
        calls = bool(messages[i].get("tool_calls"))
        stop, has_stop = _stop(text, content_end, end, specials, closers, calls)
        spans.append((start, stop))
        stopped, normalized = stopped and has_stop, normalized or not exact
    return Conversation(text, spans, rule, stopped, normalized)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the tokens that the tokenizer marks as special, the eos token among them."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def training_template(chat_template: str | None) -> Path | None:
    """TRL's bundled training template for the family whose own template this is: it keeps every turn."""
    return _bundled_training_templates().get(chat_template or "")


@lru_cache(maxsize=1)
def _bundled_training_templates() -> dict[str, Path]:
    spec = find_spec("trl")
    folder = (
        Path(spec.submodule_search_locations[0]) / "chat_templates"
        if spec and spec.submodule_search_locations
        else None
    )
    if folder is None or not folder.is_dir():
        return {}
    training = {path.name.removesuffix("_training.jinja"): path for path in folder.glob("*_training.jinja")}
    plain = {name: folder / f"{name}.jinja" for name in training}
    return {plain[name].read_text("utf-8"): path for name, path in training.items() if plain[name].is_file()}


def _way_out(tokenizer: PreTrainedTokenizerBase, messages: list[Message], lost: str) -> str:
    """What to set so that `lost` is kept: TRL's training template of the family where that one does."""
    path = training_template(tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None)
    kept = path is not None and "".join(lost.split()) in "".join(
        render(tokenizer, messages, chat_template=path.read_text("utf-8")).split()
    )
    template = f"`chat_template_path: {path}`, which keeps it" if kept else "a `chat_template_path` that keeps it"
    return f"{template}; or `train_on: last_assistant`; or rows that end at the turn to train"


def _generation_blocks(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str, kwargs: Any
) -> tuple[dict[int, Span] | None, str]:
    """Blocks by message, where a template marks one for each assistant turn of this very text; and the rule's name."""
    options = dict(kwargs)
    tools = options.pop("tools", None)
    template = tokenizer.get_chat_template(options.pop("chat_template", None), tools)
    rule = MARKED
    if not _GENERATION_BLOCK.search(template):
        path = training_template(template)
        if path is None:
            return None, TURN_BY_TURN
        template, rule = _read(path), BUNDLED
    try:
        rendered, indices = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **options},
        )
    except TemplateError:  # the family's training template refuses what the tokenizer's own accepts
        return None, TURN_BY_TURN
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    blocks: list[Span] = []
    for start, end in indices[0]:  # content and stop token may be two blocks that touch
        if blocks and blocks[-1][1] == start:
            blocks[-1] = (blocks[-1][0], end)
        elif start < end:
            blocks.append((start, end))
    if rendered[0] != text or len(blocks) != len(assistants):
        return None, TURN_BY_TURN
    return dict(zip(assistants, blocks, strict=True)), rule


@lru_cache(maxsize=8)
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], n: int, text: str, specials: Sequence[str], kwargs: Any
) -> tuple[int, bool]:
    """How much of the whole the rendering of its first `n` messages is, and whether it ends otherwise. Raises `BadRow`
    where it holds something that the whole has not: a later turn made the template rewrite an earlier one.

    Two things may differ: an empty think block, and the special token at the very end (a `<|return|>` that becomes
    `<|end|>`, an eos after the last turn).
    """
    if n in (0, len(messages)):
        return len(text) if n else 0, False
    part = render(tokenizer, messages[:n], **kwargs)
    common = _common(part, text)
    while block := _empty_think_at(part, common):
        part = part[: block.start()] + part[block.end() :]
        common = _common(part, text)
    if common < len(part):  # not inside a special token: two of them may share their `<|`
        common = min(_token_start(string, common, specials) for string in (part, text))
    rest = part[common:]
    for token in specials:
        rest = rest.replace(token, "")
    if rest.strip():
        lost, why = part[common:].strip(), "the chat template rewrites an earlier turn once another follows"
        raise BadRow(why, "messages", lost, _way_out(tokenizer, messages, messages[n - 1]["content"]))
    return common, bool(rest != part[common:])


def _empty_think_at(text: str, position: int) -> re.Match[str] | None:
    """An empty think block that starts at `position` or just before it: `<think>` and `<tool_call>` begin alike."""
    before = text.rfind("<", max(position - len("<think"), 0), position)
    return _EMPTY_THINK.match(text, position) or (_EMPTY_THINK.match(text, before) if before >= 0 else None)


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    low, high = 0, length  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low


def _token_start(text: str, position: int, specials: Sequence[str]) -> int:
    """`position`, or the start of the special token of `text` that it falls into."""
    starts = (text.find(token, max(position - len(token) + 1, 0), position + len(token) - 1) for token in specials)
    return min((at for at in starts if 0 <= at < position), default=position)


def _find_content(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    i: int,
    text: str,
    begin: int,
    header: int | None,
    end: int,
) -> tuple[int, int, bool]:
    """Start and end of a message's content in the text, and whether it is there to the letter.

    A template may strip it, or move newlines around `<think>`; other text that is not there raises `BadRow`.
    """
    content = messages[i]["content"]
    for wanted in (content, content.strip()):
        at = text.find(wanted, header, end) if header is not None else -1
        if at < 0:  # a prefilled `<think>` is part of the content; without a header the last match is the content
            at = text.rfind(wanted, begin, end)
            if header is not None and not text[at:header].strip():
                continue  # only the header's own newline
        if at >= 0:
            return at, at + len(wanted), wanted == content
    for low in (begin if header is None else header, begin):
        visible = [i for i in range(low, end) if not text[i].isspace()]
        wanted = "".join(content.split())
        at = "".join(text[i] for i in visible).find(wanted)
        if at >= 0:
            return visible[at], visible[at + len(wanted) - 1] + 1, False
    pieces = [piece.strip() for piece in content.split("</think>")]
    kept = max(pieces, key=lambda piece: (piece in text[begin:end]) * len(piece))
    lost = content.replace(kept, "", 1).strip() if kept and kept in text[begin:end] else content
    why = "the chat template drops this text of the assistant"
    raise BadRow(why, "messages", lost, _way_out(tokenizer, messages, lost))


def _written_from(text: str, header: int, content: int, train_empty_think: bool) -> int:
    """Where the assistant starts to write: after the header, but for an injected empty think block.

    Other text between header and content is its own: a channel, its reasoning. Content before the header's end is
    what the generation prompt prefills.
    """
    if content <= header:
        return header
    if not text[header:content].strip():
        return content
    injected = not train_empty_think and _EMPTY_THINK_AT_END.search(text, max(content - 64, 0), content)
    return content if injected else header


def _closers(
    tokenizer: PreTrainedTokenizerBase, text: str, blocks: dict[int, Span], specials: Sequence[str]
) -> list[str]:
    """Special tokens that close a turn from outside its generation block: eos, and the one after the last block."""
    last = max(end for _, end in blocks.values())
    after_last = [token for token in specials if text.startswith(token, last)]
    return after_last if not text[last + len(max(after_last, key=len, default="")) :].strip() else [tokenizer.eos_token]


def _stop(
    text: str, content_end: int, end: int, specials: Sequence[str], closers: Sequence[str], calls: bool
) -> tuple[int, bool]:
    """End of the first special token after the content, or of the turn's last visible character; and which it is.

    Where the message `calls` tools it is the last one, since special tokens may mark the calls. `closers` are tokens
    that close a turn although they stand after its `end`.
    """
    find = text.rfind if calls else text.find
    stops = [at + len(token) for token in specials if (at := find(token, content_end, end)) >= 0]
    if stops:
        return max(stops) if calls else min(stops), True
    visible = content_end + len(text[content_end:end].rstrip())
    after = [end + len(token) for token in closers if token and text.startswith(token, end)]
    if after and not text[visible:end].strip():
        return max(after), True
    return visible, False
