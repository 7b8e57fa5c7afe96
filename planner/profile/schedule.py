"""The schedule of a profile's timings within a time limit (DEC-102).

Each round visits every number of ranks and threads in turn, and the loading of every batch size, so
that drift meets all alike. The time left is dealt to the visits left. Ranks and threads whose step
can no longer be the shortest are left out of further rounds. Of the rounds the middle one is kept.
Where two differ by more than `APART` there is one more; where the two quickest still do, they are
uncertain.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from gnnplan.planner.profile.model_seconds import (
    among_steps_of,
    loading_request,
    model_timing,
    reduce_seconds,
    timing_request,
)
from gnnplan.planner.profile.protocol import (
    NO_BOUND,
    InLine,
    LoadingAnswer,
    TimingAnswer,
    TimingRequest,
    half_range,
)
from gnnplan.planner.profile.team import Team
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, counted, silent
from gnnplan.planner.workload import BatchProfile, Combination, ModelTiming
from gnnplan.runtime.graph.dataset import Graph

ROUNDS = 2
"""Rounds over all that may still win, before one more of those that differ."""
STEPS_SECONDS, BESIDE_SECONDS, BETWEEN_SECONDS = 2.0, 4.0, 1.5
"""Most seconds of a visit to steps, to loading between and beside steps, and between them alone."""
LEAST_SECONDS = 0.2
"""Seconds of a visit where no time is left: a process times the least."""
EXTRA_SECONDS = 0.7
"""Seconds that a visit takes beyond its own (building, warming), before that is known."""
APART = 0.08
"""Difference of the two quickest rounds over the quicker from which they are uncertain."""
FIRST_WIDTH, LEAST_WIDTH = 0.25, 0.05
"""Least relative half-widths of a step's seconds after one round, which cannot show disturbances
that last for seconds, and after more."""
HOPELESS = 2.0
"""Multiple of the shortest step's longest duration from which one warm-up step is enough."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedBatch:
    """One batch size, and the combinations that have it."""

    batch: BatchProfile
    combinations: list[Combination]
    """Ways to share the cores, of the same number of ranks."""
    settings: PlanSettings
    """Sampler and model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Times of one batch size."""

    model: ModelTiming
    in_line: InLine | None
    """Work before steps on as many threads as leave a loader a core; None: there was none."""
    loading: LoadingAnswer
    notes: list[str] = field(default_factory=list[str])
    """Notes on what was not reached, left out early, or stayed uncertain."""


def time_all(
    graph: Graph,
    wanted: Sequence[TimedBatch],
    team: Team,
    progress: Progress | None,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    enough: float | None = None,
) -> list[Timed]:
    """Time the model and loading of every batch size within some seconds.

    Every batch size is visited once, however little time there is. `team` has as many processes as
    the most ranks; `clock` returns monotonic seconds. With `enough`, no round is begun
    once no way to share the cores can save more than that share of the shortest step (DEC-146).
    """
    say, until, batches = (
        progress or silent,
        clock() + seconds,
        [_BatchRounds(graph, w) for w in wanted],
    )
    extra = [EXTRA_SECONDS]
    for number in range(ROUNDS + 1):
        left = gain_left([steps.step_range() for steps in _reached(batches)])
        if number and enough is not None and left <= enough:
            break
        visits = list(_visits(batches, number))
        later = sum(visit.most for visit in visits) if number == 0 else 0.0
        for i, visit in enumerate(visits):
            begun, beyond = clock(), statistics.fmean(extra)
            left = until - begun
            if left <= beyond + LEAST_SECONDS and not visit.needed:
                continue
            say(_words(visit.what, number, left), min(1.0, 1.0 - left / seconds))
            share = left * visit.most / (later + sum(each.most for each in visits[i:]))
            given = max(LEAST_SECONDS, min(visit.most, share - beyond))
            visit.take(team, given, min(NO_BOUND, HOPELESS * _shortest_at_most(batches)))
            extra.append(max(0.0, clock() - begun - given))
    return [each.kept() for each in batches]


def _words(what: str, number: int, left: float) -> str:
    """Say what is timed, which round it is, and how long all of it may last.

    >>> _words("timing labor", 0, 31.7), _words("timing labor", 2, -0.2)
    ('timing labor: round 1 of 2, at most 32 s more', 'timing labor: once more, at most 0 s more')
    """
    which = f"round {number + 1} of {ROUNDS}" if number < ROUNDS else "once more"
    return f"{what}: {which}, at most {max(0.0, left):.0f} s more"


@dataclass(kw_only=True, slots=True)
class _TimedSteps:
    """Steps of one way to share the cores, round by round."""

    combination: Combination
    request: TimingRequest
    what: str
    needed: bool
    """Whether it is timed once even without time, as one of its batch size is."""
    rounds: list[list[TimingAnswer]] = field(default_factory=list[list[TimingAnswer]])
    behind: bool = False
    """Whether its least seconds exceed another's most."""

    @property
    def most(self) -> float:
        """Most seconds of a visit."""
        return LEAST_SECONDS if self.behind else STEPS_SECONDS

    def take(self, team: Team, seconds: float, hopeless_seconds: float) -> None:
        request = replace(
            self.request,
            seconds=seconds,
            hopeless_seconds=hopeless_seconds,
            # Bytes are alike in all rounds.
            counts_bytes=self.request.counts_bytes and not self.rounds,
        )
        self.rounds.append(team.time(request, self.combination.ranks))
        self.needed = False

    @property
    def apart(self) -> float:
        """Difference of the two quickest rounds over the quicker; 0 for fewer."""
        if len(self.rounds) < 2:
            return 0.0
        first, second, *_ = sorted(map(_round_seconds, self.rounds))
        return second / first - 1.0 if first > 0 else 0.0

    def step_range(self) -> tuple[float, float]:
        """Return a step's least seconds (all loading hidden) and most seconds (none hidden)."""
        found = middle_round(self.rounds)
        spread = max(answer.spread for answer in found)
        width = max(spread, self.apart, FIRST_WIDTH if len(self.rounds) == 1 else LEAST_WIDTH)
        scales = self.request.scales
        mean = min(range(len(scales)), key=lambda s: abs(scales[s] - 1.0))
        training = max(a.forward_backward[mean] + a.optimizer_seconds for a in found)
        training += float(np.median(reduce_seconds(found)))
        loading = max(_loading_seconds(answer) for answer in found)
        return max(0.0, 1.0 - width) * training, (1.0 + width) * (training + loading)


@dataclass(kw_only=True, slots=True)
class _LoadingRounds:
    ranks: int
    request: TimingRequest
    what: str
    needed: bool = False
    rounds: list[LoadingAnswer] = field(default_factory=list[LoadingAnswer])

    @property
    def most(self) -> float:
        beside = self.request.loading is not None and self.request.loading.beside
        return BESIDE_SECONDS if beside else BETWEEN_SECONDS

    def take(self, team: Team, seconds: float, hopeless_seconds: float) -> None:
        del hopeless_seconds  # loading has to be known of every batch size
        self.rounds.append(team.load(replace(self.request, seconds=seconds), self.ranks))


class _BatchRounds:
    """One batch size: steps of each combination, and loading."""

    def __init__(self, graph: Graph, wanted: TimedBatch) -> None:
        settings, batch, combinations = wanted.settings, wanted.batch, wanted.combinations
        self.main, _ = among_steps_of(combinations)
        self.steps = [
            _TimedSteps(
                combination=c,
                # Bytes are alike in all combinations of the same ranks.
                request=timing_request(graph, settings, batch, c, counts_bytes=c == self.main),
                what=f"timing {settings.sampler}, {_name(c)}",
                needed=c == self.main,
            )
            for c in sorted(combinations, key=lambda c: (c != self.main, c.threads))
        ]
        """Steps by combination; the main one, beside whose steps loading is timed, is first."""
        self.loading = _LoadingRounds(
            ranks=combinations[0].ranks,
            request=loading_request(graph, settings, batch, combinations),
            what=f"timing {settings.sampler}, loading on {_name(combinations[0], threads=False)}",
        )

    def kept(self) -> Timed:
        """Keep the middle round of steps, and the middle of each number of loading."""
        reached = sorted((s for s in self.steps if s.rounds), key=lambda s: s.combination.threads)
        main = self.steps[0]
        timing = model_timing([(s.combination, middle_round(s.rounds)) for s in reached])
        every = [answer for s in reached for found in s.rounds for answer in found]
        alive = [s for s in reached if not s.behind]
        table = replace(
            timing.forward_backward,
            # Half of what lies between the two quickest.
            spread=max(timing.forward_backward.spread, 0.0, *(s.apart / 2 for s in alive)),
            uncertain=any(s.apart > APART or len(s.rounds) == 1 for s in alive),
        )
        return Timed(
            model=replace(
                timing,
                forward_backward=table,
                activation_bytes=max(a.activation_bytes for a in every),
                # Libraries warm up once in a process: in whichever answer that was.
                warmup_seconds=max(a.warmup_seconds for a in every),
            ),
            in_line=in_line_of(main.rounds),
            loading=middle(self.loading.rounds)
            if self.loading.rounds
            else LoadingAnswer(after_wait=None, beside={}),
            notes=list(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        for steps in self.steps:
            name, count = steps.what.removeprefix("timing "), len(steps.rounds)
            if not count:
                yield f"{name}: not reached in time; priced as the nearest that was"
            elif steps.behind:
                rounds = counted(count, "round")
                yield f"{name}: slower than another by more than its interval after {rounds}"
            elif count == 1:
                yield f"{name}: uncertain, timed in one round"
            elif steps.apart > APART:
                yield (
                    f"{name}: uncertain, the quickest two of {count} rounds differ by "
                    f"{steps.apart:.0%}"
                )
        if not self.loading.rounds:
            yield f"{self.loading.what.removeprefix('timing ')}: not reached in time"


def _name(combination: Combination, *, threads: bool = True) -> str:
    """Name ranks and threads.

    >>> _name(Combination(ranks=2, threads=1, shared=True))
    '2 ranks sharing a batch x 1 thread'
    """
    words = counted(combination.ranks, "rank")
    words += f" on each of {combination.hosts} hosts" if combination.hosts > 1 else ""
    words += " sharing a batch" if combination.shared else ""
    return f"{words} x {counted(combination.threads, 'thread')}" if threads else words


def _visits(batches: Sequence[_BatchRounds], number: int) -> Iterator[_TimedSteps | _LoadingRounds]:
    """List a round's visits: first what each batch size needs, then all that may still win."""
    if number == 0:
        yield from (each.steps[0] for each in batches)
        yield from (each.loading for each in batches)
        yield from (steps for each in batches for steps in each.steps[1:])
        return
    _leave_out(batches)
    for each in batches:
        alive = [steps for steps in each.steps if not steps.behind]
        if number == ROUNDS:
            yield from (steps for steps in alive if steps.apart > APART)
        elif alive:
            yield from alive
            yield each.loading
    if number < ROUNDS:  # one round alone may have been disturbed
        yield from (steps for each in batches for steps in each.steps if steps.behind)


def _leave_out(batches: Sequence[_BatchRounds]) -> None:
    """Mark steps whose least seconds exceed another's most."""
    shortest = _shortest_at_most(batches)
    for steps in (steps for batch in batches for steps in batch.steps if steps.rounds):
        steps.behind = steps.step_range()[0] > shortest


def _shortest_at_most(batches: Sequence[_BatchRounds]) -> float:
    """Return the most seconds of the shortest step."""
    plain = [
        steps.step_range()[1]
        for batch in batches
        for steps in batch.steps
        if steps.rounds and steps.combination.hosts == 1 and not steps.combination.shared
    ]
    return min(plain, default=math.inf)


def _reached(batches: Sequence[_BatchRounds]) -> list[_TimedSteps]:
    return [steps for batch in batches for steps in batch.steps if steps.rounds]


def gain_left(ranges: Sequence[tuple[float, float]]) -> float:
    """Return the largest share of a step that another than the shortest may still save.

    `ranges` are least and most seconds of each step; the shortest has the least of the most.

    >>> round(gain_left([(0.9, 1.0), (0.95, 2.0), (3.0, 4.0)]), 3), gain_left([(1.0, 2.0)])
    (0.05, 0.0)
    """
    ordered = sorted(ranges, key=lambda each: each[1])
    return max([0.0, *(1.0 - low / ordered[0][1] for low, _ in ordered[1:])])


def middle_round(rounds: Sequence[Sequence[TimingAnswer]]) -> list[TimingAnswer]:
    """Return the ranks' answers of the middle round, with the exchange of the quickest one.

    Of two rounds the quicker counts, since disturbances only add. A short exchange between
    processes of one host has two speeds, of which a run of more steps keeps the faster (DEC-31).
    """
    fast = min(rounds, key=lambda found: float(np.median(reduce_seconds(found))))
    return [replace(a, all_reduce=b.all_reduce) for a, b in zip(_middle(rounds), fast, strict=True)]


def _middle(rounds: Sequence[Sequence[TimingAnswer]]) -> Sequence[TimingAnswer]:
    return sorted(rounds, key=_round_seconds)[(len(rounds) - 1) // 2]


def in_line_of(rounds: Sequence[Sequence[TimingAnswer]]) -> InLine | None:
    """Return the mean over ranks of the work before the middle round's steps."""
    kept = [answer.in_line for answer in _middle(rounds) if answer.in_line]
    if not kept:
        return None
    sampled = [statistics.fmean(a.in_line.sample_seconds for a in found if a.in_line)
               for found in rounds]  # fmt: skip
    return InLine(
        sample_seconds=statistics.fmean(each.sample_seconds for each in kept),
        sample_spread=max(*(each.sample_spread for each in kept), half_range(sampled)),
        gathers={
            kind: replace(
                gather,
                seconds=statistics.fmean(each.gathers[kind].seconds for each in kept),
                rows=statistics.fmean(each.gathers[kind].rows for each in kept),
            )
            for kind, gather in kept[0].gathers.items()
        },
    )


def middle(found: Sequence[T]) -> T:
    """Return the middle of each number in equal structures, the lower of an even count.

    Disturbances only add, so of two the lower is the better.

    >>> middle([{"a": 1.0, "b": None}, {"a": 3.0, "b": None}, {"a": 2.0, "b": None}])
    {'a': 2.0, 'b': None}
    """
    every: list[Any] = list(found)
    first = every[0]
    if isinstance(first, float):
        return cast("T", statistics.median_low(every))
    if isinstance(first, dict):
        names: list[Any] = list(cast("dict[Any, Any]", first))
        return cast("T", {name: middle([each[name] for each in every]) for name in names})
    if dataclasses.is_dataclass(first):
        names = [each.name for each in dataclasses.fields(first)]
        values = {name: middle([getattr(each, name) for each in every]) for name in names}
        return cast("T", replace(cast("Any", first), **values))
    return cast("T", first)


def _round_seconds(found: Sequence[TimingAnswer]) -> float:
    """Return the seconds of a step of each scale over all ranks, with the work before it."""
    return sum(
        sum(a.forward_backward) + len(a.forward_backward) * _loading_seconds(a) for a in found
    )


def _loading_seconds(answer: TimingAnswer) -> float:
    if answer.in_line is None:
        return 0.0
    gathers = [gather.seconds for gather in answer.in_line.gathers.values()]
    return answer.in_line.sample_seconds + (statistics.fmean(gathers) if gathers else 0.0)
