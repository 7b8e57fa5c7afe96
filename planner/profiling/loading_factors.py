"""How much longer reading this graph's batches takes than the machine's tables say.

The tables' reads are at random places, one after the other; a batch's rows recur, lie beside each
other and come in order of id, and a disk that was given a pause, as between steps, reads faster
than one that was not.
"""

from planner.cost.disk_rates import QUEUE_DEPTH, disk_rate
from planner.cost.disk_swing import between
from planner.cost.rates import lookup
from planner.machine import MachineModel
from planner.profiling.loader_seconds import InLine, LoadingAnswer


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
