"""Datasets by name: the Hub, a local file, a folder of files, a folder written by `save_to_disk`."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    IterableDatasetDict,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetsError

from .json_lines import begins_with_a_row, first_problem
from .rows import DatasetError

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}

logger = logging.getLogger(__name__)


def load_splits(name: str, config: str | None = None, *, train_split: str, streaming: bool = False) -> Any:
    """All splits of a dataset, by name. A single file is the split `train_split`, and has no config.

    Raises `DatasetError` naming what was looked for where there is nothing to read.
    """
    path = Path(name).expanduser()
    saved_folder = path.is_dir() and ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file())
    if config is not None and (path.suffix in _BUILDERS or saved_folder):
        logger.warning("dataset_config: %s is not used: %s is read as it is", config, name)
    try:
        if path.suffix in _BUILDERS:
            if not path.is_file():
                raise DatasetError(f"dataset_name: there is no file {name}")
            if _BUILDERS[path.suffix] == "json" and not begins_with_a_row(path) and (problem := first_problem(path)):
                raise DatasetError(f"dataset_name: {name}, {problem}.")  # a first line of `null` crashes pyarrow
            splits = load_dataset(_BUILDERS[path.suffix], data_files={train_split: str(path)}, streaming=streaming)
            if not streaming:
                next(iter(splits[train_split]), None)  # bytes that are no text are noticed when read
            return splits
        if saved_folder:
            saved = load_from_disk(str(path))
            saved = saved if isinstance(saved, DatasetDict) else DatasetDict({train_split: saved})
            if streaming:
                return IterableDatasetDict({split: rows.to_iterable_dataset() for split, rows in saved.items()})
            return saved
        return load_dataset(str(path) if path.is_dir() else name, name=config, streaming=streaming)
    except DatasetError:
        raise
    # a script is refused with a RuntimeError, and a file without a byte ends an iteration
    except (OSError, ValueError, RuntimeError, StopIteration, DatasetsError) as error:
        problem = first_problem(path) if _BUILDERS.get(path.suffix) == "json" and path.is_file() else None
        if problem is not None:
            raise DatasetError(f"dataset_name: {name}, {problem}.") from error
        said = str(error.__cause__ or error).strip() or type(error).__name__
        raise DatasetError(
            f"dataset_name: {name} cannot be read: {said.splitlines()[0]}. Set it to a .jsonl, .csv or .parquet file, "
            "a folder of them, or a dataset on the Hub."
        ) from error


def pick_split(splits: Any, split: str, *, flag: str, name: str) -> Any:
    """One split. Raises `DatasetError` naming the flag that asked for it and the splits there are."""
    if split not in splits:
        raise DatasetError(f"{flag}: {name} has no split {split!r}; it has {', '.join(map(repr, splits))}.")
    return splits[split]


def load_rows(name: str, config: str | None, split: str, *, flag: str) -> Dataset:
    """One split of a dataset, or what `load_dataset(split=...)` understands: `train[:10%]`, `train+test`.

    Raises `DatasetError` naming `flag` where there is no such split.
    """
    first = re.split(r"[\[+(]", split)[0]
    splits = load_splits(name, config, train_split=first)
    if first == split:
        return pick_split(splits, split, flag=flag, name=name)
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({known: len(rows) for known, rows in splits.items()})
    except (AssertionError, ValueError) as error:
        raise DatasetError(f"{flag}: {name} has no rows {split!r}: {error}") from error
    return concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])
