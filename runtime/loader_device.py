"""The loader's stages on a GPU: batches drawn and gathered by the device, under the same plan.

Which stages the device takes over follows from the plan: the rank's own kind, its sampler, where
topology and rows lie. What the device does not do (link prediction, typed graphs, bulk and
cooperative batches, sparse features) stays with the host's stages, and so does everything where a
kernel's compiler or page-locked memory is lacking, with one warning. Batches and losses are the
same either way.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runtime.comm.collectives import Communicator
from runtime.fallback import has_triton, warn_once
from runtime.features.counters import Counters, total
from runtime.features.device_rows import PinError
from runtime.features.device_store import DeviceFeatureStore
from runtime.features.labels import take_labels
from runtime.graph.dataset import Graph
from runtime.loader_device_batch import DeviceMiniBatch, drawn_blocks
from runtime.loader_device_sampler import open_device_sampler, refusal
from runtime.loader_stages import AbstractStage
from runtime.loader_topology import OFFSET_BYTES
from runtime.meter import StageMeter
from runtime.models.adjacency import TorchBlock, device_blocks
from runtime.models.weights import count_self_loops, refuse_attention
from runtime.models.weights_device import full_degrees, gcn_blocks, sampled_degrees
from runtime.plan import Plan, Workload
from runtime.sampling.minibatch import Dialect, MiniBatch
from runtime.stages import Stage
from runtime.train.streams import AbstractMark, AbstractStreams

SAMPLE_LANE, GATHER_LANE = "sample", "gather"
_interpreter = threading.Lock()
"""Triton's interpreter changes its language while a kernel runs: one thread at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlace:
    """What the device does itself."""

    device: torch.device
    gathers: bool = False
    samples: bool = False


def device_place(
    plan: Plan, graph: Graph, device: torch.device, *, asked: bool | None
) -> DevicePlace:
    """Which of a plan's stages run on the device.

    Args:
        plan: the plan.
        graph: its dataset.
        device: where the model runs.
        asked: True and False decide, as far as the device can; None: wherever it is a GPU.
    """
    if not (device.type == "cuda" if asked is None else asked):
        return DevicePlace(device=device)
    if not has_triton():
        warn_once(
            "triton",
            "batches are drawn and gathered by the host's processor, because Triton is not "
            "installed; pip install 'gnnplan[gpu]' (gnnplan doctor says more)",
        )
        return DevicePlace(device=device)
    dense = graph.x is not None and not graph.x_by_type
    gathers = dense and plan.strategy.batching == "independent"
    return DevicePlace(device=device, gathers=gathers, samples=gathers and not refusal(plan, graph))


def try_device_store(
    place: DevicePlace,
    graph: Graph,
    plan: Plan,
    folder: Path,
    rank: int,
    comm: Communicator | None,
) -> DeviceFeatureStore | None:
    """The plan's store on the device; None, with a warning, where memory cannot be page-locked.

    Every rank comes to the same answer, because with peers in the plan reads are collective.
    """
    from runtime.features.device_open import open_device_store

    store, why = None, ""
    try:
        store = open_device_store(
            graph, plan, folder, rank, place.device, comm=comm,
            threads=plan.strategy.threads.gather,
        )  # fmt: skip
    except PinError as error:
        why = str(error)
    if any(source.kind in ("peer", "remote") for source in plan.strategy.features.sources):
        everyone = (Communicator() if comm is None else comm).all_gather_objects(why)
        why = next((each for each in everyone if each), "")
    if not why:
        return store
    if store is not None:
        store.close()
    warn_once("pinned rows", f"rows are gathered by the host's processor and copied, because {why}")
    return None


def say_host_samples(error: BaseException) -> None:
    """Warn that the host draws the batches, because the device was refused the topology."""
    warn_once(
        "pinned topology",
        "batches are drawn by the host's processor, because the topology finds no place for the "
        f"GPU to read ({' '.join(str(error).split())}); raise the limit on locked memory (ulimit "
        "-l unlimited, docker --ulimit memlock=-1), or plan again",
    )


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Held while kernels are launched: by any number of threads on a GPU, by one elsewhere."""
    return nullcontext() if device.type == "cuda" else _interpreter


def may_pin() -> bool:
    """Whether buffers of a batch's size can be page-locked; copies wait for each other if not."""
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warn_once(
            "pinned buffers",
            "rows are copied to the GPU from ordinary memory, which is slower, because none can "
            f"be page-locked ({' '.join(str(error).split())}); raise the limit on locked memory",
        )
        return False
    return True


class DeviceSampleStage(AbstractStage):
    """Draws and relabels on the device; ids and blocks stay there."""

    name = Stage.SAMPLE
    lane = SAMPLE_LANE

    def __init__(self, plan: Plan, folder: Path, graph: Graph, rank: int, place: DevicePlace,
                 meter: StageMeter, *, edge_ids: bool, num_steps: int) -> None:  # fmt: skip
        """Place the topology as the plan says.

        Raises:
            RuntimeError: the host refuses to page-lock it.
        """
        self._device, self._meter, self._last = place.device, meter, 0
        self._counted = plan.strategy.topology.policy in ("replicated", "cached")
        self._sampler = open_device_sampler(
            plan, folder, graph, rank, place.device, edge_ids=edge_ids, num_steps=num_steps
        )

    @property
    def resident_bytes(self) -> int:
        """Bytes of adjacency lists and tables on the device."""
        return self._sampler.topology.device_bytes

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Replace the seed batch by the sampled one."""
        self._last = max(self._last, index)
        with launching(self._device):
            drawn = self._sampler.sample(
                batch.seeds,
                epoch=batch.epoch,
                step=batch.step,
                input_id=batch.input_id,
                global_num_seeds=batch.global_num_seeds,
            )
        return DeviceMiniBatch(drawn)

    def finish(self) -> None:
        """Meter the lists read so far, where the plan places them; waits for the device."""
        if not self._counted:
            return
        topology, lists, sizes = self._sampler.topology, dict[str, int](), dict[str, int]()
        for place, reads in topology.reads().items():
            kind = "own" if place == "device" else "host"
            if reads.rows:
                lists[kind] = reads.rows
                sizes[kind] = reads.entries * topology.indices.element_size()
        # The offsets of every list lie on the device.
        sizes["own"] = sizes.get("own", 0) + OFFSET_BYTES * sum(lists.values())
        self._meter.count_lists(self._last, lists, sizes)


@dataclass(frozen=True, slots=True)
class _Counted:
    """A gather whose counts are on their way to the host."""

    index: int
    counts: Tensor
    mark: AbstractMark
    fetched: Counters


class DeviceGatherStage(AbstractStage):
    """Gathers rows by the device's kernel; counts by source come later, without a wait."""

    name = Stage.GATHER
    lane = GATHER_LANE

    def __init__(
        self,
        store: DeviceFeatureStore,
        meter: StageMeter,
        streams: AbstractStreams,
        *,
        ordered: bool,
    ) -> None:
        self._store, self._meter, self._streams = store, meter, streams
        self.ordered = ordered
        self._counted: deque[_Counted] = deque()
        self._lock = threading.Lock()

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `x`, and note what was read of each source so far."""
        store = self._store
        if isinstance(batch, DeviceMiniBatch):
            ids = batch.drawn.n_id
        else:
            ids = torch.from_numpy(np.ascontiguousarray(batch.n_id)).to(store.device)
        rows, counts = store.empty(ids.numel()), store.new_counts()
        with launching(store.device):
            fetched = store.gather(ids, rows, counts)
        batch.x = rows
        host = torch.empty_like(counts, device="cpu", pin_memory=counts.device.type == "cuda")
        host.copy_(counts, non_blocking=True)
        with self._lock:
            self._counted.append(_Counted(index, host, self._streams.mark(), fetched))
        for stage, seconds in fetched.seconds.items():
            batch.seconds[stage] = seconds
            self._meter.add(stage, index, seconds)
        self._note(wait=False)
        return batch

    def finish(self) -> None:
        """Meter every gather so far; waits for them.

        Raises:
            IndexError: an id was outside the graph.
        """
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
                found = total([self._store.named(each.counts.tolist()), each.fetched])
                self._meter.count(each.index, found.rows, found.bytes)


class DeviceBatchStage(AbstractStage):
    """Labels, and blocks with the model's weights, made where they were drawn."""

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
        """Put what the model needs of the graph on the device.

        Args:
            graph: for labels and degrees.
            workload: names the model.
            device: where the model runs.
            fill_on_host: weights of batches that the host drew.
            weighted: whether batches are handed out as blocks, which have weights.
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
            if self._device.type != "cpu":
                batch.device_blocks = device_blocks(batch, self._device)
        if self._labels is not None:
            labels = torch.from_numpy(take_labels(self._labels, batch.seeds))
            batch.y = labels.to(self._device, non_blocking=True)
        return batch

    def _weighted(self, batch: DeviceMiniBatch) -> list[TorchBlock]:
        blocks = drawn_blocks(batch.drawn)
        refuse_attention(self._workload, [block.weight is not None for block in blocks])
        if not self._gcn:
            return blocks
        if self._degree is not None:
            n_id, degree, loops = batch.drawn.n_id, self._degree, self._loops
            degrees = [full_degrees(block, n_id, degree, loops) for block in blocks]
        else:
            whole = blocks[0] if batch.dialect is Dialect.FIRST_SEEN else None
            degrees = [sampled_degrees(block, whole) for block in blocks]
        return gcn_blocks(blocks, degrees, may_loop=self._may_loop)
