"""Whatever people write, the labels decode to the assistant's text plus its stop token."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bundled_templates import family
from tiny import tokenizer

from trl_opd.data.rows import read_row
from trl_opd.data.tokenize import Tokenization
from trl_opd.masking import check_batch, trained_positions

FRAGMENTS = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "</think>",
    "<think>",
    "assistant",
    "user",
    "\n\n",
    " ",
    "é",
    "日",
    "😀",
]
words = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(codec="utf-8"), max_size=6)), max_size=6)
content = words.map("".join).filter(lambda text: text.strip())
turns = st.lists(st.tuples(content, content), min_size=1, max_size=3)
pads = st.sampled_from(["<|endoftext|>", "<|im_end|>", "<|im_start|>"])
TOKENIZERS = {pad: tokenizer(pad=pad) for pad in ("<|endoftext|>", "<|im_end|>", "<|im_start|>")}
LLAMA = family("llama3")


def conversation(pairs, system):
    head = [{"role": "system", "content": system}] if system else []
    tail = [{"role": r, "content": c} for pair in pairs for r, c in zip(("user", "assistant"), pair, strict=True)]
    return {"messages": head + tail}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(turns, st.none() | content), min_size=1, max_size=3), pads, st.sampled_from(["left", "right"])
)
def test_labels_decode_to_what_the_assistant_wrote(conversations, pad, side):
    tok = TOKENIZERS[pad]
    rows = [Tokenization(tok).row(read_row(conversation(pairs, system), "messages")) for pairs, system in conversations]
    longest = max(len(row.input_ids) for row in rows)

    def padded(values, filler):
        fill = [filler] * (longest - len(values))
        return fill + values if side == "left" else values + fill

    ids = torch.tensor([padded(row.input_ids, tok.pad_token_id) for row in rows])
    labels = torch.tensor([padded(row.labels, -100) for row in rows])
    mask = torch.tensor([padded([1] * len(row.input_ids), 0) for row in rows])
    check_batch(ids, labels, mask)
    positions = trained_positions(labels)
    for b, (pairs, _) in enumerate(conversations):
        written = tok.decode(positions.targets[positions.rows == b])
        assert written == "".join(f"{answer}<|im_end|>" for _, answer in pairs)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns)
def test_the_same_through_a_template_that_strips_its_contents(pairs):
    tok = LLAMA
    row = Tokenization(tok).row(read_row(conversation(pairs, None), "messages"))
    written = tok.decode([label for label in row.labels if label != -100])
    assert written == "".join(f"{answer.strip()}<|eot_id|>" for _, answer in pairs)
    assert row.normalized == any(answer != answer.strip() for _, answer in pairs)


@settings(max_examples=100, deadline=None)
@given(content, content)
def test_prompt_and_completion_text(prompt, completion):
    tok = tokenizer(merges=(("a", "b"), ("Ġ", "a"), ("e", "r")))
    row = Tokenization(tok).row(read_row({"prompt": prompt, "completion": completion}, "prompt_completion"))
    written = tok.decode([label for label in row.labels if label != -100])
    assert written == completion.removesuffix("<|im_end|>") + "<|im_end|>"
