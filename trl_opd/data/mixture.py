"""Several datasets as one, as recipes of open-r1 (`dataset_mixture`) and alignment-handbook (`dataset_mixer`) mix."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, DatasetDict, concatenate_datasets

from .load import load_rows
from .rows import DatasetError

MIXTURE, MIXER = "dataset_mixture", "dataset_mixer"
_PART_KEYS = {"id", "config", "split", "columns", "weight"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture. `split` may have a slice, as `train[:10%]`; `weight` is the share of its rows that is
    taken, `None` all of them in their own order."""

    id: str
    config: str | None = None
    split: str = "train"
    columns: tuple[str, ...] | None = None
    weight: float | None = None


@dataclass(frozen=True)
class Mixture:
    """Parts that are concatenated and shuffled with `seed`.

    `drawn`: shares are drawn with the seed, as open-r1 does; else they are the first rows, as alignment-handbook does.
    `test_split_size`: a part of the mixture set aside (a share, or a number of rows); `tests`: datasets taken whole.
    """

    datasets: tuple[Part, ...]
    seed: int = 0
    test_split_size: float | None = None
    tests: tuple[Part, ...] = ()
    drawn: bool = True
    key: str = MIXTURE


def read_mixture(value: Any) -> Mixture:
    """open-r1's mapping: `datasets`, a list of `id`, `config`, `split`, `columns` and `weight`; `seed`;
    `test_split_size`. Raises `DatasetError` naming what is wrong with it."""
    if not isinstance(value, Mapping) or not isinstance(value.get("datasets"), Sequence) or not value["datasets"]:
        raise DatasetError(f"{MIXTURE}: it must hold a list `datasets`, each with an `id`")
    _check_keys(value, {"datasets", "seed", "test_split_size"}, MIXTURE)
    parts = []
    for i, part in enumerate(value["datasets"]):
        where = f"{MIXTURE}: dataset {i}"
        if not isinstance(part, Mapping) or not part.get("id"):
            raise DatasetError(f"{where} has no `id`. Set it to a file, a folder or a dataset on the Hub")
        _check_keys(part, _PART_KEYS, where)
        columns = part.get("columns")
        parts.append(
            Part(
                str(part["id"]),
                part.get("config"),
                part.get("split") or "train",
                None if columns is None else tuple(columns),
                _weight(part.get("weight", 1.0), where),  # open-r1 draws all rows of a part without a weight
            )
        )
    named = [part for part in parts if part.columns is not None]
    for part in named:
        if set(part.columns or ()) != set(named[0].columns or ()):
            raise DatasetError(
                f"{MIXTURE}: {part.id} has the `columns` {list(part.columns or ())}, {named[0].id} has "
                f"{list(named[0].columns or ())}. Set the same `columns` for each."
            )
    return Mixture(tuple(parts), int(value.get("seed") or 0), value.get("test_split_size"))


def read_mixer(mixer: Any, splits: Sequence[str] | None, configs: Sequence[str | None] | None) -> Mixture:
    """alignment-handbook's mapping of dataset to share. A split with "test" in its name is for evaluation, and whole.
    Raises `DatasetError` naming what is wrong with it."""
    if not isinstance(mixer, Mapping) or not mixer:
        raise DatasetError(f"{MIXER}: it must be a mapping of datasets to the share that is taken of each")
    if configs and len(configs) != len(mixer):
        raise DatasetError(
            f"dataset_configs: {len(configs)} configs for the {len(mixer)} datasets of `{MIXER}`. Set one for each"
        )
    splits = ["train", "test"] if splits is None else splits
    train, tests = [], []
    for (name, share), config in zip(mixer.items(), configs or [None] * len(mixer), strict=True):
        for split in splits:
            if "test" in split:
                tests.append(Part(name, config, split))
            else:
                train.append(Part(name, config, split, weight=_weight(share, f"{MIXER}: {name}")))
    return Mixture(tuple(train), seed=42, tests=tuple(tests), drawn=False, key=MIXER)


def load_mixture(mixture: Mixture) -> DatasetDict:
    """`train`, and `test` where the mixture has one. Raises `DatasetError` naming the part that does not fit."""
    together = DatasetDict({"train": _together(mixture.datasets, mixture)})
    if mixture.tests:
        together["test"] = _together(mixture.tests, mixture)
    if mixture.test_split_size is not None:
        return together["train"].train_test_split(test_size=mixture.test_split_size, seed=mixture.seed)
    return together


def _together(parts: Sequence[Part], mixture: Mixture) -> Dataset:
    rows = [_part(part, mixture) for part in parts]
    if mixture.key == MIXER:  # which kept the columns it knew: those that all have are what can be mixed
        shared = [name for name in rows[0].column_names if all(name in other.column_names for other in rows)]
        rows = [other.select_columns(shared) for other in rows]
    missing = {
        f"{part.id} has no {name!r}"
        for part, other in zip(parts, rows, strict=True)
        for name in {name for one in rows for name in one.column_names} - set(other.column_names)
    }
    if missing:
        logger.warning(
            "%s: the columns differ, and what a part does not have is empty in its rows: %s. Set the same `columns` "
            "for each to leave the others out.",
            mixture.key,
            "; ".join(sorted(missing)),
        )
    try:
        together = concatenate_datasets(rows)
    except ValueError as error:
        raise DatasetError(
            f"{mixture.key}: the columns of its datasets do not fit together: {error}. Set `columns` for each, to "
            "those that all have alike."
        ) from error
    return together.shuffle(seed=mixture.seed)


def _part(part: Part, mixture: Mixture) -> Dataset:
    rows = load_rows(part.id, part.config, part.split, flag=mixture.key)
    if part.columns is not None:
        missing = [name for name in part.columns if name not in rows.column_names]
        if missing:
            raise DatasetError(f"{mixture.key}: {part.id} has no column {missing[0]!r}; it has {rows.column_names}")
        rows = rows.select_columns(list(part.columns))
    if part.weight is None:
        return rows
    rows = rows.shuffle(seed=mixture.seed) if mixture.drawn else rows
    return rows.select(range(int(len(rows) * part.weight)))


def _weight(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise DatasetError(f"{where}: its weight is {value!r}; it must be a share of its rows, from 0 to 1")
    return float(value)


def _check_keys(value: Mapping, known: set[str], where: str) -> None:
    unknown = sorted(key for key in value if key not in known)
    if unknown:
        raise DatasetError(f"{where}: unknown key `{unknown[0]}`; it takes {', '.join(sorted(known))}")
