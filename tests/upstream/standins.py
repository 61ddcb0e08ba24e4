"""Tiny random models under the names that TRL's tests load, written into a cache of the Hub that is read offline."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

from .vision import VisionStandin, build_vision
from .words import CHATML, MISTRAL, Words, tokenizer

ORGANIZATION = "trl-internal-testing"

_QWEN_IDS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|object_ref_start|>": 151646,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
# the words that a test of tool calls writes as ids, as its comments spell them
_QWEN_TEST_WORDS = {
    151657: "<tool_call>",
    151658: "</tool_call>",
    330: 'Ġ"',
    497: '",',
    606: "name",
    788: '":',
    894: "Ġany",
    944: "'t",
    1414: "Ġknow",
    1513: "Ġdon",
    4913: '{"',
    5212: 'Ġ{"',
    5392: "Ġtool",
    11248: "}}Ċ",
    16370: "arguments",
    17453: "Done",
    22785: "_tool",
    64648: "multiply",
}


def _qwen(template: str, real_ids: bool = False) -> Words:
    specials = _QWEN_IDS if real_ids else " ".join(_QWEN_IDS)
    fixed = _QWEN_TEST_WORDS if real_ids else {}
    return Words(specials, "<|im_end|>", "<|endoftext|>", template=template, fixed=fixed)


def _deepseek(template: str) -> Words:
    names = "begin▁of▁sentence end▁of▁sentence User Assistant tool▁calls▁begin tool▁calls▁end tool▁call▁begin "
    names += "tool▁call▁end tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin tool▁output▁end tool▁sep"
    specials = [f"<｜{name}｜>" for name in names.split()]
    return Words(" ".join(specials), specials[1], specials[1], bos=specials[0], template=template)


_CHATML_WORDS = Words("<|endoftext|> <|im_start|> <|im_end|>", "<|im_end|>", "<|endoftext|>", template=CHATML)
_LFM_SPECIALS = "<|pad|> <|startoftext|> <|endoftext|> <|im_start|> <|im_end|> <image>"
_LLAMA_SPECIALS = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
_LLAMA = Words(_LLAMA_SPECIALS, "<|eot_id|>", bos="<|begin_of_text|>", template="llama3_2")
_QWEN3 = _qwen("qwen3")


@dataclass(frozen=True)
class Standin:
    """One model: its config class with what differs from `_SIZES`, and its tokenizer. Without a config it is a
    tokenizer alone. `generation` goes into the generation config, `revisions` are tokenizers at other revisions, and
    `remote_code` makes it a model that brings its own classes."""

    config: Callable[..., hf.PretrainedConfig] | None
    words: Words
    settings: dict[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    revisions: dict[str, Words] = field(default_factory=dict)
    remote_code: bool = False


_SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}

# A test tells two revisions of this tokenizer apart by the length of their templates.
_OTHER_QWEN = _qwen(tokenizer(_qwen("qwen2_5")).chat_template.ljust(2558))

MODELS: dict[str, Standin] = {
    "tiny-Qwen2ForCausalLM-2.5": Standin(hf.Qwen2Config, _qwen("qwen2_5"), revisions={"8913f5819566": _OTHER_QWEN}),
    "tiny-Qwen2ForCausalLM-R1-Distill": Standin(hf.Qwen2Config, _deepseek("deepseek_r1_distill")),
    "tiny-Qwen3ForCausalLM": Standin(hf.Qwen3Config, _QWEN3),
    "small-Qwen3ForCausalLM": Standin(hf.Qwen3Config, _QWEN3, {"hidden_size": 128}),
    "tiny-Qwen3MoeForCausalLM": Standin(
        hf.Qwen3MoeConfig,
        _QWEN3,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
    "tiny-LlamaForCausalLM-3.2": Standin(hf.LlamaConfig, _LLAMA),
    "tiny-MistralForCausalLM-0.2": Standin(
        hf.MistralConfig, Words("<unk> <s> </s>", "</s>", bos="<s>", template=MISTRAL)
    ),
    "tiny-Phi3ForCausalLM-3.5": Standin(
        hf.Phi3Config,
        Words(
            {"<s>": 32010, "<|endoftext|>": 32000, "<|assistant|>": 32001, "<|system|>": 32006, "<|end|>": 32007}
            | {"<|user|>": 32011},
            "<|endoftext|>",
            "<|endoftext|>",
            bos="<s>",
            template="phi3_5",
        ),
        vocab_size=32064,
        generation={"eos_token_id": [32007, 32001, 32000]},
    ),
    "tiny-Cohere2ForCausalLM": Standin(
        hf.Cohere2Config,
        Words(
            "<PAD> <BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> "
            "<|SYSTEM_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|>",
            "<|END_OF_TURN_TOKEN|>",
            "<PAD>",
            bos="<BOS_TOKEN>",
            template="cohere2",
        ),
        {"logit_scale": 0.25},
    ),
    "tiny-Glm4MoeForCausalLM": Standin(
        hf.Glm4MoeConfig,
        Words(
            "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
            "<|endoftext|>",
            "<|endoftext|>",
            template="glm4moe",
        ),
        {"moe_intermediate_size": 32, "head_dim": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-GptOssForCausalLM": Standin(
        hf.GptOssConfig,
        Words(
            "<|startoftext|> <|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|return|> <|call|> <|constrain|>",
            "<|return|>",
            "<|endoftext|>",
            bos="<|startoftext|>",
            template="gptoss",
        ),
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-DeepseekV3ForCausalLM": Standin(
        hf.DeepseekV3Config,
        _deepseek("deepseekv3"),
        {"num_attention_heads": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "first_k_dense_replace": 1}
        | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    ),
    "tiny-FalconMambaForCausalLM": Standin(hf.FalconMambaConfig, _CHATML_WORDS),
    "tiny-NemotronHForCausalLM-nano": Standin(
        hf.NemotronHConfig,
        Words("<unk> <s> <|im_start|> <|im_end|>", "<|im_end|>", bos="<s>", template="nemotron_3_nano"),
        {"hidden_size": 16, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8}
        | {"mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16, "mamba_d_conv": 4, "mamba_expand": 2}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "use_mamba_kernels": False}
        | {"moe_shared_expert_intermediate_size": 32, "num_hidden_layers": None},
    ),
    "tiny-Olmo3ForCausalLM": Standin(hf.Olmo3Config, _CHATML_WORDS),
    "tiny-Lfm2ForCausalLM": Standin(
        hf.Lfm2Config,
        Words(_LFM_SPECIALS, "<|im_end|>", "<|pad|>", bos="<|startoftext|>", template="lfm2"),
        {"full_attn_idxs": [1], "block_multiple_of": 8},
    ),
    "tiny-Lfm2ForCausalLM-2.5": Standin(
        hf.Lfm2Config,
        Words(_LFM_SPECIALS, "<|im_end|>", "<|pad|>", bos="<|startoftext|>", template="lfm2_2_5"),
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "tiny-GPTNeoXForCausalLM": Standin(
        hf.GPTNeoXConfig,
        Words("<|endoftext|> <|padding|>", "<|endoftext|>", bos="<|endoftext|>"),
        dtype=torch.float16,
    ),
    "tiny-RemoteForCausalLM": Standin(hf.LlamaConfig, _LLAMA, remote_code=True),
    "Qwen/Qwen3-4B": Standin(None, _QWEN3),
}

# The same for tests that write token ids of the real vocabulary. They are slow: their heads have 152k rows.
WITH_REAL_IDS: dict[str, Standin] = {
    "tiny-Qwen2ForCausalLM-2.5": replace(MODELS["tiny-Qwen2ForCausalLM-2.5"], words=_qwen("qwen2_5", True)),
    "tiny-Qwen3MoeForCausalLM": replace(MODELS["tiny-Qwen3MoeForCausalLM"], words=_qwen("qwen3", True)),
}

_REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def full_name(name: str) -> str:
    return name if "/" in name else f"{ORGANIZATION}/{name}"


def write_model(name: str, standin: Standin | VisionStandin, hub: Path) -> Path:
    """A model and its tokenizer as the Hub's cache holds them, at `main` and at the revisions that a test asks for.

    Returns the folder of the cache that holds them."""
    repository = hub / ("models--" + full_name(name).replace("/", "--"))
    for revision, words in {"main": standin.words, **getattr(standin, "revisions", {})}.items():
        commit = hashlib.sha1(f"{name} {revision}".encode()).hexdigest()
        snapshot = repository / "snapshots" / commit
        tokens = tokenizer(words)
        if isinstance(standin, VisionStandin):
            build_vision(standin, tokens).save_pretrained(snapshot)
            tokens = standin.processor(tokens)
        elif standin.config is not None:
            build(standin, tokens).save_pretrained(snapshot)
        else:
            hf.PreTrainedConfig(model_type="qwen3").save_pretrained(snapshot)  # how AutoTokenizer knows it
        if getattr(standin, "remote_code", False):
            _bring_code(snapshot)
        tokens.save_pretrained(snapshot)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit, encoding="utf-8")
    return repository


def _bring_code(snapshot: Path) -> None:
    (snapshot / "modeling_remote.py").write_text(_REMOTE_CODE, encoding="utf-8")
    file = snapshot / "config.json"
    config = json.loads(file.read_text("utf-8"))
    classes = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteForCausalLM"}
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
    config["auto_map"] = {auto: f"modeling_remote.{own}" for auto, own in classes.items()}
    file.write_text(json.dumps(config), encoding="utf-8")


def build(standin: Standin, tokens: Any) -> hf.PreTrainedModel:
    """The model of a stand-in, always with the same weights."""
    assert standin.config is not None
    settings = _SIZES | standin.settings
    config = standin.config(
        vocab_size=standin.vocab_size or max(tokens.get_vocab().values()) + 1,
        **{key: value for key, value in settings.items() if value is not None},
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).to(standin.dtype)
    spread(model)
    model.generation_config.update(**standin.generation)
    return model


def spread(model: nn.Module) -> None:
    """Weights wide enough that every parameter of so small a model gets a gradient."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
