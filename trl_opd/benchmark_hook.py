"""Benchmarks of the saved model: a command of the user's, once for each, with its log and exit code kept.

No evaluation harness is imported: the command is started as a program, without a shell, on the main process.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import string
import subprocess
import time
from typing import Any

from .errors import UsageError

logger = logging.getLogger(__name__)

FIELDS = ("model", "task", "output_dir", "hub_model_id", "revision", "system_prompt")
RESULTS = "benchmarks.json"
# what launchers tell their processes: a program started from here would wait for the others
_LAUNCHER = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_\w+|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|ACCELERATE_\w+|FSDP_\w+)"
)


def check_command(benchmarks: list[str] | None, command: str | None) -> None:
    """Raise `ValueError` for a command that could not be filled in, before anything is trained."""
    if command is None:
        return
    if not benchmarks:
        raise ValueError("benchmark_command is set and `benchmarks` names none to run: set it to a list of names.")
    try:
        words = shlex.split(command)
        fields = [name for word in words for _, name, _, _ in string.Formatter().parse(word) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"benchmark_command {command!r} cannot be read: {error}. Quote as in a shell, and write {{{{ for a brace."
        ) from error
    unknown = [name for name in fields if name not in FIELDS]
    if unknown or not words:
        what = f"has the field {{{unknown[0]}}}" if unknown else "is empty"
        known = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise ValueError(f"benchmark_command {what}; it is filled in with {known}. Write {{{{ for a brace.")
    if "task" not in fields:
        raise ValueError(
            "benchmark_command has no {task}, so every benchmark would be the same: put it where one goes."
        )


def check_program(args: Any) -> None:
    """Raise `UsageError` where the command's program is not on this machine."""
    if args.benchmark_command is None:
        return
    program = shlex.split(args.benchmark_command)[0]
    if "{" not in program and shutil.which(program) is None:
        raise UsageError(f"benchmark_command: there is no program {program} here. Install it, or leave the key out.")


def run_benchmarks(args: Any, hub_model_id: str | None = None) -> list[dict[str, Any]]:
    """Run every benchmark and return what `benchmarks.json` in `output_dir` then holds: task, command, exit code, log
    and seconds of each. One that fails is said, and the next one runs. Call it on one process, after everything else.
    """
    results: list[dict[str, Any]] = []
    if not args.benchmarks or args.benchmark_command is None:
        return results
    folder = os.path.join(args.output_dir, "benchmarks")
    os.makedirs(folder, exist_ok=True)
    fields = {
        "model": os.path.abspath(args.output_dir),
        "output_dir": os.path.abspath(folder),
        "hub_model_id": hub_model_id or "",
        "revision": args.hub_revision or "main",
        "system_prompt": args.system_prompt or "",
    }
    for i, task in enumerate(args.benchmarks):
        words = [word.format(**fields, task=task) for word in shlex.split(args.benchmark_command)]
        log = os.path.join(folder, f"{i}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', task)}.log")
        logger.info("benchmark %s: %s", task, shlex.join(words))
        began = time.monotonic()
        code = _run(words, log)
        seconds = round(time.monotonic() - began, 1)
        results.append({"task": task, "command": words, "exit_code": code, "log": log, "seconds": seconds})
        _write(os.path.join(args.output_dir, RESULTS), results)
        if code == 0:
            logger.info("benchmark %s is done, its output is in %s", task, log)
        else:
            logger.warning("benchmark %s failed with exit code %s: see %s", task, code, log)
    return results


def _run(words: list[str], log: str) -> int:
    """The exit code of a program whose output goes to a file; 127 where it cannot be started, as in a shell."""
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}
    with open(log, "w", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(words)}\n")
        file.flush()
        try:
            return subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
        except OSError as error:
            file.write(f"{error}\n")
            return 127


def _write(path: str, results: list[dict[str, Any]]) -> None:
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(results, file, indent=2)
    os.replace(path + ".part", path)
