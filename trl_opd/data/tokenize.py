"""`Example` -> `TokenizedRow`: the ids, and a label on exactly what the assistant must write."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..types import IGNORE_INDEX, Example, TokenizedRow
from .rows import BadRow
from .templates import Span, assistant_spans, render, special_tokens, training_template

TRAIN_ON = ("assistant", "last_assistant", "all")


@dataclass(frozen=True)
class Tokenization:
    """How rows become tokens. `train_on` is `assistant`, `last_assistant` or `all` (the whole conversation)."""

    tokenizer: PreTrainedTokenizerBase
    train_on: str = "assistant"
    train_empty_think: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    specials: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specials", tuple(special_tokens(self.tokenizer)))  # once, not once a row

    @property
    def template_name(self) -> str:
        """Where the chat template comes from, for the report."""
        path = training_template(self.tokenizer.chat_template)
        return f"of {self.tokenizer.name_or_path or 'the tokenizer'}" + (f", known as {path.stem[:-9]}" if path else "")

    def prompt(self, example: Example) -> list[int]:
        """Ids of a prompt as the model meets it at inference: (P,). Raises `BadRow` where it renders to nothing."""
        if isinstance(example.prompt, str):
            ids = self._open_ended(example.prompt)
        else:
            assert example.prompt is not None, "a prompt row has a prompt"
            text = render(self.tokenizer, example.prompt, generation_prompt=True, **self._template_kwargs(example))
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise BadRow("no token is left of it", "prompt", example.prompt, "a prompt of at least one token")
        return ids

    def row(self, example: Example) -> TokenizedRow:
        """Ids and labels of a row to train. Raises `BadRow` where the labels would not be what the row asks for."""
        if example.kind == "text":
            return self._text(example)
        if example.kind == "prompt_completion":
            return self._prompt_completion(example)
        return self._conversation(example)

    def _template_kwargs(self, example: Example) -> dict[str, Any]:
        return {"tools": example.tools, **self.template_kwargs, **example.template_kwargs}

    def _text(self, example: Example) -> TokenizedRow:
        assert isinstance(example.completion, str), "a text row holds text"
        ids = self._with_eos(self.tokenizer(example.completion)["input_ids"])
        if len(ids) < 2:
            raise BadRow("a single token has nothing before it", "text", example.completion, "two tokens or more")
        return TokenizedRow(ids, [IGNORE_INDEX, *ids[1:]], stopped=self.tokenizer.eos_token_id is not None)

    def _prompt_completion(self, example: Example) -> TokenizedRow:
        prompt, completion = example.prompt, example.completion
        assert isinstance(prompt, str) and isinstance(completion, str), "prompt and completion are texts"
        prompt_ids = self._open_ended(prompt)
        if not prompt_ids:
            raise BadRow("no token is left of it", "prompt", prompt, "a prompt of at least one token")
        joint = self._open_ended(prompt + completion)
        if joint[: len(prompt_ids)] != prompt_ids:
            # a token would straddle the boundary: at inference the prompt is tokenized alone, so train that
            joint = prompt_ids + self.tokenizer(completion, add_special_tokens=False)["input_ids"]
        completion_ids = self._with_eos(joint[len(prompt_ids) :])
        self._check_decodes(completion_ids, completion, "completion")
        ids = prompt_ids + completion_ids
        masked = 1 if self.train_on == "all" else len(prompt_ids)
        stopped = self.tokenizer.eos_token_id is not None
        return TokenizedRow(ids, [IGNORE_INDEX] * masked + ids[masked:], stopped=stopped)

    def _conversation(self, example: Example) -> TokenizedRow:
        prompt, completion = example.prompt or [], example.completion
        assert isinstance(prompt, list) and isinstance(completion, list), "a conversation is a list of messages"
        messages = prompt + completion
        if self.train_on == "all":
            text = render(self.tokenizer, messages, **self._template_kwargs(example))
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return TokenizedRow(ids, [IGNORE_INDEX, *ids[1:]])
        trained = [i for i in range(len(prompt), len(messages)) if messages[i]["role"] == "assistant"]
        if self.train_on == "last_assistant":
            trained = trained[-1:]
        found = assistant_spans(
            self.tokenizer,
            messages,
            trained,
            specials=self.specials,
            train_empty_think=self.train_empty_think,
            **self._template_kwargs(example),
        )
        ids, labels = self._label(found.text, found.spans)
        if labels[0] != IGNORE_INDEX:
            raise BadRow(
                "nothing comes before the first trained token", "messages", found.text[:80], "a turn before it"
            )
        return TokenizedRow(ids, labels, found.stopped, found.normalized, found.rule)

    def _label(self, text: str, spans: list[Span]) -> tuple[list[int], list[int]]:
        """Ids of `text` and labels on the tokens inside `spans`; cut at a border that a token would straddle."""
        borders = sorted({0, len(text), *(edge for span in spans for edge in span)})
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
            starts = [start for start, _ in offsets]  # in order, so borders are found by bisection
            if not any(_straddles(offsets, starts, border) for border in borders):
                labels = [IGNORE_INDEX] * len(ids)
                for start, end in spans:
                    inside = slice(bisect_left(starts, start), bisect_left(starts, end))
                    labels[inside] = ids[inside]
                self._check_spans(text, spans, labels)
                return ids, labels
        ids, labels = [], []
        for start, end in pairwise(borders):
            piece = self.tokenizer(text[start:end], add_special_tokens=False)["input_ids"]
            ids += piece
            labels += piece if (start, end) in spans else [IGNORE_INDEX] * len(piece)
        self._check_spans(text, spans, labels)
        return ids, labels

    def _check_spans(self, text: str, spans: list[Span], labels: list[int]) -> None:
        trained = [label for label in labels if label != IGNORE_INDEX]
        self._check_decodes(trained, "".join(text[a:b] for a, b in spans), "messages")

    def _check_decodes(self, ids: list[int], wanted: str, column: str) -> None:
        """The labels must decode to the text the row asks for, but for whitespace at its ends and the stop token."""
        if self.tokenizer.is_fast:  # without the checks of every id that `decode` makes first
            decoded = self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        else:
            decoded = str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        eos = self.tokenizer.eos_token or ""
        if "".join(decoded.removesuffix(eos).split()) != "".join(wanted.removesuffix(eos).split()):
            raise BadRow("the tokens decode to another text", column, decoded, f"{wanted[:120]!r}")

    def _with_eos(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]

    def _open_ended(self, text: str) -> list[int]:
        """Ids of `text` without the eos that some tokenizers put after every text: what follows is still to come."""
        ids, eos = self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id
        if eos is not None and ids and ids[-1] == eos and not text.endswith(self.tokenizer.eos_token):
            return ids[:-1]
        return ids


def _straddles(offsets: list[Span], starts: list[int], border: int) -> bool:
    """Whether a token lies on both sides of a border of the text."""
    before = bisect_left(starts, border) - 1
    return before >= 0 and offsets[before][1] > border
