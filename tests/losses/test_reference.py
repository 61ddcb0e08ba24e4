"""The readable references, on numbers worked by hand and against torch's own functions."""

import math

import pytest
import torch

from trl_opd.losses import compute_prompt_length, sft_loss, token_divergence

X = -100


def test_prompt_length_is_the_batch_minimum_of_real_tokens():
    """Row 0: pad pad 5 6 [7] -> 2; row 1: 1 2 3 [4] pad -> 3; row 2 has no label and does not count."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]])
    labels = torch.tensor([[X, X, X, X, 7], [X, X, X, 4, X], [X, X, X, X, X]])
    assert compute_prompt_length(mask, labels) == 2
    assert compute_prompt_length(mask[1:], labels[1:]) == 3
    with pytest.raises(ValueError, match="No token"):
        compute_prompt_length(mask[2:], labels[2:])


def test_prompt_length_sees_through_holes_and_tails():
    """A hole between two trained spans and an untrained tail change nothing; a hole in the mask is not a token."""
    mask = torch.tensor([[1, 0, 1, 1, 1, 1]])
    labels = torch.tensor([[X, X, X, 3, X, 5]])
    assert compute_prompt_length(mask, labels) == 2


def test_sft_loss_by_hand():
    """Uniform logits over 4 tokens: ln 4. Then ln 9 added to the target's logit at the one place that predicts it:
    p = 9 / (9 + 3) = 3/4, loss ln(4/3)."""
    ids = torch.tensor([[0, 1, 2], [3, 1, 0]])
    labels = torch.tensor([[X, X, 2], [X, X, X]])
    mask = torch.ones_like(ids)
    logits = torch.zeros(2, 3, 4)
    loss, n = sft_loss(logits, ids, labels, mask)
    assert (loss.item(), int(n)) == (pytest.approx(math.log(4)), 1)
    logits[0, 1, 2] = math.log(9)
    assert sft_loss(logits, ids, labels, mask)[0].item() == pytest.approx(math.log(4 / 3))


def test_sft_loss_equals_torch_cross_entropy_with_gradients():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(11, (3, 7), generator=g)
    labels = ids.masked_fill(torch.rand(3, 7, generator=g) < 0.5, X)
    labels[:, 0] = X
    logits = torch.randn(3, 7, 11, generator=g, dtype=torch.float64, requires_grad=True)
    loss, n = sft_loss(logits, ids, labels, torch.ones_like(ids))
    other = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=X)
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (loss, other)))
    assert n == (labels != X).sum()


@pytest.mark.parametrize(
    "labels, mask, message",
    [
        ([[X, X, X]], [[1, 1, 1]], "No token"),
        ([[5, X, X]], [[1, 1, 1]], "no real token precedes"),
        ([[X, 6, X]], [[0, 1, 1]], "no real token precedes"),
        ([[X, X, 7]], [[1, 1, 0]], "is padding"),
        ([[X, 9, X]], [[1, 1, 1]], "is another one"),
    ],
)
def test_sft_loss_refuses_broken_masks(labels, mask, message):
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=message):
        sft_loss(torch.zeros(1, 3, 10), ids, torch.tensor(labels), torch.tensor(mask))


def test_divergence_by_hand():
    """p = (.5, .25, .25), q = (.25, .25, .5). Reverse KL = .5·ln 2 − .25·ln 2 = .25·ln 2; forward KL the same by
    symmetry. JSD(.5): m = (.375, .25, .375); KL(p‖m) = .5·ln(4/3) + .25·ln(2/3) = KL(q‖m)."""
    p, q = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.25, 0.5]).log()
    labels = torch.tensor([[1]])
    quarter_ln2 = 0.25 * math.log(2)
    half = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    for beta, expected in ((1.0, quarter_ln2), (0.0, quarter_ln2), (0.5, half)):
        loss, n = token_divergence(p.view(1, 1, 3), q.view(1, 1, 3), labels, beta=beta)
        assert (loss.item(), int(n)) == (pytest.approx(expected, abs=1e-6), 1)


def test_temperature_is_in_the_divergence():
    """Logits (ln 4, 0) against (0, 0): at τ = 1 p = (.8, .2), KL(p‖½) = .8·ln 1.6 + .2·ln .4;
    at τ = 2 the logits are (ln 2, 0), p = (2/3, 1/3), KL = 2/3·ln(4/3) + 1/3·ln(2/3)."""
    s, t = torch.tensor([[[math.log(4), 0.0]]]), torch.zeros(1, 1, 2)
    labels = torch.tensor([[0]])
    assert token_divergence(s, t, labels)[0].item() == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4))
    expected = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert token_divergence(s, t, labels, temperature=2.0)[0].item() == pytest.approx(expected)


def test_divergence_masks_by_labels_and_gives_the_teacher_no_gradient():
    g = torch.Generator().manual_seed(1)
    student = torch.randn(2, 3, 5, generator=g, requires_grad=True)
    teacher = torch.randn(2, 3, 5, generator=g, requires_grad=True)
    labels = torch.tensor([[X, 1, X], [2, X, 3]])
    loss, n = token_divergence(student, teacher, labels, beta=0.5)
    loss.backward()
    assert int(n) == 3 and teacher.grad is None
    assert student.grad[labels == X].abs().sum() == 0
    with pytest.raises(ValueError, match=r"beta is -0\.1"):
        token_divergence(student, teacher, labels, beta=-0.1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("tau", [0.7, 1.0])
def test_divergence_agrees_with_trl_gkd(beta, tau):
    from trl.experimental.gkd import GKDTrainer

    g = torch.Generator().manual_seed(2)
    student, teacher = (torch.randn(2, 4, 9, generator=g, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    labels = torch.randint(9, (2, 4), generator=g)
    ours = token_divergence(student, teacher, labels, beta, tau)[0]
    # GKD's mean is over tokens times vocabulary summed: 'batchmean' of its loss is Σ / tokens
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta, temperature=tau)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x, student)[0] for x in (ours, theirs)))
