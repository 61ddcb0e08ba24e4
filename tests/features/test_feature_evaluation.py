"""What a run measures of itself, and what it does about it: metrics of the user's, the best model, an early stop."""

import pytest
import torch
from feature_jobs import each, logs, trained, trainer_of
from tiny import tokenizer
from training import text_rows
from transformers import EarlyStoppingCallback, TrainerCallback

from trl_opd import DistillationTrainer, SFTTrainer, checkpoints

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


def accuracy(predicted):
    """The share of trained tokens that the position before them guesses, from logits or guesses of the whole set."""
    guesses, labels = predicted.predictions[:, :-1], predicted.label_ids[:, 1:]
    guesses = guesses.argmax(-1) if guesses.ndim == 3 else guesses
    return {"own_accuracy": float((guesses == labels)[labels != -100].mean())}


@pytest.mark.parametrize("reduced", [False, True])
@each("`compute_metrics`", jobs=["sft"])
def test_metrics_of_the_users_own(tmp_path, job, model, reduced):
    """They see the model's logits and labels over the whole set: their accuracy is the one we log."""
    kwargs = {"compute_metrics": accuracy}
    if reduced:
        kwargs["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    rows = text_rows(5)
    options = {"eval_rows": rows, "per_device_eval_batch_size": 2}
    trainer = trainer_of(job, model, tmp_path, kwargs=kwargs, **options)
    plain = trainer_of(job, model, tmp_path, **options)
    metrics, ours = trainer.evaluate(), plain.evaluate()
    assert metrics["eval_own_accuracy"] == pytest.approx(ours["eval_mean_token_accuracy"])
    assert metrics["eval_loss"] == pytest.approx(ours["eval_loss"], rel=0.5)  # TRL's: a mean of means


class Written(TrainerCallback):
    """An evaluation of one's own on what the model writes."""

    def __init__(self, tok):
        self.tok, self.texts = tok, []

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        ids = self.tok("0 ", return_tensors="pt")["input_ids"]
        written = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=256)
        self.texts.append(written[0, ids.size(1) :].tolist())


@each("Evaluation on generated text")
def test_evaluation_on_what_the_model_writes(tmp_path, job, model):
    """In distillation the evaluation itself takes rollouts, the same at every evaluation of one model, and compares
    them with `answer`. In sft a callback may generate, between steps, with the model as it is."""
    if job == "sft":
        callback = Written(tokenizer())
        options = {"eval_rows": text_rows(2), "callbacks": [callback], "eval_strategy": "steps", "eval_steps": 1}
        trainer = trained(job, model, tmp_path, max_steps=2, learning_rate=0.1, **options)
        assert len(callback.texts) == 2
        ids = tokenizer()("0 ", return_tensors="pt")["input_ids"]
        student = trainer.model.eval()
        for _ in range(4):
            ids = torch.cat([ids, student(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert ids[0, -4:].tolist() == callback.texts[1]
        return
    asked = []

    class Told(DistillationTrainer):
        def _generate_single_turn(self, prompt_ids, *args):
            asked.append(len(prompt_ids))
            _, written = super()._generate_single_turn(prompt_ids, *args)
            return [[*tokenizer()("ab")["input_ids"], 258], written]

    rows = text_rows(2).remove_columns("completion").add_column("answer", ["ab", "never"])
    trainer = trainer_of(job, model, tmp_path, eval_rows=rows, trainer_class=Told, fixed=False)
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first["eval_loss"] == again["eval_loss"] > 0 and asked == [2, 2]
    assert first["eval_accuracy"] == 0.5


def scripted(job, losses):
    """A trainer whose evaluation loss follows a script."""

    class Trainer(SFTTrainer if job == "sft" else DistillationTrainer):
        def evaluation_loop(self, *args, **kwargs):
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_loss"] = losses.pop(0)
            return output

    return Trainer


@each("Early stopping")
def test_an_early_stop(tmp_path, job, model):
    """3, 2, 2.5, 2.4: with a patience of 2 the run ends after the fourth of nine steps, with the second's weights."""
    options = EVERY_STEP | {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 9}
    weights = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            weights.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})

    trainer = trained(
        job,
        model,
        tmp_path,
        trainer_class=scripted(job, [3.0, 2.0, 2.5, 2.4, 1.0]),
        eval_rows=text_rows(2),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2), Keep()],
        **options,
    )
    assert trainer.state.global_step == 4 and trainer.state.best_metric == 2.0
    for name, weight in trainer.model.named_parameters():
        if name in weights[1]:
            assert torch.equal(weight, weights[1][name]), name


@each("`load_best_model_at_end`, `metric_for_best_model`, `save_total_limit`")
def test_the_best_of_a_metric_of_ones_own(tmp_path, job, model):
    """The step of the highest `eval_entropy` is all that `save_total_limit: 1` keeps, and its weights are those at the
    end."""
    options = EVERY_STEP | {"load_best_model_at_end": True, "metric_for_best_model": "entropy", "max_steps": 4}
    options |= {"greater_is_better": True, "save_total_limit": 1, "eval_rows": text_rows(3), "fixed": False}
    trainer = trained(job, model, tmp_path, **options)
    values = [log["eval_entropy"] for log in logs(trainer, "eval_entropy")]
    best = max(range(4), key=values.__getitem__) + 1
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == [f"checkpoint-{best}"]
    assert trainer.evaluate()["eval_entropy"] == pytest.approx(values[best - 1])
