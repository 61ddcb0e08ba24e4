"""What the benchmarks promise: no time on a busy machine, none where the sides differ, tables where they belong."""

import io
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import common
import gkd
import sides
import train_step

ROOT = Path(__file__).parents[1]


def test_a_busy_machine_is_refused(monkeypatch):
    monkeypatch.setattr(common, "busy_processors", lambda: 0.7)
    with pytest.raises(SystemExit, match=r"Other work keeps 0.70 processors busy.*--force"):
        common.refuse_a_busy_machine(force=False)
    assert common.refuse_a_busy_machine(force=True) == 0.7
    monkeypatch.setattr(common, "busy_processors", lambda: 0.1)
    assert common.refuse_a_busy_machine(force=False) == 0.1


def test_busy_processors_are_counted_in_a_short_while(monkeypatch):
    """Between two looks at 4 processors, 300 of 400 ticks were idle: one was busy."""
    looks = iter(["cpu  10 0 5 100 5 0 0 0 0 0\n", "cpu  80 0 35 390 15 0 0 0 70 0\n"])
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(next(looks)))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert common.busy_processors(watch=0.0) == pytest.approx(1.0)


def test_a_table_is_put_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- end -->\nb\n<!-- y -->\nkept\n<!-- end -->\n")
    common.write_table(page, "x", common.table(["n", "s"], [["1", 2.5]]))
    text = page.read_text()
    assert (
        text
        == "a\n<!-- x -->\n\n| n | s |\n| --- | --- |\n| 1 | 2.5 |\n\n<!-- end -->\nb\n<!-- y -->\nkept\n<!-- end -->\n"
    )
    with pytest.raises(ValueError, match="has no lines `<!-- z -->`"):
        common.write_table(page, "z", "")


@pytest.mark.parametrize("name", ["train step, cpu", "train step, cuda", "head, cpu", "prepare"])
def test_the_page_has_the_marks(name, tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    common.write_table(page, name, "new")
    assert f"<!-- {name} -->\n\nnew\n\n<!-- end -->" in page.read_text()


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_no_time_where_the_sides_differ(what):
    work = train_step.CPU[0]
    same, off = (
        sides.Step(1.0, 2.0, 3.0),
        {"loss": sides.Step(1.0, 2.004, 3.0), "grad_norm": sides.Step(1.0, 2.0, 3.01)},
    )
    train_step.require_agreement(work, {"ours": same, "trl": sides.Step(9.0, 2.001, 3.001)})
    with pytest.raises(SystemExit, match=f"{what} is .* so no time is shown"):
        train_step.require_agreement(work, {"ours": same, "trl": off[what]})


def test_spread_and_ratios():
    assert common.spread([1.0, 3.0, 2.0]) == "2.00 (1.00–3.00)" and common.spread([1.0]) == "1.00"
    assert common.ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]


def test_rows_have_the_lengths_they_should():
    tok = sides.make_tokenizer(49152)
    for work in train_step.CPU[:4:2]:
        many = sides.make_rows(sides.Work(**{**vars(work), "windows": 60}), tok, 49152)
        total, trained = train_step.tokens(sides.Work(**{**vars(work), "windows": 60}), many)
        if work.job == "sft":
            assert abs(total / 480 - 123) < 12 and abs(trained / total - 0.28) < 0.02
        else:
            assert abs(trained / 480 - 80) < 10 and max(map(len, many.answers.values())) == 256
            assert len(many.answers) == 480
            assert [tuple(tok(row["prompt"])["input_ids"]) for row in many.dataset] == list(many.answers)


def test_gkd_reads_the_same_ids_from_its_conversations():
    """Its own collator, batches padded on the left: prompts as they are, and the answer alone as labels."""
    from trl.experimental.utils import DataCollatorForChatML

    tok = sides.make_tokenizer(512)
    answers = {(20, 21, 22): [30, 1], (40,): [50, 51, 52, 1]}
    tok.chat_template = gkd.TEMPLATE
    batch = DataCollatorForChatML(tok)(list(gkd.conversations(answers, tok)))
    assert batch["prompts"].tolist() == [[20, 21, 22], [0, 0, 40]]
    assert batch["input_ids"].tolist() == [[20, 21, 22, 30, 1], [40, 50, 51, 52, 1]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 30, 1], [-100, 50, 51, 52, 1]]


def test_head_of_trl_can_be_compacted_by_hand():
    """TRL's own switch is still where the benchmark turns it."""
    import trl.trainer.distillation_trainer as module

    assert not module._use_triton(torch.device("cpu"))
    with sides.compacted():
        assert module._use_triton(torch.device("cpu"))
    assert not module._use_triton(torch.device("cpu"))
