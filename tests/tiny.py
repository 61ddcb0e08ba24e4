"""Tiny real models and byte-level tokenizers, built from scratch: nothing is downloaded."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tokenizer(
    pad: str = "<|endoftext|>", eos: str = "<|im_end|>", merges: tuple[tuple[str, str], ...] = (), special=SPECIAL
) -> PreTrainedTokenizerFast:
    """Bytes, then whatever `merges` make, then the special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=pad)
    fast.chat_template = CHATML
    return fast


def qwen3(seed: int = 0, vocab_size: int = 260, hidden: int = 32, layers: int = 2, **kwargs) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden // 2,
        max_position_embeddings=512,
        **{"initializer_range": 0.1, "tie_word_embeddings": True} | kwargs,
    )
    return Qwen3ForCausalLM(config)


def llama(seed: int = 0, vocab_size: int = 260, **kwargs) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        **{"initializer_range": 0.1, "tie_word_embeddings": False, "max_position_embeddings": 512} | kwargs,
    )
    return LlamaForCausalLM(config)
