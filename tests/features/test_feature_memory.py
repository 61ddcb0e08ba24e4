"""What saves memory or time: the same gradients, and really in use."""

import pytest
import trl
from feature_jobs import each, logs, trained, trainer_of
from tiny import qwen3
from training import assert_same_gradients, text_rows

from trl_opd import SFTConfig, SFTTrainer
from trl_opd.compiled import backbones_for


def count_forwards(trainer):
    """Forward passes of the first layer in training: checkpointing runs it twice."""
    seen = []
    layer = next(m for m in trainer.model.modules() if type(m).__name__ == "Qwen3DecoderLayer")
    layer.mlp.register_forward_pre_hook(lambda module, _: seen.append(module.training) if module.training else None)
    return seen


def checkpointed(job, model, folder, reentrant, **options):
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain = trained(job, model, folder, **options)
    passes = []

    class Counted(type(plain)):
        def train(self, *args, **kwargs):
            passes.append(count_forwards(self))
            return super().train(*args, **kwargs)

    again = trained(job, model, folder, trainer_class=Counted, fixed=False, **options, **kwargs)
    assert len(passes[0]) == 2, "each layer runs once, and once more in backward"
    assert logs(again)[0]["loss"] == pytest.approx(logs(plain)[0]["loss"], rel=1e-6)
    assert_same_gradients(again.gradients[0], plain.gradients[0], rtol=1e-5)


@each("`gradient_checkpointing`, reentrant")
def test_reentrant_checkpointing(tmp_path, job, model):
    checkpointed(job, model, tmp_path, reentrant=True)


@each("`gradient_checkpointing`, not reentrant")
def test_checkpointing(tmp_path, job, model):
    checkpointed(job, model, tmp_path, reentrant=False)


@pytest.mark.parametrize("reentrant", [True, False])
@each("`gradient_checkpointing` with the base as teacher", jobs=["distill"], models=["lora"])
def test_checkpointing_beside_the_base_as_teacher(tmp_path, job, model, reentrant):
    """The layers that are run again in backward are the student's: the adapter is on again by then."""
    checkpointed(job, model, tmp_path, reentrant, teacher_kind="base")


def test_compiling_is_said_to_be_left_out_where_it_is(tmp_path, monkeypatch, caplog):
    trainer = trainer_of("sft", "full", tmp_path, torch_compile=True, torch_compile_backend="eager")
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    backbones_for(trainer)
    assert "torch_compile: the loss is computed without it under DeepSpeed" in caplog.text


@pytest.mark.feature("`activation_offloading`", job="sft", model=["full", "lora"], how="refused")
def test_offloading_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match=r"`activation_offloading: true` .* on a CPU. Set `activation_offloading: fal"):
        SFTConfig(str(tmp_path), activation_offloading=True)
    args = trl.SFTConfig(str(tmp_path), bf16=False, report_to="none", activation_offloading=True)
    with pytest.raises(ValueError, match="`activation_offloading: true`"):
        SFTTrainer(qwen3(), args, train_dataset=text_rows(2))
