"""How much longer reading this graph's batches takes than the machine's tables say.

The tables' reads are at random places, one after the other; a batch's rows recur, lie beside each
other and come in order of id, and a disk that was given a pause, as between steps, reads faster
than one that was not.

Memory is as fast a minute later. A disk that others read as well is not: one of a virtual machine
was, over ten seconds, .8 to 1.3 times as fast as over the next, and neither the probe's reading nor
the profile's is the speed of a run. In 67 runs whose rows all lay on that disk, of eleven graphs
and six probes, the table was 12% off beside what it was for all runs of its probe (standard
deviation of logarithms), the profile's reading 13%, and their geometric mean 10%.
"""

import math

from planner.cost.disk_rates import QUEUE_DEPTH, disk_rate
from planner.cost.rates import lookup
from planner.machine import MachineModel
from planner.profiling.loader_seconds import InLine, LoadingAnswer

SWING = 0.3
"""Logarithm of what two readings of one disk are apart and may both be of: more is no swing."""


def loading_factors(
    machine: MachineModel, in_line: InLine | None, found: LoadingAnswer, ranks: int
) -> dict[str, float]:
    """Seconds of what was timed over what the machine's tables say of so many rows or requests.

    Args:
        machine: its tables; where one is missing there is nothing to be held against.
        in_line: what gathering was timed at; None: it was not.
        found: what reading a disk was timed at.
        ranks: of one host, that loaded at once, each from tables of its own.

    Returns:
        A factor by the name of the table.
    """
    said = dict[str, tuple[float, float]]()
    for table, gather in (in_line.gathers if in_line else {}).items():
        if table in machine.tables:
            rate = lookup(
                machine,
                table,
                rows=gather.rows,
                row_bytes=gather.row_bytes,
                working_set_bytes=max(gather.row_bytes, gather.table_bytes),
                readers=ranks,
            )
            said[table] = gather.seconds, gather.rows * rate.seconds
    if found.disk is not None and "disk_read" in machine.tables:
        rate = disk_rate(machine, found.disk.request_bytes, QUEUE_DEPTH, ranks)
        # However few rows a batch reads, it takes a start, which is priced apart.
        seconds = found.disk.seconds - found.disk_start_seconds
        said["disk_read"] = seconds, found.disk.requests * rate.seconds
    factors = {
        table: measured / expected
        for table, (measured, expected) in said.items()
        if measured > 0 and expected > 0
    }
    if "disk_read" in factors:
        factors["disk_read"] = between(factors["disk_read"])
    return factors


def between(factor: float) -> float:
    """What is expected of a disk that was read twice: `factor` times as long the second time.

    Half of the way, as neither time is better than the other. What is more than a disk's swing is
    this graph's (it may lie on another disk than the probe's file): of that, the second alone.

    >>> [round(between(f), 3) for f in (1.0, 1.21, 0.81, 4.0)]
    [1.0, 1.1, 0.9, 3.872]
    """
    apart = math.log(factor)
    if apart == 0.0:
        return 1.0
    own = max(0.0, 1.0 - (SWING / apart) ** 2)
    return math.exp(apart * (1.0 + own) / 2.0)
