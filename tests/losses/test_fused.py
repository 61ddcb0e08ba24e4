"""The fused head against a plain fp64 reference written from the formulas: values and gradients."""

import pytest
import torch

from trl_opd.losses import HeadTransform, Settings, chunked_module_loss, fused_linear_loss

N, H, H_T, V = 13, 8, 6, 17


def make_inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return {
        "hidden": rand(N, H).requires_grad_(),
        "weight": rand(V, H).requires_grad_(),
        "bias": rand(V).requires_grad_(),
        "teacher_hidden": rand(N, H_T),
        "teacher_weight": rand(V, H_T),
        "targets": torch.randint(V, (N,), generator=g),
    }


def naive(objective, x, beta, tau, scale=1.0, softcap=None):
    """Σ over the positions, written from the definitions with probabilities, sharing no code with the package."""
    z = (x["hidden"] @ x["weight"].T + x["bias"]) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    p = torch.exp(z / tau) / torch.exp(z / tau).sum(1, keepdim=True)
    if objective == "cross_entropy":
        return -torch.log(p[torch.arange(N), x["targets"]]).sum()
    z_t = x["teacher_hidden"] @ x["teacher_weight"].T
    q = torch.exp(z_t / tau) / torch.exp(z_t / tau).sum(1, keepdim=True)
    kl = lambda a, b: (a * torch.log(a / b)).sum()  # noqa: E731
    if beta == 0:
        return kl(q, p)
    if beta == 1:
        return kl(p, q)
    m = (1 - beta) * p + beta * q
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def fused(objective, x, beta, tau, **kwargs):
    teacher = {} if objective == "cross_entropy" else {k: x[k] for k in ("teacher_hidden", "teacher_weight")}
    return fused_linear_loss(
        objective,
        x["hidden"],
        x["weight"],
        bias=x["bias"],
        targets=x["targets"],
        beta=beta,
        temperature=tau,
        chunk_bytes=V * 4 * 2 * 5,  # chunks of 5: two whole ones and a rest
        **teacher,
        **kwargs,
    )


def grads(loss, x):
    return torch.autograd.grad(loss, [x["hidden"], x["weight"], x["bias"]])


CASES = [("cross_entropy", 1.0, 1.0)] + [("divergence", b, t) for b in (0.0, 0.3, 0.5, 1.0) for t in (0.7, 1.0, 2.0)]


@pytest.mark.parametrize("objective, beta, tau", CASES)
def test_value_and_gradients_equal_the_formula(objective, beta, tau):
    x = make_inputs()
    expected = naive(objective, x, beta, tau)
    out = fused(objective, x, beta, tau)
    torch.testing.assert_close(out.loss_sum, expected)
    torch.testing.assert_close(out.per_token.sum(), expected)
    for ours, theirs in zip(grads(out.loss_sum / 7, x), grads(expected / 7, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("objective, beta, tau", CASES[:2] + CASES[-2:])
def test_scale_and_softcap(objective, beta, tau):
    x = make_inputs()
    expected = naive(objective, x, beta, tau, scale=0.5, softcap=3.0)
    out = fused(objective, x, beta, tau, student_transform=HeadTransform(0.5, 3.0))
    torch.testing.assert_close(out.loss_sum, expected)
    for ours, theirs in zip(grads(out.loss_sum, x), grads(expected, x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_stays_near_fp64(dtype, tolerance):
    low, exact = make_inputs(dtype), make_inputs()
    exact = {k: v.detach().to(dtype).to(v.dtype).requires_grad_(v.requires_grad) for k, v in exact.items()}
    got = grads(fused("divergence", low, 1.0, 1.0).loss_sum, low)
    expected = grads(naive("divergence", exact, 1.0, 1.0), exact)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < tolerance


def test_frozen_head_gets_no_gradient_and_hidden_keeps_its_own():
    x = make_inputs()
    x["weight"].requires_grad_(False)
    x["bias"].requires_grad_(False)
    (ours,) = torch.autograd.grad(fused("divergence", x, 1.0, 1.0).loss_sum, [x["hidden"]])
    (theirs,) = torch.autograd.grad(naive("divergence", x, 1.0, 1.0), [x["hidden"]])
    torch.testing.assert_close(ours, theirs)


def test_entropy_and_correct_are_those_of_the_student():
    x = make_inputs()
    out = fused("cross_entropy", x, 1.0, 1.0)
    p = torch.softmax(x["hidden"] @ x["weight"].T + x["bias"], 1)
    torch.testing.assert_close(out.metrics["entropy"], -(p * p.log()).sum(1))
    assert torch.equal(out.metrics["correct"], p.argmax(1) == x["targets"])


@pytest.mark.parametrize("objective", ["cross_entropy", "divergence"])
def test_no_position_gives_a_zero_that_back_propagates(objective):
    x = make_inputs()
    for key in ("hidden", "teacher_hidden", "targets"):
        x[key] = x[key][:0]
    loss = fused(objective, x, 1.0, 1.0).loss_sum
    assert loss.item() == 0.0
    assert all(g is not None and g.abs().sum() == 0 for g in grads(loss, x))


def test_fp16_gradients_do_not_underflow_before_the_loss_scaler():
    x = make_inputs(torch.float16)
    with torch.no_grad():
        x["hidden"] *= 1e-3
        x["weight"] *= 1e-3
    plain = grads(fused("cross_entropy", x, 1.0, 1.0).loss_sum / 4096, x)[0]
    scaled = grads(fused("cross_entropy", x, 1.0, 1.0).loss_sum * 65536.0 / 4096, x)[0].double() / 65536
    exact = {
        k: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v for k, v in x.items()
    }
    expected = grads(naive("cross_entropy", exact, 1.0, 1.0) / 4096, exact)[0]
    assert (scaled - expected).norm() / expected.norm() < 5e-3
    assert (plain.double() - expected).norm() / expected.norm() > 1e-2  # what the scaler is there for


@pytest.mark.parametrize("objective, beta, tau", CASES[:2] + CASES[-1:])
def test_module_path_equals_the_fused_one(objective, beta, tau):
    x = make_inputs(torch.float32)
    teacher = None
    if objective == "divergence":
        teacher = lambda chunk: x["teacher_hidden"][chunk] @ x["teacher_weight"].T  # noqa: E731
    out = chunked_module_loss(
        Settings(objective, beta=beta, temperature=tau),
        x["hidden"],
        lambda states: states @ x["weight"].T + x["bias"],
        vocab_size=V,
        targets=x["targets"],
        teacher_logits=teacher,
        chunk_bytes=V * 4 * 2 * 5,
    )
    reference = fused(objective, x, beta, tau)
    torch.testing.assert_close(out.loss_sum, reference.loss_sum)
    torch.testing.assert_close(out.metrics["entropy"], reference.metrics["entropy"])
    for ours, theirs in zip(grads(out.loss_sum, x), grads(reference.loss_sum, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "positions, longest, calls", [(13, 13, 3), (13, 0, 3), (13, 37, 8), (0, 13, 3), (0, 0, 1), (2, 13, 3)]
)
def test_heads_are_called_as_often_as_on_the_rank_with_most(positions, longest, calls):
    """Chunks of 5: 13 positions of another rank are 3 calls, whatever there is here; the loss does not change."""
    x, called = make_inputs(torch.float32), []
    hidden, targets = x["hidden"][:positions], x["targets"][:positions]

    def head(states):
        called.append(len(states))
        return states @ x["weight"].T + x["bias"]

    options = {"vocab_size": V, "targets": targets, "chunk_bytes": V * 4 * 2 * 5}
    out = chunked_module_loss(Settings("cross_entropy"), hidden, head, longest=longest, **options)
    assert len(called) == calls and sum(called) == positions and max(called) <= 5
    gradient = torch.autograd.grad(out.loss_sum, x["weight"])[0]
    assert len(called) == 2 * calls  # each chunk is computed again
    whole = torch.nn.functional.cross_entropy(hidden @ x["weight"].T + x["bias"], targets, reduction="sum")
    torch.testing.assert_close(out.loss_sum, whole)
    torch.testing.assert_close(gradient, torch.autograd.grad(whole, x["weight"])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"objective": "nll"}, "Unknown objective"),
        ({"beta": 1.2}, "beta is 1.2"),
        ({"teacher_weight": None}, "needs `teacher_hidden`"),
        ({"teacher_weight": torch.zeros(V + 1, H_T)}, "17 and 18 ids"),
        ({"objective": "cross_entropy", "targets": None}, "needs `targets`"),
        ({"objective": "cross_entropy", "temperature": 0.5}, "temperature is 0.5"),
    ],
)
def test_errors_name_what_is_wrong(change, message):
    x = make_inputs()
    arguments = (
        {k: x[k] for k in ("targets", "teacher_hidden", "teacher_weight")} | {"objective": "divergence"} | change
    )
    with pytest.raises(ValueError, match=message):
        fused_linear_loss(arguments.pop("objective"), x["hidden"], x["weight"], **arguments)
