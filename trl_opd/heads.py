"""A causal language model taken apart: the backbone runs once, then the head scores only what is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from .flat import flattened, looks_ahead
from .losses.fused import Gather, HeadTransform, chunked_module_loss, fused_linear_loss
from .losses.objectives import Settings
from .losses.shared_ids import SharedIds
from .masking import select_predicting
from .types import FusedOutput, TrainedPositions

_NOT_FOR_THE_BACKBONE = ("labels", "trained_positions", "num_items_in_batch", "row_sizes")


@dataclass(frozen=True)
class Ranks:
    """What scoring asks of all ranks where weights are sharded: `gather(*parameters)` makes them whole, and
    `longest(positions)` gives the most positions of any rank, 0 where each may call a head as often as it likes."""

    gather: Gather
    longest: Callable[[int], int]


@dataclass(frozen=True)
class Head:
    """A model's output projection. `plain` is false where its weights are not all there is to it (an adapter on it,
    a quantised layer, a trained copy), so that it must be called."""

    module: Any
    transform: HeadTransform
    vocab_size: int

    @property
    def plain(self) -> bool:
        module = self.module
        return (
            isinstance(module, nn.Linear)
            and module.weight.is_floating_point()
            and not hasattr(module, "base_layer")
            and not type(module).__module__.startswith("bitsandbytes")
        )

    def parameters(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight (V, H) and bias (V,), whole: one that FSDP2 has sharded is gathered once, here."""
        assert isinstance(self.module, nn.Linear), "only a plain head is read by its weights"
        module: Any = self.module
        weight, bias = module.weight, module.bias
        if isinstance(weight, DTensor):
            weight = _Whole.apply(weight).to(dtype)
            bias = None if bias is None else _Whole.apply(bias)
        return weight, bias


class _Whole(torch.autograd.Function):
    """A sharded parameter made whole; its gradient is the mean over all ranks, as FSDP's own, and sharded again.

    `full_tensor()` alone would keep each rank's own gradient, unreduced: FSDP reduces what its modules' forward used,
    and a head that is a shard of its own is never called.
    """

    @staticmethod
    def forward(ctx, parameter):  # type: ignore[override]
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        return parameter.full_tensor()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        parts = DTensor.from_local(gradient / ctx.mesh.size(), ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False)
        return parts.redistribute(placements=ctx.placements)


def causal_lm(model: Any) -> Any:
    """The transformers model inside a `PeftModel`, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def head_of(model: nn.Module) -> Head:
    """The head of an unwrapped causal language model, with what its config does to the logits."""
    inner = causal_lm(model)
    config = inner.config.get_text_config()
    return Head(_active_copy(inner.get_output_embeddings()), head_transform(config), config.vocab_size)


def _active_copy(module: Any) -> Any:
    """The trained copy of a head in `modules_to_save`, or the original one while adapters are off; others as they are.

    The copy is a plain linear layer, which its wrapper is not.
    """
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    if module.disable_adapters or not set(module.active_adapters) & set(module.modules_to_save):
        return module.original_module
    return next(module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save)


def head_transform(config: Any) -> HeadTransform:
    """Logit scale and softcap from a model's config, in the conventions of the families that have them.

    `logit_scale` (Cohere), `output_multiplier` (Muse Glimmer) and `lm_head_multiplier` (Falcon-H1) multiply;
    `logits_scaling` divides (Granite, MiniCPM3) but multiplies in HyperCLOVA X; `final_logit_softcapping` (Gemma).
    """
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            scale = getattr(config, name)
            break
    else:
        scaling = getattr(config, "logits_scaling", None) or 1.0
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return HeadTransform(float(scale), getattr(config, "final_logit_softcapping", None))


def predicting_states(
    model: nn.Module, batch: dict[str, Any], positions: TrainedPositions, flat: bool = False
) -> torch.Tensor:
    """Run the backbone once on a batch (B, T) and keep the states that predict a trained token: (N, H).

    The model gets no labels. Where the batch knows the sizes of its rows, they are padded on the right: it gets no
    attention mask, or with `flat` (see `why_padded`) no padding. Must run inside the wrapped forward, as everything
    that touches weights.
    """
    inner = causal_lm(model)
    inputs = {key: value for key, value in batch.items() if key not in _NOT_FOR_THE_BACKBONE}
    if "row_sizes" in batch and flat:
        inputs, positions = flattened(inputs, positions, batch["row_sizes"])
    elif "row_sizes" in batch and not looks_ahead(inner.config.get_text_config()):
        # no token looks at what follows it, so padding on the right hides itself; without a mask attention skips what
        # it would hide, and does so in faster kernels
        del inputs["attention_mask"]
    inputs["use_cache"] = False
    hidden = inner.base_model(**inputs).last_hidden_state  # (B, T, H), or (1, tokens, H)
    return select_predicting(hidden, positions)


def token_loss(
    settings: Settings,
    hidden: torch.Tensor,
    head: Head,
    *,
    ranks: Ranks,
    targets: torch.Tensor | None = None,
    teacher_hidden: torch.Tensor | None = None,
    teacher_head: Head | None = None,
    sampled_log_probs: torch.Tensor | None = None,
    shared_ids: SharedIds = None,
) -> FusedOutput:
    """The objective of `settings` on student states (N, H) and, where it has one, teacher states (N, H'), each through
    its own head. The rest is as in `fused_linear_loss`."""
    if head.plain and (teacher_head is None or teacher_head.plain):
        weight, bias = head.parameters(hidden.dtype)
        teacher_weight = teacher_bias = None
        if teacher_head is not None and teacher_hidden is not None:
            teacher_weight, teacher_bias = teacher_head.parameters(teacher_hidden.dtype)
        return fused_linear_loss(
            settings.objective,
            hidden,
            weight,
            bias=bias,
            targets=targets,
            teacher_hidden=teacher_hidden,
            teacher_weight=teacher_weight,
            teacher_bias=teacher_bias,
            settings=settings,
            sampled_log_probs=sampled_log_probs,
            shared_ids=shared_ids,
            student_transform=head.transform,
            teacher_transform=None if teacher_head is None else teacher_head.transform,
            gather=ranks.gather,
        )

    def teacher_logits(chunk: slice) -> torch.Tensor:
        assert teacher_head is not None and teacher_hidden is not None, "only called where there is a teacher"
        with torch.no_grad():
            return teacher_head.transform(teacher_head.module(teacher_hidden[chunk]).float())

    return chunked_module_loss(
        settings,
        hidden,
        head.module,
        vocab_size=head.vocab_size,
        targets=targets,
        teacher_logits=None if teacher_head is None else teacher_logits,
        sampled_log_probs=sampled_log_probs,
        shared_ids=shared_ids,
        student_transform=head.transform,
        longest=ranks.longest(hidden.size(0)),
    )
