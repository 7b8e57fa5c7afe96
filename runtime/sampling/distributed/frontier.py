"""A rank's frontier: the vertices it owns, and those of other ranks that it asked for.

Own vertices are numbered by rows that never change within a batch; remote ones by the order in
which they were first asked for. What a rank receives are ids of vertices it owns, nothing else: the
frontiers of other ranks stay with them.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.sampling.checks import RELABEL_BUDGET_BYTES
from gnnplan.runtime.sampling.distributed.exchange import RowExchange
from gnnplan.runtime.sampling.distributed.owner import Owners, deal
from gnnplan.runtime.sampling.relabel import relabel_values
from gnnplan.runtime.sampling.workspace import Workspace

_NO_IDS = np.zeros(0, dtype=np.int64)


@runtime_checkable
class IdExchange(Protocol):
    """How ranks hand ids to each other, as a `runtime.comm.collectives.Communicator` does."""

    rank: int
    size: int

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Hand over so many ids to each rank; what came, and how many from each."""
        ...


class Numbering:
    """Numbers node ids by first appearance, over one batch."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        dense = 4 * num_nodes <= RELABEL_BUDGET_BYTES
        self._space = Workspace(num_nodes, 1, np.dtype(np.int64), dense=dense)
        self.count = 0

    def clear(self) -> None:
        """Forget all numbers."""
        self._space.node_ends[1] = self.count
        self._space.finish()
        self._space.begin(0)
        self.count = 0

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each id, new ones being the next; ids may repeat."""
        space, more = self._space, ids.shape[0]
        space.node_ends[0] = self.count
        space.reserve(0, 0, more, min(self.count + more, self._num_nodes))
        space.values[:more] = ids
        self.count = relabel_values(
            space.table.arrays(), space.values, space.local, 0, more, space.node_ids, self.count
        )
        return space.local[:more].astype(np.int64)

    def ids(self, first: int = 0) -> NDArray[np.int64]:
        """The ids numbered so far, from number `first` on."""
        return self._space.node_ids[first : self.count].copy()


class Frontier:
    """One rank's vertices of a batch under way; `begin` starts the next batch.

    Args:
        owners: Who owns a vertex.
        comm: A communicator that nothing else uses meanwhile.
        num_nodes: Nodes of the graph.
    """

    def __init__(self, owners: Owners, comm: IdExchange, num_nodes: int) -> None:
        self._owners = owners
        self._comm = comm
        self._own, self._remote = Numbering(num_nodes), Numbering(num_nodes)
        self._num_touched = 0
        self.places = _NO_IDS
        """Place of each remote vertex, by order of request, among the rows `exchange` receives."""
        self.forget_requests()

    @property
    def num_own(self) -> int:
        """Own vertices so far: |S_p^l|."""
        return self._own.count

    def own_ids(self, first: int = 0) -> NDArray[np.int64]:
        """Global ids of the own vertices from row `first` on."""
        return self._own.ids(first)

    def begin(self, seeds: NDArray[np.int64]) -> None:
        """Start a batch with this rank's seeds."""
        self._own.clear()
        self.forget_requests()
        self._own.add(seeds)

    def forget_requests(self) -> None:
        """Let the next exchange deliver only what is asked for from here on."""
        self._remote.clear()
        self._asked_rows = _NO_IDS
        self._asked_by = np.zeros(0, dtype=np.int32)

    def number(self, n_id: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """Take in what a hop drew here, and what the other ranks' hops drew of own vertices.

        Collective: one all-to-all of ids.

        Args:
            n_id: The own vertices from row `first` on, then the vertices they drew, each once.
            first: First row that the hop expanded.

        Returns:
            int64, per n_id: its own row, or -1 - its order of request.
        """
        num_expanded = self._own.count - first
        drawn = n_id[num_expanded:]
        local = self._owners.of(drawn) == self._comm.rank
        sources = np.empty(n_id.shape[0], dtype=np.int64)
        sources[:num_expanded] = np.arange(first, self._own.count)
        known = self._remote.count
        sources[num_expanded:][local] = self._own.add(drawn[local])
        sources[num_expanded:][~local] = -1 - self._remote.add(drawn[~local])
        self._num_touched = self._own.count + self._remote.count
        self._ask(self._remote.ids(known))
        return sources

    def _ask(self, new: NDArray[np.int64]) -> None:
        """Send newly met remote vertices to their owners; own ones that others met come back."""
        counts, order = deal(self._owners.of(new), self._comm.size)
        asked, asked_counts = self._comm.all_to_all_ids(torch.from_numpy(new[order]), counts)
        ids = asked.numpy()
        if (self._owners.of(ids) != self._comm.rank).any():
            raise PlanError(
                f"rank {self._comm.rank} was asked for vertices it does not own: the ranks have "
                "different partitions; give every rank the same plan"
            )
        by = np.repeat(np.arange(self._comm.size, dtype=np.int32), asked_counts)
        self._asked_rows = np.concatenate([self._asked_rows, self._own.add(ids)])
        self._asked_by = np.concatenate([self._asked_by, by])

    def exchange(self) -> RowExchange:
        """How rows of all own vertices, and of all that was asked for, come together.

        Both ends group by rank and keep the order of requests within, so they agree without a word.
        """
        remote = self._remote.ids()
        receive_counts, order = deal(self._owners.of(remote), self._comm.size)
        send_counts, asked = deal(self._asked_by, self._comm.size)
        self.places = np.empty_like(order)
        self.places[order] = np.arange(order.shape[0])
        return RowExchange(
            ids=np.concatenate([self._own.ids(), remote[order]]),
            num_own=self._own.count,
            send_rows=self._asked_rows[asked],
            send_counts=send_counts,
            receive_counts=receive_counts,
            num_touched=self._num_touched,
        )
