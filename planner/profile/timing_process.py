"""One timing process: runs the real model on batches when told to.

`python -m planner.profile.timing_process` speaks the lines of planner.profile.protocol. What it
builds imports torch, and only when asked to build.

Times the model: steps of each batch size, with or without a loader's work before each.

The sizes are timed on synthetic batches, whose edges are even and whose sources are random. A
graph's own are neither: of its hubs' rows caches hold many, and the longest rows are another
thread's wait. So all sizes are scaled by what steps take on batches that the loader draws, over
steps on synthetic ones of as many vertices and edges (DEC-27).

Times what else a loader does on the graph, between and beside the steps of the mean batch.

Sampling and gathering in line are timed with the model; here they are what steps beside
them, and steps after a wait for the disk, are held against.

A loader's work by the thread that takes the steps, before each of them: done, and timed.

So it is in a run without loader threads: a batch is sampled, its rows are gathered while the
sampler's tables fill the caches, and a step computes on them. Timed where the model is, it meets
the same neighbours: of rounds that were disturbed neither is kept.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.profile.loader_seconds import (
    InLine,
    LoadingAnswer,
    LoadingRequest,
    TimedGather,
    Work,
    after_wait,
    all_beside,
    in_turns,
    seconds_of,
)
from planner.profile.loader_session import (
    DISK_START,
    KeptLoaders,
    Loader,
    disk_work,
    sampling,
    timed_disk,
)
from planner.profile.loop import Bench
from planner.profile.protocol import TimingAnswer, TimingRequest, half_width, serve_standard_streams
from planner.profile.synthetic import synthetic_batch
from planner.profile.timed_batches import drawn_batch, on_rows, rehearse, some_degrees, timed_batch
from planner.workload import Interference
from runtime import codec
from runtime.cores import usable_core_ids
from runtime.sampling.minibatch import MiniBatch


def time_loading(bench: Bench, asked: LoadingRequest, loader: Loader) -> LoadingAnswer:
    """Time a loader's work among steps of the mean batch.

    Args:
        bench: the model and its batches.
        asked: how ranks share the graph, and whether a loader thread has a core.
        loader: of this rank.
    """
    from planner.profile.loop import STEPS, handing  # imports torch

    work, graph, sample = bench.request.workload, loader.graph, loader.sample
    steps = itertools.count()

    def step() -> None:
        bench.turn(bench.steady, next(steps))

    def step_on_rows() -> None:
        bench.step(fresh[next(steps) % len(fresh)])

    steady = bench.batches[bench.steady]
    reading = loader.reading(max(batch.n_id.size for batch in steady))
    out = reading.out
    fresh = on_rows(steady, out)
    # Mapped rows are gathered by a thread that computes as the one of private rows does.
    gathers = {k: each.work for k, each in reading.gathered.items() if k == "gather"}
    handed = handing(bench.loop, graph, work, asked.num_ranks, steady, bench.steps + 1)
    bench.steps += STEPS
    beside = dict[str, Interference]()
    with disk_work(graph, loader.vertices, out) as read:
        between = dict[str, Work]()
        if asked.beside:
            between["sample"] = sampling(sample)
        if asked.beside or read.works:
            between |= gathers
        between |= read.works
        # Rows are read after a batch was drawn, whose tables the caches are then full of: after
        # LADIES, which sums over all nodes, a gather takes a third longer.
        before = {kind: sample for kind in between if kind != "sample"}
        turns = {k: in_turns(work, step_on_rows, before.get(k)) for k, work in between.items()}
        if asked.beside:
            paired = {k: w for k, w in between.items() if k != DISK_START}  # a start is no batch
            alone = {kind: found.work for kind, found in turns.items()}
            # As a run has it: a loader that reads a disk is kept off the cores of compute.
            cores = {"disk": usable_core_ids()[bench.request.threads :]}
            beside = all_beside(
                paired, step, cores, alone=alone, unbroken=read.works, before=before
            )
    return LoadingAnswer(
        after_wait=after_wait(turns["disk"], turns["gather"]) if "disk" in turns else None,
        beside=beside,
        disk=timed_disk(read, turns["disk"]) if "disk" in turns else None,
        handing=handed,
        disk_start_seconds=turns[DISK_START].work if DISK_START in turns else 0.0,
    )


class InLineWork:
    """Samples and gathers, one batch a step.

    Rows come from private memory, and from the dataset's mapped ones after `to_next_rows`: not in
    turn, since what caches keep of a table is there in the next step.
    """

    def __init__(self, loader: Loader, least_rows: int) -> None:
        """Work of `loader`, whose batches have room for `least_rows` rows."""
        self._loader, self._reading = loader, loader.reading(least_rows)
        self._kinds = sorted(self._reading.gathered)
        """Private rows first; those that are gathered now are the first."""
        self._sampled = list[float]()
        self._gathered: dict[str, list[float]] = {kind: [] for kind in self._reading.gathered}

    @property
    def rows(self) -> NDArray[np.float32] | None:
        """Where rows are put, [rows, feature_dim]; None: the graph has none."""
        return self._reading.out if self._reading.gathered else None

    def do(self) -> None:
        """A batch's work."""
        self._sampled.append(seconds_of(self._loader.choose()))  # without its seeds
        self.gather()

    def sample(self) -> MiniBatch:
        """Draw the next batch, untimed."""
        return self._loader.sample()

    def gather(self) -> None:
        """The part of a batch's work that follows sampling."""
        if self._kinds:
            kind = self._kinds[0]
            self._gathered[kind].append(self._reading.gathered[kind].work())

    def to_next_rows(self) -> None:
        """Gather the other rows from here on, where there are two."""
        self._kinds = self._kinds[-1:]

    def forget(self) -> None:
        """Leave out what was done so far: the first batches make room for all."""
        for found in (self._sampled, *self._gathered.values()):
            found.clear()

    def found(self) -> InLine:
        """Medians over what was done."""
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


DRAWN_WARMUP = 2
"""Steps on drawn batches that are thrown away: sizes alternated before."""
WARMUP_STEPS = 10
"""First steps of a process, which are thrown away: libraries warm up in them."""
MEMORY_EVENT = "[memory]"
"""Name of the profiler's events of tensors' memory (torch 2.13)."""


class TimedModel:
    """A model's steps, and what else they take."""

    def __init__(self, bench: Bench, loader: Loader | None = None) -> None:
        """Time `bench`, whose steps follow the loader's work where there is one."""
        self._bench = bench
        self._loading: InLineWork | None = None
        """Done before each timed step."""
        if loader is not None:
            most = max(batch.n_id.size for of_scale in bench.batches for batch in of_scale)
            self._loading = InLineWork(loader, most)
            if self._loading.rows is not None:
                bench.read_from(self._loading.rows)

    def run(self) -> TimingAnswer:
        """Warm up, then time the scales in turn so that drift meets all alike."""
        warm = [self._timed(self._bench.steady, i) for i in range(WARMUP_STEPS)]
        if self._loading is not None:
            self._loading.forget()
        seconds: list[list[float]] = [[] for _ in self._bench.batches]
        optimizer: list[float] = []
        reduced: list[float] = []
        steps = self._bench.request.steps
        for i in range(steps):
            if self._loading is not None and i == steps // 2:
                self._loading.to_next_rows()
            for s in range(len(self._bench.batches)):
                compute, update, added = self._timed(s, i)
                seconds[s].append(compute)
                optimizer.append(update)
                reduced.append(added)
        medians = [float(np.median(values)) for values in seconds]
        steady = medians[self._bench.steady] + float(np.median(optimizer))
        drawn, waited = self._drawn_steps()
        own = float(np.median(drawn)) / medians[self._bench.steady] if drawn else 1.0
        # In a run ranks wait for whose batch is the larger: by how long, those they drew tell.
        reduced = waited or reduced
        answer = TimingAnswer(
            forward_backward=[own * median for median in medians],
            spread=max(half_width(values) for values in [*seconds, *([drawn] if drawn else [])]),
            optimizer_seconds=float(np.median(optimizer)),
            warmup_seconds=max(0.0, sum(map(sum, warm)) - WARMUP_STEPS * steady),
            batch_seconds=self._batch_seconds(),
            num_parameters=sum(p.numel() for p in self._bench.loop.model.parameters()),
            activation_bytes=self._activation_bytes(),
            in_line=None if self._loading is None else self._loading.found(),
            all_reduce=reduced if self._bench.request.ranks > 1 else [],
            own_batches=bool(drawn),
        )
        self._bench.part()
        return answer

    def _timed(self, scale: int, i: int) -> tuple[float, float, float]:
        """A step, after what is done before each."""
        if self._loading is not None:
            self._loading.do()
            self._meet()
        return self._bench.turn(scale, i)

    def _meet(self) -> None:
        """Ranks are held against each other by what they load elsewhere."""
        if self._bench.request.ranks > 1:
            self._bench.comm.barrier()

    def _drawn_steps(self) -> tuple[list[float], list[float]]:
        """Seconds of forward and backward, and of adding gradients over ranks.

        On batches of the graph's own, each rank its own; empty without them.
        """
        request, loading = self._bench.request, self._loading
        # Links are numbered within their batch, and shared ones are a part of a batch.
        if (
            loading is None
            or request.task == "link"
            or (request.loading and request.loading.shared)
        ):
            return [], []
        found = list[tuple[float, float]]()
        for i in range(DRAWN_WARMUP + request.steps):
            batch = drawn_batch(request, loading.sample(), loading.rows, i)
            loading.gather()
            self._meet()
            compute, _, added = self._bench.step(batch)
            found.append((compute, added))
        kept = found[DRAWN_WARMUP:]
        return [compute for compute, _ in kept], [added for _, added in kept]

    def _batch_seconds(self) -> float:
        """Seconds to add edge weights to a mean batch, as the loader's last stage does."""
        from runtime.models.weights import fill_weights

        shape, seconds = self._bench.request.shape, list[float]()
        for seed in range(1 + len(self._bench.batches[0])):
            batch = synthetic_batch(shape, seed)
            degree = some_degrees(batch)
            start = time.perf_counter()
            fill_weights(batch, self._bench.request.workload, degree)
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds[1:]))

    def _activation_bytes(self) -> int:
        """Most bytes of tensors that a step holds at once, at the mean batch or the last one.

        What ranks keep of what they free comes on top, where there is room for it
        (`runtime.memory_sum.room_to_keep`): no plan needs it.
        """
        bench, most = self._bench, _held(lambda: self._bench.turn(self._bench.steady, 0))
        if bench.request.last is not None:
            alike = replace(bench.request, shape=bench.request.last)
            batch = timed_batch(alike, 1.0, 0)
            most = max(most, _held(lambda: bench.step(batch)))
        return most


def _held(step: Callable[[], object]) -> int:
    """Most bytes of tensors that a step holds at once."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
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


class Builder:
    """Builds what requests ask for, and keeps loaders from one to the next."""

    def __init__(self) -> None:
        self._loaders = KeptLoaders()

    def build(self, plain: Any) -> Callable[[], TimingAnswer | LoadingAnswer]:
        """The model and batches of a request, ready to be timed; or a loader among its steps."""
        request = codec.decode(TimingRequest, plain)
        if request.loading is None:
            return TimedModel(Bench(request)).run
        loader = self._loaders.of(request.loading, request.workload, request.rank)
        if not request.times_loading:
            return TimedModel(Bench(request), loader).run
        return functools.partial(time_loading, Bench(request), request.loading, loader)


if __name__ == "__main__":
    serve_standard_streams(
        ("torch", "torch_geometric.nn", "runtime.worker"), Builder().build, rehearse
    )
