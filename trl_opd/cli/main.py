"""`trl-opd`: finds the subcommand and hands over. Imports the standard library only, so that help is instant."""

from __future__ import annotations

import difflib
import importlib
import sys

COMMANDS = {
    "sft": "supervised fine-tuning, on teacher rollouts or any other rows",
    "distill": "on-policy distillation: the student writes, the teacher grades every token",
    "check": "look at a recipe, its rows and masks, up to the first loss, without training",
    "recipes": "list the recipes that come with the package, or copy one",
    "demo": "both jobs on a tiny model built from scratch: offline, no GPU, a few minutes",
    "env": "the versions and devices that a bug report needs",
}


def help_text() -> str:
    lines = ["usage: trl-opd COMMAND [flags]", "", "Distilling language models, on TRL.", "", "commands:"]
    lines += [f"  {name:<9} {what}" for name, what in COMMANDS.items()]
    lines += ["", "Every command has its own --help. Two to start with:", "  trl-opd demo", "  trl-opd sft --help"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] == "--version":
        from trl_opd import __version__

        print(f"trl-opd {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"trl-opd: error: unknown command `{argv[0]}`; {hint}", file=sys.stderr)
        return 2
    return importlib.import_module(f"trl_opd.cli.{argv[0]}").main(argv[1:])
