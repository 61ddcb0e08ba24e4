"""Datasets under the names that TRL's tests load: the same configs, splits, columns and formats, our own rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from PIL import Image

ZEN = (
    "Beautiful is better than ugly.",
    "Explicit is better than implicit.",
    "Simple is better than complex.",
    "Complex is better than complicated.",
    "Flat is better than nested.",
    "Sparse is better than dense.",
    "Readability counts.",
    "Special cases aren't special enough to break the rules.",
    "Although practicality beats purity.",
    "Errors should never pass silently.",
    "Unless explicitly silenced.",
    "In the face of ambiguity, refuse the temptation to guess.",
    "There should be one-- and preferably only one --obvious way to do it.",
    "Although that way may not be obvious at first unless you're Dutch.",
    "Now is better than never.",
    "Although never is often better than *right* now.",
    "If the implementation is hard to explain, it's a bad idea.",
    "If the implementation is easy to explain, it may be a good idea.",
    "Namespaces are one honking great idea -- let's do more of those!",
)
TEST_ROWS = 2  # TRL keeps the last tenth of its rows apart, in order
Column = dict[str, list[Any]]


def _cut(line: str) -> tuple[str, str]:
    """A line as a prompt and the completion that goes on from it, with the space at the completion's start."""
    words = line.split()
    prompt = " ".join(words[: max(len(words) // 2, 1)])
    return prompt, line[len(prompt) :]


def _turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _question(line: str) -> str:
    return f"How does this line go on: {_cut(line)[0]}"


def _asked(line: str) -> list[dict[str, Any]]:
    return [_turn("user", _question(line))]


def _answered(line: str, **more: Any) -> list[dict[str, Any]]:
    return [_turn("assistant", _cut(line)[1].strip(), **more)]


def zen(config: str) -> Column:
    """`trl-internal-testing/zen`: the 19 lines in the formats that TRL's documentation names."""
    prompts, completions = zip(*map(_cut, ZEN), strict=True)
    return {
        "standard_language_modeling": {"text": list(ZEN)},
        "standard_prompt_only": {"prompt": list(prompts)},
        "standard_prompt_completion": {"prompt": list(prompts), "completion": list(completions)},
        "standard_implicit_prompt_preference": {
            "chosen": list(ZEN),
            "rejected": [f"{prompt} something else." for prompt in prompts],
        },
        "conversational_language_modeling": {"messages": [_asked(line) + _answered(line) for line in ZEN]},
        "conversational_prompt_only": {"prompt": [_asked(line) for line in ZEN]},
        "conversational_prompt_completion": {
            "prompt": [_asked(line) for line in ZEN],
            "completion": [_answered(line) for line in ZEN],
        },
    }[config]


def harmony(config: str) -> Column:
    """`trl-internal-testing/harmony`: thoughts in a field of their own, and arguments for the template in each row."""
    efforts = ("low", "medium", "high")
    kwargs = [
        {"reasoning_effort": efforts[i % 3], "model_identity": "You are a tiny language model."}
        for i in range(len(ZEN))
    ]
    answers = [_answered(line, thinking=f"The line has {len(line.split())} words.") for line in ZEN]
    columns: Column = {
        "language_modeling": {"messages": [_asked(line) + a for line, a in zip(ZEN, answers, strict=True)]},
        "prompt_completion": {"prompt": [_asked(line) for line in ZEN], "completion": answers},
    }[config]
    return columns | {"chat_template_kwargs": kwargs}


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = (
    (_tool("start_timer", "Starts a timer.", duration="integer"), {"duration": 600}, "600"),
    (_tool("get_current_time", "Tells the time.", location="string"), {"location": "Tokyo"}, "06:22:48"),
    (_tool("play_music", "Plays a song.", title="string", artist="string"), {"title": "Yes", "artist": "No"}, "ok"),
    (_tool("control_light", "Switches a light.", room="string", state="string"), {"room": "hall", "state": "on"}, "on"),
)


def _called(i: int) -> list[dict[str, Any]]:
    tool, arguments, result = TOOLS[i % len(TOOLS)]
    name = tool["function"]["name"]
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": f"Please call {name}."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": result},
        {"role": "assistant", "content": f"It says {result}."},
    ]


def toolcall(config: str) -> Column:
    """`trl-internal-testing/toolcall`: two assistant turns around a tool's, and the tools as JSON text."""
    assert config == "language_modeling"
    both = [[TOOLS[i % len(TOOLS)][0], TOOLS[(i + 1) % len(TOOLS)][0]] for i in range(len(ZEN))]
    return {"messages": [_called(i) for i in range(len(ZEN))], "tools": [json.dumps(tools) for tools in both]}


def zen_image(config: str) -> Column:
    """`trl-internal-testing/zen-image`: the conversations of zen with one image a row, beside them."""
    return zen(config) | {"image": [_image(i) for i in range(len(ZEN))]}


def zen_multi_image(config: str) -> Column:
    """`trl-internal-testing/zen-multi-image`: no image, one or two in a question, among the parts of its content."""
    assert config == "conversational_prompt_completion"
    rows = zen(config)
    prompts = [
        [_turn("user", [{"type": "image"}] * (i % 3) + [{"type": "text", "text": turn["content"]}]) for turn in prompt]
        for i, prompt in enumerate(rows["prompt"])
    ]
    completions = [
        [_turn("assistant", [{"type": "text", "text": turn["content"]}]) for turn in completion]
        for completion in rows["completion"]
    ]
    images = [[_image(i + n) for n in range(i % 3)] for i in range(len(ZEN))]
    return {"prompt": prompts, "completion": completions, "images": images}


def _image(seed: int) -> Image.Image:
    """An image of some size between 32 and 63, with every pixel of its own colour."""
    numbers = np.random.default_rng(seed)
    height, width = numbers.integers(32, 64, size=2)
    return Image.fromarray(numbers.integers(0, 256, size=(height, width, 3), dtype=np.uint8))


def texts() -> list[str]:
    """What the stand-ins' tokenizers learn their words from."""
    calls = [json.dumps(tool) for tool, _, _ in TOOLS] + [json.dumps(_called(i)) for i in range(len(TOOLS))]
    lines = [_question(line) for line in ZEN] + list(ZEN)
    return lines + calls + [effort for turn in harmony("language_modeling")["messages"] for effort in turn[1].values()]


DATASETS: dict[str, tuple[Callable[[str], Column], tuple[str, ...]]] = {
    "zen": (
        zen,
        (
            "standard_language_modeling",
            "standard_prompt_only",
            "standard_prompt_completion",
            "standard_implicit_prompt_preference",
            "conversational_language_modeling",
            "conversational_prompt_only",
            "conversational_prompt_completion",
        ),
    ),
    "zen-image": (
        zen_image,
        ("conversational_language_modeling", "conversational_prompt_only", "conversational_prompt_completion"),
    ),
    "zen-multi-image": (zen_multi_image, ("conversational_prompt_completion",)),
    "harmony": (harmony, ("language_modeling", "prompt_completion")),
    "toolcall": (toolcall, ("language_modeling",)),
}


def write_dataset(name: str, folder: Path) -> Path:
    """All configs of a dataset as parquet files that `load_dataset(folder, config)` reads, streamed or not."""
    make, configs = DATASETS[name]
    lines = ["---", "configs:"]
    for config in configs:
        dataset = Dataset.from_dict(make(config), on_mixed_types="use_json")
        rows = len(dataset) - TEST_ROWS
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, part in (("train", range(rows)), ("test", range(rows, len(dataset)))):
            file = folder / config / f"{split}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            dataset.select(part).to_parquet(file)
            lines += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")
    return folder
