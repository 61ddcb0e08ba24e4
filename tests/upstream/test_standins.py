"""The names that TRL's tests load from the Hub are found offline, with the ids and formats that those tests expect."""

import pytest
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .classes import exchange
from .differs import expected
from .rows import DATASETS, write_dataset
from .standins import MODELS, WITH_REAL_IDS, full_name, write_model
from .words import tokenizer

TOOL_CALL = [
    151657,
    198,
    4913,
    606,
    788,
    330,
    64648,
    22785,
    497,
    330,
    16370,
    788,
    5212,
    64,
    788,
    220,
    18,
    11248,
    151658,
]


@pytest.mark.parametrize("name", ["tiny-Qwen3ForCausalLM", "tiny-GptOssForCausalLM"])
def test_a_model_and_its_tokenizer_are_found_by_name(name, tmp_path):
    write_model(name, MODELS[name], tmp_path)
    found = {"pretrained_model_name_or_path": full_name(name), "cache_dir": tmp_path, "local_files_only": True}
    model, tokens = AutoModelForCausalLM.from_pretrained(**found), AutoTokenizer.from_pretrained(**found)
    assert type(model).__name__ == name.removeprefix("tiny-")
    assert model.config.vocab_size > max(tokens.get_vocab().values())
    text = tokens.apply_chat_template([{"role": "user", "content": "Beautiful is better than ugly."}], tokenize=False)
    assert tokens.decode(tokens(text)["input_ids"]) == text


def test_another_revision_has_another_template(tmp_path):
    name = "tiny-Qwen2ForCausalLM-2.5"
    write_model(name, MODELS[name], tmp_path)
    found = {"cache_dir": tmp_path, "local_files_only": True}
    lengths = [
        len(AutoTokenizer.from_pretrained(full_name(name), revision=revision, **found).chat_template)
        for revision in ("main", "8913f5819566")
    ]
    assert lengths == [2507, 2558]


def test_a_model_that_brings_its_own_code(tmp_path):
    name = "tiny-RemoteForCausalLM"
    write_model(name, MODELS[name], tmp_path)
    with pytest.raises(ValueError, match="custom code"):
        AutoConfig.from_pretrained(full_name(name), cache_dir=tmp_path, local_files_only=True)


def test_ids_of_the_real_vocabulary():
    """A test of TRL writes this call as ids; the comment beside it says what they spell."""
    tokens = tokenizer(WITH_REAL_IDS["tiny-Qwen3MoeForCausalLM"].words)
    assert tokens.decode(TOOL_CALL) == '<tool_call>\n{"name": "multiply_tool", "arguments": {"a": 3}}\n</tool_call>'
    assert tokens.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [151643, 151644, 151645]


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_have_their_configs_and_splits(streaming, tmp_path):
    folder = str(write_dataset("zen", tmp_path / "zen"))
    kwargs = {"cache_dir": tmp_path / "cache", "streaming": streaming}
    for config in DATASETS["zen"][1]:
        rows = load_dataset(folder, config, **kwargs)
        assert (len(list(rows["train"])), len(list(rows["test"]))) == (17, 2)
    row = next(iter(load_dataset(folder, "standard_prompt_completion", split="train", **kwargs)))
    assert row == {"prompt": "Beautiful is", "completion": " better than ugly."}


def test_from_trl_import_gives_our_classes(monkeypatch):
    import trl

    import trl_opd

    for name in ("SFTTrainer", "SFTConfig", "DistillationTrainer", "DistillationConfig"):
        monkeypatch.setattr(trl, name, getattr(trl, name))  # put back afterwards
    exchange("trainers")
    assert trl.SFTTrainer is trl_opd.SFTTrainer and trl.SFTConfig is not trl_opd.SFTConfig
    exchange("ours")
    assert trl.DistillationConfig is trl_opd.DistillationConfig


@pytest.mark.parametrize(
    ("test", "classes", "other_teacher", "why"),
    [
        ("test_sft_trainer::test_train_packing[bfd]", "ours", False, "rows over `max_length` are an error"),
        ("test_sft_trainer::test_train_packing[bfd]", "trainers", False, None),
        ("test_sft_trainer::test_train_packing[wrapped]", "ours", False, None),
        ("test_sft_trainer::test_train", "ours", False, None),
        ("test_distillation_trainer::test_train_vlm[a]", "ours", False, "the student's own checkpoint is no teacher"),
        ("test_distillation_trainer::test_train_vlm[a]", "ours", True, "no images in distillation"),
        ("test_distillation_trainer::test_train_vlm[a]", "trl", False, None),
    ],
)
def test_what_is_known_to_differ_has_to_fail_in_that_way(test, classes, other_teacher, why):
    mark = expected(*test.split("::"), classes, other_teacher)
    if why is None:
        assert mark is None
        return
    assert (mark.kwargs["reason"], mark.kwargs["strict"]) == (why, True)
    assert not mark.kwargs["raises"].matches(ValueError("another error"))
