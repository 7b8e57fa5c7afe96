"""Batches under a plan: `for batch in PlannedLoader("plan")`, in one process or in each rank.

Graph, workload and (epoch, step) alone decide which batches come; the plan's pipeline, tiers and
threads decide when they are ready. Stages are objects in a list (`stages`), each timed by the
meter; `train.overlap` runs the list ahead of the training thread.
"""

import functools
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import rank_and_size
from gnnplan.runtime.comm.order import CollectiveOrder
from gnnplan.runtime.device import memory_nodes
from gnnplan.runtime.errors import DatasetError, InputError, PlanError
from gnnplan.runtime.graph.dataset import Graph, is_typed, types_of
from gnnplan.runtime.identity import open_planned_graph, unused_weights
from gnnplan.runtime.loader.device import DeviceSampleStage, tensors_of
from gnnplan.runtime.loader.factory import IN_READ, LoaderParts
from gnnplan.runtime.loader.stages import AbstractStage, SampleStage, seed_batch
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.process import (
    GLOO_THREADS,
    cores_beside_training,
    make_batch,
    memory_spread_over,
)
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.overlap import Prefetcher, Turns, Workers
from gnnplan.runtime.train.streams import AbstractMark, AbstractStreams, streams_of

PLAN_VARIABLE = "GNNPLAN_PLAN"
"""Environment variable that names the plan's folder to a script under `gnnplan launch`."""
_FLAGS = {
    "num_neighbors": "--fanouts",
    "batch_size": "--batch-size",
    "replace": "--sampler",
    "neg_sampling": "--negatives",
    "neg_sampling_ratio": "--negatives",
}
_DECIDED = {
    *_FLAGS, "data", "input_nodes", "input_time", "subgraph_type", "disjoint", "temporal_strategy",
    "time_attr", "weight_attr", "transform", "transform_sampler_output", "is_sorted",
    "filter_per_worker", "neighbor_sampler", "directed", "edge_label_index", "edge_label",
    "edge_label_time", "dataset", "shuffle", "sampler", "batch_sampler", "num_workers",
    "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "prefetch_factor",
    "persistent_workers", "generator", "multiprocessing_context", "pin_memory_device", "in_order",
}  # fmt: skip
"""Keywords of NeighborLoader, LinkNeighborLoader and torch's DataLoader."""


def refuse_others(names: Iterable[str]) -> None:
    """Raise TypeError for keywords that PlannedLoader does not have.

    >>> refuse_others(["shuffle"])
    Traceback (most recent call last):
    TypeError: PlannedLoader: shuffle: the plan decides that; leave it out, or plan again
    """
    names = sorted(names)
    unknown = [name for name in names if name not in _DECIDED]
    if unknown:
        raise TypeError(f"PlannedLoader() got an unexpected keyword argument {unknown[0]!r}")
    if names:
        flags = sorted({_FLAGS[name] for name in names if name in _FLAGS})
        which = f" (gnnplan plan {', '.join(flags)})" if flags else ""
        raise TypeError(
            f"PlannedLoader: {', '.join(names)}: the plan decides that; leave it out, or plan "
            f"again{which}"
        )


def plan_folder(plan: object) -> Path:
    """Return the named folder, or the one that `gnnplan launch` left in the environment."""
    named = os.environ.get(PLAN_VARIABLE, "") if plan is None else plan
    if not isinstance(named, str | os.PathLike):
        raise TypeError(
            f"PlannedLoader: expected a plan folder, found {type(plan).__name__}; import the graph "
            "(gnnplan graph import), plan it, and name the plan's folder"
        )
    if not named:
        raise PlanError(
            f"expected a plan folder, or ${PLAN_VARIABLE}, found neither; name the folder or start "
            "the script with gnnplan launch"
        )
    return Path(named)


NO_EDGE = np.iinfo(np.int64).min
"""`e_id` of a self-loop that import added, which is no edge of the source.

It is an error as an index, where -1 would take the last edge's row.
"""


class PygView:
    """View of a loader's batches as PyG's `Data`, or `HeteroData` of a typed graph.

    Samplers count edges by their place in the dataset's `indices`. In a view `e_id` is the edge's
    place in the imported source, for `data.edge_attr[batch.e_id]`; `edge_weight` holds the
    dataset's weights, unless the sampler gives its own. Both are read here alone, from mapped
    files.
    """

    def __init__(self, graph: Graph, workload: Workload) -> None:
        self._graph, self._hetero = graph, None
        self._edge_id = None if graph.edge_id is None else np.asarray(graph.edge_id)
        self._weight = None if graph.edge_weight is None else np.asarray(graph.edge_weight)
        if is_typed(workload):
            from gnnplan.runtime.sampling.pyg import HeteroView

            self._hetero = HeteroView(graph, types_of(graph))

    def __call__(self, batch: MiniBatch) -> Any:
        """Return the batch with x and y of all its nodes."""
        if self._hetero is not None:
            typed = self._hetero(batch, batch.x)
            for store in typed.edge_stores:
                self._fill_edges(store)
            return typed
        from gnnplan.runtime.sampling.pyg import to_pyg

        labels = None if self._graph.y is None else torch.from_numpy(self._graph.y[batch.n_id])
        data = to_pyg(batch, batch.x, labels)
        self._fill_edges(data)
        return data

    def _fill_edges(self, edges: Any) -> None:
        """Give the source's places and weights to edges, whose `e_id` are places in `indices`."""
        if "e_id" not in edges:
            return
        places = edges.e_id.numpy()
        if self._weight is not None and "edge_weight" not in edges:
            edges.edge_weight = torch.from_numpy(self._weight[places])
        if self._edge_id is not None:
            found = self._edge_id[places]
            edges.e_id = torch.from_numpy(np.where(found < 0, NO_EDGE, found))


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """Batch on its way, with the mark at which its latest lane is done with it."""

    batch: MiniBatch
    mark: AbstractMark | None = None
    """None: nothing is under way."""
    lane: str = ""


def pass_through(
    batch: MiniBatch,
    stages: Sequence[AbstractStage],
    meter: StageMeter,
    streams: AbstractStreams,
    index: int,
    turn: int,
    turns: Turns,
    order: CollectiveOrder | None = None,
) -> MadeBatch:
    """Pass a batch through all stages; return it with the mark at which it is whole.

    `index` numbers this process's steps, for the meter; `turn` this iteration's, for `turns`.
    Stages in which ranks meet run on the order's thread where there is one.
    """
    seconds: dict[str, float] = {}
    made = MadeBatch(batch)
    for number, stage in enumerate(stages):
        if stage.ordered:
            turns.take(number, turn)
        meter.enter(stage.name, index, meets=stage.ordered)
        start, before = time.perf_counter(), _exchanged(made.batch)
        run = functools.partial(_run_stage, stage, made, streams, index)
        if stage.ordered and order is not None:
            place = sum(each.ordered for each in stages[:number])
            made, core = order.meet(turn, place, run)
        else:
            made, core = run()
        elapsed = time.perf_counter() - start
        if stage.ordered:
            turns.done(number, turn)
        elapsed -= _exchanged(made.batch) - before
        seconds[stage.name] = elapsed
        meter.add(stage.name, index, elapsed, core)
    made.batch.seconds |= seconds
    return made


def _run_stage(
    stage: AbstractStage, made: MadeBatch, streams: AbstractStreams, index: int
) -> tuple[MadeBatch, float]:
    """Pass a batch through one stage on its lane; return it with this thread's core seconds."""
    core, mark, lane = time.thread_time(), made.mark, made.lane
    with streams.on(stage.lane):
        if mark is not None and stage.lane != lane:
            streams.wait(mark)
            streams.keep(tensors_of(made.batch))
        batch = stage.wait(stage.submit(made.batch, index))
        if stage.lane:  # the others work on the host, and are done
            mark, lane = streams.mark(), stage.lane
    return MadeBatch(batch, mark, lane), time.thread_time() - core


def take_made(made: MadeBatch, streams: AbstractStreams) -> MiniBatch:
    """Let the training lane's further work come after a batch is made; return the batch."""
    if made.mark is not None:
        streams.wait(made.mark)
        streams.keep(tensors_of(made.batch))
    return made.batch


def _exchanged(batch: MiniBatch) -> float:
    """Return the batch's seconds in exchanges so far, which are metered apart."""
    if not batch.seconds:
        return 0.0
    return sum(batch.seconds.get(name, 0.0) for name in IN_READ)


class Position:
    """Epoch and step of the next batch."""

    def __init__(self, plan_id: str, num_steps: int, epoch: int = 0) -> None:
        self._plan_id, self._num_steps = plan_id, num_steps
        self.epoch: int = epoch
        self.step: int = 0
        self._taken = False

    def advance(self) -> None:
        """Count a batch as taken."""
        self._taken = True
        self.step += 1
        if self.step == self._num_steps:
            self.epoch, self.step = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch`, or stay at a place in it that was just loaded.

        A script may so call this before each epoch, like a DistributedSampler's, also before the
        one that it goes on in.
        """
        if self._taken or epoch != self.epoch:
            self.epoch, self.step, self._taken = epoch, 0, False

    def begin_epoch(self) -> None:
        """Start the next epoch where some, not all, batches of this one were taken."""
        if self._taken and self.step:
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"plan_id": self._plan_id, "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, under the same plan."""
        try:
            plan_id, epoch, step = str(state["plan_id"]), int(state["epoch"]), int(state["step"])
        except (KeyError, TypeError, ValueError):
            epoch = step = -1
            plan_id = ""
        if epoch < 0 or not 0 <= step < self._num_steps:
            raise InputError(
                f"expected a loader's state_dict (plan_id, epoch, step below {self._num_steps}), "
                f"found {dict(state)!r:.200}"
            )
        if plan_id != self._plan_id:
            raise PlanError(
                f"expected the state of a loader of plan {self._plan_id[:12]}, found one of plan "
                f"{plan_id[:12]}; go on under that plan, or start at an epoch's beginning with "
                "set_epoch"
            )
        self.epoch, self.step, self._taken = epoch, step, False


_log = logging.getLogger(__name__)


class PlannedLoader:
    """Batches of this rank, made as the plan says.

    Each iteration gives the batches of one epoch, and the next iteration those of the next epoch,
    also after a `break`: with several ranks all must leave at the same batch. `load_state_dict`
    goes on in the middle of an epoch.

    A batch is a `MiniBatch`: `x` is the float32 tensor of all its vertices' rows, `y` holds the
    seeds' labels. With `blocks=False` it is PyG `Data` with NeighborLoader's fields: `e_id` counts
    edges as the imported source does, `edge_weight` holds the dataset's weights, or the sampler's
    own. A dropped loader closes itself.

    Args:
        plan: Plan folder; None takes that of `gnnplan launch`, from $GNNPLAN_PLAN.
        graph: The plan's dataset where it is open already; None opens it.
        rank: This rank; None asks torch.distributed, then torchrun's environment.
        size: Number of ranks; as `rank`.
        device: Device of `x` and `y`.
        blocks: False gives PyG `Data` (sampler dialect first_seen only).
        epoch: First epoch.
        comm: Communicator of exchanges with peers, which training uses too: GPUs send for both in
            one order. None makes one where a rank has peers.
        meter: Meter of stage seconds; None makes one.
        on_device: Whether the device draws and gathers by its own kernels, as far as it can; None:
            where it is a GPU. True on the CPU runs them in Triton's interpreter (tests).
        streams: Streams of the device; None makes them.
        others: Refused; for NeighborLoader's keywords the error says that the plan decides them.

    Raises:
        PlanError: The plan is damaged, or for another dataset or number of ranks.
        DatasetError: The dataset has no features.
        TypeError: Other keywords, or something else than a folder as the plan.
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
        **others: Any,
    ) -> None:
        refuse_others(others)
        folder = plan_folder(plan)
        self.plan: Plan = load_plan(folder)
        here, ranks = rank_and_size()
        self.rank = here if rank is None else rank
        self.size = ranks if size is None else size
        _check_ranks(self.plan, self.rank, self.size)
        self.graph = open_planned_graph(self.plan) if graph is None else graph
        if self.graph.topology_only:
            raise DatasetError(f"{self.graph.path}: expected features to train on, found none")
        if comm is None and self.size > 1 and self.plan.strategy.threads.comm == 0:
            make_batch(GLOO_THREADS)  # of the group that a user's script has made
        self.meter = StageMeter() if meter is None else meter
        where = torch.device(device)
        self._streams = streams_of(where) if streams is None else streams
        nodes = memory_nodes(self.plan, self.rank)
        with memory_spread_over(nodes):
            self._parts = LoaderParts(
                self.plan, folder, self.graph, rank=self.rank, size=self.size, comm=comm,
                meter=self.meter, blocks=blocks, device=where, on_device=on_device,
                streams=self._streams,
            )  # fmt: skip
        self.store = self._parts.store
        self.cooperation = self._parts.cooperation
        try:
            with memory_spread_over(nodes):
                self.stages = self._parts.stages()
        except BaseException:
            self._parts.close()
            raise
        self.topology = self._parts.topology
        # Threads that wait for the disk keep off training's cores, where a waking reader puts them.
        reads_disk = any(source.kind == "disk" for source in self.plan.strategy.features.sources)
        cores = cores_beside_training(self.plan.strategy.threads) if reads_disk else []
        self._workers = Workers(
            self._parts.num_threads, cores=cores, enter=self._streams.enter_thread
        )
        self._order = self._parts.order(self._workers.count, self.stages)
        self._give_back = weakref.finalize(
            self, _give_back, self._workers, self._parts, self._order
        )
        self._give_back.atexit = False  # the process's end frees all of it
        # Ranks may meet in a stage whose batches come in order: a collective, drawn or gathered.
        self._meets = self.size > 1 and any(stage.ordered for stage in self.stages)
        self._ready: Prefetcher[MadeBatch] | None = None
        self._view = None if blocks else PygView(self.graph, self.plan.workload)
        if blocks and self.rank == 0:
            for line in unused_weights(self.plan, self.graph):
                _log.warning("%s", line)
        self.position = Position(self.plan.plan_id, len(self), epoch)
        """Epoch and step of the next batch."""
        self._factor = self.plan.strategy.sampler.parameters.get("factor")
        self.handed_out = 0
        """Number of batches given so far by this process, over epochs."""

    def __len__(self) -> int:
        """Return the optimiser steps per epoch, the same on every rank."""
        return self._parts.schedule.num_steps

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches: all of them, or the rest after `load_state_dict`."""
        self._end_iteration()
        self.position.begin_epoch()
        yield from self.batches()

    def batches(self, most: int | None = None) -> Iterator[Any]:
        """Yield at most `most` of this epoch's remaining batches; make none beyond them.

        An iteration that is left early goes on here.
        """
        self._end_iteration()
        epoch, first, base = self.position.epoch, self.position.step, self.handed_out
        count = len(self) - first if most is None else min(most, len(self) - first)

        order = self._order

        def produce(index: int, turns: Turns) -> MadeBatch:
            with nullcontext() if order is None else order.failing():
                return self._make(epoch, first + index, base + index, index, turns)

        if order is not None:
            order.begin(count)
        depth = self.plan.strategy.prefetch_depth
        ready = self._ready = Prefetcher(
            produce, count, workers=self._workers, depth=depth, meets=self._meets
        )
        try:
            for made in ready:
                batch = take_made(made, self._streams)
                self.position.advance()
                self.handed_out += 1
                if self.position.step in (0, first + count):
                    self._finish()
                yield batch if self._view is None else self._view(batch)
                del batch, made  # its buffer is free again before the next batch is waited for
                if order is not None:
                    order.next_step()
        finally:
            with nullcontext() if order is None else order.leaving():
                if ready.close() and self._ready is ready:
                    self._ready = None  # a dropped loader now ends its threads

    def _end_iteration(self) -> None:
        """Wait until nothing of an earlier iteration is under way."""
        if self._ready is not None:
            self._ready.close(patience_s=None)
            self._ready = None

    def set_epoch(self, epoch: int) -> None:
        """Go to the first step of `epoch`, or stay where `load_state_dict` went within it."""
        self.position.set_epoch(epoch)

    def set_factor(self, factor: float) -> None:
        """Sample with another locality factor (sampler las) from the next batch on.

        Call it between two iterations; a new factor takes one pass over the graph.
        """
        named = self.plan.strategy.sampler
        wanted = replace(named, parameters=named.parameters | {"factor": factor})
        if self._factor == factor:
            return
        sampler = self._parts.sampler(wanted)
        # From here on the host draws, also where the device did.
        drawing = (SampleStage, DeviceSampleStage)
        self.stages = [
            SampleStage(sampler) if isinstance(stage, drawing) else stage for stage in self.stages
        ]
        self._factor = factor

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values for a checkpoint, alike on all ranks."""
        state = self.position.state_dict()
        return state if self._factor is None else state | {"factor": self._factor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called: the next iteration gives the rest of that epoch.

        Raises InputError for what is no loader's state, PlanError for another plan's.
        """
        self.position.load_state_dict(state)
        if "factor" in state:
            self.set_factor(float(state["factor"]))

    def close(self) -> None:
        """End the prefetch threads and give back the feature store."""
        if self._ready is not None:
            self._ready.close(at_once=True)
            self._ready = None
        self._give_back()

    def _finish(self) -> None:
        for stage in self.stages:
            stage.finish()

    def _make(self, epoch: int, step: int, index: int, turn: int, turns: Turns) -> MadeBatch:
        batch = seed_batch(epoch, step, self._parts.dialect)
        made = pass_through(
            batch, self.stages, self.meter, self._streams, index, turn, turns, self._order
        )
        batch = made.batch
        if batch.lists_by_source:
            self.meter.count_lists(index, batch.lists_by_source, batch.list_bytes_by_source)
        return made


def _give_back(workers: Workers, parts: LoaderParts, order: CollectiveOrder | None) -> None:
    """End a loader's threads; what a stuck one may be reading stays."""
    free = order is None or order.close()
    if workers.close() and free:
        parts.close()


def _check_ranks(plan: Plan, rank: int, size: int) -> None:
    if size != plan.num_ranks or not 0 <= rank < size:
        raise PlanError(
            f"expected rank 0 to {plan.num_ranks - 1} of {plan.num_ranks} (the plan's devices), "
            f"found rank {rank} of {size}"
        )
