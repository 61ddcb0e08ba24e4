"""Models, adapters, tokenizers and rows from elsewhere: no code of theirs runs, and their text is only text."""

import ast
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rich.console import Console
from tiny import llama, tokenizer
from training import QUIET, text_rows

from trl_opd import DistillationConfig, DistillationTrainer, _trl, data, old_keys, shown, summary
from trl_opd.cli.main import main
from trl_opd.data.rows import BadRow, DatasetError
from trl_opd.data.templates import render

EVIL = "</mark></pre><script>alert(1)</script> \x1b[31mred\x1b[0m \u202eright to left [bold]no[/bold]"
ROOT = Path(__file__).parents[1]
PACKAGE = Path(data.__file__).parents[1]
CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("it ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class StrangeConfig(LlamaConfig):
    model_type = "strange"


class StrangeModel(LlamaForCausalLM):
    config_class = StrangeConfig


class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""


def calls(name, *folders):
    """(file, call) of every call of a function or method by this name."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == name:
                    yield path, node


# --- code of others ---------------------------------------------------------------------------------------------------


def test_every_model_and_tokenizer_is_loaded_by_what_trust_remote_code_says():
    """Where the keyword is not written out it comes with the `**kwargs`, which `test_remote_code_never_runs` tries."""
    found = list(calls("from_pretrained", PACKAGE))
    assert len(found) >= 6
    for path, call in found:
        keywords = {keyword.arg for keyword in call.keywords}
        own_models_only = path.name == "models.py" and path.parent.name == "demo"
        if ast.unparse(call.func) == "PeftConfig.from_pretrained":
            continue  # JSON, which names no code
        assert own_models_only or keywords & {"trust_remote_code", None}, f"{path}:{call.lineno}"


def test_pickles_are_never_loaded():
    found = list(calls("load", PACKAGE, ROOT / "examples", ROOT / "benchmarks"))
    torch_loads = [call for _, call in found if ast.unparse(call.func) in ("torch.load", "torch.serialization.load")]
    assert torch_loads
    for call in torch_loads:
        assert "weights_only=True" in ast.unparse(call), ast.unparse(call)
    for path in PACKAGE.rglob("*.py"):
        imported = re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not {"pickle", "dill", "cloudpickle", "joblib", "shelve"} & set(imported), path
    for path, call in calls("load", PACKAGE):
        if ast.unparse(call.func) == "yaml.load":
            assert "_UniqueKeys" in ast.unparse(call), path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`strange/` is a model with code of its own, `strange-type/` one that transformers knows no class for,
    `adapter/` sits on it; `plain/` is as all others."""
    path = tmp_path_factory.mktemp("untrusted")
    marker = str(path / "it-ran")
    for name in ("plain", "strange", "strange-type"):
        llama(seed=len(name)).save_pretrained(path / name)
        tokenizer().save_pretrained(path / name)
    for name in ("strange", "strange-type"):
        (path / name / "code.py").write_text(CODE.format(marker=marker))
        config = json.loads((path / name / "config.json").read_text())
        config["auto_map"] = {"AutoConfig": "code.StrangeConfig", "AutoModelForCausalLM": "code.StrangeModel"}
        if name == "strange-type":
            config["model_type"] = "strange"
        (path / name / "config.json").write_text(json.dumps(config))
        settings = json.loads((path / name / "tokenizer_config.json").read_text())
        settings |= {"auto_map": {"AutoTokenizer": [None, "code.StrangeTokenizer"]}, "tokenizer_class": "Strange"}
        (path / name / "tokenizer_config.json").write_text(json.dumps(settings))
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(path / "adapter")
    config = json.loads((path / "adapter" / "adapter_config.json").read_text())
    (path / "adapter" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(path / "strange-type")})
    )
    tokenizer().save_pretrained(path / "adapter")
    (path / "scripted").mkdir()
    (path / "scripted" / "scripted.py").write_text(CODE.format(marker=marker))
    text_rows(4).to_json(path / "rows.jsonl")
    return path


@pytest.mark.parametrize(
    "job, flags",
    [
        ("sft", {"model_name_or_path": "strange"}),
        ("sft", {"model_name_or_path": "strange-type"}),
        ("sft", {"model_name_or_path": "adapter"}),
        ("sft", {"tokenizer_name_or_path": "strange"}),
        ("sft", {"tokenizer_name_or_path": "strange-type"}),
        ("sft", {"dataset_name": "scripted"}),
        ("distill", {"teacher_model_name_or_path": "strange"}),
        ("distill", {"teacher_model_name_or_path": "strange-type"}),
        ("distill", {"teacher_model_name_or_path": "adapter"}),
        ("distill", {"model_name_or_path": "strange-type", "anchor_weight": 0.1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_remote_code_never_runs_unasked(folder, tmp_path, monkeypatch, capsys, job, flags):
    monkeypatch.chdir(folder)
    values = {
        "model_name_or_path": "plain",
        "dataset_name": "rows.jsonl",
        "output_dir": str(tmp_path / "out"),
        "max_steps": "1",
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": "false",
    }
    if job == "distill":
        shutil.copytree(folder / "plain", folder / "teacher", dirs_exist_ok=True)
        values |= {"teacher_model_name_or_path": "teacher", "max_completion_length": "2"}
    argv = [part for name, value in (values | flags).items() for part in (f"--{name}", str(value))]
    code = main([job, *argv])
    err = capsys.readouterr().err
    assert not (folder / "it-ran").exists()
    assert "Traceback" not in err
    if "strange" in flags.values():
        return  # transformers knows the type: its own class serves, or it misses the tokenizer
    assert code == 1 and "error: " in err and not (tmp_path / "out").exists()
    refusals = ["Set `trust_remote_code: true` if you have read", "tokenizer_name_or_path: strange-type` cannot be"]
    assert any(refusal in err for refusal in [*refusals, "dataset_name: scripted cannot be read"])


def test_remote_code_runs_where_it_is_asked_for(folder, tmp_path, monkeypatch, capsys):
    """Or the test above would hold nothing. In a process of its own for the folder: transformers caches such code."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    from transformers import AutoConfig

    AutoConfig.from_pretrained("strange-type", trust_remote_code=True)
    assert (folder / "it-ran").exists()
    (folder / "it-ran").unlink()


# --- text of others ---------------------------------------------------------------------------------------------------


def test_what_is_visible():
    assert shown.visible(EVIL).count("\\x1b[") == 2 and "\\u202e" in shown.visible(EVIL)
    assert shown.visible("a\nb\tc é 日 😀") == "a\nb\tc é 日 😀"
    assert shown.visible("\r\x00\x85\u2028\u2066\U000e0041\ud800") == (
        "\\x0d\\x00\\x85\\u2028\\u2066\\U000e0041\\ud800"
    )
    assert shown.excerpt("a\n\x1b") == '"a\\n\\x1b"' and len(shown.excerpt("x" * 999)) <= 64


def test_rows_cannot_act_through_errors():
    for error in (BadRow("only [bold]" + EVIL, EVIL, EVIL, "a text"), DatasetError(EVIL)):
        assert "\x1b" not in str(error) and "\u202e" not in str(error) and "\\x1b" in str(error)
    assert "\x1b" not in BadRow(EVIL, EVIL, 1, "").reason
    tok = tokenizer()
    tok.chat_template = "{{ raise_exception('no: ' + messages[0]['content']) }}"
    with pytest.raises(BadRow) as refused:
        render(tok, [{"role": "user", "content": EVIL}])
    assert "\x1b" not in str(refused.value) and "\x1b" not in refused.value.reason


def printed(*parts):
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    return out.getvalue()


def test_tables_take_text_as_text():
    text = printed(summary.plain(f"{EVIL} [link=file:///etc]x[/link]"))
    assert "[bold]no[/bold]" in text and "[link=file:///etc]x[/link]" in text
    assert "\x1b" not in text and "\u202e" not in text and "\\x1b[31m" in text


def test_the_table_of_old_keys(capsys):
    old_keys.show("sft", [(f"system_prompt: {EVIL}", "[red]kept[/red]")])
    err = capsys.readouterr().err
    assert "\x1b[31m" not in err and "\\x1b[31m" in err and "[red]kept[/red]" in err


def test_a_run_and_a_check_show_rows_harmlessly(folder, tmp_path, monkeypatch, capsys):
    """Column names, roles and contents of a dataset, in errors, tables, samples and the page."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [
        {"prompt": EVIL, "completion": EVIL},
        {"prompt": EVIL, "completion": "ok"},
        {"prompt": "a", "completion": ""},
    ]
    Dataset.from_list(rows).to_json(tmp_path / "evil.jsonl")
    common = ["--model_name_or_path", "plain", "--dataset_name", str(tmp_path / "evil.jsonl"), "--report_to", "none"]
    common += ["--output_dir", str(tmp_path / "out"), "--gradient_checkpointing", "false", "--max_steps", "1"]
    html = tmp_path / "check.html"
    assert main(["check", "sft", *common, "--bad_rows", "drop", "--html", str(html)]) == 0
    assert main(["check", "sft", *common]) == 1
    assert main(["sft", *common]) == 1
    assert main(["sft", *common, "--bad_rows", "drop", "--save_strategy", "no"]) == 0
    Dataset.from_list([{f"[bold]{EVIL}": "a"}]).to_json(tmp_path / "evil.jsonl")
    assert main(["sft", *common]) == 1
    said = "".join(capsys.readouterr())
    for bad in ("\x1b[31m", "\u202e"):
        assert bad not in said and bad not in html.read_text()
    assert "\\x1b[31mred" in said and "[bold]no[/bold]" in said
    assert "<script" not in html.read_text()


def test_completions_in_the_terminal_are_text_and_in_files_as_they_were(tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    rows = Dataset.from_list([{"prompt": f"a {EVIL}"}])
    args = DistillationConfig(str(tmp_path), **QUIET, max_steps=1, max_completion_length=2, log_completions=True)
    trainer = DistillationTrainer(llama(), llama(seed=3), args, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    out = capsys.readouterr().out
    assert "\\x1b[31m" in out and "\x1b[31mred" not in out and "\u202e" not in out
    (file,) = tmp_path.rglob("*.parquet")
    assert pandas.read_parquet(file)["prompt"][0] == f"a {EVIL}"


def test_trls_table_is_put_back():
    import trl.trainer.distillation_trainer as theirs

    before = theirs.print_prompt_completions_sample
    with pytest.raises(KeyError), _trl.completions_shown(str):
        assert theirs.print_prompt_completions_sample is not before
        raise KeyError
    assert theirs.print_prompt_completions_sample is before
