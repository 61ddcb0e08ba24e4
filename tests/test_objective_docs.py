"""docs/objectives.md says what the package does, and its example trains."""

import importlib.util
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tiny import qwen3, tokenizer
from transformers import AutoModelForCausalLM

from trl_opd import losses, recipes
from trl_opd.losses import OBJECTIVES, divergence_objective, fused_linear_loss
from trl_opd.losses.policy_gradient import REWARDS
from trl_opd.metrics import QUANTILES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "custom_objective.py"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load(ROOT / "docs" / "plot_objectives.py")


# --- the page ------------------------------------------------------------------------------------------------------


def test_every_objective_and_reward_is_on_the_page():
    for name in (*(OBJECTIVES.keys() - {"cross_entropy", "hellinger"}), *REWARDS):
        assert f"`{name}`" in PAGE, name


def test_every_metric_is_on_the_page():
    """Those that a loss returns, and what is made of a reward's spread."""
    logits, tokens = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)
    for objective, numbers in (("divergence", {"top_k": 1}), ("policy_gradient", {})):
        head = torch.eye(4)
        out = fused_linear_loss(
            objective, logits, head, targets=tokens, teacher_hidden=logits, teacher_weight=head, **numbers
        )
        for name in out.metrics.keys() - {"entropy"}:
            assert f"`distill/{name}`" in PAGE, name
    assert "`entropy`" in PAGE and "`distill/reward_variance`" in PAGE
    for quantile in QUANTILES:
        assert f"_{quantile}`" in PAGE, quantile


def numbers_on_the_page():
    head, rows = re.search(r"^\| q\(y\) \|(.*)\|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE).groups()
    assert [float(cell) for cell in head.split("|")] == list(script.COLUMNS)
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    return {label: [float(value) for value in values] for label, *values in table}


def test_the_pages_numbers_are_the_packages():
    """Three digits are shown, so half a unit of the last one is at most 1/200 of the value."""
    measured = script.measure()
    assert numbers_on_the_page().keys() == measured.keys()
    for label, values in numbers_on_the_page().items():
        assert values == pytest.approx(measured[label], rel=5e-3), label


def plain(label, p, q):
    """The divergences of two coins, written from the formulas: the other tokens keep their shape, so they are one."""

    def kl(a, b):
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    def jsd(beta):
        m = (1 - beta) * p + beta * q
        return beta * kl(q, m) + (1 - beta) * kl(p, m)

    return {
        "reverse KL": lambda: kl(p, q),
        "skew reverse KL, α .1": lambda: kl(p, 0.9 * q + 0.1 * p),
        "forward KL": lambda: kl(q, p),
        "skew forward KL, α .1": lambda: kl(q, 0.1 * q + 0.9 * p),
        "TVD": lambda: (abs(p - q) + abs((1 - p) - (1 - q))) / 2,
        "JSD, β .5": lambda: jsd(0.5),
        "JSD, β .01": lambda: jsd(0.01),
    }[label]()


def test_the_pages_numbers_by_hand():
    """Divergences by differences of the logit of p; a sampled token's gradient is r (p − 1), with r worked out here."""
    logit, step = math.log(0.2 / 0.8), 1e-5
    low, high = (1 / (1 + math.exp(-z)) for z in (logit - step, logit + step))
    page = numbers_on_the_page()
    for column, q in enumerate(script.COLUMNS):
        log_ratio = math.log(q / 0.2)
        rewards = {
            "log_ratio": log_ratio,
            "clip, bound 5": max(log_ratio, -5.0),
            "tanh, bound 5": math.tanh(log_ratio / 5),
            "power, α 1": q - 0.2,
        }
        for label, values in page.items():
            if label in rewards:
                expected = abs(rewards[label]) * 0.8
            else:
                expected = abs(plain(label, high, q) - plain(label, low, q)) / (2 * step)
            assert values[column] == pytest.approx(expected, rel=5e-3), (label, q)


def test_a_filter_turns_the_policy_gradient_away():
    (shown,) = re.findall(r"top 4 of 32 tokens is (\d+)% off", PAGE)
    assert script.V == 32 and round(100 * script.filter_error(4)) == int(shown)
    assert script.filter_error(script.V) < 1e-12


@pytest.mark.parametrize(
    "objective, numbers, most, steepest",
    [
        ("divergence", {"beta": 0.0}, math.inf, 1.0),
        ("divergence", {"beta": 0.5}, math.log(2), 1.0),
        ("divergence", {"beta": 0.9}, math.log(2), 1.0),
        ("skew_forward_kl", {}, math.log(10), 1.0),
        ("skew_reverse_kl", {}, math.log(10), 1 + math.log(10)),
        ("tvd", {}, 1.0, 0.25),
    ],
)
def test_ranges_that_the_page_gives(objective, numbers, most, steepest):
    """Two models that contradict each other (logits of size 30): value and gradient stay in range, reverse KL's not."""
    torch.manual_seed(0)
    student, teacher = (30 * torch.randn(200, 8, dtype=torch.float64) for _ in range(2))
    value, gradient = value_and_gradient(objective, student, teacher, **numbers)
    assert value.min() >= -1e-12 and value.max() <= most + 1e-12
    assert gradient.abs().max() <= steepest + 1e-12
    assert value_and_gradient("divergence", student, teacher, beta=1.0)[1].abs().max() > 5


def test_a_support_without_its_tail_can_cost_less_than_nothing():
    """p = (.4, .6), q = (.5, .5), one token kept: the two numbers on the page."""
    alone, tail = (a * math.log(a / 0.5) for a in (0.4, 0.6))
    for number in (alone, alone + tail):
        assert f"= {number:.3f}".replace("-0", "−").replace(" 0", " ") in PAGE
    p, q = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.4, 0.6], [0.5, 0.5]))
    value, _ = value_and_gradient("divergence", p, q, top_k=1)
    assert value.item() == pytest.approx(alone + tail)


@pytest.mark.parametrize("recipe", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL), ids=lambda r: r.split("\n")[0])
def test_recipes_on_the_page_are_understood(tmp_path, recipe):
    job = re.match(r"# (distill|sft):", recipe).group(1)
    common = f"model_name_or_path: s\ndataset_name: d\noutput_dir: {tmp_path}\n"
    common += "teacher_model_name_or_path: t\n" if job == "distill" else ""
    path = tmp_path / "recipe.yaml"
    path.write_text(common + recipe)
    training = recipes.parse(job, ["--config", str(path)]).training
    for key, value in yaml.safe_load(recipe).items():
        kept = getattr(training, key)
        assert (list(kept) if isinstance(kept, tuple) else kept) == value, key


def test_the_picture(tmp_path, monkeypatch):
    assert script.PICTURE.stat().st_size < 150_000
    monkeypatch.setattr(script, "PICTURE", tmp_path / "images" / "picture.png")
    script.plot()
    assert script.PICTURE.read_bytes()[1:4] == b"PNG"


# --- the example ---------------------------------------------------------------------------------------------------


def value_and_gradient(objective, student, teacher, **numbers):
    """(n, V) logits -> per-token value (n,) and gradient (n, V), through the head, in two chunks."""
    hidden, head = student.clone().requires_grad_(), torch.eye(student.size(1), dtype=student.dtype)
    numbers["chunk_bytes"] = student.numel() * 4
    out = fused_linear_loss(objective, hidden, head, teacher_hidden=teacher, teacher_weight=head, **numbers)
    return out.per_token, torch.autograd.grad(out.loss_sum, hidden)[0]


@pytest.fixture
def example(monkeypatch):
    """The example as a module; its entry in the table goes when the test is over."""
    monkeypatch.setitem(OBJECTIVES, "hellinger", None)
    return load(EXAMPLE)


def test_hellinger_by_hand(example):
    """p = (.5, .25, .25), q = (.25, .25, .5): 1 − (2 √.125 + .25) = .0429, 0 for equals, 1 for strangers."""
    p, q = (torch.tensor([row]).log() for row in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
    assert example.hellinger(p, q).item() == pytest.approx(1 - 2 * math.sqrt(0.125) - 0.25, abs=1e-6)
    assert example.hellinger(q, p).item() == example.hellinger(p, q).item()
    assert example.hellinger(p, p).item() == 0
    one, other = (torch.tensor([row]) for row in ([0.0, -1e4], [-1e4, 0.0]))
    assert example.hellinger(one, other).item() == pytest.approx(1)


@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_hellingers_gradient_through_the_head(example, tau):
    """½ (p Σ √(p q) − √(p q)) / τ, from the derivative −½ √(q/p) by p."""
    torch.manual_seed(0)
    student, teacher = (2 * torch.randn(6, 11, dtype=torch.float64) for _ in range(2))
    value, gradient = value_and_gradient("hellinger", student, teacher, temperature=tau)
    p, q = (torch.softmax(z / tau, -1) for z in (student, teacher))
    root = (p * q).sqrt()
    affinity = root.sum(-1, keepdim=True)
    torch.testing.assert_close(value, 1 - affinity.squeeze(-1))
    torch.testing.assert_close(gradient, 0.5 * (p * affinity - root) / tau)


def test_hellinger_over_a_support(example):
    """At most the whole, and equal to it where the support is everything, gradient too."""
    torch.manual_seed(0)
    student, teacher = (2 * torch.randn(6, 11, dtype=torch.float64) for _ in range(2))
    whole, gradient = value_and_gradient("hellinger", student, teacher)
    assert (value_and_gradient("hellinger", student, teacher, top_k=2)[0] <= whole + 1e-12).all()
    same, same_gradient = value_and_gradient("hellinger", student, teacher, top_k=11)
    torch.testing.assert_close(same, whole)
    torch.testing.assert_close(same_gradient, gradient)


def test_the_example_trains(tmp_path, monkeypatch):
    """From its command line, on tiny models: the formula is what is trained with, and the student moves."""
    student, teacher, rows, out = (str(tmp_path / name) for name in ("student", "teacher", "prompts.jsonl", "out"))
    for folder, model in ((student, qwen3()), (teacher, qwen3(seed=1, hidden=48))):
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    Path(rows).write_text("".join(json.dumps({"prompt": f"{i} + 1 = "}) + "\n" for i in range(4)))
    calls = []

    def noted(formula):
        return divergence_objective(lambda log_p, log_q: calls.append(log_p.shape) or formula(log_p, log_q))

    monkeypatch.setattr(losses, "divergence_objective", noted)
    monkeypatch.setitem(OBJECTIVES, "hellinger", None)
    files = ["--student", student, "--teacher", teacher, "--dataset", rows, "--output", out]
    monkeypatch.setattr(sys, "argv", ["custom_objective.py", *files, "--steps", "2", "--max_completion_length", "8"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert len(calls) >= 2 and all(shape[1] == 260 for shape in calls)
    trained = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert any(not torch.equal(weight, trained[name]) for name, weight in qwen3().state_dict().items())
