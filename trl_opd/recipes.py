"""A recipe and its overrides -> the dataclasses of a run. Unknown keys are errors that name the nearest known key."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import trl

from . import old_keys, secrets
from .blame import OTHERS, blamed
from .config_checks import check_numbers
from .configs import DistillationConfig, SFTConfig
from .errors import UsageError
from .grpo_keys import GRPO_ONLY
from .key_rules import Reading
from .recipe_file import read_recipe
from .recipe_values import check_kinds
from .shipped import find_recipe

T = TypeVar("T")

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


def _classes(job: str) -> tuple[type, ...]:
    return trl.ScriptArguments, CONFIGS[job], trl.ModelConfig, trl.DatasetMixtureConfig


def make_parser(job: str) -> _Parser:
    """The parser of `trl-opd sft` or `trl-opd distill`: TRL's flags and ours, in full (no abbreviations)."""
    parser = _Parser(
        _classes(job),
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
    made = _or_blame(lambda asked: _make(asked, parser if asked is reading else None), reading)
    script, training, model, mixture = made
    check_numbers(model)
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
    written = {} if recipe_path is None else read_recipe(find_recipe(recipe_path))
    secrets.remember([*secrets.found_in_command(argv), *secrets.found_in(written)])
    reading = _or_blame(lambda asked: old_keys.translate(job, asked.recipe, asked.argv), Reading(job, written, argv))
    recipe = reading.recipe
    reading.environment |= environment_of(recipe_path, recipe.pop("env", None))
    unknown = [key for key in recipe if key not in known]
    if unknown:
        raise UsageError(_unknown([f"{recipe_path}: unknown key `{key}`" for key in unknown], unknown, job, known))
    check_kinds(str(recipe_path), recipe, _classes(job))
    parser.set_defaults_with_config(**recipe)
    rest = parser.parse_known_args(reading.argv)[1]
    if rest:
        flags = [part.split("=")[0] for part in rest if part.startswith("--")]
        if not flags:
            raise UsageError(f"unexpected argument `{rest[0]}`: every value follows a --flag")
        names = [flag.lstrip("-").replace("-", "_") for flag in flags]
        raise UsageError(_unknown([f"unknown flag `{flag}`" for flag in flags], names, job, known, "--"))
    return parser, reading


def environment_of(where: str | None, values: Any) -> dict[str, str]:
    """A recipe's `env`. Raises `UsageError` where it is not names and values."""
    if values is not None and not (isinstance(values, dict) and all(_is_variable(*pair) for pair in values.items())):
        example = "`env: {WANDB_PROJECT: distill}`"
        raise UsageError(f"{where}: `env` must be a mapping of names to values, as in {example}")
    return {name: str(value) for name, value in (values or {}).items()}


def _is_variable(name: Any, value: Any) -> bool:
    return isinstance(name, str) and name != "" and "=" not in name and not isinstance(value, (dict, list))


def _make(reading: Reading, parser: _Parser | None) -> tuple:
    """TRL's dataclasses in order, from today's keys and flags, by a parser that knows the recipe if there is one; their
    own checks raise what they like."""
    if parser is None:
        parser = make_parser(reading.job)
        parser.set_defaults_with_config(**reading.recipe)
    # after the dataclasses comes the namespace that holds our own `--config`
    return tuple(parser.parse_args_into_dataclasses(reading.argv, look_for_args_file=False)[:4])


def _or_blame(work: Callable[[Reading], T], reading: Reading) -> T:
    """`work(reading)`; an error that names no key is raised with the one without which it does not come."""

    def without(key: str) -> T:
        other = Reading(reading.job, reading.recipe, reading.argv)
        other.recipe.pop(key, None)
        other.typed(key, take=True)
        return work(other)

    try:
        return work(reading)
    except OTHERS as error:
        asked = {key: reading.get(key) for key in [*reading.recipe, *reading.flags()]}
        raise blamed(error, asked, without) from error


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
