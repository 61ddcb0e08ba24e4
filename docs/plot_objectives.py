"""The picture and the table of numbers in docs/objectives.md: how hard each objective pushes on one token.

    python docs/plot_objectives.py      # writes docs/images/objective_gradients.png, prints the table

One position. The student gives the token y a probability of .2, the teacher from .1 down to 1e-6; both spread the rest
of their mass in the same shape over the other tokens, so that the numbers depend neither on the shape nor on V. What is
shown is |∂loss/∂z_y|, z_y the student's logit of y, from the package's own loss in fp64.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trl_opd.losses import fused_linear_loss

PICTURE = Path(__file__).parent / "images" / "objective_gradients.png"
V, Y, P_Y = 32, 0, 0.2
COLUMNS = (1e-1, 1e-3, 1e-6)  # the teacher's probability of y in the table

# label, objective, its numbers, (colour, line style, how many points the picture moves the label up)
DIVERGENCES = (
    ("reverse KL", "divergence", {"beta": 1.0}, ("tab:red", "-", 0)),
    ("skew reverse KL, α .1", "skew_reverse_kl", {"skew_alpha": 0.1}, ("tab:orange", "--", 8)),
    ("forward KL", "divergence", {"beta": 0.0}, ("tab:blue", "-", 5)),
    ("skew forward KL, α .1", "skew_forward_kl", {"skew_alpha": 0.1}, ("darkcyan", "--", 0)),
    ("TVD", "tvd", {}, ("black", ":", -8)),
    ("JSD, β .5", "divergence", {"beta": 0.5}, ("tab:green", "-.", 0)),
)
SMALL_BETA = ("JSD, β .01", "divergence", {"beta": 0.01}, None)  # in the table only
REWARDS = (
    ("log_ratio", "policy_gradient", {"reward": "log_ratio"}, ("tab:red", "-", 0)),
    ("clip, bound 5", "policy_gradient", {"reward": "clip", "reward_bound": 5.0}, ("tab:blue", "--", 0)),
    ("tanh, bound 5", "policy_gradient", {"reward": "tanh", "reward_bound": 5.0}, ("tab:green", "-.", 0)),
    ("power, α 1", "policy_gradient", {"reward": "power", "reward_power": 1.0}, ("black", ":", 0)),
)


def probabilities(of_y: float) -> torch.Tensor:
    """(1, V): `of_y` on the token y, the rest falling as 1/rank over the others."""
    rest = 1 / torch.arange(1, V, dtype=torch.float64)
    return torch.cat([torch.tensor([of_y], dtype=torch.float64), (1 - of_y) * rest / rest.sum()]).unsqueeze(0)


def gradient(q_y: float, objective: str, numbers: dict, sampled: int = Y) -> torch.Tensor:
    """∂loss/∂z (V,) of one position. With the identity as head, hidden states are logits."""
    logits, head = probabilities(P_Y).log().requires_grad_(), torch.eye(V, dtype=torch.float64)
    out = fused_linear_loss(
        objective,
        logits,
        head,
        targets=torch.tensor([sampled]),
        teacher_hidden=probabilities(q_y).log(),
        teacher_weight=head,
        **numbers,
    )
    return torch.autograd.grad(out.loss_sum, logits)[0].squeeze(0)


def push(q_y: float, objective: str, numbers: dict) -> float:
    return gradient(q_y, objective, numbers)[Y].abs().item()


def measure() -> dict[str, list[float]]:
    """The numbers of the table by label, one for each of `COLUMNS`."""
    return {
        label: [push(q_y, objective, numbers) for q_y in COLUMNS]
        for label, objective, numbers, _ in (*DIVERGENCES, SMALL_BETA, *REWARDS)
    }


def filter_error(top: int, q_y: float = 1e-3) -> float:
    """How far the policy gradient, averaged over the student's `top` most likely tokens, is from reverse KL's.

    Relative, in the 2-norm. 0 with `top` = V: the average over all that the student may say is reverse KL's gradient.
    """
    chance, tokens = probabilities(P_Y).squeeze(0).topk(top)
    chance = chance / chance.sum()
    average = sum(c * gradient(q_y, "policy_gradient", {}, y) for c, y in zip(chance, tokens.tolist(), strict=True))
    exact = gradient(q_y, "divergence", {"beta": 1.0})
    return ((average - exact).norm() / exact.norm()).item()


def table() -> str:
    lines = ["| q(y) | " + " | ".join(f"{q_y:.0e}" for q_y in COLUMNS) + " |", "|---|---|---|---|"]
    for label, values in measure().items():
        lines.append(f"| {label} | " + " | ".join(f"{value:.3g}" for value in values) + " |")
    return "\n".join(lines)


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["font.size"] = 10
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    teacher = torch.logspace(-1, -6, 61).tolist()
    for ax, curves in zip(axes, (DIVERGENCES, REWARDS), strict=True):
        for label, objective, numbers, (color, style, up) in curves:
            values = [push(q_y, objective, numbers) for q_y in teacher]
            ax.plot(teacher, values, style, color=color, linewidth=1.8)
            at = {"xy": (teacher[-1], values[-1]), "xytext": (6, up), "textcoords": "offset points"}
            ax.annotate(label, **at, color=color, va="center")  # at the curve's end: no legend to look up
        ax.set(xscale="log", yscale="log", xlim=(1e-1, 1e-6), xlabel="q(y), the teacher's probability of y")
        ax.grid(alpha=0.3)
    axes[0].set(title="divergences", ylabel="|∂loss/∂z_y|, the student says y with p(y) = 0.2")
    axes[1].set(title="policy gradient, y was sampled: by reward")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    plot()
    print(table())
    print(f"policy gradient under a top-4 filter: {filter_error(4):.0%} off, without one {filter_error(V):.0e}")
