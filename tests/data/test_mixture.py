"""Mixtures of datasets: which rows of which part, in which order, and what is said where parts do not fit."""

import pytest
from datasets import Dataset, DatasetDict, concatenate_datasets

from trl_opd import old_keys, run
from trl_opd.data.mixture import Mixture, load_mixture, read_mixer, read_mixture
from trl_opd.data.rows import DatasetError
from trl_opd.errors import UsageError
from trl_opd.recipes import parse


def rows(letter, n):
    return Dataset.from_list([{"prompt": f"{letter}{i}", "completion": letter, "extra": i} for i in range(n)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows("a", 10).to_json("a.jsonl")
    rows("b", 20).to_json("b.jsonl")
    rows("c", 4).remove_columns("extra").to_json("c.jsonl")
    DatasetDict(train_sft=rows("d", 10), test_sft=rows("t", 3)).save_to_disk("d")
    return tmp_path


def mixed(*parts, **rest):
    return load_mixture(read_mixture({"datasets": list(parts), **rest}))


def test_shares_are_drawn_with_the_seed_and_shuffled(folder):
    """Half of 10 and a quarter of 20: what open-r1 does, step by step."""
    got = mixed({"id": "a.jsonl", "weight": 0.5}, {"id": "b.jsonl", "weight": 0.25}, seed=7)["train"]
    halves = [rows("a", 10).shuffle(seed=7).select(range(5)), rows("b", 20).shuffle(seed=7).select(range(5))]
    assert got["prompt"] == concatenate_datasets(halves).shuffle(seed=7)["prompt"]
    other = mixed({"id": "a.jsonl", "weight": 0.5}, {"id": "b.jsonl", "weight": 0.25}, seed=8)["train"]
    assert sorted(other["prompt"]) != sorted(got["prompt"])


def test_without_a_weight_all_rows_are_drawn_and_with_null_none_are(folder):
    """A part weighs 1.0 in open-r1 unless the recipe says otherwise: its rows are shuffled before they are mixed."""
    got = mixed({"id": "a.jsonl"}, {"id": "b.jsonl", "weight": None}, seed=7)["train"]
    parts = [rows("a", 10).shuffle(seed=7), rows("b", 20)]
    assert got["prompt"] == concatenate_datasets(parts).shuffle(seed=7)["prompt"]


@pytest.mark.parametrize("name", ["a.jsonl", "d"])
def test_a_split_may_have_a_slice(folder, name):
    """As `load_dataset(split=...)` reads it: percents, two ends, several splits."""
    split, letter = ("train", "a") if name == "a.jsonl" else ("train_sft", "d")
    got = mixed({"id": name, "split": f"{split}[:20%]+{split}[7:9]", "weight": None}, seed=1)["train"]
    assert sorted(got["prompt"]) == [f"{letter}{i}" for i in (0, 1, 7, 8)]
    if name == "d":
        both = mixed({"id": name, "split": "train_sft+test_sft"})["train"]
        assert len(both) == 13
    with pytest.raises(DatasetError, match=r"dataset_mixture: .* has no rows 'nope\[:2\]'"):
        mixed({"id": "d", "split": "nope[:2]"})


def test_a_column_that_a_part_lacks_is_empty_and_said(folder, caplog):
    got = mixed({"id": "a.jsonl"}, {"id": "c.jsonl"})["train"]
    assert len(got) == 14 and sum(extra is None for extra in got["extra"]) == 4
    assert "c.jsonl has no 'extra'" in caplog.text and "Set the same `columns`" in caplog.text
    Dataset.from_list([{"prompt": 1, "completion": "x"}]).to_json("e.jsonl")
    with pytest.raises(DatasetError, match="the columns of its datasets do not fit together"):
        mixed({"id": "a.jsonl"}, {"id": "e.jsonl"})


def test_columns_and_a_test_split(folder):
    columns = ["prompt", "completion"]
    parts = {"id": "a.jsonl", "columns": columns}, {"id": "c.jsonl", "columns": columns}
    got = mixed(*parts, test_split_size=0.5)
    assert got["train"].column_names == columns and (len(got["train"]), len(got["test"])) == (7, 7)
    assert got["test"]["prompt"] == mixed(*parts, test_split_size=0.5)["test"]["prompt"]


@pytest.mark.parametrize(
    "value, message",
    [
        ({"datasets": []}, "it must hold a list `datasets`"),
        ({"datasets": [{"config": "x"}]}, "dataset 0 has no `id`"),
        ({"datasets": [{"id": "a.jsonl", "wieght": 1}]}, "dataset 0: unknown key `wieght`; it takes columns, config"),
        ({"datasets": [{"id": "a.jsonl", "weight": 2}]}, "its weight is 2; it must be a share"),
        ({"datasets": [{"id": "a.jsonl"}], "sed": 1}, "unknown key `sed`"),
        ({"datasets": [{"id": "a.jsonl", "columns": ["x"]}]}, "a.jsonl has no column 'x'"),
        (
            {"datasets": [{"id": "a.jsonl", "columns": ["prompt"]}, {"id": "c.jsonl", "columns": ["completion"]}]},
            "Set the same `columns` for each",
        ),
        ({"datasets": [{"id": "none.jsonl"}]}, "there is no file none.jsonl"),
    ],
)
def test_what_does_not_fit_is_named(folder, value, message):
    with pytest.raises(DatasetError) as caught:
        load_mixture(read_mixture(value))
    assert message in str(caught.value)


def test_the_mixer_takes_the_first_rows_and_whole_test_splits(folder):
    got = load_mixture(read_mixer({"d": 0.5}, ["train_sft", "test_sft"], None))
    assert sorted(got["train"]["prompt"]) == [f"d{i}" for i in range(5)]
    assert got["train"]["prompt"] == rows("d", 10).select(range(5)).shuffle(seed=42)["prompt"]
    assert sorted(got["test"]["prompt"]) == ["t0", "t1", "t2"]
    shared = load_mixture(read_mixer({"a.jsonl": 1.0, "c.jsonl": 1.0}, ["train"], None))["train"]
    assert set(shared.column_names) == {"prompt", "completion"} and len(shared) == 14
    with pytest.raises(DatasetError, match="2 configs for the 1 datasets"):
        read_mixer({"d": 1}, None, ["a", "b"])


def test_a_recipe_reaches_the_mixture(folder):
    (folder / "r.yaml").write_text(
        "output_dir: out\ndataset_mixture:\n  datasets:\n  - {id: a.jsonl, weight: 0.5}\n  - id: b.jsonl\n  seed: 3\n"
        "  test_split_size: 5\neval_strategy: epoch\n"
    )
    settings = parse("sft", ["--config", "r.yaml"])
    assert isinstance(settings.mixture, Mixture) and settings.mixture.seed == 3
    train, test = run.load_rows(settings)
    assert (len(train), len(test)) == (20, 5)
    settings = parse("sft", ["--config", "r.yaml", "--dataset_name", "a.jsonl", "--dataset_test_split", "train"])
    assert not settings.mixture.datasets and len(run.load_rows(settings)[0]) == 10
    beside = {"dataset_name": "a.jsonl", "dataset_mixture": {"datasets": [{"id": "b.jsonl"}]}}
    reading = old_keys.translate("sft", beside, [])
    assert reading.mixture.datasets[0].id == "b.jsonl" and "dataset_name" not in reading.recipe
    assert ("dataset_name: a.jsonl", "not used: the `dataset_mixture` beside it is, as then") in reading.rows
    with pytest.raises(UsageError, match="`dataset_streaming: true` does not go with `dataset_mixture`"):
        run.load_rows(parse("sft", ["--config", "r.yaml", "--dataset_streaming", "true"]))
    reading = old_keys.translate("sft", {"dataset_mixer": {"d": 1}, "dataset_splits": ["train_sft"]}, [])
    assert reading.mixture.datasets[0].split == "train_sft" and not reading.recipe.get("dataset_splits")
    reading = old_keys.translate("sft", {}, ["--dataset_mixture", '{"datasets": [{"id": "a.jsonl"}]}'])
    assert reading.mixture.datasets[0].id == "a.jsonl" and reading.argv == []
