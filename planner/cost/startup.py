"""Seconds before the first steady step: paid once, never part of a step or an epoch."""


def startup_seconds(
    *,
    process_seconds: float,
    own_row_bytes: float,
    topology_bytes: float,
    copy_bytes_per_second: float,
    warmup_seconds: float,
) -> float:
    """Start of the ranks until the steady state.

    T = process + (own rows + topology) / copy + warm-up

    Args:
        process_seconds: start of an interpreter and import of the libraries, all ranks at once.
        own_row_bytes: rows copied into each rank's own memory.
        topology_bytes: adjacency read through the page cache once.
        copy_bytes_per_second: of one reader while all ranks read.
        warmup_seconds: first steps above the steady ones (library warm-up, page faults).

    Source: modelling.md 9; process and warm-up seconds are measured by the profile.

    >>> startup_seconds(process_seconds=3.0, own_row_bytes=2e9, topology_bytes=2e9,
    ...     copy_bytes_per_second=4e9, warmup_seconds=0.5)
    4.5
    """
    loaded = (own_row_bytes + topology_bytes) / copy_bytes_per_second
    return process_seconds + loaded + warmup_seconds
