"""The losses from hidden states and head weights: chunks of tokens, value and gradient in one pass.

No (N, V) tensor lives longer than a chunk, and no projection is computed twice: each chunk's logits give the loss, the
gradient g with respect to them, written over them, and at once g·W (for the hidden states) and gᵀ·h (for the head).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..types import FusedOutput
from .objectives import Settings, is_divergence, score
from .products import accumulate, project, pull
from .shared_ids import SharedIds, all_rows, shared_columns, shared_rows, shared_targets

# What the fp32 (n, V) buffers of one chunk may take together. A GPU needs more tokens a chunk to be busy.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 128 << 20, 1 << 30
# On a CPU the chunk is scored a few rows at a time, which stay in the cache: only both logits are as large as a chunk.
# A GPU scores it whole: logits, log p, log q, p, g and temporaries.
_CPU_BUFFERS, _GPU_BUFFERS = 2, 8
_CACHE_BYTES = 2 << 20

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
class _Pass:
    """What one pass is made of besides tensors that autograd must see."""

    settings: Settings
    student: HeadTransform
    teacher: HeadTransform
    shared_ids: SharedIds
    sampled_log_probs: torch.Tensor | None
    autocast: torch.dtype | None
    chunk_tokens: int
    block_rows: int
    gather: Gather
    grad_enabled: bool = True  # inside a Function's forward torch itself says no


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, targets, run):  # type: ignore[override]
        need_hidden, need_weight, need_bias = (run.grad_enabled and need for need in ctx.needs_input_grad[:3])
        grad = need_hidden or need_weight or need_bias
        n_tokens, ids = hidden.size(0), run.shared_ids
        with run.gather(weight, bias, teacher_weight, teacher_bias), torch.autocast(hidden.device.type, enabled=False):
            # fp64 stays fp64 (gradient checks); everything else accumulates in fp32
            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            head = shared_rows(weight, ids).to(run.autocast or hidden.dtype)
            head_bias, teacher_head = shared_rows(bias, ids), None
            logits_of = hidden.new_empty((min(run.chunk_tokens, n_tokens), head.size(0)), dtype=wide)
            if teacher_weight is not None:
                own = teacher_hidden.dtype  # of a teacher in 16 bits: its head is not copied into the student's
                low = own in (torch.float16, torch.bfloat16)
                teacher_head = shared_rows(teacher_weight, ids).to(own if low else run.autocast or own)
                teacher_bias, teacher_logits_of = shared_rows(teacher_bias, ids), torch.empty_like(logits_of)
            d_hidden = torch.empty_like(hidden, dtype=wide) if need_hidden else None
            d_head = torch.zeros_like(head, dtype=wide) if need_weight else None
            d_bias = hidden.new_zeros(head.size(0), dtype=wide) if need_bias else None
            results, teacher_logits = _Results(n_tokens, hidden.device, wide), None
            for chunk in _slices(n_tokens, run.chunk_tokens):
                states = hidden[chunk].to(head.dtype)
                logits = _logits(states, head, head_bias, logits_of)  # (n, V)
                if teacher_head is not None:
                    teacher_states = teacher_hidden[chunk].to(teacher_head.dtype)
                    teacher_logits = _logits(teacher_states, teacher_head, teacher_bias, teacher_logits_of)
                _score_in_place(run, chunk, logits, teacher_logits, targets, grad, results, chunk.start)
                if d_bias is not None:
                    d_bias += logits.sum(0)
                if d_hidden is not None:
                    d_hidden[chunk] = pull(logits, head)
                if d_head is not None:
                    accumulate(d_head, logits, states)
            per_token, metrics = results.per_token, results.metrics
            ctx.gradients = d_hidden, all_rows(d_head, weight, ids), all_rows(d_bias, bias, ids)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(per_token, *metrics.values())
        return per_token.sum(), per_token, tuple(metrics), *metrics.values()

    @staticmethod
    def backward(ctx, grad_sum, *_):  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("The fused loss keeps its gradients for one backward; compute it again for another.")
        gradients, ctx.gradients = ctx.gradients, None
        # They were taken at scale 1 in fp32: the loss scaler and 1/N come in here, so fp16 does not underflow. In
        # place, since a second copy of the head's would be the largest tensor of the step.
        scaled = (
            None if gradient is None else gradient.mul_(grad_sum).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None)


class _Results:
    """What a pass returns for its positions, in tensors made once: small ones left by every block would lie between the
    large ones, and the heap could not use the holes again."""

    def __init__(self, tokens: int, device: torch.device, dtype: torch.dtype):
        self.per_token = torch.empty(tokens, device=device, dtype=dtype)
        self.metrics: dict[str, torch.Tensor] = {}

    def put(self, at: slice, value: torch.Tensor, metrics: dict[str, torch.Tensor]) -> None:
        self.per_token[at] = value
        for name, values in metrics.items():
            if name not in self.metrics:
                self.metrics[name] = values.new_empty(len(self.per_token))
            self.metrics[name][at] = values


def _score_in_place(
    run: _Pass,
    chunk: slice,
    logits: torch.Tensor,
    teacher_logits: torch.Tensor | None,
    targets: torch.Tensor | None,
    grad: bool,
    results: _Results,
    first: int,
) -> None:
    """Score a chunk's raw logits (n, V), block by block, and write the gradient with respect to them in their place.

    `chunk` is where it stands among the pass's positions, `first` where its results go.
    """
    for rows in _slices(logits.size(0), run.block_rows):
        at = slice(chunk.start + rows.start, chunk.start + rows.stop)
        z = run.student(logits[rows])
        value, gradient, metrics = score(
            run.settings,
            z,
            None if teacher_logits is None else run.teacher(teacher_logits[rows]),
            None if targets is None else targets[at],
            None if run.sampled_log_probs is None else run.sampled_log_probs[at],
            grad,
        )
        results.put(slice(first + rows.start, first + rows.stop), value, metrics)
        if gradient is not None:
            logits[rows] = run.student.pull_back_(gradient, z)


class _FromLogits(torch.autograd.Function):
    """A chunk's loss from its transformed logits, for heads that autograd has to differentiate."""

    @staticmethod
    def forward(ctx, logits, teacher_logits, targets, run, chunk):  # type: ignore[override]
        logits = logits.clone()  # it is overwritten with the gradient
        results = _Results(logits.size(0), logits.device, logits.dtype)
        _score_in_place(run, chunk, logits, teacher_logits, targets, ctx.needs_input_grad[0], results, 0)
        per_token, metrics = results.per_token, results.metrics
        ctx.save_for_backward(logits)
        ctx.mark_non_differentiable(*metrics.values())
        return per_token, tuple(metrics), *metrics.values()

    @staticmethod
    def backward(ctx, grad_per_token, *_):  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * grad_per_token.unsqueeze(1), None, None, None, None


@torch.compiler.disable
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
    settings: Settings | None = None,
    sampled_log_probs: torch.Tensor | None = None,
    shared_ids: SharedIds = None,
    student_transform: HeadTransform | None = None,
    teacher_transform: HeadTransform | None = None,
    chunk_bytes: int | None = None,
    gather: Gather = _no_gather,
    **numbers: Any,
) -> FusedOutput:
    """A loss over N positions from hidden states (N, H) and a head (V, H), never holding (N, V) logits.

    `objective` is a name in `OBJECTIVES`; `beta`, `temperature` and further `numbers` are fields of `Settings` (or all
    of them at once: `settings`). `targets` (N,) int64 are the tokens at the positions, `teacher_hidden` (N, H') and
    `teacher_weight` (V, H') the teacher; `sampled_log_probs` (N,) makes an importance ratio. `shared_ids` cuts both
    heads to the ids they share: the first so many, or sorted ids (S,). `chunk_bytes` bounds what (n, V) buffers take;
    `gather` is a context manager that makes sharded weights whole. Gradients go to `hidden`, `weight` and `bias` where
    they ask
    for it, none to the teacher. Raises `ValueError` for an unknown objective, a missing input, heads that differ.
    """
    if settings is None:
        settings = Settings(objective, beta=beta, temperature=temperature, **numbers)
        if objective == "cross_entropy" and temperature != 1.0:
            raise ValueError(f"Cross-entropy is taken at temperature 1; temperature is {temperature}.")
    _check_inputs(settings, targets, teacher_hidden is not None and teacher_weight is not None)
    if teacher_hidden is not None:
        teacher_hidden = teacher_hidden.detach()
    vocab = _rows_of(weight)
    if shared_ids is None and teacher_weight is not None and vocab != _rows_of(teacher_weight):
        raise ValueError(
            f"The heads have {vocab} and {_rows_of(teacher_weight)} ids. Say in `shared_ids` which they have in common."
        )
    run = _Pass(
        settings,
        student_transform or HeadTransform(),
        teacher_transform or HeadTransform(),
        shared_ids,
        sampled_log_probs,
        _autocast_dtype(hidden.device),
        *_sizes(vocab, hidden.device, chunk_bytes),
        gather,
        torch.is_grad_enabled(),
    )
    loss_sum, per_token, names, *metrics = _FusedHead.apply(
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, shared_targets(targets, shared_ids), run
    )
    return FusedOutput(loss_sum, per_token, dict(zip(names, metrics, strict=True)))


@torch.compiler.disable
def chunked_module_loss(
    settings: Settings,
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    *,
    vocab_size: int,
    targets: torch.Tensor | None = None,
    teacher_logits: Callable[[slice], torch.Tensor] | None = None,
    sampled_log_probs: torch.Tensor | None = None,
    shared_ids: SharedIds = None,
    student_transform: HeadTransform | None = None,
    chunk_bytes: int | None = None,
    longest: int = 0,
) -> FusedOutput:
    """`fused_linear_loss` for a head that is no plain linear layer (LoRA on it, quantised).

    `head` maps (n, H) to raw logits (n, V) and is differentiated by autograd, one checkpointed chunk at a time;
    `teacher_logits(chunk)` gives the teacher's transformed logits (n, V') for a slice of the positions. `longest` is
    the most positions of any rank: the heads are called as often as for so many.
    """
    _check_inputs(settings, targets, teacher_logits is not None)
    transform = student_transform or HeadTransform()
    targets = shared_targets(targets, shared_ids)
    chunk_tokens, block_rows = _sizes(vocab_size, hidden.device, chunk_bytes)
    plain = HeadTransform()  # both sides' logits come transformed
    run = _Pass(settings, plain, plain, None, sampled_log_probs, None, chunk_tokens, block_rows, _no_gather)

    def one_chunk(states: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = transform(head(states).float())
        other = None if teacher_logits is None else teacher_logits(chunk).detach()
        with torch.autocast(hidden.device.type, enabled=False):
            logits, other = shared_columns(logits, shared_ids), shared_columns(other, shared_ids)
            per_token, names, *metrics = _FromLogits.apply(logits, other, targets, run, chunk)
        return per_token, dict(zip(names, metrics, strict=True))

    chunks = _slices(hidden.size(0), chunk_tokens, at_least=max(-(-longest // chunk_tokens), 1))
    parts = [checkpoint(one_chunk, hidden[chunk], chunk, use_reentrant=False) for chunk in chunks]
    per_token, metrics = _joined(parts)
    return FusedOutput(per_token.sum(), per_token.detach(), metrics)


# --- parts of a pass -----------------------------------------------------------------------------------------------


def _check_inputs(settings: Settings, targets: torch.Tensor | None, has_teacher: bool) -> None:
    name = settings.objective
    if targets is None and not is_divergence(name):
        raise ValueError(f"The objective {name} needs `targets`.")
    if name == "cross_entropy" and has_teacher:
        raise ValueError("The objective cross_entropy has no teacher; leave `teacher_hidden` and `teacher_weight` out.")
    if name != "cross_entropy" and not has_teacher:
        raise ValueError(f"The objective {name} needs `teacher_hidden` and `teacher_weight`.")


def _logits(states: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    logits = project(states, head, buffer[: states.size(0)])
    return logits if bias is None else logits.add_(bias)


def _joined(parts: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    per_token = torch.cat([value for value, _ in parts])
    return per_token, {name: torch.cat([metrics[name] for _, metrics in parts]) for name in parts[0][1]}


def _slices(total: int, most: int, at_least: int = 1) -> Iterator[slice]:
    """`total` in slices of about one size, at most `most` long and `at_least` so many; an empty one where there is
    nothing, so that every result has its shape."""
    count = max(-(-total // most), at_least)
    for i in range(count):
        yield slice(i * total // count, (i + 1) * total // count)


def _sizes(vocab: int, device: torch.device, chunk_bytes: int | None) -> tuple[int, int]:
    """Tokens a chunk, and rows that are scored at a time."""
    row = vocab * 4
    if device.type == "cpu":
        return max((chunk_bytes or CPU_CHUNK_BYTES) // (row * _CPU_BUFFERS), 1), max(_CACHE_BYTES // row, 1)
    tokens = max((chunk_bytes or GPU_CHUNK_BYTES) // (row * _GPU_BUFFERS), 1)
    return tokens, tokens


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _rows_of(weight: torch.Tensor) -> int:
    return getattr(weight, "ds_shape", weight.shape)[0]  # a ZeRO-3 shard says its real shape in `ds_shape`
