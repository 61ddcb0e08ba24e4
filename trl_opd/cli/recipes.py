"""`trl-opd recipes list | cp`: the recipes that come with the package."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from trl_opd import shipped
from trl_opd.errors import UsageError
from trl_opd.shown import printable

EPILOG = """examples:
  trl-opd recipes list
  trl-opd recipes cp tiny/sft/config_smoke.yaml my_recipe.yaml"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="trl-opd recipes",
        description="The recipes that come with trl-opd. `--config` takes their names too.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | cp")
    commands.add_parser("list", help="every recipe, with what it is for", allow_abbrev=False)
    copy = commands.add_parser("cp", help="copy one, to change it", allow_abbrev=False)
    copy.add_argument("name", help="as `trl-opd recipes list` shows it, or the name of an accelerate config")
    copy.add_argument("dest", nargs="?", default=".", help="a file or a folder; default: the current folder")
    args = parser.parse_args(argv)
    if args.command == "list":
        print(listing())
        return 0
    try:
        print(copy_recipe(args.name, Path(args.dest)))
    except (UsageError, OSError) as error:
        print(f"trl-opd recipes: error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def listing() -> str:
    """A table of recipes and the names of the accelerate configs."""
    names = shipped.recipe_names()
    width = max(map(len, names))
    lines = [f"{name:<{width}}  {shipped.summary(name)}" for name in names]
    return "\n".join([*lines, "", f"accelerate configs: {', '.join(shipped.accelerate_names())}"])


def copy_recipe(name: str, dest: Path) -> Path:
    """Copy a shipped recipe or accelerate config and return where to. Raises `UsageError` rather than overwrite."""
    source = shipped.find_shipped(name)
    if dest.is_dir():
        dest = dest / source.name
    if dest.exists():
        raise UsageError(f"{dest} is there already: give another name, as in `trl-opd recipes cp {name} mine.yaml`")
    dest.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, dest)
    return dest
