"""Seconds from the start of the ranks to their first step: never part of a step or an epoch."""


def startup_seconds(
    *,
    process_seconds: float,
    own_row_bytes: float,
    topology_bytes: float,
    copy_bytes_per_second: float,
) -> float:
    """Start of the ranks until their first step, as a run reports it.

    T = process + (own rows + topology) / copy

    What the first steps cost above the steady ones (library warm-up, page faults) comes after that
    and is told apart, in the prediction's provenance.

    Args:
        process_seconds: start of an interpreter and import of the libraries, all ranks at once.
        own_row_bytes: rows copied into each rank's own memory.
        topology_bytes: adjacency read through the page cache once.
        copy_bytes_per_second: of one reader while all ranks read.

    Source: docs/modelling.md 9; process seconds are measured by the probe, or by the profile.

    >>> startup_seconds(process_seconds=3.0, own_row_bytes=2e9, topology_bytes=2e9,
    ...     copy_bytes_per_second=4e9)
    4.0
    """
    loaded = (own_row_bytes + topology_bytes) / copy_bytes_per_second
    return process_seconds + loaded
