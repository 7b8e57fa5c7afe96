"""The loader's stages: what each does to a batch on its way to the training thread.

    seeds -> sample -> [exchange_ids] -> gather -> [exchange_rows] -> copy -> batch

A stage takes a batch in `submit` and gives it back in `wait`; a stage that works in the background
(a copy to a GPU) starts in the one and ends in the other. Stages are final and hold no batch, so
several threads may be in one stage with different batches, except where `ordered` says that every
rank must enter it in the same order.

The exchanges with other ranks happen inside the feature store's read; they have names here because
they are metered and planned apart from the rest of the gather.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gnnplan.runtime.features.gather import take_labels
from gnnplan.runtime.features.store import BufferRing
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.adjacency import device_blocks
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.build import BatchSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.streams import AbstractMark, AbstractStreams

if TYPE_CHECKING:
    from gnnplan.runtime.features.store import AbstractFeatureStore


class AbstractStage(ABC):
    """One step of a batch's way; `index` numbers this process's steps, for the meter."""

    name: str
    ordered: bool = False
    """True where batches must pass in order, because all ranks meet in the stage."""
    lane: str = ""
    """On a GPU, the stream that the stage's work goes to; "": the calling thread's."""

    @abstractmethod
    def submit(self, batch: MiniBatch, index: int) -> Any:
        """Start the stage; returns a ticket for `wait`."""

    def wait(self, ticket: Any) -> MiniBatch:
        """The batch with the stage's work done."""
        return ticket

    def finish(self) -> None:  # noqa: B027 - most stages leave nothing open
        """Called where an iteration ends: meter what came late."""


class SeedsStage(AbstractStage):
    """Chooses this rank's share of the global batch."""

    name = Stage.SEEDS

    def __init__(self, schedule: SeedSchedule, dialect: Dialect) -> None:
        self._schedule = schedule
        self._dialect = dialect

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill the seeds of the batch's epoch and step; a rank's share may be empty."""
        del index
        seeds, input_id, total = self._schedule.share(batch.epoch, batch.step)
        batch.seeds, batch.n_id, batch.input_id = seeds, seeds, input_id
        batch.global_num_seeds = total
        return batch


class SampleStage(AbstractStage):
    """Draws neighbours and relabels them into blocks."""

    name = Stage.SAMPLE

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Replace the seed batch by the sampled one."""
        del index
        return self._sampler.sample(
            batch.seeds,
            epoch=batch.epoch,
            step=batch.step,
            input_id=batch.input_id,
            global_num_seeds=batch.global_num_seeds,
        )


class GatherStage(AbstractStage):
    """Reads the feature rows of all input vertices into a re-used buffer."""

    name = Stage.GATHER

    def __init__(
        self, store: "AbstractFeatureStore", ring: BufferRing, meter: StageMeter, *, ordered: bool
    ) -> None:
        self._store = store
        self._ring = ring
        self._meter = meter
        self.ordered = ordered

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `x` and the counts by source; exchanges inside the read are metered apart."""
        rows = self._ring.take(batch.n_id.shape[0])
        counters = self._store.read(batch.n_id, rows)
        batch.x = torch.from_numpy(rows)
        batch.rows_by_source, batch.bytes_by_source = counters.rows, counters.bytes
        for stage, seconds in counters.seconds.items():
            batch.seconds[stage] = seconds
            self._meter.add(stage, index, seconds)
        self._meter.count(index, counters.rows, counters.bytes)
        return batch


class CopyStage(AbstractStage):
    """Starts the copy of the feature rows to the device."""

    name = Stage.COPY
    lane = "copy"

    def __init__(self, device: torch.device, streams: AbstractStreams) -> None:
        self._device, self._streams = device, streams
        self._copied: deque[tuple[AbstractMark, torch.Tensor]] = deque()
        self._lock = threading.Lock()

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Move `x`; from page-locked memory the copy runs beside what follows."""
        del index
        rows = batch.x
        batch.x = rows.to(self._device, non_blocking=True)
        if batch.x is not rows:
            # The ring gives a buffer out again when nobody holds it: not before it is copied.
            with self._lock:
                while self._copied and self._copied[0][0].done():
                    self._copied.popleft()
                self._copied.append((self._streams.mark(), rows))
        return batch


class BatchStage(AbstractStage):
    """Adds what the model wants beside the rows: labels, edge weights, blocks on its device."""

    name = Stage.BATCH
    lane = "copy"

    def __init__(
        self,
        graph: Graph,
        workload: Workload,
        device: torch.device,
        fill_weights: Callable[[MiniBatch], MiniBatch],
    ) -> None:
        # A plain view: indexing a memory map costs its subclass's bookkeeping every time.
        self._labels = None if graph.y is None else np.asarray(graph.y)
        self._workload = workload
        self._device = device
        self._on_host = not processor_of(device).apart
        self._fill_weights = fill_weights

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `y` (labels of the seeds, or the links to score) and the blocks' weights.

        The blocks go to the device here, not with the rows, because the weights are theirs.
        """
        del index
        batch = self._fill_weights(batch)
        if not self._on_host and not batch.exchanges:
            batch.device_blocks = device_blocks(batch, self._device)
        if batch.links is not None:
            batch.y = torch.from_numpy(batch.links).to(self._device, non_blocking=True)
        elif self._labels is not None:
            labels = torch.from_numpy(take_labels(self._labels, batch.seeds))
            batch.y = labels if self._on_host else labels.to(self._device, non_blocking=True)
        return batch


def seed_batch(epoch: int, step: int, dialect: Dialect) -> MiniBatch:
    """The batch that enters the first stage: it only knows its epoch and step."""
    none = np.empty(0, np.int64)
    return MiniBatch(
        blocks=[],
        n_id=none,
        seeds=none,
        input_id=none,
        dialect=dialect,
        num_sampled_nodes=[],
        num_sampled_edges=[],
        epoch=epoch,
        step=step,
    )
