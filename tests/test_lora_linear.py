"""LoRA added up inside its products: peft's values and gradients, and peft's own code wherever there is more to it."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from tiny import llama, tokenizer
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import QUIET, Gradients, assert_same_gradients, text_rows

import trl_opd.token_trainer
from trl_opd import SFTConfig, SFTTrainer, lora_linear
from trl_opd.lora_linear import LoraLinear, use_lora_linear

PLAIN = {"r": 3, "lora_alpha": 12, "target_modules": ["0"], "init_lora_weights": False}  # scaling 4


@pytest.fixture
def fused(monkeypatch):
    """How often a layer was run in our way."""
    calls, apply = [], lora_linear._LoraLinear.apply
    monkeypatch.setattr(lora_linear._LoraLinear, "apply", lambda *args: calls.append(1) or apply(*args))
    return calls


def layers(bias=True, dtype=torch.float32, **options):
    """One layer of peft's, 7 -> 5, and a copy of it that is ours."""
    torch.manual_seed(0)
    theirs = get_peft_model(nn.Sequential(nn.Linear(7, 5, bias=bias)), LoraConfig(**PLAIN | options)).to(dtype)
    ours = copy.deepcopy(theirs)
    assert use_lora_linear(ours) == 1
    return theirs, ours


def run(model, x):
    """Output, and gradients of the input and of every trained parameter."""
    x = x.clone().requires_grad_()
    out = model(x)
    (out.float() * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
    return [out, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_by_hand(fused):
    """x = (1, 2), W = (3, 4), A = (5, 6), B = 7, scaling 2: 3 + 8 + 2 · 7 · (5 + 12) = 249. With a gradient of 10 the
    low-rank state's is 140, A's 140 x, B's 20 · 17, and x's 10 W + 140 A."""
    config = LoraConfig(r=1, lora_alpha=2, target_modules=["0"])
    model = get_peft_model(nn.Sequential(nn.Linear(2, 1, bias=False)), config)
    use_lora_linear(model)
    layer = model.base_model.model[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    for weight, values in ((layer.base_layer.weight, [3.0, 4.0]), (a, [5.0, 6.0]), (b, [7.0])):
        weight.data = torch.tensor([values])
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    out = model(x)
    (10 * out).backward()
    assert out.item() == 249 and len(fused) == 1
    assert a.grad.tolist() == [[140, 280]] and b.grad.tolist() == [[340]] and x.grad.tolist() == [[730, 880]]
    assert layer.base_layer.weight.grad is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 7), (4, 7), (7,), (0, 7)])
def test_values_and_gradients_are_those_of_peft(bias, dtype, shape, fused):
    theirs, ours = layers(bias, dtype)
    x = torch.randn(shape, dtype=dtype)
    expected, found = run(theirs, x), run(ours, x)
    assert len(fused) == 1 and len(found) == len(expected) == 4
    tolerance = {"rtol": 0.05, "atol": 0.3} if dtype == torch.bfloat16 else {}
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, **tolerance)


def test_gradients_against_differences(fused):
    _, ours = layers(dtype=torch.float64)
    a, b = (getattr(ours.base_model.model[0], f"lora_{name}")["default"].weight for name in "AB")
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, a, b: ours(x), (x, a, b)) and fused


def test_an_input_without_a_gradient_gets_none(fused):
    theirs, ours = layers()
    x = torch.randn(3, 7)
    for model in (theirs, ours):
        model(x).square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    assert fused


def set_hook(model):
    model.base_model.model[0].lora_A["default"].register_forward_hook(lambda m, args, out: 2 * out)


def replace_forward(model):
    base = model.base_model.model[0].base_layer
    base.forward = lambda x: 3 * nn.functional.linear(x, base.weight, base.bias)


def train_base(model):
    model.base_model.model[0].base_layer.weight.requires_grad_()


def second_adapter(model):
    torch.manual_seed(1)
    model.add_adapter("other", LoraConfig(**PLAIN))
    model.base_model.set_adapter(["default", "other"])


OTHERS = {
    "dropout": ({"lora_dropout": 0.5}, None),
    "dora": ({"use_dora": True}, None),
    "bias of the adapter": ({"lora_bias": True}, None),
    "hook": ({}, set_hook),
    "another forward": ({}, replace_forward),
    "a base that trains": ({}, train_base),
    "two adapters": ({}, second_adapter),
    "merged": ({}, lambda model: model.merge_adapter()),
    "off": ({}, lambda model: model.base_model.disable_adapter_layers()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_is_not_plain_is_left_to_peft(name, fused):
    options, change = OTHERS[name]
    results = []
    for model in layers(**options):
        if change is not None:
            change(model)
        torch.manual_seed(2)  # of the dropout
        results.append(run(model, torch.randn(4, 7)))
    assert not fused and len(results[0]) == len(results[1])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


def test_without_training_dropout_is_nothing(fused):
    theirs, ours = layers(lora_dropout=0.5)
    x = torch.randn(4, 7)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    assert len(fused) == 1


def test_under_autocast_and_with_another_dtype_it_is_peft_that_casts(fused):
    theirs, ours = layers()
    x = torch.randn(4, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(x), theirs(x))
    for model in (theirs, ours):
        model.base_model.model[0].base_layer.bfloat16()  # the adapter stays in fp32
    assert torch.equal(ours(x.bfloat16()), theirs(x.bfloat16()))
    assert not fused


def test_the_other_adapter_alone_is_run_in_our_way(fused):
    theirs, ours = layers()
    for model in (theirs, ours):
        second_adapter(model)
        model.base_model.set_adapter("other")
    for mine, other in zip(run(ours, torch.ones(2, 7)), run(theirs, torch.ones(2, 7)), strict=True):
        torch.testing.assert_close(mine, other)
    assert len(fused) == 1


def test_a_checkpointed_layer(fused):
    theirs, ours = layers()
    x = torch.randn(4, 7, requires_grad=True)
    checkpoint(ours, x, use_reentrant=False).square().sum().backward()
    ours_grad, x.grad = x.grad, None
    theirs(x).square().sum().backward()
    torch.testing.assert_close(ours_grad, x.grad)
    assert len(fused) == 2


def test_a_copy_is_a_model_of_its_own():
    """Nothing of a layer's forward may point back at the layer it was copied from."""
    _, ours = layers()
    other = copy.deepcopy(ours)
    with torch.no_grad():
        other.base_model.model[0].lora_B["default"].weight.zero_()
    assert not torch.equal(other(torch.ones(2, 7)), ours(torch.ones(2, 7)))


def test_saved_loaded_merged(tmp_path):
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    names, ids = list(model.state_dict()), torch.arange(5, 17).reshape(2, 6)
    expected = model(input_ids=ids).logits
    assert use_lora_linear(model) == 14 and use_lora_linear(model) == 0  # 7 in each of two blocks
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(llama(), tmp_path).eval()
    assert not any(isinstance(module, LoraLinear) for module in loaded.modules())
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
    torch.testing.assert_close(model.merge_and_unload()(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
def test_a_step_is_that_of_pefts_layers(tmp_path, options, fused, monkeypatch):
    steps = []
    for ours in (True, False):
        if not ours:
            monkeypatch.setattr(trl_opd.token_trainer, "use_lora_linear", lambda model: 0)
        recorder = Gradients()
        trainer = SFTTrainer(
            model=llama(),
            args=SFTConfig(str(tmp_path), **QUIET | options, max_steps=1, per_device_train_batch_size=4),
            train_dataset=text_rows(4),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
            callbacks=[recorder],
        )
        kinds = {type(module) for module in trainer.model.modules() if isinstance(module, Linear)}
        assert kinds == {LoraLinear if ours else Linear}
        trainer.train()
        steps.append(recorder.steps[0])
        assert bool(fused) == ours
        fused.clear()
    assert_same_gradients(steps[0], steps[1], rtol=1e-4)
