"""Rows without padding: SDPA on a CPU, row by row; and what FlashAttention would be given, run by the block-diagonal
mask that transformers makes of the same positions."""

import logging

import pytest
import torch
from test_distillation_trainer import LORA, build
from test_objective_wiring import OURS
from tiny import llama, qwen3, tokenizer
from torch import nn
from training import QUIET, Gradients, assert_same_gradients, text_rows
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trl_opd.token_trainer
from trl_opd import SFTConfig, SFTTrainer, row_attention
from trl_opd._trl import attends_by_lengths, attention_of
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
    """The trainers take every model's attention for FlashAttention, and SDPA sees the mask alone."""
    monkeypatch.setattr(trl_opd.token_trainer, "attention_of", lambda model: "flash_attention_2")
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    yield
    AttentionInterface.register("sdpa", before)


@pytest.fixture
def row_by_row(monkeypatch):
    """Counts the rows that SDPA is run on by themselves."""
    calls, sdpa = [], row_attention.sdpa_attention_forward
    monkeypatch.setattr(
        row_attention, "sdpa_attention_forward", lambda m, q, *a, **k: calls.append(q.size(2)) or sdpa(m, q, *a, **k)
    )
    return calls


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


@pytest.mark.parametrize("way", ["sdpa", "flash"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_distillation_step_without_padding(tmp_path, name, way, request, caplog, monkeypatch):
    steps = []
    for leave_out in (False, True):
        with monkeypatch.context() as patched, caplog.at_level(logging.INFO):
            if not leave_out:
                patched.setattr(trl_opd.token_trainer, "why_padded", lambda *args: "this test wants it")
            elif way == "flash":
                request.getfixturevalue("flash")
            trainer, recorder = build(*OURS, tmp_path, **OPTIONS[name])
        inner = trainer.model.get_base_model() if "peft_config" in OPTIONS[name] else trainer.model
        seen = shapes(inner.model)
        trainer.train()
        steps.append(recorder.steps[0])
        assert all(b == 1 for b, _ in seen) == leave_out
    assert_same_gradients(steps[1], steps[0], rtol=1e-4)
    assert "student: padding is kept: this test wants it" in caplog.text
    assert f"student: padding is left out ({'sdpa' if way == 'sdpa' else 'flash_attention_2'})" in caplog.text


@pytest.mark.parametrize("way", ["sdpa", "flash"])
def test_stale_log_probs_without_padding(tmp_path, way, request):
    if way == "flash":
        request.getfixturevalue("flash")
    options = {"n": 8, "steps_per_generation": 2, "max_steps": 2, "objective": "policy_gradient"}
    trainer, _ = build(*OURS, tmp_path, **options)
    assert trainer._flat
    trainer.train()
    assert trainer.state.log_history[0]["distill/importance_ratio"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("way", ["sdpa", "flash"])
def test_an_sft_step_without_padding(tmp_path, way, request, monkeypatch):
    steps, losses = [], []
    for leave_out in (False, True):
        recorder = Gradients()
        with monkeypatch.context() as patched:
            if not leave_out:
                patched.setattr(trl_opd.token_trainer, "why_padded", lambda *args: "this test wants it")
            elif way == "flash":
                request.getfixturevalue("flash")
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


def test_models_that_pad_are_cut_by_padded_rows(tmp_path, monkeypatch):
    """Rows of a step are cut as if unpadded only where student, teacher and anchor all run so."""
    trainer, _ = build(*OURS, tmp_path, anchor_weight=0.2)
    assert trainer._all_flat
    real = trl_opd.token_trainer.why_padded
    for other in ("teacher", "anchor", "student"):
        calls = iter(["student", "teacher", "anchor"])
        monkeypatch.setattr(
            trl_opd.token_trainer, "why_padded", lambda *a, o=other, c=calls: "so" if next(c) == o else real(*a)
        )
        trainer, _ = build(*OURS, tmp_path, anchor_weight=0.2)
        assert not trainer._all_flat and trainer._flat == (other != "student"), other


def test_rows_padded_on_the_left_are_never_flattened():
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    for mask, known in (([[0, 1, 1], [1, 1, 1]], False), ([[1, 1, 0], [1, 1, 1]], True)):
        batch = {"input_ids": ids, "labels": torch.full_like(ids, X), "attention_mask": torch.tensor(mask)}
        assert (SIZES in CheckedCollator(lambda rows, batch=batch: dict(batch))([])) == known


def why(backbone, attention, device="cuda", by_lengths=True):
    return why_padded(backbone, attention, device, by_lengths)


def test_why_padding_stays():
    backbone = qwen3().model
    assert why(backbone, "flash_attention_3") == why(backbone, "flash_attention_3", by_lengths=False) == ""
    assert why(backbone, "kernels-community/vllm-flash-attn3") == ""
    assert why(backbone, "sdpa", "cpu") == ""
    assert why(backbone, "eager", "cpu").startswith("attention is eager")
    assert "on a CPU only" in why(backbone, "sdpa")
    assert "not known to go by lengths" in why(backbone, "sdpa", "cpu", by_lengths=False)
    backbone.config.use_bidirectional_attention = True
    assert "see later ones" in why(backbone, "sdpa", "cpu") and not why(backbone, "flash_attention_2")
    backbone = qwen3().model
    backbone.conv = nn.Conv1d(1, 1, 1)
    assert "convolutions" in why(backbone, "flash_attention_2") and "convolutions" in why(backbone, "sdpa", "cpu")
    backbone = qwen3().model
    backbone.config.layer_types = ["full_attention", "linear_attention"]
    assert why(backbone, "flash_attention_2") == "it has layers of linear_attention"
    backbone = qwen3().model
    backbone.forward = lambda input_ids, position_ids: None
    assert "takes no sequence lengths" in why(backbone, "flash_attention_2")


def test_torch_compile_keeps_padding_under_sdpa(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(SFTTrainer, "_start_accounting", lambda self: setattr(self, "_sums", {}))
    with caplog.at_level(logging.INFO):
        SFTTrainer(
            model=qwen3(),
            args=SFTConfig(str(tmp_path), **QUIET, torch_compile=True),
            train_dataset=text_rows(4),
            processing_class=tokenizer(),
        )
    assert "padding is kept: torch_compile would compile SDPA anew" in caplog.text


def test_an_sdpa_of_the_scripts_own_is_not_replaced(tmp_path, caplog):
    before, own = ALL_ATTENTION_FUNCTIONS["sdpa"], lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs)
    AttentionInterface.register("sdpa", own)
    try:
        with caplog.at_level(logging.INFO):
            trainer, _ = build(*OURS, tmp_path)
        assert not trainer._flat and ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        AttentionInterface.register("sdpa", before)
    assert "student: padding is kept: another function was registered as `sdpa`" in caplog.text


@pytest.fixture
def sdpa_by_rows():
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    row_attention.attend_row_by_row()
    yield
    AttentionInterface.register("sdpa", before)


SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}  # the second of two layers


@pytest.mark.parametrize(
    "build_model, options", [(qwen3, {}), (qwen3, SLIDING), (llama, {})], ids=["qwen3", "qwen3 sliding", "llama"]
)
def test_sdpa_row_by_row_gives_states_and_gradients_of_padded_rows(build_model, options, sdpa_by_rows, row_by_row):
    """Rows of 3, 5 and 1 tokens; a window of 3 is shorter than one of them."""
    model, batch = build_model(**options), pad_rows(ROWS, 0)
    results = []
    for flat in (False, True):
        row_by_row.clear()
        states = predicting_states(model, batch, batch[POSITIONS], flat)
        states.square().sum().backward()
        results.append([states, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        model.zero_grad()
        assert row_by_row == ([3, 5, 1] * 2 if flat else [5, 5])
    for mine, other in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


ARCHITECTURES = (
    "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite",
    "hunyuan_v1_dense", "llama", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
TINY = {
    "vocab_size": 64, "hidden_size": 32, "n_embd": 32, "word_embed_proj_dim": 32, "head_dim": 8,
    "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "ffn_dim": 48, "max_position_embeddings": 64, "sliding_window": 3,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_that_are_run_without_padding_give_the_states_of_padded_rows(architecture, sdpa_by_rows, row_by_row):
    """With windows of 3 tokens wherever a model has some, on rows of 3, 5 and 1."""
    default = AutoConfig.for_model(architecture)
    options = {name: value for name, value in TINY.items() if hasattr(default, name)}
    if kinds := getattr(default, "layer_types", None):
        options["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    torch.manual_seed(0)
    model, batch = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options)).eval(),
        pad_rows(ROWS, 0),
    )
    assert why_padded(model.base_model, attention_of(model), "cpu", attends_by_lengths(model.base_model)) == ""
    with torch.no_grad():
        padded = predicting_states(model, batch, batch[POSITIONS])
        row_by_row.clear()
        flat = predicting_states(model, batch, batch[POSITIONS], True)
    # Nemotron's forward keeps the lengths from its attention, which then goes by the mask over all rows
    assert row_by_row == ([9, 9] if architecture == "nemotron" else [3, 5, 1] * 2)
    torch.testing.assert_close(flat, padded, rtol=1e-4, atol=1e-5)


def test_encoders_and_softcapped_attention_keep_their_padding():
    for architecture, reason in (("bert", "see later ones"), ("gemma2", "attention is eager"), ("gpt_oss", "eager")):
        default = AutoConfig.for_model(architecture)
        options = {name: value for name, value in TINY.items() if hasattr(default, name)}
        options |= {"layer_types": default.layer_types[:2]} if getattr(default, "layer_types", None) else {}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options))
        backbone = model.base_model
        assert reason in why_padded(backbone, attention_of(model), "cpu", attends_by_lengths(backbone))


def test_rows_as_a_slow_loop_attends_to_them(sdpa_by_rows):
    """Softmax of scaled scores over each row's own past, within the window, written out position by position."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    ends, starts = torch.tensor([0, 3, 8, 9], dtype=torch.int32), [0] * 3 + [3] * 5 + [8]
    for window in (None, 2):
        expected = torch.zeros(1, 9, 2, 4, dtype=torch.float64)
        seen = torch.zeros(9, 9, dtype=torch.bool)
        for t in range(9):
            first = max(starts[t], 0 if window is None else t - window + 1)
            seen[t, first : t + 1] = True
            for head in range(2):
                scores = k[0, head, first : t + 1] @ q[0, head, t] * 0.3
                expected[0, t, head] = scores.softmax(0) @ v[0, head, first : t + 1]
        found, _ = row_attention.attention_of_rows(
            nn.Module(), q, k, v, seen[None, None], cu_seq_lens_q=ends, sliding_window=window, scaling=0.3
        )
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected)]
        torch.testing.assert_close(*grads)


def test_rows_that_do_not_stand_end_to_end_are_left_to_transformers(row_by_row):
    """No lengths; lengths of other rows; two rows of a batch; keys of a cache before the queries."""
    q = torch.randn(1, 2, 6, 4)
    ends = torch.tensor([0, 4, 6], dtype=torch.int32)
    for query, key, lengths in (
        (q, q, None),
        (q, q, ends[:2]),
        (q.expand(2, -1, -1, -1), q.expand(2, -1, -1, -1), ends),
        (q[:, :, :3], q, ends),
    ):
        row_by_row.clear()
        out, _ = row_attention.attention_of_rows(nn.Module(), query, key, key, None, cu_seq_lens_q=lengths)
        assert row_by_row == [query.size(2)]
        assert torch.equal(out, sdpa_attention_forward(nn.Module(), query, key, key, None)[0])
