"""Checkpoint folders on disk: written aside, sealed with a manifest, published by a rename, and checked when read.

    <output_dir>/checkpoint-40/        complete: its manifest lists size and hash of every file
    <output_dir>/_staging/             where the next one is being written; never resumed from
    <output_dir>/_superseded/          newer checkpoints of a run that was gone back on; never resumed from

Names with a leading underscore are left out of what transformers pushes to the Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

STAGING = "_staging"
SUPERSEDED = "_superseded"
MANIFEST = "manifest.json"
STATE = "trainer_state.json"
ONLY_MODEL = "it holds no optimizer and random states: it was saved with `save_only_model`"

_NAME = re.compile(r"checkpoint-(\d+)")
# what transformers, peft, accelerate and DeepSpeed read: an unlisted file of these kinds might be loaded
_LOADED = {".safetensors", ".bin", ".pt", ".pth", ".json", ".distcp", ".jinja", ".model"}
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_CHUNK = 1 << 22


class Skipped(NamedTuple):
    """A checkpoint that cannot be gone on from, and why."""

    path: Path
    why: str


class Found(NamedTuple):
    """The newest valid checkpoint, if any, and the newer ones that are not."""

    path: Path | None
    skipped: list[Skipped]


def step_of(path: str | Path) -> int | None:
    """40 for `…/checkpoint-40`; `None` where the name is another."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The checkpoint folders of a run, the newest first."""
    found = [(step_of(path), path) for path in Path(output_dir).glob("checkpoint-*") if path.is_dir()]
    return [path for _, path in sorted(((s, p) for s, p in found if s is not None), reverse=True)]


# --- writing ---------------------------------------------------------------------------------------------------------


def seal(folder: Path, **facts: Any) -> None:
    """Flush every file of a checkpoint to the disk and write its manifest: `facts`, and size and SHA-256 of each file.

    A checkpoint with a manifest is complete, because the manifest is its last file.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter's lock
        hashes = list(pool.map(_flush_and_hash, files))
    listed = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, hashes, strict=True)
    }
    part = folder / (MANIFEST + ".part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump({**facts, "files": listed}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / MANIFEST)
    for directory in {path.parent for path in files} | {folder}:
        _flush_directory(directory)


def publish(staged: Path, output_dir: Path) -> Path:
    """Move a sealed checkpoint to its place. One of the same step that stands there goes when the new one is there."""
    final, old = output_dir / staged.name, output_dir / STAGING / f"replaced-{staged.name}"
    if final.exists():
        os.rename(final, old)
    os.rename(staged, final)
    _flush_directory(output_dir)
    shutil.rmtree(old, ignore_errors=True)
    return final


def rotate(output_dir: Path, limit: int | None, keep: set[Path]) -> list[Path]:
    """Delete the oldest checkpoints beyond `limit`, never one of `keep`, and return them.

    Called when the newest is complete, and `keep` holds it.
    """
    if limit is None or limit <= 0:
        return []
    inside = {path.resolve() for path in keep}
    others = [path for path in checkpoints(output_dir) if path.resolve() not in inside]
    deleted = others[max(limit - len(inside), 0) :]
    for path in deleted:
        # a half-deleted checkpoint must not look like one
        gone = output_dir / STAGING / f"deleted-{path.name}"
        gone.parent.mkdir(exist_ok=True)
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
    return deleted


def set_aside(output_dir: Path, after: int) -> list[Path]:
    """Move checkpoints of later steps than `after` to `_superseded/`, so that no later start goes on from them."""
    moved = []
    for path in checkpoints(output_dir):
        if (step_of(path) or 0) > after:
            place = output_dir / SUPERSEDED / path.name
            place.parent.mkdir(exist_ok=True)
            if place.exists():
                shutil.rmtree(place)
            os.rename(path, place)
            moved.append(place)
    return moved


def clear_staging(output_dir: Path) -> None:
    """Remove what an interrupted save has left, except a checkpoint that was complete but for its last rename."""
    staging = output_dir / STAGING
    if not staging.is_dir():
        return
    for path in staging.iterdir():
        # without a manifest it may be whole by transformers' files and lack ours: only a sealed one is taken
        sealed = step_of(path) is not None and (path / MANIFEST).is_file()
        if sealed and not (output_dir / path.name).exists() and damage(path) is None:
            os.rename(path, output_dir / path.name)
    shutil.rmtree(staging, ignore_errors=True)


def _flush_and_hash(path: Path) -> str:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return _hash(path)


def _flush_directory(path: Path) -> None:
    if os.name != "posix":
        return  # a folder cannot be opened elsewhere
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading ---------------------------------------------------------------------------------------------------------


def newest_valid(output_dir: str | Path) -> Found:
    """The newest checkpoint that is complete, with the newer ones that are not and why."""
    skipped: list[Skipped] = []
    for path in checkpoints(output_dir):
        why = damage(path) or (ONLY_MODEL if is_only_model(path) else None)
        if why is None:
            return Found(path, skipped)
        skipped.append(Skipped(path, why))
    return Found(None, skipped)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or `None` where there is none. Raises `ValueError` where it cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError("it lists no files")
    return manifest


def damage(folder: Path) -> str | None:
    """Why a checkpoint cannot be gone on from, in words; `None` where it can.

    With a manifest every file is compared with it. Without one (TRL's and transformers' own) what can be seen is
    checked: the state, weights, optimizer and random states are there and can be opened.
    """
    try:
        manifest = read_manifest(folder)
    except (ValueError, OSError) as error:  # not JSON, not UTF-8, not readable
        return f"its {MANIFEST} cannot be read: {error}"
    why = _compare(folder, manifest["files"]) if manifest is not None else _look_over(folder)
    return why or _state_damage(folder)


def _compare(folder: Path, listed: dict[str, Any]) -> str | None:
    for name, entry in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes, not {entry['bytes']:,}"
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        foreign = path.is_file() and name not in listed and path.name != MANIFEST
        if foreign and path.suffix in _LOADED and not path.name.startswith("."):
            return f"{name} was not written with it"
    paths = [folder / name for name in listed]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, digest in zip(listed, pool.map(_hash, paths), strict=True):
            if digest != listed[name]["sha256"]:
                return f"{name} is not what was written: its SHA-256 differs"
    return None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _look_over(folder: Path) -> str | None:
    for path in folder.rglob("*"):
        if path.is_file() and (why := _unreadable(path)):
            return f"{path.relative_to(folder).as_posix()} {why}"
    sharded = any(folder.glob("global_step*")) or any(folder.glob("pytorch_model_fsdp*"))  # DeepSpeed, FSDP
    names = [name for name in (*_WEIGHTS, *_INDICES) if (folder / name).is_file()]
    names += [path.name for path in folder.glob("*/adapter_model.safetensors")]
    if not names and not sharded:
        return "it holds no weights"
    for index in (name for name in names if name in _INDICES):
        shards = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
            return f"{missing[0]} is missing"
    ranks = sorted(int(path.stem.split("_")[-1]) for path in folder.glob("rng_state_*.pth"))
    if ranks and ranks != list(range(ranks[-1] + 1)):
        return f"rng_state_{next(i for i, rank in enumerate(ranks) if rank != i)}.pth is missing"
    return None


def _unreadable(path: Path) -> str | None:
    """Why a file is not what its name says, as far as that costs no more than opening it."""
    if path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            return f"cannot be read: {error}"
    if path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):  # its directory is at the end
        return "is cut short" if path.stat().st_size else "is empty"
    if path.suffix == ".safetensors":
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(length)) if 0 < length < path.stat().st_size else None
            except ValueError:
                header = None
        if not isinstance(header, dict):
            return "cannot be read"
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end != path.stat().st_size:
            return "is cut short"
    return None


def _state_damage(folder: Path) -> str | None:
    """What is wrong with `trainer_state.json`, which says where the run was."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        step = state["global_step"]
    except FileNotFoundError:
        return f"{STATE} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"{STATE} cannot be read: {error}"
    named = step_of(folder)
    return f"{STATE} is that of step {step}" if named is not None and step != named else None


def is_only_model(folder: Path) -> bool:
    """Whether a checkpoint was saved without optimizer and random states (`save_only_model`)."""
    return not (any(folder.glob("optimizer*")) or any(folder.glob("global_step*")))
