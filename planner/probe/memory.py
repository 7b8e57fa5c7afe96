"""DRAM: copies, and gathers of random rows by row size, working set and concurrent readers.

The gather is the runtime's own kernel into a re-used buffer, on as many rows as a small and a large
batch ask for, with cold caches as between two steps of a model (DEC-25). Readers are processes,
each with a table of its own (`gather`) or all on one shared mapping of a file that lies in the page
cache (`mapped_gather`).
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.machine.model import Table
from gnnplan.planner.probe.context import ProbeContext
from gnnplan.planner.probe.team import State
from gnnplan.planner.probe.timing import Interlude, timed, wait_until

MODULE = "gnnplan.planner.probe.memory"
WARM_UP = f"{MODULE}:warm_up"
"""Task to run before anything is timed."""
BUFFER_BYTES = 64 * 2**20
"""Largest output of one gather call; rows are cut to it."""
ID_SETS = 8
"""Sets of random ids that calls take in turn, so that two calls read different rows."""
LOADED_LIMIT = 0.2
"""Accepted spread where several readers run at once."""


def gather(
    table: NDArray[np.float32], ids: NDArray[np.int64], out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Gather rows, out[i] = table[ids[i]], as the runtime does it."""
    from gnnplan.runtime.features.gather import gather_rows

    return gather_rows(table, ids, out)


def measure(context: ProbeContext) -> dict[str, Table]:
    """Measure the tables `copy`, `gather` and `mapped_gather`."""
    with context.budget.within(0.1):
        tables = _copies(context)
    most, (smallest, *larger) = max(context.readers()), context.sizes.working_set_bytes
    sets = [smallest, *(size for size in larger if context.has_time_for("a table", size))]
    largest = sets[-1]
    with context.preparing("a table", largest):
        context.team.run(f"{MODULE}:prepare_own", ranks=most, num_bytes=largest)
    tables |= _gathers(context, "gather", "own", sets, share=0.6)
    context.team.run(f"{MODULE}:forget", names=["own"])
    path = context.scratch / "mapped.bin"
    with path.open("wb") as file:
        file.truncate(largest)  # page cache holds the pages of a hole like any others
    context.team.run(f"{MODULE}:prepare_mapped", ranks=most, path=path)
    tables |= _gathers(context, "mapped_gather", "mapped", sets)
    context.team.run(f"{MODULE}:forget", names=["mapped", "out"])
    path.unlink()
    return tables


def _copies(context: ProbeContext) -> dict[str, Table]:
    sizes, readers = context.sizes, context.readers()
    context.team.run(f"{MODULE}:prepare_copy", ranks=max(readers), num_bytes=sizes.copy_bytes)

    def rates(num_readers: int) -> list[float]:
        seconds = context.team.run_together(
            f"{MODULE}:copy",
            ranks=num_readers,
            seconds=2 * sizes.point_seconds,
            least=sizes.least_repeats,
            most=context.budget.left,
        )
        return [sizes.copy_bytes / s for s in itertools.chain(*seconds)]

    points = context.walk(
        {"readers": readers}, lambda at: context.settle(lambda: rates(*at), limit=LOADED_LIMIT)
    )
    context.team.run(f"{MODULE}:forget", names=["copy_from", "copy_to"])
    return context.table("copy", "bytes_per_second", {"readers": readers}, points)


def _gathers(
    context: ProbeContext, name: str, source: str, sets: Sequence[int], share: float = 1.0
) -> dict[str, Table]:
    sizes, readers = context.sizes, context.readers()

    def samples(
        num_rows: int, row_bytes: int, working_set_bytes: int, num_readers: int
    ) -> list[float]:
        found = context.team.run_together(
            f"{MODULE}:gather_task",
            ranks=num_readers,
            source=source,
            row_bytes=row_bytes,
            working_set_bytes=working_set_bytes,
            num_rows=num_rows,
            seconds=sizes.point_seconds,
            least=sizes.least_repeats,
            most=context.budget.left,
        )
        return list(itertools.chain(*found))

    axes = {
        "rows": sizes.gather_rows,
        "row_bytes": sizes.row_bytes,
        "working_set_bytes": sizes.working_set_bytes,
        "readers": readers,
    }
    points = context.walk(
        axes | {"working_set_bytes": sets},
        lambda at: context.settle(lambda: samples(*at), limit=LOADED_LIMIT),
        share=share,
    )
    return context.table(name, "seconds_per_row", axes, points, rising=list(axes)[1:])


def warm_up(state: State) -> None:
    """Task: compile or load the gather kernel, and make what runs between two timed calls."""
    state.kept["interlude"] = Interlude()
    out = np.empty((2, 16), dtype=np.float32)
    gather(np.zeros((4, 16), dtype=np.float32), np.array([1, 2]), out)


def prepare_copy(state: State, *, num_bytes: int) -> None:
    """Task: make two buffers and touch them."""
    state.kept["copy_from"] = np.ones(num_bytes // 4, dtype=np.float32)
    state.kept["copy_to"] = np.zeros(num_bytes // 4, dtype=np.float32)


def copy(
    state: State, *, seconds: float, least: int, most: float = math.inf, start_at: float
) -> list[float]:
    """Task: seconds of each whole-buffer copy."""
    source, target = state.kept["copy_from"], state.kept["copy_to"]
    wait_until(start_at)
    return timed(lambda: np.copyto(target, source), seconds=seconds, least=least, most=most)


def prepare_own(state: State, *, num_bytes: int) -> None:
    """Task: make this reader's own table and output buffer, touched."""
    state.kept["own"] = np.ones(num_bytes // 4, dtype=np.float32)
    state.kept["out"] = np.zeros(BUFFER_BYTES // 4, dtype=np.float32)


def prepare_mapped(state: State, *, path: Path) -> None:
    """Task: map the shared file and fault every page in."""
    mapped = np.memmap(path, dtype=np.float32, mode="r")
    state.kept["mapped"] = np.asarray(mapped)
    float(mapped[:: 4096 // 4].sum())
    state.kept.setdefault("out", np.zeros(BUFFER_BYTES // 4, dtype=np.float32))


def forget(state: State, *, names: list[str]) -> None:
    """Task: free what earlier tasks kept."""
    for name in names:
        state.kept.pop(name, None)


def gather_task(
    state: State,
    *,
    source: str,
    row_bytes: int,
    working_set_bytes: int,
    num_rows: int,
    seconds: float,
    least: int,
    most: float = math.inf,
    start_at: float,
) -> list[float]:
    """Task: seconds per row of each gather call on random rows of the working set."""
    columns = row_bytes // 4
    table: Any = state.kept[source][: working_set_bytes // row_bytes * columns]
    table = table.reshape(-1, columns)
    num_rows = min(num_rows, BUFFER_BYTES // row_bytes)
    out = state.kept["out"][: num_rows * columns].reshape(num_rows, columns)
    draws = np.random.default_rng([state.rank, row_bytes, working_set_bytes])
    ids = itertools.cycle(list(draws.integers(0, len(table), size=(ID_SETS, num_rows))))
    gather(table, next(ids), out)
    wait_until(start_at)
    # In a step the model runs between two gathers, so that neither rows nor buffer are in a cache.
    found = timed(
        lambda: gather(table, next(ids), out),
        seconds=seconds,
        least=least,
        most=most,
        before=state.kept["interlude"],
    )
    return [s / num_rows for s in found]
