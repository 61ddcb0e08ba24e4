"""One run an `output_dir`: a lock that its process holds, and that dies with it."""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from .errors import UsageError

LOCK = "_lock"

_held: dict[str, tuple[int, int]] = {}  # path -> the process that holds it, its file descriptor


def take(output_dir: str | Path) -> bool:
    """Lock `output_dir` for this process; returns whether it was not locked by it already.

    A record lock: the system releases it when the process ends, however it ends, and no child inherits it. Raises
    `UsageError` naming the other process where the folder is taken. Does nothing where the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    path = os.path.realpath(os.path.join(output_dir, LOCK))
    if _held.get(path, (0, 0))[0] == os.getpid():
        return False
    os.makedirs(output_dir, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = _owner(handle)
            os.close(handle)
            raise UsageError(
                f"output_dir {output_dir} is in use by another run{owner}: two runs would overwrite each other's "
                "checkpoints. Wait for it or stop it, or set another `output_dir`"
            ) from error
        except OSError:  # a file system without locks
            os.close(handle)
            return False
        if _is_at(handle, path):
            break
        os.close(handle)  # the last owner removed it between our opening and our locking
    said = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(said).encode(), 0)
    _held[path] = os.getpid(), handle
    atexit.register(release, output_dir)
    return True


def release(output_dir: str | Path) -> None:
    """Give the folder free, if this process holds it."""
    path = os.path.realpath(os.path.join(output_dir, LOCK))
    owner, handle = _held.get(path, (0, 0))
    if owner != os.getpid():
        return
    del _held[path]
    if _is_at(handle, path):
        os.unlink(path)
    os.close(handle)


def _is_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _owner(handle: int) -> str:
    try:
        said: Any = json.loads(os.pread(handle, 4096, 0))
        return f" (process {said['pid']} on {said['host']}, since {said['since']})"
    except (ValueError, KeyError, TypeError, OSError):
        return ""
