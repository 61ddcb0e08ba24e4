"""What we rely on in TRL and transformers beyond their public API. A failure here says what a release changed."""

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
import transformers
import trl
from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from tiny import qwen3

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer, _trl

OVERRIDDEN = [
    (SFTTrainer, trl.SFTTrainer, "_prepare_dataset"),
    (SFTTrainer, trl.SFTTrainer, "_reject_skip_prepare_without_labels"),
    (SFTTrainer, trl.SFTTrainer, "_get_num_items_in_batch"),
    (SFTTrainer, trl.SFTTrainer, "compute_loss"),
    (SFTTrainer, trl.SFTTrainer, "log"),
    (DistillationTrainer, trl.DistillationTrainer, "get_train_dataloader"),
    (DistillationTrainer, trl.DistillationTrainer, "_get_train_sampler"),
    (DistillationTrainer, trl.DistillationTrainer, "_get_eval_sampler"),
    (DistillationTrainer, trl.DistillationTrainer, "_prepare_inputs"),
    (DistillationTrainer, trl.DistillationTrainer, "compute_loss"),
    (DistillationTrainer, trl.DistillationTrainer, "training_step"),
    (DistillationTrainer, trl.DistillationTrainer, "prediction_step"),
    (SFTTrainer, transformers.Trainer, "_get_grad_norm"),
]


@pytest.mark.parametrize("ours, theirs, name", OVERRIDDEN, ids=lambda x: x if isinstance(x, str) else "")
def test_overridden_methods_take_the_same_arguments(ours, theirs, name):
    mine = [p for p in inspect.signature(getattr(ours, name)).parameters]
    upstream = [p for p in inspect.signature(getattr(theirs, name)).parameters]
    assert len(mine) == len(upstream), f"{name}{upstream}"


@pytest.mark.parametrize("ours, theirs", [(SFTTrainer, trl.SFTTrainer), (DistillationTrainer, trl.DistillationTrainer)])
def test_constructors_take_trls_arguments_in_trls_order(ours, theirs):
    mine, upstream = (list(inspect.signature(c.__init__).parameters) for c in (ours, theirs))
    assert mine[: len(upstream)] == upstream


@pytest.mark.parametrize("ours, theirs", [(SFTConfig, trl.SFTConfig), (DistillationConfig, trl.DistillationConfig)])
def test_configs_keep_every_field_of_trl(ours, theirs):
    assert set(theirs.__dataclass_fields__) <= set(ours.__dataclass_fields__)


def test_the_rollout_seam_is_where_it_was():
    parameters = list(inspect.signature(trl.DistillationTrainer._generate_single_turn).parameters)
    assert parameters[:4] == ["self", "prompt_ids", "images", "multimodal_fields"]
    assert "epoch" in inspect.signature(transformers.Trainer._run_epoch).parameters
    source = inspect.getsource(transformers.Trainer._inner_training_loop)
    assert "self._run_epoch(" in source and "epoch=epoch" in source


def test_the_norm_is_asked_for_before_every_optimizer_step():
    """Where a step that is not finite is stopped: after the losses were added up, before the optimizer moves."""
    source = inspect.getsource(transformers.Trainer._run_epoch)
    order = ["self.training_step(", "self._tr_loss += tr_loss_step", "self._get_grad_norm(", "self.optimizer.step()"]
    assert [source.count(part) for part in order] == [1] * 4
    assert sorted(order, key=source.index) == order
    assert "self._maybe_log_save_evaluate(" in source  # whose time is not that of training
    assert "self._load_from_checkpoint(" in inspect.getsource(transformers.Trainer.train)


def test_attributes_that_trl_sets_and_we_read():
    source = inspect.getsource(trl.DistillationTrainer.__init__)
    for name in (
        "_tokenizer",
        "eos_token_ids",
        "_metrics",
        "_step",
        "_buffered_inputs",
        "_forward_redirection",
        "_logs",
    ):
        assert f"self.{name} =" in source, name
    source = inspect.getsource(trl.SFTTrainer.__init__)
    for name in ("_tokenizer", "_metrics", "_total_train_tokens", "aux_loss_enabled"):
        assert f"self.{name} =" in source, name


def test_how_a_model_is_saved():
    for name in ("save_model", "_save"):
        mine, upstream = (
            list(inspect.signature(getattr(c, name)).parameters) for c in (SFTTrainer, transformers.Trainer)
        )
        assert mine == upstream, name
    source = inspect.getsource(transformers.Trainer.save_model)
    assert 'if "FULL_STATE_DICT" in str(' in source and "self._save(output_dir, state_dict=state_dict)" in source
    assert qwen3().all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}


def test_private_names_are_there():
    assert all(hasattr(_trl, name) for name in _trl.__all__)


def test_generate_hands_its_loop_what_ours_reads():
    model = qwen3().eval()
    seen = {}

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen.update(kwargs, pad=generation_config.pad_token_id, done=stopping_criteria(input_ids, None))
        return input_ids

    ids = torch.tensor([[0, 5], [6, 7]])
    config = transformers.GenerationConfig(max_new_tokens=2, pad_token_id=0, eos_token_id=7)
    model.generate(input_ids=ids, attention_mask=(ids > 0).long(), generation_config=config, custom_generate=loop)
    assert isinstance(seen.get("cache", seen.get("past_key_values")), transformers.DynamicCache)
    assert seen["pad"] == 0 and seen["done"].tolist() == [False, True]
    assert seen["attention_mask"].shape == seen["position_ids"].shape == (2, 2)


def test_flash_attention_is_told_where_rows_end_by_these_names():
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

    names = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert names <= set(FlashAttentionKwargs.__annotations__)
    assert _trl.attention_of(qwen3(attn_implementation="eager")) == "eager"
    assert _trl.attention_of(qwen3()) == "sdpa"


def test_models_say_what_their_attention_needs():
    model = qwen3().model
    assert _trl.attends_by_lengths(model)
    for name in ("_supports_flash_attn", "_supports_attention_backend"):
        assert getattr(transformers.PreTrainedModel, name) is False  # what a model that says nothing is taken for
        setattr(model, name, False)
        assert not _trl.attends_by_lengths(model)
        delattr(model, name)


def test_modules_are_called_through_what_compile_sets():
    assert "self._compiled_call_impl = torch.compile(self._call_impl" in inspect.getsource(torch.nn.Module.compile)
    assert "if self._compiled_call_impl is not None" in inspect.getsource(torch.nn.Module._wrapped_call_impl)


def test_what_we_set_on_a_deepspeed_engine_is_what_it_reads():
    found = importlib.util.find_spec("deepspeed")
    if found is None:
        pytest.skip("deepspeed is not installed: pip install trl-opd[deepspeed]")
    source = (Path(found.origin).parent / "runtime" / "engine.py").read_text()  # read: importing it takes seconds
    assert "return self._config.zero_config.gather_16bit_weights_on_model_save" in source
    assert "return self._global_grad_norm" in source
    step = inspect.getsource(DeepSpeedEngineWrapper.backward)
    assert "if sync_gradients:" in step and "self.engine.step()" in step
    assert "sync_gradients=self.sync_gradients" in inspect.getsource(Accelerator.backward)


def test_a_trl_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.15.0")
    with pytest.raises(ImportError, match=r"needs trl>=1.16.0; trl 1.15.0 is installed"):
        importlib.reload(_trl)
