"""A recipe and its overrides -> the dataclasses of a run. Unknown keys are errors that name the nearest known key."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import trl
import yaml

from . import old_keys
from .configs import DistillationConfig, SFTConfig
from .errors import UsageError
from .grpo_keys import GRPO_ONLY
from .shipped import find_recipe

CONFIGS: dict[str, type] = {"sft": SFTConfig, "distill": DistillationConfig}

_EPILOG = {
    "sft": """recipes that come with the package: trl-opd recipes list
several processes: --accelerate_config NAME|PATH --num_processes N

examples:
  trl-opd sft --config recipe.yaml
  trl-opd sft --model_name_or_path ./model --dataset_name rows.jsonl --output_dir out --max_steps 10""",
    "distill": """recipes that come with the package: trl-opd recipes list
several processes: --accelerate_config NAME|PATH --num_processes N

examples:
  trl-opd distill --config recipe.yaml
  trl-opd distill --model_name_or_path ./student --teacher_model_name_or_path ./teacher --dataset_name prompts.jsonl \
--output_dir out""",
}


@dataclass
class Settings:
    """What a run was asked to do: `script` (dataset), `training`, `model`, `mixture` arguments, and `job`; `tokenizer`
    names one that is not the model's own, `chatml` gives ChatML to one without a template."""

    job: str
    script: Any
    training: Any
    model: Any
    mixture: Any
    tokenizer: str | None = None
    chatml: bool = False


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
    for action in parser._actions:  # `--bf16` alone is `--bf16 true`, as for flags that have a default
        if getattr(action.type, "__name__", "") == "string_to_bool" and action.nargs is None:
            action.nargs, action.const = "?", True
    return parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def parse(job: str, argv: Sequence[str]) -> Settings:
    """Read a command line, and the recipe it names, into `Settings`; older keys become today's, which is said.

    Raises `UsageError` for a recipe that cannot be read and for keys or flags that nobody knows, and whatever a
    config's own checks raise.
    """
    parser, reading = _understand(job, argv)
    for name, value in reading.environment.items():
        os.environ[name] = value
    old_keys.show(job, reading.rows)
    # TRL's dataclasses in order, then the namespace that holds our own `--config`
    script, training, model, mixture, _ = parser.parse_args_into_dataclasses(reading.argv, look_for_args_file=False)
    return Settings(job, script, training, model, reading.mixture or mixture, reading.tokenizer, reading.chatml)


def check(job: str, argv: Sequence[str]) -> None:
    """Every key and flag, and the kind of every value, before several processes are started that would each say it.

    What depends on the number of processes is left to them. Raises `UsageError`; prints and changes nothing.
    """
    _understand(job, argv)


def _understand(job: str, argv: Sequence[str]) -> tuple[_Parser, old_keys.Reading]:
    """A parser with the recipe's values as defaults, and the recipe and flags in today's keys."""
    parser = make_parser(job)
    known = sorted({action.dest for action in parser._actions} - {"help"})
    first = _Parser((), add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    recipe_path = first.parse_known_args(argv)[0].config
    reading = old_keys.translate(job, {} if recipe_path is None else read_recipe(find_recipe(recipe_path)), argv)
    recipe = reading.recipe
    reading.environment |= {name: str(value) for name, value in (recipe.pop("env", None) or {}).items()}
    unknown = [key for key in recipe if key not in known]
    if unknown:
        raise UsageError(_unknown([f"{recipe_path}: unknown key `{key}`" for key in unknown], unknown, job, known))
    parser.set_defaults_with_config(**recipe)
    rest = parser.parse_known_args(reading.argv)[1]
    if rest:
        flags = [part.split("=")[0] for part in rest if part.startswith("--")]
        if not flags:
            raise UsageError(f"unexpected argument `{rest[0]}`: every value follows a --flag")
        names = [flag.lstrip("-").replace("-", "_") for flag in flags]
        raise UsageError(_unknown([f"unknown flag `{flag}`" for flag in flags], names, job, known, "--"))
    return parser, reading


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


def _unknown(heads: list[str], names: list[str], job: str, known: list[str], prefix: str = "") -> str:
    lines = []
    old = sorted({*old_keys.rules_of(job), *(GRPO_ONLY if job == "distill" else ())})
    for head, name in zip(heads, names, strict=True):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        near = near or difflib.get_close_matches(name, old, n=1, cutoff=0.8)
        near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        near = near or [key for key in known if key.startswith(name)][:1]
        hint = f"; did you mean `{prefix}{near[0]}`?" if near else ""
        if job == "sft" and name in GRPO_ONLY:
            hint = ", which is GRPO's: `trl-opd distill` takes such a recipe as a source of prompts"
        lines.append(head + hint)
    return "\n".join(lines)
