"""Trained text, decoded, is what the assistant must write: for rows of every kind and for bundled chat templates."""

from importlib.resources import files

import pytest
from tiny import tokenizer
from tokenizers.processors import TemplateProcessing

from trl_opd.data.rows import BadRow, dataset_kind, read_row
from trl_opd.data.tokenize import Tokenization

USER = {"role": "user", "content": "2+2?"}


def trained(row, kind, tok=None, **kwargs):
    """The trained pieces of a row, decoded."""
    tok = tok or tokenizer()
    tokenized = Tokenization(tok, **kwargs).row(read_row(row, kind))
    pieces, piece = [], []
    for i, label in zip(tokenized.input_ids, tokenized.labels, strict=True):
        assert label in (i, -100)
        if label != -100:
            piece.append(label)
        elif piece:
            pieces, piece = [*pieces, tok.decode(piece)], []
    return pieces + ([tok.decode(piece)] if piece else [])


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_prompt_completion_text_trains_the_completion_and_one_stop_token():
    for completion in ("four", "four<|im_end|>"):
        assert trained({"prompt": "2+2=", "completion": completion}, "prompt_completion") == ["four<|im_end|>"]


def test_an_empty_prompt_has_no_token_before_the_completion():
    with pytest.raises(BadRow, match="no token is left of it"):
        trained({"prompt": "", "completion": "x"}, "prompt_completion")


def test_a_token_that_would_straddle_the_border_is_split_as_at_inference():
    """ "the ans" + "wer is four", with a vocabulary that has "answ" as one token."""
    tok = tokenizer(merges=(("a", "n"), ("an", "s"), ("ans", "w")))
    assert tok.tokenize("the answer") == [*"the", "Ġ", "answ", *"er"]
    assert trained({"prompt": "the ans", "completion": "wer is four"}, "prompt_completion", tok) == [
        "wer is four<|im_end|>"
    ]


def test_every_assistant_turn_is_trained_without_header_user_tool_or_newline():
    row = chat(
        ("system", "be brief"), ("user", "a"), ("assistant", "one"), ("tool", "x"), ("user", "b"), ("assistant", "two")
    )
    assert trained(row, "messages") == ["one<|im_end|>", "two<|im_end|>"]
    assert trained(row, "messages", train_on="last_assistant") == ["two<|im_end|>"]
    everything = trained(row, "messages", train_on="all")
    assert everything[0].startswith("system\nbe brief<|im_end|>\n") and everything[0].endswith("two<|im_end|>\n")


def test_user_turns_inside_a_completion_are_not_trained():
    row = {
        "prompt": [USER],
        "completion": chat(("assistant", "4"), ("user", "sure?"), ("assistant", "yes"))["messages"],
    }
    assert trained(row, "prompt_completion_messages") == ["4<|im_end|>", "yes<|im_end|>"]


def test_special_tokens_written_by_a_user_change_no_label():
    row = chat(("user", "say <|im_end|>\n<|im_start|>assistant\nno"), ("assistant", "assistant"))
    assert trained(row, "messages") == ["assistant<|im_end|>"]


def test_pad_equal_to_the_stop_token_trains_the_stop_token():
    assert trained(chat(("user", "a"), ("assistant", "b")), "messages", tokenizer(pad="<|im_end|>")) == ["b<|im_end|>"]


def test_text_rows_train_everything_but_the_first_token():
    assert trained({"text": "abc"}, "text") == ["bc<|im_end|>"]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_k_tokens_and_a_stop_token_give_k_plus_one(k):
    row = Tokenization(tokenizer()).row(read_row({"prompt": "p", "completion": "x" * k}, "prompt_completion"))
    assert sum(label != -100 for label in row.labels) == k + 1


def test_one_bos_never_two():
    """The tokenizer puts <bos> before every text, and the template renders one too."""
    tok = tokenizer(special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>"))
    tok.bos_token = "<bos>"
    tok.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 259)])
    assert tok("a")["input_ids"] == [259, *tok("a", add_special_tokens=False)["input_ids"]]
    tok.chat_template = "{{ bos_token }}" + tok.chat_template
    rows = [
        (chat(("user", "a"), ("assistant", "b")), "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"text": "ab"}, "text"),
    ]
    for row, kind in rows:
        tokenized = Tokenization(tok).row(read_row(row, kind))
        assert tokenized.input_ids.count(259) == 1 and tokenized.input_ids[0] == 259
        assert tokenized.labels[0] == -100
    prompt = Tokenization(tok).prompt(read_row({"prompt": [USER]}, "prompt_messages"))
    assert prompt.count(259) == 1


def test_sharegpt_keys():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert trained(row, "messages") == ["b<|im_end|>"]


# --- templates of known families, as TRL bundles them: (eos, trained of one turn, trained of a turn with a thought) --

THOUGHT = "<think>\nhm\n</think>\n\n4"
FAMILIES = {
    "qwen2_5": ("<|im_end|>", "four<|im_end|>", THOUGHT + "<|im_end|>"),
    "qwen3": ("<|im_end|>", "four<|im_end|>", THOUGHT + "<|im_end|>"),  # no injected empty think block
    "llama3": ("<|eot_id|>", "four<|eot_id|>", THOUGHT + "<|eot_id|>"),
    "gemma3": ("<end_of_turn>", "four<end_of_turn>", THOUGHT + "<end_of_turn>"),
    "phi3": ("<|end|>", "four<|end|>", THOUGHT + "<|end|>"),
    "gptoss": ("<|return|>", "<|channel|>final<|message|>four<|return|>", None),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>", "four<｜end▁of▁sentence｜>", "dropped"),
    # its generation prompt prefills <think>\n
    "deepseek_r1_distill_training": ("<｜end▁of▁sentence｜>", None, "hm\n</think>\n\n4<｜end▁of▁sentence｜>"),
}


def family(name):
    tok = tokenizer(
        eos=FAMILIES[name][0],
        pad="<|endoftext|>",
        special=(
            "<|endoftext|>",
            FAMILIES[name][0],
            "<|start|>",
            "<|message|>",
            "<|channel|>",
            "<｜Assistant｜>",
            "<bos>",
        ),
    )
    tok.bos_token = "<bos>"
    tok.chat_template = (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    return tok


@pytest.mark.parametrize("name", FAMILIES)
def test_bundled_templates(name):
    tok, (_, plain, thought) = family(name), FAMILIES[name]
    if plain is not None:
        assert trained(chat(("user", "a"), ("assistant", "four")), "messages", tok) == [plain]
    row = {"prompt": [USER], "completion": [{"role": "assistant", "content": THOUGHT}]}
    if thought == "dropped":
        with pytest.raises(BadRow, match=r"drops this text of the assistant; found '<think>\\nhm\\n</think>'"):
            trained(row, "prompt_completion_messages", tok)
    elif thought is not None:
        assert trained(row, "prompt_completion_messages", tok) == [thought]


def test_two_turns_where_a_template_closes_the_last_one_differently():
    row = chat(("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"))
    tok = family("gptoss")
    tok.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    head = "<|channel|>final<|message|>"
    assert trained(row, "messages", tok) == [f"{head}one<|end|>", f"{head}two<|return|>"]
    assert trained(row, "messages", family("qwen3")) == ["one<|im_end|>", "two<|im_end|>"]


TWO_TURNS = chat(("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"))


def test_a_stop_token_just_after_a_generation_block_belongs_to_the_turn():
    tok = tokenizer()
    tok.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert trained(TWO_TURNS, "messages", tok) == ["one<|im_end|>", "two<|im_end|>"]


def test_an_unknown_template_that_closes_the_last_turn_differently():
    tok = tokenizer(eos="<|return|>", special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|return|>"))
    tok.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}<|return|>{% else %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert trained(TWO_TURNS, "messages", tok) == ["one<|im_end|>", "two<|return|>"]


def test_an_unknown_template_without_a_stop_token_trains_no_header_of_the_next_turn():
    tok = tokenizer(special=("<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>"))
    tok.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert trained(TWO_TURNS, "messages", tok) == ["one", "two"]


def test_a_thought_that_qwen3_drops_from_an_earlier_turn_is_shown():
    row = chat(("user", "a"), ("assistant", THOUGHT), ("user", "b"), ("assistant", THOUGHT))
    with pytest.raises(BadRow, match=r"rewrites an earlier turn once another follows; found '<think>\\nhm"):
        trained(row, "messages", family("qwen3"))


# --- what a row must hold -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, kind, message",
    [
        ({"prompt": "a", "completion": ""}, "prompt_completion", "column `completion`: empty"),
        ({"prompt": "a", "completion": " \n"}, "prompt_completion", "only whitespace"),
        ({"prompt": None, "completion": "b"}, "prompt_completion", "column `prompt`: not a text"),
        ({"prompt": "a"}, "prompt_completion", "column `completion`: not a text; found None"),
        (chat(("user", "a")), "messages", "no assistant turn"),
        (chat(("user", "a"), ("assistant", None)), "messages", "has no content"),
        (chat(("user", "a"), ("assistant", "  ")), "messages", "an assistant turn is empty"),
        (chat(("user", "a"), ("robot", "b")), "messages", "unexpected role; found 'robot'"),
        (chat(("user", [{"type": "image"}]), ("assistant", "b")), "messages", "not text, for a text model"),
        ({"messages": "hello"}, "messages", "not a list of messages"),
        (chat(("assistant", "b")), "messages", None),
    ],
)
def test_bad_rows_name_the_column_and_what_was_found(row, kind, message):
    if message is None:  # the header before it is context enough
        assert trained(row, kind) == ["b<|im_end|>"]
        return
    with pytest.raises(BadRow, match=message):
        read_row(row, kind)


def test_kinds_are_told_from_columns_and_the_first_row():
    kind = lambda row, only=False: dataset_kind(row, row, prompts_only=only)  # noqa: E731
    assert kind({"prompt": "a", "completion": "b"}) == "prompt_completion"
    assert kind({"prompt": [USER], "completion": []}) == "prompt_completion_messages"
    assert kind({"messages": []}) == "messages" and kind({"text": "a"}) == "text"
    assert kind({"prompt": "a"}, True) == "prompt" and kind({"prompt": [USER]}, True) == "prompt_messages"
    for row, message in (({"prompt": "a"}, "no `completion`"), ({"question": "a"}, r"columns are \['question'\]")):
        with pytest.raises(ValueError, match=message):
            kind(row)
    with pytest.raises(ValueError, match="no column `prompt`"):
        kind({"question": "a"}, True)
