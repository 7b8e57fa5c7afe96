"""Seconds of a loader thread's work, and how it and the model's steps slow each other down.

The steps are the model's own. They leave the caches as training does, and they want the
interpreter's lock as often as training does: a loader thread waits for it between two of its
kernels, and would wait for nothing beside one long product (DEC-32). The other way round a step
waits for the lock whenever the loader's thread, or one that reads a disk for it, has it, and is put
off its core where they have none of their own.
"""

import functools
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from planner.workload import ColdCachePenalty, Interference, LoopOverhead
from runtime.cores import keep_thread_to
from runtime.plan.schema import Sampler

WARM_TURNS = 4
"""Before the clock counts: a thread makes room for its batches once."""
TIMED_BATCHES = 16
"""Batches timed alone, of each kind of work; fewer where steps are long."""
LEAST_BATCHES = 3
TURNS_SECONDS = 0.7
"""For them; after it no more than the least is timed."""
ROUNDS = 3
LEAST_ROUNDS = 2
STRETCH_SECONDS = 0.06
"""Of a round, for steps alone, steps beside work and work beside steps; longer where one is."""
MOST_SECONDS = 2.0
"""For each kind beside steps; after them no more than the least is timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingRequest:
    """What a timing process does among the model's steps."""

    graph: str
    """The dataset's folder."""
    fingerprint: str = ""
    """Of the graph that must lie there; empty: any."""
    sampler: Sampler
    num_ranks: int
    shared: bool
    """Ranks sample one batch together."""
    beside: bool
    """There is a core for a loader thread besides the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedGather:
    """A batch's rows gathered from memory, between two steps."""

    seconds: float
    """Median."""
    rows: float
    """Of a batch, mean."""
    row_bytes: int
    table_bytes: int
    """Of all rows that are gathered from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedDisk:
    """A batch's rows read from disk, between two steps."""

    seconds: float
    """Median."""
    requests: float
    """Reads of a batch, mean."""
    request_bytes: float
    """Of each, mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InLine:
    """What the thread that takes the steps does before each of them."""

    sample_seconds: float
    """Median of one batch."""
    sample_spread: float
    """Relative half-width (90%) of `sample_seconds`, from its repeats."""
    gathers: dict[str, TimedGather]
    """A batch's rows from memory of its own and from the dataset's mapped rows, under the names of
    the machine's tables; empty: the graph has no rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingAnswer:
    """What else a loader does was timed at."""

    after_wait: ColdCachePenalty | None
    """The steps, where their thread has read rows from disk before each; None: it has none."""
    beside: dict[str, Interference]
    """By kind of work; empty: not asked for."""
    disk: TimedDisk | None = None
    """Reading batches from disk by that thread; None: no rows, or the file system refuses direct
    reads."""
    handing: LoopOverhead | None = None
    """What lies between the stages of a step."""
    disk_start_seconds: float = 0.0
    """Median of reading a single row by that thread; 0: no rows."""


Work = Callable[[], float]
"""Does a batch's work and says how many seconds it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InTurns:
    """Median seconds of what was done in turns."""

    work: float
    step: float


def in_turns(
    work: Work, step: Callable[[], object], before: Callable[[], object] | None = None
) -> InTurns:
    """A step and some work one after the other, by the same thread.

    Args:
        work: of a loader.
        step: of the model.
        before: what a loader does before that work, untimed.
    """
    loading = work if before is None else functools.partial(_after, before, work)

    def turn() -> tuple[float, float]:
        return seconds_of(step), loading()

    for _ in range(WARM_TURNS):
        turn()
    until = time.perf_counter() + TURNS_SECONDS
    found = [turn() for _ in range(LEAST_BATCHES)]
    while len(found) < TIMED_BATCHES and time.perf_counter() < until:
        found.append(turn())
    steps, works = zip(*found, strict=True)
    return InTurns(work=statistics.median(works), step=statistics.median(steps))


def after_wait(waited: InTurns, others: InTurns) -> ColdCachePenalty:
    """By how much steps after a wait are longer than after other work.

    Args:
        waited: turns with what is waited for.
        others: turns with short work.
    """
    return ColdCachePenalty(wait_seconds=waited.work, seconds=max(0.0, waited.step - others.step))


def all_beside(
    works: Mapping[str, Work],
    step: Callable[[], object],
    cores: Mapping[str, Sequence[int]],
    *,
    alone: Mapping[str, float],
    unbroken: Collection[str] = (),
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Interference]:
    """Each kind of work, by a thread of its own, and the steps beside each other.

    A loader begins its batch with a step, as one does that has waited for training to take a batch:
    that is what the work takes. One for whose work training waits begins with the next batch at
    once. Steps are slowed down by work without a pause.

    Args:
        works: does one batch's work.
        step: one step of the model, by the calling thread.
        cores: what the thread keeps to, by kind; none: wherever the system puts it.
        alone: seconds of each kind of work between two steps.
        unbroken: kinds that are longer than steps, as a rule.
        before: what a loader does before, by kind, where `alone` follows it as well; untimed.
    """
    found, firsts = dict[str, Interference](), before or {}
    for kind, work in works.items():
        kept = (cores.get(kind, ()),)
        with ThreadPoolExecutor(1, initializer=keep_thread_to, initargs=kept) as loader:
            first = firsts.get(kind)
            begun = work if first is None else functools.partial(_after, first, work)
            found[kind] = _beside(
                work, step, loader, alone[kind], begun=None if kind in unbroken else begun
            )
    return found


def _after(before: Callable[[], object], work: Work) -> float:
    before()
    return work()


def _beside(
    work: Work,
    step: Callable[[], object],
    loader: Executor,
    alone: float,
    *,
    begun: Work | None,
) -> Interference:
    """Medians over rounds, in each of which steps are alone, and then are not.

    `begun` is the work as one does it that begins a batch with a step; None: without a pause.
    """

    def timed_step() -> float:
        return seconds_of(step)

    step_seconds = max(timed_step() for _ in range(WARM_TURNS))
    work_seconds = max(loader.submit(seconds_of, work).result() for _ in range(WARM_TURNS))
    stretch = max(STRETCH_SECONDS, 2 * step_seconds, 2 * work_seconds)
    rounds: list[Interference] = []
    until = time.perf_counter() + MOST_SECONDS
    while len(rounds) < LEAST_ROUNDS or (
        len(rounds) < ROUNDS and time.perf_counter() + 3 * stretch < until
    ):
        step_alone = _repeat(timed_step, stretch)
        stop = threading.Event()
        working = loader.submit(_until, work, stop)
        try:
            steps = _repeat(timed_step, stretch)
        finally:
            stop.set()
        work_beside = working.result()
        if begun is not None:
            work_beside = _repeat(lambda: _begun_with(step, loader.submit(begun)), stretch)
        rounds.append(Interference(work=work_beside / alone, step=steps / step_alone))
    return Interference(
        work=statistics.median(each.work for each in rounds),
        step=max(1.0, statistics.median(each.step for each in rounds)),
    )


def seconds_of(work: Callable[[], object]) -> float:
    """Elapsed seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _repeat(work: Work, stretch: float) -> float:
    """Median seconds, over as many times as fit."""
    until = time.perf_counter() + stretch
    found = [work()]
    while time.perf_counter() < until:
        found.append(work())
    return statistics.median(found)


def _until(work: Work, stop: threading.Event) -> float:
    """Median seconds, without the last: steps ended before it did."""
    found = [work()]
    while not stop.is_set():
        found.append(work())
    return statistics.median(found[:-1] or found)


def _begun_with(step: Callable[[], object], working: Future[float]) -> float:
    """Seconds of work that a thread has begun, with steps beside it until it is done."""
    step()
    while not working.done():
        step()
    return working.result()
