"""Ids of a table of nodes: which column has them, and the row of each.

A column with a usual name has them. Without one, the one whose name looks like ids and whose values
are all different; then the row names of a saved data frame. Where none has, row k is node k. What
cannot be told apart is refused, for rows of other nodes are no error that anybody sees.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.imports.inventory import (
    NODE_ID,
    ROW_NAMES,
    column_named,
    looks_like,
    plain_name,
)
from gnnplan.runtime.graph.imports.tables import as_numbers

LEAST_ROWS = {0: 3, 1: 6}
"""Rows from which on a column that has each number once, from 0 or from 1 on, is no coincidence."""


class IdIndex:
    """Finds the row of each id of a node table."""

    def __init__(self, ids: NDArray[Any], origin: str = "") -> None:
        self.ids = ids
        self._origin = f" ({origin})" if origin else ""
        self._order = np.argsort(ids, kind="stable")

    def find(self, path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the row number of each value, -1 where there is none."""
        if (values.dtype.kind == "U") != (self.ids.dtype.kind == "U"):
            if self.ids.dtype.kind != "U":
                raise DatasetError(f"{path}: expected numbers as node ids, as in the node table")
            values = values.astype(np.str_)
        elif values.dtype.kind != "U":
            values = as_numbers(path, values, np.int64)  # else NumPy compares both as fractions
        place = np.searchsorted(self.ids, values, sorter=self._order)
        rows = self._order[np.minimum(place, len(self.ids) - 1)].astype(np.int64)
        rows[self.ids[rows] != values] = -1
        return rows

    def rows(self, path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the row number of each value; refuse unknown ones."""
        rows = self.find(path, values)
        missing = rows < 0
        if missing.any():
            raise DatasetError(
                f"{path}: expected ends named in the node table{self._origin}, found "
                f"{str(values[missing][0])!r:.60}; add its row, or rename the column if it has no "
                "ids"
            )
        return rows


def possible_ids(columns: Mapping[str, NDArray[Any]]) -> list[str]:
    """List the columns that may have the ids, by their names or by their first values."""
    return [
        name
        for name, values in columns.items()
        if (looks_like(name) == "ids" and values.dtype.kind in "fiuO") or _may_number(values)
    ]


def choose_ids(path: Path, columns: Mapping[str, NDArray[Any]]) -> str | None:
    """Return the column that has the ids of a table without a usual name for them, if any has.

    `columns` are whole columns of `possible_ids`. Refused are several that may have them, ids of
    which a few repeat, and numbers of all rows in a column whose name is none of ids.
    """
    named = {
        name: values
        for name, values in columns.items()
        if looks_like(name) == "ids" and plain_name(name) not in ROW_NAMES
    }
    counts = {n: len(np.unique(v)) for n, v in named.items() if _are_ids(v)}
    found = [name for name, count in counts.items() if count == len(named[name])]
    if len(found) > 1:
        raise DatasetError(
            f"{path}: expected one column of ids, found {', '.join(found)!s:.200}; name the one by "
            "which edges name nodes id"
        )
    if found:
        return found[0]
    for name, count in counts.items():
        length = len(named[name])
        if 2 * count > length:
            raise DatasetError(
                f"{path}: expected a different id in each row, found {length - count} of {length} "
                f"repeated in {name!r:.60}; mend them, or rename the column if it has no ids"
            )
    rows = column_named(columns, ROW_NAMES)
    if rows is not None:
        return rows
    number = next((name for name, values in columns.items() if _number_rows(values)), None)
    if number is not None:
        values = columns[number]
        raise DatasetError(
            f"{path}: expected a column of ids by its name, found {number!r:.60} with each number "
            f"from {values.min():.0f} to {values.max():.0f} once; name it id, or add a column id"
        )
    return None


def unique_ids(path: Path, ids: NDArray[Any]) -> NDArray[Any]:
    """Return ids as words or int64; refuse repeated and missing ones."""
    ids = clean_ids(path, ids)
    if len(np.unique(ids)) != len(ids):
        raise DatasetError(f"{path}: expected a different id in each row, found repeated ids")
    return ids


def clean_ids(path: Path, ids: NDArray[Any]) -> NDArray[Any]:
    """Return ids as words or int64; refuse missing ones."""
    words = ids.dtype.kind == "U"
    if (ids == "").any() if words else ids.dtype.kind == "f" and np.isnan(ids).any():
        raise DatasetError(f"{path}: expected an id in each row, found an empty cell")
    return ids if words else as_numbers(path, ids, np.int64)


def refuse_other_ids(path: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    """Refuse a column with a usual name of ids that holds neither numbers nor words."""
    name = column_named(columns, NODE_ID)
    if name is not None:
        raise DatasetError(
            f"{path}: expected ids as numbers or words in column {name!r:.60}, found another type; "
            "save them as text"
        )


def _are_ids(values: NDArray[Any]) -> bool:
    """Return whether all values are words or whole numbers."""
    if values.dtype.kind == "f":
        return bool(np.isfinite(values).all()) and bool((values % 1 == 0).all())
    return not (values == "").any() if values.dtype.kind == "U" else values.dtype.kind in "iu"


def _may_number(values: NDArray[Any]) -> bool:
    """Return whether values, perhaps the first of a column, are different numbers of rows."""
    if values.dtype.kind not in "iuf" or len(values) == 0:
        return False
    # Most columns are told by their range.
    ranged = values.min() >= 0 and values.max() >= len(values) - 1
    return bool(ranged) and _are_ids(values) and len(np.unique(values)) == len(values)


def _number_rows(values: NDArray[Any]) -> bool:
    """Return whether a column has each number from 0, or from 1, to that of the last row once."""
    first = int(values.min()) if _may_number(values) else -1
    enough = len(values) >= LEAST_ROWS.get(first, np.inf)
    return enough and int(values.max()) == len(values) - 1 + first
