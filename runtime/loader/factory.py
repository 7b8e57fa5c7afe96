"""Assembly of a plan's loader: schedule, store, topology, sampler and stages.

One object serves a loader when it opens, and again where a sampler changes while training.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.comm.order import CollectiveOrder
from gnnplan.runtime.errors import DatasetError, InputError, PlanError
from gnnplan.runtime.features.device_rows import HostShare, PinError
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.features.store import TypedFeatureStore, open_store
from gnnplan.runtime.features.tier import AbstractFeatureStore
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.loader.bulk import BulkSampleStage, bulk_stage, grid_stage, refuse_bulk
from gnnplan.runtime.loader.cooperative import (
    Cooperation,
    CooperativeGatherStage,
    CooperativeSampleStage,
    fill_cooperative_weights,
)
from gnnplan.runtime.loader.device import (
    CooperativeDeviceGatherStage,
    CooperativeDeviceSampleStage,
    DeviceBatchStage,
    DeviceBulkStage,
    DeviceGatherStage,
    DeviceSampleStage,
    LinkDeviceSampleStage,
)
from gnnplan.runtime.loader.device_place import (
    device_place,
    may_pin,
    open_device_sampler,
    say_host_samples,
    threads_ahead,
    try_device_store,
)
from gnnplan.runtime.loader.stages import (
    AbstractStage,
    BatchStage,
    BufferRing,
    CopyStage,
    GatherStage,
    LinkShareStage,
    SampleStage,
    SeedsStage,
    link_stages,
    seed_batch,
)
from gnnplan.runtime.loader.topology import Topology, sort_lists
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.weights import count_degrees, fill_weights
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan, Sampler
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.build import BatchSampler, build_sampler
from gnnplan.runtime.sampling.memory import HopShapes
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER, find_sampler, is_default
from gnnplan.runtime.sampling.seeds import LinkSchedule, SeedSchedule, ShardSchedule
from gnnplan.runtime.sampling.typed import SortedByType, typed_sampler
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.overlap import IN_READ
from gnnplan.runtime.train.precision import DTYPES
from gnnplan.runtime.train.streams import AbstractStreams

PADDED_SHARE = 0.999
"""Share of batches that fit padded shapes where neither script nor plan says another."""
_PILOT_STEPS = 32
"""Batches that are drawn to estimate padded shapes."""


class LoaderParts:
    """Parts of one rank's loader under a plan; arguments as in `PlannedLoader`.

    `blocks` says that batches are handed out as blocks, not as PyG `Data`; `on_device` is the
    request to `device_place`; `lender` are another loader's, whose store and lists these read and
    do not close. PlanError says what cannot be combined, DatasetError what the dataset lacks.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        graph: Graph,
        *,
        rank: int,
        size: int,
        comm: Communicator | None,
        meter: StageMeter,
        blocks: bool,
        device: torch.device,
        on_device: bool | None,
        streams: AbstractStreams,
        shuffle: bool = True,
        drop_last: bool = False,
        alone: bool = False,
        row_dtype: torch.dtype | None = torch.float32,
        lender: "LoaderParts | None" = None,
    ) -> None:
        ranks, own = (1, 0) if alone else (size, rank)
        self._seeds: dict[str, Any] = {
            "shuffle": shuffle, "drop_last": drop_last, "num_ranks": ranks, "rank": own,
        }  # fmt: skip
        self._lender, self._lent, self._is_left = lender, lender is not None, False
        self._lists = None if lender is None else lender.lend_lists()
        self._sorted = None if lender is None else lender._sorted
        self.plan, self.graph, self.rank, self.size = plan, graph, rank, size
        self.meter, self._streams = meter, streams
        self.place = device_place(plan, graph, device, asked=on_device)
        if self._lent and self._lists is None:
            self.place = replace(self.place, samples=False)
        self._folder, self._comm, self._as_blocks = folder, comm, blocks
        self._row_dtype = _type_of_rows(plan, graph, row_dtype)
        self.dialect = Dialect(plan.strategy.sampler.dialect)
        self.cooperation = self._cooperate(comm)
        self.schedule = self._make_schedule()
        self.store: AbstractFeatureStore = (
            self._open_store(comm) if lender is None else lender.store
        )
        self._drawing: DeviceSampleStage | None = None
        self._bulk: BulkSampleStage | None = None
        self._ordered: tuple[Communicator, CollectiveOrder] | None = None

    def close(self) -> None:
        """Give back the feature store, once the device has read it, and the process groups."""
        self._end_order()
        if not (self._lent or self._is_left):
            if self.place.gathers or self.place.samples:
                with contextlib.suppress(RuntimeError):  # a GPU that has failed reads nothing
                    processor_of(self.place.device).synchronize()
            self.store.close()
        if self._bulk is not None:
            self._bulk.close()
        if self.cooperation is not None:
            self.cooperation.close()

    def leave(self) -> None:
        """Keep the rows for good, the lender's too, because a stuck thread may be reading them."""
        self._is_left = True
        if self._lender is not None:
            self._lender.leave()

    @functools.cached_property
    def _host_topology(self) -> Topology:
        """Adjacency lists that the host's samplers read."""
        return Topology(self.graph, self.plan, self._folder, self.rank)

    def lend_lists(self) -> Any:
        """Return the lists that the device draws from, for another loader; None: ranks share them.

        Its reads are counted apart.
        """
        alone = self.cooperation is None and self.plan.strategy.topology.policy != "partitioned"
        drawing = self._drawing if alone else None
        return None if drawing is None else drawing.sampler.topology.lend()

    @property
    def topology(self) -> Topology | DeviceSampleStage:
        """Holder of the adjacency lists that batches are drawn from."""
        return self._host_topology if self._drawing is None else self._drawing

    @property
    def num_threads(self) -> int:
        """Number of prefetch threads that may exchange beside the training thread."""
        comm = self._comm
        if self._lent and comm is not None and comm.between_gpus:
            return 0  # the lender's order is the only one
        return threads_ahead(self.plan, self.store, comm, self.place.device)

    def order(self, threads: int, stages: Sequence[AbstractStage]) -> CollectiveOrder | None:
        """Make the order of what GPUs send in batches and in training; None where none is needed.

        The communicator that was given, which training uses too, follows it until `close`, or until
        stages are ordered anew.
        """
        self._end_order()
        comm, meetings = self._comm, sum(stage.ordered for stage in stages)
        if self._lent or comm is None or not (threads and meetings and comm.between_gpus):
            return None
        made = CollectiveOrder(meetings, self._streams.enter_thread)
        comm.follow(made)
        self._ordered = comm, made
        return made

    def _end_order(self) -> None:
        if self._ordered is not None:
            comm, order = self._ordered
            comm.follow(None)
            order.close()
            self._ordered = None

    def stages(self) -> list[AbstractStage]:
        """Build the plan's pipeline for the loader's device."""
        strategy, device = self.plan.strategy, self.place.device
        exchanges = any(s.kind in ("peer", "remote") for s in strategy.features.sources)
        # A dynamic cache too takes its batches in order, so that what it hits can be repeated.
        in_order = (self.size > 1 and exchanges) or strategy.features.cache.policy != "none"
        seeds, sample = self._first_stages()
        made: dict[str, AbstractStage] = {
            "seeds": seeds,
            "sample": sample,
            "gather": self._gather_stage(ordered=in_order),
            "copy": CopyStage(device, self._streams),
            "batch": self._batch_stage(),
        }
        processor = processor_of(device)
        names = [name for name in strategy.pipeline if name not in IN_READ]
        if processor.is_gpu and "copy" not in names:
            names.insert(names.index("gather") + 1, "copy")
        unknown = [name for name in names if name not in made]
        if unknown or names[:1] != ["seeds"] or "sample" not in names or "gather" not in names:
            raise PlanError(
                f"expected a pipeline of {', '.join(made)}, found "
                f"{', '.join(strategy.pipeline)}; plan again"
            )
        processor.synchronize()  # tables were filled on this thread's stream, not on the lanes
        return [made[name] for name in names]

    def padded_shapes(
        self, stages: Sequence[AbstractStage], padded: bool | float, epoch: int
    ) -> HopShapes:
        """Return the plan's shapes, or estimate those that a share of batches fit.

        The first batches are drawn for that, of one epoch after the other: on all ranks the same
        steps. An epoch's last, smaller batch may have more new nodes in its last hop than others.
        """
        planned, most = self.plan.strategy.shapes, max(1, self.schedule.largest_share())
        links = self.graph.task == "link"
        if padded == 1 and planned is not None and not links:
            known = HopShapes.of_plan(most, planned.rows, planned.edges)
            if known is not None:
                return known
        names = [stage.name for stage in stages]
        drawing = stages[: names.index(Stage.SAMPLE) + 1]
        counts: dict[int, list[tuple[int, ...]]] = {}
        for number in range(_PILOT_STEPS):
            later, step = divmod(number, self.schedule.num_steps)
            batch = seed_batch(epoch + later, step, self.dialect)
            for stage in drawing:
                batch = stage.wait(stage.submit(batch, 0))
            sizes = (*batch.num_sampled_nodes, *batch.num_sampled_edges)
            counts.setdefault(len(batch.input_id), []).append(sizes)
        share = padded if padded < 1 else PADDED_SHARE
        known = {"batch_size": 0, "links": most} if links else {"batch_size": most}
        return HopShapes.over(
            [HopShapes.of_quantile(each, share, **known) for each in counts.values()]
        )

    def _gather_stage(self, *, ordered: bool) -> AbstractStage:
        shared = self.cooperation
        if isinstance(self.store, DeviceFeatureStore):
            where = (self.store, self.meter, self._streams)
            if shared is None:
                return DeviceGatherStage(*where, ordered=ordered, row_dtype=self._row_dtype)
            return CooperativeDeviceGatherStage(*where, shared.rows, wire_dtype=shared.wire_dtype)
        processor = processor_of(self.place.device)
        pinned = processor.is_gpu and not processor.emulated and may_pin()
        depth = self.plan.strategy.prefetch_depth
        ring = BufferRing(depth + 2, self.store.feature_dim, pinned=pinned, dtype=self._row_dtype)
        if shared is None:
            return GatherStage(self.store, ring, self.meter, ordered=ordered)
        return CooperativeGatherStage(
            self.store, ring, self.meter, shared.rows, wire_dtype=shared.wire_dtype
        )

    def _batch_stage(self) -> AbstractStage:
        graph, workload, device = self.graph, self.plan.workload, self.place.device
        if self.place.samples:
            return DeviceBatchStage(
                graph, workload, device, self._weights(), weighted=self._as_blocks
            )
        return BatchStage(graph, workload, device, self._weights())

    def _first_stages(self) -> tuple[AbstractStage, AbstractStage]:
        if self.cooperation is not None:
            seeds = SeedsStage(self.cooperation.schedule, self.dialect)
            return seeds, self._shared_stage(self.cooperation)
        workload, edge_ids = self.plan.workload, not self._as_blocks
        if isinstance(self.schedule, LinkSchedule):
            self._refuse_variants("task link")
            if drawing := self._draw_on_device(self.schedule):
                return LinkShareStage(self.schedule), drawing
            settings = {"dialect": self.dialect, "seed": workload.seed, "edge_ids": edge_ids}
            return link_stages(self._host_topology.graph, workload, self.schedule, settings)
        if is_typed(workload):
            self._refuse_variants("model rgcn")
            if self.plan.strategy.topology.policy not in ("host", "replicated"):
                raise PlanError(
                    f"model rgcn: expected topology host or replicated, found "
                    f"{self.plan.strategy.topology.policy}; plan again"
                )
            if drawing := self._draw_on_device(self.schedule):
                return SeedsStage(self.schedule, self.dialect), drawing
            # A device that was refused its lists does not take the other ranks' along.
            lists = self.sorted_lists(all_ranks=not self.place.samples)
            typed = typed_sampler(
                self.graph, workload, lists=lists, dialect=self.dialect, edge_ids=edge_ids
            )
            return SeedsStage(self.schedule, self.dialect), SampleStage(typed)
        return SeedsStage(self.schedule, self.dialect), self._sample_stage(self.schedule)

    def sorted_lists(self, *, all_ranks: bool) -> SortedByType | None:
        """Return a typed graph's lists by type, as the host's samplers read them; None for others.

        If `all_ranks` call, with training's communicator those of a host sort once; collective.
        """
        if self._sorted is not None or not is_typed(self.plan.workload):
            return self._sorted
        together = all_ranks and self._comm is not None and not self._lent
        share = HostShare.of(self.plan, self.rank, self._comm) if together else None
        found = sort_lists(self.graph, share, keep_order=not self._as_blocks)
        self._sorted = None if self.place.samples else found  # kept where the host draws
        return found

    def _refuse_variants(self, what: str) -> None:
        """Refuse all but the default sampler, drawn step by step over a whole topology."""
        refuse_bulk(self.plan, what)
        named = self.plan.strategy.sampler
        if not is_default(named.name, named.parameters):
            raise PlanError(
                f"{what}: expected sampler {DEFAULT_SAMPLER} without parameters, found "
                f"{named.name}; plan again"
            )

    def _sample_stage(self, schedule: SeedSchedule) -> AbstractStage:
        """Build the stage that draws step by step, in bulk, or over the ranks' grid."""
        strategy, in_flight = self.plan.strategy, self.plan.strategy.prefetch_depth + 1
        in_parts = strategy.topology.policy == "partitioned"
        if drawing := self._draw_on_device(schedule):
            if strategy.bulk_batches > 1 or in_parts:
                self._bulk = DeviceBulkStage(drawing, self.plan, schedule, in_flight)
            return self._bulk or drawing
        if in_parts:
            self._bulk = grid_stage(
                self.plan, self.graph, schedule, self._comm, edge_ids=not self._as_blocks,
                in_flight=in_flight,
            )  # fmt: skip
            return self._bulk
        sampler = self.sampler(strategy.sampler)
        if strategy.bulk_batches == 1:
            return SampleStage(sampler)
        return bulk_stage(self.plan, schedule, sampler, in_flight=in_flight)

    def _draw_on_device(self, schedule: SeedSchedule | LinkSchedule) -> DeviceSampleStage | None:
        """Build the stage that draws on the device, where it can; say why where it cannot."""
        if self.place.samples:
            try:
                self._drawing = self._device_stage(schedule)
            except (RuntimeError, PinError) as error:  # the topology does not let itself be locked
                if self.plan.strategy.topology.policy == "partitioned":  # other ranks wait for it
                    raise
                say_host_samples(error)
        return self._drawing

    def _shared_stage(self, cooperation: Cooperation) -> AbstractStage:
        """Build the stage that draws this rank's part of a batch, with the other ranks."""
        if drawing := self._draw_on_device(self.schedule):
            return drawing
        shared = cooperation.sampler(self._host_topology.graph, self.schedule.num_steps)
        counted = self._host_topology.counted(shared, self.plan.strategy.sampler.name)
        return CooperativeSampleStage(counted, cooperation.ids, self.meter)

    def _device_stage(self, schedule: SeedSchedule | LinkSchedule) -> DeviceSampleStage:
        """Build the stage that draws on the device, over the topology where the plan places it.

        A host that refuses to page-lock it raises RuntimeError.
        """
        device = self.place.device
        sampler = open_device_sampler(
            self.plan, self._folder, self.graph, self.rank, device, edge_ids=not self._as_blocks,
            num_steps=schedule.num_steps, share=schedule.largest_share(), comm=self._comm,
            lent=self._lists,
        )  # fmt: skip
        if isinstance(schedule, LinkSchedule):
            return LinkDeviceSampleStage(sampler, device, self.meter, schedule)
        counted = self.plan.strategy.topology.policy in ("replicated", "cached")
        if self.cooperation is not None:
            shared = self.cooperation.device_sampler(sampler)
            comm = self.cooperation.ids
            return CooperativeDeviceSampleStage(shared, device, self.meter, comm, counted=counted)
        return DeviceSampleStage(sampler, device, self.meter, counted=counted)

    def sampler(self, named: Sampler) -> BatchSampler:
        """Build a sampler for nodes of one type, by the plan's name and parameters."""
        local = None
        if find_sampler(named.name).prefers_local:
            local = load_array(self.plan, self._folder, f"feature_own_ids_{self.rank}")
        sampler = build_sampler(
            named,
            self._host_topology.graph.indptr,
            self._host_topology.graph.indices,
            self.plan.workload.fanouts,
            self.plan.workload.seed,
            edge_ids=not self._as_blocks,
            edge_weight=self.graph.edge_weight,
            local=local,
            steps_per_epoch=self.schedule.num_steps,
        )
        return self._host_topology.counted(sampler, named.name)

    def _weights(self) -> Any:
        """Build the function that fills a batch's edge weights, from full degrees for GCN."""
        workload, lists = self.plan.workload, (self.graph.indptr, self.graph.indices)
        full = workload.model == "gcn" and self._as_blocks and workload.gcn_norm == "full"
        count = functools.cache(lambda: count_degrees(*lists) if full else (None, None))
        if not self.place.samples:  # a device that draws has degrees of its own
            count()

        def fill(batch: MiniBatch) -> MiniBatch:
            if not self._as_blocks:
                return batch
            degree, loops = count()
            if batch.exchanges:
                return fill_cooperative_weights(batch, workload, degree, loops)
            return fill_weights(batch, workload, degree, self_loops=loops)

        return fill

    def _cooperate(self, comm: Communicator | None) -> Cooperation | None:
        strategy = self.plan.strategy
        if strategy.batching != "cooperative":
            return None
        if not self._as_blocks:
            raise PlanError(
                "cooperative batches: expected blocks=True (a rank holds no edge_index of its own "
                "seeds' subgraph); use the blocks, or plan with --batching independent"
            )
        partition = None
        if strategy.owner == "partition":
            partition = load_array(self.plan, self._folder, "partition")
        return Cooperation(self.plan, self.graph, partition, self.rank, comm)

    def _make_schedule(self) -> SeedSchedule | LinkSchedule:
        if self.cooperation is not None:
            return self.cooperation.schedule
        made: Any = LinkSchedule if self.graph.task == "link" else SeedSchedule
        if made is SeedSchedule and self.plan.strategy.partition != "none" and not self._lent:
            parts = load_array(self.plan, self._folder, "partition")
            made = functools.partial(ShardSchedule, parts=parts)
        return made(
            self.graph.train_idx,
            self.plan.workload.batch_size,
            seed=self.plan.workload.seed,
            **self._seeds,
        )

    def _open_store(self, comm: Communicator | None) -> AbstractFeatureStore:
        if self.graph.x_by_type:
            if not is_typed(self.plan.workload):
                raise DatasetError(
                    f"{self.graph.path}: expected model rgcn for features by node type, found "
                    f"{self.plan.workload.model}; choose rgcn"
                )
            # The whole host store reads in one pass what no plan places elsewhere.
            if not (self.place.gathers or _places_rows(self.plan)):
                return TypedFeatureStore(self.graph)
        if self.place.gathers:
            found = try_device_store(
                self.place, self.graph, self.plan, self._folder, self.rank, comm
            )
            if found is not None:
                return found
        where, threads = (self.plan, self._folder, self.rank), self.plan.strategy.threads.gather
        return open_store(self.graph, *where, comm=comm, threads=threads)


def _type_of_rows(plan: Plan, graph: Graph, asked: torch.dtype | None) -> torch.dtype:
    """Return the type of rows that are handed out; InputError for one that would change values."""
    name = plan.strategy.features.storage_dtype
    plain = graph.x_csr is None and name == graph.feature_dtype
    stored = DTYPES.get(name, torch.float32) if plain else torch.float32
    if plan.strategy.batching == "cooperative":  # rows of other ranks come in float32
        stored = torch.float32
    if asked is None:
        return stored if plan.workload.precision == name else torch.float32
    if asked not in (torch.float32, stored):
        known = " or ".join(sorted({"torch.float32", str(stored)}))
        raise InputError(
            f"row_dtype: expected {known}, found {asked}; import the graph with "
            f"--feature-dtype, or convert the batch"
        )
    return asked


def _places_rows(plan: Plan) -> bool:
    """Tell whether a plan has rows elsewhere than on the host."""
    features = plan.strategy.features
    on_disk = any(source.kind == "disk" for source in features.sources)
    return any(features.own_rows) or on_disk or features.cache.policy != "none"
