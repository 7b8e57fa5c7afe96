"""Prefetching: threads that make batches ahead of the training thread.

Batches and draws are the same as without; an error comes where its batch would have come. Stages
that release the interpreter's lock (sampling, gathering) run beside the model. A stage that every
rank enters in the same order, such as an exchange, takes turns: any thread may run it, in batch
order.

`pass_through` is a batch's way through its stages, each timed by the meter.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, TypeVar, runtime_checkable

from gnnplan.runtime.comm.order import CollectiveOrder
from gnnplan.runtime.loader.device import tensors_of
from gnnplan.runtime.loader.stages import AbstractStage
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.process import keep_thread_to
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.streams import AbstractMark, AbstractStreams, HostStreams

T = TypeVar("T")
JOIN_SECONDS = 5.0
"""Longest wait for threads inside a stage when the prefetcher closes."""


@runtime_checkable
class Turns(Protocol):
    """Order in which stages of different batches run."""

    def take(self, stage: int, index: int) -> None:
        """Return when the stage has run for every batch before `index`."""
        ...

    def done(self, stage: int, index: int) -> None:
        """Let the next batch in."""
        ...


class InOrder:
    """Turns of a single thread, whose turn it always is."""

    def take(self, stage: int, index: int) -> None:
        """Return at once."""

    def done(self, stage: int, index: int) -> None:
        """Do nothing."""


class _ConsumerGone(Exception):  # noqa: N818  unwinds a thread, is never an error
    """Unwinds a thread whose consumer is gone."""


class Workers:
    """Daemon threads that outlive an epoch with their workspaces, kept to given cores.

    Each calls `enter` first: a GPU is current in the threads alone that have chosen it.
    """

    def __init__(
        self, count: int, *, cores: Sequence[int] = (), enter: Callable[[], None] | None = None
    ) -> None:
        self.count = count
        self._enter = enter
        self._cores = list(cores)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"prefetch-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()
        self.idents = frozenset(thread.ident for thread in self._threads)

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` on the next free thread."""
        self._jobs.put(job)

    def close(self) -> bool:
        """End the threads; return False where one is stuck in a stage and left behind."""
        others = [t for t in self._threads if t is not threading.current_thread()]
        for _ in self._threads:
            self._jobs.put(None)
        for thread in others:
            thread.join(JOIN_SECONDS)
        return not any(thread.is_alive() for thread in others)

    def _run(self) -> None:
        if self._enter is not None:
            self._enter()
        while (job := self._jobs.get()) is not None:
            keep_thread_to(self._cores)  # each time: pinning the process moves all threads
            job()
            del job  # what the job made must not live until the next one comes


Produce = Callable[[int, Turns], T]
"""Maker of item `index`, which passes its ordered stages through the turns."""


class Prefetcher(Generic[T]):
    """Iterator over `produce(0) ... produce(count - 1)`, made ahead by threads.

    Without workers, items are made when asked for. At most `depth` items are ready or under way
    ahead of the consumer. Where ranks meet in the making of an item and the consumer leaves early,
    `depth` items are then made, which may be under way on some rank.
    """

    def __init__(
        self,
        produce: Produce[T],
        count: int,
        *,
        workers: Workers | None,
        depth: int,
        meets: bool = False,
    ) -> None:
        self._produce = produce
        self._count = count
        self._depth = max(1, depth)
        self._meets = meets
        self._end = count
        """Number of items to make."""
        self._changed = threading.Condition()
        self._claimed = 0
        self._consumed = 0
        self._ready: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}
        self._turns: dict[int, int] = {}
        self._stopped = False
        """Whether no item is made any more."""
        self._left = False
        """Whether the consumer has left."""
        self._working = 0 if workers is None else min(workers.count, count)
        self._makers = frozenset() if workers is None else workers.idents
        self._serial = self._working == 0
        for _ in range(self._working):
            assert workers is not None
            workers.start(self._work)

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        index = self._consumed
        if index >= self._count or self._stopped or self._left:
            raise StopIteration
        if self._serial:
            self._consumed += 1
            return self._produce(index, InOrder())
        with self._changed:
            while index not in self._ready and index not in self._errors:
                if self._left:  # closed by another thread
                    raise StopIteration
                self._changed.wait()
            self._consumed += 1
            self._changed.notify_all()
            if index in self._errors:
                self._stopped = True
                raise self._errors.pop(index)
            return self._ready.pop(index)

    def close(self, *, at_once: bool = False, patience_s: float | None = JOIN_SECONDS) -> bool:
        """Stop making items and drop those that are ready; return whether all threads have left.

        With `at_once`, nothing more is made even where ranks meet: they may be gone. Without
        patience it waits until items under way are made. On a thread that makes items, where
        Python's collector may drop the consumer, it waits for nothing.
        """
        with self._changed:
            if not self._left:
                self._left = True
                finishes = self._meets and not (at_once or self._errors)
                self._stopped = self._stopped or not finishes
                self._end = min(self._count, self._consumed + self._depth)
            self._ready.clear()
            self._changed.notify_all()
            if threading.get_ident() in self._makers:
                return self._working == 0
            return self._changed.wait_for(lambda: self._working == 0, patience_s)

    def take(self, stage: int, index: int) -> None:
        """Wait until `stage` has run for every item before `index`."""
        with self._changed:
            while self._turns.get(stage, 0) != index:
                if self._stopped or self._failed_before(index):
                    raise _ConsumerGone
                self._changed.wait()
            if self._stopped:
                raise _ConsumerGone

    def done(self, stage: int, index: int) -> None:
        """Let item `index + 1` into `stage`."""
        with self._changed:
            self._turns[stage] = index + 1
            self._changed.notify_all()

    def _failed_before(self, index: int) -> bool:
        return any(failed < index for failed in self._errors)

    def _claim(self) -> int | None:
        with self._changed:
            while not self._stopped:
                if self._claimed >= self._end or self._errors:
                    return None
                if self._claimed < self._consumed + self._depth:
                    self._claimed += 1
                    return self._claimed - 1
                self._changed.wait()
            return None

    def _work(self) -> None:
        try:
            self._make_items()
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _make_items(self) -> None:
        while (index := self._claim()) is not None:
            try:
                item = self._produce(index, self)
            except _ConsumerGone:
                return
            except BaseException as error:
                with self._changed:
                    self._errors[index] = error
                    self._changed.notify_all()
                return
            with self._changed:
                if not (self._stopped or self._left):
                    self._ready[index] = item
                self._changed.notify_all()
            del item  # the buffer behind it must not live until the next item is claimed


IN_READ = ("exchange_ids", "exchange_rows")
"""Pipeline entries that the feature store carries out inside the gather's read."""


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """Batch on its way, with the mark at which its latest lane is done with it."""

    batch: MiniBatch
    mark: AbstractMark | None = None
    """Mark at which its latest lane is done with it; None: nothing is under way."""
    lane: str = ""


def pass_through(
    batch: MiniBatch,
    stages: Sequence[AbstractStage],
    meter: StageMeter,
    streams: AbstractStreams,
    index: int,
    turn: int,
    turns: Turns,
    order: CollectiveOrder | None = None,
) -> MadeBatch:
    """Pass a batch through all stages; return it with the mark at which it is whole.

    `index` numbers this process's steps, for the meter; `turn` this iteration's, for `turns`.
    Stages in which ranks meet run on the order's thread where there is one.
    """
    seconds: dict[str, float] = {}
    made = MadeBatch(batch)
    in_order = type(streams) is HostStreams
    for number, stage in enumerate(stages):
        if stage.ordered:
            turns.take(number, turn)
        meter.enter(stage.name, index, meets=stage.ordered)
        start, before = time.perf_counter(), _exchanged(made.batch)
        if in_order and not stage.ordered:
            core, batch = time.thread_time(), made.batch
            found = stage.wait(stage.submit(batch, index))
            core = time.thread_time() - core
            made = made if found is batch else MadeBatch(found)
        elif stage.ordered and order is not None:
            place = sum(each.ordered for each in stages[:number])
            run = functools.partial(_run_stage, stage, made, streams, index)
            made, core = order.meet(turn, place, run)
        else:
            made, core = _run_stage(stage, made, streams, index)
        elapsed = time.perf_counter() - start
        if stage.ordered:
            turns.done(number, turn)
        elapsed -= _exchanged(made.batch) - before
        seconds[stage.name] = elapsed
        meter.add(stage.name, index, elapsed, core)
    made.batch.seconds |= seconds
    return made


def _run_stage(
    stage: AbstractStage, made: MadeBatch, streams: AbstractStreams, index: int
) -> tuple[MadeBatch, float]:
    """Pass a batch through one stage on its lane; return it with this thread's core seconds."""
    core, mark, lane = time.thread_time(), made.mark, made.lane
    with streams.on(stage.lane):
        if mark is not None and stage.lane != lane:
            streams.wait(mark)
            streams.keep(tensors_of(made.batch))
        batch = stage.wait(stage.submit(made.batch, index))
        if stage.lane:  # the others work on the host, and are done
            mark, lane = streams.mark(), stage.lane
    return MadeBatch(batch, mark, lane), time.thread_time() - core


def take_made(made: MadeBatch, streams: AbstractStreams) -> MiniBatch:
    """Let the training lane's further work come after a batch is made; return the batch."""
    if made.mark is not None:
        streams.wait(made.mark)
        streams.keep(tensors_of(made.batch))
    return made.batch


def _exchanged(batch: MiniBatch) -> float:
    """Return the batch's seconds in exchanges so far, which are metered apart."""
    if not batch.seconds:
        return 0.0
    return sum(batch.seconds.get(name, 0.0) for name in IN_READ)
