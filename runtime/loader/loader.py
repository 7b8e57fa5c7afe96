"""Batches under a plan: `for batch in PlannedLoader("plan")`, in one process or in each rank.

Graph, workload and (epoch, step) alone decide which batches come; the plan's pipeline, tiers and
threads decide when they are ready. Stages are objects in a list (`stages`), each timed by the
meter; `train.overlap` runs the list ahead of the training thread.
"""

import copy
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.mesh import rank_and_size
from gnnplan.runtime.comm.order import CollectiveOrder
from gnnplan.runtime.device import memory_nodes
from gnnplan.runtime.errors import InputError, PlanError
from gnnplan.runtime.graph.dataset import Graph, check_features
from gnnplan.runtime.identity import open_planned_graph, unused_weights
from gnnplan.runtime.loader.device import DeviceSampleStage
from gnnplan.runtime.loader.device_place import padded_stage, say_cores
from gnnplan.runtime.loader.factory import LoaderParts
from gnnplan.runtime.loader.position import Position
from gnnplan.runtime.loader.pyg import (
    PygView,
    Selection,
    check_keywords,
    check_padded,
    means_training,
    select_seeds,
    select_training_seeds,
)
from gnnplan.runtime.loader.stages import SampleStage, link_form, seed_batch
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.process import (
    GLOO_THREADS,
    cores_beside_training,
    make_batch,
    memory_spread_over,
)
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.typed import SortedByType
from gnnplan.runtime.train.overlap import (
    MadeBatch,
    Prefetcher,
    Turns,
    Workers,
    pass_through,
    take_made,
)
from gnnplan.runtime.train.streams import AbstractStreams, streams_of

PLAN_VARIABLE = "GNNPLAN_PLAN"
"""Environment variable that names the plan's folder to a script under `gnnplan launch`."""


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
    launched = os.environ.get(PLAN_VARIABLE, "")
    if launched and Path(launched).resolve() != Path(named).resolve():
        _log.warning("the script names plan %s, and was launched under %s", named, launched)
    return Path(named)


def check_graph(graph: object) -> None:
    """Refuse what is no dataset in the place of the plan's."""
    if not isinstance(graph, Graph | None):
        raise TypeError(
            f"PlannedLoader: graph: expected the plan's dataset (open_graph), found "
            f"{type(graph).__name__}; leave it out, and name other keywords"
        )


_log = logging.getLogger(__name__)


class PlannedLoader:
    """Batches of this rank, made as the plan says.

    Each iteration gives the batches of one epoch, and the next iteration those of the next epoch,
    also after a `break`: with several ranks all must leave at the same batch. `load_state_dict`
    goes on in the middle of an epoch. One iteration of a loader is under way at a time: a loop
    within another over the same loader is an InputError of the outer one.

    A batch is a `MiniBatch`: `x` is the tensor of all its vertices' rows, in float32, `y` holds the
    seeds' labels. With `blocks=False` it is PyG `Data` with NeighborLoader's fields: `e_id` counts
    edges as the imported source does, `edge_weight` holds the dataset's weights, or the sampler's
    own. A dropped loader closes itself.

    Validation, test and inference take a loader over other seeds: `over` makes one that reads by
    the same store, and `input_nodes` one with a store of its own. Use one of them at a time.

    Args:
        plan: Plan folder; None takes that of `gnnplan launch`, from $GNNPLAN_PLAN.
        graph: The plan's dataset where it is open already; None opens it.
        input_nodes, edge_label_index, batch_size, num_neighbors, shuffle, drop_last: Seeds, as in
            `pyg.select_seeds`; of the plan's training seeds the plan decides them, also where a
            script gives these seeds with shuffle=True.
        transform: Called with each PyG batch; what it returns is handed out.
        node_data: Further columns by name, rows of all nodes [N, ...], handed out as fields of a
            PyG batch; by node type, and rows of that type, in a typed graph.
        edge_data: Further columns by name, a row per edge of the imported source, likewise.
        neg_sampling: Form in which links are handed out, triplet or binary, as PyG names them.
        neg_sampling_ratio: Binary form, with the plan's number of negatives.
        rank: This rank; None asks torch.distributed, then torchrun's environment.
        size: Number of ranks; as `rank`.
        device: Device of `x` and `y`; "cuda" is the current GPU. A GPU becomes this thread's
            current one, on which kernels of `wrap_model` and of the built-in models start. A plan
            for GPUs wants the rank's: without it the host does all work, with one warning.
        blocks: False gives PyG `Data` (sampler dialect first_seen only).
        padded: Pads each PyG batch to the same sizes, hop by hop, with node_mask, edge_mask and
            seed_mask or link_mask, for a model in a CUDA graph. True takes, of training seeds, the
            shapes of the plan's captured step, else those that 999 of 1,000 batches fit; a number,
            another share. Others come as they are, `padded` False, and are counted in `overflowed`.
            y is -100 but for seeds; e_id comes only with `edge_data` or weights.
        row_dtype: Type of `x`: float32 or the type that the dataset stores; None: of the two what
            the plan's precision reads.
        epoch: First epoch.
        comm: Communicator of exchanges with peers, which training uses too: GPUs send for both in
            one order, and a host's ranks on cores sort a typed graph's lists once, together. None
            makes one where a rank has peers.
        meter: Meter of stage seconds; None makes one.
        on_device: Whether the device draws and gathers by its own kernels, as far as it can; None:
            where it is a GPU. True on the CPU runs them in Triton's interpreter (tests).
        streams: Streams of the device; None makes them.
        others: NeighborLoader's other keywords: those of workers are left out, others are refused
            where they ask for something else than the plan.

    Raises:
        PlanError: The plan is damaged, or for another dataset or number of ranks.
        DatasetError: The dataset has no features.
        InputError: Seeds or columns that the graph does not have.
        TypeError: Keywords that the plan decides, or something else than a folder as the plan.
    """

    def __init__(
        self,
        plan: Path | str | None = None,
        graph: Graph | None = None,
        *,
        input_nodes: Any = "train",
        edge_label_index: Any = None,
        batch_size: int | None = None,
        num_neighbors: Any = None,
        shuffle: bool | None = None,
        drop_last: bool = False,
        transform: Callable[[Any], Any] | None = None,
        node_data: Mapping[str, Any] | None = None,
        edge_data: Mapping[Any, Any] | None = None,
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        rank: int | None = None,
        size: int | None = None,
        device: str | torch.device = "cpu",
        blocks: bool = True,
        padded: bool | float = False,
        row_dtype: torch.dtype | None = torch.float32,
        epoch: int = 0,
        comm: Communicator | None = None,
        meter: StageMeter | None = None,
        on_device: bool | None = None,
        streams: AbstractStreams | None = None,
        **others: Any,
    ) -> None:
        check_keywords(others)
        check_graph(graph)
        self._folder = plan_folder(plan)
        self._planned = made = load_plan(self._folder)
        here, ranks = rank_and_size()
        self.rank = here if rank is None else rank
        self.size = ranks if size is None else size
        _check_ranks(made, self.rank, self.size)
        self.graph = open_planned_graph(made) if graph is None else graph
        check_features(self.graph)
        if comm is None and self.size > 1 and made.strategy.threads.comm == 0:
            make_batch(GLOO_THREADS)  # of the group that a user's script has made
        self.meter = StageMeter() if meter is None else meter
        processor = processor_of(torch.device(device))
        processor.enter_thread()  # kernels are started on the GPU that is this thread's
        self._device, self._row_dtype = processor.device, row_dtype
        if on_device is None:
            say_cores(made, self.rank, self._device)
        self._on_device, self._comm = on_device, comm
        self._lender: PlannedLoader | None = None
        self._streams = streams_of(self._device) if streams is None else streams
        asked: dict[str, Any] = {
            "batch_size": batch_size,
            "num_neighbors": num_neighbors,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        if means_training(self.graph, input_nodes, edge_label_index, shuffle):
            selected = select_training_seeds(made, self.graph, **asked)
        else:
            asked |= {"edge_label_index": edge_label_index, "blocks": blocks}
            selected = select_seeds(made, self.graph, input_nodes, **asked)
        form = link_form(neg_sampling, neg_sampling_ratio, made.workload)
        self._view_of = functools.partial(
            PygView, form=form, node_data=node_data, edge_data=edge_data
        )
        self._open(selected, blocks=blocks, transform=transform, padded=padded, epoch=epoch)

    def over(
        self,
        input_nodes: Any = None,
        *,
        edge_label_index: Any = None,
        batch_size: int | None = None,
        num_neighbors: Any = None,
        shuffle: bool = False,
        drop_last: bool = False,
        transform: Callable[[Any], Any] | None = None,
        blocks: bool | None = None,
        padded: bool | float = False,
        alone: bool = False,
    ) -> "PlannedLoader":
        """Return a loader over this rank's share of other seeds, which reads rows by this store.

        Every rank calls it and adds its sums to the others', as `gnnplan train` does: one rank
        that validates alone covers its share only. For all seeds on one rank give `alone`.

        Arguments are as in the constructor; `input_nodes` None means all nodes, as PyG has it, and
        `blocks` None what this loader hands out. Ranks get as many batches as each other. A GPU
        draws from this one's lists, unless ranks hold them in parts or share batches: then the
        host draws. It closes with this loader, which stays open as long as one of the two is held.
        """
        self._refuse_closed()
        blocks = self._view is None if blocks is None else blocks
        selected = select_seeds(
            self._planned, self.graph, input_nodes, edge_label_index=edge_label_index,
            batch_size=batch_size, num_neighbors=num_neighbors, shuffle=shuffle,
            drop_last=drop_last, blocks=blocks, alone=alone,
        )  # fmt: skip
        made = copy.copy(self)
        made.meter, made._lender = StageMeter(), self
        made._open(selected, blocks=blocks, transform=transform, padded=padded, lender=self._parts)
        self._borrowers.add(made)
        return made

    def _open(
        self,
        selected: Selection,
        *,
        blocks: bool,
        transform: Callable[[Any], Any] | None,
        padded: bool | float,
        epoch: int = 0,
        lender: LoaderParts | None = None,
    ) -> None:
        """Make stages, threads and view for the seeds; `lender` are another loader's parts."""
        self.plan: Plan = selected.plan
        if blocks and transform is not None:
            raise TypeError(
                "PlannedLoader: transform: expected blocks=False, since it takes PyG's Data"
            )
        check_padded(padded, self.plan.workload, blocks=blocks)
        self._selected = selected
        nodes = memory_nodes(self.plan, self.rank)
        with memory_spread_over(nodes):
            self._parts = LoaderParts(
                self.plan, self._folder, selected.graph, rank=self.rank, size=self.size,
                comm=self._comm, meter=self.meter, blocks=blocks, device=self._device,
                on_device=self._on_device, streams=self._streams, shuffle=selected.shuffle,
                drop_last=selected.drop_last,
                alone=selected.alone, row_dtype=self._row_dtype, lender=lender,
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
        # Weak: what makes batches holds this loader, and a dropped one is to end its threads.
        self._ready: Callable[[], Prefetcher[MadeBatch] | None] = lambda: None
        self._borrowers: weakref.WeakSet[PlannedLoader] = weakref.WeakSet()
        self._view = None
        if not blocks:
            shapes = self._parts.padded_shapes(self.stages, padded, epoch) if padded else None
            self._view = self._view_of(
                selected.graph, self.plan.workload, transform=transform, shapes=shapes
            )
        elif self.rank == 0:
            for line in unused_weights(self.plan, self.graph):
                _log.warning("%s", line)
        self.position = Position(self.plan.plan_id, len(self), epoch)
        """Epoch and step of the next batch."""
        self._factor = self.plan.strategy.sampler.parameters.get("factor")
        self.handed_out = 0
        """Number of batches given so far by this process, over epochs."""

    @property
    def overflowed(self) -> int:
        """Number of batches that did not fit padded shapes, and came as they are."""
        return 0 if self._view is None else self._view.overflowed

    @property
    def batch_size(self) -> int:
        """Most seeds (or links) of one of this rank's batches."""
        return -(-self.plan.workload.batch_size // (1 if self._selected.alone else self.size))

    @property
    def dataset(self) -> NDArray[np.int64]:
        """Seeds that an epoch goes over on all ranks: node ids [n], or links [n, 2]."""
        return self._selected.graph.train_idx

    def __len__(self) -> int:
        """Return the optimiser steps per epoch, the same on every rank."""
        return self._parts.schedule.num_steps

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches: all of them, or the rest after `load_state_dict`."""
        self._begin_iteration()
        self.position.begin_epoch()
        yield from self.batches()

    def batches(self, most: int | None = None) -> Iterator[Any]:
        """Yield at most `most` of this epoch's remaining batches; make none beyond them.

        An iteration that is left early goes on here.
        """
        self._begin_iteration()
        epoch, first, base = self.position.epoch, self.position.step, self.handed_out
        room = len(self) * self.plan.workload.batch_size
        count = len(self) - first if most is None else min(most, len(self) - first)
        given = 0

        order = self._order

        def produce(index: int, turns: Turns) -> MadeBatch:
            if order is None:
                return self._make(epoch, first + index, base + index, index, turns)
            with order.failing():
                return self._make(epoch, first + index, base + index, index, turns)

        if order is not None:
            order.begin(count)
        depth = self.plan.strategy.prefetch_depth
        ready = Prefetcher(produce, count, workers=self._workers, depth=depth, meets=self._meets)
        self._ready = weakref.ref(ready)
        try:
            for made in ready:
                batch = take_made(made, self._streams)
                self.position.advance()
                if not self.position.step and room > len(self.dataset):
                    self.meter.small_steps.add(self.handed_out)
                if self._workers.count and not given:
                    self.meter.filling_steps.add(self.handed_out)
                self.handed_out += 1
                given += 1
                if self.position.step in (0, first + count):
                    for stage in self.stages:
                        stage.finish()
                yield batch if self._view is None else self._view(batch)
                del batch, made  # its buffer is free again before the next batch is waited for
                if order is not None:
                    order.next_step()
            if given < count:
                self._refuse_closed()
                raise InputError(
                    f"expected {count} batches of one iteration, found another iteration of the "
                    f"same loader begun after {given} of them; end one first, or go over the seeds "
                    "meanwhile by a loader of their own (loader.over)"
                )
        finally:
            with nullcontext() if order is None else order.leaving():
                ready.close()

    def _begin_iteration(self) -> None:
        """Refuse a closed loader; wait until nothing of an earlier iteration is under way."""
        self._refuse_closed()
        if (ready := self._ready()) is not None:
            ready.close(patience_s=None)

    def _refuse_closed(self) -> None:
        if not self._give_back.alive:
            raise InputError(
                "expected an open loader, found one that was closed (itself, or the one whose rows "
                "it reads); make another one"
            )

    def set_epoch(self, epoch: int) -> None:
        """Go to the first step of `epoch`, or stay where `load_state_dict` went within it."""
        self.position.set_epoch(epoch)

    def draw_padded(self) -> None:
        """Hand out steps that devices draw as they are trained on, where all ranks' can.

        For the loop of a captured step alone, whose shapes the plan has. Collective.
        """
        graph, schedule, comm = self._selected.graph, self._parts.schedule, self._comm
        padded = padded_stage(self.stages, self.plan, graph, schedule, self.meter, comm)
        if padded is not None:  # ranks no longer meet in batches, nor wait for each other there
            self.stages, self._meets = [padded], False
            self._order = self._parts.order(self._workers.count, self.stages)

    def sorted_lists(self) -> SortedByType | None:
        """Return a typed graph's lists by type, else None; all ranks call it, for validation."""
        return self._parts.sorted_lists(all_ranks=True)

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
        """End the prefetch threads, give back the feature store, and close loaders over it."""
        for each in list(self._borrowers):
            each.close()
        if (ready := self._ready()) is not None:
            ready.close(at_once=True)
        self._give_back()

    def _make(self, epoch: int, step: int, index: int, turn: int, turns: Turns) -> MadeBatch:
        batch = seed_batch(epoch, step, self._parts.dialect)
        made = pass_through(
            batch, self.stages, self.meter, self._streams, index, turn, turns, self._order
        )
        if (batch := made.batch).lists_by_source:
            self.meter.count_lists(index, batch.lists_by_source, batch.list_bytes_by_source)
        return made


def _give_back(workers: Workers, parts: LoaderParts, order: CollectiveOrder | None) -> None:
    """End a loader's threads; what a stuck one may be reading stays."""
    free = order is None or order.close()
    _ = parts.close() if workers.close() and free else parts.leave()


def _check_ranks(plan: Plan, rank: int, size: int) -> None:
    if size != plan.num_ranks or not 0 <= rank < size:
        raise PlanError(
            f"expected rank 0 to {plan.num_ranks - 1} of {plan.num_ranks} (the plan's devices), "
            f"found rank {rank} of {size}"
        )
