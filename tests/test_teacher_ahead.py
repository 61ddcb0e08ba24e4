"""`teacher_max_tokens`: the teacher scores several micro-batches at once, with the step they had."""

import pytest
import torch
from test_distillation_trainer import build
from test_objective_wiring import OURS, seeded_peft
from test_teachers import LORA
from tiny import llama, qwen3
from training import assert_same_gradients, text_rows

import trl_opd.token_trainer
from trl_opd.data.collate import POSITIONS, SIZES, pad_rows
from trl_opd.data.pieces import joined, stretches
from trl_opd.heads import predicting_states
from trl_opd.teachers.ahead import Ahead, shares

X = -100
BATCHES = [
    [{"input_ids": [5, 6, 7], "labels": [X, X, 7]}, {"input_ids": [8, 9], "labels": [X, 9]}],
    [{"input_ids": [8, 9, 10, 11, 12], "labels": [X, 9, 10, X, 12]}],
    [{"input_ids": [13], "labels": [X]}, {"input_ids": [3, 4, 5, 6], "labels": [X, X, X, X]}],
    [{"input_ids": [3, 4, 5, 6], "labels": [X, X, 5, 6]}],
]


def test_stretches_by_hand():
    """Rows, longest and tokens. Padded: 2 · 5 and 1 · 4 are 3 · 5, 4 more rows would be 7 · 5; 4 · 3 and 1 · 2 are
    5 · 3. Unpadded: 8 + 4 + 9."""
    sizes = [(2, 5, 8), (1, 4, 4), (4, 3, 9), (1, 2, 2)]
    assert stretches(sizes, 15, flat=False) == [[0, 1], [2, 3]]
    assert stretches(sizes, 14, flat=False) == [[0], [1], [2], [3]]
    assert stretches(sizes, 21, flat=True) == [[0, 1, 2], [3]]
    assert stretches(sizes, 23, flat=True) == [[0, 1, 2, 3]]
    assert stretches(sizes, 1, flat=True) == [[0], [1], [2], [3]]
    assert stretches([(0, 0, 0), (1, 4, 4), (0, 0, 0), (1, 4, 4)], 8, flat=False) == [[1, 3]]
    # a short row in front of a long one is padded as well
    sizes = [(3, 1, 3), (1, 9, 9)]
    assert stretches(sizes, 35, flat=False) == [[0], [1]] and stretches(sizes, 36, flat=False) == [[0, 1]]


@pytest.mark.parametrize("flat", [False, True])
def test_states_of_joined_batches_are_those_of_each(flat):
    """Of other widths, from other first labels on, one without a label."""
    model, batches = qwen3(), [pad_rows(rows, 0) for rows in BATCHES]
    whole = joined(batches)
    assert whole["input_ids"].shape == (6, 5) and whole[SIZES].tokens == (3, 2, 5, 1, 4, 4)
    expected = torch.cat([predicting_states(model, batch, batch[POSITIONS]) for batch in batches])
    torch.testing.assert_close(predicting_states(model, whole, whole[POSITIONS], flat), expected, rtol=1e-4, atol=1e-5)
    assert whole[POSITIONS].targets.tolist() == [7, 9, 9, 10, 12, 5, 6]
    assert whole[POSITIONS].rows.tolist() == [0, 1, 2, 2, 2, 5, 5]


def test_each_micro_batch_gets_its_own_states_from_one_pass():
    batches, runs = [pad_rows(rows, 0) for rows in BATCHES], []

    def run(batch):
        runs.append(batch["input_ids"].shape)
        return torch.arange(len(batch[POSITIONS])).unsqueeze(1), "head"

    found = shares(batches, [[0, 1], [2, 3]])
    states = [found[i].states(run)[0].squeeze(1).tolist() for i in range(4)]
    assert states == [[0, 1], [2, 3, 4], [], [0, 1]] and runs == [(3, 5), (3, 4)]
    part = found[1].part(slice(1, 3))
    assert part.states(run)[0].squeeze(1).tolist() == [3, 4] and len(runs) == 2
    assert part.part(slice(1, 2)).states(run) == (torch.tensor([[4]]), "head")


def test_what_was_run_is_let_go():
    ahead = Ahead([pad_rows(rows, 0) for rows in BATCHES])
    ahead.states(lambda batch: (torch.zeros(7, 1), "head"))
    assert not ahead._batches


def distilled(tmp_path, teacher_max_tokens, **options):
    trainer, recorder = build(*OURS, tmp_path, teacher_max_tokens=teacher_max_tokens, **options)
    seen, states = [], trainer.teacher.states

    def noted(student, batch, positions):
        seen.append(batch["input_ids"].shape[0])
        return states(student, batch, positions)

    trainer.teacher.states = noted
    trainer.train()
    return trainer, recorder.steps, seen, [log for log in trainer.state.log_history if "loss" in log]


EACH = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "balance_micro_batches": False}
OPTIONS = {
    "one a micro-batch": EACH,
    "two rollouts": EACH | {"n": 8, "max_steps": 2},
    "two steps a rollout": EACH | {"n": 8, "max_steps": 2, "steps_per_generation": 8, "objective": "policy_gradient"},
    "merged": EACH | {"balance_micro_batches": True},
    "pieces": EACH | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_max_tokens": 29},
    "anchor": EACH | {"anchor_weight": 0.2, "peft_config": LORA},
    "base": EACH | {"teacher_kind": "base", "teacher": False, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_step_is_what_it_was(tmp_path, name, padded, monkeypatch):
    if padded:
        monkeypatch.setattr(trl_opd.token_trainer, "why_padded", lambda *args: "this test wants it")
    runs = []
    for most in (None, 10_000):
        student = {"student": seeded_peft(llama(), LORA)} if name == "base" else {}
        runs.append(distilled(tmp_path, most, **OPTIONS[name], **student))
    (_, plain_steps, plain, plain_logs), (_, steps, seen, logs) = runs
    assert len(seen) == len(steps) < len(plain) and set(seen) == {4}
    for mine, other in zip(steps, plain_steps, strict=True):
        assert_same_gradients(mine, other, rtol=1e-4)
    for mine, other in zip(logs, plain_logs, strict=True):
        assert mine.keys() == other.keys() >= {"loss", "distill/reverse_kl", "distill/num_tokens_per_step"}
        for key in mine.keys() & {"loss", "distill/reverse_kl", "distill/num_tokens_per_step", "num_tokens"}:
            assert mine[key] == pytest.approx(other[key], rel=1e-4), key


def test_as_many_as_fit(tmp_path):
    """Rows of 4, 45, 10 and 28 tokens, one a micro-batch: some that follow one another have 40 or fewer."""
    trainer, _, seen, _ = distilled(tmp_path, 40, **EACH)
    assert sum(seen) == 4 and 1 < len(seen) < 4
    assert not trainer._shares


@pytest.mark.parametrize("most, accumulation", [(10, 4), (10_000, 1)])
def test_a_number_that_does_nothing_is_said(tmp_path, most, accumulation, caplog):
    """Micro-batches that are too large, and one alone."""
    _, _, seen, _ = distilled(tmp_path, most, **EACH | {"gradient_accumulation_steps": accumulation})
    assert set(seen) == {1}
    assert f"teacher_max_tokens is {most}, and no two micro-batches" in caplog.text


def test_a_prompt_of_the_teachers_own(tmp_path):
    rows = text_rows(4)
    rows = rows.add_column("shown", [prompt + " cd" * (4 - i) for i, prompt in enumerate(rows["prompt"])])
    steps = [distilled(tmp_path, most, rows=rows, teacher_prompt_column="shown", **EACH) for most in (None, 10_000)]
    assert steps[1][2] == [4] and steps[0][2] == [1] * 4
    assert_same_gradients(steps[1][1][0], steps[0][1][0], rtol=1e-4)


def test_ranks_that_share_weights_run_as_many_passes(tmp_path, monkeypatch):
    """Another rank has micro-batches of 60 tokens: where weights are sharded none of this one's is put together."""
    trainer, _, _, _ = distilled(tmp_path, 40, **EACH)
    batches = [trainer._buffered_inputs[i] for i in range(4)]
    assert trainer._look_ahead(batches)
    monkeypatch.setattr("trl_opd.rollout_trainer.shards_weights", lambda state: True)
    assert trainer._look_ahead(batches)
    other = torch.tensor([[[1, 60, 60]] * 4])
    monkeypatch.setattr(trainer.accelerator, "gather", lambda table: torch.cat([table, other]))
    assert not trainer._look_ahead(batches)


def test_less_than_one_token_is_refused():
    with pytest.raises(ValueError, match="teacher_max_tokens is 0; it must be 1 or more"):
        OURS[1](teacher_max_tokens=0)
