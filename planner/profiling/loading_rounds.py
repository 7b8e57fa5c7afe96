"""What a loader was timed at in several rounds, the model's own rounds between them, as one answer.

A virtual machine's disk read the same batches in 16 and in 25 ms, each for some seconds: a single
round would find one of the two, and rounds that follow each other the same one.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.profiling.loader_seconds import LoadingAnswer
from planner.workload import AfterWait, Beside, Handing


def middle_loading(rounds: Sequence[LoadingAnswer]) -> LoadingAnswer:
    """Medians over the rounds, of each number by itself; of steps beside work the quieter round.

    Args:
        rounds: of the same request, so of the same batches; at least one.
    """
    first = rounds[0]

    def middle(number: Callable[[LoadingAnswer], float]) -> float:
        return statistics.median(number(each) for each in rounds)

    waits = [each.after_wait for each in rounds if each.after_wait is not None]
    disks = [each.disk.seconds for each in rounds if each.disk is not None]
    handed = [each.handing for each in rounds if each.handing is not None]
    return replace(
        first,
        sample_seconds=middle(lambda each: each.sample_seconds),
        gathers={
            name: replace(
                gather, seconds=statistics.median(each.gathers[name].seconds for each in rounds)
            )
            for name, gather in first.gathers.items()
        },
        after_wait=_middle_wait(waits) if waits else None,
        beside=quieter([each.beside for each in rounds]),
        disk=None if first.disk is None else replace(first.disk, seconds=statistics.median(disks)),
        handing=_middle_handing(handed) if handed else None,
        disk_start_seconds=middle(lambda each: each.disk_start_seconds),
        # Rounds are minutes apart, and differ by more than the repeats of one of them.
        sample_spread=max(
            middle(lambda each: each.sample_spread),
            half_range([each.sample_seconds for each in rounds]),
        ),
    )


def half_range(values: Sequence[float]) -> float:
    """Half of what lies between the least and the most, over the middle; 0 for nothing but zeros.

    >>> half_range([0.9, 1.0, 1.3])
    0.2
    """
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / middle if middle > 0 else 0.0


def quieter(rounds: Sequence[dict[str, Beside]]) -> dict[str, Beside]:
    """Of each kind of work the median over rounds, and of its steps those slowed down least.

    Now and then one has steps three times as long, which the run of the same graph did not, and
    which was not seen again in ten repeats. Work that is a disk's took .8 and 1.25 of what it takes
    between steps, in rounds whose steps were alike: the round of the least steps is a random one.

    >>> one, two = Beside(work=1.3, step=3.5), Beside(work=1.1, step=1.2)
    >>> quieter([{"disk": one}, {"disk": two}])
    {'disk': Beside(work=1.2, step=1.2)}
    """
    found = dict[str, list[Beside]]()
    for each in rounds:
        for kind, times in each.items():
            found.setdefault(kind, []).append(times)
    return {
        kind: Beside(
            work=statistics.median(each.work for each in times),
            step=min(each.step for each in times),
        )
        for kind, times in found.items()
    }


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
