"""Balanced micro-batches: the rows of a step sorted by length, with the gradient, metrics and order they had before."""

import random
from itertools import combinations, pairwise

import pytest
import torch
from test_distillation_trainer import build
from test_objective_wiring import OURS
from tiny import qwen3, tokenizer
from training import LENGTHS, QUIET, Gradients, assert_same_gradients, text_rows

import trl_opd.token_trainer
from trl_opd import SFTConfig, SFTTrainer
from trl_opd.balance import PASS_TOKENS, deal, micro_batches, row_lengths, sizes_by_tokens
from trl_opd.data.collate import ROWS, CollatedRows, regrouped
from trl_opd.types import Rollout

X = -100


@pytest.fixture(autouse=True)
def padded(request, monkeypatch):
    """Rows stay padded here, as with most attention on a GPU."""
    if "unpadded" not in request.fixturenames:
        monkeypatch.setattr(trl_opd.token_trainer, "why_padded", lambda *args: "this test wants it")


@pytest.fixture
def unpadded():
    """Rows stand end to end, as with SDPA on a CPU."""


def widths(model):
    """Shapes of what the backbone of a model is run on in training, one a micro-batch."""
    seen = []

    def note(module, args, kwargs):
        if module.training:
            seen.append(tuple(kwargs["input_ids"].shape))

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def test_micro_batches_by_hand():
    """Two steps of four rows: 9 and 7, then 3 and 1; 8 and the first 5, then the other 5 and 2."""
    lengths = [3, 9, 1, 7, 5, 5, 8, 2]
    assert micro_batches(lengths, 4, steps=2) == [[1, 3], [0, 2], [6, 4], [5, 7]]
    assert micro_batches(lengths, 4, steps=2, balance=False) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def rollout(*lengths, shown=None, labels=None):
    completions = [[10 * i + 1] * n for i, n in enumerate(lengths)]
    count = len(lengths)
    labels = completions if labels is None else labels
    return Rollout([[5]] * count, completions, labels, [1] * count, [True] * count, shown)


def test_lengths_are_what_the_models_run_on():
    """A prompt of one token, and two completions: all trained; none trained; two tokens of three."""
    labels = [[1, 1], [X] * 9, [21, 21, X]]
    assert row_lengths(rollout(2, 9, 3, labels=labels)) == [3, 1, 3]
    assert row_lengths(rollout(2, 9, 3, labels=labels, shown=[[6] * 4] * 3)) == [3 + 6, 1 + 1, 3 + 6]


def test_rows_are_dealt_to_the_ranks_step_by_step():
    """Step 0 holds lengths 1, 2 of rank 0 and 30, 40 of rank 1; step 1 holds 3, 4 and 50, 60. Each rank gets every
    second row of either, from the longest on."""
    shares = [rollout(1, 2, 3, 4), rollout(30, 40, 50, 60)]
    dealt = [deal(shares, rank, steps=2) for rank in (0, 1)]
    assert [[len(c) for c in share.completion_ids] for share in dealt] == [[40, 2, 60, 4], [30, 1, 50, 3]]
    assert all(share.labels == share.completion_ids and len(share.weights) == 4 for share in dealt)
    shown = [rollout(1, 2, shown=[[7], [8]]), rollout(30, 40, shown=[[9], [4]])]
    assert deal(shown, 0, steps=1).teacher_prompt_ids == [[4], [8]]


CUT = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def distilled(tmp_path, balance, **options):
    trainer, recorder = build(*OURS, tmp_path / str(balance), balance_micro_batches=balance, **CUT | options)
    seen = widths(trainer.model)
    trainer.train()
    return trainer, recorder.steps, seen, [log for log in trainer.state.log_history if "loss" in log]


def test_a_balanced_rollout_gives_the_same_step_on_less_padding(tmp_path):
    """Completions of 1, 40, 3 and 25 letters and a stop token after prompts of 2, 4, 6 and 2."""
    options = {"log_completions": True}
    _, steps, balanced, logs = distilled(tmp_path, True, **options)
    _, plain_steps, plain, plain_logs = distilled(tmp_path, False, **options)
    assert balanced == [(2, 45), (2, 10)] and sorted(plain) != sorted(balanced)
    assert sum(b * t for b, t in balanced) < sum(b * t for b, t in plain)
    assert_same_gradients(steps[0], plain_steps[0], rtol=1e-5)
    for name, value in plain_logs[0].items():
        if not name.endswith(("time", "runtime", "per_second", "gib")):
            assert logs[0][name] == pytest.approx(value, rel=1e-5), name
    import pandas

    files = [next((tmp_path / str(on) / "completions").glob("*.parquet")) for on in (True, False)]
    assert pandas.read_parquet(files[0]).equals(pandas.read_parquet(files[1]))


def test_rows_stay_in_their_step_and_keep_their_log_probs(tmp_path):
    """Two steps from one rollout: each has the tokens it had, and the second weighs them by what they were sampled
    with."""
    options = {"n": 8, "steps_per_generation": 4, "max_steps": 2, "objective": "policy_gradient", "optim": "sgd"}
    options |= {"learning_rate": 0.02, "lr_scheduler_type": "constant", "importance_clip": [0.1, 10.0]}
    _, steps, _, logs = distilled(tmp_path, True, **options)
    _, plain_steps, _, plain_logs = distilled(tmp_path, False, **options)
    for i in range(2):
        assert_same_gradients(steps[i], plain_steps[i], rtol=1e-4)
        for name in ("distill/num_tokens_per_step", "distill/importance_ratio", "distill/reward", "loss"):
            assert logs[i][name] == pytest.approx(plain_logs[i][name], rel=1e-4), name
    assert logs[0]["distill/importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert logs[1]["distill/importance_ratio"] != pytest.approx(1.0, abs=1e-3)


def test_a_row_without_a_trained_token_takes_no_pass(tmp_path):
    """3 prompts of 2, 4 and 6 letters in a window of 4, with completions of 2, 41 and 4 tokens. The filler repeats one
    of them and trains nothing: it is one token beside rows of 4 and 10."""
    _, _, seen, _ = distilled(tmp_path, True, n=3, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert seen == [(1, 45), (3, 10)]


def tokens_of(lengths, sizes, flat=False):
    """Tokens of each micro-batch, with padding, or without where it is flat."""
    cut, rows = [], list(lengths)
    for size in sizes:
        taken, rows = rows[:size], rows[size:]
        cut += [sum(taken) if flat else size * taken[0]] if size else []
    return cut


def test_sizes_by_tokens_by_hand():
    """Pairs would have 20, 8, 4 and 2 tokens. Three passes hold them all within 20, with the least padding as 10 + 9,
    then 4, 3, 2 and 1, 1, 1: 20 + 12 + 3. Of rows of one length no two pairs can be merged. One micro-batch stays."""
    assert sizes_by_tokens([10, 9, 4, 3, 2, 1, 1, 1], [2] * 4) == [0, 2, 3, 3]
    assert sizes_by_tokens([7] * 6, [2] * 3) == [2, 2, 2]
    assert sizes_by_tokens([50, 3, 2], [3]) == [3]
    assert sizes_by_tokens([9, 1, 1, 1], [1] * 4) == [0, 0, 1, 3]
    # a pass is worth 128 tokens of padding, not 300
    assert sizes_by_tokens([400, 100], [1, 1]) == [1, 1] and sizes_by_tokens([400, 100, 1, 1], [2, 2]) == [1, 3]


def test_sizes_of_rows_without_padding_by_hand():
    """Pairs of 10, 8, 6, 5, 4 and 1 tokens would have 20, 12 and 8. Without padding all 34 fit into two passes, which
    are most even as 18 and 16. All of 9, 1, 1 and 1 tokens would fit into 12, and one pass of theirs has 9."""
    assert sizes_by_tokens([10, 8, 6, 5, 4, 1], [2] * 3, flat=True) == [0, 2, 4]
    assert sizes_by_tokens([9, 1, 1, 1], [1] * 4, flat=True) == [0, 0, 1, 3]
    assert sizes_by_tokens([9, 1, 1, 1], [2] * 2, flat=True) == [0, 4]
    assert sizes_by_tokens([7] * 6, [2] * 3, flat=True) == [2, 2, 2]


@pytest.mark.parametrize("flat", [False, True])
def test_sizes_by_tokens_are_the_cheapest_of_all_cuts(flat):
    """Against all ways of cutting up to 8 rows: within the largest micro-batch, and in no more of them. Of those that
    cost the same its largest is smallest."""
    rng, merged = random.Random(0), 0
    for _ in range(300):
        batch, parts = rng.choice([(1, 8), (2, 4), (2, 3), (4, 2), (1, 5)])
        lengths = sorted((int(rng.lognormvariate(4, 1)) + 1 for _ in range(batch * parts)), reverse=True)
        equal = [batch] * parts
        most = max(tokens_of(lengths, equal))
        found = sizes_by_tokens(lengths, equal, flat)
        assert len(found) == parts and sum(found) == len(lengths) and sorted(found, key=bool) == found
        assert max(tokens_of(lengths, found, flat)) <= most
        cuts = [[end - start for start, end in pairwise([0, *inner, len(lengths)])] for n in range(len(lengths))
                for inner in combinations(range(1, len(lengths)), n)]  # fmt: skip
        cost = {}
        for cut in cuts:
            tokens = tokens_of(lengths, cut, flat)
            if max(tokens) <= most:
                cost[tuple(cut)] = sum(tokens) + PASS_TOKENS * len(cut), max(tokens)
        best = min(cost.values())
        mine = tuple(size for size in found if size)
        merged += len(mine) < parts
        if best < min(cost[cut] for cut in cost if len(cut) <= parts):
            assert len(mine) <= parts  # the very cheapest has more passes than there are micro-batches
        else:
            assert cost[mine] == best
    assert merged > 100


def test_merged_micro_batches_give_the_same_steps(tmp_path):
    """Four micro-batches of a row, of 45, 28, 10 and 4 tokens, become two; as many steps, losses and gradients."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "n": 8, "max_steps": 2}
    trainer, steps, seen, logs = distilled(tmp_path, True, **options)
    plain_trainer, plain_steps, plain, plain_logs = distilled(tmp_path, False, **options)
    assert len(plain) == 8 > len(seen) and trainer._step == plain_trainer._step == 8
    for mine, other in zip(steps, plain_steps, strict=True):
        assert_same_gradients(mine, other, rtol=1e-4)
    for mine, other in zip(logs, plain_logs, strict=True):
        for name in ("loss", "grad_norm", "num_tokens", "distill/num_tokens_per_step", "distill/reverse_kl"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3), name


@pytest.mark.parametrize("job", ["distill", "sft"])
def test_micro_batches_without_padding_give_the_same_steps(tmp_path, job, unpadded):
    """Short rows stand end to end, in fewer passes than there are rows, none longer than the longest row."""
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    run = (lambda *args: distilled(*args, **options, n=8, max_steps=2)) if job == "distill" else (
        lambda *args: tuned(*args, **options, rows=8)
    )  # fmt: skip
    _, steps, seen, logs = run(tmp_path, True)
    _, plain_steps, plain, plain_logs = run(tmp_path, False)
    assert len(plain) == 8 > len(seen) and {rows for rows, _ in seen} == {1}
    assert sum(tokens for _, tokens in seen) == sum(tokens for _, tokens in plain)
    assert max(seen) <= max(plain)
    for mine, other in zip(steps, plain_steps, strict=True):
        assert_same_gradients(mine, other, rtol=1e-4)
    for mine, other in zip(logs, plain_logs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert mine["num_tokens"] == other["num_tokens"]


def test_rows_of_two_steps_are_merged_each_in_its_own(tmp_path):
    """One rollout for two steps, whose sampled tokens are weighed in micro-batches that have rows, and in none else."""
    options = {"n": 8, "steps_per_generation": 8, "max_steps": 2, "objective": "policy_gradient", "optim": "sgd"}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "learning_rate": 0.02}
    _, steps, seen, logs = distilled(tmp_path, True, **options)
    _, plain_steps, plain, plain_logs = distilled(tmp_path, False, **options)
    assert len(seen) < len(plain)
    for i in range(2):
        assert_same_gradients(steps[i], plain_steps[i], rtol=1e-4)
        assert logs[i]["distill/importance_ratio"] == pytest.approx(plain_logs[i]["distill/importance_ratio"], rel=1e-4)


def test_micro_batches_are_merged_only_where_passes_may_differ(tmp_path):
    trainer, _, _, _ = distilled(tmp_path, True)
    assert trainer._merges
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        setattr(trainer, name, True)
        assert not trainer._merges
        setattr(trainer, name, False)
    trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    try:
        assert not trainer._merges
    finally:
        trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = False
    trainer.args.per_device_max_tokens = 100
    assert not trainer._merges


def tuned(tmp_path, balance, rows=7, resume=None, callbacks=(), **options):
    recorder = Gradients()
    arguments = QUIET | {"max_steps": 2, "train_sampling_strategy": "sequential"} | CUT | options
    trainer = SFTTrainer(
        model=qwen3(),
        args=SFTConfig(str(tmp_path / str(balance)), balance_micro_batches=balance, **arguments),
        train_dataset=text_rows(rows),
        processing_class=tokenizer(),
        callbacks=[recorder, *callbacks],
    )
    seen = widths(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder.steps, seen, [log for log in trainer.state.log_history if "loss" in log]


def test_an_sft_step_is_cut_anew_with_the_same_gradient(tmp_path):
    """7 rows in steps of 4 and 3."""
    trainer, steps, balanced, logs = tuned(tmp_path, True)
    assert trainer.get_batch_samples(iter([]), 2, trainer.args.device)[0] == []  # a data loader that has ended
    _, plain_steps, plain, plain_logs = tuned(tmp_path, False)
    assert [b for b, _ in plain] == [2, 2, 2, 1] and [b for b, _ in balanced] == [2, 2, 1, 2]
    assert balanced[0][1] > balanced[1][1] and balanced[2][1] >= balanced[3][1]
    assert sum(b * t for b, t in balanced) < sum(b * t for b, t in plain)
    assert_same_gradients(steps[0], plain_steps[0], rtol=1e-5)
    assert logs[0]["sft/num_tokens_per_step"] == sum(LENGTHS[:4]) + 4
    for mine, other in zip(logs, plain_logs, strict=True):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "sft/num_tokens_per_step"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3), name


def test_rows_that_are_empty_are_cut_as_well():
    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        return {"input_ids": torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])}

    rows = [{"input_ids": [1] * n} for n in (0, 5, 1, 0)]
    batches = [{ROWS: CollatedRows(tuple(rows[i : i + 1]))} for i in range(4)]
    assert [b["input_ids"].shape for b in regrouped(batches, collate, merge=True)] == [(0, 5), (0, 5), (1, 5), (3, 1)]


def test_a_resumed_sft_run_equals_one_that_never_stopped(tmp_path):
    class StopAt(Gradients):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = control.should_save = state.global_step == 1

    options = {"max_steps": 4, "train_sampling_strategy": "random"}
    straight = tuned(tmp_path / "straight", True, **options)[0].model.state_dict()
    tuned(tmp_path, True, callbacks=[StopAt()], **options)
    resumed, steps, _, _ = tuned(tmp_path, True, resume=str(tmp_path / "True" / "checkpoint-1"), **options)
    assert len(steps) == 3
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, straight[name]), name


@pytest.mark.parametrize(
    "options, why",
    [
        ({"gradient_accumulation_steps": 1}, "a step is one micro-batch"),
        ({"packing": True, "max_length": 96}, "leaves no padding"),
    ],
)
def test_where_batches_stay_as_they_are_it_is_said(tmp_path, caplog, options, why):
    with caplog.at_level("INFO"):
        tuned(tmp_path, True, max_steps=1, **options)
    assert f"balance_micro_batches: batches stay as they are drawn, since {'' if why[0] == 'a' else '`'}" in caplog.text
    assert why in caplog.text


def test_a_collator_of_ones_own_is_called_once_a_batch(tmp_path):
    calls = []

    def collate(rows):
        calls.append(len(rows))
        ids = torch.tensor([row["input_ids"][:4] for row in rows])
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}

    trainer = SFTTrainer(
        model=qwen3(),
        args=SFTConfig(str(tmp_path), **QUIET, **CUT, max_steps=1),
        data_collator=collate,
        train_dataset=text_rows(4).map(lambda row: {"completion": row["completion"] + "abcd"}),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert calls == [2, 2]
