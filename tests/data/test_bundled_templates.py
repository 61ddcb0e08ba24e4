"""What is trained under every chat template that TRL bundles, decoded: template × kind of row.

A template that appears in a later TRL and not here fails `test_every_bundled_template_is_here`: add its line.
"""

import re
from importlib.resources import files

import pytest
from tiny import tokenizer

from trl_opd.data.rows import BadRow, read_row
from trl_opd.data.templates import BUNDLED, MARKED, TURN_BY_TURN
from trl_opd.data.tokenize import Tokenization

THOUGHT = "<think>\nhm\n</think>\n\n4"
FOLDER = files("trl") / "chat_templates"

# What becomes of a thought inside the content. kept: to the letter; prefilled: the generation prompt holds its <think>
KEPT, PREFILLED, DROPPED = THOUGHT, "hm\n</think>\n\n4", None
EOT, IM = "<|eot_id|>", "<|im_end|>"

# template: (text the assistant writes before its content, stop token, what becomes of a thought)
TABLE = {
    "cohere": ("", "<|END_OF_TURN_TOKEN|>", KEPT),
    "cohere_training": ("", "<|END_OF_TURN_TOKEN|>", KEPT),
    "cohere2": ("", "<|END_RESPONSE|>", KEPT),
    "cohere2_training": ("", "<|END_RESPONSE|>", KEPT),
    "deepseek_r1_distill": ("", "<｜end▁of▁sentence｜>", DROPPED),
    "deepseek_r1_distill_training": ("", "<｜end▁of▁sentence｜>", PREFILLED),
    "deepseekv3": ("", "<｜end▁of▁sentence｜>", DROPPED),
    "deepseekv3_training": ("", "<｜end▁of▁sentence｜>", DROPPED),
    "diffusion_gemma": ("", "<turn|>", KEPT),
    "diffusion_gemma_training": ("", "<turn|>", KEPT),
    "gemma": ("", "<end_of_turn>", KEPT),
    "gemma_training": ("", "<end_of_turn>", KEPT),
    "gemma3": ("", "<end_of_turn>", KEPT),
    "gemma3_training": ("", "<end_of_turn>", KEPT),
    **{f"gemma4{v}": ("", "<turn|>", KEPT) for v in ("", "_v2", "_v3", "_v4", "_v5")},
    "glm4moe": ("", "", "<think>hm</think>\n4"),  # it moves the newlines, which is counted; it has no stop token
    "glm4moe_training": ("", "<|user|>", "<think>hm</think>\n4"),
    "gptoss": ("<|channel|>final<|message|>", "<|return|>", KEPT),
    "gptoss_training": ("<|channel|>final<|message|>", "<|return|>", KEPT),
    **{f"lfm2{v}": ("", IM, KEPT) for v in ("", "_2_5", "_2_5_v2", "_2_5_vl", "_v2", "_training", "_v2_training")},
    **{f"llama3{v}": ("", EOT, KEPT) for v in ("", "_1", "_2", "_training")},
    "muse_glimmer": (" to=user<|message|>", "<|eot|>", KEPT),
    "muse_glimmer_training": (" to=user<|message|>", "<|eot|>", KEPT),
    **{
        f"nemotron_3{v}{t}": ("", IM, PREFILLED)
        for v in ("_5_lightning", "_nano", "_super", "_ultra")
        for t in ("", "_training")
    },
    **{f"phi3{v}": ("", "<|end|>", KEPT) for v in ("", "_5", "_5_training", "_training")},
    **{f"qwen2_5{v}": ("", IM, KEPT) for v in ("", "_training", "_vl", "_vl_training")},
    **{f"qwen3{v}": ("", IM, KEPT) for v in ("", "_training", "_vl", "_vl_training")},
    **{f"qwen3_instruct_2507{t}": ("", IM, KEPT) for t in ("", "_training")},
    **{f"qwen3_5_{v}{t}": ("", IM, PREFILLED) for v in ("think", "nothink") for t in ("", "_training")},
    **{f"qwen3_6{t}": ("", IM, PREFILLED) for t in ("", "_training")},
    **{f"qwen3_8{t}": ("", IM, KEPT) for t in ("", "_training")},
}
FOR_IMAGES = {f"{name}{t}" for name in ("idefics3", "llava_next", "smolvlm") for t in ("", "_training")}
# an earlier turn is closed by another token than the last one
EARLIER_STOP = {"gptoss": "<|end|>", "gptoss_training": "<|end|>"}


def family(name):
    """A byte-level tokenizer with the special tokens that a template's source names."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    found = set(re.findall(r"<[|｜][^<>{}'\"]*?[|｜]>|<[a-z_]+>|</s>", source))
    found |= set(re.findall(r"<[a-z]+\|>|<\|[a-z]+>", source))  # Gemma 4 opens and closes with a bar on one side
    words = {"<think>", "</think>", "<tool_call>", "<tools>", "<function>"}
    eos = TABLE[name][1] or "<|endoftext|>"
    tok = tokenizer(
        eos=eos, pad="<pad>", special=("<pad>", "<bos>", eos, *sorted(found - words - {eos, "<pad>", "<bos>"}))
    )
    tok.bos_token, tok.chat_template = "<bos>", source
    return tok


def trained(tok, row, kind, **kwargs):
    tokenized = Tokenization(tok, **kwargs).row(read_row(row, kind))
    spans, span = [], []
    for label in [*tokenized.labels, -100]:
        if label != -100:
            span.append(label)
        elif span:
            spans, span = [*spans, tok.decode(span)], []
    return spans, tokenized


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_every_bundled_template_is_here():
    bundled = {path.name.removesuffix(".jinja") for path in FOLDER.iterdir() if path.name.endswith(".jinja")}
    assert bundled - FOR_IMAGES == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_one_turn(name):
    head, stop, _ = TABLE[name]
    row = {"prompt": chat(("user", "a")), "completion": chat(("assistant", "four"))}
    spans, tokenized = trained(family(name), row, "prompt_completion_messages")
    assert spans == [f"{head}four{stop}"]
    assert tokenized.stopped == bool(stop) and not tokenized.normalized
    has_blocks = re.search(r"\{%-?\s*generation", (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    assert has_blocks or not name.endswith("_training")
    assert tokenized.rule in ((MARKED,) if has_blocks else (BUNDLED, TURN_BY_TURN))


@pytest.mark.parametrize("name", TABLE)
def test_every_assistant_turn_and_nothing_else(name):
    head, stop, _ = TABLE[name]
    row = {"messages": chat(("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"))}
    spans, _ = trained(family(name), row, "messages")
    assert spans == [f"{head}one{EARLIER_STOP.get(name, stop)}", f"{head}two{stop}"]
    spans, _ = trained(family(name), row, "messages", train_on="last_assistant")
    assert spans == [f"{head}two{stop}"]


@pytest.mark.parametrize("name", TABLE)
def test_a_thought_is_trained_or_shown_as_lost(name):
    head, stop, thought = TABLE[name]
    row = {"prompt": chat(("user", "a")), "completion": chat(("assistant", THOUGHT))}
    if thought is DROPPED:
        with pytest.raises(BadRow, match=r"drops this text of the assistant; found '<think>\\nhm\\n</think>'"):
            trained(family(name), row, "prompt_completion_messages")
        return
    spans, tokenized = trained(family(name), row, "prompt_completion_messages")
    assert spans == [f"{head}{thought}{stop}"]
    assert tokenized.normalized == (thought not in (KEPT, PREFILLED))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen2_5_training", "qwen3"])
def test_tool_calls_are_trained_and_their_results_are_not(name):
    tool = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [tool]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    spans, _ = trained(family(name), {"messages": messages}, "messages")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert spans == [call, "three<|im_end|>"]


def test_the_way_out_names_a_template_that_keeps_the_text():
    row = {"prompt": chat(("user", "a")), "completion": chat(("assistant", THOUGHT))}
    with pytest.raises(BadRow, match=r"chat_template_path: .*deepseek_r1_distill_training.jinja`, which keeps it"):
        trained(family("deepseek_r1_distill"), row, "prompt_completion_messages")
    with pytest.raises(BadRow, match="a `chat_template_path` that keeps it"):
        trained(family("deepseekv3"), row, "prompt_completion_messages")
    twice = {"messages": chat(("user", "a"), ("assistant", THOUGHT), ("user", "b"), ("assistant", THOUGHT))}
    with pytest.raises(
        BadRow, match=r"rewrites an earlier turn .* found '<think>\\nhm.*qwen3_training.jinja`, which keeps"
    ):
        trained(family("qwen3"), twice, "messages")
    spans, _ = trained(family("qwen3_training"), twice, "messages")
    assert spans == [THOUGHT + IM, THOUGHT + IM]


def test_an_injected_empty_think_block_is_trained_only_where_asked():
    row = {"prompt": chat(("user", "a")), "completion": chat(("assistant", "four"))}
    for asked, expected in ((False, "four<|im_end|>"), (True, "<think>\n\n</think>\n\nfour<|im_end|>")):
        spans, _ = trained(family("qwen3"), row, "prompt_completion_messages", train_empty_think=asked)
        assert spans == [expected]
