"""The model that is trained, where it is an adapter from an earlier run: opened on its base, to go on training it."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.logging import get_logger
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled

logger = get_logger(__name__)


def is_adapter_folder(model: Any) -> bool:
    """Whether a model is given as a folder that holds an adapter only."""
    return isinstance(model, str) and os.path.isfile(os.path.join(model, "adapter_config.json"))


def open_adapter(
    model: Any, processing_class: Any, args: Any, *, quantization_config: Any, peft_config: Any
) -> tuple[Any, Any]:
    """Model and tokenizer; a folder with an adapter becomes its base with that adapter, which is trained further.

    transformers would load it frozen, and training would then change the base. Raises `ValueError` where `peft_config`
    asks for another adapter besides.
    """
    if not is_adapter_folder(model):
        return model, processing_class
    if peft_config is not None:
        raise ValueError(
            f"`model_name_or_path: {model}` is an adapter already, and `use_peft` (or `peft_config`) asks for another. "
            "Leave it out to go on training this one, or merge it into its base first."
        )
    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    args.model_init_kwargs = None  # they are used here; TRL refuses them with a loaded model
    if isinstance(kwargs.get("dtype"), str) and kwargs["dtype"] != "auto":
        kwargs["dtype"] = getattr(torch, kwargs["dtype"])
    if kwargs.get("dtype") is None:
        kwargs["dtype"] = "auto"
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    opened = open_on_base(model, is_trainable=True, **kwargs)
    base = opened.peft_config["default"].base_model_name_or_path
    logger.info(f"{model} is an adapter: it is trained further on its base {base}")
    if processing_class is None:
        processing_class = AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
    return opened, processing_class


def open_on_base(folder: str, *, is_trainable: bool = False, **kwargs: Any) -> PeftModel:
    """A folder's adapter on its base, which grows where the folder's tokenizer has more tokens than it has rows.

    As `AutoPeftModelForCausalLM` does it, which would take a base that ZeRO-3 has sharded for one without rows, and cut
    it to the tokenizer's size.
    """
    kwargs.pop("revision", None)  # a folder has none; its base's stands in the adapter's config
    config = PeftConfig.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, revision=config.revision, **kwargs)
    if os.path.isfile(os.path.join(folder, "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=kwargs.get("trust_remote_code", False))
        if len(tokenizer) > base.config.get_text_config().vocab_size:
            base.resize_token_embeddings(len(tokenizer))
    # DeepSpeed gathers adapter and base in one dtype (see TRL's constructors)
    kwargs["autocast_adapter_dtype"] = "quantization_config" in kwargs or not is_deepspeed_zero3_enabled()
    return PeftModel.from_pretrained(base, folder, is_trainable=is_trainable, **kwargs)


def open_tokenizer(model: Any, processing_class: Any, args: Any) -> Any:
    """The tokenizer (or processor) that was given, or else the model's own."""
    if processing_class is not None:
        return processing_class
    name = model if isinstance(model, str) else model.config._name_or_path
    revision = (args.model_init_kwargs or {}).get("revision")
    return AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


def inner_tokenizer(processing_class: Any) -> Any:
    """A processor has its tokenizer inside."""
    return getattr(processing_class, "tokenizer", processing_class)


def set_up_tokenizer(model: Any, processing_class: Any, args: Any, eos_token: str | None = None) -> Any:
    """The tokenizer with the `chat_template` of the config and this stop token, where they are asked for.

    `None` where it is to be the model's own as it is. Raises `ValueError` for a stop token that it does not have.
    """
    if args.chat_template is None and eos_token is None:
        return processing_class
    processing_class = open_tokenizer(model, processing_class, args)
    tokenizer = inner_tokenizer(processing_class)
    if args.chat_template is not None:
        processing_class.chat_template = tokenizer.chat_template = args.chat_template
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ValueError(
                f"`eos_token: {eos_token}` is no token of this model's tokenizer. Set one that it has, or put it into "
                "`added_special_tokens`."
            )
        tokenizer.eos_token = eos_token
    return processing_class
