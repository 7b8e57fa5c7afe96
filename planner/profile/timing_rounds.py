"""A profile's timings, in rounds: the model for every number of ranks and threads, and loading.

What else a loader does in several rounds, the model's own rounds between them, as one answer.

A virtual machine's disk has several speeds, each for some seconds (DEC-33): a single round would
find one of them, and rounds that follow each other the same one.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.probe.timing import Patience
from planner.profile.loader_seconds import InLine, LoadingAnswer
from planner.profile.model_seconds import (
    among_steps_of,
    loading_request,
    model_timing,
    timing_request,
)
from planner.profile.protocol import TimingAnswer
from planner.profile.rounds import calm_ones, is_apart, quick_in_line, quick_round
from planner.profile.team import Team
from planner.progress import Progress
from planner.settings import PlanSettings
from planner.workload import (
    BatchProfile,
    ColdCachePenalty,
    Combination,
    Interference,
    LoopOverhead,
    ModelTiming,
)
from runtime.graph.dataset import Graph

ALIKE = 1.005
"""Rounds whose steps differ by less were slowed down equally."""


def middle_loading(rounds: Sequence[LoadingAnswer]) -> LoadingAnswer:
    """Medians over the rounds, of each number by itself; of work beside steps the quieter rounds.

    Args:
        rounds: of the same request, so of the same batches; at least one.
    """
    first = rounds[0]
    waits = [each.after_wait for each in rounds if each.after_wait is not None]
    disks = [each.disk.seconds for each in rounds if each.disk is not None]
    handed = [each.handing for each in rounds if each.handing is not None]
    return replace(
        first,
        after_wait=_middle_wait(waits) if waits else None,
        beside=quieter([each.beside for each in rounds]),
        disk=None if first.disk is None else replace(first.disk, seconds=statistics.median(disks)),
        handing=_middle_handing(handed) if handed else None,
        disk_start_seconds=statistics.median(each.disk_start_seconds for each in rounds),
    )


def quieter(rounds: Sequence[dict[str, Interference]]) -> dict[str, Interference]:
    """Of each kind of work, the rounds whose steps were slowed down least; of these the median.

    Now and then a round has steps three times as long as the run of the same graph, and longer
    work too (DEC-34). A disk's work slows no step down and scatters between rounds, so the first of
    several such rounds would be a random one.

    >>> pairs = ((1.3, 3.5), (1.2, 1.0), (0.8, 1.0))
    >>> one, two, three = (Interference(work=work, step=step) for work, step in pairs)
    >>> quieter([{"disk": one}, {"disk": two}, {"disk": three}])
    {'disk': Interference(work=1.0, step=1.0)}
    """
    found = dict[str, list[Interference]]()
    for each in rounds:
        for kind, times in each.items():
            found.setdefault(kind, []).append(times)
    return {kind: _least_slowed(times) for kind, times in found.items()}


def _least_slowed(rounds: Sequence[Interference]) -> Interference:
    least = min(each.step for each in rounds)
    alike = [each.work for each in rounds if each.step <= ALIKE * least]
    return Interference(work=statistics.median(alike), step=least)


def _middle_wait(found: Sequence[ColdCachePenalty]) -> ColdCachePenalty:
    return ColdCachePenalty(
        wait_seconds=statistics.median(each.wait_seconds for each in found),
        seconds=statistics.median(each.seconds for each in found),
    )


def _middle_handing(found: Sequence[LoopOverhead]) -> LoopOverhead:
    return LoopOverhead(
        seeds=statistics.median(each.seeds for each in found),
        labels=statistics.median(each.labels for each in found),
        between=statistics.median(each.between for each in found),
    )


ROUNDS = 3
"""Times that everything is timed, ranks, threads and loading in turn; of steps, with what is done
in line before them, the last of the quickest third is kept (`rounds`)."""
STEP_ROUNDS = 9
"""Rounds in which steps are timed, as far as `MORE_SECONDS` suffice (DEC-30)."""
MOST_ROUNDS, MORE_SECONDS = 12, 40.0
"""Most rounds of steps whose quickest rounds differ, and seconds of all rounds beyond `ROUNDS`."""
SCALE_SECONDS, MOST_STEPS = 0.08, 84
"""Seconds that the steps of each scale fill per round but the first, and most steps (DEC-30)."""
APART = 1.08
"""Ratio of the two quickest rounds from which one of them counts as disturbed (DEC-30)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedBatch:
    """One batch size, and all that have such batches."""

    batch: BatchProfile
    """Of one rank."""
    combinations: list[Combination]
    """Of the same ranks."""
    settings: PlanSettings
    """Sampler, model and global batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What was found of one of them."""

    model: ModelTiming
    in_line: InLine | None
    """Before the model's steps; None: nothing."""
    loading: LoadingAnswer


def time_all(
    graph: Graph,
    wanted: Sequence[TimedBatch],
    team: Team,
    progress: Progress | None,
    patience: Patience,
) -> list[Timed]:
    """Time all batch sizes: the model at every number of threads, and loading, in rounds.

    A round goes through everything: a machine that gets slower for a minute meets all alike, and
    leaves which of them is the fastest as it is. Steps have more rounds, as many as `MORE_SECONDS`
    allow, and those whose rounds differ some on top.

    Args:
        graph: the dataset.
        wanted: batch sizes, of one request or of several that are to be compared.
        team: processes.
        progress: told what is going on.
        patience: with cores that are far apart, or shared, for a while.

    Returns:
        Of each batch size what the model and what loading takes, in their order.

    Raises:
        WorkerFailed: a process ended with an error.
    """
    timed = [_Rounds(graph, each) for each in wanted]
    in_a_round, rounds = sum(len(each.ordered) for each in timed), STEP_ROUNDS
    done, more, last = 0, 0.0, 0.0
    for number in range(MOST_ROUNDS):
        if more > MORE_SECONDS:
            break
        all_again = number < ROUNDS or (number < STEP_ROUNDS and more + last <= MORE_SECONDS)
        begun = time.perf_counter()
        for each in timed:
            for combination in each.ordered if all_again else each.wanting():
                if progress is not None:
                    ranks, threads = combination.ranks, combination.threads
                    words = f"timing {each.what}, {ranks} ranks x {threads} threads"
                    words += f": {_how_far(number, rounds, last)}"
                    progress(words, min(1.0, done / (rounds * in_a_round)))
                each.time(team, combination, patience)
                done += 1
            if number < ROUNDS:
                each.load(team, patience)
        last = time.perf_counter() - begun
        if number >= ROUNDS:
            more += last
        elif last > 0:  # As many will fit, as far as is known.
            rounds = min(STEP_ROUNDS, ROUNDS + int(MORE_SECONDS / last))
    return [each.kept() for each in timed]


def _how_far(number: int, rounds: int, last_seconds: float) -> str:
    """Which round it is, and for how long the rest will take where one was timed.

    >>> _how_far(0, 9, 0.0), _how_far(3, 9, 12.4)
    ('round 1 of 9', 'round 4 of 9, about 74 s left')
    """
    rounds = max(rounds, number + 1)
    left = f", about {last_seconds * (rounds - number):.0f} s left" if last_seconds > 0 else ""
    return f"round {number + 1} of {rounds}{left}"


class _Rounds:
    """What was found of one batch size, round by round."""

    def __init__(self, graph: Graph, wanted: TimedBatch) -> None:
        self._graph, self._settings, self._batch = graph, wanted.settings, wanted.batch
        self._combinations = wanted.combinations
        self.ordered = sorted(wanted.combinations, key=lambda c: (c.ranks, c.threads))
        self._steps: dict[Combination, list[tuple[list[TimingAnswer], bool]]] = {
            combination: [] for combination in self.ordered
        }
        """By round, and whether it was disturbed."""
        self._loads = list[tuple[LoadingAnswer, bool]]()
        self._loading = loading_request(graph, wanted.settings, wanted.batch, wanted.combinations)

    @property
    def what(self) -> str:
        """The sampler."""
        return self._settings.sampler

    def time(self, team: Team, combination: Combination, patience: Patience) -> None:
        """One more round of a combination's steps."""
        # Bytes are alike in all combinations of the same ranks.
        first = combination == self.ordered[0]
        request = timing_request(
            self._graph, self._settings, self._batch, combination, with_last=first
        )
        if earlier := self._steps[combination]:
            request = replace(request, steps=_enough_steps(request.steps, earlier[0][0][0]))
        found = patience.tried(lambda: team.time(request, combination.ranks))
        self._steps[combination].append(found)

    def load(self, team: Team, patience: Patience) -> None:
        """One more round of loading."""
        ranks = self.ordered[0].ranks
        self._loads.append(patience.tried(lambda: team.load(self._loading, ranks)))

    def wanting(self) -> list[Combination]:
        """Those of which the quickest undisturbed rounds differ, or there are no two."""
        return [c for c, rounds in self._steps.items() if _is_wanting(rounds)]

    def kept(self) -> Timed:
        """Of steps the quick rounds, of what else a loader does those in the middle."""
        calm = {combination: calm_ones(rounds) for combination, rounds in self._steps.items()}
        timing = model_timing([(c, quick_round(found)) for c, found in calm.items()])
        # Libraries warm up once in a process: in whichever answer that was.
        every = [a for rounds in self._steps.values() for answers, _ in rounds for a in answers]
        warmup = max(answer.warmup_seconds for answer in every)
        chosen, _ = among_steps_of(self._combinations)
        return Timed(
            model=replace(timing, warmup_seconds=warmup),
            in_line=quick_in_line(calm[chosen]),
            loading=middle_loading(calm_ones(self._loads)),
        )


def _is_wanting(rounds: list[tuple[list[TimingAnswer], bool]]) -> bool:
    """Whether the quickest undisturbed rounds differ, or there are no two."""
    calm = sum(not disturbed for _, disturbed in rounds)
    return calm < 2 or is_apart(calm_ones(rounds), APART)


def _enough_steps(least: int, found: TimingAnswer) -> int:
    """Steps of each scale that fill the time."""
    step = statistics.fmean(found.forward_backward)
    return max(least, min(MOST_STEPS, math.ceil(SCALE_SECONDS / step)) if step > 0.0 else least)
