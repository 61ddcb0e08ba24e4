"""Models that are not plain: scaled and capped heads, experts, images. Each gradient against full logits or TRL's."""

from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from feature_jobs import FEW, each, logs, lora, trained, trainer_of
from PIL import Image
from plain import gradients_of, mean_over_tokens, row_logits
from test_objective_wiring import cohere, gemma2, log_pq, rows_of, seeded_peft
from tiny import qwen3, tokenizer
from training import QUIET, Gradients, assert_same_gradients, text_rows
from transformers import GraniteConfig, GraniteForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from upstream.vision import VISION, build_vision
from upstream.words import tokenizer as words_of

import trl_opd.losses as losses
from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "bos_token_id": 257,
}


def granite(seed=0):
    torch.manual_seed(seed)
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0, initializer_range=0.3))


def experts(seed=0, aux=0.0):
    torch.manual_seed(seed)
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": aux}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **routing, head_dim=16, initializer_range=0.1))


def loss_of(job, student, teacher):
    """The whole step's loss from full logits, with its gradients."""

    def nll(prompt, completion):
        log_p = row_logits(student, prompt, completion).log_softmax(-1)
        return -log_p.gather(1, torch.tensor(completion)[:, None]).squeeze(1)

    def divergence(prompt, completion):
        return losses.reverse_kl(*log_pq(student, teacher, prompt, completion))

    loss = mean_over_tokens(rows_of(), nll if job == "sft" else divergence)
    return loss.item(), gradients_of(loss, student)


def assert_right(job, model, folder, make, **options):
    def student():
        return make() if model == "full" else seeded_peft(make(), lora())

    trainer = trained(job, "full", folder, student=student(), teacher=make(seed=3), **options)
    loss, gradients = loss_of(job, student(), make(seed=3).eval().requires_grad_(False))
    assert logs(trainer)[0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same_gradients(trainer.gradients[0], gradients, rtol=1e-3)


HEADS = [("sft", make) for make in (gemma2, cohere, granite)] + [("distill", granite)]


@pytest.mark.parametrize("model", ["full", "lora"])
@pytest.mark.parametrize("job, make", HEADS)
@pytest.mark.feature("Gemma-, Cohere- and Granite-style heads")
def test_scaled_and_capped_heads(tmp_path, job, make, model):
    """The other ones in distillation: test_objective_wiring.py."""
    assert_right(job, model, tmp_path, make)


# --- experts ---------------------------------------------------------------------------------------------------------


@each("Mixture-of-experts models")
def test_experts_without_their_auxiliary_loss(tmp_path, job, model):
    assert_right(job, model, tmp_path, experts)


@each("Mixture-of-experts auxiliary loss", jobs=["sft"], how="delegated")
def test_the_auxiliary_loss_is_trls(tmp_path, job, model, caplog):
    """Its gradient is TRL's, and another one than without it."""
    ours = trained(job, model, tmp_path, student=experts(aux=0.5))
    assert caplog.text.count("computed by TRL's own code: the model adds a mixture-of-experts auxiliary loss") == 1
    torch.manual_seed(0)
    recorder = Gradients()
    theirs = trl.SFTTrainer(
        model=experts(aux=0.5),
        args=trl.SFTConfig(str(tmp_path), **QUIET | FEW),
        train_dataset=text_rows(4),
        processing_class=tokenizer(),
        peft_config=lora() if model == "lora" else None,
        callbacks=[recorder],
    )
    theirs.train()
    assert_same_gradients(ours.gradients[0], recorder.steps[0], rtol=1e-4)
    assert logs(ours)[0]["aux_loss"] == pytest.approx(logs(theirs)[0]["aux_loss"], rel=1e-5)
    with pytest.raises(AssertionError):
        assert_same_gradients(ours.gradients[0], trained(job, model, tmp_path, student=experts()).gradients[0], 1e-3)


# --- images ----------------------------------------------------------------------------------------------------------


def llava():
    standin = VISION["tiny-LlavaForConditionalGeneration"]
    words = words_of(standin.words)
    return build_vision(standin, words).float(), standin.processor(words)


def pictures():
    def row(text, answer, colour):
        question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
        answer = [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        return {"prompt": question, "completion": answer, "images": [Image.new("RGB", (28, 28), colour)]}

    return Dataset.from_list([row("what colour", "red", (220, 20, 20)), row("and this", "deep blue", (10, 10, 200))])


@each("Images", jobs=["sft"], how="delegated")
def test_images_go_through_trl(tmp_path, job, model, caplog):
    steps = []
    for trainer_class, config_class in ((SFTTrainer, SFTConfig), (trl.SFTTrainer, trl.SFTConfig)):
        torch.manual_seed(0)
        recorder, (student, processor) = Gradients(), llava()
        trainer = trainer_class(
            model=student,
            args=config_class(str(tmp_path), **QUIET | FEW, max_length=None),
            train_dataset=pictures(),
            processing_class=processor,
            peft_config=lora() if model == "lora" else None,
            callbacks=[recorder],
        )
        trainer.train()
        steps.append(recorder.steps[0])
    assert_same_gradients(*steps, rtol=1e-4)
    assert any("vision_tower" in name for name in steps[0])
    assert caplog.text.count("computed by TRL's own code: the model takes images") == 1


# --- refused in distillation -----------------------------------------------------------------------------------------


@pytest.mark.feature("Images", job="distill", model=["full", "lora"], how="refused")
def test_images_are_refused_in_distillation(tmp_path):
    student, processor = llava()
    args = DistillationConfig(str(tmp_path), **QUIET | FEW)
    rows = pictures().remove_columns("completion")
    with pytest.raises(ValueError, match=r"Models that take images are not supported for distillation\. Use a text"):
        DistillationTrainer(student, llava()[0], args, train_dataset=rows, processing_class=processor)


@pytest.mark.feature("Context and sequence parallelism", job="distill", model=["full", "lora"], how="refused")
@pytest.mark.parametrize("kind", ["cp_enabled", "sp_enabled"])
def test_parts_of_rows_are_refused_in_distillation(tmp_path, kind):
    args = DistillationConfig(str(tmp_path), **QUIET)
    args.parallelism_config = SimpleNamespace(**{"cp_enabled": False, "sp_enabled": False, kind: True})
    with pytest.raises(ValueError, match=r"\(`parallelism_config`\) are not supported for distillation.* Use DDP"):
        DistillationTrainer(qwen3(), qwen3(1), args, train_dataset=text_rows(2), processing_class=tokenizer())


def test_parts_of_rows_are_left_to_trl_in_sft(tmp_path):
    from trl_opd.sft_setup import why_trl

    trainer = trainer_of("sft", "full", tmp_path)
    trainer.accelerator.state.parallelism_config = SimpleNamespace(cp_enabled=False, sp_enabled=True)
    assert why_trl(trainer, None) == "sequences are split over ranks"
