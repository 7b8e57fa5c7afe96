"""Stages of a GPU, for a plan's draws, rows and labels; `device_place` chooses among them."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.device_rows import as_tensor
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.features.gather import take_labels
from gnnplan.runtime.features.peer import exchange_rows
from gnnplan.runtime.features.tier import Counters, sum_counters
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.bulk import BulkSampleStage, refuse_lists, row_requests
from gnnplan.runtime.loader.cooperative import ExchangeMeter
from gnnplan.runtime.loader.device_place import lock_launches
from gnnplan.runtime.loader.stages import AbstractStage
from gnnplan.runtime.loader.topology import OFFSET_BYTES
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.adjacency import TorchBlock, device_blocks, drawn_blocks
from gnnplan.runtime.models.weights import (
    PaddedGcn,
    count_self_loops,
    full_degrees,
    gcn_blocks,
    refuse_attention,
    sampled_degrees,
)
from gnnplan.runtime.plan.schema import Plan, Workload
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import LinkSchedule, SeedSchedule
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.streams import AbstractMark, AbstractStreams

if TYPE_CHECKING:  # code without Triton names this type too
    from gnnplan.runtime.sampling.gpu.hops import DeviceBatch

_NONE = np.empty(0, np.int64)


class DeviceMiniBatch(MiniBatch):
    """`MiniBatch` around a `DeviceBatch`; training reads `x`, `y` and `device_blocks` alone.

    `n_id` and `blocks` are fetched at the first use, which waits for the device.
    """

    __slots__ = ("_fetched", "drawn")

    def __init__(self, drawn: "DeviceBatch") -> None:
        self._fetched: MiniBatch | None = None
        self.drawn = drawn
        super().__init__(
            blocks=[],
            n_id=_NONE,
            seeds=drawn.seeds,
            input_id=drawn.input_id,
            dialect=drawn.dialect,
            num_sampled_nodes=drawn.num_sampled_nodes,
            num_sampled_edges=drawn.num_sampled_edges,
            global_num_seeds=drawn.global_num_seeds,
            epoch=drawn.epoch,
            step=drawn.step,
        )

    def _host(self) -> MiniBatch:
        if self._fetched is None:
            self._fetched = self.drawn.to_host()
        return self._fetched

    @property
    def n_id(self) -> NDArray[np.int64]:
        """Ids of all vertices, as `MiniBatch.n_id`."""
        return self._host().n_id

    @n_id.setter
    def n_id(self, value: NDArray[np.int64]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not _NONE:
            raise AttributeError("ids that the device drew are not replaced")

    @property
    def links(self) -> NDArray[np.int64] | None:
        """Pairs to score, as `MiniBatch.links`."""
        return None if self.drawn.links is None else self._host().links

    @links.setter
    def links(self, value: NDArray[np.int64] | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value is not None:
            raise AttributeError("links that the device drew are not replaced")

    @property
    def blocks(self) -> list[Block]:
        """Blocks as they were drawn, without a model's weights."""
        return self._host().blocks

    @blocks.setter
    def blocks(self, value: list[Block]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value:
            raise AttributeError("blocks that the device drew are not replaced")


def on_device(ids: Any, device: torch.device) -> Tensor:
    """Return ids of the host's, or the device's own, as a tensor of the device."""
    if isinstance(ids, Tensor):
        return ids
    return torch.from_numpy(np.ascontiguousarray(ids)).to(device)


def tensors_of(batch: MiniBatch) -> Iterator[Tensor]:
    """Yield every tensor that a batch holds now."""
    found: list[Any] = [batch.x, batch.y]
    for block in batch.device_blocks or []:
        found += [block.indptr, block.indices, block.weight, block.relation_ptr, block.src_type]
    for exchange in batch.exchanges:
        found += [exchange.ids, exchange.send_rows]
    if isinstance(batch, DeviceMiniBatch):
        found += [batch.drawn.n_id, batch.drawn.links]
        for drawn in batch.drawn.blocks:
            found += drawn.tensors().values()
    return (each for each in found if isinstance(each, Tensor))


GATHER_LANE = "gather"


@dataclass(frozen=True, slots=True)
class _Counted:
    """Gather whose counts are on their way to the host."""

    index: int
    counts: Tensor
    mark: AbstractMark
    fetched: Counters


class DeviceGatherStage(AbstractStage):
    """Stage that gathers rows by the device's kernel; counts by source come later, unwaited."""

    name = Stage.GATHER
    lane = GATHER_LANE

    def __init__(
        self,
        store: DeviceFeatureStore,
        meter: StageMeter,
        streams: AbstractStreams,
        *,
        ordered: bool,
        row_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.store, self._meter, self._streams = store, meter, streams
        self.ordered, self.row_dtype = ordered, row_dtype
        self._counted: deque[_Counted] = deque()
        self._lock = threading.Lock()

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `x`, and meter the counts that have come."""
        store = self.store
        ids, num_read = self._ids(batch)
        rows, counts = store.empty(ids.numel(), self.row_dtype), store.new_counts()
        with lock_launches(store.device):
            fetched = store.gather(ids[:num_read], rows[:num_read], counts)
        batch.x = rows
        host = torch.empty_like(counts, device="cpu", pin_memory=counts.is_cuda)
        host.copy_(counts, non_blocking=True)
        with self._lock:
            self._counted.append(_Counted(index, host, self._streams.mark(), fetched))
        for stage, seconds in fetched.seconds.items():
            batch.seconds[stage] = seconds
            self._meter.add(stage, index, seconds)
        self._note(wait=False)
        return batch

    def _ids(self, batch: MiniBatch) -> tuple[Tensor, int]:
        """Return the ids of the batch's rows, and how many of the first are read here."""
        drawn = isinstance(batch, DeviceMiniBatch)
        ids = on_device(batch.drawn.n_id if drawn else batch.n_id, self.store.device)
        return ids, ids.numel()

    def finish(self) -> None:
        """Wait for every gather and meter it; raise IndexError for ids outside the graph."""
        self._note(wait=True)

    def _note(self, *, wait: bool) -> None:
        with self._lock:
            while self._counted:
                each = self._counted[0]
                if wait:
                    each.mark.synchronize()
                elif not each.mark.done():
                    return
                self._counted.popleft()
                found = sum_counters([self.store.named(each.counts.tolist()), each.fetched])
                self._meter.count(each.index, found.rows, found.bytes)


class DeviceBatchStage(AbstractStage):
    """Stage of labels, and of blocks with the model's weights, made where they were drawn."""

    name = Stage.BATCH
    lane = GATHER_LANE

    def __init__(
        self,
        graph: Graph,
        workload: Workload,
        device: torch.device,
        fill_on_host: Callable[[MiniBatch], MiniBatch],
        *,
        weighted: bool,
    ) -> None:
        """Put labels, and what the model needs of degrees, on the device.

        `fill_on_host` fills weights of batches that the host drew; `weighted` says that batches are
        handed out as blocks.
        """
        self._labels = None if graph.y is None else np.asarray(graph.y)
        self._device, self._fill_on_host = device, fill_on_host
        self._workload = workload
        self._gcn = weighted and workload.model == "gcn"
        self._degree = self._loops = None
        loops = count_self_loops(graph.indptr, graph.indices) if self._gcn else None
        self._may_loop = loops is not None
        if self._gcn and workload.gcn_norm == "full":
            degree = np.diff(np.asarray(graph.indptr).view(np.ndarray))
            self._degree = torch.from_numpy(degree.astype(np.int64)).to(device)
            self._loops = None if loops is None else torch.from_numpy(loops).to(device)

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `y` and the blocks on the device."""
        del index
        if isinstance(batch, DeviceMiniBatch):
            batch.device_blocks = self._weighted(batch)
        else:
            batch = self._fill_on_host(batch)
            if processor_of(self._device).apart:
                batch.device_blocks = device_blocks(batch, self._device)
        links = batch.drawn.links if isinstance(batch, DeviceMiniBatch) else batch.links
        if links is not None:
            batch.y = on_device(links, self._device)
        elif self._labels is not None:
            labels = torch.from_numpy(take_labels(self._labels, batch.seeds))
            batch.y = labels.to(self._device, non_blocking=True)
        return batch

    def padded_weights(self, dialect: Dialect) -> PaddedGcn | None:
        """Return what gives padded batches the model's weights; None where they have none."""
        if not self._gcn:
            return None
        return PaddedGcn(
            self._degree, self._loops, nested=dialect is Dialect.FIRST_SEEN, may_loop=self._may_loop
        )

    def _weighted(self, batch: DeviceMiniBatch) -> list[TorchBlock]:
        blocks = drawn_blocks(batch.drawn)
        refuse_attention(self._workload, [block.weight is not None for block in blocks])
        if not self._gcn:
            return blocks
        if self._degree is not None:
            degree, loops = self._degree, self._loops
            # Blocks of a shared batch have sources of their own.
            sources = [exchange.ids for exchange in batch.exchanges]
            sources = sources or [batch.drawn.n_id] * len(blocks)
            pairs = zip(blocks, sources, strict=True)
            degrees = [full_degrees(block, n_id, degree, loops) for block, n_id in pairs]
        else:
            whole = blocks[0] if batch.dialect is Dialect.FIRST_SEEN else None
            degrees = [sampled_degrees(block, whole) for block in blocks]
        return gcn_blocks(blocks, degrees, may_loop=self._may_loop)


SAMPLE_LANE = "sample"


class DeviceSampleStage(AbstractStage):
    """Stage that draws and relabels on the device; ids and blocks stay there."""

    name = Stage.SAMPLE
    lane = SAMPLE_LANE

    def __init__(
        self, sampler: Any, device: torch.device, meter: StageMeter, *, counted: bool
    ) -> None:
        """Draw by a sampler of `open_device_sampler`; meter its lists where they are `counted`."""
        self.device, self._meter, self._last = device, meter, 0
        self._counted = counted
        self.sampler = sampler

    @property
    def resident_bytes(self) -> int:
        """Bytes of adjacency lists and tables on the device."""
        return self.sampler.topology.device_bytes

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Replace the seed batch by the sampled one."""
        self.reach(index)
        with self._launching():
            drawn = self.sampler.sample(
                *self._asked(batch),
                epoch=batch.epoch,
                step=batch.step,
                input_id=batch.input_id,
                global_num_seeds=batch.global_num_seeds,
            )
        return DeviceMiniBatch(drawn)

    def _asked(self, batch: MiniBatch) -> tuple[NDArray[np.int64], ...]:
        """Return what the sampler draws a batch of."""
        return (batch.seeds,)

    def _launching(self) -> AbstractContextManager[object]:
        return lock_launches(self.device)

    def reach(self, index: int) -> None:
        """Note the latest step, with which lists are metered."""
        self._last = max(self._last, index)

    def finish(self) -> None:
        """Meter the lists read so far, where the plan places them; waits for the device."""
        if not self._counted:
            return
        topology, lists, sizes = self.sampler.topology, dict[str, int](), dict[str, int]()
        for place, reads in topology.reads().items():
            kind = "own" if place == "device" else str(place)
            if reads.rows:
                lists[kind] = reads.rows
                sizes[kind] = reads.entries * topology.indices.element_size()
        # The offsets of every list lie on the device.
        sizes["own"] = sizes.get("own", 0) + OFFSET_BYTES * sum(lists.values())
        self._meter.count_lists(self._last, lists, sizes)


class LinkDeviceSampleStage(DeviceSampleStage):
    """Stage that draws links' negatives and neighbours on the device."""

    def __init__(
        self, sampler: Any, device: torch.device, meter: StageMeter, schedule: LinkSchedule
    ) -> None:
        super().__init__(sampler, device, meter, counted=False)
        self._schedule = schedule

    def _asked(self, batch: MiniBatch) -> tuple[NDArray[np.int64], ...]:
        assert batch.links is not None
        return batch.links, self._schedule.step_pairs(batch.epoch, batch.step)


class DeviceBulkStage(BulkSampleStage):
    """Stage that draws k steps at once on the device, alone or with the other ranks of a grid."""

    lane = SAMPLE_LANE

    def __init__(
        self, drawing: DeviceSampleStage, plan: Plan, schedule: SeedSchedule, in_flight: int
    ) -> None:
        from gnnplan.runtime.sampling.gpu.stack import (
            GridTopology,
            StackedBatches,
            stack_of,
            with_own_tensors,
        )

        topology = drawing.sampler.topology
        grid = topology.rows.grid if isinstance(topology, GridTopology) else None
        if grid is None:
            refuse_lists(plan)
        self._drawing, self._own_tensors, self._meets = drawing, with_own_tensors, grid is not None
        budget = plan.strategy.bulk_bytes or None
        stacked = StackedBatches(stack_of(drawing.sampler), budget, 2 * in_flight, grid)
        ranks = [schedule.rank] if grid is None else grid.ranks_of_row()

        def draw(epoch: int, steps: range) -> Iterator[list[MiniBatch]]:
            for stack in stacked.stacks(row_requests(schedule, epoch, steps, ranks)):
                yield [DeviceMiniBatch(batch) for batch in stack]

        k = plan.strategy.bulk_batches
        super().__init__(draw, schedule.num_steps, k, in_flight, grid)

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Return the sampled batch of the batch's epoch and step."""
        self._drawing.reach(index)
        # Nobody waits for other ranks with a lock held.
        with nullcontext() if self._meets else lock_launches(self._drawing.device):
            return super().submit(batch, index)

    def own(self, batch: MiniBatch) -> MiniBatch:
        """Give a batch tensors of its own, as `BulkSampleStage.own`."""
        assert isinstance(batch, DeviceMiniBatch)
        return DeviceMiniBatch(self._own_tensors(batch.drawn))

    def finish(self) -> None:
        """Meter the lists read so far."""
        self._drawing.finish()


class CooperativeDeviceSampleStage(DeviceSampleStage):
    """Stage that draws hop by hop on the device, with an all-to-all of ids after each hop."""

    ordered = True

    def __init__(
        self, sampler: Any, device: torch.device, meter: StageMeter, comm: Communicator, *,
        counted: bool,
    ) -> None:  # fmt: skip
        super().__init__(sampler, device, meter, counted=counted)
        self._exchanged = ExchangeMeter(comm, meter, Stage.EXCHANGE_IDS)

    def _launching(self) -> AbstractContextManager[object]:
        return nullcontext()  # nobody waits for other ranks with a lock held

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Draw the rank's part of the batch, and meter the exchanges apart."""
        self._exchanged.begin()
        batch = super().submit(batch, index)
        batch.exchanges = self.sampler.exchanges
        self._exchanged.end(batch, index)
        return batch


class CooperativeDeviceGatherStage(DeviceGatherStage):
    """Stage that gathers own rows on the device and sends them to who needs them."""

    def __init__(
        self,
        store: DeviceFeatureStore,
        meter: StageMeter,
        streams: AbstractStreams,
        comm: Communicator,
        *,
        wire_dtype: Any = np.float32,
    ) -> None:
        super().__init__(store, meter, streams, ordered=True)
        self._comm = comm
        self._exchanged = ExchangeMeter(comm, meter, Stage.EXCHANGE_ROWS)
        self._wire_dtype = as_tensor(np.empty(0, wire_dtype)).dtype

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `x` with own rows from the store and the others from their owners."""
        batch = super().submit(batch, index)
        exchange = batch.exchanges[0]
        self._exchanged.begin()
        own, remote = batch.x[: exchange.num_own], batch.x[exchange.num_own :]
        received = exchange_rows(
            self._comm,
            own.index_select(0, on_device(exchange.send_rows, own.device)).to(self._wire_dtype),
            exchange.send_counts,
            exchange.receive_counts,
        )
        remote.copy_(received)
        waited = batch.seconds.pop(Stage.EXCHANGE_ROWS, 0.0)
        self._exchanged.end(batch, index, waited)
        return batch

    def _ids(self, batch: MiniBatch) -> tuple[Tensor, int]:
        exchange = batch.exchanges[0]
        return on_device(exchange.ids, self.store.device), exchange.num_own
