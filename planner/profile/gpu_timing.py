"""Times sampling and the model on a GPU that is here, by the runtime's own kernels and loop.

Parts of a step, on batches of the graph's own:

    sample    the user's sampler, kernel by kernel, and as one CUDA graph where that can be
    handing   what else starts kernels for a batch: gathering its rows, blocks, labels
    step      forward, backward and update, until its loss is on the host
    loops     all of it, as plans do it (`gpu_loop`)

Each part is timed from its start until the device is done. What the host alone takes, to start
kernels and to wait for a device with nothing to do, is the same of a batch of a few seeds, whose
kernels take no time. What the device alone takes of a step is timed behind work that holds the
device back until all of the step is enqueued.

The planner itself never makes a CUDA context: that takes half a gigabyte and outlives what it is
for. A timing process does.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.planner.profile.gpu_loop import LoopParts, labelled, time_loops
from gnnplan.planner.profile.protocol import (
    GpuTimingAnswer,
    GpuTimingReply,
    GpuTimingRequest,
    half_width,
)
from gnnplan.planner.workload import GpuSample
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.device import set_threads
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.fallback import has_triton
from gnnplan.runtime.features.device_rows import DeviceRows
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.features.gather_triton import DeviceTable
from gnnplan.runtime.features.location import encode
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.loader.device import DeviceBatchStage, DeviceMiniBatch
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.sampling.build import build_device_sampler
from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.gradients import GradientBuffer
from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
from gnnplan.runtime.train.precision import Precision

FEW_SEEDS = 8
"""Of the batch that shows what the host takes."""
BATCHES = 3
"""Different batches in turn, so that none stays in the device's caches."""
WARM_STEPS = 4
"""Compiled kernels, library warm-up, the allocator's first pieces."""
STEPS = 16
"""Of each size, in turns, so that drift meets all alike."""
EPOCH = 1 << 20
"""Of the draws: no run's."""
HOLD_SECONDS = 0.05
"""Most that the device is held back: longer than a step takes to be enqueued."""
CYCLES_PER_SECOND = 2_000_000_000
"""Of the device's clock, about: the hold's length need not be exact."""
ROWS_SHARE, MOST_ROWS_BYTES = 0.1, 1 << 28
"""Of the device's free memory, that rows to be gathered take, whose values do not matter; and the
most of them: several times what a device's caches hold."""
FLOAT_BYTES = 4
TOPOLOGY_SHARE = 0.4
"""Of the device's free memory, that adjacency lists may take to be timed from there."""


class GpuTimed:
    """The user's sampler and model on one device, ready to be timed."""

    def __init__(self, request: GpuTimingRequest, device: torch.device) -> None:
        """Place the graph, and draw the batches.

        Args:
            request: what is asked.
            device: a GPU, or in tests a processor.

        Raises:
            SamplerError: the sampler has no form on the device, or the lists no place.
            torch.OutOfMemoryError: the device is too small for the batches.
        """
        self._device, self._request = device, request
        self._graph = open_graph(
            Path(request.graph), validate=False, fingerprint=request.fingerprint
        )
        self.topology, self._sampler = self._place()
        self._blocks = DeviceBatchStage(
            self._graph, request.workload, device, lambda batch: batch, weighted=True
        )
        self._store = self._some_rows()
        self._counts = self._store.new_counts()
        several = str(self._graph.task) == "multilabel"
        self._label_shape = (self._graph.num_classes,) if several else ()
        self._draws = np.random.default_rng(request.workload.seed)
        self._step = 0
        self._few = self._seeds(FEW_SEEDS)
        self._loop = self._build()

    def _place(self) -> tuple[str, Any]:
        """The adjacency lists on the device, or where they are too long for it on the host."""
        graph, request = self._graph, self._request
        size, room = graph.indptr.nbytes + graph.indices.nbytes, math.inf
        if self._device.type == "cuda":
            room = TOPOLOGY_SHARE * torch.cuda.mem_get_info(self._device)[0]
        pinned = size > room
        try:
            placed = DeviceTopology.load(graph.indptr, graph.indices, self._device, pinned=pinned)
        except RuntimeError as error:
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
        return TrainLoop(
            model=model,
            optimizer=make_optimizer(
                model, learning_rate=work.learning_rate, weight_decay=work.weight_decay
            ),
            gradients=GradientBuffer(model),
            comm=Communicator(),
            meter=StageMeter(),
            task=str(graph.task),
            seed=work.seed,
            precision=Precision(work.precision),
        )

    def run(self) -> GpuTimingAnswer:
        """Time all of it.

        Raises:
            torch.OutOfMemoryError: the device is too small for a step.
        """
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
        """The loader's stages behind sampling, up to where training takes the batch."""
        batch = DeviceMiniBatch(drawn)
        batch.x = self._store.empty(drawn.n_id.numel())
        self._store.gather(drawn.n_id, batch.x, self._counts)
        return labelled(self._blocks.submit(batch, self._step), self._label_shape, self._device)

    def _some_rows(self) -> DeviceFeatureStore:
        """Rows of the graph's width on the device, of which several nodes may have one."""
        nodes, width = self._graph.num_nodes, self._graph.feature_dim
        most = float(MOST_ROWS_BYTES)
        if self._device.type == "cuda":
            most = min(most, ROWS_SHARE * torch.cuda.mem_get_info(self._device)[0])
        rows = max(1, min(nodes, int(most) // (FLOAT_BYTES * width)))
        codes = encode(np.zeros(nodes, np.uint8), np.arange(nodes) % rows)
        table = torch.randn(rows, width, device=self._device)
        return DeviceFeatureStore(DeviceTable(codes, {0: DeviceRows("own", table)}, self._device))

    def loop_parts(self, by_graph: CapturedNeighborSampler | None) -> LoopParts:
        """What `time_loops` runs.

        Args:
            by_graph: draws whole batches by one CUDA graph; None: no plan does.
        """
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
        )

    def _sizes(self, seeds: int) -> "_Drawn":
        """A few batches of so many seeds."""
        drawn = [self._draw(self._sampler, self._seeds(seeds)) for _ in range(BATCHES)]
        edges = [batch.blocks[0].indices.numel() for batch in drawn]
        return _Drawn(drawn, float(np.mean(edges)) or 1.0)

    def _sampled(
        self, sampler: Any, seeds: NDArray[np.int64], of_few: Any, few: NDArray[np.int64]
    ) -> GpuSample:
        """A batch's seconds, and a small one's, taken in turns."""
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
        """The sampler as one CUDA graph, of such batches and of a small one; None: it cannot be."""
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
        """Of a small batch's gather, blocks and labels."""
        return float(np.median(self._in_turns([_Task(self._hand, few.next)])[0]))

    def _steps(self, sized: Sequence["_Drawn"]) -> tuple[list[list[float]], float]:
        """Seconds of steps on the batches of each size, and of starting the update's kernels."""
        first = self._step + WARM_STEPS * len(sized)
        found = self._in_turns([_Task(self._take, self._handed(drawn)) for drawn in sized])
        updates = self._loop.meter.seconds(Stage.OPTIMIZER, skip_steps=first)
        return found, float(np.median(updates))

    def _handed(self, drawn: "_Drawn") -> Callable[[], Any]:
        """Batches as a loader hands them over, made anew: blocks keep what steps made of them."""
        return lambda: self._hand(drawn.next())

    def _take(self, batch: Any) -> None:
        self._step += 1
        self._loop.step(batch, self._step)

    def _device_seconds(self, drawn: "_Drawn") -> float:
        """Of a step on the device, behind a hold that lasts until all of it is enqueued."""
        if self._device.type != "cuda":
            return float(np.median(self._in_turns([_Task(self._take, self._handed(drawn))])[0]))
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
        """Most bytes that a step holds beside what was held before it."""
        if self._device.type != "cuda":
            return 0
        cuda, batch = torch.cuda, self._hand(drawn.next())
        self._wait()
        before = cuda.memory_allocated(self._device)
        cuda.reset_peak_memory_stats(self._device)
        self._take(batch)
        self._wait()
        return int(cuda.max_memory_allocated(self._device) - before)

    def _in_turns(self, tasks: Sequence["_Task"]) -> list[list[float]]:
        """Seconds of each task until the device is done, after a few to warm up."""
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
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True)
class _Task:
    """What is timed, and what is made for it each time before the clock runs."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


class _Drawn:
    """Batches of one size, as they were drawn."""

    def __init__(self, drawn: Sequence[Any], edges: float) -> None:
        self._drawn, self._next = drawn, 0
        self.edges = edges
        """Of the outermost block, on average."""

    def next(self) -> Any:
        """The next in turn."""
        self._next += 1
        return self._drawn[self._next % len(self._drawn)]


def _rising(
    sizes: Sequence[float], seconds: Sequence[list[float]]
) -> list[tuple[float, list[float]]]:
    """Sizes with their seconds in rising order, of equal ones the first."""
    found: list[tuple[float, list[float]]] = []
    for size, each in sorted(zip(sizes, seconds, strict=True), key=lambda pair: pair[0]):
        if not found or size > found[-1][0] * 1.001:
            found.append((size, each))
    return found


def answer_request(request: GpuTimingRequest) -> GpuTimingReply:
    """Time a request on the first GPU, or say why it cannot be."""
    if not torch.cuda.is_available():
        return GpuTimingReply(refusal="this torch has no CUDA")
    if not has_triton():
        return GpuTimingReply(refusal="Triton is not installed")
    device = torch.device("cuda", 0)
    set_threads(1)  # as plans for GPUs have it
    try:
        return GpuTimingReply(answer=GpuTimed(request, device).run())
    except torch.OutOfMemoryError:
        return GpuTimingReply(refusal="a step of this model does not fit in the GPU's memory")
    except SamplerError as error:
        return GpuTimingReply(refusal=str(error))
