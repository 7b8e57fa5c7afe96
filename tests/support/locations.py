"""Location tables for tests: all rows on the host, or own lists beside the rest."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.features.location import LocationTable, encode
from gnnplan.runtime.plan.schema import Source


def host_table(num_nodes: int) -> LocationTable:
    """Every node on the host, in its own row."""
    rows = np.arange(num_nodes, dtype=np.int64)
    return LocationTable(encode(np.zeros(num_nodes, np.uint8), rows), [Source(kind="host")])


def cached_arrays(
    num_nodes: int, own: NDArray[np.int64], *, rest: str = "host"
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Make location codes and own ids of policy `cached`; lists not `own` lie on `rest`."""
    numbers = np.full(num_nodes, 1 if rest == "host" else 2, np.int64)
    slots = np.arange(num_nodes)
    numbers[own], slots[own] = 0, np.arange(own.size)
    return encode(numbers, slots), own.astype(np.int64)
