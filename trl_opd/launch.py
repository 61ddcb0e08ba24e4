"""From a command line to one process or several: `--accelerate_config` and `--num_processes`. Imports no more than it
must, because it runs before the processes that do the work.

On GPUs `accelerate launch` starts them; on a CPU torchrun does, because `accelerate launch` with a `MULTI_CPU` config
starts one process only.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import importing
from .errors import UsageError
from .secrets import masked_command
from .shipped import find_accelerate_config
from .shown import printable

FLAGS = ("accelerate_config", "num_processes")
WANTED = "TRL_OPD_NUM_PROCESSES"  # how many processes there must be; a cluster script may set it too
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Request:
    """What the launch flags asked for, and the arguments without them."""

    config: str | None
    processes: int | None
    rest: list[str]


def main(job: str, argv: Sequence[str]) -> int:
    """`trl-opd sft`, `python -m trl_opd.run_sft` and each process that a launcher starts. Returns the exit code."""
    try:
        request = take_flags(argv)
        if (request.config or request.processes) and not {"-h", "--help"} & set(argv):
            start(job, request)
        join(os.environ)
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once, not once a process
            print(f"trl-opd {job}: error: {printable(str(error))}", file=sys.stderr)
        return 2
    with importing.for_good():
        from .run import main as run

    return run(job, request.rest)


def take_flags(argv: Sequence[str]) -> Request:
    """Take the launch flags out of a command line. Raises `UsageError` where one has no value or stands twice."""
    asked: dict[str, str] = {}
    rest: list[str] = []
    parts = iter(argv)
    for part in parts:
        flag, equals, value = part.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in FLAGS:
            rest.append(part)
            continue
        if not equals:
            value = next(parts, "")
        if not value or value.startswith("--"):
            raise UsageError(f"{flag} needs a value")
        if name in asked:
            raise UsageError(f"{flag} stands twice")
        asked[name] = value
    number = asked.get("num_processes")
    if number is not None and (not number.isdecimal() or int(number) < 1):
        raise UsageError(f"--num_processes is {number}; it must be a whole number, at least 1")
    return Request(asked.get("accelerate_config"), None if number is None else int(number), rest)


def start(job: str, request: Request) -> NoReturn:
    """Become the launcher: its exit code and the signals it gets are this command's.

    Raises `UsageError`, for a recipe with a wrong key too: a launcher would turn that into its own exit code and text.
    """
    size = world_size(os.environ)
    if size is not None:
        raise UsageError(
            f"a launcher has already started this process, one of {size}: give --accelerate_config and --num_processes "
            "to that launcher, or start `trl-opd` without it"
        )
    command, environment = build_command(job, request, count_devices())
    with importing.for_good():
        from .recipes import check  # as late as here: it imports TRL

    check(job, request.rest)
    print(f"trl-opd {job}: {printable(shlex.join(masked_command(command)))}", file=sys.stderr, flush=True)
    os.execve(command[0], command, os.environ | environment)


def build_command(job: str, request: Request, devices: int) -> tuple[list[str], dict[str, str]]:
    """The launcher's command and what it adds to the environment, on a machine with so many GPUs (0: a CPU).

    Raises `UsageError` where the config and the machine do not go together.
    """
    name = request.config or ("ddp" if devices else "cpu2")
    path = find_accelerate_config(name)
    config = read_config(path)
    kind = str(config.get("distributed_type", "NO"))
    on_cpu = bool(config.get("use_cpu")) or kind == "MULTI_CPU"
    if not devices and not on_cpu:
        raise UsageError(
            f"--accelerate_config {name} is for GPUs and this machine has none: try `--accelerate_config cpu2`, or "
            "--num_processes alone"
        )
    configured = int(config.get("num_processes") or -1)
    processes = request.processes or (configured if configured > 0 else max(devices, 1))
    machines = int(config.get("num_machines") or 1)
    if on_cpu and (machines > 1 or kind in ("FSDP", "MEGATRON_LM")):
        what = "several machines" if machines > 1 else kind
        raise UsageError(f"--accelerate_config {name}: {what} with `use_cpu: true` is not supported; try cpu2 or zero2")
    if not on_cpu and machines == 1 and processes > devices:
        raise UsageError(
            f"{processes} processes are asked for and this machine has {devices} GPUs: give --num_processes "
            f"{devices}, or `--accelerate_config cpu2` to train on the CPU"
        )
    module, environment = f"trl_opd.run_{job}", {WANTED: str(processes)}
    if on_cpu and kind != "DEEPSPEED":
        # an environment variable, not `--use_cpu true`: that flag alone turns TRL's default precision to bf16
        environment["ACCELERATE_USE_CPU"] = "true"
        if processes == 1:
            return [sys.executable, "-m", module, *request.rest], environment
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        # after `--` torchrun takes no flag for an abbreviation of one of its own
        return [sys.executable, *launcher, "--", module, *request.rest], environment
    # by module, because `accelerate` is on the path only where the environment is activated; it knows no abbreviations
    launcher = ["-m", "accelerate.commands.launch", "--config_file", path, "--num_processes", str(processes), "-m"]
    return [sys.executable, *launcher, module, *request.rest], environment


def read_config(path: str) -> dict[str, Any]:
    """An accelerate config. Raises `UsageError` where it is not one."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--accelerate_config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--accelerate_config {path} holds no `key: value` lines")
    return config


def join(environ: MutableMapping[str, str]) -> None:
    """What a process does first: see that all that were asked for are there. Raises `UsageError`."""
    size, wanted = world_size(environ), environ.pop(WANTED, None)  # taken out: not for processes started from here
    if wanted is not None and int(wanted) != (size or 1):
        raise UsageError(
            f"{wanted} processes were asked for and the launcher started {size or 1}: each would train by itself. "
            "Start `trl-opd` with --num_processes, or torchrun"
        )
    # accelerate's launcher for CPUs: an address to meet at, where several are meant, and one process
    alone = size is None and "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ
    if alone and environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
        raise UsageError(
            "`accelerate launch` was asked for several processes on a CPU and started one, as it does for MULTI_CPU "
            "without mpirun. Start `trl-opd` with --num_processes, or use the config cpu2"
        )
    if (size or 1) > 1 and environ.get("ACCELERATE_USE_DEEPSPEED") != "true" and not count_devices():
        if environ.get("ACCELERATE_USE_FSDP") == "true":
            raise UsageError("FSDP is asked for and this machine has no GPU: accelerate would train without sharding")
        environ.setdefault("ACCELERATE_USE_CPU", "true")  # without it each process trains by itself, no word said


def check_all_met(size: int) -> None:
    """See that as many processes have met, `size`, as the launcher says there are. Raises `UsageError`."""
    there = world_size(os.environ) or 1
    if size != there:
        raise UsageError(
            f"the launcher says that there are {there} processes and this run has {size}: each would train by itself. "
            "Start `trl-opd` with --num_processes, accelerate or torchrun; on a CPU leave ACCELERATE_USE_CPU unset, or "
            "true"
        )


def count_devices() -> int:
    """GPUs, or other accelerators, that torch sees."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def world_size(environ: Mapping[str, str]) -> int | None:
    """How many processes a launcher says there are; `None` without one."""
    return next((int(environ[name]) for name in SIZES if name in environ), None)
