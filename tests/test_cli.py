"""The command line: recipes and overrides reach the trainer, and what is wrong is one message with the way out."""

import pytest
import yaml
from safetensors import safe_open
from tiny import qwen3, tokenizer
from training import text_rows

from trl_opd import recipes
from trl_opd.cli.main import main
from trl_opd.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    for name, seed in (("student", 0), ("teacher", 1)):
        qwen3(seed).save_pretrained(path / name)
        tokenizer().save_pretrained(path / name)
    rows = text_rows(7)
    rows.to_json(path / "rows.jsonl")
    rows.rename_column("completion", "answer").to_json(path / "nocompletion.jsonl")
    rows.map(lambda row: {"completion": ""}).to_json(path / "empty.jsonl")
    (path / "split").mkdir()
    rows.to_json(path / "split" / "train.jsonl")
    rows.select(range(3)).to_json(path / "split" / "test.jsonl")
    return path


@pytest.fixture
def start(folder, tmp_path, monkeypatch, capsys):
    """`start(job, **flags)` -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(folder)

    def run(job, *argv, **flags):
        recipe = {
            "model_name_or_path": "student",
            "dataset_name": "rows.jsonl",
            "output_dir": str(tmp_path / "out"),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1.0e-3,
            "report_to": "none",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
        }
        if job == "distill":
            recipe |= {"teacher_model_name_or_path": "teacher", "max_completion_length": 4}
        recipe = {key: value for key, value in (recipe | flags).items() if value is not ...}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        code = main([job, "--config", str(tmp_path / "recipe.yaml"), *argv])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("job", ["sft", "distill"])
@pytest.mark.feature("Parameters and dtypes at start", model="full")
def test_a_recipe_becomes_a_saved_model(start, tmp_path, job):
    code, out, _ = start(job, "--max_steps", "1", dataset_name="split", eval_strategy="steps", eval_steps=1)
    assert code == 0
    for what in ("Qwen3ForCausalLM", "float32", "7 rows read, 7 kept", "1, 2 rows each"):
        assert what in out, what
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
        "train_results.json",
        "eval_results.json",
        "trainer_state.json",
        "checkpoint-1",
    }
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tok = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tok.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id
    assert model.config.use_cache is True


DORA = pytest.param({"use_peft": True, "use_dora": True}, marks=pytest.mark.feature("DoRA", model="lora"), id="dora")


@pytest.mark.feature("Parameters and dtypes at start", model="lora")
@pytest.mark.parametrize("flags", [pytest.param({"use_peft": True}, id="lora"), DORA])
@pytest.mark.parametrize("job", ["sft", "distill"])
def test_adapters(start, tmp_path, job, flags):
    code, out, _ = start(job, lora_target_modules="all-linear", **flags)
    assert code == 0
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as saved:
        assert any("lora_magnitude_vector" in name for name in saved.keys()) == flags.get("use_dora", False)  # noqa: SIM118
    assert "trained (" in out and "(100.00%)" not in out


@pytest.mark.parametrize("job", ["sft", "distill"])
@pytest.mark.feature("QLoRA", model="lora")
def test_qlora(start, tmp_path, job):
    code, _, _ = start(job, use_peft=True, load_in_4bit=True, lora_target_modules="all-linear")
    assert code == 0 and (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("job", ["sft", "distill"])
def test_a_streamed_dataset(start, tmp_path, job):
    code, out, _ = start(job, dataset_streaming=True, gradient_accumulation_steps=2, max_steps=3)
    assert code == 0 and "train: streamed, each row checked as it is read" in out
    assert (tmp_path / "out" / "model.safetensors").exists()
    code, _, err = start(job, dataset_streaming=True, max_steps=-1)
    assert code == 1 and "max_steps" in err


def test_an_override_wins_over_the_recipe(folder, tmp_path, monkeypatch):
    (tmp_path / "r.yaml").write_text("learning_rate: 1e-4\noutput_dir: a\nlora_target_modules: [q_proj, v_proj]\n")
    settings = recipes.parse("sft", ["--config", str(tmp_path / "r.yaml"), "--learning_rate", "3e-4"])
    assert settings.training.learning_rate == 3e-4
    assert settings.model.lora_target_modules == ["q_proj", "v_proj"]


def test_a_recipe_of_the_open_r1_era_cuts_long_rows_and_says_so(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("max_seq_length: 4096\noutput_dir: a\n")
    training = recipes.parse("sft", ["--config", str(tmp_path / "r.yaml")]).training
    assert (training.max_length, training.overflow) == (4096, "cut")
    assert "longer rows are cut and counted" in capsys.readouterr().err
    training = recipes.parse("sft", ["--max_seq_length", "64", "--overflow", "drop"]).training
    assert (training.max_length, training.overflow) == (64, "drop")
    assert recipes.parse("sft", ["--max_length", "64"]).training.overflow == "error"


def test_a_bare_no_in_yaml_is_a_strategy(tmp_path):
    (tmp_path / "r.yaml").write_text("save_strategy: no\neval_strategy: no\noutput_dir: a\n")
    settings = recipes.parse("sft", ["--config", str(tmp_path / "r.yaml")])
    assert (settings.training.save_strategy, settings.training.eval_strategy) == ("no", "no")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--learning_rrate", "1e-5"], "unknown flag `--learning_rrate`; did you mean `--learning_rate`?"),
        (["--learning_r=1e-5"], "did you mean `--learning_rate`?"),
        (["--lora-rr", "4"], "did you mean `--lora_r`?"),
        (["stray"], "unexpected argument `stray`"),
        (["--max_steps", "many"], "argument --max_steps"),
    ],
)
def test_flags_that_nobody_knows(start, argv, message):
    code, _, err = start("sft", *argv)
    assert code == 2 and message in err and "Traceback" not in err


def test_keys_that_nobody_knows(start, tmp_path):
    code, _, err = start("sft", learning_rrate=1e-5, zzz=1)
    assert code == 2
    assert "recipe.yaml: unknown key `learning_rrate`; did you mean `learning_rate`?" in err and "`zzz`\n" in err
    (tmp_path / "twice.yaml").write_text("max_steps: 1\nmax_steps: 2\n")
    with pytest.raises(UsageError, match="key `max_steps` appears twice"):
        recipes.parse("sft", ["--config", str(tmp_path / "twice.yaml")])
    with pytest.raises(UsageError, match="No such file"):
        recipes.parse("sft", ["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    "job, flags, code, message",
    [
        ("sft", {"model_name_or_path": ...}, 2, "there is no model: set `model_name_or_path`"),
        ("sft", {"model_name_or_path": "./none"}, 1, "`model_name_or_path: ./none` is neither"),
        ("sft", {"dataset_name": ...}, 2, "there is no dataset: set `dataset_name`"),
        ("sft", {"dataset_name": "none.jsonl"}, 1, "there is no file none.jsonl"),
        ("sft", {"dataset_name": "nocompletion.jsonl"}, 1, "a column `prompt` but no `completion`"),
        ("sft", {"dataset_name": "empty.jsonl"}, 1, "7 of 7 rows of the train dataset cannot be trained: 7 × empty"),
        ("sft", {"eval_strategy": "epoch"}, 1, "dataset_test_split: rows.jsonl has no split 'test'; it has 'train'"),
        ("sft", {"bf16": True}, 1, "`bf16: true` needs a GPU and this machine has none. Set `bf16: false`"),
        ("sft", {"max_length": 8}, 1, "longer than `max_length: 8`"),
        ("sft", {"overflow": "keep"}, 1, "overflow is 'keep'; it must be one of error, drop, cut"),
        ("sft", {"resume_from_checkpoint": "nowhere"}, 2, "there is no folder nowhere"),
        ("distill", {"teacher_model_name_or_path": ...}, 1, "There is no teacher"),
        ("distill", {"teacher_model_name_or_path": "student"}, 1, "Student and teacher are both student"),
        ("distill", {"teacher_model_name_or_path": "./none"}, 1, "`teacher_model_name_or_path: ./none` is neither"),
        ("distill", {"beta": 1.5}, 1, "beta must be in [0.0, 1.0]"),
        ("distill", {"temperature": 0}, 1, "temperature is 0"),
    ],
)
def test_what_is_wrong_is_said_before_any_training(start, tmp_path, job, flags, code, message):
    got, out, err = start(job, **flags)
    assert got == code and message in err
    assert "Traceback" not in err and "error: " in err
    assert not (tmp_path / "out" / "model.safetensors").exists() and "steps" not in out


def test_debug_shows_the_traceback(start):
    code, _, err = start("sft", "--debug", dataset_name="none.jsonl")
    assert code == 1 and "Traceback" in err and "DatasetError" in err


def test_help_ends_with_commands(capsys):
    """That it is instant is held by `test_the_command_line_imports_the_standard_library_only`."""
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("trl-opd sft --help")
    assert main(["stf"]) == 2 and "did you mean `sft`?" in capsys.readouterr().err
    assert main(["env"]) == 0 and "transformers" in capsys.readouterr().out


@pytest.mark.parametrize("job", ["sft", "distill"])
def test_every_flag_has_help(job):
    text = recipes.make_parser(job).format_help()
    assert f"trl-opd {job} --config recipe.yaml" in text.splitlines()[-2] + text.splitlines()[-3]
