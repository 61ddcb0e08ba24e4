"""A recipe and its overrides -> the dataclasses of a run. Unknown keys are errors that name the nearest known key."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import trl
import yaml

from .configs import DistillationConfig, SFTConfig
from .errors import UsageError

CONFIGS: dict[str, type] = {"sft": SFTConfig, "distill": DistillationConfig}

_EPILOG = {
    "sft": """examples:
  trl-opd sft --config recipe.yaml
  trl-opd sft --model_name_or_path ./model --dataset_name rows.jsonl --output_dir out --max_steps 10""",
    "distill": """examples:
  trl-opd distill --config recipe.yaml
  trl-opd distill --model_name_or_path ./student --teacher_model_name_or_path ./teacher --dataset_name prompts.jsonl \
--output_dir out""",
}


class Settings:
    """What a run was asked to do: `script` (dataset), `training`, `model`, `mixture` arguments, and `job`."""

    def __init__(self, job: str, script: Any, training: Any, model: Any, mixture: Any):
        self.job, self.script, self.training, self.model, self.mixture = job, script, training, model, mixture


class _Parser(trl.TrlParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser(job: str) -> _Parser:
    """The parser of `trl-opd sft` or `trl-opd distill`: TRL's flags and ours, in full (no abbreviations)."""
    dataclasses = (trl.ScriptArguments, CONFIGS[job], trl.ModelConfig, trl.DatasetMixtureConfig)
    parser = _Parser(
        dataclasses,
        prog=f"trl-opd {job}",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
        epilog=_EPILOG[job],
    )
    parser.add_argument("--config", metavar="RECIPE", help="YAML recipe; flags on the command line win over it")
    return parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


# TRL renamed it in 0.20: a recipe that has it is of the time when rows were cut without a word
_OLD_LENGTH = "max_seq_length"


def _renamed(job: str, recipe: dict[str, Any], argv: list[str]) -> None:
    """Give the old length key its new name, in place, and let rows be cut (and counted) as they were then."""
    flag = next((i for i, part in enumerate(argv) if part.split("=")[0] == f"--{_OLD_LENGTH}"), None)
    if job != "sft" or (flag is None and _OLD_LENGTH not in recipe):
        return
    if flag is not None:
        argv[flag] = argv[flag].replace(_OLD_LENGTH, "max_length", 1)
    if _OLD_LENGTH in recipe:
        recipe.setdefault("max_length", recipe.pop(_OLD_LENGTH))
    said = f"`{_OLD_LENGTH}` is today's `max_length`"
    if "overflow" not in recipe and not any(part.split("=")[0] == "--overflow" for part in argv):
        recipe["overflow"] = "cut"
        said += "; longer rows are cut and counted, as `overflow: cut` says"
    print(f"trl-opd {job}: {said}", file=sys.stderr)


# What TRL's GKDTrainer took where a recipe did not say, and `DistillationTrainer` takes otherwise
GKD_DEFAULTS = {"temperature": 0.9, "lmbda": 0.5, "beta": 0.5, "max_completion_length": 128}


def _from_gkd(job: str, recipe: dict[str, Any], argv: list[str]) -> None:
    """Understand a recipe for `GKDTrainer`, told by its `max_new_tokens`, in place, and say which defaults changed."""
    flag = next((i for i, part in enumerate(argv) if part.split("=")[0] == "--max_new_tokens"), None)
    if job != "distill" or (flag is None and "max_new_tokens" not in recipe):
        return
    if flag is not None:
        argv[flag] = argv[flag].replace("max_new_tokens", "max_completion_length", 1)
    if "max_new_tokens" in recipe:
        recipe.setdefault("max_completion_length", recipe.pop("max_new_tokens"))
    asked = {part.split("=")[0].lstrip("-") for part in argv} | recipe.keys()
    fields = DistillationConfig.__dataclass_fields__
    changed = [
        f"`{name}` (was {old}, is {fields[name].default})" for name, old in GKD_DEFAULTS.items() if name not in asked
    ]
    said = "`max_new_tokens` is today's `max_completion_length`"
    if changed:
        said += "; GKDTrainer had other defaults for what is not set here: " + ", ".join(changed)
    print(f"trl-opd {job}: {said}", file=sys.stderr)


def parse(job: str, argv: Sequence[str]) -> Settings:
    """Read a command line, and the recipe it names, into `Settings`.

    Raises `UsageError` for a recipe that cannot be read and for keys or flags that nobody knows, and whatever a
    config's own checks raise.
    """
    parser = make_parser(job)
    known = sorted({action.dest for action in parser._actions} - {"help"})
    argv = list(argv)
    recipe_path = parser.parse_known_args(argv)[0].config
    recipe = {} if recipe_path is None else read_recipe(recipe_path)
    _renamed(job, recipe, argv)
    _from_gkd(job, recipe, argv)
    if recipe:
        for name, value in (recipe.pop("env", None) or {}).items():
            os.environ[name] = str(value)
        unknown = [key for key in recipe if key not in known]
        if unknown:
            raise UsageError(_unknown([f"{recipe_path}: unknown key `{key}`" for key in unknown], unknown, known))
        for key in ("eval_strategy", "save_strategy", "logging_strategy"):
            if recipe.get(key) is False:  # YAML reads a bare `no` as false
                recipe[key] = "no"
        parser.set_defaults_with_config(**recipe)
    rest = parser.parse_known_args(argv)[1]
    if rest:
        flags = [part.split("=")[0] for part in rest if part.startswith("--")]
        if not flags:
            raise UsageError(f"unexpected argument `{rest[0]}`: every value follows a --flag")
        names = [flag.lstrip("-").replace("-", "_") for flag in flags]
        raise UsageError(_unknown([f"unknown flag `{flag}`" for flag in flags], names, known, "--"))
    # TRL's dataclasses in order, then the namespace that holds our own `--config`
    script, training, model, mixture, _ = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    return Settings(job, script, training, model, mixture)


def read_recipe(path: str) -> dict[str, Any]:
    """A YAML file that holds a mapping. Raises `UsageError` naming the file, and the line where it is no YAML."""
    try:
        with open(path, encoding="utf-8") as file:
            recipe = yaml.load(file, _UniqueKeys)
    except OSError as error:
        raise UsageError(f"recipe {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise UsageError(f"recipe {path} holds no `key: value` lines")
    return recipe


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets the last of two equal keys win without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key `{twice}` appears twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _unknown(heads: list[str], names: list[str], known: list[str], prefix: str = "") -> str:
    lines = []
    for head, name in zip(heads, names, strict=True):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        near = near or [key for key in known if key.startswith(name)][:1]
        lines.append(head + (f"; did you mean `{prefix}{near[0]}`?" if near else ""))
    return "\n".join(lines)
