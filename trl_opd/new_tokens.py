"""New tokens: known to the tokenizer, with a row each in embedding and head that is trained and saved."""

from __future__ import annotations

import copy
import re
from typing import Any

import transformers
from accelerate.logging import get_logger
from peft import PeftModel
from tokenizers import AddedToken

from ._trl import create_model_from_path
from .student_setup import inner_tokenizer, open_tokenizer

logger = get_logger(__name__)

CHATML_NAME = "chatml"
CHATML_START, CHATML_END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def expand_chatml(args: Any) -> None:
    """Make `chat_template: chatml` its template, tokens and stop token, in place."""
    if args.chat_template != CHATML_NAME:
        return
    args.chat_template = CHATML
    has = [*(args.added_tokens or []), *(args.added_special_tokens or [])]
    missing = [token for token in (CHATML_START, CHATML_END) if token not in has]
    args.added_special_tokens = [*(args.added_special_tokens or []), *missing]
    if args.eos_token is None:
        args.eos_token = CHATML_END


def add_tokens(
    model: Any, processing_class: Any, args: Any, *, quantization_config: Any, peft_config: Any
) -> tuple[Any, Any, Any]:
    """Model, tokenizer and adapter config with the tokens and the multiple that `args` asks for; as they came where it
    asks for neither. A model given by name is loaded here.

    New rows stand at the mean of the old ones. Raises `ValueError` where an adapter could not learn or keep them.
    """
    expand_chatml(args)
    multiple = args.pad_embeddings_to_multiple_of
    if not args.added_tokens and not args.added_special_tokens and multiple is None:
        return model, processing_class, peft_config
    processing_class = open_tokenizer(model, processing_class, args)
    tokenizer = inner_tokenizer(processing_class)
    known = tokenizer.get_vocab()
    new = [token for token in [*(args.added_tokens or []), *(args.added_special_tokens or [])] if token not in known]
    for special, tokens in ((False, args.added_tokens), (True, args.added_special_tokens)):
        added = [AddedToken(token, special=special, normalized=False) for token in tokens or [] if token in new]
        tokenizer.add_tokens(added, special_tokens=special)
    if isinstance(model, str):
        model = _load(model, args, quantization_config)
    had = model.config.get_text_config().vocab_size
    needed = max(tokenizer.get_vocab().values()) + 1
    size = max(had, needed)
    if multiple is not None:
        size = -(-size // multiple) * multiple
    _check_adapter(model, peft_config, new=new, had=had, needed=needed, size=size)
    if size > had and getattr(args, "use_vllm", False):
        raise ValueError(
            f"vLLM loads the model as it is stored, with {had:,} rows, and new tokens need {size:,}. Set `use_vllm: "
            "false`, or add the tokens in a run of `trl-opd sft` and start from what it saved."
        )
    if size > had:
        transformers.set_seed(args.seed)  # new rows are drawn, very close to the mean
        model.resize_token_embeddings(size, mean_resizing=True)
    ids = tokenizer.convert_tokens_to_ids(new)
    if new and peft_config is not None:
        peft_config = _with_rows(model, peft_config, ids)
    _say(new, ids, had, size)
    return model, processing_class, peft_config


def _load(name: str, args: Any, quantization_config: Any) -> Any:
    """A model by its name, as TRL's constructors load it."""
    kwargs = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    args.model_init_kwargs = None  # they are used here; TRL refuses them with a loaded model
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    if args.distributed_state is not None and args.distributed_state.num_processes > 1:
        kwargs["device_map"] = None
    return create_model_from_path(name, **kwargs)


def _check_adapter(model: Any, peft_config: Any, *, new: list[str], had: int, needed: int, size: int) -> None:
    if isinstance(model, PeftModel) and (new or size > had):
        raise ValueError(
            f"`added_tokens` and `pad_embeddings_to_multiple_of` change the embedding ({had:,} rows to {size:,}), and "
            "this model is an adapter already, made for the embedding as it is. Merge it into its base first."
        )
    if peft_config is not None and size > max(had, needed):
        raise ValueError(
            f"`pad_embeddings_to_multiple_of` makes {size - needed:,} rows that no token has, and an adapter is loaded "
            "on a base with a row for each token only. Leave it out with an adapter."
        )


def _with_rows(model: Any, peft_config: Any, ids: list[int]) -> Any:
    """A copy of an adapter's config that trains and saves the rows of these tokens, in embedding and head.

    A module in `modules_to_save` is trained whole. Raises `ValueError` where the two would not learn alike.
    """
    if not hasattr(peft_config, "trainable_token_indices"):
        raise ValueError(
            f"New tokens need rows that are trained, which {type(peft_config).__name__} does not do. Use LoRA, or "
            "train the whole model."
        )
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    modules = {names[id(module)]: module for module in ([embedding] if tied else [embedding, head])}
    both = [names[id(embedding)], names[id(head)]]
    whole = {name for name in both for saved in peft_config.modules_to_save or [] if _is_named(name, saved)}
    for name in both:
        if _is_target(name, peft_config.target_modules):
            raise ValueError(
                f"LoRA on `{_last(name)}` would leave the rows of new tokens out of the adapter's file. Take it out of "
                "`lora_target_modules`: the rows of new tokens are trained and saved by themselves."
            )
    if tied and whole and not getattr(peft_config, "ensure_weight_tying", False):
        raise ValueError(
            f"`lora_modules_to_save` has `{_last(min(whole))}`, whose weight embedding and head share: it would train "
            "a copy, and the other would not learn the new tokens. Leave it out: their rows are trained by themselves."
        )
    rows = {name: module for name, module in modules.items() if not whole & ({*both} if tied else {name})}
    if any(getattr(module, "bias", None) is not None for module in rows.values()):
        raise ValueError(
            "This model's head has a bias, and single rows of such a head cannot be trained by an adapter. Set "
            f"`lora_modules_to_save: [{', '.join(_last(name) for name in both)}]`."
        )
    asked = peft_config.trainable_token_indices or {}
    asked = dict(asked) if isinstance(asked, dict) else {_last(both[0]): asked}
    for name in rows:
        key = next((key for key in asked if _is_named(name, key)), _last(name))
        asked[key] = sorted({*asked.get(key, []), *ids})
    changed = copy.copy(peft_config)
    changed.trainable_token_indices = asked or None
    return changed


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _is_named(name: str, asked: str) -> bool:
    """Whether an adapter's config means a module by `asked`: its whole name or the end of it."""
    return name == asked or name.endswith(f".{asked}")


def _is_target(name: str, targets: Any) -> bool:
    if isinstance(targets, str):  # `all-linear` leaves the head out
        return targets != "all-linear" and re.fullmatch(targets, name) is not None
    return any(_is_named(name, target) for target in targets or [])


def _say(new: list[str], ids: list[int], had: int, size: int) -> None:
    if new:
        logger.info(f"new tokens: {', '.join(f'{token} ({i})' for token, i in zip(new, ids, strict=True))}")
    spare = sum(i < had for i in ids)
    if spare:
        logger.info(f"{spare} of them take rows that the model had to spare, as they are")
    if size > had:
        logger.info(f"embedding and head grow from {had:,} to {size:,} rows; the new ones start at the mean of the old")
