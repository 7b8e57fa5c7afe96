"""What else a loader does in several rounds, the model's own rounds between them, as one answer.

A virtual machine's disk has several speeds, each for some seconds (DEC-33): a single round would
find one of them, and rounds that follow each other the same one.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from planner.profiling.loader_seconds import LoadingAnswer
from planner.workload import AfterWait, Beside, Handing

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


def quieter(rounds: Sequence[dict[str, Beside]]) -> dict[str, Beside]:
    """Of each kind of work, the rounds whose steps were slowed down least; of these the median.

    Now and then a round has steps three times as long as the run of the same graph, and longer
    work too (DEC-34). A disk's work slows no step down and scatters between rounds, so the first of
    several such rounds would be a random one.

    >>> one, two, three = (Beside(work=w, step=s) for w, s in ((1.3, 3.5), (1.2, 1.0), (0.8, 1.0)))
    >>> quieter([{"disk": one}, {"disk": two}, {"disk": three}])
    {'disk': Beside(work=1.0, step=1.0)}
    """
    found = dict[str, list[Beside]]()
    for each in rounds:
        for kind, times in each.items():
            found.setdefault(kind, []).append(times)
    return {kind: _least_slowed(times) for kind, times in found.items()}


def _least_slowed(rounds: Sequence[Beside]) -> Beside:
    least = min(each.step for each in rounds)
    alike = [each.work for each in rounds if each.step <= ALIKE * least]
    return Beside(work=statistics.median(alike), step=least)


def _middle_wait(found: Sequence[AfterWait]) -> AfterWait:
    return AfterWait(
        wait_seconds=statistics.median(each.wait_seconds for each in found),
        seconds=statistics.median(each.seconds for each in found),
    )


def _middle_handing(found: Sequence[Handing]) -> Handing:
    return Handing(
        seeds=statistics.median(each.seeds for each in found),
        labels=statistics.median(each.labels for each in found),
        between=statistics.median(each.between for each in found),
    )
