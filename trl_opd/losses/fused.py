"""The losses from hidden states and head weights: chunks of tokens, value and gradient in one pass.

No (N, V) tensor lives longer than a chunk, and no projection is computed twice: each chunk's logits give the loss, the
closed-form gradient g with respect to them, and at once g·W (for the hidden states) and gᵀ·h (for the head).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..types import FusedOutput
from .divergence import check_beta, forward_kl, generalized_jsd, log_mixture, log_probs, reverse_kl

CHUNK_BYTES = 128 << 20  # what the fp32 (n, V) buffers of one chunk may take together
_BUFFERS = 6  # logits, log p, log q, p, g and one temporary

Gather = Callable[..., AbstractContextManager[Any]]


def _no_gather(*_: torch.Tensor | None) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class HeadTransform:
    """What a model does to its logits after the projection: `softcap · tanh(scale · z / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def pull_back_(self, gradient: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
        """Gradient with respect to the transformed logits -> with respect to the raw ones, in place."""
        if self.softcap is not None:
            gradient *= 1 - (transformed / self.softcap) ** 2
        return gradient.mul_(self.scale) if self.scale != 1.0 else gradient


@dataclass(frozen=True)
class _Spec:
    objective: str
    beta: float
    temperature: float
    student: HeadTransform
    teacher: HeadTransform
    chunk_tokens: int
    compute_dtype: torch.dtype
    teacher_dtype: torch.dtype
    gather: Gather


def _cross_entropy(log_p: torch.Tensor, targets: torch.Tensor, grad: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """−log p_y and its gradient p − onehot(y): (n, V), (n,) -> (n,), (n, V)."""
    index = targets.unsqueeze(1)
    gradient = log_p.exp().scatter_add_(1, index, torch.full_like(index, -1, dtype=log_p.dtype)) if grad else None
    return -log_p.gather(1, index).squeeze(1), gradient


def _divergence(
    log_p: torch.Tensor, log_q: torch.Tensor, beta: float, grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The divergence that `beta` selects and its gradient with respect to z/τ: (n, V) x 2 -> (n,), (n, V)."""
    if beta == 0.0:
        return forward_kl(log_p, log_q), log_p.exp().sub_(log_q.exp()) if grad else None
    against = log_q if beta == 1.0 else log_mixture(log_p, log_q, beta)
    value = kl = reverse_kl(log_p, against)
    if beta < 1.0:
        value = beta * forward_kl(against, log_q) + (1 - beta) * kl  # forward_kl(m, q) is KL(q‖m)
    # p ⊙ (log p − log m − KL(p‖m)), times (1 − β) for JSD
    gradient = (log_p - against).sub_(kl.unsqueeze(1)).mul_(log_p.exp()) if grad else None
    if gradient is not None and beta < 1.0:
        gradient.mul_(1 - beta)
    return value, gradient


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, targets, spec):  # type: ignore[override]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad = need_hidden or need_weight or need_bias
        n_tokens, dtype = hidden.size(0), spec.compute_dtype
        per_token = hidden.new_empty(n_tokens, dtype=torch.float32)
        entropy = torch.empty_like(per_token)
        correct = hidden.new_empty(n_tokens, dtype=torch.bool)
        with spec.gather(weight, bias, teacher_weight, teacher_bias), _autocast_off(hidden.device):
            # fp64 stays fp64 (gradient checks); everything else accumulates in fp32
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            d_hidden = torch.empty_like(hidden, dtype=wide) if need_hidden else None
            d_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
            d_bias = torch.zeros_like(bias, dtype=wide) if need_bias else None
            head = weight.to(dtype)
            teacher_head = None if teacher_weight is None else teacher_weight.to(spec.teacher_dtype)
            per_token, entropy = per_token.to(wide), entropy.to(wide)
            for start in range(0, n_tokens, spec.chunk_tokens):
                chunk = slice(start, start + spec.chunk_tokens)
                states = hidden[chunk].to(dtype)
                logits = spec.student(_project(states, head, bias, wide))  # (n, V)
                log_p = log_probs(logits, spec.temperature)
                if spec.objective == "cross_entropy":
                    value, gradient = _cross_entropy(log_p, targets[chunk], grad)
                else:
                    assert teacher_head is not None, "a divergence has a teacher"
                    z_t = spec.teacher(
                        _project(teacher_hidden[chunk].to(spec.teacher_dtype), teacher_head, teacher_bias, wide)
                    )
                    value, gradient = _divergence(log_p, log_probs(z_t, spec.temperature), spec.beta, grad)
                per_token[chunk] = value
                entropy[chunk] = -(log_p.exp() * log_p).sum(1)
                if targets is not None:
                    correct[chunk] = log_p.argmax(1) == targets[chunk]
                if gradient is None:
                    continue
                if spec.temperature != 1.0:
                    gradient.div_(spec.temperature)
                gradient = spec.student.pull_back_(gradient, logits)
                if d_bias is not None:
                    d_bias += gradient.sum(0)
                gradient = gradient.to(dtype)
                if d_hidden is not None:
                    d_hidden[chunk] = (gradient @ head).to(wide)
                if d_weight is not None:
                    if dtype == wide:
                        d_weight.addmm_(gradient.t(), states)
                    else:
                        d_weight += gradient.t() @ states
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(per_token, entropy, correct)
        return per_token.sum(), per_token, entropy, correct

    @staticmethod
    def backward(ctx, grad_sum, *_):  # type: ignore[override]
        # The gradients were taken at scale 1 in fp32: the loss scaler and 1/N come in here, so fp16 does not underflow
        scaled = (
            None if saved is None else (saved * grad_sum).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None)


def _project(states: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    logits = (states @ head.t()).to(wide)
    return logits if bias is None else logits + bias.to(wide)


def _autocast_off(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False)


def fused_linear_loss(
    objective: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
    teacher_hidden: torch.Tensor | None = None,
    teacher_weight: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    beta: float = 1.0,
    temperature: float = 1.0,
    student_transform: HeadTransform | None = None,
    teacher_transform: HeadTransform | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    gather: Gather = _no_gather,
) -> FusedOutput:
    """A loss over N positions from hidden states (N, H) and a head (V, H), never holding (N, V) logits.

    `objective` is `cross_entropy` (needs `targets` (N,); τ = 1) or `divergence` (needs `teacher_hidden` (N, H'),
    `teacher_weight` (V, H'); `beta` and `temperature` as in `generalized_jsd`; `targets` only for `correct`).
    `gather` is a context manager that makes sharded weights whole. Gradients: closed form, to `hidden`, `weight` and
    `bias` where they ask for it; none to the teacher. Raises `ValueError` for an unknown objective or a missing input.
    """
    if objective == "cross_entropy":
        if targets is None:
            raise ValueError("The objective cross_entropy needs `targets`.")
        if temperature != 1.0:
            raise ValueError(f"Cross-entropy is taken at temperature 1; temperature is {temperature}.")
    elif objective == "divergence":
        check_beta(beta)
        if teacher_hidden is None or teacher_weight is None:
            raise ValueError("The objective divergence needs `teacher_hidden` and `teacher_weight`.")
        if weight.size(0) != teacher_weight.size(0) and weight.numel() and teacher_weight.numel():
            raise ValueError(
                f"The heads have {weight.size(0)} and {teacher_weight.size(0)} ids; they must be the same."
            )
        teacher_hidden = teacher_hidden.detach()
    else:
        raise ValueError(f"Unknown objective {objective!r}; it must be 'cross_entropy' or 'divergence'.")
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    vocab = getattr(weight, "ds_shape", weight.shape)[0]  # a ZeRO-3 shard says its real shape in `ds_shape`
    spec = _Spec(
        objective=objective,
        beta=beta,
        temperature=temperature,
        student=student_transform or HeadTransform(),
        teacher=teacher_transform or HeadTransform(),
        chunk_tokens=max(chunk_bytes // (vocab * 4 * _BUFFERS), 1),
        compute_dtype=autocast or hidden.dtype,
        teacher_dtype=autocast or (hidden if teacher_hidden is None else teacher_hidden).dtype,
        gather=gather,
    )
    return FusedOutput(
        *_FusedHead.apply(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, targets, spec)
    )


def chunked_module_loss(
    objective: str,
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    *,
    vocab_size: int,
    targets: torch.Tensor | None = None,
    teacher_logits: Callable[[slice], torch.Tensor] | None = None,
    beta: float = 1.0,
    temperature: float = 1.0,
    student_transform: HeadTransform | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> FusedOutput:
    """`fused_linear_loss` for a head that is no plain linear layer (LoRA on it, quantised, a trained copy).

    `head` maps (n, H) to raw logits (n, V) and is differentiated by autograd, one checkpointed chunk at a time;
    `teacher_logits(chunk)` gives the teacher's transformed logits (n, V) for a slice of the positions.
    """
    transform = student_transform or HeadTransform()
    step = max(chunk_bytes // (vocab_size * 4 * _BUFFERS), 1)

    def one_chunk(states: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
        chunk = slice(start, start + step)
        logits = transform(head(states).float())
        if objective == "cross_entropy":
            assert targets is not None, "cross_entropy needs targets"
            value = _cross_entropy(log_probs(logits), targets[chunk], grad=False)[0]
        else:
            assert teacher_logits is not None, "divergence needs teacher_logits"
            value = generalized_jsd(logits, teacher_logits(chunk).detach(), beta, temperature)
        with torch.no_grad():
            log_p = log_probs(logits, temperature)
            entropy = -(log_p.exp() * log_p).sum(1)
            correct = (
                logits.argmax(1) == targets[chunk] if targets is not None else entropy.new_zeros(len(entropy)).bool()
            )
        return value, entropy, correct

    parts = [
        checkpoint(one_chunk, hidden[start : start + step], start, use_reentrant=False)
        for start in range(0, max(hidden.size(0), 1), step)
    ]
    value, entropy, correct = (torch.cat(column) for column in zip(*parts, strict=True))
    return FusedOutput(value.sum(), value.detach(), entropy.detach(), correct)
