"""Times the model: steps of each batch size, with or without a loader's work before each.

The sizes are timed on synthetic batches, whose edges are even and whose sources are random. A
graph's own are neither: of its hubs' rows caches hold many, and the longest rows are another
thread's wait. So all sizes are scaled by what steps take on batches that the loader draws, over
steps on synthetic ones of as many vertices and edges (DEC-27).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.profiling.bench import Bench
from planner.profiling.in_line import InLineWork
from planner.profiling.loader_kept import Loader
from planner.profiling.serving import half_width
from planner.profiling.synthetic import synthetic_batch
from planner.profiling.timed_batches import drawn_batch, some_degrees, timed_batch
from planner.profiling.timing_request import TimingAnswer

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
