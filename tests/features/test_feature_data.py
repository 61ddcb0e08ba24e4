"""Which rows are used, in which order, and what is counted of them."""

import time

import pytest
import torch
from feature_jobs import each, logs, trained, trainer_of
from tiny import tokenizer
from training import LENGTHS, text_rows

import trl_opd.token_trainer
from trl_opd import DistillationConfig, DistillationTrainer, SFTTrainer


def out_of_memory(cls, at):
    """A trainer that runs out of memory at its `at`-th micro-batch of 4 rows, as torch says it on a GPU. `rows` are
    those of the batches that were drawn since."""

    class Small(cls):
        runs, rows = 0, ()

        def training_step(self, *args, **kwargs):
            self.runs += 1
            if self._train_batch_size == 4 and self.runs == at:
                self.rows = []
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().training_step(*args, **kwargs)

        def get_batch_samples(self, *args):
            batches, items = super().get_batch_samples(*args)
            self.rows = [*self.rows, *batches]
            return batches, items

    return Small


@pytest.mark.parametrize("accumulation", [1, 2])
@each("`auto_find_batch_size`")
def test_auto_find_batch_size(tmp_path, job, model, accumulation, caplog):
    """4 rows do not fit at the second micro-batch: 3 do. The epoch begins again with each row once, and the counts
    know nothing of the first try."""
    trainer = trained(
        job,
        model,
        tmp_path,
        trainer_class=out_of_memory(SFTTrainer if job == "sft" else DistillationTrainer, at=2),
        rows=text_rows(7),
        auto_find_batch_size=True,
        gradient_accumulation_steps=accumulation,
        max_steps=-1,
        num_train_epochs=1,
    )
    steps = {1: 3, 2: 2}[accumulation]
    assert trainer._train_batch_size == 3 and trainer.state.global_step == steps
    assert "auto_find_batch_size: 3 rows a micro-batch in the place of 4" in caplog.text
    per_step = [log[f"{job}/num_tokens_per_step"] for log in logs(trainer)]
    assert sum(per_step) == sum(length + 1 for length in LENGTHS)  # and N is that of the steps that were taken
    if job == "sft":
        seen = [tuple(ids[ids != 256].tolist()) for batch in trainer.rows for ids in batch["input_ids"]]
        assert sorted(seen) == sorted(tuple(ids) for ids in trainer.train_dataset["input_ids"])
        assert logs(trainer)[-1]["num_tokens"] == sum(map(len, seen))
    else:
        again = [prompt for window in trainer.asked[-(-7 // (3 * accumulation)) * -1 :] for prompt in window]
        assert set(again) == {tuple(tokenizer()(row["prompt"])["input_ids"]) for row in text_rows(7)}
        assert len(again) == steps * 3 * accumulation  # the last window is filled with rows that do not count


def test_auto_find_batch_size_keeps_the_generations_of_a_prompt_together(tmp_path):
    """3 rows fit, and hold no whole pairs: 2 are taken."""
    cls = out_of_memory(DistillationTrainer, at=2)
    options = {"auto_find_batch_size": True, "num_generations": 2, "fixed": False, "max_completion_length": 2}
    trainer = trained("distill", "full", tmp_path, trainer_class=cls, max_steps=3, **options)
    assert trainer._train_batch_size == 2 and trainer.state.global_step == 3
    with pytest.raises(ValueError, match="no batch of 1 rows or fewer holds whole groups of `num_generations: 2`"):
        trainer._of_whole_groups(1)


@each("`train_sampling_strategy`", jobs=["sft"])
def test_rows_in_the_order_that_was_asked_for(tmp_path, job, model):
    """`sequential`: the dataset's; `group_by_length`: rows of a batch are near in length, and each is there once."""
    cls = out_of_memory(SFTTrainer, at=-1)
    options = {"per_device_train_batch_size": 2, "max_steps": 16, "trainer_class": cls, "rows": text_rows(32)}
    drawn, padding = {}, {}
    for strategy in ("sequential", "group_by_length"):
        trainer = trained(job, model, tmp_path, train_sampling_strategy=strategy, **options)
        batches = [batch["attention_mask"].sum(1).tolist() for batch in trainer.rows]
        drawn[strategy] = [length for batch in batches for length in batch]
        padding[strategy] = sum(max(batch) - min(batch) for batch in batches)
    assert drawn["sequential"] == [len(ids) for ids in trainer.train_dataset["input_ids"]]
    assert sorted(drawn["group_by_length"]) == sorted(drawn["sequential"])
    assert padding["group_by_length"] < padding["sequential"] / 3


@each("`train_sampling_strategy`", jobs=["distill"])
def test_prompts_in_the_order_of_the_dataset(tmp_path, job, model):
    options = {"per_device_train_batch_size": 2, "max_steps": 4, "train_sampling_strategy": "sequential"}
    trainer = trained(job, model, tmp_path, rows=text_rows(7), **options)
    prompts = [tuple(tokenizer()(row["prompt"])["input_ids"]) for row in text_rows(7)]
    assert [prompt for window in trainer.asked for prompt in window] == [*prompts, prompts[0]]


@pytest.mark.feature("`train_sampling_strategy`", job="distill", model=["full", "lora"], how="refused")
@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_prompts_cannot_be_ordered_by_what_is_not_written_yet(tmp_path, strategy):
    with pytest.raises(ValueError, match=f"train_sampling_strategy is '{strategy}'.*`balance_micro_batches: true`"):
        DistillationConfig(str(tmp_path), train_sampling_strategy=strategy)


@pytest.mark.parametrize("counted", ["all", "non_padding"])
@each("`include_num_input_tokens_seen`")
def test_tokens_seen(tmp_path, job, model, counted):
    """Every step has all four rows: prompts of 2, 4, 6 and 2 letters, completions of 1, 40, 3 and 25, and stop tokens.
    `all` counts padding in sft; a rollout has none."""
    trainer = trained(job, model, tmp_path, max_steps=2, include_num_input_tokens_seen=counted)
    real = 2 + 4 + 6 + 2 + 1 + 40 + 3 + 25 + 4
    one = 4 * (4 + 40 + 1) if (job, counted) == ("sft", "all") else real
    assert [log["num_input_tokens_seen"] for log in logs(trainer)] == [one, 2 * one]
    assert all(log["train_tokens_per_second"] > 0 for log in logs(trainer))


@each("Tokens per second and peak memory")
def test_throughput(tmp_path, job, model, monkeypatch):
    """A clock that moves a second a micro-batch, 100 s an evaluation: 87 tokens in the 2 s of each step."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trl_opd.token_trainer, "peak_memory_gib", lambda device: 1.5)

    class Timed(SFTTrainer if job == "sft" else DistillationTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            now[0] += 1.0
            return loss

        def evaluation_loop(self, *args, **kwargs):
            now[0] += 100.0
            return super().evaluation_loop(*args, **kwargs)

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "eval_rows": text_rows(2)}
    trainer = trained(job, model, tmp_path, trainer_class=Timed, **options)
    assert [log["tokens_per_second"] for log in logs(trainer)] == [87 / 2] * 3
    assert [log["peak_memory_gib"] for log in logs(trainer)] == [1.5] * 3
    assert len(logs(trainer, "eval_loss")) == 3
    assert not any("tokens_per_second" in log for log in logs(trainer, "eval_loss"))


def test_peak_memory_is_this_processs(tmp_path):
    trainer = trainer_of("sft", "full", tmp_path)
    held = peak_memory_of(trainer)
    ballast = torch.ones(2**27)  # half a GiB
    assert 0.3 < peak_memory_of(trainer) - held < 0.7 and ballast.sum() > 0


def peak_memory_of(trainer):
    return trl_opd.token_trainer.peak_memory_gib(trainer.accelerator.device)
