"""Times of sampling and the model on a GPU here, by the runtime's own kernels and loop.

Parts of a step, on batches of the graph's own:

    sample    the user's sampler, kernel by kernel, and as one CUDA graph where that can be
    handing   what else starts kernels for a batch: gathering its rows, blocks, labels
    step      forward, backward and update, until its loss is on the host
    loops     all of it, as plans do it

The host's own part is the time of a batch of a few seeds, whose kernels take no time. The device's
own part of a step is timed behind work that holds the device back until all of it is enqueued.

The runtime's own loop has stages, lanes and threads as a rank has them, metered. Parts of a step
that are timed by themselves do not add up to it: one process starts all kernels, and its threads
share the interpreter's lock (DEC-86). So each way in which plans make batches (in line or by a
thread, kernel by kernel or by one CUDA graph) is run for some steps, in turns. Of its rounds the
last of the quickest third is kept (DEC-87).
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.planner.profile.loop import make_loop
from gnnplan.planner.profile.protocol import (
    GpuTimingAnswer,
    GpuTimingReply,
    GpuTimingRequest,
    half_range,
    half_width,
)
from gnnplan.planner.workload import GpuLoop, GpuSample
from gnnplan.runtime.device import set_threads
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.features.device_rows import DeviceRows, PinError
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.features.gather_triton import DeviceTable
from gnnplan.runtime.features.location import encode
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.loader.device import (
    DeviceBatchStage,
    DeviceGatherStage,
    DeviceMiniBatch,
    DeviceSampleStage,
)
from gnnplan.runtime.loader.stages import AbstractStage, CopyStage, SeedsStage, seed_batch
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.process import process_on, usable_core_ids
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.build import build_device_sampler
from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.minibatch import STEP, TrainLoop
from gnnplan.runtime.train.overlap import (
    MadeBatch,
    Prefetcher,
    Turns,
    Workers,
    pass_through,
    take_made,
)
from gnnplan.runtime.train.precision import DTYPES
from gnnplan.runtime.train.streams import AbstractStreams, streams_of

FEW_SEEDS = 8
"""Seeds of the batch that shows the host's part."""
BATCHES = 3
"""Batches taken in turn, so that none stays in the device's caches."""
WARM_STEPS = 4
"""Steps in which kernels are compiled, and libraries and the allocator warm up."""
STEPS = 16
"""Timed steps of each size, in turns, so that drift meets all alike."""
EPOCH = 1 << 20
HOLD_SECONDS = 0.05
"""Most seconds that the device is held back: longer than a step takes to be enqueued."""
CYCLES_PER_SECOND = 2_000_000_000
"""Rate of the device's clock, about: the hold's length need not be exact."""
ROWS_SHARE, MOST_ROWS_BYTES = 0.1, 1 << 28
"""Share of the device's free memory for the rows to gather, and the most bytes of them."""
FLOAT_BYTES = 4
TOPOLOGY_SHARE = 0.4
"""Share of the device's free memory that adjacency lists may take to lie there."""


LEAST_ROUNDS, ROUNDS = 3, 9
"""Least rounds of each way, and the most while time is left; ways take turns."""
LOOP_STEPS, LOOP_WARM_STEPS = 36, 8
"""Steps of a round, and those of them that are left out, as plans discard a run's first ones."""
DEPTH = 2
"""Batches that the thread may be ahead."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of making batches."""

    captured: bool
    ahead: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopParts:
    """Parts of the runtime's loop: samplers, store, stages and training."""

    samplers: Mapping[bool, object]
    """Samplers on the device, by whether one CUDA graph draws a batch."""
    store: DeviceFeatureStore
    filling: DeviceBatchStage
    schedule: SeedSchedule
    dialect: Dialect
    training: TrainLoop
    """Training loop, whose meter is not used."""
    label_shape: tuple[int, ...]
    """Shape of one seed's label, for a graph that has none."""
    row_dtype: torch.dtype
    """Type of rows in batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    steps: list[float]
    stages: dict[str, list[float]]

    @property
    def median(self) -> float:
        return float(np.median(self.steps))


def time_loops(parts: LoopParts, device: torch.device, seconds: float = math.inf) -> list[GpuLoop]:
    """Run every way in turns; beyond the least rounds only for so many seconds."""
    ways = [Way(captured, ahead) for captured in parts.samplers for ahead in (False, True)]
    rounds: dict[Way, list[_Round]] = {way: [] for way in ways}
    streams = streams_of(device)  # of all rounds: what a lane has freed only it takes again
    until = time.monotonic() + seconds
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.monotonic() >= until:
            break
        for way, found in rounds.items():
            found.append(_one_round(parts, way, streams, device, number))
    return [_loop_of(way, found) for way, found in rounds.items()]


def kept_place(count: int) -> int:
    """Return which of `count` rounds is kept, the quickest first.

    Were it always the second, more rounds would make it luckier (DEC-31).

    >>> [kept_place(count) for count in (1, 2, 3, 6, 9)]
    [0, 1, 1, 2, 3]
    """
    return min(count - 1, max(1, count // 3))


def _loop_of(way: Way, rounds: Sequence[_Round]) -> GpuLoop:
    ordered = sorted(rounds, key=lambda found: found.median)
    place = kept_place(len(ordered))
    kept, quick = ordered[place], ordered[: max(3, place + 1)]
    return GpuLoop(
        captured=way.captured,
        ahead=way.ahead,
        step_seconds=kept.median,
        stages={name: float(np.median(seconds)) for name, seconds in kept.stages.items()},
        spread=max(half_width(kept.steps), half_range([found.median for found in quick])),
    )


def _one_round(
    parts: LoopParts, way: Way, streams: AbstractStreams, device: torch.device, number: int
) -> _Round:
    meter = StageMeter()
    stages: list[AbstractStage] = [
        SeedsStage(parts.schedule, parts.dialect),
        DeviceSampleStage(parts.samplers[way.captured], device, meter, counted=False),
        DeviceGatherStage(parts.store, meter, streams, ordered=False, row_dtype=parts.row_dtype),
        CopyStage(device, streams),
        parts.filling,
    ]
    per_epoch = parts.schedule.num_steps

    def make(index: int, turns: Turns) -> MadeBatch:
        epoch, step = divmod(number * LOOP_STEPS + index, per_epoch)
        batch = seed_batch(epoch, step, parts.dialect)
        return pass_through(batch, stages, meter, streams, index, index, turns)

    def batches() -> Iterator[MiniBatch]:
        with Prefetcher(make, LOOP_STEPS, workers=workers, depth=DEPTH) as ready:
            for made in ready:
                yield add_labels(take_made(made, streams), parts.label_shape, device)

    with process_on(usable_core_ids()[: 1 + way.ahead]):
        workers = Workers(int(way.ahead), enter=streams.enter_thread)
        try:
            replace(parts.training, meter=meter).run(batches(), 0, lambda _: None)
        finally:
            workers.close()
    names = [stage.name for stage in stages]
    names += [Stage.WAIT, Stage.FORWARD_BACKWARD, Stage.OPTIMIZER]
    return _Round(
        steps=meter.seconds(STEP, skip_steps=LOOP_WARM_STEPS),
        stages={str(name): meter.seconds(name, skip_steps=LOOP_WARM_STEPS) for name in names},
    )


def add_labels(batch: MiniBatch, shape: tuple[int, ...], device: torch.device) -> MiniBatch:
    """Add some labels to a batch that has none; one seed's label has shape `shape`."""
    if batch.y is None:
        batch.y = torch.zeros((batch.num_seeds, *shape), dtype=torch.int64, device=device)
    return batch


class GpuTimed:
    """The user's sampler and model on one device, ready to be timed."""

    def __init__(self, request: GpuTimingRequest, device: torch.device) -> None:
        """Place the graph on a GPU (in tests a processor), and build sampler, store and model.

        Raises SamplerError where the sampler has no form there or the lists no place.
        """
        self._device, self._request = device, request
        self._graph = open_graph(
            Path(request.graph), validate=False, fingerprint=request.fingerprint
        )
        self.topology, self._sampler = self._place()
        self._blocks = DeviceBatchStage(
            self._graph, request.workload, device, lambda batch: batch, weighted=True
        )
        same = self._graph.feature_dtype == request.workload.precision
        narrow = DTYPES.get(request.workload.precision, torch.float32)
        self._row_dtype = narrow if same else torch.float32
        self._store = self._some_rows()
        self._counts = self._store.new_counts()
        several = str(self._graph.task) == "multilabel"
        self._label_shape = (self._graph.num_classes,) if several else ()
        self._draws = np.random.default_rng(request.workload.seed)
        self._step = 0
        self._few = self._seeds(FEW_SEEDS)
        self._loop = self._build()

    def _place(self) -> tuple[str, Any]:
        """Place adjacency lists on the device, or on the host where they are too long for it."""
        graph, request = self._graph, self._request
        size, room = graph.indptr.nbytes + graph.indices.nbytes, math.inf
        if (free := processor_of(self._device).free_bytes()) is not None:
            room = TOPOLOGY_SHARE * free
        pinned = size > room
        try:
            placed = DeviceTopology.load(graph.indptr, graph.indices, self._device, pinned=pinned)
        except (RuntimeError, PinError) as error:
            words = " ".join(str(error).split())
            raise SamplerError(f"the lists find no place for the GPU to read: {words}") from None
        sampler = build_device_sampler(
            request.sampler, placed, graph.indptr, graph.indices, request.workload.fanouts,
            request.workload.seed, device=self._device, edge_weight=graph.edge_weight,
            local=np.empty(0, np.int64),
        )  # fmt: skip
        return "host" if pinned else "replicated", sampler

    def _build(self) -> TrainLoop:
        graph, work = self._graph, self._request.workload
        model = build_model(work, graph.feature_dim, graph.num_classes, str(graph.task))
        model.to(self._device).train()
        return make_loop(model, work, str(graph.task))

    def run(self) -> GpuTimingAnswer:
        """Time all parts of a step."""
        request, mean = self._request, self._seeds(self._request.seeds)
        sample = self._sampled(self._sampler, mean, self._sampler, self._few)
        captured, by_graph = None, self._by_graph(mean) if request.captures else None
        if by_graph is not None:
            captured = self._sampled(by_graph[0], mean, by_graph[1], self._few)
        few, middle = self._sizes(FEW_SEEDS), self._sizes(request.seeds)
        others = [round(scale * request.seeds) for scale in request.scales if scale != 1.0]
        sized = [middle, *map(self._sizes, others)]
        steps, optimizer = self._steps([few, *sized])
        kept = _rising([each.edges / middle.edges for each in sized], steps[1:])
        return GpuTimingAnswer(
            sizes=[size for size, _ in kept],
            step_seconds=[float(np.median(seconds)) for _, seconds in kept],
            optimizer_seconds=optimizer,
            host_seconds=float(np.median(steps[0])),
            device_seconds=self._device_seconds(middle),
            spread=max(half_width(seconds) for _, seconds in kept),
            sample=sample,
            captured=captured,
            loops=time_loops(
                self.loop_parts(by_graph and by_graph[0]), self._device, request.seconds
            ),
            handing_seconds=self._handing_seconds(few),
            topology=self.topology,
            num_parameters=sum(p.numel() for p in self._loop.model.parameters()),
            activation_bytes=self._activation_bytes(middle),
        )

    def _seeds(self, count: int) -> NDArray[np.int64]:
        pool = np.asarray(self._graph.train_idx)
        return self._draws.choice(pool, size=max(1, min(count, len(pool))), replace=False)

    def _draw(self, sampler: Any, seeds: NDArray[np.int64]) -> Any:
        self._step += 1
        return sampler.sample(seeds, epoch=EPOCH, step=self._step)

    def _hand(self, drawn: Any) -> MiniBatch:
        """Run the loader's stages after sampling, up to where training takes the batch."""
        batch = DeviceMiniBatch(drawn)
        batch.x = self._store.empty(drawn.n_id.numel(), self._row_dtype)
        self._store.gather(drawn.n_id, batch.x, self._counts)
        return add_labels(self._blocks.submit(batch, self._step), self._label_shape, self._device)

    def _some_rows(self) -> DeviceFeatureStore:
        """Make rows of the graph's width on the device, shared by nodes where they must be."""
        nodes, width = self._graph.num_nodes, self._graph.feature_dim
        most = float(MOST_ROWS_BYTES)
        if (free := processor_of(self._device).free_bytes()) is not None:
            most = min(most, ROWS_SHARE * free)
        rows = max(1, min(nodes, int(most) // (FLOAT_BYTES * width)))
        codes = encode(np.zeros(nodes, np.uint8), np.arange(nodes) % rows)
        table = torch.randn(rows, width, device=self._device).to(self._row_dtype)
        return DeviceFeatureStore(DeviceTable(codes, {0: DeviceRows("own", table)}, self._device))

    def loop_parts(self, by_graph: CapturedNeighborSampler | None) -> LoopParts:
        """Return the parts for `time_loops`; `by_graph` draws whole batches by one CUDA graph."""
        request, named = self._request, self._request.sampler
        count = max(1, min(request.seeds, len(self._graph.train_idx)))
        return LoopParts(
            samplers={False: self._sampler} | ({} if by_graph is None else {True: by_graph}),
            store=self._store,
            filling=self._blocks,
            schedule=SeedSchedule(self._graph.train_idx, count, seed=request.workload.seed),
            dialect=Dialect(named.dialect),
            training=self._loop,
            label_shape=self._label_shape,
            row_dtype=self._row_dtype,
        )

    def _sizes(self, seeds: int) -> "_Drawn":
        drawn = [self._draw(self._sampler, self._seeds(seeds)) for _ in range(BATCHES)]
        edges = [batch.blocks[0].indices.numel() for batch in drawn]
        return _Drawn(drawn, float(np.mean(edges)) or 1.0)

    def _sampled(
        self, sampler: Any, seeds: NDArray[np.int64], of_few: Any, few: NDArray[np.int64]
    ) -> GpuSample:
        """Time a batch and a small one in turns."""
        whole, host = self._in_turns([
            _Task(lambda _: self._draw(sampler, seeds)),
            _Task(lambda _: self._draw(of_few, few)),
        ])  # fmt: skip
        seconds = float(np.median(whole))
        return GpuSample(
            seconds=seconds,
            host_seconds=min(float(np.median(host)), seconds),
            spread=half_width(whole),
        )

    def _by_graph(
        self, seeds: NDArray[np.int64]
    ) -> tuple[CapturedNeighborSampler, CapturedNeighborSampler] | None:
        """Capture the sampler as CUDA graphs of such batches and small ones, if it can be."""
        try:
            whole, few = (
                CapturedNeighborSampler.of(self._sampler, len(each)) for each in (seeds, self._few)
            )
            whole.prepare()
            few.prepare()
        except (SamplerError, RuntimeError):  # as the runtime does: kernel by kernel then
            return None
        return whole, few

    def _handing_seconds(self, few: "_Drawn") -> float:
        return float(np.median(self._in_turns([_Task(self._hand, few.next)])[0]))

    def _steps(self, sized: Sequence["_Drawn"]) -> tuple[list[list[float]], float]:
        """Return seconds of steps by size, and of starting the update's kernels."""
        first = self._step + WARM_STEPS * len(sized)
        found = self._in_turns([_Task(self._take, self._batch_maker(drawn)) for drawn in sized])
        updates = self._loop.meter.seconds(Stage.OPTIMIZER, skip_steps=first)
        return found, float(np.median(updates))

    def _batch_maker(self, drawn: "_Drawn") -> Callable[[], Any]:
        """Return a maker of handed-over batches, new each time: blocks keep what steps add."""
        return lambda: self._hand(drawn.next())

    def _take(self, batch: Any) -> None:
        self._step += 1
        self._loop.step(batch, self._step)

    def _device_seconds(self, drawn: "_Drawn") -> float:
        """Time a step on the device, behind a hold that lasts until all of it is enqueued."""
        if not processor_of(self._device).captures:
            return float(
                np.median(self._in_turns([_Task(self._take, self._batch_maker(drawn))])[0])
            )
        cuda, found = torch.cuda, list[float]()
        for _ in range(STEPS):
            batch = self._hand(drawn.next())
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            self._wait()
            cuda._sleep(round(HOLD_SECONDS * CYCLES_PER_SECOND))
            begin.record()
            self._take(batch)
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        return float(np.median(found))

    def _activation_bytes(self, drawn: "_Drawn") -> int:
        if not processor_of(self._device).captures:
            return 0
        cuda, batch = torch.cuda, self._hand(drawn.next())
        self._wait()
        before = cuda.memory_allocated(self._device)
        cuda.reset_peak_memory_stats(self._device)
        self._take(batch)
        self._wait()
        return int(cuda.max_memory_allocated(self._device) - before)

    def _in_turns(self, tasks: Sequence["_Task"]) -> list[list[float]]:
        """Return seconds of each task until the device is done, after some to warm up."""
        for task in tasks:
            for _ in range(WARM_STEPS):
                task.run(task.prepare())
        found: list[list[float]] = [[] for _ in tasks]
        for _ in range(STEPS):
            for seconds, task in zip(found, tasks, strict=True):
                prepared = task.prepare()
                self._wait()
                start = time.perf_counter()
                task.run(prepared)
                self._wait()
                seconds.append(time.perf_counter() - start)
        return found

    def _wait(self) -> None:
        processor_of(self._device).synchronize()


@dataclass(frozen=True, slots=True)
class _Task:
    """A timed call, and what prepares its argument before the clock runs."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


class _Drawn:
    """Batches of one size, taken in turn."""

    def __init__(self, drawn: Sequence[Any], edges: float) -> None:
        self._drawn, self._next = drawn, 0
        self.edges = edges

    def next(self) -> Any:
        self._next += 1
        return self._drawn[self._next % len(self._drawn)]


def _rising(
    sizes: Sequence[float], seconds: Sequence[list[float]]
) -> list[tuple[float, list[float]]]:
    """Return sizes with their seconds in rising order, the first of equal sizes."""
    found: list[tuple[float, list[float]]] = []
    for size, each in sorted(zip(sizes, seconds, strict=True), key=lambda pair: pair[0]):
        if not found or size > found[-1][0] * 1.001:
            found.append((size, each))
    return found


def answer_request(request: GpuTimingRequest) -> GpuTimingReply:
    """Time a request on its GPU, or say why it cannot be."""
    if not torch.cuda.is_available():
        return GpuTimingReply(refusal="this torch has no CUDA")
    device = torch.device("cuda", request.gpu)
    processor_of(device).enter_thread()  # events and kernels take the current GPU
    set_threads(1)  # as plans for GPUs have it
    try:
        return GpuTimingReply(answer=GpuTimed(request, device).run())
    except torch.OutOfMemoryError:
        return GpuTimingReply(refusal="a step of this model does not fit in the GPU's memory")
    except SamplerError as error:
        return GpuTimingReply(refusal=str(error))
