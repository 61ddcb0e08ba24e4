"""Stand-ins for the models that take images: a tiny vision tower, a tiny text model, and the processor between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

from .words import Words

_TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "layer_types": None,
}
_TOWER = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
_QWEN_TOWER = {"hidden_size": 16, "num_heads": 4, "depth": 2}
_QWEN_SPECIALS = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
_ROPE = {"rope_type": "default", "mrope_section": [1, 1]}


@dataclass(frozen=True)
class VisionStandin:
    """A model class; what its config takes beside vocabulary and the ids of named tokens; and its processor."""

    model: type[hf.PreTrainedModel]
    words: Words
    text: dict[str, Any]
    tower: dict[str, Any]
    ids: dict[str, str]
    processor: Callable[[Any], Any]
    settings: dict[str, Any] | None = None
    dtype: torch.dtype = torch.bfloat16


def _qwen_words(template: str) -> Words:
    return Words(_QWEN_SPECIALS, "<|im_end|>", "<|endoftext|>", template=template)


def _qwen_processor(kind: type, images: type, patch: int, videos: type) -> Callable[[Any], Any]:
    """Every image becomes 4 to 16 patches, so 1 to 4 tokens."""

    def make(tokens: Any) -> Any:
        size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (4 * patch) ** 2}
        return kind(
            image_processor=images(size=size, patch_size=patch),
            tokenizer=tokens,
            video_processor=videos(patch_size=patch),
            chat_template=tokens.chat_template,
        )

    return make


_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _gemma3(tokens: Any) -> Any:
    images = hf.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    return hf.Gemma3Processor(images, tokens, chat_template=tokens.chat_template, image_seq_length=4)


def _llava(kind: type, images: type) -> Callable[[Any], Any]:
    def make(tokens: Any) -> Any:
        more = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]} if kind is hf.LlavaNextProcessor else {}
        size = {"height": 28, "width": 28}
        return kind(
            image_processor=images(size={"shortest_edge": 28}, crop_size=size, **more),
            tokenizer=tokens,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=tokens.chat_template,
        )

    return make


def _internvl(tokens: Any) -> Any:
    images = hf.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, max_patches=1)
    videos = hf.InternVLVideoProcessor(size={"height": 28, "width": 28})
    return hf.InternVLProcessor(images, tokens, videos, image_seq_length=1, chat_template=tokens.chat_template)


_LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ '<image>\n' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}{{ eos_token if m['role'] == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
_INTERNVL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ '<IMG_CONTEXT>\n' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAVA_SPECIALS = "<unk> <s> </s> <image> <pad>"
_CLIP = {**_TOWER, "image_size": 28, "patch_size": 14, "projection_dim": 16, "model_type": "clip_vision_model"}

VISION: dict[str, VisionStandin] = {
    "tiny-Qwen2VLForConditionalGeneration": VisionStandin(
        hf.Qwen2VLForConditionalGeneration,
        _qwen_words("qwen2_5_vl"),
        {**_TEXT, "rope_parameters": _ROPE},
        {"embed_dim": 16, "num_heads": 4, "depth": 2, "hidden_size": 16},
        _QWEN_IDS,
        _qwen_processor(hf.Qwen2VLProcessor, hf.Qwen2VLImageProcessor, 14, hf.Qwen2VLVideoProcessor),
    ),
    "tiny-Qwen2_5_VLForConditionalGeneration": VisionStandin(
        hf.Qwen2_5_VLForConditionalGeneration,
        _qwen_words("qwen2_5_vl"),
        {**_TEXT, "rope_parameters": _ROPE},
        {**_QWEN_TOWER, "intermediate_size": 32, "out_hidden_size": 16, "fullatt_block_indexes": [1]},
        _QWEN_IDS,
        _qwen_processor(hf.Qwen2_5_VLProcessor, hf.Qwen2VLImageProcessor, 14, hf.Qwen2VLVideoProcessor),
    ),
    "tiny-Qwen3VLForConditionalGeneration": VisionStandin(
        hf.Qwen3VLForConditionalGeneration,
        _qwen_words("qwen3_vl"),
        {key: value for key, value in _TEXT.items() if key != "layer_types"}
        | {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {**_QWEN_TOWER, "intermediate_size": 32, "out_hidden_size": 16, "deepstack_visual_indexes": [1]},
        _QWEN_IDS,
        _qwen_processor(hf.Qwen3VLProcessor, hf.Qwen2VLImageProcessor, 16, hf.Qwen3VLVideoProcessor),
    ),
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": VisionStandin(
        hf.Qwen3_5ForConditionalGeneration,
        _qwen_words("qwen3_5_nothink"),
        {**_TEXT, "layer_types": ["linear_attention", "full_attention"]},
        {**_QWEN_TOWER, "intermediate_size": 32, "out_hidden_size": 16},
        _QWEN_IDS,
        _qwen_processor(hf.Qwen3VLProcessor, hf.Qwen2VLImageProcessor, 16, hf.Qwen3VLVideoProcessor),
    ),
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": VisionStandin(
        hf.Qwen3_5MoeForConditionalGeneration,
        _qwen_words("qwen3_6"),
        {**_TEXT, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        {**_QWEN_TOWER, "intermediate_size": 32, "out_hidden_size": 16},
        _QWEN_IDS,
        _qwen_processor(hf.Qwen3VLProcessor, hf.Qwen2VLImageProcessor, 16, hf.Qwen3VLVideoProcessor),
    ),
    "tiny-Gemma3ForConditionalGeneration": VisionStandin(
        hf.Gemma3ForConditionalGeneration,
        Words(
            "<pad> <eos> <bos> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> <image_soft_token>",
            "<eos>",
            "<pad>",
            bos="<bos>",
            template="gemma3",
            named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ),
        {**_TEXT, "head_dim": 4},
        {**_TOWER, "image_size": 28, "patch_size": 14, "vision_use_head": False},
        {"image_token_id": "<image_soft_token>", "boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>"},
        _gemma3,
        {"mm_tokens_per_image": 4},
    ),
    "tiny-LlavaForConditionalGeneration": VisionStandin(
        hf.LlavaForConditionalGeneration,
        Words(_LLAVA_SPECIALS, "</s>", "<pad>", bos="<s>", template=_LLAVA_TEMPLATE),
        {**_TEXT, "model_type": "llama"},
        _CLIP,
        {"image_token_id": "<image>"},
        _llava(hf.LlavaProcessor, hf.LlavaImageProcessor),
        dtype=torch.float16,
    ),
    "tiny-LlavaNextForConditionalGeneration": VisionStandin(
        hf.LlavaNextForConditionalGeneration,
        Words(_LLAVA_SPECIALS, "</s>", "<pad>", bos="<s>", template="llava_next"),
        {**_TEXT, "model_type": "mistral"},
        _CLIP,
        {"image_token_id": "<image>"},
        _llava(hf.LlavaNextProcessor, hf.LlavaNextImageProcessor),
        {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "tiny-InternVLForConditionalGeneration": VisionStandin(
        hf.InternVLForConditionalGeneration,
        Words(
            "<|endoftext|> <|im_start|> <|im_end|> <img> </img> <IMG_CONTEXT> <video>",
            "<|im_end|>",
            "<|endoftext|>",
            template=_INTERNVL_TEMPLATE,
            named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
            | {"video_token": "<video>"},
        ),
        {**_TEXT, "model_type": "qwen2"},
        {**_TOWER, "image_size": [28, 28], "patch_size": [14, 14]},
        {"image_token_id": "<IMG_CONTEXT>"},
        _internvl,
    ),
}


def build_vision(standin: VisionStandin, tokens: Any) -> hf.PreTrainedModel:
    """The model of a stand-in, always with the same weights."""
    special = {name: getattr(tokens, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vocab_size = max(tokens.get_vocab().values()) + 1
    config = standin.model.config_class(
        text_config={**standin.text, "vocab_size": vocab_size, **special},
        vision_config=standin.tower,
        **{key: tokens.convert_tokens_to_ids(token) for key, token in standin.ids.items()},
        **(standin.settings or {}),
    )
    torch.manual_seed(0)
    model = standin.model(config).to(standin.dtype)
    model.generation_config.update(**special)
    return model
