"""A run from its recipe: seeded, said by each process, loaded as asked, its metrics with their sample counts."""

import json
import logging

import pytest
import torch
from tiny import qwen3, tokenizer
from training import QUIET, text_rows

from trl_opd import process_log, recipes
from trl_opd import run as run_module
from trl_opd.errors import UsageError
from trl_opd.run import build, run


@pytest.fixture(autouse=True)
def levels_stay():
    ours = logging.getLogger("trl_opd")
    level = ours.level
    yield
    ours.setLevel(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    for name, seed in (("student", 0), ("teacher", 1)):
        qwen3(seed).save_pretrained(path / name)
        tokenizer().save_pretrained(path / name)
    text_rows(7).to_json(path / "rows.jsonl")
    (path / "split").mkdir()
    text_rows(6).to_json(path / "split" / "train.jsonl")
    text_rows(3).to_json(path / "split" / "test.jsonl")
    return path


@pytest.fixture
def flags(folder, tmp_path):
    """`flags(job, **values)` -> a command line of a small run."""

    def flags(job, **values):
        values = QUIET | {
            "model_name_or_path": folder / "student",
            "dataset_name": folder / "split",
            "output_dir": tmp_path / "out",
            "max_steps": 1,
            **({"teacher_model_name_or_path": folder / "teacher"} if job == "distill" else {}),
            **values,
        }
        if job == "distill":
            values |= {"max_completion_length": 4}
        return [part for name, value in values.items() for part in (f"--{name}", str(value))]

    return flags


def test_a_process_says_what_it_is(tmp_path, caplog, monkeypatch):
    args = recipes.parse("sft", ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16"]).training
    line = "process rank: 0 of 1, device: cpu, n_gpu: 0, distributed training: False (NO), precision: bf16"
    process_log.set_up_logging(args)
    assert [record.getMessage() for record in caplog.records if "process rank" in record.getMessage()] == [line]
    assert logging.getLogger("trl_opd").level == logging.INFO

    class Second:
        process_index, num_processes, is_local_main_process = 1, 2, False
        distributed_type = type("", (), {"value": "MULTI_CPU"})

    monkeypatch.setattr(process_log, "PartialState", Second)
    caplog.clear()
    process_log.set_up_logging(args)
    assert "process rank: 1 of 2" in caplog.text and "distributed training: True (MULTI_CPU)" in caplog.text
    assert logging.getLogger("trl_opd").level == logging.WARNING  # after that line, of its warnings only
    monkeypatch.undo()
    caplog.clear()
    process_log.set_up_logging(args, logging.ERROR)
    assert caplog.text == ""


def test_a_run_is_seeded_before_anything_is_made(tmp_path):
    settings = recipes.parse("sft", ["--output_dir", str(tmp_path / "out"), "--seed", "5", "--model_name_or_path", "M"])
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="`model_name_or_path: M` is neither"):
        build(settings)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_a_quantised_model_is_put_on_its_own_process_gpu(flags, monkeypatch):
    """Not spread over all GPUs, as it would be by `device_map: auto`; a map that was asked for stays."""
    seen = []

    class Stop(Exception):
        pass

    def trainer(**kwargs):
        seen.append(kwargs["args"].model_init_kwargs)
        raise Stop

    monkeypatch.setattr(run_module, "SFTTrainer", trainer)
    monkeypatch.setattr(run_module, "is_accelerator_there", lambda: True)
    own = {"model_init_kwargs": json.dumps({"device_map": "auto"})}
    for values in ({"load_in_4bit": True}, {"load_in_8bit": True} | own, {}):
        with pytest.raises(Stop):
            build(recipes.parse("sft", flags("sft", **values)))
    assert [kwargs.get("device_map") for kwargs in seen] == [{"": 0}, "auto", None]
    monkeypatch.setattr(run_module, "is_accelerator_there", lambda: False)
    with pytest.raises(Stop):
        build(recipes.parse("sft", flags("sft", load_in_4bit=True)))
    assert "device_map" not in seen[-1]


@pytest.mark.parametrize("job", ["sft", "distill"])
def test_metrics_have_their_sample_counts(flags, tmp_path, job):
    """Rows, not what packing makes of them: 6 of the train split, 3 of the test split."""
    packed = {"packing": True, "max_length": 64} if job == "sft" else {}
    run(job, flags(job, do_eval=True, eval_strategy="epoch", **packed))
    for split, rows in (("train", 6), ("eval", 3)):
        saved = json.loads((tmp_path / "out" / f"{split}_results.json").read_text())
        assert saved[f"{split}_samples"] == rows and f"{split}_loss" in saved


def test_a_config_of_a_file_is_said_to_be_unused(flags, folder, caplog):
    values = {"dataset_name": folder / "rows.jsonl", "dataset_config": "all"}
    run_module.load_rows(recipes.parse("sft", flags("sft", **values)))
    assert "dataset_config: all is not used" in caplog.text
    with pytest.raises(UsageError, match="there is no dataset"):
        run_module.load_rows(recipes.parse("sft", ["--output_dir", "out"]))
