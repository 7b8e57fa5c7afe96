"""Cooperative mini-batches: the ranks sample one global batch together (formulas 5.6).

Every vertex has one owner. Hop by hop each rank draws the neighbours of the vertices it owns, sends
those that others own to them, and goes on with what it owns itself: no vertex is expanded, and no
feature row loaded, twice. Draws depend on global ids alone (`rng`), so the union of the ranks'
subgraphs is the subgraph of one process with the whole batch, at any number of ranks.

    rank p, hop l:  draw N(S_p^l)  ->  ids to their owners  ->  S_p^(l+1), without repetition

In `every_hop` all of S_p^l draws afresh; in `first_seen` an owner knows at which hop its vertices
were first seen, by anyone, and lets each draw at that hop alone. Own vertices are numbered by rows
that never change within a batch, remote ones by the order in which they were first asked for.

Cores and GPUs differ in the arrays that ids are held in (`HostIds`, and `DeviceIds` of
`gpu.cooperative`) and in who draws a hop.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError, SamplerError
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import build_sampler
from gnnplan.runtime.sampling.checks import RELABEL_BUDGET_BYTES, fits_densely, refuse_bad_seeds
from gnnplan.runtime.sampling.distributed.owner import Owners, deal
from gnnplan.runtime.sampling.minibatch import (
    Block,
    Dialect,
    MiniBatch,
    Request,
    RequestSampler,
    RowExchange,
    describe_batch,
)
from gnnplan.runtime.sampling.registry import why_alone
from gnnplan.runtime.sampling.relabel import relabel_values
from gnnplan.runtime.sampling.workspace import Workspace

B = TypeVar("B")
Array = Any
"""Ids of a rank, or numbers beside them: an array of the host's, or a tensor of its device."""


@runtime_checkable
class IdExchange(Protocol):
    """How ranks hand ids to each other, as a `runtime.comm.collectives.Communicator` does."""

    rank: int
    size: int

    def all_to_all_ids(
        self, ids: torch.Tensor, counts: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Hand so many ids to each rank; return what came, and how many from each."""
        ...


class Numbering:
    """Numbers node ids by first appearance, over one batch."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        dense = fits_densely(num_nodes, RELABEL_BUDGET_BYTES)
        self._space = Workspace(num_nodes, 1, np.dtype(np.int64), dense=dense)
        self.count = 0

    def clear(self) -> None:
        """Forget all numbers."""
        self._space.node_ends[1] = self.count
        self._space.finish()
        self._space.begin(0)
        self.count = 0

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each id, new ones being the next; ids may repeat."""
        space, more = self._space, ids.shape[0]
        space.node_ends[0] = self.count
        space.reserve(0, 0, more, min(self.count + more, self._num_nodes))
        space.values[:more] = ids
        self.count = relabel_values(
            space.table.arrays(), space.values, space.local, 0, more, space.node_ids, self.count
        )
        return space.local[:more].astype(np.int64)

    def ids(self, first: int = 0) -> NDArray[np.int64]:
        """Return the ids numbered so far, from number `first` on."""
        return self._space.node_ids[first : self.count].copy()


class HostIds:
    """Ids in arrays of the host's, and what cooperation does with them."""

    def __init__(self, owners: Owners, num_nodes: int) -> None:
        self._owners, self._num_nodes = owners, num_nodes

    def numbering(self) -> Any:
        """Make an empty numbering of ids."""
        return Numbering(self._num_nodes)

    def owners_of(self, ids: Array) -> Array:
        """Return the rank that owns each id."""
        return self._owners.of(ids)

    def deal(self, owners: Array) -> tuple[list[int], Array]:
        """Group positions by owner, as `owner.deal`."""
        return deal(owners, self._owners.num_ranks)

    def count_from(self, first: int, last: int) -> Array:
        """Return the numbers from `first` to `last`, which is not one of them."""
        return np.arange(first, last, dtype=np.int64)

    def empty(self, count: int) -> Array:
        """Return so many undefined numbers."""
        return np.empty(count, dtype=np.int64)

    def join(self, parts: Sequence[Array]) -> Array:
        """Return the parts one after another."""
        return np.concatenate(parts)

    def repeat_ranks(self, counts: Sequence[int]) -> Array:
        """Return each rank as often as it is counted."""
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def row_ends(self, degrees: Array) -> Array:
        """Return 0 and the running sums of degrees."""
        return np.concatenate([[0], np.cumsum(degrees)])

    def narrow(self, ids: Array) -> Array:
        """Return local ids as blocks hold them."""
        return ids.astype(np.int32)

    def send(self, ids: Array) -> torch.Tensor:
        """Return ids as a collective takes them."""
        return torch.from_numpy(ids)

    def receive(self, ids: torch.Tensor) -> Array:
        """Return ids that a collective gave."""
        return ids.numpy()


class Frontier:
    """One rank's vertices of a batch under way: own ones, and those it asked other ranks for."""

    def __init__(self, ids: HostIds, comm: IdExchange) -> None:
        self._ids = ids
        self._comm = comm
        self._own, self._remote = ids.numbering(), ids.numbering()
        self._num_touched = 0
        self.places: Array = ids.empty(0)
        """Place of each remote vertex, by order of request, among the rows `exchange` receives."""
        self.forget_requests()

    @property
    def num_own(self) -> int:
        """Return the number of own vertices so far, |S_p^l|."""
        return self._own.count

    def own_ids(self, first: int = 0) -> Array:
        """Return global ids of the own vertices from row `first` on."""
        return self._own.ids(first)

    def begin(self, seeds: Array) -> None:
        """Start a batch with this rank's seeds."""
        self._own.clear()
        self.forget_requests()
        self._own.add(seeds)

    def forget_requests(self) -> None:
        """Let the next exchange deliver only what is asked for from here on."""
        self._remote.clear()
        self._asked_rows, self._asked_by = self._ids.empty(0), self._ids.empty(0)

    def number(self, n_id: Array, first: int) -> Array:
        """Take in what a hop drew here, and what other ranks' hops drew of own vertices.

        Collective. `n_id` are the own vertices from row `first` on, then the vertices they drew,
        each once. Return the row of each, or -1 - its order of request; int64.
        """
        num_expanded = self._own.count - first
        drawn = n_id[num_expanded:]
        local = self._ids.owners_of(drawn) == self._comm.rank
        sources = self._ids.empty(n_id.shape[0])
        sources[:num_expanded] = self._ids.count_from(first, self._own.count)
        known = self._remote.count
        sources[num_expanded:][local] = self._own.add(drawn[local])
        sources[num_expanded:][~local] = -1 - self._remote.add(drawn[~local])
        self._num_touched = self._own.count + self._remote.count
        self._ask(self._remote.ids(known))
        return sources

    def _ask(self, new: Array) -> None:
        """Send newly met remote vertices to their owners; own ones that others met come back."""
        counts, order = self._ids.deal(self._ids.owners_of(new))
        asked, asked_counts = self._comm.all_to_all_ids(self._ids.send(new[order]), counts)
        ids = self._ids.receive(asked)
        if bool((self._ids.owners_of(ids) != self._comm.rank).any()):
            raise PlanError(
                f"rank {self._comm.rank} was asked for vertices it does not own: the ranks have "
                "different partitions; give every rank the same plan"
            )
        by = self._ids.repeat_ranks(asked_counts)
        self._asked_rows = self._ids.join([self._asked_rows, self._own.add(ids)])
        self._asked_by = self._ids.join([self._asked_by, by])

    def exchange(self) -> RowExchange:
        """Return how rows of all own vertices, and of all that was asked for, come together.

        Both ends group by rank and keep the order of requests within, so they agree without a
        message.
        """
        remote = self._remote.ids()
        receive_counts, order = self._ids.deal(self._ids.owners_of(remote))
        send_counts, asked = self._ids.deal(self._asked_by)
        self.places = self._ids.empty(order.shape[0])
        self.places[order] = self._ids.count_from(0, order.shape[0])
        return RowExchange(
            ids=self._ids.join([self._own.ids(), remote[order]]),
            num_own=self._own.count,
            send_rows=self._asked_rows[asked],
            send_counts=send_counts,
            receive_counts=receive_counts,
            num_touched=self._num_touched,
        )


@dataclass(frozen=True, slots=True)
class SharedHop:
    """What a hop makes of one rank's part of a batch."""

    block: Any
    exchange: RowExchange
    num_drawn: int


class AbstractCooperativeSampler(RequestSampler[B], ABC, Generic[B]):
    """One rank's part of cooperative sampling; all ranks sample the same steps in the same order.

    `sample` takes the seeds of the global batch that this rank owns. A batch's blocks have the
    sources of its `exchanges`; `n_id` are the outermost ones, own ones first.
    """

    dialect: Dialect
    num_hops: int

    def __init__(
        self, sampler: Sampler, num_nodes: int, ids: HostIds, owners: Owners, comm: IdExchange
    ) -> None:
        check_cooperates(sampler)
        if comm.size != owners.num_ranks:
            raise SamplerError(
                f"cooperative sampling: expected a communicator of {owners.num_ranks} ranks (the "
                f"owners'), found {comm.size}; start as many ranks as the plan has"
            )
        self.dialect = Dialect(sampler.dialect)
        self._owners, self._comm, self._num_nodes = owners, comm, num_nodes
        self._ids, self._frontier = ids, Frontier(ids, comm)
        self._lock = threading.Lock()

    @abstractmethod
    def _seeds(self, seeds: NDArray[np.int64]) -> Array:
        """Return the seeds where ids are held."""

    @abstractmethod
    def _draw(self, rows: Array, hop: int, request: Request) -> tuple[Any, Array, int]:
        """Draw a hop of vertices: its block alone, the vertices with those drawn, the edges."""

    @abstractmethod
    def _block(self, **fields: Any) -> Any:
        """Make a block of its fields."""

    def _shared_hops(self, request: Request) -> list[SharedHop]:
        """Draw every hop, seeds first; collective."""
        self._check_seeds(request.seeds)
        frontier, rows = self._frontier, _Rows(self._ids)
        frontier.begin(self._seeds(request.seeds))
        nested = self.dialect is Dialect.FIRST_SEEN
        hops: list[SharedHop] = []
        first = 0
        for hop in range(self.num_hops):
            num_dst = frontier.num_own
            if not nested:
                frontier.forget_requests()
                rows = _Rows(self._ids)
            block, n_id, num_drawn = self._draw(frontier.own_ids(first), hop, request)
            rows.append(block, frontier.number(n_id, first))
            exchange = frontier.exchange()
            fields = rows.fields(exchange, frontier.places)
            hops.append(SharedHop(self._block(num_dst=num_dst, **fields), exchange, num_drawn))
            first = num_dst if nested else 0
        return hops

    def _describe(self, request: Request, hops: Sequence[SharedHop]) -> dict[str, Any]:
        own = [len(request.seeds), *(hop.exchange.num_own for hop in hops)]
        alike = describe_batch(request, [], [hop.num_drawn for hop in hops], self.dialect)
        alike["num_sampled_nodes"] = [own[0], *np.diff(own).tolist()]
        return alike

    def _check_seeds(self, seeds: NDArray[np.int64]) -> None:
        refuse_bad_seeds(seeds, self._num_nodes)
        foreign = seeds[self._owners.of(seeds) != self._comm.rank]
        if len(foreign):
            raise SamplerError(
                f"cooperative sampling: expected seeds that rank {self._comm.rank} owns, found "
                f"node {foreign[0]} of another rank; share the batch out by owner"
            )


class CooperativeSampler(AbstractCooperativeSampler[MiniBatch]):
    """Cooperative sampling on cores.

    Args (others as in `build_sampler`):
        sampler: The plan's: neighbor, full, or labor with variant 0.
        indptr: int64 [N + 1]; only the rows of own vertices are read.
        owners: Who owns a vertex.
        comm: Communicator that nothing else uses meanwhile; its size is the owners'.
    """

    def __init__(
        self,
        sampler: Sampler,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        seed: int,
        *,
        owners: Owners,
        comm: IdExchange,
        **settings: Any,
    ) -> None:
        num_nodes = int(indptr.shape[0]) - 1
        super().__init__(sampler, num_nodes, HostIds(owners, num_nodes), owners, comm)
        self._hops: list[Any] = []
        for hop, fanout in enumerate(fanouts):
            one = build_sampler(sampler, indptr, indices, [fanout], seed, **settings)
            setattr(one, "first_hop", hop)  # noqa: B010  every sampler that cooperates has it
            self._hops.append(one)
        self.num_hops = len(self._hops)

    def _sample(self, request: Request) -> MiniBatch:
        with self._lock:
            hops = self._shared_hops(request)
        return MiniBatch(
            blocks=[hop.block for hop in reversed(hops)],
            exchanges=[hop.exchange for hop in reversed(hops)],
            n_id=hops[-1].exchange.ids,
            **self._describe(request, hops),
        )

    def _seeds(self, seeds: NDArray[np.int64]) -> Array:
        return seeds

    def _draw(self, rows: Array, hop: int, request: Request) -> tuple[Any, Array, int]:
        drawn = self._hops[hop].sample(rows, epoch=request.epoch, step=request.step)
        return drawn.blocks[0], drawn.n_id, drawn.num_edges

    def _block(self, **fields: Any) -> Block:
        return Block(**fields)


class _Rows:
    """Edges drawn so far; a source is an own row, or -1 - its order of request at another rank."""

    def __init__(self, ids: HostIds) -> None:
        self._ids = ids
        self._degrees: list[Array] = []
        self._sources: list[Array] = []
        self._e_ids: list[Array] = []
        self._weights: list[Array] = []

    def append(self, block: Any, sources: Array) -> None:
        """Add the rows of a one-hop block, whose local sources stand for `sources`."""
        self._degrees.append(block.indptr[1:] - block.indptr[:-1])
        self._sources.append(sources[block.indices])
        if block.e_id is not None:
            self._e_ids.append(block.e_id)
        if block.weight is not None:
            self._weights.append(block.weight)

    def fields(self, exchange: RowExchange, places: Array) -> dict[str, Any]:
        """Return a block of all rows so far over the exchange's sources, without `num_dst`."""
        join = self._ids.join
        source = join(self._sources)
        remote = source < 0
        source[remote] = exchange.num_own + places[-1 - source[remote]]
        return {
            "num_src": exchange.ids.shape[0],
            "indptr": self._ids.row_ends(join(self._degrees)),
            "indices": self._ids.narrow(source),
            "e_id": join(self._e_ids) if self._e_ids else None,
            "weight": join(self._weights) if self._weights else None,
        }


def check_cooperates(sampler: Sampler) -> None:
    """Refuse samplers whose draws for one vertex need what other ranks hold; say why."""
    why = why_alone(sampler)
    if why:
        raise SamplerError(
            f"sampler {sampler.name} does not cooperate: {why}, and no rank holds the whole batch; "
            "use neighbor, full or labor with variant 0, or independent batching"
        )
