"""Which checkpoint a run goes on from, and whether it is the same run's."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from . import checkpoints, run_lock
from .errors import UsageError
from .fingerprint import differences, versions

logger = logging.getLogger(__name__)

T = TypeVar("T")


def on_main_process(work: Callable[[], T]) -> T:
    """What `work()` gives on the main process, on every process; what it raises is raised on every one."""
    state = PartialState()
    if state.num_processes == 1:
        return work()
    result: list[Any] = [None, None]
    if state.is_main_process:
        try:
            result[0] = work()
        except (UsageError, ValueError, OSError) as error:
            result[1] = error
    broadcast_object_list(result)
    if result[1] is not None:
        raise result[1]
    return result[0]


def claim(output_dir: str, asked: Any, *, anyway: bool = False) -> str | None:
    """Take `output_dir` for this run, clear what an interrupted save has left there, and `find` its checkpoint."""

    def take() -> None:
        run_lock.take(output_dir)
        checkpoints.clear_staging(Path(output_dir))

    on_main_process(take)
    return find(output_dir, asked, anyway=anyway)


def find(output_dir: str, asked: Any, *, anyway: bool = False) -> str | None:
    """The checkpoint to go on from, complete: the one asked for, or the newest valid one of `output_dir`.

    `asked` is `resume_from_checkpoint` as it was given: a path, true, false or unset. Raises `UsageError` where the
    one asked for cannot be used, and where there are checkpoints but none that can: starting over would lose them.
    """
    if asked is not None and str(asked).lower() in ("false", "no", "none"):
        return None
    if asked is not None and str(asked).lower() not in ("true", "yes"):
        on_main_process(lambda: _check(Path(asked), anyway))
        return str(asked)
    found = on_main_process(lambda: _newest(output_dir, anyway))
    if found is None and asked is not None:
        raise UsageError(f"resume_from_checkpoint: there is no checkpoint in {output_dir}")
    return found


def _check(path: Path, anyway: bool) -> None:
    if not path.is_dir():
        raise UsageError(f"resume_from_checkpoint: there is no folder {path}")
    why = checkpoints.damage(path)
    if why is None and checkpoints.is_only_model(path) and not anyway:
        why = f"{checkpoints.ONLY_MODEL}. `resume_anyway: true` goes on with its weights and a new optimizer"
    if why is not None:
        raise UsageError(
            f"resume_from_checkpoint: {path} cannot be gone on from: {why}. Name another one, or leave the field out: "
            "the newest complete one of `output_dir` is then taken"
        )


def _newest(output_dir: str, anyway: bool) -> str | None:
    if not os.path.isdir(output_dir):
        return None
    found = checkpoints.newest_valid(output_dir)
    if anyway and found.path is None:  # rather new weights with a new optimizer than none
        whole = [path for path, why in found.skipped if why == checkpoints.ONLY_MODEL]
        found = checkpoints.Found(whole[0] if whole else None, [s for s in found.skipped if s.path not in whole[:1]])
    for path, why in found.skipped:
        logger.warning(f"{path.name} is not gone on from: {why}")
    if found.path is None and found.skipped:
        path, why = found.skipped[0]
        raise UsageError(
            f"output_dir {output_dir} holds checkpoints, but none that can be gone on from; the newest, {path.name}: "
            f"{why}. Set `resume_from_checkpoint: false` to start over (they are kept aside), or another `output_dir`"
        )
    return None if found.path is None else str(found.path)


def compare(checkpoint: str, now: dict[str, Any], *, anyway: bool = False) -> None:
    """Say what differs between a checkpoint's run and this one. Raises `UsageError` where that is recipe or data."""
    manifest = checkpoints.read_manifest(Path(checkpoint))
    if manifest is None:
        logger.warning(f"{checkpoint} has no manifest: whether recipe and data are the same is not known")
        return
    if other := differences(manifest.get("versions", {}), versions()):
        logger.warning(f"{checkpoint} was written by other versions: {'; '.join(other)}")
    changed = differences(manifest.get("fingerprint", {}), now)
    if not changed:
        return
    listed = "".join(f"\n  {line}" for line in changed)
    if anyway:
        logger.warning(f"{checkpoint} is of another run, and is gone on from anyway:{listed}")
        return
    raise UsageError(
        f"{checkpoint} is of another run:{listed}\nGoing on would give neither run's weights. Set these back, set "
        "`resume_anyway: true` to go on all the same, or `resume_from_checkpoint: false` to start over"
    )
