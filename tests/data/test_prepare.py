"""A whole dataset by policy: one error with counts, or rows dropped and cut and counted."""

import json

import pytest
from datasets import Dataset, load_dataset
from test_bundled_templates import family
from tiny import tokenizer

from trl_opd.data.load import load_splits, pick_split
from trl_opd.data.prepare import RowPolicy, prepare_sft
from trl_opd.data.prompts import prepare_prompts
from trl_opd.data.rows import RowFormat
from trl_opd.data.templates import BUNDLED
from trl_opd.data.tokenize import Tokenization

ROWS = [{"prompt": "ab", "completion": "c" * n} for n in (1, 5, 50, 2, 3)]  # 4, 8, 53, 5 and 6 tokens


def prepare(rows, **policy):
    return prepare_sft(Dataset.from_list(rows), Tokenization(tokenizer()), RowPolicy(**policy), name="train")


def test_rows_become_ids_and_labels_and_are_counted():
    dataset, report = prepare(ROWS)
    assert dataset.column_names == ["input_ids", "labels"]
    assert (report.rows, report.kept, report.tokens, report.trained_tokens) == (5, 5, 76, 66)
    assert report.lines() == [
        "train: 5 rows read, 5 kept, 66 of 76 tokens trained (86.8%)",
        "train: tokens a row: 0% 4, 50% 6, 90% 53, 99% 53, 100% 53",
    ]


def test_two_processes_prepare_the_same():
    one, _ = prepare(ROWS)
    policy = RowPolicy()
    two, report = prepare_sft(Dataset.from_list(ROWS), Tokenization(tokenizer()), policy, name="train", num_proc=2)
    assert one[:] == two[:] and report.kept == 5


def test_bad_rows_are_one_error_with_counts_and_the_first_five():
    rows = ROWS + [{"prompt": "a", "completion": ""}] * 6 + [{"prompt": "a", "completion": " "}]
    with pytest.raises(ValueError) as error:
        prepare(rows)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(
        "7 of 12 rows of the train dataset cannot be trained: 6 × empty (column `completion`); 1 ×"
    )
    assert lines[1].startswith("  row 5, column `completion`: empty; found ''") and lines[6] == "  ... and 2 more"
    dataset, report = prepare(rows, bad_rows="drop")
    assert len(dataset) == 5 and sum(report.dropped.values()) == 7
    assert "train: 6 rows dropped: empty (column `completion`)" in report.lines()


def test_overflow_by_policy():
    with pytest.raises(ValueError, match=r"1 of 5 rows .* longer than `max_length: 10` .* longest 53; first row 2"):
        prepare(ROWS, max_length=10)
    dataset, report = prepare(ROWS, max_length=10, overflow="drop")
    assert len(dataset) == 4 and report.dropped == {"longer than max_length": 1}
    dataset, report = prepare(ROWS, max_length=10, overflow="cut")
    assert len(dataset) == 5 and report.cut == 1
    assert len(dataset[2]["input_ids"]) == 10 and dataset[2]["labels"][-1] == tokenizer()("c")["input_ids"][0]


def test_a_row_can_be_cut_at_its_beginning():
    """`truncation_mode: keep_end`: the row of 53 tokens keeps 9 letters and its stop token; 9 of them are predicted."""
    dataset, report = prepare(ROWS, max_length=10, overflow="cut", keep_end=True)
    letter = tokenizer()("c")["input_ids"]
    assert dataset[2]["input_ids"] == letter * 9 + [tokenizer().eos_token_id]
    assert dataset[2]["labels"] == [-100, *dataset[2]["input_ids"][1:]]
    assert report.cut == 1 and report.warnings() == ["train: 1 rows cut at max_length: they begin later"]
    tail = {"input_ids": [5] * 12, "labels": [-100, 5, *[-100] * 10]}
    with pytest.raises(ValueError, match="1 × nothing at its end is trained"):
        prepare([tail], max_length=10, overflow="cut", keep_end=True)


@pytest.mark.parametrize("train_on, labels", [("assistant", [-100, -100, -100, 4]), ("all", [-100, -100, 3, 4])])
def test_the_masks_of_tokenized_rows(train_on, labels):
    """`train_on: all` leaves out what is not the assistant's, but trains the prompt too."""
    row = {"input_ids": [1, 2, 3, 4], "completion_mask": [0, 0, 0, 1], "assistant_masks": [1, 0, 1, 1]}
    tokenization = Tokenization(tokenizer(), train_on)
    dataset, _ = prepare_sft(Dataset.from_list([row]), tokenization, RowPolicy(), name="train")
    assert dataset[0]["labels"] == labels


@pytest.mark.parametrize("packing", [False, True])
def test_a_prompt_that_fills_max_length_never_enters_a_batch(packing):
    rows = [{"prompt": "a" * 20, "completion": "b"}, {"prompt": "a", "completion": "b"}]
    with pytest.raises(ValueError, match=r"its prompt alone fills max_length|cannot be trained"):
        prepare(rows, max_length=10, overflow="cut")
    dataset, report = prepare(rows, max_length=10, overflow="cut", bad_rows="drop")
    assert len(dataset) == 1 and sum(report.dropped.values()) == 1


def test_no_row_left_is_an_error():
    with pytest.raises(ValueError, match="No row of the train dataset is left"):
        prepare([{"prompt": "a", "completion": ""}], bad_rows="drop")


def test_streams_are_checked_as_they_are_read():
    rows = [*ROWS[:2], {"prompt": "a", "completion": ""}]
    stream = Dataset.from_list(rows).to_iterable_dataset()
    dataset, _ = prepare_sft(stream, Tokenization(tokenizer()), RowPolicy(), name="train")
    with pytest.raises(ValueError, match="column `completion`: empty"):
        list(dataset)
    dataset, _ = prepare_sft(stream, Tokenization(tokenizer()), RowPolicy(bad_rows="drop"), name="train")
    assert [set(row) for row in dataset] == [{"input_ids", "labels"}] * 2


def test_prompts_of_messages_rows_end_before_the_last_assistant_turn():
    tok = tokenizer()
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    dataset, _ = prepare_prompts(Dataset.from_list(rows), Tokenization(tok), RowPolicy(), name="train")
    assert tok.decode(dataset[0]["prompt_ids"]) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_the_report_counts_what_was_not_used_as_it_came():
    """Of 3 conversations one is cut and one is stripped; a tokenizer without eos has no stop token for text rows."""
    tok = family("llama3")
    chats = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}
        for text in ("b", " b\n", "b" * 50)
    ]
    policy = RowPolicy(max_length=60, overflow="cut")
    _, report = prepare_sft(Dataset.from_list(chats), Tokenization(tok), policy, name="train")
    assert (report.kept, report.cut, report.normalized, report.without_stop) == (3, 1, 1, 1)
    assert report.warnings() == [
        "train: 1 rows cut at max_length: they end without a stop token",
        "train: 1 rows with whitespace changed by the chat template in what is trained",
    ]
    saved = json.loads(json.dumps(report.as_dict()))
    assert saved["trained_share"] == pytest.approx(report.trained_tokens / report.tokens)
    assert saved["rules"] == {BUNDLED: 3} and "known as llama3" in saved["template"]
    bare = tokenizer()
    bare.eos_token = None
    _, report = prepare_sft(Dataset.from_list(ROWS), Tokenization(bare), RowPolicy(), name="train")
    assert report.without_stop == 5 and "5 rows without a stop token" in report.warnings()[0]


def test_a_second_preparation_comes_from_the_cache(tmp_path, monkeypatch):
    """The same file, tokenizer and policy: no row is tokenized again."""
    Dataset.from_list(ROWS).to_json(tmp_path / "rows.jsonl")
    tokenized = []
    row = Tokenization.row
    monkeypatch.setattr(Tokenization, "row", lambda self, example: (tokenized.append(1), row(self, example))[1])
    for _ in range(2):
        rows = load_splits(str(tmp_path / "rows.jsonl"), train_split="train")["train"]
        prepare_sft(rows, Tokenization(tokenizer()), RowPolicy(), name="train")
    assert len(tokenized) == len(ROWS)


def test_open_r1_prompt_columns_and_system_prompts():
    tok = tokenizer()
    rows = Dataset.from_list([{"problem": "2+2?", "other": 1}])
    policy = RowPolicy(format=RowFormat(prompt_column="problem", system_prompt="think"))
    dataset, _ = prepare_prompts(rows, Tokenization(tok), policy, name="train")
    expected = "<|im_start|>system\nthink<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tok.decode(dataset[0]["prompt_ids"]) == expected
    with pytest.raises(ValueError, match="no column `question`"):
        prepare_prompts(rows, Tokenization(tok), RowPolicy(format=RowFormat(prompt_column="question")), name="train")
    rows = Dataset.from_list([{"prompt": "2+2?", "completion": "4"}])
    dataset, _ = prepare_sft(rows, Tokenization(tok), RowPolicy(format=RowFormat(system_prompt="think")), name="train")
    assert tok.decode(dataset[0]["input_ids"]) == expected + "4<|im_end|>\n"
    assert tok.decode([label for label in dataset[0]["labels"] if label != -100]) == "4<|im_end|>"


def test_datasets_by_name(tmp_path):
    rows = Dataset.from_list(ROWS)
    for name, write in (("a.jsonl", "to_json"), ("a.csv", "to_csv"), ("a.parquet", "to_parquet")):
        getattr(rows, write)(tmp_path / name)
        assert len(load_splits(str(tmp_path / name), train_split="train")["train"]) == 5
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    assert len(load_splits(str(tmp_path / "list.json"), train_split="train")["train"]) == 5
    folder = tmp_path / "folder"
    folder.mkdir()
    rows.to_json(folder / "train.jsonl")
    rows.select(range(2)).to_json(folder / "test.jsonl")
    splits = load_splits(str(folder), train_split="train")
    assert {name: len(split) for name, split in splits.items()} == {"train": 5, "test": 2}
    load_dataset("json", data_files={"train": str(folder / "train.jsonl")}).save_to_disk(tmp_path / "saved")
    assert len(load_splits(str(tmp_path / "saved"), train_split="train")["train"]) == 5
    with pytest.raises(ValueError, match=r"there is no file .*none.jsonl"):
        load_splits(str(tmp_path / "none.jsonl"), train_split="train")
    with pytest.raises(ValueError, match=r"dataset_test_split: x has no split 'dev'; it has 'train', 'test'"):
        pick_split(splits, "dev", flag="dataset_test_split", name="x")
