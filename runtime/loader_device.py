"""The loader's stages on a GPU behind sampling: rows and labels, under the same plan.

`loader_device_place` says which stages the device takes over, `loader_device_sample` draws.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.features.counters import Counters, total
from runtime.features.device_store import DeviceFeatureStore
from runtime.features.labels import take_labels
from runtime.graph.dataset import Graph
from runtime.loader_device_batch import DeviceMiniBatch, drawn_blocks
from runtime.loader_device_place import launching
from runtime.loader_stages import AbstractStage
from runtime.meter import StageMeter
from runtime.models.adjacency import TorchBlock, device_blocks
from runtime.models.weights import count_self_loops, refuse_attention
from runtime.models.weights_device import full_degrees, gcn_blocks, sampled_degrees
from runtime.plan import Workload
from runtime.sampling.minibatch import Dialect, MiniBatch
from runtime.stages import Stage
from runtime.train.streams import AbstractMark, AbstractStreams

GATHER_LANE = "gather"


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
