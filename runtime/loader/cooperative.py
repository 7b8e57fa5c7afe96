"""Stages of cooperative batches (formulas 5.6): seeds, sample and gather.

  seeds of own vertices -> sample, ids to their owners -> own rows, sent on to who asked for them

Between cores each exchange has a process group of its own: with prefetch threads the ids of one
batch and the rows of another may be on their way at once. Every rank enters each in batch order.
GPUs make batches on the training thread, which issues every collective in one order, and need none.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.gather import gather_rows
from gnnplan.runtime.features.peer import sendable
from gnnplan.runtime.features.tier import AbstractFeatureStore
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import convert_rows, row_dtype
from gnnplan.runtime.loader.stages import AbstractStage, BufferRing, SampleStage
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.weights import fill_weights
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.build import BatchSampler
from gnnplan.runtime.sampling.distributed.cooperative import CooperativeSampler, check_cooperates
from gnnplan.runtime.sampling.distributed.owner import Owners
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage


class Cooperation:
    """Owners and communicators of one rank's loader; made collectively.

    `partition` is the plan's array where its owner is partition. PlanError or SamplerError says
    what does not cooperate.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        partition: NDArray[np.integer] | None,
        rank: int,
        comm: Communicator | None,
    ) -> None:
        check_cooperative(plan, graph)
        comm = Communicator() if comm is None else comm
        self._alone = not processor_of(comm.device).is_gpu
        if (comm.size, comm.rank) != (plan.num_ranks, rank):
            raise PlanError(
                f"cooperative batches: expected a communicator of {plan.num_ranks} ranks as rank "
                f"{rank}, found {comm.size} as rank {comm.rank}; start it with `gnnplan train` or "
                "torchrun"
            )
        self.owners = Owners(plan.num_ranks, partition, num_nodes=graph.num_nodes)
        self.ids = comm.duplicate() if self._alone else comm
        self.rows = comm.duplicate() if self._alone else comm
        self._plan, self._graph = plan, graph
        self.wire_dtype = row_dtype(plan.strategy.features.storage_dtype)

    @functools.cached_property
    def schedule(self) -> "CooperativeSeeds":
        """Schedule of the seeds that this rank owns."""
        workload = self._plan.workload
        return CooperativeSeeds(
            self._graph.train_idx,
            workload.batch_size,
            seed=workload.seed,
            owners=self.owners,
            owner=self.ids.rank,
        )

    def sampler(self, graph: Graph, steps_per_epoch: int) -> CooperativeSampler:
        """Make the plan's sampler on the lists of `graph`; ranks share its work."""
        workload = self._plan.workload
        return CooperativeSampler(
            self._plan.strategy.sampler,
            graph.indptr,
            graph.indices,
            workload.fanouts,
            workload.seed,
            owners=self.owners,
            comm=self.ids,
            edge_weight=graph.edge_weight,
            steps_per_epoch=steps_per_epoch,
        )

    def device_sampler(self, hops: Any) -> Any:
        """Make the plan's sampler on a device, of one that draws all hops there."""
        from gnnplan.runtime.sampling.gpu.cooperative import DeviceCooperativeSampler

        named = self._plan.strategy.sampler
        return DeviceCooperativeSampler(named, hops, owners=self.owners, comm=self.ids)

    def close(self) -> None:
        """Give back the process groups that were made here."""
        if self._alone:
            self.ids.close()
            self.rows.close()


def check_cooperative(plan: Plan, graph: Graph) -> None:
    """Refuse link prediction, typed graphs, sampled GCN degrees, bulk and 1.5D sampling."""
    why, workload = None, plan.workload
    if str(graph.task) == "link":
        why = "task link scores pairs whose ends may belong to two ranks"
    elif workload.model == "rgcn" or graph.x_by_type:
        why = "typed graphs are sampled and stored by type, which owners do not know"
    elif workload.model == "gcn" and workload.gcn_norm == "sampled":
        why = "gcn_norm sampled counts degrees in the whole sampled graph, which no rank holds"
    elif plan.strategy.bulk_batches > 1 or plan.strategy.topology.policy == "partitioned":
        why = "ranks draw hop by hop from lists they can read, not in bulk nor from a 1.5D grid"
    if why is not None:
        raise PlanError(f"cooperative batches: {why}; use independent batching")
    check_cooperates(plan.strategy.sampler)


class CooperativeSeeds(SeedSchedule):
    """Schedule of the seeds that one rank owns; shares may be unequal, or empty."""

    def __init__(
        self,
        train_idx: NDArray[np.int64],
        batch_size: int,
        *,
        seed: int,
        owners: Owners,
        owner: int,
    ) -> None:
        super().__init__(train_idx, batch_size, seed=seed)
        self._owners = owners
        self._owner = owner

    def share(
        self, epoch: int, step: int, *, rank: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Return a share like `SeedSchedule.share`, by owner; nothing is sent."""
        seeds, input_id, count = super().share(epoch, step)
        own = self._owners.of(seeds) == (self._owner if rank is None else rank)
        return seeds[own], input_id[own], count


class ExchangeMeter:
    """Meter of a stage's exchanges, apart from the stage itself."""

    def __init__(self, comm: Communicator, meter: StageMeter, stage: Stage) -> None:
        self._comm, self._meter, self._stage = comm, meter, stage
        self._before = 0.0

    def begin(self) -> None:
        """Count from here."""
        self._before = self._comm.stage_seconds(self._stage)

    def end(self, batch: MiniBatch, index: int, more: float = 0.0) -> None:
        """Give a batch the seconds since `begin`, and `more`."""
        seconds = self._comm.stage_seconds(self._stage) - self._before + more
        batch.seconds[self._stage] = seconds
        self._meter.add(self._stage, index, seconds)


class CooperativeSampleStage(SampleStage):
    """Stage that draws hop by hop, with an all-to-all of vertex ids after each hop."""

    ordered = True

    def __init__(self, sampler: BatchSampler, comm: Communicator, meter: StageMeter) -> None:
        super().__init__(sampler)
        self._exchanged = ExchangeMeter(comm, meter, Stage.EXCHANGE_IDS)

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Sample like `SampleStage`, and meter the exchanges apart."""
        self._exchanged.begin()
        batch = super().submit(batch, index)
        self._exchanged.end(batch, index)
        return batch


class CooperativeGatherStage(AbstractStage):
    """Stage that reads own rows, each once for all ranks, and sends them to who needs them.

    An exchange inside the store (a tier of peers) counts as exchange_rows too.
    """

    name = Stage.GATHER
    ordered = True

    def __init__(
        self,
        store: AbstractFeatureStore,
        ring: BufferRing,
        meter: StageMeter,
        comm: Communicator,
        *,
        wire_dtype: Any = np.float32,
    ) -> None:
        self._store = store
        self._ring = ring
        self._meter = meter
        self._comm = comm
        self._exchanged = ExchangeMeter(comm, meter, Stage.EXCHANGE_ROWS)
        self._wire_dtype = np.dtype(wire_dtype)
        self._sent = np.empty((0, 0), np.float32)

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `x` with own rows from the store and the others from their owners."""
        exchange = batch.exchanges[0]
        rows = self._ring.take(exchange.ids.shape[0])
        own, remote = rows[: exchange.num_own], rows[exchange.num_own :]
        counters = self._store.read(exchange.ids[: exchange.num_own], own)
        self._exchanged.begin()
        sent = self._room(exchange.send_rows.shape[0], rows.shape[1])
        gather_rows(own, exchange.send_rows, sent)
        received = self._comm.all_to_all_rows(
            torch.from_numpy(sendable(convert_rows(sent, self._wire_dtype))),
            exchange.send_counts,
            exchange.receive_counts,
            out=torch.from_numpy(remote) if self._wire_dtype == np.float32 else None,
        )
        if self._wire_dtype != np.float32:
            remote[...] = convert_rows(received.numpy().view(self._wire_dtype), remote.dtype)
        batch.x = torch.from_numpy(rows)
        batch.rows_by_source, batch.bytes_by_source = counters.rows, counters.bytes
        self._exchanged.end(batch, index, sum(counters.seconds.values()))
        self._meter.count(index, counters.rows, counters.bytes)
        return batch

    def _room(self, num_rows: int, width: int) -> NDArray[np.float32]:
        """Return rows of the one buffer to send from: new pages are slow."""
        if self._sent.shape[0] < num_rows or self._sent.shape[1] != width:
            self._sent = np.empty((num_rows + num_rows // 4, width), np.float32)
        return self._sent[:num_rows]


def fill_cooperative_weights(
    batch: MiniBatch,
    workload: Workload,
    degree: NDArray[Any] | None,
    self_loops: NDArray[Any] | None,
) -> MiniBatch:
    """Fill weights block by block, as each block has sources of its own."""
    filled = [
        fill_weights(
            replace(batch, blocks=[block], n_id=exchange.ids),
            workload,
            degree,
            self_loops=self_loops,
        ).blocks[0]
        for block, exchange in zip(batch.blocks, batch.exchanges, strict=True)
    ]
    batch.blocks = filled
    return batch
