"""Rows without padding: what FlashAttention would be given, run on a CPU by the block-diagonal mask that transformers
makes of the same positions."""

import logging

import pytest
import torch
from test_distillation_trainer import LORA, build
from test_objective_wiring import OURS
from tiny import llama, qwen3, tokenizer
from torch import nn
from training import QUIET, Gradients, assert_same_gradients, text_rows

import trl_opd.token_trainer
from trl_opd import SFTConfig, SFTTrainer
from trl_opd.data.collate import POSITIONS, SIZES, CheckedCollator, pad_rows
from trl_opd.flat import flattened, why_padded
from trl_opd.heads import predicting_states

X = -100
ROWS = [
    {"input_ids": [5, 6, 7], "labels": [X, X, 7]},
    {"input_ids": [8, 9, 10, 11, 12], "labels": [X, 9, 10, X, 12]},
    {"input_ids": [13], "labels": [X]},
]


def test_a_flat_batch_by_hand():
    batch = pad_rows(ROWS, 0)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    flat, positions = flattened(inputs, batch[POSITIONS], batch[SIZES])
    assert flat["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13]]
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0]]
    assert flat["cu_seq_lens_q"].tolist() == [0, 3, 8, 9] and flat["cu_seq_lens_q"].dtype == torch.int32
    assert flat["max_length_q"] == flat["max_length_k"] == 5 and "attention_mask" not in flat
    assert positions.index.tolist() == [1, 3, 4, 6]  # 6 predicts 7; 8, 9 and 11 predict 9, 10 and 12
    assert positions.targets.tolist() == [7, 9, 10, 12] and positions.rows.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("build_model", [qwen3, llama])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_states_are_those_of_padded_rows(build_model, attention):
    model, batch = build_model(attn_implementation=attention), pad_rows(ROWS, 0)
    padded, flat = (predicting_states(model, batch, batch[POSITIONS], on) for on in (False, True))
    torch.testing.assert_close(flat, padded, rtol=1e-4, atol=1e-5)
    other = pad_rows([ROWS[0], {**ROWS[1], "input_ids": [1, 9, 10, 11, 12]}, ROWS[2]], 0)
    moved = predicting_states(model, other, other[POSITIONS], True)
    assert torch.equal(moved[0], flat[0]) and not torch.equal(moved[1], flat[1])  # rows do not see each other


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 3])
def test_padding_on_the_right_needs_no_mask(attention, window):
    """Full and sliding attention: the states at trained positions, and their gradients, are those under the mask."""
    sliding = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    model, batch = qwen3(attn_implementation=attention, **sliding), pad_rows(ROWS, 0)
    without = {key: value for key, value in batch.items() if key != SIZES}
    grads, states = [], []
    for inputs in (without, batch):
        states.append(predicting_states(model, inputs, inputs[POSITIONS]))
        grads.append(torch.autograd.grad(states[-1].square().sum(), model.model.embed_tokens.weight)[0])
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


def test_a_model_that_looks_ahead_keeps_its_mask():
    model, batch, seen = qwen3(), pad_rows(ROWS, 0), []
    model.model.register_forward_pre_hook(lambda m, a, k: seen.append("attention_mask" in k), with_kwargs=True)
    predicting_states(model, batch, batch[POSITIONS])
    model.config.use_bidirectional_attention = True
    predicting_states(model, batch, batch[POSITIONS])
    model.config.use_bidirectional_attention, model.config.is_causal = None, False
    predicting_states(model, batch, batch[POSITIONS])
    assert seen == [False, True, True]


@pytest.fixture
def flash(monkeypatch):
    """The trainers take every model's attention for FlashAttention."""
    monkeypatch.setattr(trl_opd.token_trainer, "attention_of", lambda model: "flash_attention_2")


def shapes(model):
    seen = []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen


OPTIONS = {
    "full": {},
    "lora": {"peft_config": LORA, "gradient_checkpointing": True},
    "base": {"peft_config": LORA, "teacher_kind": "base", "teacher": False},
    "pieces": {"per_device_max_tokens": 60, "anchor_weight": 0.2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_distillation_step_without_padding(tmp_path, name, request, caplog):
    steps = []
    for leave_out in (False, True):
        if leave_out:
            request.getfixturevalue("flash")
        with caplog.at_level(logging.INFO):
            trainer, recorder = build(*OURS, tmp_path, **OPTIONS[name])
        inner = trainer.model.get_base_model() if "peft_config" in OPTIONS[name] else trainer.model
        seen = shapes(inner.model)
        trainer.train()
        steps.append(recorder.steps[0])
        assert all(b == 1 for b, _ in seen) == leave_out
    assert_same_gradients(steps[1], steps[0], rtol=1e-4)
    assert "student: padding is kept: attention is sdpa" in caplog.text
    assert "student: padding is left out (flash_attention_2)" in caplog.text


def test_stale_log_probs_without_padding(tmp_path, flash):
    options = {"n": 8, "steps_per_generation": 2, "max_steps": 2, "objective": "policy_gradient"}
    trainer, _ = build(*OURS, tmp_path, **options)
    trainer.train()
    assert trainer.state.log_history[0]["distill/importance_ratio"] == pytest.approx(1.0, abs=1e-5)


def test_an_sft_step_without_padding(tmp_path, request):
    steps, losses = [], []
    for leave_out in (False, True):
        if leave_out:
            request.getfixturevalue("flash")
        recorder = Gradients()
        trainer = SFTTrainer(
            model=qwen3(),
            args=SFTConfig(str(tmp_path), **QUIET, max_steps=1, per_device_train_batch_size=4),
            train_dataset=text_rows(4),
            eval_dataset=text_rows(4),
            processing_class=tokenizer(),
            callbacks=[recorder],
        )
        losses.append(trainer.evaluate()["eval_loss"])
        seen = shapes(trainer.model.model)
        trainer.train()
        assert all(b == 1 for b, _ in seen) == leave_out
        steps.append(recorder.steps[0])
    assert_same_gradients(steps[1], steps[0], rtol=1e-4)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_rows_padded_on_the_left_are_never_flattened():
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    for mask, known in (([[0, 1, 1], [1, 1, 1]], False), ([[1, 1, 0], [1, 1, 1]], True)):
        batch = {"input_ids": ids, "labels": torch.full_like(ids, X), "attention_mask": torch.tensor(mask)}
        assert (SIZES in CheckedCollator(lambda rows, batch=batch: dict(batch))([])) == known


def test_why_padding_stays():
    backbone = qwen3().model
    assert why_padded(backbone, "flash_attention_3") == ""
    assert why_padded(backbone, "kernels-community/vllm-flash-attn3") == ""
    assert why_padded(backbone, "sdpa").startswith("attention is sdpa")
    backbone.conv = nn.Conv1d(1, 1, 1)
    assert "convolutions" in why_padded(backbone, "flash_attention_2")
    backbone = qwen3().model
    backbone.config.layer_types = ["full_attention", "linear_attention"]
    assert why_padded(backbone, "flash_attention_2") == "it has layers of linear_attention"
    backbone = qwen3().model
    backbone.forward = lambda input_ids, position_ids: None
    assert "takes no sequence lengths" in why_padded(backbone, "flash_attention_2")
