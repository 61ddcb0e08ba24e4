"""Every objective, weight and kind of head reaches the gradient of a step: against full logits, a row at a time."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain import gradients_of, mean_over_tokens, row_logits
from test_distillation_trainer import build, gradients
from test_sft_trainer import gradients as sft_gradients
from tiny import llama, qwen3, tokenizer
from training import answers_for, assert_same_gradients, text_rows
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

import trl_opd.losses as losses
from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer

OURS = (DistillationTrainer, DistillationConfig)


def rows_of(n=4):
    return [(list(prompt), answer) for prompt, answer in answers_for(text_rows(n), tokenizer()).items()]


def pair(student=None, teacher=None):
    """The student and teacher that `build` makes, a second time."""
    return student or qwen3(), (teacher or qwen3(seed=1, hidden=48)).eval().requires_grad_(False)


def log_pq(student, teacher, prompt, completion, tau=1.0):
    return [torch.log_softmax(row_logits(m, prompt, completion) / tau, -1) for m in (student, teacher)]


def sampled(log_p, log_q, completion, kind, **numbers):
    index = torch.tensor(completion)[:, None]
    log_p_y, log_q_y = log_p.gather(1, index).squeeze(1), log_q.gather(1, index).squeeze(1)
    return -losses.token_reward(log_p_y, log_q_y, kind, **numbers) * log_p_y


FORMULAS = {
    "skew_forward_kl": ({"skew_alpha": 0.3}, lambda p, q, c: losses.skew_forward_kl(p, q, 0.3)),
    "skew_reverse_kl": ({"skew_alpha": 0.3}, lambda p, q, c: losses.skew_reverse_kl(p, q, 0.3)),
    "tvd": ({}, lambda p, q, c: losses.total_variation(p, q)),
    "divergence": ({"beta": 0.3}, lambda p, q, c: losses.jensen_shannon(p, q, 0.3)),
}
REWARDS = {
    "log_ratio": ({}, {}),
    "clip": ({"reward_bound": 0.1}, {"bound": 0.1}),
    "tanh": ({"reward_bound": 0.7}, {"bound": 0.7}),
    "power": ({"reward_power": 2.0}, {"power": 2.0}),
}


@pytest.mark.parametrize("tau", [1.0, 0.7])
@pytest.mark.parametrize("objective", FORMULAS)
def test_objective_reaches_the_gradient(tmp_path, objective, tau):
    options, formula = FORMULAS[objective]
    ours, log = gradients(*OURS, tmp_path, objective=objective, temperature=tau, **options)
    student, teacher = pair()
    loss = mean_over_tokens(rows_of(), lambda p, c: formula(*log_pq(student, teacher, p, c, tau), c))
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)


@pytest.mark.parametrize("reward", REWARDS)
def test_policy_gradient_reaches_the_gradient(tmp_path, reward):
    options, numbers = REWARDS[reward]
    ours, log = gradients(*OURS, tmp_path, objective="policy_gradient", reward=reward, **options)
    student, teacher = pair()
    loss = mean_over_tokens(rows_of(), lambda p, c: sampled(*log_pq(student, teacher, p, c), c, reward, **numbers))
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)
    rewards = torch.cat(
        [
            losses.token_reward(*(x.gather(1, torch.tensor(c)[:, None]).squeeze(1) for x in both), reward, **numbers)
            for both, c in ((log_pq(student, teacher, p, c), c) for p, c in rows_of())
        ]
    )
    assert log["distill/reward"] == pytest.approx(rewards.mean().item(), rel=1e-3)
    assert log["distill/reward_variance"] == pytest.approx(rewards.var(correction=0).item(), rel=1e-3)
    for name, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
        exact = rewards.sort().values[math.ceil(share * len(rewards)) - 1].item()
        assert log[f"distill/reward_{name}"] == pytest.approx(exact, rel=0.06, abs=1e-3), name


def test_loss_top_k_is_taken_over_the_support_and_its_tail(tmp_path):
    ours, log = gradients(*OURS, tmp_path, loss_top_k=5)
    student, teacher = pair()

    def per_token(prompt, completion):
        log_p, log_q = log_pq(student, teacher, prompt, completion)
        total = []
        for a, b in zip(log_p.exp().double(), log_q.exp().double(), strict=True):  # by sets of ids, one position a time
            ids = sorted(set(a.topk(5).indices.tolist()) | set(b.topk(5).indices.tolist()))
            a, b = (torch.cat([x[ids], 1 - x[ids].sum(0, keepdim=True)]) for x in (a, b))
            total.append((a * (a / b).log()).sum())
        return torch.stack(total)

    loss = mean_over_tokens(rows_of(), per_token)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert 0 < log["distill/student_top_k_mass"] < 1 and 0 < log["distill/teacher_top_k_mass"] < 1
    assert log["loss"] < log["distill/reverse_kl"]
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)


def test_metrics_are_those_of_the_two_models(tmp_path):
    _, log = gradients(*OURS, tmp_path, objective="tvd")
    student, teacher = pair()
    both = [log_pq(student, teacher, p, c) for p, c in rows_of()]
    log_p, log_q = torch.cat([a for a, _ in both]), torch.cat([b for _, b in both])
    expected = {
        "entropy": -(log_p.exp() * log_p).sum(1),
        "distill/teacher_entropy": -(log_q.exp() * log_q).sum(1),
        "distill/forward_kl": (log_q.exp() * (log_q - log_p)).sum(1),
        "distill/reverse_kl": (log_p.exp() * (log_p - log_q)).sum(1),
        "distill/top1_agreement": (log_p.argmax(1) == log_q.argmax(1)).float(),
    }
    for name, values in expected.items():
        assert log[name] == pytest.approx(values.mean().item(), rel=1e-4), name
    _, quiet = gradients(*OURS, tmp_path, log_token_metrics=False)
    assert "entropy" in quiet and not any(name in quiet for name in expected if name != "entropy")


SMOOTHED = pytest.mark.feature("`label_smoothing_factor`", job="sft", model="full")


@pytest.mark.parametrize(
    "option", [pytest.param({"label_smoothing_factor": 0.1}, marks=SMOOTHED), {"loss_type": "dft"}], ids=str
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_sft_options_equal_trl(tmp_path, option, accumulation):
    import trl

    same = {**option, "gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4 // accumulation}
    ours, log = sft_gradients(SFTTrainer, SFTConfig, tmp_path, **same)
    theirs, trl_log = sft_gradients(trl.SFTTrainer, trl.SFTConfig, tmp_path, **same)
    assert log["loss"] == pytest.approx(trl_log["loss"], rel=1e-4)
    assert_same_gradients(ours, theirs, rtol=1e-4)


# --- heads -----------------------------------------------------------------------------------------------------------

ON_HEAD = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
COPIED = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
HEADS = {
    "untied, LoRA on it": (llama, ON_HEAD),
    "tied, LoRA on it": (qwen3, ON_HEAD),
    "untied, a trained copy": (llama, COPIED),
    "tied, a trained copy": (qwen3, COPIED),
}


def seeded_peft(model, config, seed=7):
    torch.manual_seed(seed)
    peft = get_peft_model(model, config)
    with torch.no_grad():  # a trained copy starts as the original: move it, so that mistaking one for the other shows
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return peft


@pytest.mark.feature("LoRA on the head", job="distill", model="lora")
@pytest.mark.parametrize("case", HEADS)
def test_an_adapter_on_the_students_head_is_trained(tmp_path, case):
    make, config = HEADS[case]
    ours, log = gradients(*OURS, tmp_path, student=seeded_peft(make(), config), teacher=qwen3(seed=1, hidden=48))
    student, teacher = pair(seeded_peft(make(), config))
    loss = mean_over_tokens(rows_of(), lambda p, c: losses.reverse_kl(*log_pq(student, teacher, p, c)))
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert any("lm_head" in name for name in ours)
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)


@pytest.mark.parametrize("case", HEADS)
def test_an_adapter_on_the_teachers_head_is_seen(tmp_path, case):
    make, config = HEADS[case]
    ours, log = gradients(*OURS, tmp_path, teacher=seeded_peft(make(seed=1), config))
    student, teacher = pair(teacher=seeded_peft(make(seed=1), config))
    loss = mean_over_tokens(rows_of(), lambda p, c: losses.reverse_kl(*log_pq(student, teacher, p, c)))
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)


@pytest.mark.feature("LoRA on the head", job="sft", model="lora")
@pytest.mark.parametrize("case", HEADS)
def test_sft_trains_an_adapter_on_the_head(tmp_path, case):
    make, config = HEADS[case]
    ours, log = sft_gradients(SFTTrainer, SFTConfig, tmp_path, model=seeded_peft(make(), config))
    student = seeded_peft(make(), config)

    def nll(prompt, completion):
        log_p = torch.log_softmax(row_logits(student, prompt, completion), -1)
        return -log_p.gather(1, torch.tensor(completion)[:, None]).squeeze(1)

    loss = mean_over_tokens(rows_of(), nll)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)


def gemma2(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(
        vocab_size=260,
        **sizes,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        final_logit_softcapping=2.0,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=257,
    )
    return Gemma2ForCausalLM(config)


def cohere(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CohereConfig(vocab_size=260, **sizes, logit_scale=0.25, initializer_range=0.3, eos_token_id=258)
    config.pad_token_id, config.bos_token_id = 256, 257
    return CohereForCausalLM(config)


SCALED = [
    pytest.param(
        peft, marks=pytest.mark.feature("Gemma-, Cohere- and Granite-style heads", job="distill", model=model), id=name
    )
    for peft, model, name in ((None, "full", "plain"), (ON_HEAD, "lora", "LoRA on it"))
]


@pytest.mark.parametrize("make", [gemma2, cohere])
@pytest.mark.parametrize("peft", SCALED)
def test_softcap_and_scale_on_both_sides(tmp_path, make, peft):
    def students():
        return make() if peft is None else seeded_peft(make(), peft)

    ours, log = gradients(*OURS, tmp_path, student=students(), teacher=make(seed=3))
    student, teacher = pair(students(), make(seed=3))
    loss = mean_over_tokens(rows_of(), lambda p, c: losses.reverse_kl(*log_pq(student, teacher, p, c)))
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-3)


# --- anchor and mixing -----------------------------------------------------------------------------------------------
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_anchor_is_the_kl_to_where_the_student_started(tmp_path, lora):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")

    def students():
        return seeded_peft(qwen3(), config) if lora else qwen3()

    ours, log = gradients(*OURS, tmp_path, student=students(), anchor_weight=0.7, temperature=0.5)
    student, teacher = pair(students())
    base = qwen3()  # the start: LoRA's base is not where this adapter stands

    def per_token(prompt, completion):
        anchor = losses.forward_kl(*log_pq(student, base, prompt, completion))
        return losses.reverse_kl(*log_pq(student, teacher, prompt, completion, 0.5)) + 0.7 * anchor

    loss = mean_over_tokens(rows_of(), per_token)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert (log["distill/anchor_kl"] > 1e-4) == lora
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)


def mixed(tmp_path, **kwargs):
    """A step on 8 rows whose dataset completions are another letter than the student's."""
    rows = text_rows(8).map(lambda row, i: {"completion": "z" * (i + 1)}, with_indices=True)
    trainer, recorder = build(*OURS, tmp_path, n=8, rows=rows, per_device_train_batch_size=8, lmbda=0.5, **kwargs)
    trainer.train()
    asked = {prompt for window in trainer.asked for prompt in window}
    return recorder.steps[0], trainer.state.log_history[0], asked, rows


def test_mixing_takes_each_row_from_one_side_with_one_denominator(tmp_path):
    ours, log, asked, rows = mixed(tmp_path, sft_weight=0.3)
    tok = tokenizer()
    own = [(p, c) for p, c in rows_of(8) if tuple(p) in asked]
    given = [
        (tok(row["prompt"])["input_ids"], [*tok(row["completion"])["input_ids"], tok.eos_token_id])
        for row in rows
        if tuple(tok(row["prompt"])["input_ids"]) not in asked
    ]
    assert own and given and len(own) + len(given) == 8
    student, teacher = pair()

    def per_token(prompt, completion):
        log_p, log_q = log_pq(student, teacher, prompt, completion)
        value = losses.reverse_kl(log_p, log_q)
        if (prompt, completion) in given:
            value = value - 0.3 * log_p.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        return value

    loss = mean_over_tokens(own + given, per_token)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert log["distill/num_tokens_per_step"] == sum(len(c) for _, c in own + given)
    assert log["distill/on_policy_rows"] == pytest.approx(len(own) / 8)
    assert log["completions/mean_length"] == pytest.approx(sum(len(c) for _, c in own) / len(own))
    assert_same_gradients(ours, gradients_of(loss, student), rtol=1e-4)


def test_mixing_is_drawn_row_by_row_and_anew_each_epoch(tmp_path):
    epochs = {"per_device_train_batch_size": 4, "max_steps": -1, "num_train_epochs": 30}
    trainer, _ = build(*OURS, tmp_path, n=7, rows=text_rows(7), lmbda=0.5, **epochs)
    trainer.train()
    share = sum(len(window) for window in trainer.asked) / (30 * 8)
    assert 0.4 < share < 0.6  # 240 draws: standard deviation 0.032
    assert len({tuple(sorted(window)) for window in trainer.asked}) > 10


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lmbda": 1.5}, "lmbda is 1.5"),
        ({"sft_weight": 0.5}, "with `lmbda: 1` the student writes every completion"),
        ({"sft_weight": -1.0, "lmbda": 0.5}, "sft_weight is -1.0"),
        ({"objective": "kl"}, "Unknown objective 'kl'; it must be one of"),
        ({"objective": "cross_entropy"}, "has no teacher"),
        ({"objective": "policy_gradient", "top_p": 0.9}, "`top_p: 0.9` changes them.*Set `top_p: 1.0`"),
        ({"objective": "policy_gradient", "generation_kwargs": {"num_beams": 4}}, "`num_beams: 4` changes them"),
        ({"objective": "policy_gradient", "generation_kwargs": {"temperature": 0.3}}, "`temperature: 0.3`"),
        ({"objective": "policy_gradient", "lmbda": 0.5}, "Set `lmbda: 1`"),
        ({"objective": "policy_gradient", "reward": "ratio"}, "reward is 'ratio'"),
        ({"objective": "policy_gradient", "loss_top_k": 8}, "looks at one token only"),
        ({"skew_alpha": 1.0}, "skew_alpha is 1.0"),
        ({"importance_clip": [2.0, 1.0]}, "importance_clip"),
        ({"teacher_kind": "oracle"}, "teacher_kind is 'oracle'"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        DistillationConfig(str(tmp_path), report_to="none", **options)


def test_mixing_without_a_completion_in_the_dataset_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has a column `prompt` but no `completion`"):
        build(*OURS, tmp_path, lmbda=0.5)
