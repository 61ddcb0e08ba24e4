"""DistillationTrainer: TRL's gradients on TRL's completions, the same however the window is cut; each prompt once."""

from collections import Counter

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tiny import llama, qwen3, tokenizer
from training import LENGTHS, QUIET, Gradients, answers_for, assert_same_gradients, fixed_completions, text_rows

from trl_opd import DistillationConfig, DistillationTrainer
from trl_opd.data.sampler import WindowSampler

LORA = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def build(trainer_class, config_class, tmp_path, n=4, student=None, teacher=None, fixed=True, **kwargs):
    peft_config, own_rows = kwargs.pop("peft_config", None), kwargs.pop("rows", None)
    eval_rows = kwargs.pop("eval_rows", None)
    rows, tok = text_rows(n), tokenizer()
    recorder = Gradients()
    defaults = QUIET | {"max_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 8}
    trainer = (fixed_completions(trainer_class, answers_for(rows, tok)) if fixed else trainer_class)(
        model=student or qwen3(),
        teacher_model=None if teacher is False else teacher or qwen3(seed=1, hidden=48),
        args=config_class(str(tmp_path), **defaults | kwargs),
        train_dataset=rows.remove_columns("completion") if own_rows is None else own_rows,
        eval_dataset=eval_rows,
        processing_class=tok,
        peft_config=peft_config,
        callbacks=[recorder],
    )
    return trainer, recorder


def gradients(*args, **kwargs):
    trainer, recorder = build(*args, **kwargs)
    trainer.train()
    return recorder.steps[0], trainer.state.log_history[0]


@pytest.mark.parametrize("beta, tau", [(1.0, 1.0), (0.0, 1.0), (0.5, 0.7)])
@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
def test_same_loss_and_gradients_as_trl(tmp_path, beta, tau, peft_config):
    same = {"beta": beta, "temperature": tau, "peft_config": peft_config}
    ours, log = gradients(DistillationTrainer, DistillationConfig, tmp_path, **same)
    theirs, trl_log = gradients(trl.DistillationTrainer, trl.DistillationConfig, tmp_path, **same)
    assert_same_gradients(ours, theirs, rtol=1e-4)
    names = [name for name in trl_log if name.startswith("completions/")]
    for name in ("loss", "entropy", "num_tokens", *names):
        assert log[name] == pytest.approx(trl_log[name], rel=1e-4), name


@pytest.mark.parametrize("num_items", [None, 5, 40])
def test_a_batch_of_trls_scored_by_a_script(tmp_path, num_items):
    """Prompts of 1 and 3 tokens padded on the left, completions of 4 and 2 on the right: 6 tokens, whatever N is."""
    batch = {
        "prompt_ids": torch.tensor([[257, 257, 5], [6, 7, 8]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[9, 10, 11, 12], [13, 14, 257, 257]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    values = []
    for classes in ((DistillationTrainer, DistillationConfig), (trl.DistillationTrainer, trl.DistillationConfig)):
        trainer, _ = build(*classes, tmp_path, fixed=False, beta=0.25)
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=num_items)
        loss.backward()
        values.append((loss.item(), {n: p.grad for n, p in trainer.model.named_parameters()}))
    (ours, our_gradients), (theirs, their_gradients) = values
    assert ours == pytest.approx(theirs, rel=1e-4) and ours > 0
    assert_same_gradients(our_gradients, their_gradients, rtol=1e-4)


def test_untied_heads_and_gradient_checkpointing(tmp_path):
    same = {"student": llama(), "teacher": llama(seed=3)}
    ours, _ = gradients(DistillationTrainer, DistillationConfig, tmp_path, **same, gradient_checkpointing=True)
    same = {"student": llama(), "teacher": llama(seed=3)}
    theirs, _ = gradients(trl.DistillationTrainer, trl.DistillationConfig, tmp_path, **same)
    assert_same_gradients(ours, theirs, rtol=1e-4)


@pytest.mark.parametrize("batch, accumulation", [(2, 2), (1, 4)])
def test_any_way_of_cutting_the_window_gives_the_same_gradient(tmp_path, batch, accumulation):
    whole, log = gradients(DistillationTrainer, DistillationConfig, tmp_path)
    cut, cut_log = gradients(
        DistillationTrainer,
        DistillationConfig,
        tmp_path,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    assert_same_gradients(cut, whole, rtol=1e-5)
    assert cut_log["loss"] == pytest.approx(log["loss"], rel=1e-5)
    assert cut_log["distill/num_tokens_per_step"] == 1 + 40 + 3 + 25 + 4


def test_the_datasets_own_answers_change_nothing(tmp_path):
    """Rows that bring answers of 4 or of 200 letters: the rollouts are the same, and so is the gradient."""
    steps = []
    for length in (4, 200):
        trainer, recorder = build(DistillationTrainer, DistillationConfig, tmp_path)
        rows = text_rows(4).map(lambda row, n=length: {"completion": "z" * n})
        trainer.train_dataset = trainer._prepare_train(rows)
        trainer.train()
        steps.append(recorder.steps[0])
    assert_same_gradients(steps[0], steps[1], rtol=1e-6)


def test_every_prompt_is_used_once_an_epoch(tmp_path):
    """7 prompts, batch 2, accumulation 2: two windows of 4, the last filled with one row that does not count."""
    trainer, _ = build(
        DistillationTrainer,
        DistillationConfig,
        tmp_path,
        n=7,
        max_steps=-1,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert trainer.state.global_step == 4 and len(trainer.asked) == 4
    tokens = [log["distill/num_tokens_per_step"] for log in trainer.state.log_history if "loss" in log]
    assert sum(tokens) == 2 * sum(length + 1 for length in LENGTHS)
    for epoch in (trainer.asked[:2], trainer.asked[2:]):
        counts = Counter(prompt for window in epoch for prompt in window)
        assert len(counts) == 7 and sum(counts.values()) == 8
    assert trainer.asked[:2] != trainer.asked[2:]  # another order in the second epoch


@pytest.mark.parametrize("options", [{}, {"lmbda": 0.5, "sft_weight": 0.1}], ids=["on policy", "mixed"])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, stop, options):
    """Two steps an epoch; stopped in the first and in the second epoch, where order and rollouts must go on."""

    class StopAt(Gradients):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == stop
            control.should_save = control.should_training_stop

    def run(resume=None, **callbacks):
        same = {"n": 7, "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        same |= options | {"rows": text_rows(7)}
        trainer, _ = build(DistillationTrainer, DistillationConfig, tmp_path, fixed=False, **same)
        for callback in callbacks.values():
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = run().model.state_dict()
    assert run(stopping=StopAt()).state.global_step == stop
    resumed = run(resume=str(tmp_path / f"checkpoint-{stop}"))
    assert resumed.state.global_step == 5
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, straight[name]), name


def test_a_filler_row_gives_no_gradient(tmp_path):
    """3 prompts in a window of 4 give the gradient of the 3 alone."""
    filled, _ = gradients(DistillationTrainer, DistillationConfig, tmp_path, n=3)
    exact, _ = gradients(DistillationTrainer, DistillationConfig, tmp_path, n=3, per_device_train_batch_size=3)
    assert_same_gradients(filled, exact, rtol=1e-5)


def test_order_does_not_depend_on_how_a_window_is_shared():
    """Two epochs of 7 rows in windows of 4, repeated twice: rows and weights, worked out from the permutation."""
    sampler = WindowSampler(range(7), window=4, repeats=2, seed=5)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        order = torch.randperm(7, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        slots = list(sampler)
        assert len(slots) == len(sampler) == 16
        assert [slot.row for slot in slots if slot.first] == [*order, order[0]]
        assert [slot.weight for slot in slots if slot.first] == [1] * 7 + [0]
        assert [slot.row for slot in slots[4:8]] == order[:4] and not any(slot.first for slot in slots[4:8])


def test_rollouts_are_in_eval_mode_seeded_and_leave_the_random_state(tmp_path):
    lora = LoraConfig(
        r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    trainer, _ = build(
        DistillationTrainer, DistillationConfig, tmp_path, fixed=False, peft_config=lora, disable_dropout=False
    )
    rows = [{**trainer.train_dataset[i], "weight": 1} for i in range(4)]
    trainer.model.train()
    before, modes, generate = torch.get_rng_state(), [], trainer._generate_single_turn
    trainer._generate_single_turn = lambda *a: (modes.append(trainer.model.training), generate(*a))[1]
    first, again, other = (trainer._roll_out(rows, seed, 1)[0]["input_ids"] for seed in (7, 7, 8))
    assert torch.equal(first, again) and not (first.shape == other.shape and torch.equal(first, other))
    assert modes == [False] * 3 and trainer.model.training and torch.equal(before, torch.get_rng_state())


@pytest.mark.feature("Evaluation on generated text", job="distill", model="full")
def test_evaluating_twice_gives_one_value_in_both_modes(tmp_path):
    trainer, _ = build(DistillationTrainer, DistillationConfig, tmp_path, fixed=False)
    for rows in (text_rows(5), text_rows(5).remove_columns("completion")):
        first, again = (trainer.evaluate(rows)["eval_loss"] for _ in range(2))
        assert first == again > 0


def test_dataset_eval_is_the_plain_divergence_on_the_completions(tmp_path):
    trainer, _ = build(DistillationTrainer, DistillationConfig, tmp_path, per_device_eval_batch_size=2)
    rows, tok = text_rows(5), tokenizer()
    total = count = 0.0
    for prompt, answer in answers_for(rows, tok).items():
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            log_p, log_q = (
                m(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1] for m in (qwen3(), qwen3(1, hidden=48))
            )
        total += (log_p.exp() * (log_p - log_q)).sum().item()
        count += len(answer)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(total / count, rel=1e-4)


def test_a_step_without_a_trained_token_changes_nothing_and_three_are_an_error(tmp_path):
    class Masked(DistillationTrainer):
        def _roll_out(self, rows, seed, parts):
            self.cut = self.state.global_step > 0
            return super()._roll_out(rows, seed, parts)

        def _is_truncated(self, completion):
            return self.cut

    trainer, _ = build(Masked, DistillationConfig, tmp_path, fixed=False, max_steps=9)
    weights = []
    trainer.add_callback(Snapshot(weights))
    with pytest.raises(RuntimeError, match="3 steps in a row, up to step 4"):
        trainer.train()
    assert len(weights) == 3 and not torch.equal(weights[0], qwen3().model.embed_tokens.weight)
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[1], weights[2])


class Snapshot(Gradients):
    def __init__(self, weights):
        self.weights = weights

    def on_pre_optimizer_step(self, *args, **kwargs):
        pass

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(model.model.embed_tokens.weight.detach().clone())


def test_bf16_trains_its_forward_in_bf16(tmp_path):
    seen = []
    student = qwen3()
    student.model.layers[0].mlp.register_forward_hook(lambda m, i, o: seen.append(o.dtype) if m.training else None)
    gradients(DistillationTrainer, DistillationConfig, tmp_path, student=student, bf16=True, use_cpu=True)
    assert set(seen) == {torch.bfloat16}


def test_the_teacher_stays_frozen_and_in_eval_mode(tmp_path):
    teacher = qwen3(1, hidden=48, attention_dropout=0.5)
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    gradients(DistillationTrainer, DistillationConfig, tmp_path, teacher=teacher)
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    assert all(torch.equal(before[name], p) for name, p in teacher.named_parameters())


def test_a_trl_script_with_the_import_changed_trains(tmp_path):
    args = trl.DistillationConfig(str(tmp_path), **QUIET, max_steps=2, max_completion_length=4)
    student = qwen3()
    trainer = DistillationTrainer(
        model=student,
        teacher_model=qwen3(1),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "hi"}]}]),
        processing_class=tokenizer(),
    )
    trainer.train()
    assert trainer.args.max_completion_length == 4
    assert not torch.equal(student.model.embed_tokens.weight, qwen3().model.embed_tokens.weight)


def test_no_teacher_and_the_student_itself_are_refused(tmp_path):
    config = DistillationConfig(str(tmp_path), **QUIET)
    rows, tok, student = text_rows(2), tokenizer(), qwen3()
    common = {"model": student, "args": config, "train_dataset": rows, "processing_class": tok}
    with pytest.raises(ValueError, match="There is no teacher"):
        DistillationTrainer(**common)
    with pytest.raises(ValueError, match="student's own object"):
        DistillationTrainer(**common, teacher_model=student)
    with pytest.raises(ValueError, match="student's own object"):  # its base, under LoRA: loss 0 for ever
        DistillationTrainer(**common, teacher_model=student, peft_config=LORA)
    with pytest.raises(ValueError, match="no-such-teacher` is neither a folder"):
        DistillationTrainer(**common, teacher_model="./no-such-teacher")
    with pytest.raises(ValueError, match="head has 260 ids and the teacher's 264"):
        DistillationTrainer(**common, teacher_model=qwen3(1, vocab_size=264))


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path):
    teacher, tok = qwen3(1), tokenizer(special=("<|endoftext|>", "<|im_end|>", "<|im_start|>"))
    teacher.save_pretrained(tmp_path / "teacher")
    tok.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"2 of 259 token ids differ.\n  id 257: student '<\|im_start\|>', teacher"):
        DistillationTrainer(
            qwen3(),
            str(tmp_path / "teacher"),
            DistillationConfig(str(tmp_path), **QUIET),
            train_dataset=text_rows(2),
            processing_class=tokenizer(),
        )
