"""One timing process: runs the real model on synthetic blocks when told to.

`python -m planner.profiling.layers` speaks the lines of planner.profiling.serving. The only module
of the profile that imports torch, and only when it runs.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.profiling.loader_kept import KeptLoaders, Loader
from planner.profiling.loader_seconds import (
    LoadingAnswer,
    LoadingRequest,
    after_wait,
    all_beside,
    in_turns,
)
from planner.profiling.loader_work import (
    DISK_START,
    disk_work,
    sampling,
    timed_disk,
    timed_gather,
)
from planner.profiling.rehearsal import rehearse
from planner.profiling.serving import half_width, serve_standard_streams
from planner.profiling.synthetic import BatchShape, synthetic_batch, synthetic_links
from planner.workload import Beside
from runtime import codec
from runtime.cores import batch_threads, usable_core_ids
from runtime.graph.types import GraphTypes
from runtime.plan import Workload
from runtime.sampling.minibatch import MiniBatch
from runtime.stages import Stage

WARMUP_STEPS = 10
"""Steps of a process that are thrown away: library warm-up costs the first calls 50 ms each."""
MEMORY_EVENT = "[memory]"
"""Name of the profiler's events of tensors' memory (torch 2.13)."""
BATCHES = 3
"""Different synthetic batches in turn, so that no batch stays in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingRequest:
    """What to build and time."""

    workload: Workload
    in_dim: int
    num_classes: int
    task: str
    shape: BatchShape
    scales: list[float]
    threads: int
    steps: int
    """Measured steps of each scale."""
    types: GraphTypes | None = None
    """Of the graph, for model rgcn."""
    rank: int = 0
    ranks: int = 1
    """Processes that take the same steps and add their gradients."""
    meeting: str = ""
    """File by which they find each other, where there are several."""
    loading: LoadingRequest | None = None
    """What the thread of the steps does before each: sample a batch and gather one's rows. Steps
    are longer by up to 7% than those that follow each other: caches hold other things. None:
    nothing."""
    times_loading: bool = False
    """Time a loader's work between and beside the mean batch's steps, and not the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingAnswer:
    """What one process measured."""

    forward_backward: list[float]
    """Median seconds per step, by scale."""
    spread: float
    """Relative half-width of the median over steps, the largest of the scales."""
    optimizer_seconds: float
    batch_seconds: float
    """Adding edge weights to a mean batch."""
    warmup_seconds: float
    """Warm-up steps above as many steady ones."""
    num_parameters: int
    activation_bytes: int
    all_reduce: list[float] = field(default_factory=list[float])
    """Seconds of adding the gradients over ranks in each measured step, from this rank's entry;
    empty for one rank."""


class _Bench:
    """The runtime's own training loop on the batches of one request."""

    def __init__(self, request: TimingRequest, loader: Loader | None = None) -> None:
        from runtime.comm.collectives import Communicator
        from runtime.device import set_threads
        from runtime.meter import StageMeter
        from runtime.models.build import build_model
        from runtime.train.minibatch import GradientBuffer, TrainLoop, make_optimizer
        from runtime.train.precision import Precision

        set_threads(request.threads)
        _meet(request)
        work = request.workload
        model = build_model(
            work, request.in_dim, request.num_classes, request.task, types=request.types
        )
        model.train()
        self.request = request
        self.meter = StageMeter()
        self.comm = Communicator()
        self.loop = TrainLoop(
            model=model,
            optimizer=make_optimizer(
                model, learning_rate=work.learning_rate, weight_decay=work.weight_decay
            ),
            gradients=GradientBuffer(model),
            comm=self.comm,
            meter=self.meter,
            task=request.task,
            seed=work.seed,
            precision=Precision(work.precision),
        )
        self.batches = [
            [_batch(request, scale, seed) for seed in range(BATCHES)] for scale in request.scales
        ]
        self.steady = _scale_index(request.scales)
        self.steps = 0
        self.loader = loader
        self.before: list[Callable[[], object]] = []
        """What is done before each timed step."""

    def step(self, batch: MiniBatch) -> tuple[float, float, float]:
        """Seconds of forward and backward, of the optimizer, and of adding gradients over ranks."""
        self.steps += 1
        self.loop.step(batch, self.steps)
        compute, update, added = (
            sum(self.meter.seconds(stage, skip_steps=self.steps))
            for stage in (Stage.FORWARD_BACKWARD, Stage.OPTIMIZER, Stage.ALL_REDUCE)
        )
        return compute, update, added

    def run(self) -> TimingAnswer:
        """Warm up, then time the scales in turn so that drift meets all alike."""
        if self.loader is not None:
            self._load_before_steps(self.loader)
        warm = [self._timed(self.steady, i) for i in range(WARMUP_STEPS)]
        seconds: list[list[float]] = [[] for _ in self.batches]
        optimizer: list[float] = []
        reduced: list[float] = []
        for i in range(self.request.steps):
            for s in range(len(self.batches)):
                compute, update, added = self._timed(s, i)
                seconds[s].append(compute)
                optimizer.append(update)
                reduced.append(added)
        medians = [float(np.median(values)) for values in seconds]
        steady = medians[self.steady] + float(np.median(optimizer))
        answer = TimingAnswer(
            forward_backward=medians,
            spread=max(half_width(values) for values in seconds),
            optimizer_seconds=float(np.median(optimizer)),
            warmup_seconds=max(0.0, sum(map(sum, warm)) - WARMUP_STEPS * steady),
            batch_seconds=self._batch_seconds(),
            num_parameters=sum(p.numel() for p in self.loop.model.parameters()),
            activation_bytes=self._activation_bytes(),
            all_reduce=reduced if self.request.ranks > 1 else [],
        )
        _part(self.request)
        return answer

    def _load_before_steps(self, loader: Loader) -> None:
        """Have each step follow a loader's work, on the rows that it has read."""
        most = max(batch.n_id.size for of_scale in self.batches for batch in of_scale)
        reading = loader.reading(most)
        gathered = reading.gathered.get("mapped_gather") or reading.gathered.get("gather")
        self.before = [loader.sample]
        if gathered is not None:
            self.batches = [_on_rows(of_scale, reading.out) for of_scale in self.batches]
            self.before.append(gathered.work)
        if self.request.ranks > 1:
            # Ranks are held against each other by what they load elsewhere.
            self.before.append(self.comm.barrier)

    def run_loading(self, asked: LoadingRequest, loader: Loader) -> LoadingAnswer:
        """Time a loader's work on the graph among steps of the mean batch."""
        from planner.profiling.handing import STEPS, handing

        work, graph, sample = self.request.workload, loader.graph, loader.sample
        steps = itertools.count()

        def step() -> None:
            self._turn(self.steady, next(steps))

        def step_on_rows() -> None:
            self.step(fresh[next(steps) % BATCHES])

        steady = self.batches[self.steady]
        reading = loader.reading(max(batch.n_id.size for batch in steady))
        out, gathered = reading.out, reading.gathered
        fresh = _on_rows(steady, out)
        works = {"sample": sampling(sample), **{k: each.work for k, each in gathered.items()}}
        handed = handing(self.loop, graph, work, asked.num_ranks, steady, self.steps + 1)
        self.steps += STEPS
        beside = dict[str, Beside]()
        with disk_work(graph, loader.vertices, out) as read:
            between = {**works, **read.works}
            turns = {kind: in_turns(work, step_on_rows) for kind, work in between.items()}
            if asked.beside:
                # The thread of mapped rows computes as the other's does; a start is no batch.
                paired = {
                    k: w for k, w in between.items() if k not in ("mapped_gather", DISK_START)
                }
                alone = {kind: found.work for kind, found in turns.items()}
                # As a run has it: a loader that reads a disk is kept off the cores of compute.
                cores = {"disk": usable_core_ids()[self.request.threads :]}
                beside = all_beside(paired, step, cores, alone=alone, unbroken=read.works)
        return LoadingAnswer(
            sample_seconds=turns["sample"].work,
            gathers={k: timed_gather(each, turns[k]) for k, each in gathered.items()},
            after_wait=after_wait(turns["disk"], turns["gather"]) if "disk" in turns else None,
            beside=beside,
            disk=timed_disk(read, turns["disk"]) if "disk" in turns else None,
            handing=handed,
            disk_start_seconds=turns[DISK_START].work if DISK_START in turns else 0.0,
        )

    def _timed(self, scale: int, i: int) -> tuple[float, float, float]:
        """A step, after what is done before each."""
        for work in self.before:
            work()
        return self._turn(scale, i)

    def _turn(self, scale: int, i: int) -> tuple[float, float, float]:
        return self.step(self.batches[scale][i % BATCHES])

    def _batch_seconds(self) -> float:
        """Seconds to add edge weights to a mean batch, as the loader's last stage does."""
        from runtime.models.weights import fill_weights

        shape, seconds = self.request.shape, list[float]()
        for seed in range(BATCHES + 1):
            batch = synthetic_batch(shape, seed)
            degree = _degrees(batch)
            start = time.perf_counter()
            fill_weights(batch, self.request.workload, degree)
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds[1:]))

    def _activation_bytes(self) -> int:
        """Most bytes of tensors that a step at the mean batch holds at once.

        What ranks keep of what they free comes on top, where there is room for it
        (`runtime.memory_sum.room_to_keep`): no plan needs it.
        """
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self._turn(self.steady, 0)
        return held_bytes([
            event.nbytes()
            for event in sorted(_events(profiler), key=lambda event: event.start_ns())
            if event.name() == MEMORY_EVENT
        ])  # fmt: skip


def held_bytes(changes: Sequence[int]) -> int:
    """Most bytes at once.

    Args:
        changes: bytes taken, or given back below 0, in their order.

    >>> held_bytes([100, 40, -40, 60, -100, -60])
    160
    """
    return int(np.cumsum(changes).max(initial=0))


def _events(profiler: Any) -> list[Any]:
    """Everything the profiler saw: operators, and what was taken and given back between them."""
    return profiler.profiler.kineto_results.events()


def _meet(request: TimingRequest) -> None:
    """Join the other ranks, where there are some."""
    if request.ranks > 1:
        import torch.distributed as dist

        with batch_threads():  # as the runtime makes its groups
            dist.init_process_group(
                "gloo",
                init_method=f"file://{request.meeting}",
                rank=request.rank,
                world_size=request.ranks,
            )


def _part(request: TimingRequest) -> None:
    """Leave them: the next request may have other ranks."""
    if request.ranks > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


def _scale_index(scales: list[float]) -> int:
    """Position of the mean batch among the scales."""
    return min(range(len(scales)), key=lambda i: abs(scales[i] - 1.0))


def _batch(request: TimingRequest, scale: float, seed: int) -> MiniBatch:
    """A synthetic batch with features, labels and the model's edge weights."""
    import torch

    from runtime.models.weights import fill_weights

    batch = synthetic_batch(request.shape.scaled(scale), seed)
    fill_weights(batch, request.workload, _degrees(batch))  # in place
    generator = torch.Generator().manual_seed(seed)
    batch.x = torch.randn(batch.n_id.shape[0], request.in_dim, generator=generator)
    if request.task == "link":
        shape, negatives = request.shape.scaled(scale), request.workload.links.num_negatives
        batch.y = torch.as_tensor(synthetic_links(shape, negatives, seed))
    elif request.task == "multilabel":
        shape = (batch.num_seeds, request.num_classes)
        batch.y = torch.randint(0, 2, shape, generator=generator)
    else:
        classes = 2 if request.task == "binary" else request.num_classes
        batch.y = torch.randint(0, classes, (batch.num_seeds,), generator=generator)
    return batch


def _on_rows(batches: Sequence[MiniBatch], out: NDArray[np.float32]) -> list[MiniBatch]:
    """The batches on rows that are put there anew before each step, as a loader puts them.

    Rows that lay there before had left the caches while their thread waited for a disk: steps were
    then longer than a run's, whose rows have just come (2.3 for 1.6 ms that a wait cost a run).
    """
    import torch

    rows = torch.as_tensor(out)
    return [replace(batch, x=rows[: batch.n_id.size]) for batch in batches]


def _degrees(batch: MiniBatch) -> NDArray[np.int64]:
    """Some degree for every vertex; its value does not change the work."""
    degrees: NDArray[np.int64] = np.full(int(batch.n_id.size), 16, dtype=np.int64)
    return degrees


class Builder:
    """Builds what requests ask for, and keeps loaders from one to the next."""

    def __init__(self) -> None:
        self._loaders = KeptLoaders()

    def build(self, plain: Any) -> Callable[[], TimingAnswer | LoadingAnswer]:
        """The model and batches of a request, ready to be timed; or a loader among its steps."""
        request = codec.decode(TimingRequest, plain)
        if request.loading is None:
            return build_timing(request)
        loader = self._loaders.of(request.loading, request.workload, request.rank)
        if not request.times_loading:
            return _Bench(request, loader).run
        return functools.partial(_Bench(request).run_loading, request.loading, loader)


def build_timing(request: TimingRequest) -> Callable[[], TimingAnswer]:
    """The model and batches of a request, ready to be timed without a loader."""
    return _Bench(request).run


if __name__ == "__main__":
    serve_standard_streams(
        ("torch", "torch_geometric.nn", "runtime.worker"), Builder().build, rehearse
    )
