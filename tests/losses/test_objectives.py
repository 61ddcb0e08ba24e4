"""Every objective against an fp64 reference written from its formula with probabilities, and against other codebases.

The reference (`per_token` and what it calls) shares no code with the package: softmax by exp and sum, KL as
Σ a log(a/b), gradients by autograd, buckets as sets of ids with the tail as 1 − Σ.
"""

import math

import pytest
import torch

from trl_opd.losses import (
    OBJECTIVES,
    HeadTransform,
    Settings,
    bucket_log_probs,
    chunked_module_loss,
    divergence_objective,
    forward_kl,
    fused,
    fused_linear_loss,
    generalized_jsd,
    importance_ratio,
    jensen_shannon,
    log_probs,
    objectives,
    products,
    reverse_kl,
    score_function_loss,
    skew_forward_kl,
    skew_reverse_kl,
    sparse,
    token_divergence,
    token_reward,
    top_k_support,
    total_variation,
    union_support,
)
from trl_opd.losses.divergence import (
    forward_kl_gradient,
    generalized_jsd_gradient,
    jensen_shannon_gradient,
    reverse_kl_gradient,
    skew_forward_kl_gradient,
    skew_reverse_kl_gradient,
    total_variation_gradient,
)

N, H, H_T, V = 13, 8, 6, 17
ROW = V * 4 * 2  # bytes that `chunk_bytes` counts for one position on a CPU
BETAS, ALPHAS, TAUS = (0.0, 0.3, 0.5, 1.0), (0.0, 0.1, 0.5), (0.7, 1.0, 2.0)
REWARDS = ("log_ratio", "clip", "tanh", "power")

# --- the reference ---------------------------------------------------------------------------------------------------


def constant(x):
    return x.data  # not `.detach()`, which mutations below replace


def softmax(z, tau=1.0):
    e = torch.exp((z - constant(z).amax(-1, keepdim=True)) / tau)
    return e / e.sum(-1, keepdim=True)


def kl(a, b):
    """Σ a log(a/b): (..., V) x 2 -> (...)."""
    return (a * torch.log(a / b)).sum(-1)


def distance(objective, p, q, beta=1.0, skew_alpha=0.1):
    """The divergence of two distributions, from its definition: (..., V) x 2 -> (...)."""
    if objective == "tvd":
        return (p - q).abs().sum(-1) / 2
    if objective == "hellinger":
        return (p.sqrt() - q.sqrt()).square().sum(-1) / 2
    if objective == "skew_forward_kl":
        return kl(q, skew_alpha * q + (1 - skew_alpha) * p)
    if objective == "skew_reverse_kl":
        return kl(p, (1 - skew_alpha) * q + skew_alpha * p)
    m = (1 - beta) * p + beta * q
    return kl(q, p) if beta == 0 else kl(p, q) if beta == 1 else beta * kl(q, m) + (1 - beta) * kl(p, m)


def buckets(p, q, k):
    """Rows (V,) x 2 -> the same two over the ids in either's top k, each its own bucket, and one for all the others."""
    ids = sorted(set(p.topk(k).indices.tolist()) | set(q.topk(k).indices.tolist()))
    if len(ids) == p.numel():
        return p, q
    return tuple(torch.cat([x[ids], 1 - x[ids].sum().view(1)]) for x in (p, q))


def graded(p_y, q_y, reward="log_ratio", reward_bound=5.0, reward_power=1.0):
    """The reward of sampled tokens, with their gradient."""
    ratio = torch.log(q_y / p_y)
    return {
        "log_ratio": ratio,
        "clip": ratio.clamp(-reward_bound, reward_bound),
        "tanh": torch.tanh(ratio / reward_bound),
        "power": q_y**reward_power - p_y**reward_power,
    }[reward]


def per_token(objective, z_s, z_t=None, y=None, sampled=None, *, temperature=1.0, top_k=0, **numbers):
    """Loss of each position from logits (N, V) and tokens (N,), differentiable: (N,)."""
    p = softmax(z_s, temperature)
    rows = torch.arange(len(p))
    if objective == "cross_entropy":
        smoothing = numbers.get("label_smoothing", 0.0)
        loss = (1 - smoothing) * -torch.log(p[rows, y]) + smoothing * -torch.log(p).mean(1)
        return constant(p[rows, y]) * loss if numbers.get("weight_by_probability") else loss
    q = constant(softmax(z_t, temperature))
    if objective == "policy_gradient":
        p_y, (low, high) = p[rows, y], numbers.pop("importance_clip", (0.0, 2.0))
        ratio = 1.0 if sampled is None else constant(p_y / torch.exp(sampled)).clamp(low, high)
        return -ratio * constant(graded(p_y, q[rows, y], **numbers)) * torch.log(p_y)
    if top_k:
        return torch.stack([distance(objective, *buckets(a, b, top_k), **numbers) for a, b in zip(p, q, strict=True)])
    return distance(objective, p, q, **numbers)


# --- inputs and the comparison ---------------------------------------------------------------------------------------


def make_inputs(dtype=torch.float64, n=N, v=V, v_t=None, seed=0):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "hidden": rand(n, H).requires_grad_(),
        "weight": rand(v, H).requires_grad_(),
        "bias": rand(v).requires_grad_(),
        "teacher_hidden": rand(n, H_T),
        "teacher_weight": rand(v_t or v, H_T),
        "teacher_bias": rand(v_t or v),
        "targets": torch.randint(v, (n,), generator=g),
    }


def in_fp64(x):
    """The same numbers in fp64, as leaves of their own."""
    return {
        k: constant(t).double().clone().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for k, t in x.items()
    }


def logits_of(x):
    return (
        x["hidden"] @ x["weight"].T + x["bias"],
        x["teacher_hidden"] @ x["teacher_weight"].T + x["teacher_bias"],
    )


def samplers_log_probs(x, tau):
    """log p_y of an older policy: the ratio to it runs from .3 to 3.3 over the positions."""
    p_y = softmax(constant(logits_of(x)[0]), tau)[torch.arange(len(x["targets"])), x["targets"]]
    return torch.log(p_y) + torch.linspace(-1.2, 1.2, len(p_y), dtype=p_y.dtype)


def run(objective, x, sampled=None, chunk_bytes=5 * ROW, **numbers):
    teacher = () if objective == "cross_entropy" else ("teacher_hidden", "teacher_weight", "teacher_bias")
    return fused_linear_loss(
        objective,
        x["hidden"],
        x["weight"],
        bias=x["bias"],
        targets=x["targets"],
        sampled_log_probs=sampled,
        chunk_bytes=chunk_bytes,
        **{k: x[k] for k in teacher},
        **numbers,
    )


def error(ours, theirs):
    """Size of the difference over that of the true value."""
    assert ours.shape == theirs.shape and ours.isfinite().all()
    return ((ours.double() - theirs).norm() / theirs.norm()).item()


def grads(loss, x, *names):
    return torch.autograd.grad(loss, [x[name] for name in names or ("hidden", "weight", "bias")])


def check(objective, samples=False, dtype=torch.float64, tolerance=1e-12, gradient_tolerance=None, **numbers):
    """The fused head, in chunks of 5 positions, equals the reference: per token, in sum, and in its gradients."""
    x = make_inputs(dtype)
    exact = in_fp64(x)
    sampled = samplers_log_probs(exact, numbers.get("temperature", 1.0)) if samples else None
    z_s, z_t = logits_of(exact)
    expected = per_token(objective, z_s, z_t, x["targets"], sampled, **numbers)
    out = run(
        objective, x, None if sampled is None else sampled.to(torch.promote_types(dtype, torch.float32)), **numbers
    )
    assert error(out.per_token, constant(expected)) < tolerance
    assert abs(out.loss_sum.item() - expected.sum().item()) < tolerance * expected.abs().sum().item()
    for ours, theirs in zip(grads(out.loss_sum / 7, x), grads(expected.sum() / 7, exact), strict=True):
        assert ours.dtype == dtype
        assert error(ours, theirs) < (gradient_tolerance or tolerance)


def case(objective, **numbers):
    name = "-".join([objective, *(f"{k}={v}" for k, v in numbers.items())])
    return pytest.param(objective, numbers, id=name)


CASES = [
    case("cross_entropy"),
    case("cross_entropy", label_smoothing=0.1),
    case("cross_entropy", weight_by_probability=True),
    *(case("divergence", beta=b, temperature=t) for b in BETAS for t in TAUS),
    *(case(f"skew_{d}_kl", skew_alpha=a, temperature=t) for d in ("forward", "reverse") for a in ALPHAS for t in TAUS),
    *(case("tvd", temperature=t) for t in TAUS),
    *(
        case("policy_gradient", reward=r, reward_bound=1.5, reward_power=0.5, temperature=t, samples=s, **clip)
        for r in REWARDS
        for t in TAUS
        for s, clip in ((False, {}), (True, {"importance_clip": (0.5, 1.8)}))
    ),
]


@pytest.fixture
def blocks_of_two(monkeypatch):
    """Chunks of 5 positions are scored as 2, 2 and 1."""
    monkeypatch.setattr(fused, "_CACHE_BYTES", 2 * V * 4)


# --- 1. the fused head -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective, numbers", CASES)
def test_fp64_value_and_gradients_equal_the_formula(objective, numbers, blocks_of_two):
    check(objective, **numbers)


@pytest.mark.parametrize("objective, numbers", CASES)
def test_fp32_value_and_gradients_are_near_the_formula(objective, numbers):
    """fp32 rounds at 6e-8; a logarithm of a ratio near 1 loses some of it."""
    check(objective, dtype=torch.float32, tolerance=1e-6, gradient_tolerance=5e-6, **numbers)


@pytest.mark.parametrize("objective, numbers", CASES)
def test_bf16_inputs_are_scored_in_fp32(objective, numbers):
    """On the inputs as rounded, values are as good as in fp32; gradients are rounded once: 2^-8 of each
    at most in bf16, 3.9e-3."""
    check(objective, dtype=torch.bfloat16, tolerance=1e-6, gradient_tolerance=4e-3, **numbers)


@pytest.mark.parametrize("objective, numbers", CASES)
def test_frozen_head_leaves_the_gradient_of_hidden_as_it_was(objective, numbers):
    x, numbers = make_inputs(), dict(numbers)
    sampled = samplers_log_probs(x, numbers["temperature"]) if numbers.pop("samples", False) else None
    whole = grads(run(objective, x, sampled, **numbers).loss_sum, x)
    x["weight"].requires_grad_(False)
    x["bias"].requires_grad_(False)
    assert torch.equal(*grads(run(objective, x, sampled, **numbers).loss_sum, x, "hidden"), whole[0])
    x["hidden"].requires_grad_(False)
    x["weight"].requires_grad_(True)
    assert torch.equal(*grads(run(objective, x, sampled, **numbers).loss_sum, x, "weight"), whole[1])


def test_the_cases_reach_every_branch():
    """Ratios and rewards are cut at both ends for some positions and at neither for others."""
    assert {c.values[0] for c in CASES} == set(OBJECTIVES)
    x = make_inputs()
    sampled = samplers_log_probs(x, 1.0)
    numbers = {"reward": "clip", "reward_bound": 1.5, "importance_clip": (0.5, 1.8)}
    metrics = run("policy_gradient", x, sampled, **numbers).metrics
    for name, low, high in (("importance_ratio", 0.5, 1.8), ("reward", -1.5, 1.5)):
        seen = metrics[name]
        assert {(seen == low).any().item(), (seen == high).any().item()} == {True}, name
        assert ((seen > low) & (seen < high)).any(), name


# --- 2. the pure functions, by hand ----------------------------------------------------------------------------------

P = torch.tensor([[1 / 2, 1 / 4, 1 / 4]], dtype=torch.float64)
Q = torch.tensor([[1 / 8, 1 / 8, 3 / 4]], dtype=torch.float64)
LN2, LN3 = math.log(2), math.log(3)


def close(ours, theirs):
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64))


def test_divergences_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/8, 1/8, 3/4).

    KL(q‖p) = 1/8 ln ¼ + 1/8 ln ½ + 3/4 ln 3 = 3/4 ln 3 − 3/8 ln 2 = .5640
    KL(p‖q) = 1/2 ln 4 + 1/4 ln 2 + 1/4 ln ⅓ = 5/4 ln 2 − 1/4 ln 3 = .5918
    m = ¾p + ¼q = (13/32, 7/32, 3/8); q/m = (4/13, 4/7, 2); p/m = (16/13, 8/7, 2/3)
    KL(q‖m) = 1/8 ln 4/13 + 1/8 ln 4/7 + 3/4 ln 2 = .3026, which is skew forward KL at α = ¼
    KL(p‖m) = 1/2 ln 16/13 + 1/4 ln 8/7 + 1/4 ln 2/3 = .0358, so JSD at β = ¼ is ¼·.3026 + ¾·.0358 = .1025
    ¾q + ¼p = (7/32, 5/32, 5/8), p over it (16/7, 8/5, 2/5): skew reverse KL at α = ¼ is
    1/2 ln 16/7 + 1/4 ln 8/5 + 1/4 ln 2/5 = .3018
    TVD = ½ (3/8 + 1/8 + 1/2) = ½
    """
    forward, reverse = 0.75 * LN3 - 0.375 * LN2, 1.25 * LN2 - 0.25 * LN3
    q_m = math.log(4 / 13) / 8 + math.log(4 / 7) / 8 + 0.75 * LN2
    p_m = math.log(16 / 13) / 2 + math.log(8 / 7) / 4 + math.log(2 / 3) / 4
    p_skew = math.log(16 / 7) / 2 + math.log(8 / 5) / 4 + math.log(2 / 5) / 4
    log_p, log_q = P.log(), Q.log()
    close(forward_kl(log_p, log_q), [forward])
    close(reverse_kl(log_p, log_q), [reverse])
    close(jensen_shannon(log_p, log_q, 0.25), [0.25 * q_m + 0.75 * p_m])
    for beta, value in ((0.0, forward), (0.25, 0.25 * q_m + 0.75 * p_m), (1.0, reverse)):
        close(generalized_jsd(log_p, log_q, beta), [value])
    close(skew_forward_kl(log_p, log_q, 0.25), [q_m])
    close(skew_reverse_kl(log_p, log_q, 0.25), [p_skew])
    close(skew_forward_kl(log_p, log_q, 0.0), [forward])
    close(skew_reverse_kl(log_p, log_q, 0.0), [reverse])
    close(total_variation(log_p, log_q), [0.5])
    assert [round(x, 4) for x in (forward, reverse, q_m, p_m, p_skew)] == [0.564, 0.5918, 0.3026, 0.0358, 0.3018]


def test_gradients_by_hand():
    """p and q as above; each row sums to 0.

    Forward KL: p − q = (3/8, 1/8, −1/2).
    Reverse KL: p ⊙ (log p/q − KL), log p/q = (2 ln 2, ln 2, −ln 3), KL = 5/4 ln 2 − 1/4 ln 3:
    (½(¾ ln 2 + ¼ ln 3), ¼(−¼ ln 2 + ¼ ln 3), ¼(−5/4 ln 2 − ¾ ln 3)).
    JSD, β = ¼: ¾ p ⊙ (log p/m − KL(p‖m)).
    Skew forward KL, α = ¼: c = −¾ q/m = (−3/13, −3/7, −3/2), Σ p c = −3/26 − 3/28 − 3/8.
    Skew reverse KL, α = ¼: c = log r − r/4, r = p/m' = (16/7, 8/5, 2/5).
    TVD: ½ p ⊙ (s − Σ p s), s = (1, 1, −1), Σ p s = ½: (1/8, 1/16, −3/16).
    """
    log_p, log_q = P.log(), Q.log()
    close(forward_kl_gradient(log_p, log_q), [[3 / 8, 1 / 8, -1 / 2]])
    reverse = [(0.75 * LN2 + 0.25 * LN3) / 2, (LN3 - LN2) / 16, (-1.25 * LN2 - 0.75 * LN3) / 4]
    close(reverse_kl_gradient(log_p, log_q), [reverse])
    p = [1 / 2, 1 / 4, 1 / 4]
    log_m = [math.log(16 / 13), math.log(8 / 7), math.log(2 / 3)]
    mean = log_m[0] / 2 + log_m[1] / 4 + log_m[2] / 4
    close(jensen_shannon_gradient(log_p, log_q, 0.25), [[0.75 * a * (b - mean) for a, b in zip(p, log_m, strict=True)]])
    cost, mean = (-3 / 13, -3 / 7, -3 / 2), -3 / 26 - 3 / 28 - 3 / 8
    close(skew_forward_kl_gradient(log_p, log_q, 0.25), [[a * (b - mean) for a, b in zip(p, cost, strict=True)]])
    cost = [math.log(r) - r / 4 for r in (16 / 7, 8 / 5, 2 / 5)]
    mean = cost[0] / 2 + cost[1] / 4 + cost[2] / 4
    close(skew_reverse_kl_gradient(log_p, log_q, 0.25), [[a * (b - mean) for a, b in zip(p, cost, strict=True)]])
    close(total_variation_gradient(log_p, log_q), [[1 / 8, 1 / 16, -3 / 16]])


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(
    "value, gradient, numbers",
    [
        (forward_kl, forward_kl_gradient, ()),
        (reverse_kl, reverse_kl_gradient, ()),
        *((jensen_shannon, jensen_shannon_gradient, (b,)) for b in (0.01, 0.3, 0.5, 0.99)),
        *((generalized_jsd, generalized_jsd_gradient, (b,)) for b in BETAS),
        *((skew_forward_kl, skew_forward_kl_gradient, (a,)) for a in (*ALPHAS, 0.99)),
        *((skew_reverse_kl, skew_reverse_kl_gradient, (a,)) for a in (*ALPHAS, 0.99)),
        (total_variation, total_variation_gradient, ()),
    ],
)
def test_closed_forms_equal_autograd(value, gradient, numbers, scale):
    g = torch.Generator().manual_seed(3)
    z, z_t = (scale * torch.randn(6, 11, generator=g, dtype=torch.float64) for _ in range(2))
    z.requires_grad_()
    log_q = log_probs(z_t)
    (theirs,) = torch.autograd.grad(value(log_probs(z), log_q, *numbers).sum(), z)
    ours = gradient(log_probs(constant(z)), log_q, *numbers)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
    assert ours.sum(1).abs().max() < 1e-12  # adding a number to all logits changes nothing


def test_nothing_is_mutated():
    """The closed forms work in place on what they made themselves, never on their inputs."""
    log_p, log_q = log_probs(torch.randn(4, 9)), log_probs(torch.randn(4, 9))
    before = log_p.clone(), log_q.clone()
    y = torch.tensor([0, 8, 3, 3])
    for name in OBJECTIVES:
        for top_k in (0, 3) if objectives.is_divergence(name) else (0,):
            block = objectives.Block(log_p, None if name == "cross_entropy" else log_q, y)
            OBJECTIVES[name](block, Settings(name, beta=0.5, top_k=top_k), True)
    assert torch.equal(log_p, before[0]) and torch.equal(log_q, before[1])


def test_rewards_by_hand():
    """p_y = 1/2, q_y = 1/8. log_ratio = ln ¼ = −2 ln 2; within ±1 that is −1; tanh(−2 ln 2 / 1) = (1/16 − 1)/(1/16 + 1)
    = −15/17; at bound 2, tanh(−ln 2) = (1/4 − 1)/(1/4 + 1) = −3/5; q − p = −3/8; q² − p² = 1/64 − 1/4 = −15/64.
    The other way round, p_y = 1/8 and q_y = 1/2, every sign changes."""
    half, eighth = (torch.tensor([x], dtype=torch.float64).log() for x in (1 / 2, 1 / 8))
    for sign, p_y, q_y in ((-1, half, eighth), (1, eighth, half)):
        close(token_reward(p_y, q_y), [sign * 2 * LN2])
        close(token_reward(p_y, q_y, "clip", bound=1.0), [sign * 1.0])
        close(token_reward(p_y, q_y, "clip"), [sign * 2 * LN2])  # 1.39 is within the default 5
        close(token_reward(p_y, q_y, "tanh", bound=1.0), [sign * 15 / 17])
        close(token_reward(p_y, q_y, "tanh", bound=2.0), [sign * 3 / 5])
        close(token_reward(p_y, q_y, "power"), [sign * 3 / 8])
        close(token_reward(p_y, q_y, "power", power=2.0), [sign * 15 / 64])


def test_importance_ratio_by_hand():
    """p_y = 1/2 now; 4/10, 2/10 and 9/10 when sampled: 5/4, 5/2 and 5/9. Within (4/5, 2): 5/4, 2 and 4/5."""
    now = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64).log()
    then = torch.tensor([0.4, 0.2, 0.9], dtype=torch.float64).log()
    close(importance_ratio(now, then, (0.0, 10.0)), [5 / 4, 5 / 2, 5 / 9])
    close(importance_ratio(now, then), [5 / 4, 2.0, 5 / 9])
    close(importance_ratio(now, then, (0.8, 2.0)), [5 / 4, 2.0, 4 / 5])
    close(importance_ratio(now, None, (0.8, 0.9)), [1.0, 1.0, 1.0])


def test_policy_gradient_by_hand():
    """p_y = 1/2, ρ = 3/2, r = −1/4: −3/2·(−1/4)·ln ½ = −3/8 ln 2, its derivative by log p_y −ρ r = 3/8: descending
    lowers log p_y of a token that the teacher likes less."""
    log_p_y = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    ratio, reward = (torch.tensor([x], dtype=torch.float64) for x in (1.5, -0.25))
    loss = score_function_loss(log_p_y, ratio, reward)
    close(loss.detach(), [-0.375 * LN2])
    close(torch.autograd.grad(loss.sum(), log_p_y)[0], [0.375])


def test_policy_gradient_holds_what_it_is_given_constant():
    """At log p_y = −1, an attached ratio exp(log p_y + 1) = 1 and an attached reward log p_y + 3/4 = −1/4: the
    derivative is still −ρ r = 1/4. With the ratio attached it would be 0, with the reward attached 5/4."""
    log_p_y = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    loss = score_function_loss(log_p_y, (log_p_y + 1).exp(), log_p_y + 0.75)
    close(torch.autograd.grad(loss.sum(), log_p_y)[0], [0.25])


def test_zero_times_infinity_counts_as_zero():
    """a = (1/2, 1/2, 0), b = (1/2, 1/4, 1/4): KL(a‖b) = 1/2 ln 2, whatever is said of the id that a rules out. An id
    that both rule out adds nothing: with c = (1/4, 3/4, 0), KL(a‖c) = 1/2 ln 2 + 1/2 ln 2/3 = 1/2 ln 4/3."""
    a, b, c = (
        log_probs(torch.tensor([x], dtype=torch.float64).log())  # of logits of −∞
        for x in ([1 / 2, 1 / 2, 0], [1 / 2, 1 / 4, 1 / 4], [1 / 4, 3 / 4, 0])
    )
    for divergence_of in (lambda p, q: reverse_kl(p, q), lambda p, q: forward_kl(q, p)):
        close(divergence_of(a, b), [LN2 / 2])
        close(divergence_of(a, c), [math.log(4 / 3) / 2])
    close(total_variation(a, c), [1 / 4])
    assert jensen_shannon(a, c, 0.5).isfinite() and skew_forward_kl(a, c, 0.1).isfinite()
    log_p = b.clone().requires_grad_()  # and in the gradient: −q by log p
    close(torch.autograd.grad(forward_kl(log_p, a).sum(), log_p)[0], [[-1 / 2, -1 / 2, 0.0]])
    assert log_probs(torch.tensor([[0.0, torch.nan]])).isnan().all()


@pytest.mark.parametrize("objective, numbers", [(o, {}) for o in OBJECTIVES] + [("divergence", {"top_k": 3})])
def test_ids_that_both_heads_mask_are_as_good_as_absent(objective, numbers):
    """A bias of −∞ on the last two ids of both heads: the loss and gradients of the heads without them."""
    x = make_inputs()
    x["targets"] = x["targets"].clamp(max=V - 3)
    with torch.no_grad():
        x["bias"][-2:] = -torch.inf
    teacher = {k: x[k] for k in ("teacher_hidden", "teacher_weight")}
    bias = torch.zeros(V, dtype=torch.float64)
    bias[-2:] = -torch.inf
    common = {"targets": x["targets"], **numbers}
    masked = {} if objective == "cross_entropy" else {**teacher, "teacher_bias": bias}
    out = fused_linear_loss(objective, x["hidden"], x["weight"], bias=x["bias"], **common, **masked)
    cut = {} if objective == "cross_entropy" else {**teacher, "shared_ids": V - 2}
    if objective == "cross_entropy":
        cut = {"shared_ids": V - 2}
    expected = fused_linear_loss(objective, x["hidden"], x["weight"], bias=x["bias"], **common, **cut)
    close(out.per_token, expected.per_token)
    for name, values in expected.metrics.items():
        close(out.metrics[name].double(), values.double())
    for ours, theirs in zip(
        *(torch.autograd.grad(o.loss_sum, [x["hidden"], x["weight"]]) for o in (out, expected)), strict=True
    ):
        close(ours, theirs)


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch):
    x = make_inputs()
    monkeypatch.setattr(fused, "accumulate", None)
    with torch.no_grad():
        out = fused_linear_loss("cross_entropy", x["hidden"], x["weight"], targets=x["targets"])
    assert not out.loss_sum.requires_grad


def test_a_second_backward_is_an_error():
    x = make_inputs()
    loss = fused_linear_loss("cross_entropy", x["hidden"], x["weight"], targets=x["targets"]).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="keeps its gradients for one backward"):
        loss.backward()


def test_buckets_by_hand():
    """p = (1/2, 1/4, 1/4), q = (3/4, 1/8, 1/8), k = 1: both prefer id 0, so the union is {0} and a twin that is left
    empty. Over ({0}, rest): p = (1/2, 1/2), q = (3/4, 1/4). KL(p‖q) = ½ ln ⅔ + ½ ln 2 = ½ ln 4/3.
    Gradient by bucket: ½ (ln ⅔ − ½ ln 4/3) = ½·½(ln ⅔ − ln 2) = −¼ ln 3, and ¼ ln 3 for the rest, of which each of its
    two ids, equally likely, gets ⅛ ln 3."""
    log_p, log_q = P.log(), torch.tensor([[3 / 4, 1 / 8, 1 / 8]], dtype=torch.float64).log()
    assert top_k_support(log_q, 1)[0].tolist() == [[0]]
    assert top_k_support(log_q, 9)[0].sort().values.tolist() == [[0, 1, 2]]
    ids, valid = union_support(log_p, log_q, 1)
    assert (ids.tolist(), valid.tolist()) == ([[0, 0]], [[True, False]])
    b_p, b_q = (bucket_log_probs(x, ids, valid) for x in (log_p, log_q))
    close(b_p.exp(), [[1 / 2, 0.0, 1 / 2]])
    close(b_q.exp(), [[3 / 4, 0.0, 1 / 4]])
    close(reverse_kl(b_p, b_q), [math.log(4 / 3) / 2])
    by_bucket = reverse_kl_gradient(b_p, b_q)
    close(by_bucket, [[-LN3 / 4, 0.0, LN3 / 4]])
    close(sparse.spread_gradient(by_bucket, b_p, log_p, ids, valid), [[-LN3 / 4, LN3 / 8, LN3 / 8]])


def test_the_whole_vocabulary_leaves_an_empty_tail():
    """k = 3 of 3: six ids, three of them twins, and a tail of probability 0."""
    ids, valid = union_support(P.log(), Q.log(), 3)
    assert (ids.tolist(), valid.sum().item()) == ([[0, 0, 1, 1, 2, 2]], 3)
    close(bucket_log_probs(P.log(), ids, valid).exp(), [[1 / 2, 0.0, 1 / 4, 0.0, 1 / 4, 0.0, 0.0]])


@pytest.mark.parametrize("k", [1, 3, 10, 11])
def test_spread_gradient_equals_autograd_through_the_buckets(k):
    g = torch.Generator().manual_seed(4)
    z, z_t = (3 * torch.randn(6, 11, generator=g, dtype=torch.float64) for _ in range(2))
    log_p, log_q = log_probs(z), log_probs(z_t)
    ids, valid = union_support(log_p, log_q, k)
    b_p, b_q = (bucket_log_probs(x, ids, valid) for x in (log_p, log_q))
    ours = sparse.spread_gradient(forward_kl_gradient(b_p, b_q), b_p, log_p, ids, valid)
    z.requires_grad_()
    (theirs,) = torch.autograd.grad(per_token("divergence", z, z_t, beta=0.0, top_k=k).sum(), z)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


# --- 3. other codebases ----------------------------------------------------------------------------------------------


def two_logits(scale=2.0, shape=(6, 11), seed=5):
    g = torch.Generator().manual_seed(seed)
    z, z_t = (scale * torch.randn(*shape, generator=g, dtype=torch.float64) for _ in range(2))
    return z.requires_grad_(), z_t


def same_with_gradients(ours, theirs, leaf, **tolerance):
    torch.testing.assert_close(ours, theirs, **tolerance)
    pair = (torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (ours, theirs))
    torch.testing.assert_close(*pair, **tolerance)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_generalized_jsd_equals_trl_gkd_and_sdft(beta):
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.sdft.loss_utils import compute_divergence

    for tau in TAUS:
        z, z_t = two_logits()
        log_p, log_q = log_probs(z, tau), log_probs(z_t, tau)
        ours = generalized_jsd(log_p, log_q, beta)
        # theirs is fp32 in its log of beta, even on fp64 logits
        same_with_gradients(ours, compute_divergence(log_p, log_q, beta), z)
        theirs = GKDTrainer.generalized_jsd_loss(z[None], z_t[None], beta=beta, temperature=tau, reduction="sum")
        same_with_gradients(ours.sum(), theirs, z)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tau", [0.7, 1.0])
def test_fused_divergence_equals_trl_chunked_divergence(beta, tau):
    """Theirs works in fp32, so the tolerance is fp32's."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    x = make_inputs(torch.float32)
    theirs, entropy, _ = _chunked_divergence_loss(
        x["hidden"][None],
        x["teacher_hidden"][None],
        x["weight"],
        x["teacher_weight"],
        torch.ones(1, N),
        beta,
        num_items_in_batch=29,
        student_lm_head_bias=x["bias"],
        teacher_lm_head_bias=x["teacher_bias"],
        temperature=tau,
    )
    out = run("divergence", x, beta=beta, temperature=tau)
    torch.testing.assert_close(out.loss_sum / 29, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.metrics["entropy"].sum(), entropy, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads(out.loss_sum / 29, x), grads(theirs, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_kl_equals_torch_distributions():
    from torch.distributions import Categorical, kl_divergence

    z, z_t = two_logits()
    student, teacher = Categorical(logits=z), Categorical(logits=z_t)
    log_p, log_q = log_probs(z), log_probs(z_t)
    same_with_gradients(forward_kl(log_p, log_q), kl_divergence(teacher, student), z)
    same_with_gradients(reverse_kl(log_p, log_q), kl_divergence(student, teacher), z)
    for alpha in (0.1, 0.5):
        to_student = Categorical(probs=alpha * teacher.probs + (1 - alpha) * student.probs)
        to_teacher = Categorical(probs=(1 - alpha) * teacher.probs + alpha * student.probs)
        same_with_gradients(skew_forward_kl(log_p, log_q, alpha), kl_divergence(teacher, to_student), z)
        same_with_gradients(skew_reverse_kl(log_p, log_q, alpha), kl_divergence(student, to_teacher), z)
    same_with_gradients(total_variation(log_p, log_q), (student.probs - teacher.probs).abs().sum(1) / 2, z)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
def test_label_smoothing_equals_transformers_and_torch(epsilon):
    from transformers.trainer_pt_utils import LabelSmoother

    x = make_inputs()
    z = logits_of(x)[0]
    out = run("cross_entropy", x, label_smoothing=epsilon)
    smoothed = LabelSmoother(epsilon)({"logits": z}, x["targets"]) * N
    plain = torch.nn.functional.cross_entropy(z, x["targets"], label_smoothing=epsilon, reduction="sum")
    # transformers sums the smoothing's share in fp32, whatever the logits' dtype
    for theirs, tolerance in ((smoothed, {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}), (plain, {})):
        torch.testing.assert_close(out.loss_sum, theirs, **tolerance)
        ours = run("cross_entropy", x, label_smoothing=epsilon).loss_sum
        for a, b in zip(
            grads(ours, x), torch.autograd.grad(theirs, list(x.values())[:3], retain_graph=True), strict=True
        ):
            torch.testing.assert_close(a, b, **tolerance)


def test_sampled_token_equals_trl_sdft():
    """Theirs: (log p_y − log q_y) detached · log p_y, times a ratio that is cut at the top."""
    from trl.experimental.sdft import loss_utils

    z, z_t = two_logits()
    y = torch.arange(6)
    log_p_y, log_q_y = (log_probs(x)[torch.arange(6), y] for x in (z, z_t))
    theirs = loss_utils.compute_sampled_token_self_distillation_loss(z, z_t, y, distillation_alpha=1.0)
    ours = score_function_loss(log_p_y, importance_ratio(log_p_y, None), token_reward(log_p_y, log_q_y))
    same_with_gradients(ours, theirs, z)
    old = constant(log_p_y) + torch.linspace(-1, 1, 6, dtype=torch.float64)
    log_p_y, log_q_y = (log_probs(x)[torch.arange(6), y] for x in (z, z_t))
    theirs = (log_p_y - log_q_y).detach() * log_p_y
    theirs = loss_utils.apply_importance_sampling_clipping(theirs, log_p_y, old, 1.5)
    ours = score_function_loss(log_p_y, importance_ratio(log_p_y, old, (0.0, 1.5)), token_reward(log_p_y, log_q_y))
    same_with_gradients(ours, theirs, z)


# --- 4. top-k with a tail --------------------------------------------------------------------------------------------

DIVERGENCES = [
    case("divergence", beta=0.0),
    case("divergence", beta=0.3),
    case("divergence", beta=1.0),
    case("skew_forward_kl", skew_alpha=0.1),
    case("skew_reverse_kl", skew_alpha=0.1),
    case("tvd"),
]


def on_logits(objective, z_s, z_t, y=None, sampled=None, **numbers):
    """Per-token loss (N,) and its gradient (N, V) with respect to logits: the head is the identity."""
    z, eye = constant(z_s).clone().requires_grad_(), torch.eye(z_s.size(1), dtype=z_s.dtype)
    out = fused_linear_loss(
        objective,
        z,
        eye,
        targets=y,
        teacher_hidden=z_t,
        teacher_weight=eye,
        sampled_log_probs=sampled,
        chunk_bytes=z.size(1) * 4 * 2 * 7,
        **numbers,
    )
    return out.per_token, torch.autograd.grad(out.loss_sum, z)[0]


@pytest.mark.parametrize("objective, numbers", DIVERGENCES)
@pytest.mark.parametrize("scale, tau", [(0.3, 1.0), (2.0, 0.7), (5.0, 2.0)])
def test_buckets_tell_less_than_the_whole(objective, numbers, scale, tau):
    """Merging ids cannot raise a divergence (data-processing inequality); with every id there is nothing to merge."""
    z, z_t = two_logits(scale, (40, 19), seed=6)
    full, full_gradient = on_logits(objective, z, z_t, temperature=tau, **numbers)
    gaps = []
    for k in (1, 2, 5, 9, 18, 19, 100):
        value, gradient = on_logits(objective, z, z_t, temperature=tau, top_k=k, **numbers)
        assert (value >= 0).all() and (value <= full + 1e-12).all()
        gaps.append((full - value).mean().item())
        if k >= 19:
            torch.testing.assert_close(value, full, rtol=1e-9, atol=1e-13)
            torch.testing.assert_close(gradient, full_gradient, rtol=1e-9, atol=1e-13)
    assert gaps[0] > 1e-4 or objective == "tvd"  # and the buckets do lose something


@pytest.mark.parametrize("objective, numbers", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_top_k_equals_the_formula_over_the_union_and_its_rest(objective, numbers, k, blocks_of_two):
    """Chunks, a head and a temperature included."""
    check(objective, top_k=k, temperature=0.7, **numbers)
    check(objective, top_k=k, dtype=torch.float32, tolerance=1e-6, gradient_tolerance=5e-6, **numbers)


def test_captured_mass_by_hand():
    """k = 1 of p = (1/2, 1/4, 1/4) and q = (1/8, 1/8, 3/4): the union {0, 2} holds 3/4 of p and 7/8 of q."""
    eye = torch.eye(3, dtype=torch.float64)
    out = fused_linear_loss("divergence", P.log(), eye, teacher_hidden=Q.log(), teacher_weight=eye, top_k=1)
    close(out.metrics["student_top_k_mass"], [3 / 4])
    close(out.metrics["teacher_top_k_mass"], [7 / 8])


@pytest.mark.parametrize("objective, numbers", DIVERGENCES)
def test_the_student_cannot_flee_the_support(objective, numbers):
    """The teacher's top 2 of (.6, .3, .05, .05) are {0, 1}. A student (.3, .28, .21, .21) has the same ones and an
    honest tail of .42. Piling that tail on id 2, outside the teacher's, must not lower the loss: id 2 becomes one of
    the student's own top 2 and gets its bucket. Neither must moving still more there. Reverse KL, honest:
    .3 ln ½ + .28 ln .28/.3 + .42 ln 4.2 = .3755."""
    q = torch.tensor([[0.6, 0.3, 0.05, 0.05]], dtype=torch.float64).log()
    honest, piled, fled = (
        on_logits(objective, torch.tensor([p], dtype=torch.float64).log(), q, top_k=2, **numbers)[0].item()
        for p in ([0.3, 0.28, 0.21, 0.21], [0.3, 0.28, 0.41, 0.01], [0.1, 0.08, 0.81, 0.01])
    )
    assert honest <= piled + 1e-12 and piled < fled
    if numbers == {"beta": 1.0}:
        assert honest == pytest.approx(0.3 * math.log(0.5) + 0.28 * math.log(0.28 / 0.3) + 0.42 * math.log(4.2))


def test_without_a_tail_the_student_would_flee():
    """What the tail is there for: Σ p log(p/q) over the teacher's top 2 alone is below 0 for .1 and .08 of .6 and .3:
    .1 ln 1/6 + .08 ln 4/15 = −.285."""
    p, q = torch.tensor([0.1, 0.08]), torch.tensor([0.6, 0.3])
    assert kl(p, q).item() == pytest.approx(-0.285, abs=1e-3)


@pytest.mark.parametrize("objective, numbers", DIVERGENCES)
def test_peaked_logits_stay_finite_in_fp32(objective, numbers):
    """Logits of ±150: most probabilities underflow, the tail with them, and log(1 − Σ support) would be log 0."""
    z, z_t = (x.detach().float() for x in two_logits(50.0, (64, 40), seed=7))
    z_t[:8] = z[:8]  # some rows agree
    full, _ = on_logits(objective, z, z_t, **numbers)
    exact = per_token(objective, z.double(), z_t.double(), **numbers)
    torch.testing.assert_close(full.double(), exact, rtol=1e-5, atol=1e-6)
    for k in (1, 4, 39, 40):
        value, gradient = on_logits(objective, z, z_t, top_k=k, **numbers)
        assert value.isfinite().all() and gradient.isfinite().all()
        assert (value >= -1e-6).all() and (value <= full * (1 + 1e-5) + 1e-5).all()
    torch.testing.assert_close(value, full, rtol=1e-6, atol=1e-6)


# --- 5. the policy gradient is reverse KL's on average ---------------------------------------------------------------


def average_gradient(z_s, z_t, weights, **numbers):
    """Σ_y weights_y · gradient at y, every y of the vocabulary once: (V,)."""
    v = z_s.numel()
    rows, y = z_s.expand(v, v), torch.arange(v)
    sampled = log_probs(z_s, numbers.get("temperature", 1.0)) if numbers.pop("samples", False) else None
    return weights @ on_logits("policy_gradient", rows, z_t.expand(v, v), y, sampled, **numbers)[1]


@pytest.mark.parametrize("tau", TAUS)
def test_log_ratio_averages_to_reverse_kl(tau):
    """Exactly, over all y with weights p_y: Σ_y p_y (log p_y − log q_y)(onehot(y) − p) = p ⊙ (log p − log q − KL). A
    ratio of 1 given as log-probabilities of the same policy changes nothing."""
    z, z_t = (x.detach()[0] for x in two_logits(1.0, (1, 12), seed=8))
    p = softmax(z, tau)
    (_, expected) = on_logits("divergence", z[None], z_t[None], beta=1.0, temperature=tau)
    for samples in (False, True):
        ours = average_gradient(z, z_t, p, temperature=tau, samples=samples)
        torch.testing.assert_close(ours, expected[0], rtol=1e-10, atol=1e-13)


def test_a_top_4_filter_breaks_the_average():
    z, z_t = (x.detach()[0] for x in two_logits(1.0, (1, 12), seed=8))
    p = softmax(z)
    filtered = torch.zeros_like(p).index_copy_(0, p.topk(4).indices, p.topk(4).values)
    expected = on_logits("divergence", z[None], z_t[None], beta=1.0)[1][0]
    assert error(average_gradient(z, z_t, filtered / filtered.sum()), expected) > 0.2


# --- 6. the checks see what they are for -----------------------------------------------------------------------------


def entry_by_autograd(loss):
    """An objective from a per-token loss of (log p, block, settings), taken by autograd."""

    def objective(block, settings, grad):
        with torch.enable_grad():
            z = constant(block.log_p).clone().requires_grad_()
            value = loss(torch.log_softmax(z, -1), block, settings)
            (gradient,) = torch.autograd.grad(value.sum(), z)
        return constant(value), gradient, {}

    return objective


def clipped(log_p_y, block, settings):
    return unclipped(log_p_y, block).clamp(*settings.importance_clip)


def unclipped(log_p_y, block, *_):
    return (log_p_y - block.sampled_log_probs).exp()


def ones(log_p_y, *_):
    return torch.ones_like(log_p_y)


def plain_policy_gradient(attached=None, ratio_of=None):
    def loss(log_p, block, settings):
        log_p_y = block.of_target(log_p)
        parts = {
            "reward": block.of_target(block.teacher) - log_p_y,
            "ratio": (ratio_of or clipped)(log_p_y, block, settings),
        }
        ratio, reward = (parts[k] if k == attached else constant(parts[k]) for k in ("ratio", "reward"))
        return -ratio * reward * log_p_y

    return entry_by_autograd(loss)


def plain_dft(weight):
    def loss(log_p, block, settings):
        log_p_y = block.of_target(log_p)
        return -weight(log_p_y.exp()) * log_p_y

    return entry_by_autograd(loss)


def put(name, entry):
    return lambda patch: patch.setitem(OBJECTIVES, name, entry)


def score_with(change):
    """Put a changed `score` in its place: change(score, settings, z_s, z_t, y, sampled, grad)."""
    plain = objectives.score
    return lambda patch: patch.setattr(fused, "score", lambda *args: change(plain, *args))


def without_tau_in_gradient(score, settings, *args):
    value, gradient, metrics = score(settings, *args)
    return value, gradient * settings.temperature, metrics


def without_tail(log_p, ids, valid):
    support = log_p.gather(1, ids).masked_fill(~valid, sparse.EMPTY)
    return torch.cat([support, torch.full_like(support[:, :1], sparse.EMPTY)], 1)


def tail_by_subtraction(log_p, ids, valid):
    support = log_p.gather(1, ids).masked_fill(~valid, sparse.EMPTY)
    return torch.cat([support, torch.log(-torch.expm1(support.logsumexp(1, keepdim=True)))], 1)


def teachers_support(log_p, log_q, k):
    return top_k_support(log_q, k)


def swapped(formula, gradient, setting=None):
    """The divergence of (q, p), with the gradient that autograd gives it."""
    return divergence_objective(lambda log_p, log_q, *numbers: formula(log_q, log_p, *numbers), setting=setting)


def weights_reversed(log_p, log_q, beta):
    log_m = objectives.d.log_mixture(log_p, log_q, beta)
    return (1 - beta) * forward_kl(log_m, log_q) + beta * reverse_kl(log_p, log_m)


def check_peaked():
    z, z_t = (x.detach().float() for x in two_logits(50.0, (64, 40), seed=7))
    value, gradient = on_logits("divergence", z, z_t, top_k=40)
    assert value.isfinite().all() and gradient.isfinite().all()


def checking(objective, **numbers):
    return lambda: check(objective, **numbers)


SAMPLED = checking("policy_gradient", samples=True, importance_clip=(0.5, 1.8))
FRESH = checking("policy_gradient")
DFT = checking("cross_entropy", weight_by_probability=True)
SMOOTHED = checking("cross_entropy", label_smoothing=0.1)
REVERSE, FORWARD, JSD = (checking("divergence", beta=b, temperature=2.0) for b in (1.0, 0.0, 0.3))
TOP_K = checking("divergence", top_k=3)
SKEW = checking("skew_forward_kl", skew_alpha=0.1)

ACROSS = lambda score, settings, z_s, z_t, *rest: score(settings, z_t, z_s, *rest)  # noqa: E731
REVERSED_JSD = divergence_objective(weights_reversed, setting="beta")
UNSMOOTHED = entry_by_autograd(lambda log_p, block, settings: -block.of_target(log_p))
SUMMED_SMOOTHING = entry_by_autograd(
    lambda log_p, block, s: -(1 - s.label_smoothing) * block.of_target(log_p) - s.label_smoothing * log_p.sum(1)
)
NO_TEMPERATURE = lambda patch: patch.setattr(  # noqa: E731
    objectives.d, "log_probs", lambda z, tau=1.0: torch.log_softmax(z, -1)
)
BLENDED = divergence_objective(
    lambda log_p, log_q, alpha: skew_forward_kl(log_p, log_q, 1 - alpha), setting="skew_alpha"
)


@pytest.mark.parametrize(
    "passing, control",
    [
        pytest.param(SAMPLED, put("policy_gradient", plain_policy_gradient()), id="policy gradient"),
        pytest.param(FRESH, put("policy_gradient", plain_policy_gradient(ratio_of=ones)), id="fresh policy gradient"),
        pytest.param(DFT, put("cross_entropy", plain_dft(constant)), id="DFT"),
        pytest.param(
            REVERSE, put("divergence", divergence_objective(generalized_jsd, setting="beta")), id="divergence"
        ),
        pytest.param(
            TOP_K, lambda patch: patch.setattr(objectives, "bucket_log_probs", tail_by_subtraction), id="tail"
        ),
    ],
)
def test_plain_autograd_in_place_of_the_closed_form_passes(passing, control, monkeypatch):
    """The mutations below fail for what they change, not for how they are put in."""
    control(monkeypatch)
    passing()


@pytest.mark.parametrize(
    "passing, mutate",
    [
        pytest.param(*case_, id=name)
        for name, *case_ in (
            ("reward attached", SAMPLED, put("policy_gradient", plain_policy_gradient("reward"))),
            (
                "reward attached, fresh",
                FRESH,
                put("policy_gradient", plain_policy_gradient("reward", ratio_of=ones)),
            ),
            ("ratio attached", SAMPLED, put("policy_gradient", plain_policy_gradient("ratio"))),
            ("ratio left out", SAMPLED, put("policy_gradient", plain_policy_gradient(ratio_of=ones))),
            ("ratio unclipped", SAMPLED, put("policy_gradient", plain_policy_gradient(ratio_of=unclipped))),
            ("DFT weight attached", DFT, put("cross_entropy", plain_dft(lambda p_y: p_y))),
            ("DFT weight left out", DFT, put("cross_entropy", plain_dft(torch.ones_like))),
            ("smoothing left out", SMOOTHED, put("cross_entropy", UNSMOOTHED)),
            ("smoothing summed", SMOOTHED, put("cross_entropy", SUMMED_SMOOTHING)),
            ("reverse KL across", REVERSE, score_with(ACROSS)),
            ("forward KL across", FORWARD, score_with(ACROSS)),
            ("JSD across", JSD, score_with(ACROSS)),
            ("policy gradient across", SAMPLED, score_with(ACROSS)),
            ("JSD weights reversed", JSD, put("divergence", REVERSED_JSD)),
            ("skew reversed", SKEW, put("skew_forward_kl", BLENDED)),
            ("no temperature", REVERSE, NO_TEMPERATURE),
            ("no temperature, forward", FORWARD, NO_TEMPERATURE),
            ("no 1/tau in the gradient", REVERSE, score_with(without_tau_in_gradient)),
            ("no 1/tau in the gradient, JSD", JSD, score_with(without_tau_in_gradient)),
            ("no tail", TOP_K, lambda patch: patch.setattr(objectives, "bucket_log_probs", without_tail)),
            (
                "tail by subtraction",
                check_peaked,
                lambda patch: patch.setattr(objectives, "bucket_log_probs", tail_by_subtraction),
            ),
            ("teacher's support", TOP_K, lambda patch: patch.setattr(objectives, "union_support", teachers_support)),
        )
    ],
)
def test_each_mutation_fails_its_check(passing, mutate, monkeypatch):
    passing()
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        passing()


@pytest.mark.parametrize("passing", [SAMPLED, DFT], ids=["policy gradient", "DFT"])
def test_an_attached_weight_leaves_the_value_right(passing, monkeypatch):
    """Why gradients are compared: these two mutations change nothing else."""
    entry = put("policy_gradient", plain_policy_gradient("reward"))
    (entry if passing is SAMPLED else put("cross_entropy", plain_dft(lambda p_y: p_y)))(monkeypatch)
    monkeypatch.setitem(globals(), "grads", lambda *args: ())
    passing()


@pytest.fixture
def no_detach(monkeypatch):
    """A function that makes `.detach()` do nothing, as if it had been forgotten everywhere."""
    return lambda: monkeypatch.setattr(torch.Tensor, "detach", lambda self: self)


def check_pure_policy_gradient(reward, samples):
    """The three pure functions, put together under autograd."""
    z, z_t = two_logits(1.0, (9, 12), seed=9)
    y, rows = torch.arange(9), torch.arange(9)
    numbers = {"reward": reward, "reward_bound": 1.5, "reward_power": 0.5}
    log_p_y, log_q_y = (torch.log_softmax(x, -1)[rows, y] for x in (z, z_t))
    sampled = constant(log_p_y) + torch.linspace(-1.2, 1.2, 9, dtype=torch.float64) if samples else None
    graded_by_us = token_reward(log_p_y, log_q_y, reward, bound=1.5, power=0.5)
    ours = score_function_loss(log_p_y, importance_ratio(log_p_y, sampled, (0.5, 1.8)), graded_by_us)
    theirs = per_token("policy_gradient", z, z_t, y, sampled, importance_clip=(0.5, 1.8), **numbers)
    assert error(constant(ours), constant(theirs)) < 1e-12
    pair = [torch.autograd.grad(x.sum(), z)[0] for x in (ours, theirs)]
    assert error(*pair) < 1e-12


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("samples", [False, True])
def test_pure_policy_gradient_needs_its_detaches(reward, samples, no_detach):
    check_pure_policy_gradient(reward, samples)
    no_detach()
    with pytest.raises(AssertionError):
        check_pure_policy_gradient(reward, samples)


def test_ratio_alone_needs_its_detach(no_detach):
    """With a constant reward, what is left is the ratio's."""

    def check_ratio():
        log_p_y = torch.linspace(-2, -0.5, 5, dtype=torch.float64).requires_grad_()
        sampled = constant(log_p_y) + 0.1
        ratio = importance_ratio(log_p_y, sampled)
        loss = score_function_loss(log_p_y, ratio, torch.full_like(log_p_y, -0.25))
        (ours,) = torch.autograd.grad(loss.sum(), log_p_y)
        torch.testing.assert_close(ours, torch.full_like(ours, 0.25 * math.exp(-0.1)))

    check_ratio()
    no_detach()
    with pytest.raises(AssertionError):
        check_ratio()


def test_reward_and_ratio_come_detached():
    log_p_y = torch.linspace(-2, -0.5, 5).requires_grad_()
    for reward in REWARDS:
        assert not token_reward(log_p_y, log_p_y * 2, reward).requires_grad
    assert not importance_ratio(log_p_y, log_p_y.detach() + 1).requires_grad
    assert not importance_ratio(log_p_y, None).requires_grad


@pytest.mark.parametrize("attached", ["ratio", "reward"])
def test_attached_parts_break_the_average(attached, monkeypatch):
    """The average over y ~ p is then no longer reverse KL's."""
    z, z_t = (x.detach()[0] for x in two_logits(1.0, (1, 12), seed=8))
    expected = on_logits("divergence", z[None], z_t[None], beta=1.0)[1][0]
    sampled = log_probs(z)
    put("policy_gradient", plain_policy_gradient(attached))(monkeypatch)
    rows = z.expand(12, 12)
    gradient = on_logits("policy_gradient", rows, z_t.expand(12, 12), torch.arange(12), sampled)[1]
    off = error(softmax(z) @ gradient, expected)
    # the reward's own gradient is −ρ log p_y · (−(onehot − p)), far from 0 on average
    assert off > 0.3


def tied(x):
    """A teacher that is computed from the student's own hidden states: a forgotten detach then moves the student."""
    return x | {"teacher_hidden": x["hidden"][:, :H_T] * 0.5}


class PlainHead:
    """In place of the fused head: the reference by autograd, with whatever teacher it is given left in the graph."""

    @staticmethod
    def apply(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, targets, run_):
        z_t = teacher_hidden @ teacher_weight.T + teacher_bias
        q, tau = softmax(z_t, run_.settings.temperature), run_.settings.temperature
        loss = distance("divergence", softmax(hidden @ weight.T + bias, tau), q, run_.settings.beta)
        return loss.sum(), constant(loss), ()


def check_tied_teacher(beta=0.5):
    """Gradients with a tied teacher equal those with the same numbers as a constant."""
    x, exact = make_inputs(), make_inputs()
    exact["teacher_hidden"] = constant(tied(exact)["teacher_hidden"])
    expected = per_token("divergence", *logits_of(exact), beta=beta).sum()
    out = run("divergence", tied(x), beta=beta)
    for ours, theirs in zip(grads(out.loss_sum, x), grads(expected, exact), strict=True):
        assert error(ours, theirs) < 1e-12


def check_readable_divergence(beta=0.5):
    """The same for the readable reference, which autograd differentiates."""
    z, _ = two_logits()
    labels = torch.zeros(1, 6, dtype=torch.int64)
    loss = token_divergence(z[None], (z * 0.5)[None], labels, beta=beta)[0]
    expected = per_token("divergence", z, constant(z) * 0.5, beta=beta).mean()
    assert error(*(torch.autograd.grad(x, z)[0] for x in (loss, expected))) < 1e-12


def test_tied_teacher_gets_no_gradient():
    check_tied_teacher()
    x = make_inputs()
    for name in ("teacher_hidden", "teacher_weight", "teacher_bias"):
        x[name].requires_grad_()
    teachers = torch.autograd.grad(
        run("divergence", x).loss_sum,
        [x[name] for name in ("teacher_hidden", "teacher_weight", "teacher_bias")],
        allow_unused=True,
    )
    assert teachers == (None, None, None)


def test_teacher_attached_fails_with_a_plain_head(no_detach, monkeypatch):
    monkeypatch.setattr(fused, "_FusedHead", PlainHead)
    check_tied_teacher()
    no_detach()
    with pytest.raises(AssertionError):
        check_tied_teacher()


def test_teacher_attached_fails_in_the_readable_reference(no_detach):
    check_readable_divergence()
    no_detach()
    with pytest.raises(AssertionError):
        check_readable_divergence()


# --- 7. heads of different sizes -------------------------------------------------------------------------------------

V_S, V_T, SHARED = 320, 328, 300
SOME = torch.randperm(V_S, generator=torch.Generator().manual_seed(10))[:SHARED].sort().values
SHARED_CASES = [
    case("cross_entropy", label_smoothing=0.1),
    case("divergence", beta=1.0, temperature=0.7),
    case("divergence", beta=0.3, top_k=5),
    case("policy_gradient", reward="clip"),
]


def make_shared(shared_ids, dtype=torch.float64):
    """Inputs whose targets are among the shared ids, the ids (S,), and the ids of the student that are not."""
    x = make_inputs(dtype, v=V_S, v_t=V_T)
    ids = torch.arange(shared_ids) if isinstance(shared_ids, int) else shared_ids
    x["targets"] = ids[x["targets"] % SHARED]
    outside = torch.ones(V_S, dtype=torch.bool).index_fill_(0, ids, False)
    return x, ids, outside


def expected_on(ids, objective, x, **numbers):
    z_s, z_t = (z[:, ids] for z in logits_of(x))
    return per_token(objective, z_s, z_t, torch.searchsorted(ids, x["targets"]), **numbers)


@pytest.mark.parametrize("shared_ids", [SHARED, SOME], ids=["prefix", "index"])
@pytest.mark.parametrize("objective, numbers", SHARED_CASES)
def test_shared_ids_equal_the_reference_on_sliced_logits(objective, numbers, shared_ids):
    x, ids, outside = make_shared(shared_ids)
    out = run(objective, x, shared_ids=shared_ids, chunk_bytes=V_S * 4 * 2 * 5, **numbers)
    expected = expected_on(ids, objective, x, **numbers)
    assert error(out.per_token, constant(expected)) < 1e-12
    ours, theirs = grads(out.loss_sum, x), grads(expected.sum(), x)
    for a, b in zip(ours, theirs, strict=True):
        assert error(a, b) < 1e-12
    assert outside.sum() == V_S - SHARED
    assert not ours[1][outside].any() and not ours[2][outside].any()


@pytest.mark.parametrize("shared_ids", [SHARED, SOME], ids=["prefix", "index"])
@pytest.mark.parametrize("objective, numbers", SHARED_CASES)
def test_shared_ids_through_a_module(objective, numbers, shared_ids):
    x, ids, outside = make_shared(shared_ids, torch.float32)
    exact = in_fp64(x)
    out = chunked_module_loss(
        Settings(objective, **numbers),
        x["hidden"],
        lambda states: states @ x["weight"].T + x["bias"],
        vocab_size=V_S,
        targets=x["targets"],
        teacher_logits=None if objective == "cross_entropy" else lambda chunk: logits_of(x)[1][chunk],
        shared_ids=shared_ids,
        chunk_bytes=V_S * 4 * 2 * 5,
    )
    expected = expected_on(ids, objective, exact, **numbers)
    assert error(out.per_token, constant(expected)) < 1e-6
    ours = grads(out.loss_sum, x)
    for a, b in zip(ours, grads(expected.sum(), exact), strict=True):
        assert error(a, b) < 5e-6
    assert not ours[1][outside].any() and not ours[2][outside].any()


def test_zero_padding_in_place_of_shared_ids_is_seen():
    """Padding the shorter head's logits with zeros is another loss: why heads are cut instead."""
    x, ids, _ = make_shared(SHARED)
    z_s, z_t = logits_of(x)
    padded = per_token("divergence", torch.nn.functional.pad(z_s, (0, V_T - V_S)), z_t)
    assert error(constant(padded), constant(expected_on(ids, "divergence", x))) > 1e-2


# --- 8. small shapes and torch.compile -------------------------------------------------------------------------------

ONE_EACH = [
    case("cross_entropy", label_smoothing=0.1),
    case("divergence", beta=0.3, temperature=0.7),
    case("divergence", beta=1.0, top_k=1),
    case("skew_forward_kl"),
    case("skew_reverse_kl"),
    case("tvd"),
    case("policy_gradient", reward="tanh"),
]


@pytest.mark.parametrize("n, v", [(1, V), (N, 2), (1, 2)])
@pytest.mark.parametrize("objective, numbers", ONE_EACH)
def test_one_position_and_two_ids(objective, numbers, n, v):
    x = make_inputs(n=n, v=v)
    expected = per_token(objective, *logits_of(x), x["targets"], **numbers)
    out = run(objective, x, **numbers)
    assert out.per_token.shape == (n,) and error(out.per_token, constant(expected)) < 1e-12
    for ours, theirs in zip(grads(out.loss_sum, x), grads(expected.sum(), x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("objective, numbers", ONE_EACH)
def test_no_position_gives_zeros(objective, numbers):
    x = make_inputs(n=0)
    out = run(objective, x, **numbers)
    assert out.loss_sum == 0 and out.per_token.shape == (0,)
    assert all(g.shape == x[k].shape and not g.any() for k, g in zip(x, grads(out.loss_sum, x), strict=False))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("objective, numbers", [ONE_EACH[1], ONE_EACH[-1]])
def test_compiled_callers_get_the_same(objective, numbers, backend):
    x = make_inputs()

    def loss_of(hidden, weight, bias):
        return (
            run(objective, x | {"hidden": torch.tanh(hidden), "weight": weight, "bias": bias}, **numbers).loss_sum / 3
        )

    torch._dynamo.reset()
    leaves = [x[name] for name in ("hidden", "weight", "bias")]
    plain, compiled = loss_of(*leaves), torch.compile(loss_of, backend=backend)(*leaves)
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
    for ours, theirs in zip(grads(compiled, x), grads(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_pure_functions_compile_whole(backend):
    def loss_of(z, z_t):
        return generalized_jsd(log_probs(z, 0.7), log_probs(z_t, 0.7), 0.3).sum()

    torch._dynamo.reset()
    z, z_t = two_logits()
    same_with_gradients(torch.compile(loss_of, backend=backend, fullgraph=True)(z, z_t), loss_of(z, z_t), z)


def capped(z, scale, softcap):
    return softcap * torch.tanh(z * scale / softcap)


@pytest.mark.parametrize("objective, numbers", ONE_EACH)
def test_both_heads_may_be_scaled_and_capped(objective, numbers):
    x = make_inputs()
    z_s, z_t = logits_of(x)
    expected = per_token(objective, capped(z_s, 0.5, 3.0), capped(z_t, 0.8, 2.0), x["targets"], **numbers)
    transforms = {"student_transform": HeadTransform(0.5, 3.0), "teacher_transform": HeadTransform(0.8, 2.0)}
    out = run(objective, x, **transforms, **numbers)
    assert error(out.per_token, constant(expected)) < 1e-12
    for ours, theirs in zip(grads(out.loss_sum, x), grads(expected.sum(), x), strict=True):
        assert error(ours, theirs) < 1e-12


# --- 9. fp16 ---------------------------------------------------------------------------------------------------------


def nearly_the_teacher():
    """fp16 inputs: the teacher is the student but for the last bits of its head, as late in a distillation."""
    x = make_inputs(torch.float16)
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        x["hidden"] *= 0.1
        x["teacher_hidden"], x["teacher_bias"] = x["hidden"].clone(), x["bias"].clone()
        noise = torch.randn(V, H, generator=g) * 2e-3
        x["teacher_weight"] = (x["weight"].float() + noise).half()
    return x


@pytest.mark.parametrize("objective, numbers", DIVERGENCES[:-1])
def test_fp16_with_a_loss_scaler_stays_near_fp64(objective, numbers):
    """Gradients of 1e-8 are below fp16's smallest number, 6e-8, unless the loss is scaled; they are taken in fp32 at
    scale 1, so the scaler comes in time. Rounded once to fp16: 2^-11 = 5e-4 of each, more where it is subnormal."""
    x = nearly_the_teacher()
    exact = in_fp64(x)
    expected = grads(per_token(objective, *logits_of(exact), **numbers).sum() / 512, exact, "hidden", "weight")
    scaled = grads(run(objective, x, **numbers).loss_sum * 2.0**16 / 512, x, "hidden", "weight")
    plain = grads(run(objective, x, **numbers).loss_sum / 512, x, "hidden", "weight")
    assert max(g.abs().max() for g in expected) < 1e-5
    for ours, bare, theirs in zip(scaled, plain, expected, strict=True):
        assert ours.dtype == torch.float16
        assert error(ours.double() / 2**16, theirs) < 1e-3
        assert error(bare, theirs) > 1e-2  # what the scaler is there for


def test_low_precision_keeps_tiny_gradients():
    """1e-9 is 0 in fp16; times 2^30 = 1.07e9 it is 1.07. Six decimal orders below the largest are then kept too."""
    gradient = torch.tensor([[1e-9, -3e-10], [2e-13, 0.0]])
    assert not gradient.half().any()
    low, back = products.to_low_precision(gradient, torch.float16)
    assert low.dtype == torch.float16 and 0.5 <= low.abs().max() < 2.0
    torch.testing.assert_close(low.float() * back, gradient, rtol=1e-3, atol=1e-16)
    assert math.log2(back) == round(math.log2(back))  # a power of two rounds nothing


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e-4, 1.0, 1e4, 1e9])
def test_low_precision_at_every_size(scale):
    gradient = torch.linspace(-1, 1, 12).view(3, 4) * scale
    low, back = products.to_low_precision(gradient, torch.float16)
    assert low.isfinite().all()
    torch.testing.assert_close(low.float() * back, gradient, rtol=1e-3, atol=0)


def test_low_precision_of_nothing_and_of_bf16():
    for empty in (torch.zeros(2, 3), torch.zeros(0, 3)):
        low, back = products.to_low_precision(empty, torch.float16)
        assert torch.equal(low, empty.half()) and back == 1.0
    gradient = torch.tensor([[1e-30, -2.0]])
    low, back = products.to_low_precision(gradient, torch.bfloat16)
    assert torch.equal(low, gradient.bfloat16()) and back == 1.0


# --- 10. an objective of one's own -----------------------------------------------------------------------------------


def squared_hellinger(log_p, log_q):
    """½ Σ (√p − √q)² = 1 − Σ √(p q)."""
    return 1 - ((log_p + log_q) / 2).exp().sum(-1)


def test_hellinger_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/8, 1/8, 3/4): √(pq) = (1/4, √2/8, √3/4), so 1 − 1/4 − .1768 − .4330 = .1402."""
    close(squared_hellinger(P.log(), Q.log()), [0.75 - math.sqrt(2) / 8 - math.sqrt(3) / 4])


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_new_divergence_needs_its_formula_only(tau, top_k, monkeypatch, blocks_of_two):
    monkeypatch.setitem(OBJECTIVES, "hellinger", divergence_objective(squared_hellinger))
    check("hellinger", temperature=tau, top_k=top_k)
    check("hellinger", temperature=tau, top_k=top_k, dtype=torch.float32, tolerance=1e-5)


def test_a_new_divergence_gets_its_setting(monkeypatch):
    """And is the built-in one where its formula is, under no_grad too."""
    monkeypatch.setitem(OBJECTIVES, "mine", divergence_objective(generalized_jsd, setting="beta"))
    x = make_inputs()
    ours, theirs = (run(name, x, beta=0.3, temperature=0.7) for name in ("mine", "divergence"))
    torch.testing.assert_close(ours.per_token, theirs.per_token, rtol=0, atol=0)
    for a, b in zip(grads(ours.loss_sum, x), grads(theirs.loss_sum, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(
            run("mine", x, beta=0.3, temperature=0.7).per_token, theirs.per_token, rtol=0, atol=0
        )
    with pytest.raises(ValueError, match="looks at one token only"):
        Settings("policy_gradient", top_k=3)
