"""What is known from transformers' Trainer and from TRL, and the test that shows each in our two jobs.

Tests are marked: `@pytest.mark.feature("NEFTune", job="sft", model="full")`. A job or model that is left out is the
test's parameter of that name (a `peft_config` of `None` is `full`, any other `lora`). `how="delegated"` stands for what
goes to TRL's own code, `how="refused"` for what is an error at start. One or several jobs and models may be named.

    python tests/feature_table.py      # collects the tests, runs none, and writes docs/trainer-features.md

A test that is skipped here fills no cell. `tests/features/test_feature_table.py` holds the page to the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trainer-features.md"
COLUMNS = [("sft", "full"), ("sft", "lora"), ("distill", "full"), ("distill", "lora")]
HOW = ("tested", "delegated", "refused")

GROUPS = {
    "Optimizer and schedule": [
        "`optim: adamw_torch`",
        "`optim: adafactor`",
        "8-bit and paged optimizers (bitsandbytes)",
        "`lr_scheduler_kwargs` (`cosine_with_min_lr`)",
        "`label_smoothing_factor`",
        "`neftune_noise_alpha`",
        "`auto_find_batch_size`",
        "`train_sampling_strategy`",
    ],
    "Memory and speed": [
        "`gradient_checkpointing`, reentrant",
        "`gradient_checkpointing`, not reentrant",
        "`gradient_checkpointing` with the base as teacher",
        "`activation_offloading`",
        "`torch_compile`",
    ],
    "Evaluation": [
        "`compute_metrics`",
        "Evaluation on generated text",
        "Early stopping",
        "`load_best_model_at_end`, `metric_for_best_model`, `save_total_limit`",
    ],
    "Loss and models": [
        "`compute_loss_func`",
        "Images",
        "Mixture-of-experts auxiliary loss",
        "Mixture-of-experts models",
        "Context and sequence parallelism",
        "Gemma-, Cohere- and Granite-style heads",
        "LoRA on the head",
        "QLoRA",
        "DoRA",
        "An adapter folder as the starting model",
        "New tokens and resized embeddings",
    ],
    "Logs and trackers": [
        "`logging_nan_inf_filter`",
        "`include_num_input_tokens_seen`",
        "Tokens per second and peak memory",
        "Parameters and dtypes at start",
        "TensorBoard",
        "Trackio",
        "Weights & Biases, offline",
    ],
    "Checkpoints and the Hub": [
        "Resuming",
        "Resuming under ZeRO",
        "Warning on other versions at a resume",
        "Weights saved whole under ZeRO-3",
        "`push_to_hub`",
    ],
}

HEAD = """\
# Features of the Trainer, and where each is tested

What people know from transformers' `Trainer` and from TRL, in both jobs, with all weights trained and with LoRA.
*tested*: a test shows that it does what it says. *delegated*: the loss is computed by TRL's own code, which is logged
once, and a test shows that it is right. *refused*: an error at start says why and what to set, and a test holds it.
An empty cell has no test. Each word leads to the test's file.

`python tests/feature_table.py` makes this page from the marks on the tests; what is skipped on a machine without a GPU
is not counted.
"""

NOTES = """\
## What the empty cells are

- LoRA on the head, QLoRA, DoRA and adapter folders are adapters: there is nothing to fill for full training.
- `compute_metrics` and `compute_loss_func`: TRL's `DistillationTrainer` takes neither, and so does ours.
- Mixture-of-experts auxiliary loss: TRL's `DistillationTrainer` does not add one, nor does ours.
- Context and sequence parallelism in sft go to TRL's code, with a logged line; no test trains with them.
- `activation_offloading` in sft is TRL's own and needs a GPU: no test trains with it, and on a CPU it is refused. TRL's
  `DistillationConfig` has no such field; a recipe that sets it is told so.
- Paged optimizers: on a CPU bitsandbytes pages nothing, and warns; their steps are what is tested.
"""


@dataclass
class Collected:
    """What a run of pytest has collected, before anything was deselected."""

    cells: Cells
    files: set[str]


COLLECTED = pytest.StashKey[Collected]()
Cells = dict[tuple[str, str, str], set[tuple[str, str]]]  # (feature, job, model) -> {(how, file)}


def named() -> list[str]:
    return [name for names in GROUPS.values() for name in names]


def note(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what was collected for the test of the page."""
    files = {item.path.relative_to(ROOT).as_posix() for item in items}
    config.stash[COLLECTED] = Collected(cells_of(items), files)


def cells_of(items: Iterable[pytest.Item]) -> Cells:
    """The cells that collected tests fill. Raises `UsageError` for a mark that cannot be read."""
    cells: Cells = {}
    for item in items:
        for mark in item.iter_markers("feature"):
            for cell, how in _read(item, mark):
                if not _is_skipped(item):
                    cells.setdefault(cell, set()).add((how, item.path.relative_to(ROOT).as_posix()))
    return cells


def _read(item: pytest.Item, mark: pytest.Mark) -> list[tuple[tuple[str, str, str], str]]:
    given, (name,) = dict(mark.kwargs), mark.args
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    job, how = given.pop("job", parameters.get("job")), given.pop("how", "tested")
    model = given.pop("model", None) or parameters.get("model")
    if model is None and "peft_config" in parameters:
        model = "full" if parameters["peft_config"] is None else "lora"
    jobs, models = ([value] if isinstance(value, str) else list(value or ()) for value in (job, model))
    cells = [(name, a, b) for a in jobs for b in models]
    if given or name not in named() or how not in HOW or not cells or not {cell[1:] for cell in cells} <= {*COLUMNS}:
        raise pytest.UsageError(f"{item.nodeid}: this `feature` mark cannot be read: {mark}, job {job!r}, {model!r}")
    return [(cell, how) for cell in cells]


def _is_skipped(item: pytest.Item) -> bool:
    from _pytest.skipping import evaluate_skip_marks

    return evaluate_skip_marks(item) is not None


def page(cells: Cells) -> str:
    lines = [HEAD]
    for group, names in GROUPS.items():
        lines += [f"## {group}", "", "| | sft, full | sft, LoRA | distill, full | distill, LoRA |", "|---" * 5 + "|"]
        for name in names:
            texts = (_shown(cells.get((name, *column), set())) for column in COLUMNS)
            lines.append(f"| {name} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join([*lines, NOTES])


def _shown(cell: set[tuple[str, str]]) -> str:
    return ", ".join(f"[{how}](../{file})" for how, file in sorted(cell, key=lambda c: (HOW.index(c[0]), c[1])))


def cells_in(text: str) -> Cells:
    """The cells of a page."""
    cells: Cells = {}
    for line in text.splitlines():
        name, *texts = (part.strip() for part in line.strip("|").split("|"))
        if name in named():
            for column, shown in zip(COLUMNS, texts, strict=True):
                if found := set(re.findall(r"\[(\w+)\]\(\.\./([^)]*)\)", shown)):
                    cells[(name, *column)] = found
    return cells


class _Write:
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        PAGE.write_text(page(session.config.stash[COLLECTED].cells), encoding="utf-8")


def main() -> int:
    return int(pytest.main(["--collect-only", "-qq", "--no-header", str(ROOT / "tests")], [_Write()]))


if __name__ == "__main__":
    import feature_table  # the one that conftest.py has too

    raise SystemExit(feature_table.main())
