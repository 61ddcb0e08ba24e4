"""Rows that have ended leave the batch: the tokens of `generate`, its distribution, and less work."""

import itertools
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_distillation_trainer import build
from test_objective_wiring import OURS
from tiny import llama, qwen3
from training import text_rows
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

from trl_opd.generation import ended_rows_leave, why_rows_stay
from trl_opd.rollout import continue_prompts

STOP, PAD = 258, 256
PROMPTS = [[65, 66, 67], [70], [80, 81, 82, 83, 84, 85], [90, 91], [72]]


def mistral():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, initializer_range=0.1, max_position_embeddings=128,
    )  # fmt: skip
    return MistralForCausalLM(config)


def lora():
    return get_peft_model(qwen3(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


class EndsAt:
    """Rows end after 3, 7, 5, 12 and 1 tokens, whichever order they stand in: known by their first real token."""

    ENDS = {65: 3, 70: 7, 80: 5, 90: 12, 72: 1}  # noqa: RUF012

    def __init__(self, prompts):
        self.prompts = prompts

    def __call__(self, ids, scores):
        for row, tokens in enumerate(ids.tolist()):
            real = tokens[next(i for i, t in enumerate(tokens) if t != PAD) :]
            new = len(real) - len(next(p for p in self.prompts if real[: len(p)] == p))
            scores[row, STOP] = 1e9 if new + 1 >= self.ENDS[real[0]] else -1e9
            scores[row, PAD] = -1e9
        return scores


def batch(prompts=PROMPTS):
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def config(**kwargs):
    return GenerationConfig(
        **{"max_new_tokens": 10, "do_sample": False, "pad_token_id": PAD, "eos_token_id": STOP} | kwargs
    )


@pytest.mark.parametrize("make", [qwen3, llama, mistral, lora])
@pytest.mark.parametrize("padded", [True, False])
def test_greedy_tokens_are_those_of_generate(make, padded):
    """Ends of 1 to 10 tokens (one row reaches `max_new_tokens`), with padding on the left and without."""
    model = make().eval()
    prompts = PROMPTS if padded else [[65], [70]]
    given = {**batch(prompts), "generation_config": config(), "logits_processor": [EndsAt(prompts)]}
    plain = model.generate(**given)
    sizes = []
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    inner.model.register_forward_pre_hook(lambda m, a, k: sizes.append(len(k["input_ids"])), with_kwargs=True)
    with ended_rows_leave(model):
        left = model.generate(**given)
    assert torch.equal(left, plain)
    assert sizes == ([5, 4, 4, 3, 3, 2, 2, 1, 1, 1] if padded else [2, 2, 2, 1, 1, 1, 1])
    assert "generate" not in vars(model)


def test_a_generate_that_a_script_has_replaced_is_called_as_it_is():
    """Another way of writing, put in place of `model.generate`: it stays, and gets no argument it may not know."""
    model = qwen3().eval()
    ids = batch()["input_ids"]
    model.generate = lambda input_ids: torch.cat([input_ids, input_ids], dim=1)
    for _ in range(2):
        with ended_rows_leave(model):
            assert model.generate(input_ids=ids).shape == (5, 12)
    assert why_rows_stay(model, config()) == "the model's `generate` was replaced"


def test_processors_that_count_from_the_prompt_still_do():
    """`min_new_tokens` looks at the length of the prompt, `no_repeat_ngram_size` at all tokens."""
    model = qwen3().eval()
    asked = config(min_new_tokens=4, no_repeat_ngram_size=2, eos_token_id=list(range(0, 260, 2)), max_new_tokens=12)
    plain = model.generate(**batch(), generation_config=asked)
    with ended_rows_leave(model):
        assert torch.equal(model.generate(**batch(), generation_config=asked), plain)


def probabilities(model, prompt, tokens, longest, temperature):
    """Of every completion over a few tokens, the last of which stops, by the model's own logits."""
    table = {}
    for n in range(1, longest + 1):
        for completion in itertools.product(tokens, repeat=n):
            if tokens[-1] in completion[:-1] or (n < longest and completion[-1] != tokens[-1]):
                continue
            ids = torch.tensor([[*prompt, *completion]])
            logits = model(ids).logits[0, len(prompt) - 1 : -1][:, list(tokens)] / temperature
            chosen = torch.tensor([tokens.index(token) for token in completion])
            table[completion] = logits.log_softmax(-1).gather(1, chosen[:, None]).sum().exp().item()
    return table


@torch.no_grad()
def test_samples_have_the_models_distribution():
    """3 tokens and a stop, completions of 1 to 3 tokens from two prompts of different lengths: chi-square against the
    probabilities by enumeration. 40 and 40 cells; the 99.99th percentile of χ² with 39 degrees is 80."""
    model, tokens, temperature = qwen3().eval(), (65, 70, 80, STOP), 0.7
    prompts = [[66, 67], [90, 91, 92, 93]]
    asked = config(
        do_sample=True, top_k=0, temperature=temperature, max_new_tokens=3,
        suppress_tokens=[i for i in range(260) if i not in tokens],
    )  # fmt: skip
    torch.manual_seed(0)
    count = 6000
    with ended_rows_leave(model):
        written = model.generate(**batch([prompts[i % 2] for i in range(2 * count)]), generation_config=asked)
    for which, prompt in enumerate(prompts):
        expected = probabilities(model, prompt, tokens, 3, temperature)
        assert len(expected) == 40 and sum(expected.values()) == pytest.approx(1, abs=1e-5)
        seen = dict.fromkeys(expected, 0)
        for row in written[which::2, 4:].tolist():
            end = row.index(STOP) + 1 if STOP in row else len(row)
            assert all(token == PAD for token in row[end:])
            seen[tuple(row[:end])] += 1
        chi_square = sum((seen[c] - count * p) ** 2 / (count * p) for c, p in expected.items())
        assert chi_square < 80, chi_square


def test_the_teachers_completions_leave_too():
    model = qwen3().eval()
    asked = config(do_sample=True, eos_token_id=list(range(0, 260, 3)))
    texts, works = [], []
    for leave in (False, True):
        works.append([])
        handle = model.model.register_forward_pre_hook(
            lambda m, a, k: works[-1].append(len(k["input_ids"])), with_kwargs=True
        )
        torch.manual_seed(3)
        texts.append(
            continue_prompts(
                model, PROMPTS, asked, pad_token_id=PAD, stop_ids=set(asked.eos_token_id), rows_leave=leave
            )
        )
        handle.remove()
    assert [text[0] for text in texts[0]] == [text[0] for text in texts[1]]  # the first draw is from the same state
    assert set(works[0]) == {5} and sorted(works[1], reverse=True) == works[1] and works[1][-1] < 5


def test_why_rows_stay():
    model = qwen3()
    assert why_rows_stay(model, config()) == "" and why_rows_stay(model, config(do_sample=True)) == ""
    assert why_rows_stay(model, config(num_beams=2)) == "generation is beam_search"
    assert "cache_implementation" in why_rows_stay(model, config(cache_implementation="static"))
    assert why_rows_stay(model, config(guidance_scale=2.0)).startswith("`guidance_scale` keep a state")
    assert "`repetition_penalty`" in why_rows_stay(model, config(repetition_penalty=1.1))
    assert why_rows_stay(model, config(repetition_penalty=1.0, guidance_scale=1.0)) == ""
    assert why_rows_stay(model, config(use_cache=False)) == "there is no cache"
    assert why_rows_stay(model, config(do_sample=True, num_return_sequences=2)).startswith("several sequences")


def rolled_out(tmp_path, **options):
    student = qwen3()
    student.generation_config.eos_token_id = list(range(0, 260, 4))
    trainer, _ = build(*OURS, tmp_path, student=student, fixed=False, **{"max_completion_length": 20} | options)
    sizes = []
    student.model.register_forward_pre_hook(
        lambda m, a, k: sizes.append(len(k["input_ids"])) if not m.training else None, with_kwargs=True
    )
    trainer.train()
    return trainer, sizes


def test_rollouts_leave_and_are_the_same_every_time(tmp_path, caplog):
    runs = [rolled_out(tmp_path, max_steps=2) for _ in range(2)]
    logs = [[log["loss"] for log in trainer.state.log_history if "loss" in log] for trainer, _ in runs]
    assert logs[0] == logs[1] and len(logs[0]) == 2
    sizes = runs[0][1]
    assert max(sizes) == 4 and min(sizes) < 4 and sizes == runs[1][1]


def test_rollouts_can_be_told_to_stay(tmp_path, caplog):
    _, sizes = rolled_out(tmp_path, ended_rows_leave=False)
    assert set(sizes) == {4}
    with caplog.at_level(logging.INFO):
        _, sizes = rolled_out(tmp_path, generation_kwargs={"cache_implementation": "static"})
    assert (
        set(sizes) == {4} and "rollouts: rows that have ended stay in the batch: `cache_implementation`" in caplog.text
    )


def test_seq_kd_leaves_as_the_student_does(tmp_path):
    teacher = qwen3(1, hidden=48)
    student = qwen3()
    student.generation_config.eos_token_id = list(range(0, 260, 4))
    options = {"lmbda": 0.0, "seq_kd": True, "max_completion_length": 20, "rows": text_rows(4)}
    trainer, _ = build(*OURS, tmp_path, student=student, teacher=teacher, fixed=False, **options)
    sizes = []
    teacher.model.register_forward_pre_hook(lambda m, a, k: sizes.append(tuple(k["input_ids"].shape)), with_kwargs=True)
    trainer.train()
    written = [rows for rows, new in sizes if new == 1]
    assert sizes[0][0] == 4 and written == sorted(written, reverse=True) and written[-1] < 4
