"""Recipes and flags of an older time: what reaches the dataclasses today, and what the table says of it."""

import json
import os

import pytest
import torch
import yaml
from datasets import Dataset
from tiny import CHATML, qwen3, tokenizer
from training import text_rows

from trl_opd import grpo_keys, old_keys, old_values, recipes
from trl_opd.errors import UsageError
from trl_opd.run import run

ENVIRONMENT = ("TENSORBOARD_LOGGING_DIR", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RUN_GROUP")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "before")  # so that what a test sets is taken back
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture(scope="module")
def parsers():
    """The parser of each job, made once: making it is most of what parsing costs. A recipe's values are its defaults
    until the next one, so they are put back."""
    made = {job: recipes.make_parser(job) for job in recipes.CONFIGS}
    before = {job: [(a, a.default, a.required) for a in parser._actions] for job, parser in made.items()}

    def parser_of(job):
        made[job]._defaults.clear()
        for action, default, required in before[job]:
            action.default, action.required = default, required
        return made[job]

    return parser_of


@pytest.fixture
def parse(tmp_path, capsys, monkeypatch, parsers):
    """`parse(job, *flags, **recipe)` -> (settings, what was printed)."""
    monkeypatch.setattr(recipes, "make_parser", parsers)

    def parse(job, *argv, **recipe):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump({"output_dir": "out", **recipe}))
        settings = recipes.parse(job, ["--config", str(tmp_path / "r.yaml"), *argv])
        return settings, capsys.readouterr().err

    return parse


def value(settings, name):
    return next(
        getattr(part, name) for part in (settings.training, settings.model, settings.script) if hasattr(part, name)
    )


# old key, its value, today's key, today's value
RENAMED = [
    ("torch_dtype", "bfloat16", "dtype", "bfloat16"),
    ("use_flash_attention_2", False, "attn_implementation", None),
    ("gradient_checkpointing_use_reentrant", False, "gradient_checkpointing_kwargs", {"use_reentrant": False}),
    ("dataset_config_name", "all", "dataset_config", "all"),
    ("dataset_train_name", "train_sft", "dataset_train_split", "train_sft"),
    ("dataset_test_name", "test_sft", "dataset_test_split", "test_sft"),
    ("dataset_splits", ["train_sft", "test_sft"], "dataset_test_split", "test_sft"),
    ("dataset_configs", ["all"], "dataset_config", "all"),
    ("preprocessing_num_workers", 4, "dataset_num_proc", 4),
    ("auto_insert_empty_system_msg", True, "system_prompt", ""),
    ("warmup_ratio", 0.03, "warmup_steps", 0.03),
    ("warmup_ratio", 0, "warmup_steps", 0.0),
    ("warmup_ratio", 1.0, "warmup_steps", old_keys.ALL_STEPS),
    ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
    ("evaluation_strategy", False, "eval_strategy", "no"),
    ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
    ("per_gpu_eval_batch_size", 3, "per_device_eval_batch_size", 3),
    ("adafactor", True, "optim", "adafactor"),
    ("optim", "adamw_hf", "optim", "adamw_torch"),
    ("no_cuda", True, "use_cpu", True),
    ("no_cuda", False, "use_cpu", False),
    ("include_inputs_for_metrics", True, "include_for_metrics", ["inputs"]),
    ("include_tokens_per_second", True, "include_num_input_tokens_seen", "all"),
    ("fsdp_min_num_params", 100, "fsdp_config", {"min_num_params": 100}),
    ("fsdp_transformer_layer_cls_to_wrap", "Qwen3DecoderLayer", "fsdp_config", {"transformer_layer_cls_to_wrap": ...}),
    ("torchdynamo", "inductor", "torch_compile_backend", "inductor"),
    ("resize_to_multiple_of", 64, "pad_embeddings_to_multiple_of", 64),
    ("callbacks", ["push_to_hub_revision", "mine"], "hub_push_checkpoints", True),
    ("additional_special_tokens", ["<a>"], "added_special_tokens", ["<a>"]),
    ("push_to_hub_model_id", "me/model", "hub_model_id", "me/model"),
    ("push_to_hub_organization", "us", "hub_model_id", "us/out"),
    ("push_to_hub_token", "t", "hub_token", "t"),
    ("hub_model_revision", "v01.00", "hub_revision", "v01.00"),
    ("push_to_hub_revision", True, "push_to_hub", True),
    ("attn_implementation", "flash_attention_2", "attn_implementation", "sdpa"),
    ("use_liger_kernel", True, "use_liger_kernel", False),
]
RENAMED_SFT = [
    ("max_seq_length", 4096, "max_length", 4096),
    ("text_column", "body", "dataset_text_field", "body"),
    ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
    ("packing_strategy", "ffd", "packing_strategy", "bfd"),
    ("dataset_kwargs", {"add_special_tokens": False}, "dataset_kwargs", None),
    ("dataset_kwargs", {"skip_prepare_dataset": True}, "dataset_kwargs", {"skip_prepare_dataset": True}),
]
RENAMED_DISTILL = [
    ("max_new_tokens", 64, "max_completion_length", 64),
    ("vllm_max_model_len", 2048, "vllm_max_model_length", 2048),
    ("vllm_guided_decoding_regex", "a+", "vllm_structured_outputs_regex", "a+"),
    ("wandb_log_unique_prompts", True, "log_unique_prompts", True),
    ("generation_batch_size", 32, "steps_per_generation", 4),
]
ONE_JOB = [("sft", *row) for row in RENAMED_SFT] + [("distill", *row) for row in RENAMED_DISTILL]


@pytest.fixture
def without_liger_and_flash(monkeypatch):
    monkeypatch.setattr(old_values.transformers_utils, "is_liger_kernel_available", lambda: False)
    monkeypatch.setattr(old_values, "is_accelerator_there", lambda: False)


@pytest.mark.parametrize("by_flag", [False, True], ids=["recipe", "flag"])
@pytest.mark.parametrize(
    "job, old, given, new, expected",
    [(job, *row) for job in ("sft", "distill") for row in RENAMED] + ONE_JOB,
)
def test_a_key_becomes_todays(parse, without_liger_and_flash, job, old, given, new, expected, by_flag):
    if by_flag:
        text = "no" if old == "evaluation_strategy" and not given else given
        text = text if isinstance(text, str) else json.dumps(text)
        settings, said = parse(job, f"--{old.replace('_', '-')}", text)
    else:
        settings, said = parse(job, **{old: given})
    got = value(settings, new)
    if isinstance(expected, dict):
        assert expected.keys() <= got.keys()
    else:
        assert getattr(got, "value", got) == expected
    assert old in said or (old, given) in [("dataset_kwargs", {"skip_prepare_dataset": True})]


HABITS = {"sft": {"overflow": "cut"}, "distill": {}}


def taken_apart(rules):
    """Keys of a table that are listed above."""
    return {key for key in rules if key not in {row[0] for row in RENAMED + RENAMED_SFT + RENAMED_DISTILL}}


@pytest.mark.parametrize(
    "job, key", [(job, key) for job in ("sft", "distill") for key in sorted(taken_apart(old_keys.rules_of(job)))]
)
def test_every_other_key_of_the_table_is_explained(parse, job, key, tmp_path):
    given = {"callbacks": ["push_to_hub_revision"], "chat_template_path": str(tmp_path / "t.jinja"), "use_liger": False}
    (tmp_path / "t.jinja").write_text(CHATML)
    given |= {"dispatch_batches": False, "split_batches": False, "xpu_backend": None}
    if given.get(key, "x") is None:  # the backend would be started
        assert old_keys.translate(job, {key: "gloo"}, []).recipe == {"ddp_backend": "gloo"} | HABITS[job]
        return
    settings, said = parse(job, **{key: given.get(key, "x")})
    (line,) = [line for line in said.splitlines() if f" {key}: " in line]
    assert "not used" in line or "`" in line or "loaded from there" in line
    if key == "chat_template_path":
        assert settings.training.chat_template == CHATML


def test_the_environment_of_trackers(parse):
    parse("sft", logging_dir="logs", wandb_entity="us", wandb_project="p", wandb_run_group="g")
    assert [os.environ[name] for name in ENVIRONMENT] == ["logs", "us", "p", "g"]


def test_warmup_is_a_share_of_the_real_steps(parse):
    """3% of 1000 steps are 30, of 10 steps 1; a ratio of 1 is all of them, not one step."""
    warmup = lambda **recipe: parse("sft", **recipe)[0].training.get_warmup_steps  # noqa: E731
    assert [warmup(warmup_ratio=0.03)(n) for n in (1000, 10)] == [30, 1]
    assert [warmup(warmup_ratio=1.0)(n) for n in (1, 10, 1000)] == [1, 10, 1000]
    assert warmup(warmup_ratio=0.0)(1000) == 0
    assert warmup(warmup_ratio=0.1, warmup_steps=0)(100) == 10  # as transformers 4 had it
    assert warmup(warmup_ratio=0.1, warmup_steps=7)(100) == 7
    for wrong in (1.5, -0.1, "some"):
        with pytest.raises(UsageError, match=r"warmup_ratio is .*a share of the steps, from 0 to 1"):
            warmup(warmup_ratio=wrong)


def test_what_was_typed_wins_over_the_recipe(parse):
    settings, said = parse("sft", "--max_length", "64", max_seq_length=4096)
    assert settings.training.max_length == 64 and "not used: `max_length: 64` is set" in said
    settings, _ = parse("sft", "--max_seq_length=32", "--warmup-ratio", "0.5", max_length=64, warmup_ratio=0.1)
    assert (settings.training.max_length, settings.training.warmup_steps) == (32, 0.5)
    settings, _ = parse("sft", "--use_liger_kernel", "false", use_liger_kernel=True)
    assert settings.training.use_liger_kernel is False
    settings, said = parse("sft", "--push_to_hub", "false", push_to_hub_revision=True)
    assert settings.training.push_to_hub is False and "not used: `push_to_hub: false` is set" in said
    settings, _ = parse("sft", push_to_hub=False, push_to_hub_revision=True)
    assert settings.training.push_to_hub is False
    settings, _ = parse("sft", "--gradient_checkpointing_use_reentrant", "true", gradient_checkpointing_kwargs={"a": 1})
    assert settings.training.gradient_checkpointing_kwargs == {"a": 1, "use_reentrant": True}


def test_a_token_is_never_printed(parse):
    for recipe in ({}, {"hub_token": "other"}):
        settings, said = parse("sft", push_to_hub_token="secret", **recipe)
        assert settings.training.hub_token == recipe.get("hub_token", "secret")
        assert "secret" not in said and "other" not in said and "`hub_token`" in said


def test_organization_and_name_are_one_id(parse):
    settings, _ = parse("sft", push_to_hub_organization="us", push_to_hub_model_id="model")
    assert settings.training.hub_model_id == "us/model"


def test_dtype_inside_model_init_kwargs(parse):
    settings, said = parse("distill", teacher_model_init_kwargs={"torch_dtype": "bfloat16", "revision": "r"})
    assert settings.training.teacher_model_init_kwargs == {"dtype": "bfloat16", "revision": "r"}
    assert "teacher_model_init_kwargs.torch_dtype" in said


@pytest.mark.parametrize("job, key", [("sft", "model_init_kwargs"), ("distill", "teacher_model_init_kwargs")])
def test_a_fallback_of_attention_is_said_wherever_it_was_asked_for(parse, without_liger_and_flash, job, key):
    settings, said = parse(job, **{key: {"attn_implementation": "flash_attention_2", "revision": "r"}})
    assert getattr(settings.training, key) == {"attn_implementation": "sdpa", "revision": "r"}
    assert f"{key}.attn_implementation" in said and "there is no flash attention on this machine" in said
    settings, said = parse(job, attn_implementation="flash_attention_3")
    assert settings.model.attn_implementation == "sdpa" and "attn_implementation: flash_attention_3" in said
    settings, said = parse(job, attn_implementation="eager")
    assert settings.model.attn_implementation == "eager" and said == ""


def test_old_habits_stay_only_in_old_recipes(parse):
    settings, said = parse("sft", overwrite_output_dir=True)
    assert settings.training.overflow == "cut" and settings.training.train_on == "assistant"
    assert "nothing is ever deleted" in said and "`overflow: cut`" in said and "`train_on: all`" in said
    assert "kept it for benchmarks" in parse("sft", overwrite_output_dir=True, system_prompt="s")[1]
    settings, said = parse("sft", overwrite_output_dir=True, overflow="drop", train_on="all")
    assert settings.training.overflow == "drop" and "train_on" not in said
    settings, said = parse("sft", learning_rate=1e-4)
    assert settings.training.overflow == "error" and said == ""


def test_the_seeds_command_line(parse):
    """Flags without a value are true, also those whose default is unset."""
    settings, _ = parse(
        "sft", "--max_seq_length", "4096", "--packing", "--gradient_checkpointing", "--bf16", "--use_cpu"
    )
    training = settings.training
    assert (training.max_length, training.packing, training.gradient_checkpointing) == (4096, True, True)
    assert training.bf16 is True


def test_only_the_main_process_prints(monkeypatch, capsys):
    old_keys.show("sft", [("a", "b")])
    assert "│ a " in capsys.readouterr().err
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "1")
        old_keys.show("sft", [("a", "b")])
    assert capsys.readouterr().err == ""


# --- recipes ---------------------------------------------------------------------------------------------------------

OVERRIDES = (
    *("--model_name_or_path", "X", "--max_steps", "2", "--push_to_hub", "false", "--report_to", "none"),
    *("--attn_implementation", "eager", "--bf16", "false"),
)
SHARED = {
    "model_name_or_path": "M",
    "model_revision": "main",
    "torch_dtype": "bfloat16",
    "attn_implementation": "flash_attention_2",
    "dataset_name": "D",
    "bf16": True,
    "do_eval": False,
    "eval_strategy": "no",
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "hub_model_id": "H",
    "hub_strategy": "every_save",
    "log_level": "info",
    "logging_steps": 1,
    "logging_strategy": "steps",
    "max_steps": -1,
    "num_train_epochs": 5,
    "output_dir": "data/out",
    "overwrite_output_dir": True,
    "push_to_hub": True,
    "report_to": ["wandb"],
    "save_total_limit": 1,
    "seed": 42,
}
MIN_LR = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
SFT = (
    SHARED
    | MIN_LR
    | {
        "dataset_num_proc": 12,
        "gradient_accumulation_steps": 8,
        "learning_rate": 4.0e-05,
        "packing": False,
        "max_grad_norm": 0.2,
        "max_length": 32768,
        "per_device_eval_batch_size": 1,
        "per_device_train_batch_size": 2,
        "save_strategy": "epoch",
        "use_liger_kernel": True,
        "warmup_ratio": 0.03,
    }
)
SFT_RECIPES = {
    "template": SFT | {"dataset_config": "all", "chat_template": CHATML, "eos_token": "<|im_end|>"},
    "plain": SFT,
    "paged": SFT | {"optim": "paged_adamw_8bit", "hub_always_push": True, "save_only_model": True, "max_length": 22528},
}
GRPO = SHARED | {
    "dataset_prompt_column": "problem",
    "system_prompt": "Think first.",
    "use_vllm": True,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1.0e-06,
    "log_completions": True,
    "logging_first_step": True,
    "lr_scheduler_type": "cosine",
    "max_prompt_length": 512,
    "max_completion_length": 1024,
    "num_generations": 16,
    "per_device_train_batch_size": 16,
    "reward_funcs": ["accuracy", "format"],
    "reward_weights": [1.0, 1.0],
    "save_strategy": "epoch",
    "temperature": 0.7,
    "warmup_ratio": 0.1,
}
CODE = (
    GRPO | MIN_LR | {"beta": 0.01, "num_generations": 14, "max_steps": 500, "save_strategy": "steps", "save_steps": 50}
)
GRPO_RECIPES = {
    "math": GRPO,
    "math with a template": GRPO | MIN_LR | {"chat_template": CHATML, "use_liger_kernel": True},
    "code": CODE,
    "olympiad": CODE | {"code_language": "cpp", "code_eval_test_batch_size": 3},
    "contests": GRPO
    | {
        "beta": 0.0,
        "loss_type": "dr_grpo",
        "scale_rewards": False,
        "callbacks": ["push_to_hub_revision"],
        "benchmarks": ["lcb_v4"],
        "vllm_device": "auto",
        "vllm_gpu_memory_utilization": 0.7,
        "hub_model_revision": "v01.00",
        "lr_scheduler_type": "constant_with_warmup",
        "gradient_accumulation_steps": 32,
        "per_device_train_batch_size": 4,
        "save_steps": 0.05,
        "mask_truncated_completions": True,
        "code_eval_test_batch_size": -1,
        "code_eval_scoring_mode": "weighted_sum",
        "wandb_entity": "us",
        "wandb_project": "p",
    },
}


@pytest.mark.parametrize("name", SFT_RECIPES)
def test_sft_recipes(parse, without_liger_and_flash, name):
    recipe = SFT_RECIPES[name]
    settings, said = parse("sft", *OVERRIDES, **recipe)
    training, model = settings.training, settings.model
    assert (model.model_name_or_path, model.dtype, model.attn_implementation) == ("X", "bfloat16", "eager")
    assert (training.warmup_steps, training.get_warmup_steps(1000)) == (0.03, 30)
    assert training.lr_scheduler_type.value == "cosine_with_min_lr"
    assert training.lr_scheduler_kwargs == {"min_lr_rate": 0.1} and training.max_grad_norm == 0.2
    assert training.optim.value == recipe.get("optim", "adamw_torch_fused")
    assert (training.chat_template, training.eos_token) == (recipe.get("chat_template"), recipe.get("eos_token"))
    assert (training.max_length, training.overflow, training.packing) == (recipe["max_length"], "cut", False)
    assert (training.max_steps, training.push_to_hub, training.bf16, training.report_to) == (2, False, False, [])
    assert "overwrite_output_dir: True" in said and "liger_kernel is not installed" in said


@pytest.mark.parametrize("name", GRPO_RECIPES)
def test_grpo_recipes_are_sources_of_prompts(parse, without_liger_and_flash, name):
    recipe = GRPO_RECIPES[name]
    flags = ("--teacher_model_name_or_path", "T", "--use_vllm", "false")
    settings, said = parse("distill", *OVERRIDES, *flags, **recipe)
    training = settings.training
    assert (training.beta, training.temperature) == (1.0, 0.7)
    assert (training.max_prompt_length, training.prompt_overflow) == (512, "truncate_left")
    assert training.max_completion_length == 1024
    assert training.per_device_train_batch_size == recipe["per_device_train_batch_size"]
    assert training.num_generations == 16
    assert training.mask_truncated_completions == recipe.get("mask_truncated_completions", False)
    assert (training.dataset_prompt_column, training.system_prompt) == ("problem", "Think first.")
    assert training.chat_template == recipe.get("chat_template")
    assert training.hub_revision == recipe.get("hub_model_revision")
    for key in recipe:
        if key in grpo_keys.GRPO_ONLY or key in ("loss_type", "beta"):
            assert any(f" {key}: " in line and "not used" in line for line in said.splitlines()), key


def test_generations_keep_their_number_where_they_fit(parse, monkeypatch):
    """16 × 4 completions a process: 14 does not divide 64 but 448, so 7 processes keep it and 1 takes 16."""
    settings, said = parse("distill", **CODE | {"bf16": False, "report_to": "none", "use_vllm": False})
    assert settings.training.num_generations == 16 and "no multiple of 14; on 7 processes it is one" in said
    monkeypatch.setenv("WORLD_SIZE", "7")
    reading = old_keys.translate("distill", CODE, [])
    assert reading.recipe["num_generations"] == 14
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(
        ValueError, match=r"Set `num_generations` to a divisor of 64, or `per_device_train_batch_size: 14"
    ):
        parse("distill", "--num_generations", "14", **CODE | {"bf16": False, "report_to": "none"})


def test_our_own_beta_beside_a_grpo_recipe(parse):
    settings, said = parse("distill", "--beta", "0.5", **GRPO | {"bf16": False, "report_to": "none", "beta": 0.04})
    assert settings.training.beta == 0.5 and "KL coefficient" not in said


def test_defaults_of_grpo_that_were_not_set(parse):
    _, said = parse("distill", reward_funcs=["accuracy"], num_generations=1)
    assert "GRPOTrainer had other defaults: `max_prompt_length` (was 512, is None), `max_completion_length`" in said


def test_a_gkd_recipe_names_the_defaults_that_changed(parse):
    settings, said = parse("distill", max_new_tokens=64, temperature=0.9, packing=False, max_length=512)
    assert settings.training.max_completion_length == 64
    assert "`lmbda` (was 0.5, is 1.0), `beta` (was 0.5, is 1.0)" in said and "`temperature`" not in said
    assert "rollouts are not packed" in said and "`max_prompt_length`" in said


@pytest.mark.parametrize(
    "job, recipe, message",
    [
        ("sft", {"learning_rrate": 1}, "unknown key `learning_rrate`; did you mean `learning_rate`?"),
        ("sft", {"overwrite_output_dirs": 1}, "did you mean `overwrite_output_dir`?"),
        ("sft", {"reward_funcs": ["a"]}, "which is GRPO's: `trl-opd distill` takes such a recipe"),
        ("distill", {"reward_fucns": ["a"]}, "did you mean `reward_funcs`?"),
        ("distill", {"reward_funcs": ["a"], "generation_batch_size": 13}, "it must be a multiple of 8"),
        ("distill", {"chat_template_path": "none.jinja"}, "there is no file none.jinja"),
    ],
)
def test_what_nobody_knows_is_an_error(parse, job, recipe, message):
    with pytest.raises(UsageError) as caught:
        parse(job, **recipe)
    assert message in str(caught.value)


def test_bf16_on_a_machine_without_a_gpu_is_one_message(parse, without_liger_and_flash, monkeypatch):
    monkeypatch.setattr("trl_opd.config_checks.is_accelerator_there", lambda: False)
    with pytest.raises(ValueError, match=r"`bf16: true` needs a GPU.*Set `bf16: false`, or add `use_cpu: true`"):
        parse("sft", bf16=True, attn_implementation="flash_attention_2")


# --- runs ------------------------------------------------------------------------------------------------------------

TEMPLATE = CHATML.replace("<|im_start|>", "<|im_start|>the ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("old")
    for name, seed in (("student", 0), ("teacher", 1)):
        qwen3(seed).save_pretrained(path / name)
        tokenizer(eos="<|endoftext|>").save_pretrained(path / name)
    turns = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
        for row in text_rows(6)
    ]
    Dataset.from_list(turns).to_json(path / "turns.jsonl")
    text_rows(6).rename_column("prompt", "problem").to_json(path / "problems.jsonl")
    return path


def start(job, folder, tmp_path, recipe, *flags):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe | {"output_dir": str(tmp_path / "out")}))
    own = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--dataset_num_proc", "1")
    overrides = ("--config", str(tmp_path / "r.yaml"), *OVERRIDES, *own, "--gradient_checkpointing", "false")
    student = ("--model_name_or_path", str(folder / "student"), "--disable_tqdm", "true", "--log_level", "warning")
    return run(job, [*overrides, *student, *flags])


def test_a_recipe_with_a_template_trains_and_saves_it(folder, tmp_path):
    recipe = SFT_RECIPES["template"] | {"chat_template": TEMPLATE, "group_by_length": True, "save_safetensors": True}
    data = ("--dataset_name", str(folder / "turns.jsonl"), "--eval_strategy", "epoch", "--dataset_test_split", "train")
    trainer = start("sft", folder, tmp_path, recipe, *data)
    row = trainer._tokenizer.decode(trainer.train_dataset[0]["input_ids"])
    assert row.startswith("<|im_start|>the user") and trainer.eval_dataset is not None
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    assert trainer.args.get_warmup_steps(trainer.state.max_steps) == 1 and trainer.state.global_step == 2
    assert next(trainer.model.parameters()).dtype == torch.bfloat16


def test_a_grpo_recipe_distills(folder, tmp_path):
    recipe = GRPO_RECIPES["math with a template"] | {"chat_template": TEMPLATE, "num_generations": 2}
    flags = ("--teacher_model_name_or_path", str(folder / "teacher"), "--use_vllm", "false")
    data = (
        "--dataset_name",
        str(folder / "problems.jsonl"),
        "--max_completion_length",
        "4",
        "--max_prompt_length",
        "16",
    )
    trainer = start("distill", folder, tmp_path, recipe, *flags, *data, "--eos_token", "<|im_end|>")
    assert trainer.state.global_step == 2 and trainer._tokenizer.eos_token == "<|im_end|>"
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE
    assert trainer.data_reports[0].cut_prompts == 6
    with pytest.raises(ValueError, match="`eos_token: <end>` is no token"):
        start("distill", folder, tmp_path, recipe, *flags, *data, "--eos_token", "<end>")


def test_a_tokenizer_of_another_folder(folder, tmp_path):
    recipe = {"tokenizer_name_or_path": str(folder / "other"), "learning_rate": 1e-3}
    other = tokenizer()
    other.chat_template = TEMPLATE
    other.save_pretrained(folder / "other")
    trainer = start("sft", folder, tmp_path, recipe, "--dataset_name", str(folder / "turns.jsonl"))
    assert trainer._tokenizer.chat_template == TEMPLATE
