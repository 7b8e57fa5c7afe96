"""Measure whether the machine keeps its pace: equal short work on every core, again and again.

Virtual cores are threads of real ones. A neighbour on the other thread of a core takes up to half
of its speed, and shows as neither load nor stolen time. Medians of probes and of steps then depend
on the moment, and no prediction can be held against them. The work is the interpreter's own, which
neighbours slow down most (DEC-16).
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

TURNS = 20_000
"""Of the loop that is timed: half a millisecond."""
QUICKEST = 0.02
"""Share of the stretches that the quickest ones are."""
QUIET = 1.25
"""Mean time over the least up to which a machine keeps its pace."""
SECONDS = 2.0
PAUSE_SECONDS = 5.0


def slowdown(seconds: float = SECONDS) -> float:
    """Mean time of equal work over its least, while all cores this process may use do it.

    Args:
        seconds: for which they are kept busy.

    Raises:
        CalledProcessError: a process that works ended with an error.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [-1]
    # Processes: threads would wait for each other's interpreter. Isolated, they start soon.
    words = [sys.executable, "-I", "-S", __file__, str(seconds)]
    started = [subprocess.Popen([*words, str(c)], stdout=subprocess.PIPE) for c in cores]
    answers = [process.communicate()[0] for process in started]
    for process in started:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return statistics.fmean(float(answer) for answer in answers)


def over_least(stretches: list[float]) -> float:
    """Mean of stretches over the quickest of them.

    >>> over_least([1.0] * 50 + [2.0] * 50)
    1.5
    """
    quick = sorted(stretches)[int(QUICKEST * len(stretches))]
    return statistics.fmean(stretches) / quick


def wait_for_pace(
    most: float,
    most_seconds: float,
    say: Callable[[float], object] | None = None,
    *,
    seconds: float = SECONDS,
) -> float:
    """Wait until equal work takes at most so many times its least; what it took in the end.

    Args:
        most: of `slowdown`.
        most_seconds: to wait; 0 looks once.
        say: is told of each time that it took longer.
        seconds: for which it is measured each time.
    """
    end = time.monotonic() + most_seconds
    while True:
        found = slowdown(seconds)
        if found <= most or time.monotonic() + PAUSE_SECONDS > end:
            return found
        if say is not None:
            say(found)
        time.sleep(PAUSE_SECONDS)


def work(seconds: float, core: int) -> float:
    """Do the work on a core for so long; its mean time over its least."""
    with contextlib.suppress(OSError):  # the core was taken from this process meanwhile
        if core >= 0:
            os.sched_setaffinity(0, [core])
    clock, found = time.perf_counter, list[float]()
    end = clock() + seconds
    while not found or clock() < end:
        total, start = 0, clock()
        for i in range(TURNS):
            total += i
        found.append(clock() - start)
    return over_least(found)


if __name__ == "__main__":
    sys.stdout.write(f"{work(float(sys.argv[1]), int(sys.argv[2]))}\n")
