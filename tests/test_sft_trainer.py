"""SFTTrainer: TRL's gradients on TRL's batches, the same however the batch is cut, and a drop-in for TRL's scripts."""

import json

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tiny import llama, qwen3, tokenizer
from training import QUIET, Gradients, assert_same_gradients, text_rows

from trl_opd import SFTConfig, SFTTrainer


def gradients(trainer_class, config_class, tmp_path, model=None, rows=None, **kwargs):
    peft_config, loss_func = kwargs.pop("peft_config", None), kwargs.pop("compute_loss_func", None)
    recorder = Gradients()
    trainer = trainer_class(
        model=model or qwen3(),
        args=config_class(str(tmp_path), **QUIET | {"max_steps": 1, "per_device_train_batch_size": 4} | kwargs),
        train_dataset=rows or text_rows(4),
        processing_class=tokenizer(),
        peft_config=peft_config,
        compute_loss_func=loss_func,
        callbacks=[recorder],
    )
    trainer.train()
    return recorder.steps[0], trainer.state.log_history[0]


LORA = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.mark.parametrize("build", [qwen3, llama], ids=["tied", "untied"])
@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
def test_same_loss_and_gradients_as_trl(tmp_path, build, peft_config):
    ours, log = gradients(SFTTrainer, SFTConfig, tmp_path, build(), peft_config=peft_config)
    theirs, trl_log = gradients(trl.SFTTrainer, trl.SFTConfig, tmp_path, build(), peft_config=peft_config)
    assert_same_gradients(ours, theirs, rtol=1e-4)
    for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
        assert log[name] == pytest.approx(trl_log[name], rel=1e-4), name


def test_gradient_checkpointing_changes_nothing(tmp_path):
    plain, _ = gradients(SFTTrainer, SFTConfig, tmp_path)
    checkpointed, _ = gradients(SFTTrainer, SFTConfig, tmp_path, gradient_checkpointing=True)
    assert_same_gradients(checkpointed, plain, rtol=1e-5)


@pytest.mark.parametrize("batch, accumulation", [(2, 2), (1, 4)])
def test_any_way_of_cutting_the_batch_gives_the_same_gradient(tmp_path, batch, accumulation):
    """Completions of 1, 40, 3 and 25 letters: a mean of means would be far off."""
    whole, log = gradients(SFTTrainer, SFTConfig, tmp_path)
    cut, cut_log = gradients(
        SFTTrainer, SFTConfig, tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation
    )
    assert_same_gradients(cut, whole, rtol=1e-5)
    assert cut_log["loss"] == pytest.approx(log["loss"], rel=1e-5)
    assert cut_log["sft/num_tokens_per_step"] == log["sft/num_tokens_per_step"] == 1 + 40 + 3 + 25 + 4


def test_an_all_masked_micro_batch_is_a_zero(tmp_path):
    """Rows that bring their own labels; the row without one never enters a batch."""
    rows = Dataset.from_list(
        [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, -100]}]
    )
    with pytest.raises(ValueError, match="1 of 2 rows of the train dataset cannot be trained"):
        gradients(SFTTrainer, SFTConfig, tmp_path, rows=rows)
    _, log = gradients(SFTTrainer, SFTConfig, tmp_path, rows=rows, bad_rows="drop", per_device_train_batch_size=1)
    assert log["sft/num_tokens_per_step"] == 2


def test_eval_loss_does_not_depend_on_the_batch_size(tmp_path):
    losses = []
    for batch in (1, 3, 7):
        trainer = SFTTrainer(
            model=qwen3(),
            args=SFTConfig(str(tmp_path), **QUIET, per_device_eval_batch_size=batch),
            train_dataset=text_rows(2),
            eval_dataset=text_rows(7),
            processing_class=tokenizer(),
        )
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    # by hand: Σ −log p / N over the set, from full logits
    tok, model, total, count = tokenizer(), qwen3(), 0.0, 0
    for row in text_rows(7):
        prompt, completion = (tok(row[key])["input_ids"] for key in ("prompt", "completion"))
        ids = torch.tensor([prompt + completion + [tok.eos_token_id]])
        log_p = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
        total, count = total - log_p[len(prompt) - 1 :].sum().item(), count + len(completion) + 1
    assert losses[0] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.feature("`compute_metrics`", job="sft", model="full")
def test_metrics_of_the_user_reach_log_and_checkpoint(tmp_path):
    """They are computed by TRL's code, from its logits, with the count of the tokens that ours has seen."""
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer = SFTTrainer(
        model=qwen3(),
        args=SFTConfig(str(tmp_path), **QUIET | every),
        train_dataset=text_rows(4),
        eval_dataset=text_rows(3),
        processing_class=tokenizer(),
        compute_metrics=lambda predicted: {"rows": len(predicted.label_ids)},
    )
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text("utf-8"))
    step, evaluation = (next(log for log in state["log_history"] if key in log) for key in ("loss", "eval_loss"))
    assert evaluation["eval_rows"] == 3
    assert evaluation["eval_num_tokens"] == step["num_tokens"] > 0


@pytest.mark.parametrize("config", ["trl", "transformers", "none"])
def test_a_trl_script_with_the_import_changed_trains(tmp_path, config, monkeypatch):
    from transformers import TrainingArguments

    monkeypatch.chdir(tmp_path)
    quiet = QUIET | {"max_steps": 2, "use_cpu": True}
    args = {
        "trl": lambda: trl.SFTConfig("out", **quiet, max_length=30),
        "transformers": lambda: TrainingArguments("out", **quiet),
        "none": lambda: None,
    }[config]()
    model = qwen3()
    before = model.model.embed_tokens.weight.clone()
    trainer = SFTTrainer(model=model, args=args, train_dataset=text_rows(7), processing_class=tokenizer())
    if config == "trl":  # TRL would cut the 40-letter row at max_length without a word
        assert trainer.args.max_length == 30 and trainer.args.learning_rate == 1e-3
        assert trainer.data_reports[0].cut == 1
    if config == "none":
        trainer.args.max_steps, trainer.args.report_to = 1, []
    trainer.train()
    assert not torch.equal(before, model.model.embed_tokens.weight)


@pytest.mark.feature("`compute_loss_func`", job="sft", model="full", how="delegated")
def test_trl_computes_the_loss_where_the_models_own_forward_is_needed(tmp_path, caplog):
    def doubled(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return 2 * torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    same = {"compute_loss_func": doubled, "save_strategy": "steps", "save_steps": 1}  # a log goes into its checkpoint
    ours, log = gradients(SFTTrainer, SFTConfig, tmp_path, **same)
    theirs, trl_log = gradients(trl.SFTTrainer, trl.SFTConfig, tmp_path / "trl", **same)
    assert_same_gradients(ours, theirs, rtol=1e-5)
    assert log["num_tokens"] == trl_log["num_tokens"]
    assert "computed by TRL's own code: compute_loss_func was passed" in caplog.text


def test_packed_documents_do_not_see_each_other(tmp_path):
    """Four documents in one packed row give the gradient of the same four in a padded batch."""
    ours, log = gradients(SFTTrainer, SFTConfig, tmp_path, packing=True, max_length=96, per_device_train_batch_size=1)
    plain, plain_log = gradients(SFTTrainer, SFTConfig, tmp_path)
    assert log["sft/num_tokens_per_step"] == plain_log["sft/num_tokens_per_step"]
    assert_same_gradients(ours, plain, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_packing_that_splits_long_rows_loses_no_token(tmp_path, strategy):
    """Nothing is longer than `max_length` for it: with completions of 1, 40, 3, 25, 7, 12 and 2 letters."""
    args = SFTConfig(str(tmp_path), **QUIET, packing=True, packing_strategy=strategy, max_length=16)
    trainer = SFTTrainer(model=qwen3(), args=args, train_dataset=text_rows(7), processing_class=tokenizer())
    packed, report = trainer.train_dataset, trainer.data_reports[0]
    assert max(len(row["input_ids"]) for row in packed) == 16
    trained = sum(label != -100 for row in packed for label in row["labels"])
    assert trained == report.trained_tokens == 1 + 40 + 3 + 25 + 7 + 12 + 2 + 7 and report.cut == 0


@pytest.mark.parametrize("packing", [False, True])
def test_a_prompt_longer_than_max_length_is_an_error_or_counted(tmp_path, packing):
    """Never a step of loss 0 and gradient 0: TRL packs such rows and trains them at loss 0."""
    rows = Dataset.from_list([{"prompt": "a" * 60, "completion": "b"}] + [{"prompt": "a", "completion": "bc"}] * 3)
    same = {"rows": rows, "packing": packing, "max_length": 40, "per_device_train_batch_size": 1}
    with pytest.raises(ValueError, match=r"1 of 4 rows .* longer than `max_length: 40`"):
        gradients(SFTTrainer, SFTConfig, tmp_path, **same)
    with pytest.raises(ValueError, match="1 × its prompt alone fills max_length"):
        gradients(SFTTrainer, SFTConfig, tmp_path, **same, overflow="cut")
    for policy in ({"overflow": "drop"}, {"overflow": "cut", "bad_rows": "drop"}):
        _, log = gradients(SFTTrainer, SFTConfig, tmp_path, **same, **policy, num_train_epochs=1, max_steps=-1)
        assert log["loss"] > 0 and log["grad_norm"] > 0


def test_one_row_without_an_assistant_turn_among_a_thousand_is_named(tmp_path):
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    rows = Dataset.from_list([good] * 700 + [{"messages": good["messages"][:1]}] + [good] * 299)
    common = {"model": qwen3(), "train_dataset": rows, "processing_class": tokenizer()}
    with pytest.raises(ValueError, match=r"1 of 1,000 rows .*\n  row 700, column `messages`: no assistant turn"):
        SFTTrainer(args=SFTConfig(str(tmp_path), **QUIET), **common)
    trainer = SFTTrainer(args=SFTConfig(str(tmp_path), **QUIET, bad_rows="drop"), **common)
    assert len(trainer.train_dataset) == 999 and sum(trainer.data_reports[0].dropped.values()) == 1


def test_trained_tokens_are_the_completions(tmp_path):
    rows = Dataset.from_list(
        [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}]
    )
    tok = tokenizer()
    trainer = SFTTrainer(qwen3(), SFTConfig(str(tmp_path), **QUIET), train_dataset=rows, processing_class=tok)
    labels = [label for label in trainer.train_dataset[0]["labels"] if label != -100]
    assert tok.decode(labels) == "yo<|im_end|>"


def test_trls_own_flags_win_and_it_is_said(tmp_path, caplog):
    rows = Dataset.from_list([{"prompt": "ab", "completion": "cd"}])
    tok = tokenizer()
    for flags, expected in (
        ({}, "cd<|im_end|>"),
        ({"completion_only_loss": False}, "bcd<|im_end|>"),
        ({"train_on": "all", "completion_only_loss": True}, "cd<|im_end|>"),
    ):
        trainer = SFTTrainer(
            qwen3(), SFTConfig(str(tmp_path), **QUIET, **flags), train_dataset=rows, processing_class=tok
        )
        assert tok.decode([label for label in trainer.train_dataset[0]["labels"] if label != -100]) == expected
    assert "`completion_only_loss: False` wins over `train_on: assistant`: all is trained" in caplog.text


def test_a_formatting_function_makes_text_rows(tmp_path):
    rows = Dataset.from_list([{"q": "a", "a": "b"}])
    trainer = SFTTrainer(
        qwen3(),
        SFTConfig(str(tmp_path), **QUIET),
        train_dataset=rows,
        processing_class=tokenizer(),
        formatting_func=lambda row: f"{row['q']}={row['a']}",
    )
    assert tokenizer().decode(trainer.train_dataset[0]["input_ids"]) == "a=b<|im_end|>"


def test_dropout_is_off_unless_an_adapter_asked_for_it(tmp_path):
    lora = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        qwen3(attention_dropout=0.1),
        SFTConfig(str(tmp_path), **QUIET),
        train_dataset=text_rows(2),
        processing_class=tokenizer(),
        peft_config=lora,
    )
    dropouts = [m.p for n, m in trainer.model.named_modules() if isinstance(m, torch.nn.Dropout)]
    assert trainer.dropout_turned_off == 2 and dropouts == [0.5, 0.5]
