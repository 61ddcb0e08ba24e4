"""Malformed recipes and datasets, by the hundred: each gets one message that names what is wrong and what to do, and
exit code 1 or 2; no traceback, nothing written, and an end."""

import contextlib
import io
import json
import math
import re

import pytest
import yaml
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import qwen3, tokenizer

from trl_opd import recipes
from trl_opd.cli.main import main
from trl_opd.data.prepare import RowPolicy, prepare_sft
from trl_opd.data.prompts import PromptColumns, prepare_prompts
from trl_opd.data.rows import DatasetError
from trl_opd.data.tokenize import Tokenization
from trl_opd.errors import UsageError

TOKENIZER = tokenizer()
# of a message: what a value must be, what there is, or what to do about it
FIX = re.compile(
    r"must |did you mean|[Ss]et |Put |[Tt]ake |Save |Leave |Mend |[Ll]ook |needs |Expected|expected|invalid .* value|"
    r"valid|it takes|it has|possible|there is|write out|One row a line|unknown key|cannot be less|only be|requires"
)
often = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def message_of(error):
    text = str(error)
    assert FIX.search(text), text
    assert len(text) < 5000 and "\x00" not in text
    text.encode()
    return text


# --- recipes ----------------------------------------------------------------------------------------------------------

CONTROL = [chr(i) for i in range(32) if chr(i) not in "\n\r\t"]
# fmt: off
NO_RECIPES = [
    "", "\n\n", "# only this", "- a\n- b", "just words", "3", "null", "a: b: c", "a: 'open", 'a: "open', "a: [1, 2",
    "{a: 1", "\ta: 1", "a: 1\na: 2", "a: 1\n---\nb: 2", "a: @x", "a: `x`", "a: %x", "? [x]\n: y", "? {x: 1}\n: y",
    "1: 2", "1.5: 2", "null: 1", "true: 1", "2024-01-01: 1", "a: 2024-99-99", "a: *nobody", "<<: 3", "a: !!int x",
    "a: !!float x", "a: !!binary é", "a: &x [*x]", "a: &x {b: *x}", "a: !!set {b}", "a: !!omap [1]", "a: !local 1",
    "a: !!python/object:os.system {}", "a: !!python/name:os.system ''", "a: !!python/object/new:os.system [x]",
    "a: !!python/object/apply:os.system ['echo ran']", "a: " + "9" * 5000, "a: " + "[" * 200 + "]" * 200, "{" * 3000,
    "- " * 400 + "a", "a: " + "{b: " * 100, "a" * 1_000_001,
    "\n".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}' if i else 'x'] * 9)}]" for i in range(9)),
]
# fmt: on
BAD_YAML = st.one_of(
    st.sampled_from(NO_RECIPES),
    st.sampled_from(CONTROL).map(lambda c: f"output_dir: a{c}b"),
    st.text(alphabet="{}[]&*!|>'\"%@`:#-? ,\n\t", min_size=1, max_size=30),
)


@settings(often, max_examples=130)
@given(text=BAD_YAML)
def test_what_is_no_recipe(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as error:
        recipes.parse("sft", ["--config", str(path)])
    assert str(path) in message_of(error.value)


@settings(often, max_examples=20)
@given(raw=st.binary(min_size=1, max_size=60).filter(lambda raw: not is_utf8(raw)))
def test_what_is_no_text(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(b"output_dir: a\n" + raw)
    with pytest.raises(UsageError, match=r"fuzz.yaml, line \d+: a byte that is not UTF-8. Save the file as UTF-8"):
        recipes.parse("sft", ["--config", str(path)])


def is_utf8(raw):
    with contextlib.suppress(UnicodeDecodeError):
        return bool(raw.decode()) or True
    return False


WHOLE = [
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "lora_r",
    "dataset_num_proc",
]
WHOLE += ["save_total_limit", "dataloader_num_workers", "per_device_eval_batch_size"]
NUMBERS = [
    "learning_rate",
    "num_train_epochs",
    "weight_decay",
    "adam_beta1",
    "lora_dropout",
    "save_steps",
    "logging_steps",
]
TEXTS = [
    "model_name_or_path",
    "dataset_name",
    "output_dir",
    "run_name",
    "chat_template",
    "dataset_train_split",
    "dtype",
]
CHOICES = [
    "lr_scheduler_type",
    "optim",
    "eval_strategy",
    "save_strategy",
    "hub_strategy",
    "bad_rows",
    "on_nonfinite",
    "logging_strategy",
]
FLAGS = ["fp16", "use_peft", "push_to_hub", "gradient_checkpointing", "strict_masks", "do_eval"]
MAPPINGS = ["model_init_kwargs", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs"]
DISTILL = ["beta", "temperature", "lmbda", "top_p", "sft_weight", "skew_alpha"]
OLD = [
    "warmup_ratio",
    "dataset_mixture",
    "dataset_mixer",
    "dataset_splits",
    "max_seq_length",
    "torch_dtype",
]

words = st.text(alphabet="abcxyz_-./ é\u202e", min_size=1, max_size=12).filter(lambda text: text.strip())
containers = st.one_of(
    st.lists(st.integers(), min_size=1, max_size=3),
    st.dictionaries(words, st.integers(), min_size=1, max_size=3),
    st.just([[[[]]]]),
    st.just({"a": {"b": [None]}}),
)
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
bad_number = st.one_of(containers, not_finite, words, st.booleans(), st.integers(max_value=-2), st.just(-(10**400)))
bad_entry = st.one_of(
    st.tuples(st.sampled_from(WHOLE), st.one_of(bad_number, st.floats(1.1, 1.9), st.just(10**30), st.just(10**400))),
    st.tuples(st.sampled_from(NUMBERS), bad_number),
    st.tuples(st.sampled_from(TEXTS), st.one_of(containers, not_finite, st.integers(), st.booleans())),
    st.tuples(st.sampled_from(CHOICES), st.one_of(containers, not_finite, st.integers(2), words)),
    st.tuples(st.sampled_from(FLAGS), st.one_of(containers, not_finite, words.map("z{}".format), st.integers(2))),
    st.tuples(st.sampled_from(["max_steps", "learning_rate", "seed", "fp16", "use_peft", "do_eval"]), st.none()),
    st.tuples(st.sampled_from(MAPPINGS), st.one_of(st.lists(st.integers()), words, st.integers(), st.just({1: 2}))),
    st.tuples(
        st.just("env"), st.one_of(st.lists(st.integers(), min_size=1), words, st.just({"A=B": 1}), st.just({"A": [1]}))
    ),
    st.tuples(st.sampled_from(OLD), st.one_of(containers, not_finite, st.just({"datasets": [5]}), st.just([None]))),
    st.tuples(st.just("logging_dir"), containers),
    st.tuples(words.map(lambda word: f"{word}zz"), st.integers()),
    st.tuples(st.sampled_from(["learning_rat", "max_step", "datset_name", "Learning_Rate", "output_dir "]), st.just(1)),
    st.tuples(st.sampled_from(["run_name", "system_prompt"]), st.sampled_from(["a\0b", "\ud800", "x\udfff"])),
)


def refused(job, argv):
    """The message with which a command line is refused, by whatever kind of error `run.main` shows as one."""
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises((UsageError, ValueError)) as error:
        recipes.parse(job, argv)
    return message_of(error.value)


@settings(often, max_examples=100)
@given(entry=bad_entry)
def test_what_no_key_takes(tmp_path_factory, entry):
    name, value = entry
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(
        yaml.dump({"output_dir": "out", name: value}, allow_unicode=False).encode("utf-8", "surrogatepass")
    )
    message = refused("sft", ["--config", str(path)])
    today = {"torch_dtype": "dtype", "max_seq_length": "max_length", "dataset_splits": "dataset_"}.get(name, name)
    assert name.strip() in message or today in message or "4300" in message, message


@settings(often, max_examples=30)
@given(name=st.sampled_from(DISTILL), value=st.one_of(not_finite, words, containers, st.integers(max_value=-1)))
def test_what_distillation_does_not_take(tmp_path_factory, name, value):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(yaml.dump({"output_dir": "out", name: value}))
    message = refused("distill", ["--config", str(path)])
    assert name in message or "skew" in message, message


@settings(often, max_examples=40)
@given(
    name=st.sampled_from(WHOLE + NUMBERS + CHOICES),
    value=st.sampled_from(["", "nan", "-1e9", "-7", "zz", "1e999", "[1]", "{}", "\u202e"]),
)
def test_what_no_flag_takes(name, value):
    message = refused("sft", [f"--{name}", value])
    assert name in message, message


# --- rows -------------------------------------------------------------------------------------------------------------

junk = st.recursive(
    st.one_of(st.none(), st.integers(-5, 5), st.booleans(), st.text(alphabet="ab \n\t\u202e\x1b[", max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(alphabet="ab", max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
no_text = st.one_of(
    st.none(), st.integers(), st.booleans(), st.just(""), st.just(" \n"), st.just([]), st.just({}), st.just([1, [2]])
)
message = {"role": "user", "content": "hi"}
bad_message = st.one_of(
    st.none(),
    st.integers(),
    st.just("user: hi"),
    st.just({}),
    st.just({"role": "user"}),
    st.just({"content": "hi"}),
    st.builds(
        lambda role: {"role": role, "content": "hi"},
        st.one_of(st.none(), st.integers(), st.just("narrator"), st.just(["user"])),
    ),
    st.builds(
        lambda content: {"role": "assistant", "content": content}, st.one_of(no_text, st.just([{"type": "image"}]))
    ),
    st.builds(
        lambda part: {"role": "user", "content": [part]},
        st.one_of(st.just({"type": "text"}), st.just({"type": "text", "text": 5}), st.integers()),
    ),
    st.builds(
        lambda calls: {"role": "assistant", "tool_calls": calls},
        st.one_of(st.integers(), st.just("f(x)"), st.just([1])),
    ),
    st.just({"from": "nobody", "value": "hi"}),
)
bad_row = st.one_of(
    st.builds(lambda p: {"prompt": p, "completion": "x"}, no_text.filter(lambda p: p not in ("", " \n"))),
    st.builds(lambda c: {"prompt": "x", "completion": c}, no_text),
    st.builds(lambda m: {"messages": [message, m]}, bad_message),
    st.builds(lambda m: {"messages": m}, st.one_of(no_text, st.just([message]), st.just("hi"))),
    st.builds(lambda m: {"conversations": m}, st.one_of(no_text, st.just([{"from": "human"}]))),
    st.builds(lambda m: {"prompt": [message], "completion": [m]}, bad_message),
    st.builds(lambda t: {"text": t}, no_text),
    st.builds(lambda x: {"a": x, "b": 1}, junk),
    st.builds(
        lambda ids: {"input_ids": ids},
        st.one_of(st.just([1, -1]), st.just([1, 10**6]), st.just(["a"]), st.none(), st.just([]), st.just(3)),
    ),
    st.builds(
        lambda y: {"input_ids": [1, 2, 3], "labels": y},
        st.one_of(st.just([1]), st.just("abc"), st.just([-100] * 3), st.just([None] * 3)),
    ),
    st.builds(
        lambda m: {"input_ids": [1, 2], "completion_mask": m}, st.one_of(st.just([1]), st.just("ab"), st.just([0, 0]))
    ),
    st.builds(
        lambda t: {"messages": [message, {"role": "assistant", "content": "a"}], "tools": t},
        st.sampled_from(["{", "3", '["a"]', "nope"]),
    ),
)


def rows_of(row):
    """A dataset of one row as a file would give it, or `None` where arrow has no such table."""
    with contextlib.suppress(Exception):
        return Dataset.from_list([row])
    return None


@settings(often, max_examples=140)
@given(row=bad_row)
def test_rows_that_cannot_be_trained(row):
    dataset = rows_of(row)
    if dataset is None:
        return
    with pytest.raises(DatasetError) as error:
        prepare_sft(dataset, Tokenization(TOKENIZER), RowPolicy(), name="train")
    text = message_of(error.value)
    assert "row 0" in text or "columns" in text or "column `" in text, text


@settings(often, max_examples=40)
@given(row=bad_row.filter(lambda row: "input_ids" not in row and "text" not in row))
def test_rows_without_a_prompt(row):
    dataset = rows_of({**row, "prompt": None} if row.get("completion") == "x" else row)
    if dataset is None:
        return
    columns = PromptColumns(references=True)
    with pytest.raises(DatasetError) as error:
        prepare_prompts(dataset, Tokenization(TOKENIZER), RowPolicy(prompts=True), name="train", columns=columns)
    message_of(error.value)


def test_enormous_rows_end_too():
    rows = Dataset.from_list(
        [{"prompt": "a" * 300_000, "completion": "b" * 300_000}, {"prompt": "(" * 50_000, "completion": ")"}]
    )
    with pytest.raises(DatasetError, match="2 of 2 rows of the train dataset are longer than `max_length: 64` tokens"):
        prepare_sft(rows, Tokenization(TOKENIZER), RowPolicy(max_length=64), name="train")


# --- whole commands ---------------------------------------------------------------------------------------------------

FILES = {
    "no bytes": b"",
    "blank lines": b"\n\n \n",
    "no JSON": b"prompt,completion\na,b\n",
    "an open line": b'{"prompt": "a", "completion": "b"}\n{"prompt": "a", "compl',
    "numbers": b"1\n2\n",
    "lists": b'["a"]\n["b"]\n',
    "a number among rows": b'{"prompt": "a", "completion": "b"}\n7\n',
    "nulls": b"null\nnull\n",
    "empty mappings": b"{}\n{}\n",
    "half a surrogate": b'{"prompt": "\\ud800", "completion": "x"}\n',
    "no UTF-8": b'{"prompt": "\xff\xfe", "completion": "x"}\n',
    "a binary": bytes(range(256)),
    "deep": b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}\n",
    "a key twice": b'{"prompt": "a", "prompt": "b", "completion": "c"}\n',
    "too large": b'{"prompt": 1e999999, "completion": "x"}\n',
    "other columns": b'{"question": "a", "answer": "b"}\n',
    "an array of numbers": b"[1, 2, 3]",
    "an open array": b'[{"prompt": "a", "completion": "b"},',
    "kinds mixed": b'{"prompt": "a", "completion": "b"}\n{"prompt": 1, "completion": "b"}\n',
    "nested mixed": b'{"messages": [{"role": "user", "content": "a"}]}\n{"messages": "a"}\n',
    "no assistant": b'{"messages": [{"role": "user", "content": "a"}]}\n',
    "null contents": b'{"messages": [{"role": "user", "content": null}, {"role": "assistant", "content": null}]}\n',
    "no messages": b'{"messages": []}\n',
    "an unknown role": b'{"messages": [{"role": "narrator", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    qwen3().save_pretrained(path / "student")
    qwen3(1).save_pretrained(path / "teacher")
    for name in ("student", "teacher"):
        tokenizer().save_pretrained(path / name)
    (path / "saved").mkdir()
    (path / "saved" / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    (path / "good.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    return path


def command(folder, capsys, job, **flags):
    """(exit code, message) of a run that must not start."""
    values = {"model_name_or_path": "student", "dataset_name": "good.jsonl", "output_dir": "out", "report_to": "none"}
    values |= {"teacher_model_name_or_path": "teacher"} if job == "distill" else {}
    (folder / "recipe.yaml").write_text(yaml.dump(values | {"gradient_checkpointing": False} | flags))
    code = main([job, "--config", "recipe.yaml"])
    out, err = capsys.readouterr()
    assert code in (1, 2) and "Traceback" not in out + err and not (folder / "out").exists()
    return code, message_of(err[err.rindex("error: ") :])


@pytest.mark.parametrize("name", FILES)
def test_files_that_hold_no_rows(folder, monkeypatch, capsys, name):
    monkeypatch.chdir(folder)
    (folder / "bad.jsonl").write_bytes(FILES[name])
    for job in ("sft", "distill") if name in ("no bytes", "kinds mixed", "no messages", "no UTF-8") else ("sft",):
        flags = {"max_completion_length": 4} if job == "distill" else {}
        code, text = command(folder, capsys, job, dataset_name="bad.jsonl", **flags)
        assert code == 1 and re.search(r"bad\.jsonl|row \d|columns|column `|No (row|prompt)", text), text


@pytest.mark.parametrize(
    "flags",
    [
        {"model_name_or_path": "nowhere"},
        {"model_name_or_path": "."},
        {"model_name_or_path": "good.jsonl"},
        {"dataset_name": "student"},
        {"dataset_name": "nowhere.parquet"},
        {"dataset_name": "no/where/at/all"},
        {"dataset_name": "saved", "dataset_train_split": "nine"},
        {"dtype": "float17"},
        {"attn_implementation": "telepathy"},
        {"max_length": 1},
        {"chat_template": "{% if %}", "system_prompt": "a"},
        {"chat_template": "{{ messages[0].content + 1 }}", "system_prompt": "a"},
        {"optim_args": "zzz"},
        {"lr_scheduler_kwargs": {"zzz": 1}},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"use_peft": True, "lora_target_modules": ["nothing_like_it"]},
        {"use_peft": True, "lora_r": 4, "lora_task_type": "NOTHING"},
        {"eval_strategy": "steps", "eval_steps": 1},
        {"resume_from_checkpoint": "nowhere"},
        {"deepspeed": "nowhere.json"},
        {"packing": True, "max_length": None},
        {"load_best_model_at_end": True},
        {"dataset_streaming": True},
    ],
    ids=str,
)
def test_runs_that_cannot_start(folder, monkeypatch, capsys, flags):
    monkeypatch.chdir(folder)
    if flags.get("chat_template"):
        flags = flags | {"dataset_name": "chat.jsonl"}
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        (folder / "chat.jsonl").write_text(json.dumps(row) + "\n")
    command(folder, capsys, "sft", **flags)
