"""A timing process, which runs the real model and a loader's real work when told to.

`python -m gnnplan.planner.profile.timing_process` speaks the lines of `planner.profile.protocol`.

Steps are timed as a run without loader threads takes them: a batch is sampled, its rows are
gathered while the sampler's tables fill the caches, and a step computes on them. The sizes are
timed on synthetic batches, whose edges are even and whose sources are random. So all sizes are
scaled by the seconds on drawn batches over those on synthetic ones of equal size (DEC-27).
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.profile.loading import (
    DISK_START,
    BesideWork,
    KeptLoaders,
    Loader,
    Work,
    after_wait,
    disk_work,
    seconds_of,
    time_beside,
    time_in_turns,
)
from gnnplan.planner.profile.loop import (
    Bench,
    drawn_batch,
    on_rows,
    rehearse,
    some_degrees,
    synthetic_batch,
    timed_batch,
)
from gnnplan.planner.profile.protocol import (
    GPU,
    GpuTimingReply,
    GpuTimingRequest,
    InLine,
    LoadingAnswer,
    LoadingRequest,
    TimedGather,
    TimingAnswer,
    TimingRequest,
    half_width,
    serve_standard_streams,
)
from gnnplan.planner.workload import Interference, LoopOverhead
from gnnplan.runtime import codec
from gnnplan.runtime.device import has_triton
from gnnplan.runtime.process import usable_core_ids
from gnnplan.runtime.sampling.minibatch import MiniBatch

T = TypeVar("T")


class TimedLoading:
    """A loader's work between and beside steps of the mean batch."""

    def __init__(self, bench: Bench, request: LoadingRequest, loader: Loader) -> None:
        self._bench, self._request, self._loader = bench, request, loader
        steady = bench.batches[bench.steady]
        self._reading = loader.reading(max(batch.n_id.size for batch in steady))
        self._batches = on_rows(steady, self._reading.out)
        self._steps = itertools.count()

    def run(self) -> LoadingAnswer:
        """Time each kind of work for a share of the request's seconds."""
        asked = self._request
        with disk_work(self._loader.graph, self._loader.vertices, self._reading.out) as read:
            works = self._works(read.works)
            # Beside steps each kind takes twice as long as in turn with them; a start is no batch.
            beside = {k: w for k, w in works.items() if asked.beside and k != DISK_START}
            share = self._bench.request.seconds / (1 + len(works) + 2 * len(beside))
            handed = self._handing(share)
            turns = {
                kind: time_in_turns(work, self._step_on_rows, self._before(kind), seconds=share)
                for kind, work in works.items()
            }
            interference = dict[str, Interference]()
            if beside:
                asked_beside = {
                    kind: BesideWork(
                        work=work,
                        alone=turns[kind].work,
                        # As a run has it: a reader of a disk is kept off the cores of compute.
                        cores=usable_core_ids()[self._bench.request.threads :]
                        if kind == "disk"
                        else (),
                        unbroken=kind in read.works,
                        before=self._before(kind),
                    )
                    for kind, work in beside.items()
                }
                interference = time_beside(asked_beside, self._step, seconds=2 * share)
        return LoadingAnswer(
            after_wait=after_wait(turns["disk"], turns["gather"]) if "disk" in turns else None,
            beside=interference,
            disk=read.timed(turns["disk"].work) if "disk" in turns else None,
            handing=handed,
            disk_start_seconds=turns[DISK_START].work if DISK_START in turns else 0.0,
        )

    def _works(self, disk: dict[str, Work]) -> dict[str, Work]:
        """Return sampling and gathering, where a thread or a disk needs them, and disk works."""
        found = dict[str, Work]()
        if self._request.beside:
            found["sample"] = functools.partial(seconds_of, self._loader.sample)
        if (self._request.beside or disk) and "gather" in self._reading.gathered:
            found["gather"] = self._reading.gathered["gather"].work
        return found | disk

    def _before(self, kind: str) -> Callable[[], object] | None:
        """Return the sampling before rows are read, whose tables then fill the caches."""
        return None if kind == "sample" else self._loader.sample

    def _handing(self, seconds: float) -> LoopOverhead:
        from gnnplan.planner.profile.loop import LEAST_STEPS, MOST_STEPS, handing  # imports torch

        bench = self._bench
        step = max(1e-6, min(seconds_of(self._step) for _ in range(2)))
        steps = max(LEAST_STEPS, min(MOST_STEPS, int(seconds / step)))
        found = handing(
            bench.loop,
            self._loader.graph,
            bench.request.workload,
            self._request.num_ranks,
            bench.batches[bench.steady],
            bench.steps + 1,
            steps,
        )
        bench.steps += steps
        return found

    def _step(self) -> None:
        self._bench.turn(self._bench.steady, next(self._steps))

    def _step_on_rows(self) -> None:
        self._bench.step(self._batches[next(self._steps) % len(self._batches)])


class InLineWork:
    """Sampling and gathering by the thread that takes the steps, one batch a step.

    Rows come from private memory, and after `to_next_rows` from the dataset's mapped ones: not in
    turn, since caches would keep a table's rows until the next step.
    """

    def __init__(self, loader: Loader, least_rows: int) -> None:
        self._loader, self._reading = loader, loader.reading(least_rows)
        self._kinds = sorted(self._reading.gathered)
        """Private rows first; the first kind is the one gathered now."""
        self._sampled = list[float]()
        self._gathered: dict[str, list[float]] = {kind: [] for kind in self._reading.gathered}

    @property
    def rows(self) -> NDArray[np.float32] | None:
        """Rows as they are read, shape [rows, feature_dim]; None: the graph has none."""
        return self._reading.out if self._reading.gathered else None

    def do(self) -> None:
        """Sample a batch and gather its rows."""
        self._sampled.append(seconds_of(self._loader.choose()))  # without its seeds
        self.gather()

    def sample(self) -> MiniBatch:
        """Draw the next batch, untimed."""
        return self._loader.sample()

    def gather(self) -> None:
        """Gather the rows of a batch."""
        if self._kinds:
            kind = self._kinds[0]
            self._gathered[kind].append(self._reading.gathered[kind].work())

    def to_next_rows(self) -> None:
        """Gather the dataset's mapped rows from here on, where there are any."""
        self._kinds = self._kinds[-1:]

    def forget(self) -> None:
        """Discard the times so far."""
        for found in (self._sampled, *self._gathered.values()):
            found.clear()

    def found(self) -> InLine:
        """Return the medians."""
        return InLine(
            sample_seconds=float(np.median(self._sampled)),
            sample_spread=half_width(self._sampled),
            gathers={
                kind: TimedGather(
                    seconds=float(np.median(self._gathered[kind])),
                    rows=of_kind.rows,
                    row_bytes=of_kind.row_bytes,
                    table_bytes=of_kind.table_bytes,
                )
                for kind, of_kind in self._reading.gathered.items()
            },
        )


WARMUP_STEPS, LEAST_WARMUP = 10, 2
"""Most and least first steps of a process, which are thrown away."""
DRAWN_WARMUP = 2
"""Steps on drawn batches that are thrown away."""
LEAST_STEPS = 3
"""Least steps of each scale, and on drawn batches."""
MEMORY_EVENT = "[memory]"
"""Name of the profiler's events of tensors' memory (torch 2.13)."""


class TimedModel:
    """A model's steps, their memory and their start-up."""

    def __init__(self, bench: Bench, loader: Loader | None = None) -> None:
        """Prepare the steps of `bench`, each of which follows the loader's work if there is one."""
        self._bench = bench
        self._loading: InLineWork | None = None
        self._hopeless = False
        if loader is not None:
            most = max(batch.n_id.size for of_scale in bench.batches for batch in of_scale)
            self._loading = InLineWork(loader, most)
            if self._loading.rows is not None:
                bench.read_from(self._loading.rows)

    def run(self) -> TimingAnswer:
        """Warm up, then time the scales in turn so that drift meets all alike."""
        bench, request = self._bench, self._bench.request
        warm = self._repeat(
            lambda i: self._timed(bench.steady, i), WARMUP_STEPS, LEAST_WARMUP, request.seconds / 5
        )
        if self._loading is not None:
            self._loading.forget()
        # Of the quickest, since libraries warm up in the others.
        quickest = min(compute + update for compute, update, _ in warm)
        self._hopeless = bench.agree(quickest > request.hopeless_seconds)
        turns = self._turns()
        scales = range(len(bench.batches))
        seconds = [[turn[s][0] for turn in turns] for s in scales]
        optimizer = [update for turn in turns for _, update, _ in turn]
        medians = [float(np.median(values)) for values in seconds]
        steady = medians[bench.steady] + float(np.median(optimizer))
        drawn = self._drawn_steps()
        compute = [each for each, _ in drawn]
        own = float(np.median(compute)) / medians[bench.steady] if drawn else 1.0
        # In a run ranks wait for whose batch is the larger: by how long, those they drew tell.
        reduced = [added for _, added in drawn] or [added for turn in turns for *_, added in turn]
        answer = TimingAnswer(
            forward_backward=[own * median for median in medians],
            spread=max(half_width(values) for values in [*seconds, *([compute] if drawn else [])]),
            optimizer_seconds=float(np.median(optimizer)),
            warmup_seconds=max(0.0, sum(map(sum, warm)) - len(warm) * steady),
            batch_seconds=self._batch_seconds() if request.counts_bytes else 0.0,
            num_parameters=sum(p.numel() for p in bench.loop.model.parameters()),
            activation_bytes=self._activation_bytes() if request.counts_bytes else 0,
            in_line=None if self._loading is None else self._loading.found(),
            all_reduce=reduced if request.ranks > 1 else [],
            own_batches=bool(drawn),
        )
        bench.part()
        return answer

    def _turns(self) -> list[list[tuple[float, float, float]]]:
        """Take a step of each scale in turn, half of the turns on the loader's other rows."""
        request, scales = self._bench.request, range(len(self._bench.batches))
        first = request.steps // 2 if self._loading is not None else 0

        def turn(i: int) -> list[tuple[float, float, float]]:
            return [self._timed(s, i) for s in scales]

        least = 1 if self._hopeless else LEAST_STEPS
        seconds = 0.0 if self._hopeless else request.seconds / 4
        found = self._repeat(turn, first, min(first, least), seconds)
        if self._loading is not None:
            self._loading.to_next_rows()
        rest = request.steps - first
        return found + self._repeat(turn, rest, min(rest, least), seconds)

    def _repeat(self, work: Callable[[int], T], most: int, least: int, seconds: float) -> list[T]:
        """Do some work up to `most` times; beyond `least` only while seconds are left."""
        until, found = time.perf_counter() + seconds, list[T]()
        while len(found) < most and (
            len(found) < least or self._bench.agree(time.perf_counter() < until)
        ):
            found.append(work(len(found)))
        return found

    def _timed(self, scale: int, i: int) -> tuple[float, float, float]:
        if self._loading is not None:
            self._loading.do()
            self._meet()
        return self._bench.turn(scale, i)

    def _meet(self) -> None:
        if self._bench.request.ranks > 1:
            self._bench.comm.barrier()

    def _drawn_steps(self) -> list[tuple[float, float]]:
        request, loading = self._bench.request, self._loading
        if (
            loading is None
            or self._hopeless
            or request.task == "link"
            or (request.loading and request.loading.shared)
        ):
            return []

        def step(i: int) -> tuple[float, float]:
            batch = drawn_batch(request, loading.sample(), loading.rows, i)
            loading.gather()
            self._meet()
            compute, _, added = self._bench.step(batch)
            return compute, added

        most = DRAWN_WARMUP + request.steps
        least = min(most, DRAWN_WARMUP + LEAST_STEPS)
        return self._repeat(step, most, least, request.seconds / 4)[DRAWN_WARMUP:]

    def _batch_seconds(self) -> float:
        """Time adding edge weights to a mean batch, as the loader's last stage does."""
        from gnnplan.runtime.models.weights import fill_weights

        shape, seconds = self._bench.request.shape, list[float]()
        for seed in range(1 + len(self._bench.batches[0])):
            batch = synthetic_batch(shape, seed)
            degree = some_degrees(batch)
            start = time.perf_counter()
            fill_weights(batch, self._bench.request.workload, degree)
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds[1:]))

    def _activation_bytes(self) -> int:
        bench, most = self._bench, _peak_bytes(lambda: self._bench.turn(self._bench.steady, 0))
        if bench.request.last is not None:
            alike = replace(bench.request, shape=bench.request.last)
            batch = timed_batch(alike, 1.0, 0)
            most = max(most, _peak_bytes(lambda: bench.step(batch)))
        return most


def _peak_bytes(step: Callable[[], object]) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return held_bytes([
        event.nbytes()
        for event in sorted(_events(profiler), key=lambda event: event.start_ns())
        if event.name() == MEMORY_EVENT
    ])  # fmt: skip


def held_bytes(changes: Sequence[int]) -> int:
    """Return the most bytes held at once; a change gives bytes back where it is below 0.

    >>> held_bytes([100, 40, -40, 60, -100, -60])
    160
    """
    return int(np.cumsum(changes).max(initial=0))


def _events(profiler: Any) -> list[Any]:
    return profiler.profiler.kineto_results.events()


def build(
    loaders: KeptLoaders, plain: Any
) -> Callable[[], TimingAnswer | LoadingAnswer | GpuTimingReply]:
    """Return the function that measures what a request, as plain data, asks for."""
    if GPU in plain:
        if not has_triton():
            why = "Triton is not installed; pip install 'gnnplan[gpu]'"
            return functools.partial(GpuTimingReply, refusal=why)
        from gnnplan.planner.profile.gpu_timing import answer_request

        return functools.partial(answer_request, codec.decode(GpuTimingRequest, plain[GPU]))
    request = codec.decode(TimingRequest, plain)
    if request.loading is None:
        return TimedModel(Bench(request)).run
    loader = loaders.get(request.loading, request.workload, request.rank)
    if not request.times_loading:
        return TimedModel(Bench(request), loader).run
    return TimedLoading(Bench(request), request.loading, loader).run


if __name__ == "__main__":
    serve_standard_streams(
        ("torch", "torch_geometric.nn", "gnnplan.runtime.worker"),
        functools.partial(build, KeptLoaders()),
        rehearse,
    )
