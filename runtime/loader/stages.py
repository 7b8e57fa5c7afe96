"""The loader's stages: what each does to a batch on its way to the training thread.

  seeds -> sample -> [exchange_ids] -> gather -> [exchange_rows] -> copy -> batch

A stage takes a batch in `submit` and gives it back in `wait`; background work (a copy to a GPU)
starts in the one and ends in the other. Stages are final and hold no batch: several threads may be
in one stage with different batches, unless it is `ordered`. Exchanges with other ranks happen
inside the feature store's read, and are metered and planned apart from the gather.

Links' stages look at the whole global batch: in-batch negatives come from all its destinations, and
all its links are left out of the graph. The number of ranks so changes neither a link's negatives
nor a vertex's neighbours.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.features.gather import take_labels
from gnnplan.runtime.features.tier import AbstractFeatureStore
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import BFLOAT16
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.adjacency import device_blocks
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.build import BatchSampler
from gnnplan.runtime.sampling.exclusion import (
    Candidates,
    Exclude,
    ExcludingSampler,
    NegativeSampler,
)
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import LinkSchedule, SeedSchedule, link_seeds
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.streams import AbstractMark, AbstractStreams


class AbstractStage(ABC):
    """One step of a batch's way; `index` numbers this process's steps, for the meter."""

    name: str
    ordered: bool = False
    """Whether batches must pass in order, because all ranks meet in the stage."""
    lane: str = ""
    """Name of the GPU's stream for the stage's work; "": the calling thread's."""

    @abstractmethod
    def submit(self, batch: MiniBatch, index: int) -> Any:
        """Start the stage; return a ticket for `wait`."""

    def wait(self, ticket: Any) -> MiniBatch:
        """Return the batch with the stage's work done."""
        return ticket

    def finish(self) -> None:  # noqa: B027 - most stages leave nothing open
        """Meter what came late, at the end of an iteration."""


class SeedsStage(AbstractStage):
    """Stage that chooses this rank's share of the global batch."""

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
    """Stage that draws neighbours and relabels them into blocks."""

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


class LinkShareStage(AbstractStage):
    """Stage that chooses this rank's share of the step's links, for a GPU that draws the rest."""

    name = Stage.SEEDS

    def __init__(self, schedule: LinkSchedule) -> None:
        self._schedule = schedule

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `links` with pairs of nodes, and their global ids; a share may be empty."""
        del index
        share = self._schedule.share(batch.epoch, batch.step)
        batch.links, batch.input_id, batch.global_num_seeds = share
        return batch


class LinkSeedsStage(AbstractStage):
    """Stage that chooses this rank's share of the step's links and draws their negatives."""

    name = Stage.SEEDS

    def __init__(self, schedule: LinkSchedule, negatives: NegativeSampler) -> None:
        self._schedule = schedule
        self._negatives = negatives

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `links`, and their distinct nodes as seeds; a share may be empty."""
        del index
        epoch, step = batch.epoch, batch.step
        pairs, ids, batch.global_num_seeds = self._schedule.share(epoch, step)
        everyone = None
        if self._negatives.candidates is Candidates.IN_BATCH:
            everyone = self._schedule.step_pairs(epoch, step)[:, 1]
        negatives = self._negatives.draw(
            pairs, ids, epoch=epoch, step=step, batch_destinations=everyone
        )
        batch.seeds, batch.links = link_seeds(pairs, negatives)
        batch.n_id, batch.input_id = batch.seeds, ids
        return batch


class LinkSampleStage(AbstractStage):
    """Stage that draws neighbours in the graph without the step's own links."""

    name = Stage.SAMPLE

    def __init__(self, sampler: ExcludingSampler, schedule: LinkSchedule, exclude: Exclude) -> None:
        self._sampler = sampler
        self._schedule = schedule
        self._exclude = exclude

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Replace the seed batch by the sampled one."""
        del index
        sampled = self._sampler.sample_without(
            self._schedule.step_pairs(batch.epoch, batch.step),
            self._exclude,
            batch.seeds,
            epoch=batch.epoch,
            step=batch.step,
            input_id=batch.input_id,
            global_num_seeds=batch.global_num_seeds,
        )
        sampled.links = batch.links
        return sampled


def link_stages(
    graph: Graph, workload: Workload, schedule: LinkSchedule, settings: dict[str, Any]
) -> tuple[AbstractStage, AbstractStage]:
    """Make the stages `seeds` and `sample`; `settings` are the neighbour sampler's."""
    links = workload.links
    negatives = NegativeSampler(
        graph.indptr,
        graph.indices,
        links.num_negatives,
        candidates=Candidates(links.negatives),
        seed=workload.seed,
    )
    sampler = ExcludingSampler(graph.indptr, graph.indices, workload.fanouts, **settings)
    sample = LinkSampleStage(sampler, schedule, Exclude(links.exclude))
    return LinkSeedsStage(schedule, negatives), sample


def link_form(
    neg_sampling: Any, neg_sampling_ratio: float | None, workload: Workload
) -> Literal["triplet", "binary"]:
    """Return in which of PyG's forms links are handed out.

    Raises TypeError for another number of negatives than the plan's.
    """
    if neg_sampling_ratio is not None:
        neg_sampling = {"mode": "binary", "amount": neg_sampling_ratio}
    if neg_sampling is None:
        return "triplet"
    if isinstance(neg_sampling, str):
        neg_sampling = {"mode": neg_sampling}
    if not isinstance(neg_sampling, Mapping):  # PyG's NegativeSampling
        neg_sampling = vars(neg_sampling)
    if any(neg_sampling.get(name) is not None for name in ("src_weight", "dst_weight")):
        raise TypeError(
            "PlannedLoader: neg_sampling: expected no weights of nodes, found some: the plan draws "
            "all negatives alike; leave them out"
        )
    mode = neg_sampling["mode"]
    mode, planned = str(getattr(mode, "value", mode)), workload.links.num_negatives
    amount = neg_sampling.get("amount", planned)
    if mode not in ("triplet", "binary") or amount != planned:
        raise TypeError(
            f"PlannedLoader: neg_sampling: expected triplet or binary with {planned} negatives per "
            f"link, as the plan draws them, found {mode} with {amount}; plan again (gnnplan plan "
            "--num-negatives)"
        )
    return "binary" if mode == "binary" else "triplet"


SPARE_FRACTION = 0.125
"""Share of rows added when a buffer grows, so that a slightly larger batch fits as well."""


class BufferRing:
    """Growing buffers of rows of one width, each used again once nobody holds its rows.

    Fresh arrays of megabytes would cost page faults. Any thread may take a buffer. Pinned memory is
    page-locked, for copies to a GPU. Rows of bfloat16 are int16 in these arrays.
    """

    def __init__(
        self, count: int, width: int, *, pinned: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        self._width = width
        self._pinned = pinned
        self._dtype = torch.int16 if dtype == torch.bfloat16 else dtype
        self._buffers = [self._allocate(0) for _ in range(count)]
        # Popping and appending a deque are atomic; a weak reference's callback may run anywhere.
        self._free: deque[int] = deque(range(count))  # a stack
        self._in_use: dict[int, weakref.ref[NDArray[Any]]] = {}
        self.overflows = 0

    def take(self, rows: int) -> NDArray[Any]:
        """Return a C-contiguous array (rows, width) of undefined content."""
        try:
            slot = self._free.pop()  # the latest returned: few are ever touched
        except IndexError:
            self.overflows += 1
            return self._allocate(rows)
        if self._buffers[slot].shape[0] < rows:
            self._buffers[slot] = self._allocate(rows + int(rows * SPARE_FRACTION))
        view = self._buffers[slot][:rows]

        def release(gone: Any, slot: int = slot) -> None:
            del gone
            self._in_use.pop(slot, None)
            self._free.append(slot)

        self._in_use[slot] = weakref.ref(view, release)
        return view

    @property
    def num_bytes(self) -> int:
        """Bytes that the ring holds now."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _allocate(self, rows: int) -> NDArray[Any]:
        if self._pinned:
            return torch.empty((rows, self._width), dtype=self._dtype, pin_memory=True).numpy()
        dtype = torch.empty(0, dtype=self._dtype).numpy().dtype
        return np.empty((rows, self._width), dtype)  # numpy's large arrays get huge pages


class GatherStage(AbstractStage):
    """Stage that reads the feature rows of all input vertices into a re-used buffer."""

    name = Stage.GATHER

    def __init__(
        self, store: AbstractFeatureStore, ring: BufferRing, meter: StageMeter, *, ordered: bool
    ) -> None:
        self._store = store
        self._ring = ring
        self._meter = meter
        self.ordered = ordered

    def submit(self, batch: MiniBatch, index: int) -> MiniBatch:
        """Fill `x` and the counts by source; exchanges inside the read are metered apart."""
        rows = self._ring.take(batch.n_id.shape[0])
        half = rows.dtype == np.int16
        counters = self._store.read(batch.n_id, rows.view(BFLOAT16) if half else rows)
        held = torch.from_numpy(rows)  # the ring's own array, which is free again with it
        batch.x = held.view(torch.bfloat16) if half else held
        batch.rows_by_source, batch.bytes_by_source = counters.rows, counters.bytes
        for stage, seconds in counters.seconds.items():
            batch.seconds[stage] = seconds
            self._meter.add(stage, index, seconds)
        self._meter.count(index, counters.rows, counters.bytes)
        return batch


class CopyStage(AbstractStage):
    """Stage that starts the copy of the feature rows to the device."""

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
    """Stage that adds labels, edge weights, and blocks on the model's device."""

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

        The blocks go to the device after their weights are made, so not with the rows.
        """
        del index
        batch = self._fill_weights(batch)
        if not self._on_host:
            batch.device_blocks = device_blocks(batch, self._device)
        if batch.links is not None:
            batch.y = torch.from_numpy(batch.links).to(self._device, non_blocking=True)
        elif self._labels is not None:
            labels = torch.from_numpy(take_labels(self._labels, batch.seeds))
            batch.y = labels if self._on_host else labels.to(self._device, non_blocking=True)
        return batch


def seed_batch(epoch: int, step: int, dialect: Dialect) -> MiniBatch:
    """Make the batch that enters the first stage, which knows only its epoch and step."""
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
