"""Rollouts: prompts by policy, completions masked, cut, repeated and reused, each with a count that is logged."""

import pytest
import torch
from datasets import Dataset
from plain import gradients_of, row_logits
from test_distillation_trainer import build
from test_objective_wiring import OURS, log_pq, pair
from tiny import qwen3, tokenizer
from training import assert_same_gradients, text_rows

import trl_opd.losses as losses
from trl_opd import DistillationConfig
from trl_opd.data.sampler import WindowSampler
from trl_opd.rollout import counts_by_step, horizon, parse_schedule, repetition


def logs(trainer):
    return [log for log in trainer.state.log_history if "loss" in log]


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_long_prompts_by_policy(tmp_path):
    rows = Dataset.from_list([{"prompt": "abcdefgh"}, {"prompt": "ab"}, {"prompt": "abc"}])
    same = {"rows": rows, "fixed": False, "max_prompt_length": 4}
    message = (
        "1 of 3 rows .* longer than `max_prompt_length: 4`.*Set `max_prompt_length: 8`, or `prompt_overflow: drop`"
    )
    with pytest.raises(ValueError, match=message):
        build(*OURS, tmp_path, **same)
    trainer, _ = build(*OURS, tmp_path, **same, prompt_overflow="drop")
    assert len(trainer.train_dataset) == 2
    assert trainer.data_reports[0].dropped == {"longer than max_prompt_length": 1}
    trainer, _ = build(*OURS, tmp_path, **same, prompt_overflow="truncate_left")
    assert tokenizer().decode(trainer.train_dataset[0]["prompt_ids"]) == "efgh"
    assert (
        trainer.data_reports[0].cut_prompts == 1 and "cut at max_prompt_length" in trainer.data_reports[0].warnings()[0]
    )


def test_a_reference_loses_the_same_start_as_its_prompt(tmp_path):
    rows = Dataset.from_list([{"prompt": "abcdefgh", "completion": "xy"}] * 2)
    options = {"max_prompt_length": 4, "prompt_overflow": "truncate_left", "lmbda": 0.5}
    trainer, _ = build(*OURS, tmp_path, rows=rows, fixed=False, **options)
    row = trainer.train_dataset[0]
    assert tokenizer().decode(row["reference_ids"]) == "efghxy<|im_end|>"
    assert row["reference_labels"][:4] == [-100] * 4 and row["reference_labels"][4:] == row["reference_ids"][4:]


def test_a_prompt_longer_than_the_models_positions_is_found_before_training(tmp_path):
    rows = Dataset.from_list([{"prompt": "a" * 600}] * 2)
    with pytest.raises(
        ValueError,
        match="600 tokens and 8 new ones are longer than the model's 512 positions",
    ):
        build(*OURS, tmp_path, rows=rows, fixed=False)


# --- completions -----------------------------------------------------------------------------------------------------


def test_truncated_completions_are_masked_and_counted(tmp_path):
    """`answers_for` gives 1, 40, 3 and 25 letters and a stop token: with a full length of 41 none is cut; cut by
    hand."""
    trainer, _ = build(*OURS, tmp_path, mask_truncated_completions=True, max_completion_length=26)
    inner = trainer._generate_single_turn
    trainer._generate_single_turn = lambda *args: [ids[:26] for ids in inner(*args)]
    trainer.train()
    log = logs(trainer)[0]
    assert log["distill/num_tokens_per_step"] == 2 + 4 + 26  # 1, 3 and 25 letters; the 40 are out
    assert log["distill/masked_completions"] == 0.25 and log["completions/clipped_ratio"] == 0.25


def test_every_completion_truncated_three_times_is_an_error(tmp_path):
    trainer, _ = build(*OURS, tmp_path, mask_truncated_completions=True, max_completion_length=8, max_steps=5)
    trainer._generate_single_turn = lambda prompts, *_: [[65] * 8 for _ in prompts]
    with pytest.raises(RuntimeError, match=r"3 steps in a row[\s\S]*`mask_truncated_completions: false`"):
        trainer.train()


def test_schedule_is_read_and_refused_by_part():
    assert parse_schedule("64@0.0, 256@0.3,1024@0.7", 1024) == [(0.0, 64), (0.3, 256), (0.7, 1024)]
    steps = [(0.0, 64), (0.3, 256), (0.7, 1024)]
    assert [horizon(steps, x) for x in (0.0, 0.29, 0.3, 0.69, 1.0)] == [64, 64, 256, 256, 1024]
    for text, message in (
        ("64", "`64` is not `tokens@share`"),
        ("64@0.1", "start at 0.0"),
        ("64@0.0,32@0.0", "rise"),
        ("64@0.0,2000@0.5", "2000 is not between 1 and `max_completion_length: 1024`"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_schedule(text, 1024)


def test_rollouts_follow_the_schedule_and_an_early_end_is_not_truncation(tmp_path):
    options = {"completion_length_schedule": "2@0.0,6@0.5", "max_completion_length": 8, "max_steps": 4}
    trainer, _ = build(*OURS, tmp_path, fixed=False, mask_truncated_completions=True, **options)
    trainer.train()
    assert [log["distill/horizon"] for log in logs(trainer)] == [2, 2, 6, 6]
    assert [log["completions/max_length"] for log in logs(trainer)] == [2, 2, 6, 6]
    assert all(log["distill/masked_completions"] == 0 for log in logs(trainer))


def test_repetition_by_hand():
    """abcabcabc has 6 4-grams over 3 letters, 3 of them different; a text without repeats has 0; a loop nears 1."""
    assert repetition(list(b"abcabcabc")) == pytest.approx(0.5)
    assert repetition(list(b"abcdefg")) == 0.0 and repetition([1]) == 0.0
    assert repetition([7] * 103) == pytest.approx(0.99)


def test_every_prompt_gets_its_generations_in_one_window():
    sampler = WindowSampler(range(5), window=6, repeats=1, seed=3, copies=3)
    slots = list(sampler)
    assert len(slots) == len(sampler) == 3 * 6  # windows of two prompts: 5 rows and one filler
    for start in range(0, len(slots), 3):
        assert len({slot.row for slot in slots[start : start + 3]}) == 1
        assert len({slot.draw for slot in slots[start : start + 3]}) == 3
    assert sum(slot.weight for slot in slots) == 15


def test_generations_of_one_prompt_differ_and_all_count(tmp_path):
    trainer, _ = build(*OURS, tmp_path, n=2, fixed=False, num_generations=2, max_completion_length=12)
    seen = []
    inner = trainer._generate_single_turn

    def noted(prompts, *args):
        completions = inner(prompts, *args)
        seen.append((prompts, completions))
        return completions

    trainer._generate_single_turn = noted
    trainer.train()
    ((prompts, completions),) = seen
    assert prompts[0] == prompts[1] and prompts[2] == prompts[3] and prompts[0] != prompts[2]
    assert completions[0] != completions[1]
    assert logs(trainer)[0]["distill/num_tokens_per_step"] == sum(map(len, completions))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "multiple of `gradient_accumulation_steps: 2`"),
        ({"num_generations": 3, "per_device_train_batch_size": 4}, "holds 4 completions.*no multiple"),
        ({"num_generations": 0}, "num_generations is 0"),
        ({"seq_kd": True}, "seq_kd is true, but with `lmbda: 1`"),
        ({"max_prompt_length": 0}, "max_prompt_length is 0"),
        ({"completion_length_schedule": "64"}, "completion_length_schedule"),
    ],
)
def test_counts_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        DistillationConfig(str(tmp_path), report_to="none", **options)


# --- one rollout, several steps --------------------------------------------------------------------------------------


def test_counts_by_step_by_hand():
    """Two ranks of two rows, two steps: step 0 is the first row of either rank."""
    table = torch.zeros(4, 7)
    table[:, 3], table[:, 5] = torch.tensor([1, 10, 100, 1000]), torch.tensor([1, 1, 1, 0])
    assert counts_by_step(table, 2, 2) == [(101, 2), (1010, 1)]
    assert counts_by_step(table, 2, 1) == [(1111, 3)]


def test_several_steps_from_one_rollout(tmp_path):
    """4 prompts, a row a step: one rollout, four steps, each with its own N; the last one three steps stale."""
    options = {"per_device_train_batch_size": 1, "steps_per_generation": 4, "max_steps": 4}
    trainer, _ = build(*OURS, tmp_path, **options)
    trainer.train()
    assert len(trainer.asked) == 1 and len(trainer.asked[0]) == 4
    assert sorted(log["distill/num_tokens_per_step"] for log in logs(trainer)) == [2, 4, 26, 41]
    assert [log["distill/staleness"] for log in logs(trainer)] == [0, 1, 2, 3]


def test_stale_samples_are_weighed_by_the_importance_ratio(tmp_path):
    """Two steps from one rollout: the second step's gradient, by hand, from the weights after the first."""
    options = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "max_steps": 2, "learning_rate": 0.02}
    options |= {"objective": "policy_gradient", "importance_clip": [0.5, 1.5], "temperature": 0.8, "optim": "sgd"}
    trainer, recorder = build(*OURS, tmp_path, lr_scheduler_type="constant", **options)
    trainer.train()
    first, second = logs(trainer)
    assert first["distill/importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert second["distill/importance_ratio"] != pytest.approx(1.0, abs=1e-3)

    before, teacher = pair()
    after = qwen3()
    with torch.no_grad():
        for name, parameter in after.named_parameters():
            parameter -= 0.02 * recorder.steps[0][name]
    tok = tokenizer()
    answers = {tuple(tok(r["prompt"])["input_ids"]): [*tok(r["completion"])["input_ids"], 258] for r in text_rows(4)}
    assert tok.eos_token_id == 258
    rows = [(list(prompt), answers[prompt]) for prompt in trainer.asked[0][2:]]
    total, ratios = 0.0, []
    for prompt, completion in rows:
        index = torch.tensor(completion)[:, None]
        log_p, log_q = (x.gather(1, index).squeeze(1) for x in log_pq(after, teacher, prompt, completion, 0.8))
        old = torch.log_softmax(row_logits(before, prompt, completion) / 0.8, -1).gather(1, index).squeeze(1)
        ratio = (log_p - old).exp().clamp(0.5, 1.5).detach()
        ratios.append(ratio)
        total = total - (ratio * (log_q - log_p).detach() * log_p).sum()
    loss = total / sum(len(c) for _, c in rows)
    assert second["distill/importance_ratio"] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-3)
    assert_same_gradients(recorder.steps[1], gradients_of(loss, after), rtol=1e-3)


def test_a_window_that_ends_in_filler_rows_is_no_streak_of_empty_steps(tmp_path):
    """1 prompt in a window of 8 steps: seven steps have filler rows only, which says nothing about the completions."""
    options = {"n": 1, "per_device_train_batch_size": 1, "steps_per_generation": 8, "max_steps": 8}
    trainer, _ = build(*OURS, tmp_path, **options)
    trainer.train()
    assert [log["distill/empty_steps"] for log in logs(trainer)] == [0] + [1] * 7


# --- sequence-level distillation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lmbda", [0.0, 0.5])
def test_seq_kd_lets_the_teacher_write(tmp_path, lmbda):
    """A teacher that says `z` whatever comes before: rows that the student does not write are all `z`."""
    teacher = qwen3(seed=1, hidden=48, tie_word_embeddings=False)
    z = tokenizer()("z")["input_ids"][0]
    with torch.no_grad():
        teacher.lm_head.weight.zero_()
        teacher.lm_head.weight[z] = 100 * teacher.model.norm.weight.sign()
        teacher.model.layers[-1].mlp.down_proj.weight.zero_()
    options = {"lmbda": lmbda, "seq_kd": True, "sft_weight": 0.1, "max_completion_length": 5}
    trainer, _ = build(*OURS, tmp_path, n=8, per_device_train_batch_size=8, teacher=teacher, **options)
    written = []
    inner = trainer.teacher.write
    trainer.teacher.write = lambda *args, **kwargs: written.append(inner(*args, **kwargs)) or written[-1]
    trainer.train()
    (texts,) = written
    log = logs(trainer)[0]
    assert len(texts) == 8 - sum(len(window) for window in getattr(trainer, "asked", []))
    assert all(len(ids) == 5 for ids in texts)
    assert log["distill/on_policy_rows"] == pytest.approx(1 - len(texts) / 8) and "distill/sft_loss" in log


# --- vocabularies of different size ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(320, 328), (328, 320)])
def test_shared_ids_in_loss_and_sampling(tmp_path, sizes):
    """Both know the tokenizer's 259 tokens: the divergence is the one of the first 259 logits, and nothing else is
    sampled, though the student would say little else."""
    student, teacher = (qwen3(seed=i, vocab_size=v, tie_word_embeddings=False) for i, v in enumerate(sizes))
    tok = tokenizer()
    shared = len(tok)
    folders = [str(tmp_path / name) for name in ("student", "teacher")]
    for model, folder in zip((student, teacher), folders, strict=True):
        model.save_pretrained(folder)
        tok.save_pretrained(folder)
    trainer, recorder = build(*OURS, tmp_path / "out", student=student, teacher=folders[1], max_completion_length=6)
    assert trainer._shared_ids == shared
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    trainer.train()
    reference = qwen3(seed=0, vocab_size=sizes[0], tie_word_embeddings=False)
    reference.load_state_dict(before)
    total, count = 0.0, 0
    from test_objective_wiring import rows_of

    for prompt, completion in rows_of():
        cut = [row_logits(model, prompt, completion)[:, :shared] for model in (reference, teacher)]
        total = total + losses.reverse_kl(*(torch.log_softmax(x, -1) for x in cut)).sum()
        count += len(completion)
    assert logs(trainer)[0]["loss"] == pytest.approx((total / count).item(), rel=1e-4)
    gradients = gradients_of(total / count, reference)
    assert not gradients["lm_head.weight"][shared:].any()
    assert_same_gradients(recorder.steps[0], gradients, rtol=1e-4)

    with torch.no_grad():  # what the teacher has no id for, the student wants most
        trainer.model.lm_head.weight[shared:] = 50 * trainer.model.lm_head.weight[:1]
        trainer.model.lm_head.weight[shared + 1 :] *= -1
    del type(trainer)._generate_single_turn  # TRL's own
    trainer.model.eval()
    ids = [i for row in trainer._generate_single_turn([[65, 66]] * 20, None, {}) for i in row]
    assert ids and max(ids) < shared


def test_a_dataset_token_that_the_teacher_lacks_is_an_error(tmp_path):
    student, teacher = qwen3(vocab_size=320), qwen3(seed=1, vocab_size=328)
    folder = str(tmp_path / "teacher")
    teacher.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    mine = tokenizer()
    mine.add_tokens(["<|mine|>"], special_tokens=True)
    from training import QUIET

    from trl_opd import DistillationTrainer

    with pytest.raises(ValueError, match=r"only one of the two models has.*<\|mine\|> \(id 259\)"):
        DistillationTrainer(
            model=student,
            teacher_model=folder,
            args=DistillationConfig(str(tmp_path / "out"), **QUIET),
            train_dataset=Dataset.from_list([{"prompt": "a <|mine|>"}]),
            processing_class=mine,
        )


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_logs_both_divergences_and_can_choose_the_best_model(tmp_path):
    trainer, _ = build(*OURS, tmp_path, objective="tvd")
    scores = trainer.evaluate(text_rows(5))
    student, teacher = pair()
    tok, log_p, log_q = tokenizer(), [], []
    for row in text_rows(5):
        completion = [*tok(row["completion"])["input_ids"], tok.eos_token_id]
        a, b = log_pq(student, teacher, tok(row["prompt"])["input_ids"], completion)
        log_p.append(a)
        log_q.append(b)
    log_p, log_q = torch.cat(log_p), torch.cat(log_q)
    expected = {
        "eval_loss": losses.total_variation(log_p, log_q),
        "eval_distill/forward_kl": losses.forward_kl(log_p, log_q),
        "eval_distill/reverse_kl": losses.reverse_kl(log_p, log_q),
        "eval_distill/top1_agreement": (log_p.argmax(1) == log_q.argmax(1)).float(),
    }
    for name, values in expected.items():
        assert scores[name] == pytest.approx(values.mean().item(), rel=1e-4), name


def test_the_best_model_is_kept_by_a_metric_of_the_evaluation(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_distill/reverse_kl"}
    best["greater_is_better"] = False
    trainer, _ = build(*OURS, tmp_path, fixed=False, eval_rows=text_rows(3), learning_rate=0.05, **options, **best)
    trainer.train()
    values = [log["eval_distill/reverse_kl"] for log in trainer.state.log_history if "eval_loss" in log]
    assert len(values) == 3 and trainer.state.best_metric == min(values)
    assert trainer.evaluate()["eval_distill/reverse_kl"] == pytest.approx(min(values), rel=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_metric_of_a_dataset_evaluation_is_independent_of_the_batch(tmp_path, batch):
    scores = []
    for size in (5, batch):
        trainer, _ = build(*OURS, tmp_path, per_device_eval_batch_size=size)
        scores.append(trainer.evaluate(text_rows(5)))
    for name, value in scores[0].items():
        if not name.endswith(("runtime", "per_second")):
            assert scores[1][name] == pytest.approx(value, rel=1e-5), name


def test_exact_match_where_rows_carry_an_answer(tmp_path):
    pytest.importorskip("math_verify")
    rows = Dataset.from_list([{"prompt": f"{i}", "answer": a} for i, a in enumerate(["7", "0.5", "12", "x"])])
    trainer, _ = build(*OURS, tmp_path, per_device_eval_batch_size=2)
    said = {"0": "so it is 7", "1": "1/2", "2": "13", "3": "x"}
    tok = tokenizer()
    trainer._generate_single_turn = lambda prompts, *_: [
        [*tok(said[tok.decode(p)])["input_ids"], tok.eos_token_id] for p in prompts
    ]
    assert trainer.evaluate(rows)["eval_accuracy"] == 0.75


def test_accuracy_that_cannot_be_had_is_an_error(tmp_path):
    trainer, _ = build(*OURS, tmp_path, eval_accuracy=True)
    with pytest.raises(ValueError, match="needs a column `answer`"):
        trainer.evaluate(Dataset.from_list([{"prompt": "a"}]))
    with pytest.raises(ValueError, match="Set `eval_mode: generate`"):
        trainer.evaluate(text_rows(2))


def test_completions_are_kept_as_parquet(tmp_path):
    trainer, _ = build(*OURS, tmp_path, log_completions=True)
    trainer.train()
    (file,) = (tmp_path / "completions").glob("*.parquet")
    import pandas

    table = pandas.read_parquet(file)
    assert list(table.columns) == ["step", "prompt", "completion"] and len(table) == 4


def test_all_stop_tokens_of_the_model_end_a_rollout(tmp_path):
    student = qwen3()
    student.generation_config.eos_token_id = [65, 258]
    trainer, _ = build(*OURS, tmp_path, student=student, fixed=False)
    assert {65, 258} <= set(trainer.eos_token_ids)


def test_vllm_settings_reach_trl_and_what_it_cannot_do_here_is_said(tmp_path):
    config = DistillationConfig(str(tmp_path), report_to="none", use_vllm=True, vllm_mode="colocate")
    assert config.use_vllm and config.vllm_mode == "colocate"
    with pytest.raises(ImportError, match="vLLM"):
        build(*OURS, tmp_path, use_vllm=True)
