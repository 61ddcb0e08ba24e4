"""Where the first label stands, and which hidden states predict what is trained."""

import pytest
import torch

from trl_opd.data.collate import CheckedCollator, pad_rollout
from trl_opd.masking import check_batch, select_predicting, trained_positions
from trl_opd.types import Rollout

X = -100


@pytest.mark.parametrize("side", ["left", "right"])
def test_slice_starts_at_the_first_label_of_the_batch_and_the_mask_decides(side):
    """Labels at columns 2 and 4 of row 0 (a hole at 3), 3 of row 1: the slice starts at 2; hidden = 10·row + column."""
    labels = torch.tensor([[X, X, 7, X, 9], [X, X, X, 8, X]])
    if side == "left":
        labels = torch.cat([torch.full((2, 3), X), labels], 1)
    hidden = torch.arange(labels.size(1)).repeat(2, 1).float() + torch.tensor([[0.0], [10.0]])
    positions = trained_positions(labels)
    shift = 3 if side == "left" else 0
    assert positions.start == 2 + shift
    assert positions.targets.tolist() == [7, 9, 8] and positions.rows.tolist() == [0, 0, 1]
    picked = select_predicting(hidden.unsqueeze(-1), positions).squeeze(-1)
    assert picked.tolist() == [1 + shift, 3 + shift, 12 + shift]


def test_position_zero_is_never_trained_and_no_label_gives_nothing():
    assert len(trained_positions(torch.tensor([[5, X]]))) == 0
    nothing = trained_positions(torch.full((2, 3), X))
    assert len(nothing) == 0 and select_predicting(torch.zeros(2, 3, 4), nothing).shape == (0, 4)


def test_a_rollout_is_padded_to_its_own_longest_row():
    labels = [[7], [X, X], [9] * 50]
    rollout = Rollout([[1, 2], [3], [4, 5, 6]], [[7], [8, 9], [9] * 50], labels, [1, 0, 1], [True, True, False])
    batch = pad_rollout(rollout, [0, 1], pad_token_id=0, multiple_of=None)
    assert batch["input_ids"].tolist() == [[1, 2, 7], [3, 0, 0]]  # the row without a label is one token
    assert batch["labels"].tolist() == [[X, X, 7], [X, X, X]]  # weight 0 is not trained
    assert batch["off_policy"].tolist() == [] and pad_rollout(rollout, [0, 2], 0, None)["off_policy"].tolist() == [
        *range(1, 51)
    ]
    assert pad_rollout(rollout, [0], 0, 8)["input_ids"].shape == (1, 8)


def test_the_teachers_batch_has_the_same_tokens_in_the_same_order():
    """Prompts of 2 and 1 tokens for the student, of 1 and 4 for the teacher: positions differ, targets do not."""
    prompts, shown, written = [[1, 2], [3]], [[4], [5, 5, 5, 5]], [[7, 8], [9]]
    rollout = Rollout(prompts, written, written, [1, 1], [True, True], shown)
    batch = pad_rollout(rollout, [0, 1], pad_token_id=0, multiple_of=None)
    mine, theirs = batch["trained_positions"], batch["teacher"]["trained_positions"]
    assert mine.targets.tolist() == theirs.targets.tolist() == [7, 8, 9]
    assert batch["teacher"]["input_ids"].tolist() == [[4, 7, 8, 0, 0], [5, 5, 5, 5, 9]]
    assert mine.start == 1 and theirs.start == 1 and mine.index.tolist() != theirs.index.tolist()


@pytest.mark.parametrize(
    "labels, mask, message",
    [
        ([[X, 1]], [[1, 1]], "Row 0, position 1 of the batch: the label is 1"),
        ([[X, 6]], [[1, 0]], "token 6 is padding"),
        ([[5, 6]], [[1, 1]], "token 5 is trained but no real token precedes"),
    ],
)
def test_broken_masks_are_refused(labels, mask, message):
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match=message):
        check_batch(ids, torch.tensor(labels), torch.tensor(mask))


def test_the_collator_checks_and_can_be_told_not_to():
    bad = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[X, 1]]), "attention_mask": torch.ones(1, 2)}
    with pytest.raises(ValueError, match="strict_masks"):
        CheckedCollator(lambda rows: dict(bad))([])
    assert len(CheckedCollator(lambda rows: dict(bad), strict=False)([])["trained_positions"]) == 1
