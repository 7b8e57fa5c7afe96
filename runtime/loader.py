"""Batches under a plan: `for batch in PlannedLoader("plan")`, in one process or in each rank.

Which batches come depends on graph, workload and (epoch, step) alone; the plan's pipeline, tiers
and threads change only when they are ready. Stages are objects in a list (`loader_stages.py`), each
timed by the meter; `train/overlap.py` runs the list ahead of the training thread.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime.comm.collectives import Communicator
from runtime.cores import GLOO_THREADS, cores_beside_training, make_batch
from runtime.errors import DatasetError, PlanError
from runtime.graph.dataset import Graph, open_graph
from runtime.graph.types import types_of
from runtime.loader_build import LoaderParts
from runtime.loader_device_sample import DeviceSampleStage
from runtime.loader_pass import pass_through, taken
from runtime.loader_stages import SampleStage, seed_batch
from runtime.loader_typed import is_typed
from runtime.mesh import rank_and_size
from runtime.meter import StageMeter
from runtime.plan import Plan, load_plan
from runtime.sampling.minibatch import MiniBatch
from runtime.train.overlap import Prefetcher, Turns, Workers
from runtime.train.streams import AbstractMark, AbstractStreams, streams_of

_Made = tuple[MiniBatch, AbstractMark | None]
"""A batch, and the point in the device's work at which it is whole; None: nothing is under way."""

PLAN_VARIABLE = "GNNPLAN_PLAN"
"""Environment variable that names the plan's folder to a script under `gnnplan launch`."""


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
        on_device: whether the device draws and gathers by its own kernels, as far as it can; None:
            where it is a GPU. True on the CPU runs them in Triton's interpreter (tests).
        streams: the device's; None makes them.

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
        on_device: bool | None = None,
        streams: AbstractStreams | None = None,
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
        if comm is None and self.size > 1 and self.plan.strategy.threads.comm == 0:
            make_batch(GLOO_THREADS)  # of the group that a user's script has made
        self.meter = StageMeter() if meter is None else meter
        self._as_blocks = blocks
        where = torch.device(device)
        self._streams = streams_of(where) if streams is None else streams
        self._parts = LoaderParts(
            self.plan, folder, self.graph, rank=self.rank, size=self.size, comm=comm,
            meter=self.meter, blocks=blocks, device=where, on_device=on_device,
            streams=self._streams,
        )  # fmt: skip
        self.store = self._parts.store
        self.cooperation = self._parts.cooperation
        self.stages = self._parts.stages()
        self.topology = self._parts.topology
        # Threads that wait for reads of the disk keep off training's cores: woken by a reader they
        # would be put on the core that is not reading, training's.
        reads_disk = any(source.kind == "disk" for source in self.plan.strategy.features.sources)
        cores = cores_beside_training(self.plan.strategy.threads) if reads_disk else []
        self._workers = Workers(self._parts.num_threads, cores=cores)
        self._ready: Prefetcher[_Made] | None = None
        self._hetero: Any = None
        self._epoch, self._step = epoch, 0
        self._factor = self.plan.strategy.sampler.parameters.get("factor")
        self.handed_out = 0
        """Batches given so far by this process, over epochs."""

    def __len__(self) -> int:
        """Optimiser steps per epoch, the same on every rank."""
        return self._parts.schedule.num_steps

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

        def produce(index: int, turns: Turns) -> _Made:
            return self._make(epoch, first + index, base + index, index, turns)

        depth = self.plan.strategy.prefetch_depth
        if self._ready is not None:
            self._ready.close()  # an iteration that was left halfway: it has ended now
        self._ready = Prefetcher(produce, count, workers=self._workers, depth=depth)
        with self._ready as ready:
            for made in ready:
                batch = taken(made, self._streams)
                self._step += 1
                self.handed_out += 1
                if self._step == len(self):
                    self._epoch, self._step = epoch + 1, 0
                if self._step == 0 or self._step == first + count:
                    self._finish()
                yield batch if self._as_blocks else self._pyg(batch)
                del batch, made  # its buffer is free again before the next batch is waited for

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
        sampler = self._parts.sampler(wanted)
        # The host draws from here on, also where the device did.
        drawing = (SampleStage, DeviceSampleStage)
        self.stages = [
            SampleStage(sampler) if isinstance(stage, drawing) else stage for stage in self.stages
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

    def _finish(self) -> None:
        """Meter what stages left open; the iteration's last batch is made."""
        for stage in self.stages:
            stage.finish()

    def _make(self, epoch: int, step: int, index: int, turn: int, turns: Turns) -> _Made:
        """Pass one batch through all stages, timing each."""
        batch = seed_batch(epoch, step, self._parts.dialect)
        batch, mark = pass_through(
            batch, self.stages, self.meter, self._streams, index, turn, turns
        )
        if batch.lists_by_source:
            self.meter.count_lists(index, batch.lists_by_source, batch.list_bytes_by_source)
        return batch, mark

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


def _check_ranks(plan: Plan, rank: int, size: int) -> None:
    if size != plan.num_ranks or not 0 <= rank < size:
        raise PlanError(
            f"expected rank 0 to {plan.num_ranks - 1} of {plan.num_ranks} (the plan's devices), "
            f"found rank {rank} of {size}"
        )
