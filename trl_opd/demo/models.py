"""A byte-level tokenizer and two small Qwen3 models, from random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .task import MAX_COMPLETION_TOKENS, Problem

STOP, PAD = "<|im_end|>", "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, "<|im_start|>", STOP)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=STOP, pad_token=PAD)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


def write_model(folder: Path, *, hidden: int, seed: int) -> int:
    """Save a randomly initialised model and its tokenizer; returns the number of parameters."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,  # at 0.02 a model this small needs twice the steps
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def complete(folder: Path, problems: list[Problem], *, sample: bool, seed: int = 0, batch: int = 512) -> list[str]:
    """What the model saved in `folder` writes for each problem, greedy or sampled at temperature 1, up to its stop
    token; a completion that never stops ends with its last token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    choice = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    written = []
    for start in range(0, len(problems), batch):
        prompts = [problem.prompt for problem in problems[start : start + batch]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=MAX_COMPLETION_TOKENS, **choice)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].size(1) :], skip_special_tokens=False)
        written += [text.split(STOP)[0] if STOP in text else text for text in texts]
    return written


def exact_match(written: list[str], problems: list[Problem]) -> float:
    """Share of problems whose completion ends with the right answer."""
    return sum(p.is_right(text) for p, text in zip(problems, written, strict=True)) / len(problems)
