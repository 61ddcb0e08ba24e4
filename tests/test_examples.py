"""The examples agree with the package."""

import importlib.util
from pathlib import Path

import pytest
from test_distillation_trainer import build
from tiny import qwen3, tokenizer
from training import answers_for, assert_same_gradients, text_rows

from trl_opd import DistillationConfig, DistillationTrainer

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_flat_loop_takes_the_trainers_loss_and_gradient(tmp_path):
    loop, student = load("opd_loop"), qwen3()
    answers = answers_for(text_rows(4), tokenizer())
    loss = loop.opd_step(
        student, qwen3(1, hidden=48), [list(p) for p in answers], list(answers.values()), tokenizer().pad_token_id, 2
    )
    trainer, recorder = build(DistillationTrainer, DistillationConfig, tmp_path)
    trainer.train()
    assert loss == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-5)
    assert_same_gradients({n: p.grad for n, p in student.named_parameters()}, recorder.steps[0], rtol=1e-4)


def test_the_flat_loop_samples_up_to_the_first_stop_token():
    loop, tok = load("opd_loop"), tokenizer(pad="<|im_end|>")
    prompts = [tok("a")["input_ids"], tok("bcd")["input_ids"]]
    stop = {tok.eos_token_id, tok("e")["input_ids"][0]}
    for completion in loop.sample(qwen3(), prompts, stop, tok.pad_token_id, 30):
        assert 1 <= len(completion) <= 30
        assert not stop & set(completion[:-1]) and (completion[-1] in stop or len(completion) == 30)
