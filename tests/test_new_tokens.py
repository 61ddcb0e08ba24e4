"""New tokens: a row each in embedding and head, started at the mean, trained, saved and loaded again."""

import shutil

import pytest
import torch
import yaml
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, IA3Config, LoraConfig, PeftModel
from plain import gradients_of, mean_over_tokens, row_logits
from tiny import SPECIAL, qwen3, tokenizer
from training import QUIET, Gradients, assert_same_gradients, text_rows
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Qwen3ForCausalLM

from trl_opd import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer
from trl_opd.data.rows import DatasetError
from trl_opd.masking import trained_positions
from trl_opd.new_tokens import CHATML, add_tokens
from trl_opd.run import run
from trl_opd.teachers.adapter import AdapterTeacher

KNOWN = 259  # 256 bytes and three special tokens; the model has no row to spare
OPEN, CLOSE = KNOWN, KNOWN + 1
THINK = ["<think>", "</think>"]
IDS = torch.tensor([[5, OPEN, 6, CLOSE, 7]])
LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def thinking(n=4):
    return text_rows(n).map(lambda row: {"completion": f"<think>{row['completion']}</think>yes"})


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of a model whose head is its embedding (True) and of one with a head of its own (False)."""
    folders = {}
    for tied in (True, False):
        folders[tied] = str(tmp_path_factory.mktemp(f"tied_{tied}"))
        qwen3(tie_word_embeddings=tied, vocab_size=KNOWN).save_pretrained(folders[tied])
        tokenizer().save_pretrained(folders[tied])
    return folders


def sft(base, out, peft_config=None, rows=None, callbacks=None, **values):
    values = QUIET | {"max_steps": 2, "per_device_train_batch_size": 4, "added_tokens": THINK} | values
    return SFTTrainer(
        model=base,
        args=SFTConfig(str(out), **values),
        train_dataset=thinking() if rows is None else rows,
        peft_config=peft_config,
        callbacks=callbacks,
    )


@pytest.mark.feature("New tokens and resized embeddings", job="sft", model="full")
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_learns_new_tokens_and_keeps_them(bases, tmp_path, tied):
    before = Qwen3ForCausalLM.from_pretrained(bases[tied])
    trainer = sft(bases[tied], tmp_path, pad_embeddings_to_multiple_of=64)
    model = trainer.model
    for layer, old in (
        (model.get_input_embeddings(), before.get_input_embeddings()),
        (model.get_output_embeddings(), before.get_output_embeddings()),
    ):
        assert layer.weight.shape == (320, 32)
        assert torch.equal(layer.weight[:KNOWN], old.weight)
        mean = old.weight.mean(0)
        torch.testing.assert_close(layer.weight[KNOWN:], mean.expand(320 - KNOWN, -1), atol=1e-4, rtol=0)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    row = trainer.train_dataset[0]
    assert row["labels"].count(OPEN) == row["labels"].count(CLOSE) == 1
    start = model.get_input_embeddings().weight[OPEN].detach().clone()
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert not torch.equal(model.get_input_embeddings().weight[OPEN], start)
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert again.config.vocab_size == 320
    torch.testing.assert_close(again(IDS).logits, model.eval()(IDS).logits)
    tok = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tok("<think>a</think>")["input_ids"] == [OPEN, tok("a")["input_ids"][0], CLOSE]
    assert tok.decode([OPEN, CLOSE], skip_special_tokens=True) == "<think></think>"  # they are no special tokens


@pytest.mark.feature("New tokens and resized embeddings", job="sft", model="lora")
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_trains_the_rows_of_new_tokens_and_keeps_them(bases, tmp_path, tied):
    """Gradients are those of full logits; the config that was passed stays as it was; the adapter goes on."""
    recorder = Gradients()
    trainer = sft(bases[tied], tmp_path, LORA, callbacks=[recorder], max_steps=1)
    rows = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
    model = trainer.model
    assert LORA.trainable_token_indices is None
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name}
    assert len(trained) == (1 if tied else 2) and all("trainable_tokens_delta" in name for name in trained)

    def loss(prompt, completion):
        return -row_logits(model, prompt, completion).log_softmax(-1)[range(len(completion)), completion]

    begins = [next(i for i, label in enumerate(labels) if label != -100) for _, labels in rows]
    pairs = [(ids[:begin], ids[begin:]) for (ids, _), begin in zip(rows, begins, strict=True)]
    expected = gradients_of(mean_over_tokens(pairs, loss), model)
    trainer.train()
    assert_same_gradients(recorder.steps[0], expected, rtol=1e-4)
    assert all(recorder.steps[0][name].abs().sum() > 0 for name in trained)

    trainer.save_model(str(tmp_path / "saved"))
    logits = model.eval()(IDS).logits
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(again(IDS).logits, logits)
    torch.testing.assert_close(again.merge_and_unload()(IDS).logits, logits, rtol=1e-4, atol=1e-5)
    further = sft(str(tmp_path / "saved"), tmp_path / "further", max_steps=1)  # the same recipe: all are known now
    torch.testing.assert_close(further.model.eval()(IDS).logits, logits)
    assert {name for name, p in further.model.named_parameters() if p.requires_grad} >= trained
    further.train()


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
def test_a_resumed_run_has_the_same_rows(bases, tmp_path, peft_config):
    whole = sft(bases[True], tmp_path / "whole", peft_config)
    whole.train()
    values = {"save_strategy": "steps", "save_steps": 1}
    sft(bases[True], tmp_path / "parts", peft_config, **values).train()
    shutil.rmtree(tmp_path / "parts" / "checkpoint-2")
    resumed = sft(bases[True], tmp_path / "parts", peft_config, **values)
    resumed.train(resume_from_checkpoint=True)
    ours, theirs = resumed.model.state_dict(), whole.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_whole_modules_to_save_are_left_to_train_them(bases, tmp_path):
    config = LoraConfig(target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM")
    trainer = sft(bases[False], tmp_path, config)
    assert trainer.model.peft_config["default"].trainable_token_indices is None
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(again(IDS).logits, trainer.model.eval()(IDS).logits)
    half = LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    indices = sft(bases[False], tmp_path, half).model.peft_config["default"].trainable_token_indices
    assert indices == {"embed_tokens": [OPEN, CLOSE]}


def test_rows_that_the_model_has_to_spare_are_taken(tmp_path, caplog):
    """Qwen's embeddings are larger than its tokenizer; nothing shrinks, and an adapter may be padded then."""
    model = qwen3(vocab_size=320)
    spare = model.get_input_embeddings().weight[OPEN].detach().clone()
    args = SFTConfig(str(tmp_path), **QUIET, added_tokens=THINK, pad_embeddings_to_multiple_of=64)
    with caplog.at_level("INFO", "trl_opd"):
        got, tok, config = add_tokens(model, tokenizer(), args, quantization_config=None, peft_config=LORA)
    assert got is model and model.get_input_embeddings().weight.shape[0] == 320
    assert torch.equal(model.get_input_embeddings().weight[OPEN], spare) and tok.convert_tokens_to_ids(THINK[0]) == OPEN
    assert config.trainable_token_indices == {"embed_tokens": [OPEN, CLOSE]}
    assert "2 of them take rows that the model had to spare" in caplog.text


def test_nothing_is_touched_where_nothing_is_asked_for(tmp_path):
    args = SFTConfig(str(tmp_path), **QUIET)
    assert add_tokens("M", None, args, quantization_config=None, peft_config=LORA) == ("M", None, LORA)


def lora(**values):
    return LoraConfig(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | values)


@pytest.mark.parametrize(
    "tied, config, values, message",
    [
        (True, lora(modules_to_save=["embed_tokens"]), {}, "`lora_modules_to_save` has `embed_tokens`, whose weight"),
        (True, lora(modules_to_save=["lm_head"]), {}, "`lora_modules_to_save` has `lm_head`, whose weight"),
        (False, lora(target_modules=["q_proj", "lm_head"]), {}, "LoRA on `lm_head` would leave the rows of new tokens"),
        (False, lora(target_modules=r".*(q_proj|embed_tokens)"), {}, "LoRA on `embed_tokens` would leave"),
        (False, lora(), {"pad_embeddings_to_multiple_of": 64}, "makes 59 rows that no token has"),
        (False, IA3Config(task_type="CAUSAL_LM"), {}, "which IA3Config does not do. Use LoRA"),
    ],
)
def test_an_adapter_that_could_not_learn_or_keep_them_is_refused(bases, tmp_path, tied, config, values, message):
    with pytest.raises(ValueError) as caught:
        sft(bases[tied], tmp_path, config, **values)
    assert message in str(caught.value)


def test_a_head_with_a_bias_is_trained_whole(tmp_path):
    """peft's rows of a head leave its bias out of the forward."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=KNOWN, n_embd=8, n_layer=1, n_head=1, tie_word_embeddings=False))
    model.lm_head = torch.nn.Linear(8, KNOWN)
    args = SFTConfig(str(tmp_path), **QUIET, added_tokens=THINK)
    with pytest.raises(ValueError, match=r"has a bias.*Set `lora_modules_to_save: \[wte, lm_head\]`"):
        add_tokens(model, tokenizer(), args, quantization_config=None, peft_config=lora(target_modules=["c_attn"]))


def test_an_adapter_folder_takes_no_more(bases, tmp_path):
    sft(bases[True], tmp_path, LORA).save_model(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"this model is an adapter already.*Merge it into its base first"):
        sft(str(tmp_path / "saved"), tmp_path, added_tokens=["<more>"])


@pytest.mark.parametrize(
    "values, message",
    [
        ({"added_tokens": [" "]}, "every token must be a text that is not blank"),
        ({"pad_embeddings_to_multiple_of": 0}, "it must be at least 1"),
        ({"added_tokens": ["<a>"], "added_special_tokens": ["<a>"]}, "'<a>' is in `added_tokens` and in"),
        ({"eos_token": "<end>", "chat_template": CHATML}, "or put it into `added_special_tokens`"),
    ],
)
def test_values_that_cannot_be(bases, tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        DistillationTrainer(
            model=bases[True],
            teacher_model=qwen3(1),
            args=DistillationConfig(str(tmp_path), **QUIET, **values),
            train_dataset=text_rows(4),
        )


def test_a_4_bit_model_learns_new_tokens_with_its_adapter(bases, tmp_path):
    flags = {
        "model_name_or_path": bases[False],
        "dataset_name": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "max_steps": "1",
        "added_tokens": THINK,
        "use_peft": "true",
        "load_in_4bit": "true",
        "lora_target_modules": "all-linear",
    }
    thinking().to_json(tmp_path / "rows.jsonl")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(QUIET | flags | {"max_steps": 1}))
    model = run("sft", ["--config", str(tmp_path / "r.yaml")]).model
    layers = [model.get_input_embeddings().token_adapter, model.get_output_embeddings().token_adapter]
    for layer in layers:
        now, was = layer.trainable_tokens_delta["default"], layer.trainable_tokens_original["default"]
        assert not torch.equal(now, was.to(now))


# --- ChatML ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_template(tmp_path_factory):
    """A base model: one special token, no chat template; and rows that are conversations."""
    path = tmp_path_factory.mktemp("base")
    qwen3(vocab_size=257).save_pretrained(path / "base")
    tok = tokenizer(eos="<|endoftext|>", special=SPECIAL[:1])
    tok.chat_template = None
    tok.save_pretrained(path / "base")
    turns = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
        for row in text_rows(4)
    ]
    Dataset.from_list(turns).to_json(path / "turns.jsonl")
    text_rows(4).to_json(path / "rows.jsonl")
    return path


def start(folder, tmp_path, **recipe):
    values = {
        "model_name_or_path": str(folder / "base"),
        "dataset_name": str(folder / "turns.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(QUIET | values | recipe))
    return run("sft", ["--config", str(tmp_path / "r.yaml")])


@pytest.mark.parametrize("recipe", [{"chat_template": "chatml"}, {"max_seq_length": 512}], ids=["asked", "old recipe"])
def test_a_base_model_gets_chatml(without_template, tmp_path, recipe):
    trainer = start(without_template, tmp_path, **recipe)
    tok = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tok.chat_template == CHATML and tok.eos_token == "<|im_end|>" and tok.eos_token_id == 258
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == 259 and 258 in model.generation_config.eos_token_id
    row = trainer.train_dataset[0]
    assert tok.decode(row["input_ids"]).startswith("<|im_start|>user\n") and row["labels"][-1] != 258  # its newline
    assert [label for label in row["labels"] if label != -100][-1] == 258


def test_no_template_is_an_error_that_says_what_to_set(without_template, tmp_path):
    with pytest.raises(
        DatasetError, match=r"the tokenizer has no chat template\. Set `chat_template` to a template, or to"
    ):
        start(without_template, tmp_path)
    trainer = start(without_template, tmp_path, dataset_name=str(without_template / "rows.jsonl"), max_seq_length=512)
    assert trainer.model.config.vocab_size == 257  # texts need no template


# --- distillation ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("teacher"))
    qwen3(1, vocab_size=KNOWN, hidden=48).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


NEW_TOKENS = [
    pytest.param(peft, marks=pytest.mark.feature("New tokens and resized embeddings", job="distill", model=model))
    for peft, model in ((False, "full"), (True, "lora"))
]


@pytest.mark.parametrize("peft", NEW_TOKENS)
def test_a_teacher_that_lacks_them_is_asked_about_shared_ids_only(bases, teacher, tmp_path, peft):
    """Neither sampled nor in the loss; and the base that an anchor holds has the same rows as the student."""
    trainer = DistillationTrainer(
        model=bases[True],
        args=DistillationConfig(
            str(tmp_path),
            **QUIET | {"max_steps": 1, "per_device_train_batch_size": 4},
            max_completion_length=8,
            added_tokens=THINK,
            anchor_weight=0.1,
            teacher_model_name_or_path=teacher,
        ),
        train_dataset=text_rows(4),
        peft_config=lora(r=4) if peft else None,
    )
    assert trainer._shared_ids == KNOWN and trainer.generation_config.suppress_tokens == [OPEN, CLOSE]
    assert isinstance(trainer.model, PeftModel) == peft
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["distill/anchor_kl"] == pytest.approx(0.0, abs=1e-6) and logged["loss"] > 0
    layer = trainer.model.get_output_embeddings()
    rows = layer.token_adapter.trainable_tokens_delta["default"] if peft else layer.weight[KNOWN:]
    assert torch.isfinite(rows).all()


@pytest.mark.parametrize("tied", [True, False])
def test_the_base_as_teacher_has_the_rows_it_started_with(bases, tmp_path, tied):
    """Whatever the adapter has made of them since: in the embedding, and in the head, which is called later."""
    model = sft(bases[tied], tmp_path, LORA).model
    labels = torch.where(torch.arange(IDS.size(1)) > 0, IDS, -100)
    with torch.no_grad(), model.disable_adapter():
        expected = model(IDS).logits[0, :-1]
    with torch.no_grad():
        for name, rows in model.named_parameters():
            if "trainable_tokens_delta" in name:
                rows.add_(1.0)
    hidden, head = AdapterTeacher().states(model, {"input_ids": IDS}, trained_positions(labels))
    torch.testing.assert_close(head.module(hidden), expected)
    assert (model.eval()(IDS).logits[0, :-1] - expected).abs().max() > 0.1


def test_what_only_the_student_has_is_an_error_in_rows_and_as_its_stop(bases, teacher, tmp_path):
    def build(rows, **values):
        values |= {"added_tokens": THINK, "teacher_model_name_or_path": teacher}
        return DistillationTrainer(
            model=bases[True], args=DistillationConfig(str(tmp_path), **QUIET, **values), train_dataset=rows
        )

    with pytest.raises(DatasetError, match="a token that only one of the two models has"):
        build(thinking().map(lambda row: {"prompt": "<think>" + row["prompt"]}))
    with pytest.raises(DatasetError, match="a token that only one of the two models has"):
        build(thinking(), lmbda=0.5)
    with pytest.raises(ValueError, match="The student stops at <end>, which the teacher has no id for"):
        build(text_rows(4), added_special_tokens=["<end>"], eos_token="<end>")


def test_vllm_would_load_the_model_without_them(bases, tmp_path, monkeypatch):
    args = DistillationConfig(str(tmp_path), **QUIET, added_tokens=THINK, use_vllm=True)
    with pytest.raises(
        ValueError, match="vLLM loads the model as it is stored, with 259 rows, and new tokens need 261"
    ):
        add_tokens(bases[True], None, args, quantization_config=None, peft_config=None)
