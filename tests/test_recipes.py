"""The recipes that come with the package: known to the parser, listed, copied, found by name; the smoke ones run."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from tiny import qwen3, tokenizer
from training import text_rows

import trl_opd.recipes
from trl_opd import recipes, shipped
from trl_opd.cli.main import COMMANDS, main
from trl_opd.errors import UsageError

ROOT = Path(__file__).parents[1]
NAMES = shipped.recipe_names()
CPU = ["--bf16", "false", "--use_cpu", "true", "--attn_implementation", "eager"]


def job_of(name):
    return name.split("/")[1]


def test_the_module_wins_over_the_folder_of_the_same_name():
    assert trl_opd.recipes.__file__.endswith("recipes.py") and recipes.parse
    assert (ROOT / "recipes").resolve() == shipped.FOLDER.resolve()


def test_the_layout_is_model_job_config():
    assert {job_of(name) for name in NAMES} == {"sft", "distill"}
    assert all(re.fullmatch(r"[^/]+/(sft|distill)/config_\w+\.yaml", name) for name in NAMES)
    assert shipped.accelerate_names() == ["cpu2", "ddp", "fsdp", "zero2", "zero3"]


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_known_to_the_parser(name):
    path = shipped.find_recipe(name)
    keys = yaml.safe_load(Path(path).read_text())
    settings = recipes.parse(job_of(name), ["--config", path, *CPU])
    parts = (settings.script, settings.training, settings.model)
    for key, value in keys.items():
        if key == "report_to":
            assert value == "none" and settings.training.report_to == []
        elif key not in ("bf16", "use_cpu", "attn_implementation"):
            assert value in [getattr(part, key, None) for part in parts], key
    assert settings.model.model_name_or_path and settings.script.dataset_name and settings.training.output_dir


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_says_what_it_is_and_how_it_is_started(name):
    text = Path(shipped.find_recipe(name)).read_text()
    assert len(shipped.summary(name)) > 20
    assert f"trl-opd {job_of(name)} --config {name}" in text
    assert ("Not run" in text) != name.startswith("tiny/")


def test_the_readme_names_every_recipe_and_only_commands_that_are():
    text = (shipped.FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+\.yaml)`", text, re.MULTILINE)) == set(NAMES)
    assert set(re.findall(r"`(\w+)`", text)) >= set(shipped.accelerate_names())
    commands = re.findall(r"^trl-opd [^#\n]+", text, re.MULTILINE)
    assert len(commands) == 1 + len(NAMES)
    for command in commands:
        _, job, *rest = shlex.split(command)
        assert job in COMMANDS
        if rest:
            assert rest[0] == "--config" and job_of(rest[1]) == job and shipped.find_shipped(rest[1])


@pytest.mark.parametrize("name", shipped.accelerate_names())
def test_accelerate_reads_every_config(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(shipped.find_accelerate_config(name))
    kinds = {"ddp": "MULTI_GPU", "cpu2": "MULTI_GPU", "fsdp": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert config.distributed_type.value == kinds[name]
    assert config.mixed_precision is None  # or it would win over the recipe's `bf16: false`
    assert config.num_processes == (2 if name == "cpu2" else -1)


def test_what_is_there_wins_over_what_is_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "tiny/sft/config_smoke.yaml"
    in_package = str(shipped.FOLDER / name)
    assert {shipped.find_recipe(n) for n in (name, f"recipes/{name}", name.removesuffix(".yaml"))} == {in_package}
    (tmp_path / "tiny/sft").mkdir(parents=True)
    (tmp_path / name).write_text("max_steps: 1\n")
    assert shipped.find_recipe(name) == name
    for known in ("zero3", "zero3.yaml", "recipes/accelerate_configs/zero3.yaml"):
        assert shipped.find_accelerate_config(known) == str(shipped.ACCELERATE / "zero3.yaml")


@pytest.mark.parametrize(
    "find, name, message",
    [
        (shipped.find_recipe, "tiny/sft/config_smok.yaml", "did you mean tiny/sft/config_smoke.yaml"),
        (shipped.find_recipe, "qlora", "did you mean Qwen2.5-7B-Instruct/distill/config_qlora.yaml?"),
        (shipped.find_recipe, "zzz.yaml", "No such file, and nothing that comes with trl-opd is called zzz; there are"),
        (shipped.find_accelerate_config, "zero", "did you mean zero3 or zero2?"),
        (shipped.find_accelerate_config, "./mine.yaml", "there are cpu2, ddp, fsdp, zero2, zero3"),
    ],
)
def test_names_that_nothing_has(find, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        find(name)


def test_list_and_cp(tmp_path, capsys):
    assert main(["recipes", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and shipped.summary(name) in out for name in NAMES) and "zero3" in out
    copy = tmp_path / "new" / "mine.yaml"
    assert main(["recipes", "cp", "tiny/sft/config_smoke.yaml", str(copy)]) == 0
    assert copy.read_bytes() == (shipped.FOLDER / "tiny/sft/config_smoke.yaml").read_bytes()
    copy.write_text("mine")
    assert main(["recipes", "cp", "tiny/sft/config_smoke.yaml", str(copy)]) == 2
    assert copy.read_text() == "mine" and "is there already" in capsys.readouterr().err
    assert main(["recipes", "cp", "zero3", str(tmp_path)]) == 0 and (tmp_path / "zero3.yaml").exists()
    assert main(["recipes", "cp", "config_smok", str(tmp_path)]) == 2
    assert "did you mean tiny/sft/config_smoke.yaml or tiny/distill/config_smoke.yaml?" in capsys.readouterr().err


@pytest.mark.parametrize("job", ["sft", "distill"])
def test_the_smoke_recipes_run(job, tmp_path):
    for name, seed in (("student", 0), ("teacher", 1)):
        qwen3(seed).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    text_rows(16).to_json(tmp_path / "rows.jsonl")
    flags = {"model_name_or_path": "student", "dataset_name": "rows.jsonl", "output_dir": "out"}
    if job == "distill":
        flags["teacher_model_name_or_path"] = "teacher"
    values = [part for key, value in flags.items() for part in (f"--{key}", str(tmp_path / value))]
    assert main([job, "--config", shipped.find_recipe(f"tiny/{job}/config_smoke.yaml"), *values]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_shipped_recipe_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = recipes.parse("sft", ["--config", "tiny/sft/config_smoke.yaml"]).training
    by_path = recipes.parse("sft", ["--config", str(shipped.FOLDER / "tiny/sft/config_smoke.yaml")]).training
    assert by_name.max_steps == by_path.max_steps == 4
    with pytest.raises(UsageError, match="did you mean tiny/sft/config_smoke"):
        recipes.parse("sft", ["--config", "tiny/sft/config_smok.yaml"])
