"""The sampled-token objective: only the token that was written is graded, by a reward that carries no gradient.

All tensors are (N,): log-probabilities of the sampled tokens under the student (p), the teacher (q), and the policy
that sampled them.
"""

from __future__ import annotations

import torch

REWARDS = ("log_ratio", "clip", "tanh", "power")


def check_reward(reward: str, bound: float, power: float, importance_clip: tuple[float, float]) -> None:
    """Raise `ValueError` for a reward that does not exist and for numbers that make no sense with it."""
    if reward not in REWARDS:
        raise ValueError(f"reward is {reward!r}; it must be one of {', '.join(REWARDS)}.")
    if bound <= 0:
        raise ValueError(f"reward_bound is {bound}; it must be above 0: the largest size of a clipped reward, in nats.")
    if power <= 0:
        raise ValueError(f"reward_power is {power}; it must be above 0: the reward is q^power − p^power.")
    low, high = importance_clip
    if not 0.0 <= low <= high:
        raise ValueError(f"importance_clip is {importance_clip}; it must be (low, high) with 0 <= low <= high.")


def token_reward(
    log_p_y: torch.Tensor, log_q_y: torch.Tensor, reward: str = "log_ratio", bound: float = 5.0, power: float = 1.0
) -> torch.Tensor:
    """The detached reward of sampled tokens, (N,) x 2 -> (N,). With p_y = .5 and q_y = .25:

    `log_ratio` log q_y − log p_y = −.6931; `clip` that within ±bound, at bound .5 −.5; `tanh` tanh(log_ratio / bound),
    at bound .5 −.8824, in [−1, 1]; `power` q_y^power − p_y^power, at power 1 −.25, in [−1, 1] (PowerOPD, arXiv
    2606.17199).
    """
    log_p_y, log_q_y = log_p_y.detach(), log_q_y.detach()
    if reward == "power":
        return (power * log_q_y).exp() - (power * log_p_y).exp()
    log_ratio = log_q_y - log_p_y
    if reward == "clip":
        return log_ratio.clamp(-bound, bound)
    return torch.tanh(log_ratio / bound) if reward == "tanh" else log_ratio


def importance_ratio(
    log_p_y: torch.Tensor, sampled_log_probs: torch.Tensor | None, clip: tuple[float, float] = (0.0, 2.0)
) -> torch.Tensor:
    """p_y now over p_y when sampled, detached and within `clip`; 1 where the samples are fresh (`None`)."""
    if sampled_log_probs is None:
        return torch.ones_like(log_p_y)
    return (log_p_y.detach() - sampled_log_probs).exp().clamp(*clip)


def score_function_loss(log_p_y: torch.Tensor, ratio: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """The score-function loss −ρ r log p_y, with ratio ρ and reward r held constant: (N,) x 3 -> (N,).

    With `log_ratio`, ρ = 1 and y ~ p its gradient is reverse KL's on average. Its value means nothing by itself.
    """
    return -ratio.detach() * reward.detach() * log_p_y
