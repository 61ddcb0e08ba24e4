"""`per_device_max_tokens`: micro-batches in pieces, with the gradient, the metrics and the number of steps they had."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from test_balance import widths
from test_distillation_trainer import build
from test_objective_wiring import OURS
from tiny import qwen3, tokenizer
from training import QUIET, Gradients, assert_same_gradients, text_rows

import trl_opd.token_trainer
from trl_opd import DistillationConfig, SFTConfig, SFTTrainer
from trl_opd.config_checks import check_pieces

LORA = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def distilled(tmp_path, budget, **options):
    trainer, recorder = build(*OURS, tmp_path, per_device_max_tokens=budget, **options)
    inner = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
    seen = widths(inner)
    trainer.train()
    return trainer, recorder.steps, seen, [log for log in trainer.state.log_history if "loss" in log]


def assert_same_logs(logs, others, rel=1e-5):
    for mine, other in zip(logs, others, strict=True):
        for name, value in other.items():
            if not name.endswith(("time", "runtime", "per_second", "gib")):
                assert mine[name] == pytest.approx(value, rel=rel, abs=1e-7), name


MIXED = {"lmbda": 0.5, "sft_weight": 0.3, "anchor_weight": 0.2, "objective": "tvd", "n": 8}


@pytest.mark.parametrize(
    "options",
    [{}, {"peft_config": LORA, "gradient_checkpointing": True}, MIXED, {"gradient_accumulation_steps": 2, "n": 8}],
    ids=["full", "lora", "mixed", "accumulated"],
)
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_pieces_give_the_step_of_the_whole(tmp_path, options, padded, monkeypatch):
    if padded:
        monkeypatch.setattr(trl_opd.token_trainer, "why_padded", lambda *args: "this test wants it")
    if options is MIXED:
        options = options | {"rows": text_rows(8), "per_device_train_batch_size": 8}
    whole = distilled(tmp_path, None, **options)
    cut = distilled(tmp_path, 60, **options)
    assert len(cut[2]) > len(whole[2]) and all(b * t <= 60 for b, t in cut[2])
    assert any(b > 1 for b, _ in cut[2]) == padded
    assert cut[0].state.global_step == whole[0].state.global_step == 1 and cut[0]._step == whole[0]._step
    assert_same_gradients(cut[1][0], whole[1][0], rtol=1e-5)
    assert_same_logs(cut[3], whole[3])


def test_log_probs_of_the_rollout_are_noted_in_pieces_too(tmp_path):
    options = {"n": 8, "steps_per_generation": 2, "max_steps": 2, "objective": "policy_gradient", "optim": "sgd"}
    options |= {"learning_rate": 0.02, "lr_scheduler_type": "constant"}
    whole, cut = distilled(tmp_path, None, **options), distilled(tmp_path, 60, **options)
    for i in range(2):
        assert_same_gradients(cut[1][i], whole[1][i], rtol=1e-4)
    assert_same_logs(cut[3], whole[3], rel=1e-4)
    assert cut[3][1]["distill/importance_ratio"] != pytest.approx(1.0, abs=1e-3)


def test_a_row_over_the_budget_is_run_alone_and_said(tmp_path, caplog):
    _, _, seen, _ = distilled(tmp_path, 30)
    assert sorted(t for _, t in seen) == [10 + 4, 28, 45] and {b for b, _ in seen} == {1}
    assert "per_device_max_tokens is 30, and a row has 45 tokens" in caplog.text


def tuned(tmp_path, budget, **options):
    recorder = Gradients()
    trainer = SFTTrainer(
        model=qwen3(),
        args=SFTConfig(
            str(tmp_path), per_device_max_tokens=budget, **QUIET | {"per_device_train_batch_size": 7} | options
        ),
        train_dataset=text_rows(14),
        processing_class=tokenizer(),
        callbacks=[recorder],
        eval_dataset=text_rows(7),
    )
    seen = widths(trainer.model)
    trainer.train()
    return trainer, recorder.steps, seen, [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("balance", [True, False])
def test_an_sft_step_in_pieces_is_the_same_step(tmp_path, balance):
    options = {"num_train_epochs": 1, "balance_micro_batches": balance}
    whole, cut = tuned(tmp_path, None, **options), tuned(tmp_path, 60, **options)
    assert len(whole[2]) == 2 and len(cut[2]) > 4 and all(b * t <= 60 for b, t in cut[2])
    assert cut[0].state.global_step == whole[0].state.global_step == 2
    assert_same_gradients(cut[1][0], whole[1][0], rtol=1e-5)
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens", "sft/num_tokens_per_step"):
        assert [log[name] for log in cut[3]] == pytest.approx([log[name] for log in whole[3]], rel=1e-4), name
    assert cut[0].evaluate()["eval_loss"] == pytest.approx(whole[0].evaluate()["eval_loss"], rel=1e-3)


def test_sorted_rows_need_fewer_pieces(tmp_path, monkeypatch):
    """Where they are padded."""
    monkeypatch.setattr(trl_opd.token_trainer, "why_padded", lambda *args: "this test wants it")
    counts = [len(tuned(tmp_path, 60, max_steps=1, balance_micro_batches=on)[2]) for on in (True, False)]
    assert counts[0] < counts[1]


def test_without_gradients_nothing_is_back_propagated(tmp_path):
    """`trl-opd check` takes the loss of a micro-batch in training mode."""
    trainer, _ = build(*OURS, tmp_path, per_device_max_tokens=60)
    trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, inputs)
    assert loss > 0 and all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"per_device_max_tokens": 0}, "per_device_max_tokens is 0; it must be at least 1"),
        ({"per_device_max_tokens": 9, "optim": "lomo"}, "`optim: lomo` changes the weights in the middle"),
    ],
)
def test_budgets_that_cannot_be_are_refused(tmp_path, options, message):
    for config in (SFTConfig, DistillationConfig):
        with pytest.raises(ValueError, match=message):
            config(str(tmp_path), report_to="none", bf16=False, **options)


def test_where_no_piece_can_be_cut_it_is_refused_at_start(tmp_path):
    with pytest.raises(
        ValueError, match="per_device_max_tokens is 60, but `packing` or `padding_free` leaves no padding"
    ):
        tuned(tmp_path, 60, packing=True, max_length=96)
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        trainer = SimpleNamespace(
            args=SimpleNamespace(per_device_max_tokens=60), is_deepspeed_enabled=False, is_fsdp_enabled=False
        )
        check_pieces(trainer)
        setattr(trainer, name, True)
        with pytest.raises(ValueError, match="DeepSpeed and FSDP need every process"):
            check_pieces(trainer)
