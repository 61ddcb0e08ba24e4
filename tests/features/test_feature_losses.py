"""What changes the loss: label smoothing and NEFTune by hand, a loss of the user's own through TRL's code."""

import math

import pytest
import torch
import trl
from feature_jobs import JOBS, MODELS, each, logs, lora, trained, trainer_of
from plain import gradients_of, mean_over_tokens
from test_nonfinite import poisoned
from test_objective_wiring import log_pq, row_logits, rows_of, seeded_peft
from tiny import llama, qwen3, tokenizer
from training import assert_same_gradients, text_rows

import trl_opd.losses as losses
from trl_opd import DistillationConfig, DistillationTrainer


def student(model):
    return qwen3() if model == "full" else seeded_peft(qwen3(), lora())


def smoothed(model, prompt, completion, share=0.3):
    """(1 − ε) · −log p(token) + ε · the mean of −log p over the vocabulary, for each token of a completion."""
    log_p = row_logits(model, prompt, completion).log_softmax(-1)
    own = -log_p.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
    return (1 - share) * own + share * -log_p.mean(1)


@each("`label_smoothing_factor`")
def test_label_smoothing_by_hand(tmp_path, job, model):
    """In distillation it acts on the cross-entropy of `sft_weight`: here on every row, beside a divergence."""
    options = {"label_smoothing_factor": 0.3, "student": student(model)}
    if job == "distill":
        options |= {"lmbda": 0.0, "sft_weight": 0.5}
    trainer = trained(job, "full", tmp_path, **options)
    reference, teacher = student(model), qwen3(seed=1, hidden=48).requires_grad_(False)

    def per_token(prompt, completion):
        loss = smoothed(reference, prompt, completion)
        if job == "distill":
            loss = 0.5 * loss + losses.reverse_kl(*log_pq(reference, teacher, prompt, completion))
        return loss

    expected = mean_over_tokens(rows_of(), per_token)
    assert logs(trainer)[0]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert_same_gradients(trainer.gradients[0], gradients_of(expected, reference), rtol=1e-4)


def test_label_smoothing_that_would_do_nothing_is_refused(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"label_smoothing_factor is 0.3, but the teacher's .* Set `sft_weight`"):
        DistillationConfig(str(tmp_path), label_smoothing_factor=0.3)
    args = trl.DistillationConfig(
        str(tmp_path), report_to="none", bf16=False, label_smoothing_factor=0.3, max_completion_length=8
    )
    rows = text_rows(4).remove_columns("completion")
    DistillationTrainer(qwen3(), qwen3(1), args, train_dataset=rows, processing_class=tokenizer())
    assert "label_smoothing_factor is 0.3, but the teacher's" in caplog.text  # a script for TRL goes on as it did


class Noise:
    """Watches what lies between the embeddings and the first layer: the most of it, by whether gradients are on."""

    def __init__(self, trainer):
        self.seen, self.most = {True: [], False: []}, []
        embeddings = trainer.model.get_input_embeddings()
        layer = next(m for m in trainer.model.modules() if type(m).__name__ == "Qwen3DecoderLayer")
        embeddings.register_forward_pre_hook(self.keep)
        layer.register_forward_pre_hook(self.compare)

    def keep(self, embeddings, inputs):
        self.exact = torch.nn.functional.embedding(inputs[0], embeddings.weight).detach()

    def compare(self, layer, inputs):
        noise = (inputs[0].detach() - self.exact).abs().max().item()
        self.seen[torch.is_grad_enabled()].append(noise)
        self.most.append(50.0 / math.sqrt(self.exact[0].numel()))  # α / √(length · width)


NEFTUNE = [(job, model, "model") for job in JOBS for model in MODELS] + [("distill", "lora", "base")]


@pytest.mark.feature("`neftune_noise_alpha`")
@pytest.mark.parametrize("job, model, teacher_kind", NEFTUNE)
def test_neftune_is_for_training_alone(tmp_path, job, model, teacher_kind):
    """It changes the training loss, and neither the evaluation's, the rollouts', nor what the base as teacher sees."""
    options = {"teacher_kind": teacher_kind} if job == "distill" else {}
    options |= {"eval_rows": text_rows(3), "fixed": False}
    quiet, noisy = (trainer_of(job, model, tmp_path, neftune_noise_alpha=a, **options) for a in (None, 50.0))
    noise = Noise(noisy)
    # with noise rows stay padded, without it they do not
    assert noisy.evaluate()["eval_loss"] == pytest.approx(quiet.evaluate()["eval_loss"], rel=1e-6)
    quiet.train()
    noisy.train()
    assert logs(noisy)[0]["loss"] != pytest.approx(logs(quiet)[0]["loss"], rel=1e-3)
    assert len(noise.seen[True]) == 1 and 0 < noise.seen[True][0] <= noise.most[-1]
    assert noise.seen[False] and not any(noise.seen[False])
    ids = torch.tensor([[5, 6, 7]])
    embeddings = noisy.model.train().get_input_embeddings()  # its hook is gone
    assert torch.equal(embeddings(ids), torch.nn.functional.embedding(ids, embeddings.weight))


def test_neftune_keeps_the_padding_that_its_noise_goes_by(tmp_path, caplog):
    """Rows run without padding are one long row: the noise would be that much smaller."""
    trainer = trainer_of("sft", "full", tmp_path, neftune_noise_alpha=5.0)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO", "trl_opd"):
        patch.setattr("trl_opd.token_trainer.why_padded", lambda *_: "")
        assert not trainer._leaves_out_padding(trainer.model, "model")
        assert trainer._leaves_out_padding(qwen3(), "teacher")
    assert "padding is kept: NEFTune's noise goes by the length" in caplog.text


def doubled(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return 2 * torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


@each("`compute_loss_func`", jobs=["sft"], how="delegated")
def test_a_loss_of_the_users_own(tmp_path, job, model, caplog):
    """Twice the cross-entropy: through TRL's code, said once, with twice our own gradient over two micro-batches."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "balance_micro_batches": False}
    plain = trained(job, model, tmp_path, **options)
    own = trained(job, model, tmp_path, kwargs={"compute_loss_func": doubled}, **options)
    twice = {name: 2 * gradient for name, gradient in plain.gradients[0].items()}
    assert_same_gradients(own.gradients[0], twice, rtol=1e-4)
    assert caplog.text.count("computed by TRL's own code: compute_loss_func was passed") == 1
    assert logs(own)[0]["tokens_per_second"] > 0


def poisoned_run(job):
    """Three steps of two rows each; the loss of one row in step 2 is not finite."""
    bad = {"student": poisoned(llama())} if job == "sft" else {"teacher": poisoned(llama(seed=3)), "student": llama()}
    return bad | {"rows": text_rows(7), "max_steps": 3, "per_device_train_batch_size": 2}


@each("`logging_nan_inf_filter`")
def test_the_filter_and_a_step_that_is_left_out(tmp_path, job, model):
    """A loss that is not finite has its step left out (`on_nonfinite`): the filter puts nothing in its
    place, and the logged losses are those of the steps that were taken."""
    filters = {"logging_nan_inf_filter": True, "on_nonfinite": "skip"}
    trainer, every = (
        trained(job, model, tmp_path / str(n), logging_steps=n, **filters, **poisoned_run(job)) for n in (3, 1)
    )
    losses_of_steps = [log["loss"] for log in logs(every)]
    (log,) = logs(trainer)
    assert len(losses_of_steps) == 2 and log[f"{job}/nonfinite_steps"] == 1
    assert log["loss"] == pytest.approx(sum(losses_of_steps) / 2)
