"""Where a row of a batch stands in its dataset, looked up by its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset


def find_rows(dataset: Any, column: str, ids: Sequence[int]) -> list[int]:
    """Places of the rows whose `column` holds exactly these ids, in the dataset as it was handed in; none where that
    cannot be told (a stream, packed rows).

    What was left out or shuffled later does not count: the table below is in the order of the rows that were read.
    """
    if not isinstance(dataset, Dataset) or column not in dataset.column_names:
        return []
    wanted, found, start = list(ids), [], 0
    for chunk in dataset.data.column(column).chunks:
        lengths = chunk.value_lengths().to_pylist()  # so that few rows have to be read whole
        found += [start + i for i, n in enumerate(lengths) if n == len(wanted) and chunk[i].as_py() == wanted]
        start += len(lengths)
    return found
