"""A feature store whose rows are gathered by the device itself.

Own rows lie in the device's memory, the host's in page-locked memory that the kernel reads in
place. `gather` fills tensors on the device and waits for nothing; `read` is the contract of every
store, with the copies and the wait that arrays on the host need.
"""

import threading
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.errors import PlanError
from runtime.features import tiers as building
from runtime.features.abstract import AbstractFeatureStore
from runtime.features.counters import Counters
from runtime.features.gather import check_output
from runtime.features.gather_triton import DeviceRows, DeviceTable
from runtime.graph.dataset import Graph
from runtime.plan import Plan

READ_IN_PLACE = ("own", "host")
"""Kinds of sources that the device addresses today."""


class DeviceFeatureStore(AbstractFeatureStore):
    """A device's location table and sources, with counters that stay on the device."""

    def __init__(self, table: DeviceTable, *, max_programs: int | None = None) -> None:
        """Wrap a table.

        Args:
            table: whose codes all name sources that it holds.
            max_programs: cap of the gather's grid; None as in `DeviceTable.gather`.
        """
        self.feature_dim = table.feature_dim
        self._table = table
        self._max_programs = max_programs
        self._counts = table.new_counts()
        self._lock = threading.Lock()

    def gather(self, ids: Tensor, out: Tensor) -> None:
        """out[i] = features of node ids[i], on the current stream; does not wait.

        Ids outside the graph leave their rows as they are and are reported by `counters`.

        Args:
            ids: int64 [n] on the device.
            out: float32, float16 or bfloat16 [n, feature_dim] on the device, contiguous.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        self._table.gather(ids, out, self._counts, max_programs=self._max_programs)

    def counters(self) -> Counters:
        """Rows and bytes by source since the last call; waits for the gathers under way.

        Raises:
            IndexError: some ids or slots since then were out of range.
        """
        with self._lock:
            counts = self._counts.tolist()
            self._counts.zero_()
        return self._named(counts)

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """See `AbstractFeatureStore.read`."""
        check_output(ids, out, self.feature_dim)
        device = self._table.device
        rows = torch.empty((ids.size, self.feature_dim), dtype=torch.float32, device=device)
        counts = self._table.new_counts()
        asked = torch.from_numpy(np.array(ids)).to(device)
        self._table.gather(asked, rows, counts, max_programs=self._max_programs)
        counters = self._named(counts.tolist())
        torch.from_numpy(out).copy_(rows)
        return counters

    def _named(self, counts: list[int]) -> Counters:
        if counts[-1]:
            raise IndexError(
                f"expected node ids in [0, {self._table.num_nodes}), found {counts[-1]} outside it "
                "(or located past the end of their source)"
            )
        counters = Counters()
        for number, source in self._table.sources.items():
            counters.add_rows(source.kind, counts[number], counts[number] * source.row_bytes)
        return counters

    @property
    def resident_bytes(self) -> int:
        """Bytes of all sources' rows and of the location table, each memory counted once."""
        tables = {s.table.data_ptr(): s.table for s in self._table.sources.values()}
        held = sum(table.numel() * table.element_size() for table in tables.values())
        return held + self._table.codes.numel() * self._table.codes.element_size()

    def close(self) -> None:
        """Let go of the rows; no gather may be under way."""
        self._table.sources.clear()


def open_device_store(
    graph: Graph,
    plan: Plan,
    plan_folder: Path,
    rank: int,
    device: torch.device,
    *,
    max_programs: int | None = None,
) -> DeviceFeatureStore:
    """Open a plan's own and host rows where the device reads them.

    Args:
        graph: the dataset, with dense features.
        plan: the plan; its sources are own and host.
        plan_folder: where its arrays lie.
        rank: this rank.
        device: where gathers run; on the CPU (tests) nothing is page-locked.
        max_programs: cap of the gather's grid.

    Raises:
        PlanError: the plan reads from other sources, or the graph's features are sparse.
        RuntimeError: the host's rows cannot be page-locked (a limit on locked memory).
    """
    sources = plan.strategy.features.sources
    others = sorted({s.kind for s in sources} - set(READ_IN_PLACE))
    if others or graph.x is None:
        found = ", ".join(others) if others else "sparse features"
        raise PlanError(
            f"expected sources that the device reads in place ({', '.join(READ_IN_PLACE)}), found "
            f"{found}; open the plan with open_store, which gathers on the host"
        )
    location, own_ids = building.read_location(graph, plan, plan_folder, rank)
    dense, _ = building.build_tiers(graph, plan, plan_folder, rank, location, own_ids, None, 1)
    rows: dict[int, DeviceRows] = {}
    for number, each in dense.items():
        table = torch.from_numpy(np.array(each.table))
        if each.kind == "own":
            table = table.to(device)
        elif device.type == "cuda":
            table = table.pin_memory()
        rows[number] = DeviceRows(each.kind, table)
    return DeviceFeatureStore(DeviceTable(location.codes, rows, device), max_programs=max_programs)
