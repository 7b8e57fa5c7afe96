"""Batches under a plan: `for batch in PlannedLoader("plan")`, in one process or in each rank.

Which batches come depends on graph, workload and (epoch, step) alone; the plan's pipeline, tiers
and threads change only when they are ready. Stages are objects in a list (`loader_stages.py`), each
timed by the meter; `train/overlap.py` runs the list ahead of the training thread.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime.buffers import BufferRing
from runtime.comm.collectives import Communicator
from runtime.errors import DatasetError, PlanError
from runtime.features.store import AbstractFeatureStore, open_store
from runtime.features.typed import TypedFeatureStore
from runtime.graph.dataset import Graph, open_graph
from runtime.graph.types import types_of
from runtime.loader_bulk import bulk_stage, grid_stage, refuse_bulk
from runtime.loader_cooperative import (
    Cooperation,
    CooperativeGatherStage,
    CooperativeSampleStage,
    fill_cooperative_weights,
)
from runtime.loader_links import link_stages
from runtime.loader_stages import (
    AbstractStage,
    BatchStage,
    CopyStage,
    GatherStage,
    SampleStage,
    SeedsStage,
    seed_batch,
)
from runtime.loader_topology import Topology
from runtime.loader_typed import is_typed, typed_sampler
from runtime.mesh import rank_and_size
from runtime.meter import StageMeter
from runtime.models.weights import count_self_loops, fill_weights
from runtime.plan import Plan, Sampler, load_array, load_plan
from runtime.sampling.build import BatchSampler, build_sampler
from runtime.sampling.links import LinkSchedule
from runtime.sampling.minibatch import Dialect, MiniBatch
from runtime.sampling.seeds import SeedSchedule
from runtime.train.overlap import Prefetcher, Turns, Workers

PLAN_VARIABLE = "GNNPLAN_PLAN"
"""Environment variable that names the plan's folder to a script under `gnnplan launch`."""
IN_READ = ("exchange_ids", "exchange_rows")
"""Pipeline entries that the feature store carries out inside the gather's read."""


class PlannedLoader:
    """The batches of this rank, as the plan says they are to be made.

    Iterating gives the rest of the current epoch and then moves on to the next epoch. A batch is
    a `MiniBatch` whose `x` is the float32 tensor of all its vertices' rows and whose `y` holds the
    seeds' labels; with `blocks=False` it is PyG `Data` with NeighborLoader's fields.

    Args:
        plan: plan folder; None takes that of `gnnplan launch`, from $GNNPLAN_PLAN.
        graph: the plan's dataset where it is open already; None opens it.
        rank: this rank; None asks torch.distributed, then torchrun's environment.
        size: number of ranks; as `rank`.
        device: where `x` and `y` go.
        blocks: False gives PyG `Data` (sampler dialect first_seen only).
        epoch: first epoch.
        comm: exchanges with peers; None makes one on the default group where a rank has peers.
        meter: records stage seconds; None makes one.

    Raises:
        PlanError: the plan is damaged, or for another number of ranks.
        DatasetError: the dataset has no features.
    """

    def __init__(
        self,
        plan: Path | str | None = None,
        graph: Graph | None = None,
        *,
        rank: int | None = None,
        size: int | None = None,
        device: str | torch.device = "cpu",
        blocks: bool = True,
        epoch: int = 0,
        comm: Communicator | None = None,
        meter: StageMeter | None = None,
    ) -> None:
        folder = self._folder = _plan_folder(plan)
        self.plan: Plan = load_plan(folder)
        here, ranks = rank_and_size()
        self.rank = here if rank is None else rank
        self.size = ranks if size is None else size
        _check_ranks(self.plan, self.rank, self.size)
        self.graph = open_graph(Path(self.plan.graph.path)) if graph is None else graph
        if self.graph.topology_only:
            raise DatasetError(f"{self.graph.path}: expected features to train on, found none")
        self.meter = StageMeter() if meter is None else meter
        self._dialect = Dialect(self.plan.strategy.sampler.dialect)
        self._as_blocks = blocks
        self._comm = comm
        self.cooperation = self._cooperate(comm)
        self._schedule = self._make_schedule()
        self.store: AbstractFeatureStore = self._open_store(comm)
        self.topology = Topology(self.graph, self.plan, folder, self.rank)
        self.stages = self._make_stages(torch.device(device))
        self._workers = Workers(self.plan.strategy.threads.sample)
        self._ready: Prefetcher[MiniBatch] | None = None
        self._hetero: Any = None
        self._epoch, self._step = epoch, 0
        self._factor = self.plan.strategy.sampler.parameters.get("factor")
        self.handed_out = 0
        """Batches given so far by this process, over epochs."""

    def __len__(self) -> int:
        """Optimiser steps per epoch, the same on every rank."""
        return self._schedule.num_steps

    def __iter__(self) -> Iterator[Any]:
        """The rest of this epoch's batches."""
        return self.batches()

    def batches(self, most: int | None = None) -> Iterator[Any]:
        """At most `most` of this epoch's remaining batches, and no batch is made beyond them.

        With peers every rank must take as many: leave a loop early by this argument, not by break.
        """
        first, base = self._step, self.handed_out
        count = len(self) - first if most is None else min(most, len(self) - first)
        epoch = self._epoch

        def produce(index: int, turns: Turns) -> MiniBatch:
            return self._make(epoch, first + index, base + index, index, turns)

        depth = self.plan.strategy.prefetch_depth
        if self._ready is not None:
            self._ready.close()  # an iteration that was left halfway: it has ended now
        self._ready = Prefetcher(produce, count, workers=self._workers, depth=depth)
        with self._ready as ready:
            for batch in ready:
                self._step += 1
                self.handed_out += 1
                if self._step == len(self):
                    self._epoch, self._step = epoch + 1, 0
                yield batch if self._as_blocks else self._pyg(batch)
                del batch  # its buffer is free again before the next batch is waited for

    def set_epoch(self, epoch: int) -> None:
        """Start at the first step of `epoch`."""
        self._epoch, self._step = epoch, 0

    def set_factor(self, factor: float) -> None:
        """Sample with another locality factor (sampler las) from the next batch on.

        Call between two iterations; one pass over the graph where the factor is a new one.

        Raises:
            SamplerError: the plan's sampler has no factor, or it is below 1.
        """
        named = self.plan.strategy.sampler
        wanted = replace(named, parameters=named.parameters | {"factor": factor})
        if self._factor == factor:
            return
        sampler = self._sampler(wanted)
        self.stages = [
            SampleStage(sampler) if isinstance(stage, SampleStage) else stage
            for stage in self.stages
        ]
        self._factor = factor

    def state(self) -> dict[str, int]:
        """Where the next batch comes from: plain values, for a checkpoint."""
        return {"epoch": self._epoch, "step": self._step}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken."""
        self._epoch, self._step = int(state["epoch"]), int(state["step"])

    def close(self) -> None:
        """End the prefetch threads and give back the feature store."""
        self._workers.close()
        self.store.close()
        if self.cooperation is not None:
            self.cooperation.close()

    def _make(self, epoch: int, step: int, index: int, turn: int, turns: Turns) -> MiniBatch:
        """Pass one batch through all stages, timing each."""
        batch = seed_batch(epoch, step, self._dialect)
        seconds: dict[str, float] = {}
        for number, stage in enumerate(self.stages):
            if stage.ordered:
                turns.take(number, turn)
            self.meter.enter(stage.name, index, meets=stage.ordered)
            core, start, before = time.thread_time(), time.perf_counter(), _exchanged(batch)
            batch = stage.wait(stage.submit(batch, index))
            elapsed = time.perf_counter() - start
            if stage.ordered:
                turns.done(number, turn)
            elapsed -= _exchanged(batch) - before
            seconds[stage.name] = elapsed
            self.meter.add(stage.name, index, elapsed, time.thread_time() - core)
        batch.seconds |= seconds
        if batch.lists_by_source:
            self.meter.count_lists(index, batch.lists_by_source, batch.list_bytes_by_source)
        return batch

    def _cooperate(self, comm: Communicator | None) -> Cooperation | None:
        """What the ranks share work by, where the plan's batches are cooperative."""
        strategy = self.plan.strategy
        if strategy.batching != "cooperative":
            return None
        if not self._as_blocks:
            raise PlanError(
                "cooperative batches: expected blocks=True (a rank holds no edge_index of its own "
                "seeds' subgraph); use the blocks, or independent batching"
            )
        partition = None
        if strategy.owner == "partition":
            partition = load_array(self.plan, self._folder, "partition")
        return Cooperation(self.plan, self.graph, partition, self.rank, comm)

    def _make_schedule(self) -> SeedSchedule | LinkSchedule:
        if self.cooperation is not None:
            return self.cooperation.schedule()
        schedule = LinkSchedule if self.graph.task == "link" else SeedSchedule
        return schedule(
            self.graph.train_idx,
            self.plan.workload.batch_size,
            seed=self.plan.workload.seed,
            num_ranks=self.size,
            rank=self.rank,
        )

    def _make_stages(self, device: torch.device) -> list[AbstractStage]:
        strategy, workload = self.plan.strategy, self.plan.workload
        exchanges = any(s.kind in ("peer", "remote") for s in strategy.features.sources)
        # A dynamic cache too takes its batches in order, so that what it hits can be repeated.
        in_order = (self.size > 1 and exchanges) or strategy.features.cache.policy != "none"
        pinned = device.type == "cuda"
        ring = BufferRing(strategy.prefetch_depth + 2, self.store.feature_dim, pinned=pinned)
        seeds, sample = self._first_stages()
        made: dict[str, AbstractStage] = {
            "seeds": seeds,
            "sample": sample,
            "gather": self._gather_stage(ring, ordered=in_order),
            "copy": CopyStage(device),
            "batch": BatchStage(self.graph, workload, device, self._weights()),
        }
        names = [name for name in strategy.pipeline if name not in IN_READ]
        if device.type == "cuda" and "copy" not in names:
            names.insert(names.index("gather") + 1, "copy")
        unknown = [name for name in names if name not in made]
        if unknown or names[:1] != ["seeds"] or "sample" not in names or "gather" not in names:
            raise PlanError(
                f"expected a pipeline of {', '.join(made)}, found "
                f"{', '.join(strategy.pipeline)}; plan again"
            )
        return [made[name] for name in names]

    def _gather_stage(self, ring: BufferRing, *, ordered: bool) -> AbstractStage:
        if self.cooperation is None:
            return GatherStage(self.store, ring, self.meter, ordered=ordered)
        comm, dtype = self.cooperation.rows, self.cooperation.wire_dtype
        return CooperativeGatherStage(self.store, ring, self.meter, comm, wire_dtype=dtype)

    def _open_store(self, comm: Communicator | None) -> AbstractFeatureStore:
        if self.graph.x_by_type:
            if not is_typed(self.plan.workload):
                raise DatasetError(
                    f"{self.graph.path}: expected model rgcn for features by node type, found "
                    f"{self.plan.workload.model}; choose rgcn"
                )
            return TypedFeatureStore(self.graph, self.plan)
        threads = self.plan.strategy.threads.gather
        return open_store(
            self.graph, self.plan, self._folder, self.rank, comm=comm, threads=threads
        )

    def _first_stages(self) -> tuple[AbstractStage, AbstractStage]:
        """The stages `seeds` and `sample`, for nodes or for links."""
        if self.cooperation is not None:
            shared = self.cooperation.sampler(self.topology.graph, len(self))
            counted = self.topology.counted(shared, self.plan.strategy.sampler.name)
            sample = CooperativeSampleStage(counted, self.cooperation.ids, self.meter)
            return SeedsStage(self.cooperation.schedule(), self._dialect), sample
        workload, edge_ids = self.plan.workload, not self._as_blocks
        graph, named = self.topology.graph, self.plan.strategy.sampler
        if isinstance(self._schedule, LinkSchedule):
            refuse_bulk(self.plan, "task link")
            if named.name != "neighbor" or named.parameters:
                raise PlanError(
                    f"task link: expected sampler neighbor without parameters, found {named.name}; "
                    "plan again"
                )
            settings = {"dialect": self._dialect, "seed": workload.seed, "edge_ids": edge_ids}
            return link_stages(graph, workload, self._schedule, settings)
        if is_typed(workload):
            refuse_bulk(self.plan, "model rgcn")
            if named.name != "neighbor" or named.parameters:
                raise PlanError(
                    f"model rgcn: expected sampler neighbor without parameters, found {named.name};"
                    " plan again"
                )
            if self.topology.policy not in ("host", "replicated"):
                raise PlanError(
                    f"model rgcn: expected topology host or replicated, found "
                    f"{self.topology.policy}; plan again"
                )
            typed = typed_sampler(graph, workload, dialect=self._dialect, edge_ids=edge_ids)
            return SeedsStage(self._schedule, self._dialect), SampleStage(typed)
        return SeedsStage(self._schedule, self._dialect), self._sample_stage(self._schedule)

    def _sample_stage(self, schedule: SeedSchedule) -> AbstractStage:
        """Step by step, in bulk, or from the other ranks' rows of the graph, as the plan says."""
        strategy, in_flight = self.plan.strategy, self.plan.strategy.prefetch_depth + 1
        if strategy.topology.policy == "partitioned":
            return grid_stage(
                self.plan, self.graph, schedule, self._comm, edge_ids=not self._as_blocks,
                in_flight=in_flight,
            )  # fmt: skip
        sampler = self._sampler(strategy.sampler)
        if strategy.bulk_batches == 1:
            return SampleStage(sampler)
        return bulk_stage(self.plan, schedule, sampler, in_flight=in_flight)

    def _sampler(self, named: Sampler) -> BatchSampler:
        """A sampler for nodes of one type, by the plan's name and parameters."""
        local = None
        if named.name == "las":
            local = load_array(self.plan, self._folder, f"feature_own_ids_{self.rank}")
        sampler = build_sampler(
            named,
            self.topology.graph.indptr,
            self.topology.graph.indices,
            self.plan.workload.fanouts,
            self.plan.workload.seed,
            edge_ids=not self._as_blocks,
            edge_weight=self.graph.edge_weight,
            local=local,
            steps_per_epoch=len(self),
        )
        return self.topology.counted(sampler, named.name)

    def _weights(self) -> Any:
        """What fills a batch's edge weights: GCN needs the full graph's degrees."""
        workload, graph = self.plan.workload, self.graph
        degree = loops = None
        if workload.model == "gcn" and self._as_blocks and workload.gcn_norm == "full":
            degree = graph.indptr[1:] - graph.indptr[:-1]
            loops = count_self_loops(graph.indptr, graph.indices)

        def fill(batch: MiniBatch) -> MiniBatch:
            if not self._as_blocks:
                return batch
            if batch.exchanges:
                return fill_cooperative_weights(batch, workload, degree, loops)
            return fill_weights(batch, workload, degree, self_loops=loops)

        return fill

    def _pyg(self, batch: MiniBatch) -> Any:
        if is_typed(self.plan.workload):
            from runtime.sampling.hetero import HeteroView

            self._hetero = self._hetero or HeteroView(self.graph, types_of(self.graph))
            return self._hetero(batch, batch.x)
        from runtime.sampling.pyg import to_pyg

        labels = None if self.graph.y is None else torch.from_numpy(self.graph.y[batch.n_id])
        return to_pyg(batch, batch.x, labels)


def _plan_folder(plan: Path | str | None) -> Path:
    """The folder that is named, or the one that `gnnplan launch` left in the environment."""
    named = os.environ.get(PLAN_VARIABLE, "") if plan is None else plan
    if not named:
        raise PlanError(
            f"expected a plan folder, or ${PLAN_VARIABLE}, found neither; name the folder or start "
            "the script with gnnplan launch"
        )
    return Path(named)


def _exchanged(batch: MiniBatch) -> float:
    """Seconds that the batch spent in exchanges so far: they are metered apart from the stages."""
    if not batch.seconds:
        return 0.0
    return sum(batch.seconds.get(name, 0.0) for name in IN_READ)


def _check_ranks(plan: Plan, rank: int, size: int) -> None:
    if size != plan.num_ranks or not 0 <= rank < size:
        raise PlanError(
            f"expected rank 0 to {plan.num_ranks - 1} of {plan.num_ranks} (the plan's devices), "
            f"found rank {rank} of {size}"
        )
