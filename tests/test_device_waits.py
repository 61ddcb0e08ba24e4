"""A micro-batch asks the device for nothing, and a teacher in 16 bits runs in its own precision."""

from collections import Counter

import pytest
import torch
from test_distillation_trainer import build
from test_objective_wiring import OURS
from tiny import qwen3, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from training import QUIET, text_rows

import trl_opd.teachers.local
from trl_opd import SFTConfig, SFTTrainer, heads
from trl_opd.metrics import MetricSums

# what makes the host wait for a GPU: a number read back, a result whose size only the device knows, or a number of
# Python's made a tensor, which is copied there
WAITS = (
    "_local_scalar_dense",
    "lift_fresh",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique",
    "repeat_interleave.Tensor",
)


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        if any(name.startswith(wait) for wait in WAITS):
            self.seen[name] += 1
        if name.startswith("index.Tensor") and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.seen["index by a mask"] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def no_backbone(monkeypatch):
    """States from nowhere: transformers' masks ask the device, and are not what is tested here."""

    def states(model, batch, positions, flat=False):
        width = heads.causal_lm(model).config.hidden_size
        return torch.randn(len(positions), width, generator=torch.Generator().manual_seed(0), requires_grad=True)

    monkeypatch.setattr(heads, "predicting_states", states)
    monkeypatch.setattr(trl_opd.teachers.local, "predicting_states", states)


def test_the_check_itself_sees_what_waits():
    x = torch.arange(3.0)
    with Waits() as waits:
        assert x.sum().item() == 3 and x[x > 1].numel() == 1
        (x > 5).nonzero()
        torch.as_tensor(7, dtype=torch.float32)
    assert len(waits.seen) == 4, waits.seen


OPTIONS = {
    "divergence": {},
    "policy gradient": {"objective": "policy_gradient"},
    "mixed": {"lmbda": 0.5, "sft_weight": 0.3, "anchor_weight": 0.2, "rows": text_rows(4)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_distillation_losses_and_metrics_wait_for_nothing(tmp_path, name, no_backbone):
    trainer, _ = build(*OURS, tmp_path, **OPTIONS[name])
    trainer.model.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    with Waits() as waits:
        trainer.compute_loss(trainer.model, inputs).backward()
    assert not waits.seen


def test_sft_losses_and_metrics_wait_for_nothing(tmp_path, no_backbone):
    trainer = SFTTrainer(
        model=qwen3(),
        args=SFTConfig(str(tmp_path), **QUIET, per_device_train_batch_size=4),
        train_dataset=text_rows(4),
        processing_class=tokenizer(),
    )
    trainer.model.train()
    batches, n = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, torch.device("cpu"))
    with Waits() as waits:
        trainer.compute_loss(trainer.model, batches[0], num_items_in_batch=n).backward()
    assert not waits.seen


def test_sums_wait_for_nothing():
    sums = MetricSums()
    with Waits() as waits:
        sums.add("a", torch.zeros(()), 7)
        sums.add_spread("b", torch.ones(3))
    assert not waits.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_in_16_bits_is_not_run_under_autocast(tmp_path, dtype):
    teacher, seen = qwen3(1, hidden=48).to(dtype), []
    teacher.model.layers[0].mlp.register_forward_hook(
        lambda m, i, o: seen.append((torch.is_autocast_enabled("cpu"), o.dtype))
    )
    trainer, _ = build(*OURS, tmp_path, teacher=teacher, bf16=True, use_cpu=True)
    trainer.train()
    assert set(seen) == {(dtype is torch.float32, torch.bfloat16)}
    assert trainer.state.log_history[0]["loss"] > 0
