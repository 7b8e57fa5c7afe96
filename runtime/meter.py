"""Seconds of every stage of every step, recorded where the stage runs.

A meter belongs to one rank, whose training and prefetch threads share it without a lock: a record
is one atomic `list.append`. It reads two clocks: elapsed seconds, and core-seconds of the thread
that ran the stage, without what a torch or numba pool spends beside it.

Of a long training a stage keeps its first and its latest records; those between leave their sums.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gnnplan.runtime.report import (
    TRACED_STEPS,
    WARMUP_STEPS,
    Quantiles,
    Span,
    StageReport,
    quantiles,
)
from gnnplan.runtime.stages import LOADER_STAGES, Stage

STEP = "step"
"""Name in the meter of the whole step: the training stages and the Python between them."""
_LAST_TRACED = WARMUP_STEPS + TRACED_STEPS
"""Step from which on it is not kept when stages ran."""
KEPT_RECORDS = 4096
"""First records of a stage that are kept, and least number of its latest ones."""


class Sample(NamedTuple):
    """Record of one stage of one step."""

    step: int
    """Number of the step within this process, from 0, over epochs."""
    seconds: float
    core_seconds: float


@dataclass(frozen=True, slots=True)
class _Ended:
    """A record of the first steps: when it was made, and by which thread."""

    stage: str
    step: int
    thread: int
    end: float
    seconds: float

    @property
    def row(self) -> tuple[int, str]:
        """What cannot overlap: stages of one thread and kind (loading is inside its wait)."""
        loads = self.stage in set(LOADER_STAGES)
        return self.thread, STEP if self.stage == STEP else "load" if loads else "train"


class StageMeter:
    """Records of one rank: `with meter.measure(Stage.SAMPLE, step): ...`."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = {}
        self._dropped: dict[str, tuple[int, float]] = {}
        """Number and seconds of the records that a stage does not keep."""
        self._dropping = threading.Lock()
        self._counts: list[tuple[int, dict[str, int], dict[str, int]]] = []
        self._lists: list[tuple[int, dict[str, int], dict[str, int]]] = []
        self.small_steps: set[int] = set()
        """Steps on the small last batch of an epoch."""
        self.filling_steps: set[int] = set()
        """Steps whose batch was made ahead of no other, so that training waited for all of it."""
        self._ended: list[_Ended] = []
        self.on_enter: Callable[[str, int, bool], None] | None = None
        """Watcher that is told each stage and step that a thread enters."""

    def enter(self, stage: str, step: int, *, meets: bool = False) -> None:
        """Tell the watcher that the calling thread enters a stage and may wait for other ranks."""
        if self.on_enter is not None:
            self.on_enter(stage, step, meets)

    @contextmanager
    def measure(self, stage: str, step: int) -> Iterator[None]:
        """Time the body as a stage of a step; a body that raises leaves no record."""
        self.enter(stage, step)
        core, start = time.thread_time(), time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.add(stage, step, seconds, time.thread_time() - core)

    def add(self, stage: str, step: int, seconds: float, core_seconds: float = 0.0) -> None:
        """Record a stage that was timed elsewhere, and has just ended."""
        if step < _LAST_TRACED:
            self._place(stage, step, seconds)
        samples = self._samples.get(stage)
        if samples is None:
            samples = self._samples.setdefault(str(stage), [])
        samples.append(Sample(step, seconds, core_seconds))
        if len(samples) >= 3 * KEPT_RECORDS:
            self._drop_middle(str(stage), samples)

    def _drop_middle(self, stage: str, samples: list[Sample]) -> None:
        """Replace a stage's records between its first and latest ones by their sum.

        Threads add records meanwhile, at the end.
        """
        middle = slice(KEPT_RECORDS, 2 * KEPT_RECORDS)
        with self._dropping:
            if len(samples) >= 3 * KEPT_RECORDS:
                number, seconds = self._dropped.get(stage, (0, 0.0))
                gone = sum(each.seconds for each in samples[middle])
                self._dropped[stage] = number + KEPT_RECORDS, seconds + gone
                del samples[middle]

    def prolong(self, stage: str, step: int, seconds: float, core_seconds: float = 0.0) -> None:
        """Add to the stage's last record if it is of this step, else record it."""
        if step < _LAST_TRACED:
            self._place(stage, step, seconds)
        samples = self._samples.setdefault(str(stage), [])
        if samples and samples[-1].step == step:
            last = samples.pop()
            seconds, core_seconds = last.seconds + seconds, last.core_seconds + core_seconds
        samples.append(Sample(step, seconds, core_seconds))

    def _place(self, stage: str, step: int, seconds: float) -> None:
        thread, now = threading.get_ident(), time.perf_counter()
        self._ended.append(_Ended(str(stage), step, thread, now, seconds))

    def spans(self, *, skip_steps: int = 0) -> list[Span]:
        """Return when each stage ran, for the first steps after `skip_steps`, in order of start.

        A record says when its stage ended. What a thread did inside a stage and metered apart, such
        as an exchange inside a read, is placed before the rest of that stage.
        """
        last = skip_steps + TRACED_STEPS
        kept = [each for each in list(self._ended) if skip_steps <= each.step < last]
        trains = {each.thread for each in kept if each.stage == STEP}
        seen = dict.fromkeys(each.thread for each in kept)
        threads = sorted(seen, key=lambda name: name not in trains)
        number = {name: i + (not trains) for i, name in enumerate(threads)}
        free: dict[tuple[int, str], float] = {}
        placed: list[tuple[float, _Ended]] = []
        for each in sorted(kept, key=lambda each: each.end, reverse=True):
            start = min(each.end, free.get(each.row, each.end)) - each.seconds
            free[each.row] = start
            placed.append((start, each))
        zero = min((start for start, _ in placed), default=0.0)
        return [
            Span(
                stage=each.stage,
                step=each.step,
                thread=number[each.thread],
                start_seconds=round(start - zero, 9),
                seconds=round(each.seconds, 9),
            )
            for start, each in sorted(placed, key=lambda item: item[0])
        ]

    def count(self, step: int, rows: Mapping[str, int], num_bytes: Mapping[str, int]) -> None:
        """Record the feature rows and bytes that a step took from each source."""
        self._counts.append((step, dict(rows), dict(num_bytes)))
        self._sum_middle(self._counts)

    def count_lists(
        self, step: int, lists: Mapping[str, int], num_bytes: Mapping[str, int]
    ) -> None:
        """Record the adjacency lists and bytes that sampling a step took from each source."""
        self._lists.append((step, dict(lists), dict(num_bytes)))
        self._sum_middle(self._lists)

    def _sum_middle(self, counts: list[tuple[int, dict[str, int], dict[str, int]]]) -> None:
        """Replace counts between the first and the latest ones by their sum."""
        middle = slice(KEPT_RECORDS, 2 * KEPT_RECORDS)
        if len(counts) >= 3 * KEPT_RECORDS:
            with self._dropping:
                if len(counts) >= 3 * KEPT_RECORDS:
                    counts[middle] = [(counts[middle][-1][0], *_totals(counts[middle], 0))]

    def total(self, stage: str) -> tuple[int, float]:
        """Return the number of a stage's records so far, and their seconds."""
        with self._dropping:
            number, seconds = self._dropped.get(str(stage), (0, 0.0))
            kept = list(self._samples.get(str(stage), []))
        return number + len(kept), seconds + sum(each.seconds for each in kept)

    def seconds(self, stage: str, *, skip_steps: int = 0) -> list[float]:
        """Return a stage's elapsed seconds in order of step, without the first steps.

        Of many steps these are the first and the latest. What a step waited while the first batch
        of an iteration was made ahead of it is the epoch's, as in a plan (docs/formulas.md 8.11).
        """
        return [s.seconds for s in self._kept(stage, skip_steps)]

    def whole_seconds(self, stage: str, skip_steps: int) -> list[float]:
        """Return `seconds` of whole batches; of all where none is whole."""
        return [s.seconds for s in self._whole(stage, skip_steps)]

    def stages(self, *, skip_steps: int = 0) -> dict[str, StageReport]:
        """Summarise what is kept of each stage beyond the first `skip_steps` steps, if anything.

        Small last batches of epochs are left out, as in `whole_seconds`.
        """
        every = {stage: self._whole(stage, skip_steps) for stage in list(self._samples)}
        return {stage: _summary(kept) for stage, kept in every.items() if kept}

    def _kept(self, stage: str, skip_steps: int) -> list[Sample]:
        samples = [s for s in list(self._samples.get(str(stage), [])) if s.step >= skip_steps]
        if stage in (STEP, Stage.WAIT):
            fills = self._fills(skip_steps)
            samples = [s._replace(seconds=s.seconds - fills.get(s.step, 0.0)) for s in samples]
        return sorted(samples, key=lambda s: s.step)

    def _fills(self, skip_steps: int) -> dict[int, float]:
        """Return by step the seconds by which an iteration's first batch prolonged it.

        They are those of making the batch, or of training on it where that is less: a steady step
        takes the longer of the two.
        """
        found = dict[int, float]()
        for stage in LOADER_STAGES:
            for each in list(self._samples.get(stage, [])):
                if each.step >= skip_steps and each.step in self.filling_steps:
                    found[each.step] = found.get(each.step, 0.0) + each.seconds
        waits = {s.step: s.seconds for s in list(self._samples.get(Stage.WAIT, []))}
        whole = {s.step: s.seconds for s in list(self._samples.get(STEP, []))}
        for step, seconds in found.items():
            waited = waits.get(step, 0.0)
            trained = max(0.0, whole.get(step, 0.0) - waited)
            found[step] = min(seconds, waited, trained)
        return found

    def _whole(self, stage: str, skip_steps: int) -> list[Sample]:
        kept = self._kept(stage, skip_steps)
        return [s for s in kept if s.step not in self.small_steps] or kept

    def totals(self, *, skip_steps: int = 0) -> tuple[dict[str, int], dict[str, int]]:
        """Return rows and bytes by source, summed; `skip_steps` leaves out the first steps."""
        return _totals(self._counts, skip_steps)

    def list_totals(self, *, skip_steps: int = 0) -> tuple[dict[str, int], dict[str, int]]:
        """Return adjacency lists by source and their bytes; empty with topology on the host."""
        return _totals(self._lists, skip_steps)


def _totals(
    counts: list[tuple[int, dict[str, int], dict[str, int]]], skip_steps: int
) -> tuple[dict[str, int], dict[str, int]]:
    number, num_bytes = Counter[str](), Counter[str]()
    for step, step_number, step_bytes in list(counts):
        if step >= skip_steps:
            number.update(step_number)
            num_bytes.update(step_bytes)
    return dict(number), dict(num_bytes)


def _summary(samples: list[Sample]) -> StageReport:
    elapsed: Quantiles = quantiles([s.seconds for s in samples])
    return StageReport(
        median=elapsed.median,
        p10=elapsed.p10,
        p90=elapsed.p90,
        count=elapsed.count,
        mean=float(np.mean([s.seconds for s in samples])),
        core_seconds=float(np.mean([s.core_seconds for s in samples])),
    )
