"""Layouts that cannot work are refused at start, for the reason and with the way out; weights are saved once, whole."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from tiny import llama, qwen3, tokenizer
from training import QUIET, text_rows
from transformers import BitsAndBytesConfig

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer, launch, summary
from trl_opd.data.sampler import WindowSampler, by_rank
from trl_opd.errors import UsageError
from trl_opd.fingerprint import differences
from trl_opd.layouts import (
    check_layout,
    check_student,
    layout_name,
    shards_weights,
    whole_weights,
    without_tied_copies,
)
from trl_opd.summary import describe_model, start_table

TOKENIZER = {"processing_class": tokenizer()}
LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (
        *launch.SIZES,
        "ACCELERATE_USE_FSDP",
        "FSDP_VERSION",
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_USE_CPU",
    ):
        monkeypatch.delenv(name, raising=False)


def arguments(processes=2, kind=DistributedType.MULTI_GPU, fsdp=None, version=None):
    state = SimpleNamespace(distributed_type=kind)
    plugin = {"fsdp_version": version} if version else None
    plugins = {"fsdp": fsdp, "fsdp_plugin_args": plugin, "deepspeed": None}
    return SimpleNamespace(world_size=processes, distributed_state=state, **plugins)


@pytest.mark.parametrize("trainer, config", [(SFTTrainer, SFTConfig), (DistillationTrainer, DistillationConfig)])
@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("WORLD_SIZE", "2", UsageError, "there are 2 processes and this run has 1: each would train by itself"),
        ("ACCELERATE_USE_FSDP", "true", ValueError, "FSDP is asked for, and this run is on a CPU"),
    ],
)
def test_the_layout_that_was_asked_for_or_none(tmp_path, monkeypatch, trainer, config, name, value, error, message):
    args = config(str(tmp_path), **QUIET)
    monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):  # before the model is looked for
        trainer(model="no/such/model", args=args, train_dataset=text_rows(2))


def test_fsdp_on_a_cpu_is_refused_however_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for kind in (DistributedType.NO, DistributedType.MULTI_CPU):
        with pytest.raises(ValueError, match="accelerate would not shard anything"):
            check_layout(arguments(kind=kind, fsdp=True), "student", None, None)
    check_layout(arguments(kind=DistributedType.MULTI_CPU), "student", None, None)
    check_layout(arguments(fsdp=True), "student", None, None)


def test_deepspeed_on_a_cpu_that_would_be_ddp_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    on_cpu = arguments(kind=DistributedType.MULTI_CPU)
    check_layout(on_cpu, "student", None, None)  # `use_cpu: true` alone
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="accelerate would train with DDP"):
        check_layout(on_cpu, "student", None, None)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    check_layout(on_cpu, "student", None, None)


def test_fsdp1_with_an_adapter_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    fsdp1, fsdp2 = (arguments(fsdp=True, version=version) for version in (1, 2))
    for model, peft_config in (("student", LORA), (get_peft_model(qwen3(), LORA), None)):
        with pytest.raises(ValueError, match=r"FSDP1 saves an adapter without its weights\. Set `fsdp_version: 2`"):
            check_layout(fsdp1, model, peft_config, None)
        check_layout(fsdp2, model, peft_config, None)
    check_layout(fsdp1, "student", None, None)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # from `accelerate launch`, whose own default is FSDP1
    with pytest.raises(ValueError, match="FSDP1 saves an adapter"):
        check_layout(arguments(), "student", LORA, None)
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_layout(arguments(), "student", LORA, None)


def test_fsdp_with_weights_in_8_bits_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"FSDP cannot shard weights in 8 bits\. Set `load_in_4bit: true`"):
        check_layout(arguments(fsdp=True, version=2), "student", LORA, BitsAndBytesConfig(load_in_8bit=True))
    check_layout(arguments(fsdp=True, version=2), "student", LORA, BitsAndBytesConfig(load_in_4bit=True))
    check_layout(arguments(), "student", LORA, BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.parametrize("tied", [True, False])
def test_fsdp2_with_an_adapter_on_a_shared_head_is_refused(tied):
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(qwen3(tie_word_embeddings=tied), lora)
    fsdp, ddp = (
        SimpleNamespace(model=model, accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
        for plugin in (object(), None)
    )
    check_student(ddp)
    if not tied:
        check_student(fsdp)
        return
    with pytest.raises(ValueError, match="cannot shard an adapter on `lm_head` where embedding and head share"):
        check_student(fsdp)


@pytest.mark.parametrize(
    "zero, fsdp, processes, name, shards",
    [
        (None, None, 1, "one process", False),
        (None, None, 2, "DDP", False),
        (2, None, 2, "ZeRO-2", False),
        (3, None, 2, "ZeRO-3", True),
        (None, 1, 2, "FSDP1", True),
        (None, 2, 2, "FSDP2", True),
    ],
)
def test_layouts_by_name_and_which_shard_weights(zero, fsdp, processes, name, shards):
    deepspeed_plugin = None if zero is None else SimpleNamespace(zero_stage=zero)
    state = SimpleNamespace(deepspeed_plugin=deepspeed_plugin, num_processes=processes)
    if fsdp is not None:  # accelerate's state has the attribute only then
        state.fsdp_plugin = SimpleNamespace(fsdp_version=fsdp)
    assert (layout_name(state), shards_weights(state)) == (name, shards)


def test_weights_are_saved_whole_and_checkpoints_stay_as_asked():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=None)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=state), is_deepspeed_enabled=False)
    before = dict(vars(plugin))
    with whole_weights(trainer):
        assert "FULL_STATE_DICT" in str(plugin.state_dict_type)
        assert type(plugin.state_dict_config).__name__ == "FullStateDictConfig"
    assert vars(plugin) == before

    zero = SimpleNamespace(gather_16bit_weights_on_model_save=False)
    engine = SimpleNamespace(_config=SimpleNamespace(zero_config=zero))
    state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=SimpleNamespace(zero_stage=3))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=state), is_deepspeed_enabled=True, deepspeed=engine)
    with whole_weights(trainer):
        assert zero.gather_16bit_weights_on_model_save is True
    assert zero.gather_16bit_weights_on_model_save is False


def test_a_tied_head_is_saved_once():
    tied, apart = qwen3(), llama(tie_word_embeddings=False)
    copies = {name: weight.clone() for name, weight in tied.state_dict().items()}
    assert set(copies) - set(without_tied_copies(tied, copies)) == {"lm_head.weight"}
    assert without_tied_copies(apart, apart.state_dict()).keys() == apart.state_dict().keys()
    alone = {"lm_head.weight": copies["lm_head.weight"]}
    assert without_tied_copies(tied, alone) == alone  # the embedding is not there to be tied to
    assert without_tied_copies(tied, None) is None


def test_another_layout_is_another_run(tmp_path, monkeypatch):
    """Its checkpoints are other files, and a table that names it shows a run that is not spread as asked."""
    trainer = SFTTrainer(model=qwen3(), args=SFTConfig(str(tmp_path), **QUIET), train_dataset=text_rows(2), **TOKENIZER)
    alone, table = trainer._own_fingerprint(), start_table(trainer, None, None)
    assert alone["recipe"]["layout"] == "one process" and "layout" not in list(table.columns[0].cells)
    assert differences({"layout": "FSDP2"}, {"layout": "DDP"}) == ["layout: FSDP2 in the checkpoint, DDP now"]
    monkeypatch.setattr(summary, "layout_name", lambda state: "ZeRO-3")
    shown = start_table(trainer, None, None)
    assert str(dict(zip(*(column.cells for column in shown.columns), strict=True))["layout"]) == "ZeRO-3"


def test_parameters_that_zero3_has_sharded_are_counted():
    model = qwen3()
    whole = describe_model(model)
    for parameter in model.parameters():
        parameter.ds_numel, parameter.data = parameter.numel(), torch.empty(0)
    assert describe_model(model) == whole


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_holds_the_same_rows_for_any_number_of_ranks(ranks, copies):
    """Windows of 16 places for 2 optimizer steps: what rank r gets is cut in 2, and step s is the s-th parts of all."""
    window = {"window": 16, "repeats": 1, "seed": 4, "copies": copies}
    alone = list(WindowSampler(range(11), **window, steps=2))
    shared = list(WindowSampler(range(11), **window, steps=2, ranks=ranks))
    for start in range(0, len(alone), 16):
        parts = [shared[start + first : start + first + 8 // ranks] for first in range(0, 16, 8 // ranks)]
        for step in range(2):
            ours = [slot for part in parts[step::2] for slot in part]
            assert ours == alone[start + 8 * step : start + 8 * step + 8]
    assert by_rank(range(16), 1, 2) == list(range(16))
