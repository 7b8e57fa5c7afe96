"""The discrete choices: how many ranks, how their threads are split, how far to read ahead.

Everything is enumerated, which is cheap: a machine of 64 cores has a few dozen ways.
"""

from planner.candidate import Candidate
from planner.errors import SettingsError
from planner.settings import PlanSettings
from runtime.plan import Threads

DEPTHS = (2, 4)
"""Prefetch depths worth trying: 2 removes the regular stall, 4 most of the random one [A2]."""
LOADER_THREADS = (1, 2, 3, 4, 6)


def rank_counts(num_cores: int, devices: int | None, batch_size: int) -> list[int]:
    """Numbers of ranks to try: the user's, or powers of two up to the cores, and the cores.

    >>> rank_counts(6, None, 1024), rank_counts(6, 3, 1024), rank_counts(8, None, 2)
    ([1, 2, 4, 6], [3], [1, 2])
    """
    if devices is not None:
        return [devices]
    counts = {2**i for i in range(num_cores.bit_length()) if 2**i <= num_cores} | {num_cores}
    return sorted(c for c in counts if c <= batch_size)


def thread_splits(cores_per_rank: int, *, oversubscribe: bool = False) -> list[Threads]:
    """Ways to share a rank's cores between its training thread's pool and its loader threads.

    Without loader threads the loader's stages run on the training thread. A gather uses one thread:
    what several threads of one process gain is not measured by the probe, so it is not planned.

    >>> [(t.compute, t.sample) for t in thread_splits(2)]
    [(2, 0), (1, 1)]
    >>> [(t.compute, t.sample) for t in thread_splits(1, oversubscribe=True)]
    [(1, 0), (1, 1)]
    """
    budget = max(1, cores_per_rank)
    splits = [Threads(compute=budget, sample=0, gather=1)]
    for loaders in LOADER_THREADS:
        if loaders < budget:
            splits.append(Threads(compute=budget - loaders, sample=loaders, gather=1))
    if oversubscribe and budget == 1:
        splits.append(Threads(compute=1, sample=1, gather=1))
    return splits


def candidates(
    settings: PlanSettings, num_cores: int, policies: tuple[str, ...]
) -> list[Candidate]:
    """Every way to run the workload that respects the cores.

    Args:
        settings: the user's devices and whether cores may be shared by threads.
        num_cores: cores of the host.
        policies: placements to try, in order of preference.

    Returns:
        Simplest first: fewer ranks, no loader threads, shallow prefetch.

    Raises:
        SettingsError: more ranks than cores, or than seeds in a batch.
    """
    batch = settings.workload.batch_size
    asked = settings.devices
    if asked is not None and asked > num_cores and not settings.oversubscribe:
        raise SettingsError(
            f"expected at most {num_cores} devices (the cores), found {asked}; "
            "ask for fewer or add --oversubscribe"
        )
    if asked is not None and asked > batch:
        raise SettingsError(
            f"expected at most {batch} devices (the seeds of a batch), found {asked}; "
            "ask for fewer or for a larger --batch-size"
        )
    found: list[Candidate] = []
    for ranks in rank_counts(num_cores, asked, batch):
        splits = thread_splits(num_cores // ranks, oversubscribe=settings.oversubscribe)
        for threads in splits:
            for depth in DEPTHS if threads.sample else DEPTHS[:1]:
                for policy in policies:
                    found.append(
                        Candidate(
                            num_ranks=ranks, threads=threads, prefetch_depth=depth, policy=policy
                        )
                    )
    return found
