"""Cooperative mini-batches: the ranks sample one global batch together (formulas 5.6).

Every vertex has one owner. Hop by hop each rank draws the neighbours of the vertices it owns, sends
those that others own to them, and goes on with what it owns itself: no vertex is expanded, and no
feature row loaded, twice. Draws depend on global ids alone (`rng`), so the union of the ranks'
subgraphs is the subgraph of one process with the whole batch, at any number of ranks.

    rank p, hop l:  draw N(S_p^l)  ->  ids to their owners  ->  S_p^(l+1), without repetition

In `every_hop` all of S_p^l draws afresh; in `first_seen` an owner knows at which hop its vertices
were first seen, by anyone, and lets each draw at that hop alone. Own vertices are numbered by rows
that never change within a batch, remote ones by the order in which they were first asked for.
"""

import threading
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

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

_NO_IDS = np.zeros(0, dtype=np.int64)


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


class Frontier:
    """One rank's vertices of a batch under way: own ones, and those it asked other ranks for."""

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
        """Return the number of own vertices so far, |S_p^l|."""
        return self._own.count

    def own_ids(self, first: int = 0) -> NDArray[np.int64]:
        """Return global ids of the own vertices from row `first` on."""
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
        """Take in what a hop drew here, and what other ranks' hops drew of own vertices.

        Collective. `n_id` are the own vertices from row `first` on, then the vertices they drew,
        each once. Return the row of each, or -1 - its order of request; int64.
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
        """Return how rows of all own vertices, and of all that was asked for, come together.

        Both ends group by rank and keep the order of requests within, so they agree without a
        message.
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


class CooperativeSampler(RequestSampler[MiniBatch]):
    """One rank's part of cooperative sampling; all ranks sample the same steps in the same order.

    `sample` takes the seeds of the global batch that this rank owns. A batch's blocks have the
    sources of its `exchanges`; `n_id` are the outermost ones, own ones first.

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
        check_cooperates(sampler)
        if comm.size != owners.num_ranks:
            raise SamplerError(
                f"cooperative sampling: expected a communicator of {owners.num_ranks} ranks (the "
                f"owners'), found {comm.size}; start as many ranks as the plan has"
            )
        self.dialect = Dialect(sampler.dialect)
        self._owners = owners
        self._comm = comm
        self._hops: list[Any] = []
        for hop, fanout in enumerate(fanouts):
            one = build_sampler(sampler, indptr, indices, [fanout], seed, **settings)
            setattr(one, "first_hop", hop)  # noqa: B010  every sampler that cooperates has it
            self._hops.append(one)
        self.num_hops = len(self._hops)
        self._num_nodes = int(indptr.shape[0]) - 1
        self._frontier = Frontier(owners, comm, self._num_nodes)
        self._lock = threading.Lock()

    def _sample(self, request: Request) -> MiniBatch:
        with self._lock:
            hops = self._sample_hops(request.seeds, request.epoch, request.step)
        own = [len(request.seeds), *(exchange.num_own for _, exchange, _ in hops)]
        alike = describe_batch(request, [], [drawn for _, _, drawn in hops], self.dialect)
        alike["num_sampled_nodes"] = [own[0], *np.diff(own).tolist()]
        return MiniBatch(
            blocks=[block for block, _, _ in reversed(hops)],
            exchanges=[exchange for _, exchange, _ in reversed(hops)],
            n_id=hops[-1][1].ids,
            **alike,
        )

    def _sample_hops(
        self, seeds: NDArray[np.int64], epoch: int, step: int
    ) -> list[tuple[Block, RowExchange, int]]:
        self._check_seeds(seeds)
        frontier, rows = self._frontier, _Rows()
        frontier.begin(seeds)
        nested = self.dialect is Dialect.FIRST_SEEN
        hops: list[tuple[Block, RowExchange, int]] = []
        first = 0
        for sampler in self._hops:
            num_dst = frontier.num_own
            if not nested:
                frontier.forget_requests()
                rows = _Rows()
            drawn = sampler.sample(frontier.own_ids(first), epoch=epoch, step=step)
            rows.append(drawn.blocks[0], frontier.number(drawn.n_id, first))
            exchange = frontier.exchange()
            hops.append((rows.block(num_dst, exchange, frontier.places), exchange, drawn.num_edges))
            first = num_dst if nested else 0
        return hops

    def _check_seeds(self, seeds: NDArray[np.int64]) -> None:
        refuse_bad_seeds(seeds, self._num_nodes)
        foreign = seeds[self._owners.of(seeds) != self._comm.rank]
        if len(foreign):
            raise SamplerError(
                f"cooperative sampling: expected seeds that rank {self._comm.rank} owns, found "
                f"node {foreign[0]} of another rank; share the batch out by owner"
            )


class _Rows:
    """Edges drawn so far; a source is an own row, or -1 - its order of request at another rank."""

    def __init__(self) -> None:
        self._degrees: list[NDArray[np.int64]] = []
        self._sources: list[NDArray[np.int64]] = []
        self._e_ids: list[NDArray[np.int64]] = []
        self._weights: list[NDArray[np.float32]] = []

    def append(self, block: Block, sources: NDArray[np.int64]) -> None:
        """Add the rows of a one-hop block, whose local sources stand for `sources`."""
        self._degrees.append(np.diff(block.indptr))
        self._sources.append(sources[block.indices])
        if block.e_id is not None:
            self._e_ids.append(block.e_id)
        if block.weight is not None:
            self._weights.append(block.weight)

    def block(self, num_dst: int, exchange: RowExchange, places: NDArray[np.int64]) -> Block:
        """Make one block of all rows so far over the exchange's sources."""
        source = np.concatenate(self._sources)
        remote = source < 0
        source[remote] = exchange.num_own + places[-1 - source[remote]]
        return Block(
            num_src=exchange.ids.shape[0],
            num_dst=num_dst,
            indptr=np.concatenate([[0], np.cumsum(np.concatenate(self._degrees))]),
            indices=source.astype(np.int32),
            e_id=np.concatenate(self._e_ids) if self._e_ids else None,
            weight=np.concatenate(self._weights) if self._weights else None,
        )


def check_cooperates(sampler: Sampler) -> None:
    """Refuse samplers whose draws for one vertex need what other ranks hold; say why."""
    why = why_alone(sampler)
    if why:
        raise SamplerError(
            f"sampler {sampler.name} does not cooperate: {why}, and no rank holds the whole batch; "
            "use neighbor, full or labor with variant 0, or independent batching"
        )
