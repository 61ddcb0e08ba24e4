"""An adapter folder as the starting model: its base with that adapter, which goes on being trained."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from plain import gradients_of, mean_over_tokens
from test_objective_wiring import log_pq, rows_of
from tiny import qwen3, tokenizer
from training import QUIET, Gradients, answers_for, assert_same_gradients, fixed_completions, text_rows
from transformers import Qwen3ForCausalLM

import trl_opd.losses as losses
from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.fixture
def adapter(tmp_path):
    """A LoRA that SFT has trained and saved, and its base."""
    base = str(tmp_path / "base")
    qwen3().save_pretrained(base)
    tokenizer().save_pretrained(base)
    trainer = SFTTrainer(
        model=base,
        args=SFTConfig(str(tmp_path / "sft"), **QUIET | {"max_steps": 2}),
        train_dataset=text_rows(4),
        peft_config=LORA,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "sft"))
    return str(tmp_path / "sft"), base


@pytest.mark.feature("An adapter folder as the starting model", job="distill", model="lora")
def test_distill_goes_on_training_the_adapter_of_sft(tmp_path, adapter):
    folder, base = adapter
    recorder = Gradients()
    trainer = fixed_completions(DistillationTrainer, answers_for(text_rows(4), tokenizer()))(
        model=folder,
        teacher_model=qwen3(seed=1, hidden=48),
        args=DistillationConfig(
            str(tmp_path / "out"), **QUIET | {"max_steps": 1, "per_device_train_batch_size": 4}, max_completion_length=8
        ),
        train_dataset=text_rows(4).remove_columns("completion"),
        callbacks=[recorder],
    )
    assert isinstance(trainer.model, PeftModel)
    trains = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trains and all("lora_" in name for name in trains)
    trainer.train()
    student = PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(base), folder, is_trainable=True)
    teacher = qwen3(seed=1, hidden=48).requires_grad_(False)
    loss = mean_over_tokens(rows_of(), lambda p, c: losses.reverse_kl(*log_pq(student, teacher, p, c)))
    assert_same_gradients(recorder.steps[0], gradients_of(loss, student), rtol=1e-4)
    trainer.save_model(str(tmp_path / "distilled"))
    again = PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(base), str(tmp_path / "distilled"))
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(again(ids).logits, trainer.model.eval()(ids).logits)


def test_a_merged_export_has_the_adapters_logits(tmp_path, adapter):
    folder, base = adapter
    tuned = PeftModel.from_pretrained(Qwen3ForCausalLM.from_pretrained(base), folder).eval()
    ids = torch.tensor([[5, 6, 7]])
    expected = tuned(ids).logits
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = Qwen3ForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_another_adapter_on_top_is_refused(tmp_path, adapter):
    with pytest.raises(ValueError, match="is an adapter already"):
        SFTTrainer(
            model=adapter[0], args=SFTConfig(str(tmp_path), **QUIET), train_dataset=text_rows(4), peft_config=LORA
        )


@pytest.mark.feature("An adapter folder as the starting model", job="sft", model="lora")
def test_sft_goes_on_too(tmp_path, adapter):
    load = {"revision": "main", "dtype": None}  # as the command line gives them, whatever the model
    args = SFTConfig(str(tmp_path / "out"), **QUIET | {"max_steps": 1, "model_init_kwargs": load})
    trainer = SFTTrainer(model=adapter[0], args=args, train_dataset=text_rows(4))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)
