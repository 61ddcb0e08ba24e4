"""Byte-level tokenizers with a few hundred words, special tokens where TRL's tests expect them, and TRL's templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .rows import texts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
_LEARNED = 1500  # bytes and words


@dataclass(frozen=True)
class Words:
    """What makes one family's tokenizer. `specials`, with spaces between, get the ids after the words, or their own
    where it is a mapping; `fixed` are further tokens that a test writes as ids, `named` are those a processor reads."""

    specials: str | Mapping[str, int]
    eos: str
    pad: str | None = None
    bos: str | None = None
    template: str | None = None
    fixed: Mapping[int, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)


@lru_cache(maxsize=1)
def _learned() -> tuple[list[str], list[tuple[str, str]]]:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # the order of GPT-2, so of Qwen: "!" is 0
    trainer = trainers.BpeTrainer(vocab_size=_LEARNED, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator([*texts(), CHATML, _bundled("qwen2_5")], trainer)
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return letters, merges  # type: ignore[return-value]


def _bundled(name: str) -> str:
    spec = find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text("utf-8")


def tokenizer(words: Words) -> PreTrainedTokenizerFast:
    """The tokenizer of a family. Ids may have gaps: a stand-in has a few hundred of the words of the real one."""
    letters, merges = _learned()
    vocab = {token: i for i, token in enumerate(letters)}
    free = (i for i in range(len(letters), 1 << 30) if i not in words.fixed)
    vocab |= {a + b: next(free) for a, b in merges}
    vocab = {token: i for token, i in vocab.items() if token not in words.fixed.values()} | {
        token: i for i, token in words.fixed.items()
    }
    specials = words.specials.split() if isinstance(words.specials, str) else words.specials
    if isinstance(words.specials, Mapping):
        vocab |= words.specials
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=words.eos,
        pad_token=words.pad,
        bos_token=words.bos,
        **({"extra_special_tokens": dict(words.named)} if words.named else {}),
    )
    template = words.template
    if template is not None:
        fast.chat_template = template if "{" in template else _bundled(template)
    return fast
