"""Ids of a table of nodes, and the row of each."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError


class IdIndex:
    """Finds the row of each id of a node table."""

    def __init__(self, ids: NDArray[Any]) -> None:
        self.ids = ids
        self._order = np.argsort(ids, kind="stable")

    def find(self, path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the row number of each value, -1 where there is none."""
        if (values.dtype.kind == "U") != (self.ids.dtype.kind == "U"):
            if self.ids.dtype.kind != "U":
                raise DatasetError(f"{path}: expected numbers as node ids, as in the node table")
            values = values.astype(np.str_)
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
                f"{path}: expected ends named in the node table, found "
                f"{str(values[missing][0])!r:.60}"
            )
        return rows
