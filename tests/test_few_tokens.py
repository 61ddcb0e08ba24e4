"""Linear layers of a decoding step: the same numbers, summed in another order, and nothing left behind."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import llama
from torch import nn

from trl_opd import few_tokens
from trl_opd.few_tokens import fast_on_few_tokens


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 1), (8, 1), (1, 5), (32, 1), (33, 1), (1, 1), (0, 1)])
def test_a_layer_gives_what_it_gave(shape, bias, monkeypatch):
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 80, bias=bias), torch.randn(*shape, 48)
    expected, plain = layer(x), []
    real = few_tokens.linear
    monkeypatch.setattr(few_tokens, "linear", lambda *args: plain.append(1) or real(*args))
    with torch.no_grad(), fast_on_few_tokens(layer):
        ours = layer(x)
    torch.testing.assert_close(ours, expected.detach())
    assert ours.is_contiguous() and "forward" not in vars(layer)
    assert len(plain) == (0 if 2 <= shape[0] * shape[1] <= 32 else 1)


def test_a_models_logits_and_hooks_stay(monkeypatch):
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    ids = torch.arange(5, 11).reshape(6, 1)
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda *args: seen.append(1))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        calls = []
        monkeypatch.setattr(few_tokens, "linear", lambda *args: calls.append(1))
        with fast_on_few_tokens(model):
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert len(seen) == 2 and not calls


def test_where_a_gradient_is_taken_or_the_forward_is_anothers_nothing_changes(monkeypatch):
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    calls, real = [], few_tokens.linear
    monkeypatch.setattr(few_tokens, "linear", lambda *args: calls.append(1) or real(*args))
    with fast_on_few_tokens(layer):
        layer(x).sum().backward()
    assert len(calls) == 1 and layer.weight.grad is not None
    layer.forward = own = lambda x: x
    with torch.no_grad(), fast_on_few_tokens(layer):
        assert layer.forward is own
    assert layer.forward is own


def test_an_error_inside_leaves_the_layers_as_they_were():
    layer = nn.Linear(2, 2)
    with pytest.raises(KeyError), fast_on_few_tokens(layer):
        raise KeyError
    assert "forward" not in vars(layer)
