"""A micro-batch in pieces: the same rows, the same trained positions, no wider than they must be."""

import pytest
import torch

from trl_opd.data.collate import NUM_ITEMS, OFF_POLICY, POSITIONS, SAMPLED, SIZES, TEACHER, pad_rollout
from trl_opd.data.pieces import pieces, row_cuts
from trl_opd.masking import select_predicting
from trl_opd.types import Rollout

X = -100


def test_cuts_by_hand():
    """9 + 5 rows wide 9 are 18; 5, 4, 2 are 15; a row of 30 is alone."""
    assert row_cuts([9, 5, 5, 4, 2], 18) == [(0, 2), (2, 5)]
    assert row_cuts([9, 5, 5, 4, 2], 17) == [(0, 1), (1, 4), (4, 5)]
    assert row_cuts([4, 30, 4], 8) == [(0, 1), (1, 2), (2, 3)]
    assert row_cuts([2, 2], 4) == [(0, 2)] and row_cuts([7], 1) == [(0, 1)]


def test_cuts_of_rows_without_padding_by_hand():
    """9 + 5 are 14, 9 + 5 + 4 are 18."""
    assert row_cuts([9, 5, 4, 2], 18, flat=True) == [(0, 3), (3, 4)]
    assert row_cuts([9, 5, 4, 2], 17, flat=True) == [(0, 2), (2, 4)]
    assert row_cuts([4, 30, 4, 4], 8, flat=True) == [(0, 1), (1, 2), (2, 4)]


def batch(shown=None):
    """Prompts of 2, 1, 3, 1 tokens; the third completion is masked, the second and the fourth are off-policy."""
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    completions = [[11, 12, 13, 14], [21, 22], [31], [41, 42, 43]]
    labels = [completions[0], [X, 22], [X], [41, X, 43]]
    rollout = Rollout(prompts, completions, labels, [1] * 4, [True, False, True, False], shown)
    padded = pad_rollout(rollout, range(4), pad_token_id=0, multiple_of=None)
    return padded | {SAMPLED: torch.arange(7.0), NUM_ITEMS: torch.tensor(7)}


@pytest.mark.parametrize("budget", [6, 8, 12])
@pytest.mark.parametrize("shown", [None, [[8] * 3, [8], [8, 8], [8] * 5]], ids=["own prompts", "teacher's prompts"])
def test_pieces_hold_what_the_batch_held(budget, shown):
    whole = batch(shown)
    cut = pieces(whole, budget)
    assert len(cut) > 1
    off = []
    for key in (None, TEACHER) if shown else (None,):
        of = lambda b, key=key: b if key is None else b[key]  # noqa: E731
        hidden = torch.arange(of(whole)["input_ids"].numel() * 3.0).view(*of(whole)["input_ids"].shape, 3)
        picked, first = [], 0
        for piece in cut:
            inner = of(piece)
            rows, width = inner["input_ids"].shape
            assert rows * width <= budget or rows == 1
            assert width == max(inner[SIZES].tokens)
            last = first + rows
            for name in ("input_ids", "labels", "attention_mask"):
                assert torch.equal(inner[name], of(whole)[name][first:last, :width])
            picked.append(select_predicting(hidden[first:last, :width], inner[POSITIONS]))
            assert inner[POSITIONS].rows.tolist() == sorted(inner[POSITIONS].rows.tolist())
            if key is None:
                off.append(piece[OFF_POLICY] + sum(len(p) for p in picked[:-1]))
            first = last
        assert torch.equal(torch.cat(picked), select_predicting(hidden, of(whole)[POSITIONS]))
        targets = torch.cat([of(piece)[POSITIONS].targets for piece in cut])
        assert torch.equal(targets, of(whole)[POSITIONS].targets)
    assert torch.equal(torch.cat(off), whole[OFF_POLICY])
    assert torch.equal(torch.cat([piece[SAMPLED] for piece in cut]), whole[SAMPLED])
    assert all(piece[NUM_ITEMS] == 7 for piece in cut)


def test_a_piece_keeps_the_multiple_its_batch_was_padded_to():
    rollout = Rollout([[1], [2]], [[3] * 9, [4] * 2], [[3] * 9, [4] * 2], [1, 1], [True, True])
    padded = pad_rollout(rollout, range(2), pad_token_id=0, multiple_of=4)
    assert [piece["input_ids"].shape for piece in pieces(padded, 12, 4)] == [(1, 12), (1, 4)]


def test_one_piece_is_the_batch_itself():
    whole = batch()
    assert pieces(whole, 100)[0] is whole
