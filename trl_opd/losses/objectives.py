"""Every objective as one entry of a table: from the rows of log-probabilities to value, gradient and what to log.

An entry takes a `Block` of n positions and the `Settings`, and returns the per-token value (n,), its gradient with
respect to the student's logits over τ (n, V), and metrics (n,) by name. A new divergence needs its formula only:
`OBJECTIVES["name"] = divergence_objective(formula)` takes the gradient by autograd, within the block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from . import divergence as d
from .policy_gradient import check_reward, importance_ratio, score_function_loss, token_reward
from .sparse import bucket_log_probs, spread_gradient, union_support

Scored = tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Settings:
    """Which objective, and every number in it. Raises `ValueError` for a value that its objective cannot use."""

    objective: str = "divergence"
    beta: float = 1.0
    temperature: float = 1.0
    skew_alpha: float = 0.1
    label_smoothing: float = 0.0
    weight_by_probability: bool = False
    reward: str = "log_ratio"
    reward_bound: float = 5.0
    reward_power: float = 1.0
    importance_clip: tuple[float, float] = (0.0, 2.0)
    top_k: int = 0
    metrics: bool = True

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"Unknown objective {self.objective!r}; it must be one of {', '.join(OBJECTIVES)}.")
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must be in [0, 1).")
        if self.label_smoothing and self.weight_by_probability:
            raise ValueError("label_smoothing does not go with weight_by_probability (DFT): set one of them.")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (the whole vocabulary) or the size of the support.")
        if self.top_k and not is_divergence(self.objective):
            raise ValueError(f"top_k is {self.top_k}, but the objective {self.objective} looks at one token only.")
        d.check_beta(self.beta)
        d.check_alpha(self.skew_alpha)
        check_reward(self.reward, self.reward_bound, self.reward_power, self.importance_clip)


@dataclass(frozen=True)
class Block:
    """n positions: log-probabilities (n, V) of the student and, where there is one, the teacher; the tokens `targets`
    (n,) that stand there; `sampled_log_probs` (n,), those of the policy that wrote them."""

    log_p: torch.Tensor
    log_q: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    sampled_log_probs: torch.Tensor | None = None

    @cached_property
    def p(self) -> torch.Tensor:
        return self.log_p.exp()

    @cached_property
    def q(self) -> torch.Tensor:
        return self.teacher.exp()

    @property
    def teacher(self) -> torch.Tensor:
        assert self.log_q is not None, "this objective has a teacher"
        return self.log_q

    @property
    def index(self) -> torch.Tensor:
        assert self.targets is not None, "this objective has targets"
        return self.targets.unsqueeze(1)  # (n, 1)

    def of_target(self, log_probs: torch.Tensor) -> torch.Tensor:
        """(n, V) -> (n,), at the targets."""
        return log_probs.gather(1, self.index).squeeze(1)


Objective = Callable[[Block, Settings, bool], Scored]
Formula = Callable[..., torch.Tensor]


def cross_entropy(block: Block, settings: Settings, grad: bool) -> Scored:
    """(1−ε)·−log p_y + ε·mean_v(−log p_v), ε the label smoothing (transformers' `LabelSmoother`); times the detached
    p_y where `weight_by_probability` (DFT, arXiv 2508.05629). Gradient p − (1−ε) onehot(y) − ε/V."""
    smoothing, log_p_y = settings.label_smoothing, block.of_target(block.log_p)
    value = -log_p_y if not smoothing else -(1 - smoothing) * log_p_y - smoothing * block.log_p.mean(1)
    gradient = None
    if grad:
        gradient = _minus_onehot(block, 1 - smoothing)
        if smoothing:
            gradient -= smoothing / gradient.size(1)
    if settings.weight_by_probability:
        p_y = log_p_y.exp()
        value = value * p_y
        gradient = None if gradient is None else gradient.mul_(p_y.unsqueeze(1))
    return value, gradient, {}


def sampled_token(block: Block, settings: Settings, grad: bool) -> Scored:
    """−ρ r log p_y on the token that was sampled. Gradient ρ r (p − onehot(y))."""
    log_p_y, log_q_y = block.of_target(block.log_p), block.of_target(block.teacher)
    reward = token_reward(log_p_y, log_q_y, settings.reward, settings.reward_bound, settings.reward_power)
    ratio = importance_ratio(log_p_y, block.sampled_log_probs, settings.importance_clip)
    gradient = _minus_onehot(block).mul_((ratio * reward).unsqueeze(1)) if grad else None
    return score_function_loss(log_p_y, ratio, reward), gradient, {"reward": reward, "importance_ratio": ratio}


def divergence_objective(formula: Formula, gradient_of: Formula | None = None, setting: str | None = None) -> Objective:
    """An objective from a per-token formula of (log p, log q): (n, V) x 2 -> (n,).

    `gradient_of` is its closed-form gradient; without it autograd takes it. `setting` names the field of `Settings`
    that both get as a third argument; built-in ones also get `p` and `q` themselves. With `top_k` the same formula is
    taken over the support and its tail; there some p are 0, so its slope must be finite at 0 (√p is not: write √(p q)
    as exp((log p + log q) / 2)).
    """

    def objective(block: Block, settings: Settings, grad: bool) -> Scored:
        log_p, log_q = block.log_p, block.teacher
        if settings.top_k:
            ids, valid = union_support(log_p, log_q, settings.top_k)
            log_p, log_q = (bucket_log_probs(x, ids, valid) for x in (log_p, log_q))
        numbers = () if setting is None else (getattr(settings, setting),)
        gradient = None
        if gradient_of is not None:
            p, q = (log_p.exp(), log_q.exp()) if settings.top_k else (block.p, block.q)
            value = formula(log_p, log_q, *numbers, p=p, q=q)
            gradient = gradient_of(log_p, log_q, *numbers, p=p, q=q) if grad else None
        elif grad:
            value, gradient = _by_autograd(formula, log_p, log_q, numbers)
        else:
            value = formula(log_p, log_q, *numbers)
        if not settings.top_k:
            return value, gradient, {}
        mass = {f"{who}_top_k_mass": x[:, :-1].exp().sum(1) for who, x in (("student", log_p), ("teacher", log_q))}
        if gradient is not None:
            gradient = spread_gradient(gradient, log_p, block.log_p, ids, valid)
        return value, gradient, mass

    objective.is_divergence = True  # type: ignore[attr-defined]
    return objective


OBJECTIVES: dict[str, Objective] = {
    "cross_entropy": cross_entropy,
    "divergence": divergence_objective(d.generalized_jsd, d.generalized_jsd_gradient, "beta"),
    "skew_forward_kl": divergence_objective(d.skew_forward_kl, d.skew_forward_kl_gradient, "skew_alpha"),
    "skew_reverse_kl": divergence_objective(d.skew_reverse_kl, d.skew_reverse_kl_gradient, "skew_alpha"),
    "tvd": divergence_objective(d.total_variation, d.total_variation_gradient),
    "policy_gradient": sampled_token,
}


def is_divergence(objective: str) -> bool:
    """Whether an objective compares whole distributions, so that it can be taken over a top-k support."""
    return getattr(OBJECTIVES[objective], "is_divergence", False)


def describe(block: Block, settings: Settings) -> dict[str, torch.Tensor]:
    """What a block tells besides its loss, (n,) by name: the student's `entropy` in nats; with targets, `correct` (the
    target is the student's most likely token); with a teacher and `settings.metrics`, `teacher_entropy`, `forward_kl`,
    `reverse_kl` and `top1_agreement`."""
    log_p, log_q = block.log_p, block.log_q
    metrics = {"entropy": -(block.p * log_p).sum(1)}
    # a maximum takes a tenth of an argmax's time on a CPU
    if block.targets is not None and log_q is None:
        metrics["correct"] = block.of_target(log_p) == log_p.amax(1)
    if log_q is not None and settings.metrics:
        metrics["teacher_entropy"] = -(block.q * log_q).sum(1)
        metrics["forward_kl"] = -metrics["teacher_entropy"] - (block.q * log_p).sum(1)
        metrics["reverse_kl"] = -metrics["entropy"] - (block.p * log_q).sum(1)
        # both maxima stand at one id exactly where the sum of the two reaches the sum of the maxima
        metrics["top1_agreement"] = (log_p + log_q).amax(1) == log_p.amax(1) + log_q.amax(1)
    return metrics


def score(
    settings: Settings,
    logits: torch.Tensor,
    teacher_logits: torch.Tensor | None,
    targets: torch.Tensor | None,
    sampled_log_probs: torch.Tensor | None,
    grad: bool,
) -> Scored:
    """Per-token value (n,), gradient with respect to `logits` (n, V), and metrics (n,) of n positions' logits."""
    block = Block(
        d.log_probs(logits, settings.temperature),
        None if teacher_logits is None else d.log_probs(teacher_logits, settings.temperature),
        targets,
        sampled_log_probs,
    )
    value, gradient, metrics = OBJECTIVES[settings.objective](block, settings, grad)
    if gradient is not None and settings.temperature != 1.0:
        gradient = gradient.div_(settings.temperature)
    return value, gradient, describe(block, settings) | metrics


def _minus_onehot(block: Block, share: float = 1.0) -> torch.Tensor:
    """p − share · onehot(y): (n, V)."""
    index = block.index
    return block.p.clone().scatter_add_(1, index, block.p.new_full(index.shape, -share))


def _by_autograd(
    formula: Formula, log_p: torch.Tensor, log_q: torch.Tensor, numbers: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    # log p are themselves logits of p, so the gradient by them through a log-softmax is the one by z/τ
    with torch.enable_grad():
        logits = log_p.detach().requires_grad_()
        value = formula(torch.log_softmax(logits, -1), log_q, *numbers)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
    return value.detach(), gradient
