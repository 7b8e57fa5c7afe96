"""Stages `forward_backward` and `optimizer`: from measured layer timings, elapsed seconds."""

from planner.workload import ModelTiming


def compute_seconds(timing: ModelTiming, *, ranks: int, threads: int, scale: float = 1.0) -> float:
    """Seconds of one forward and backward while all ranks compute.

    Args:
        timing: the real model on batches of the profiled shapes.
        ranks: processes that compute at once.
        threads: compute threads of each.
        scale: size of the batch over the mean batch; the table is interpolated in log-log space.

    Source: measured (planner.profile.timing_process); docs/modelling.md 1, 3, 12.
    """
    return timing.forward_backward.at(scale=scale, ranks=float(ranks), threads=float(threads))


def seconds_per_scale(timing: ModelTiming, *, ranks: int, threads: int) -> float:
    """Slope of the compute time in the batch's relative size, at the mean batch.

    d T / d scale by a central difference over 0.8 and 1.25: what a larger batch than the mean
    costs a rank, for the straggler term.
    """
    low = compute_seconds(timing, ranks=ranks, threads=threads, scale=0.8)
    high = compute_seconds(timing, ranks=ranks, threads=threads, scale=1.25)
    return max(0.0, (high - low) / (1.25 - 0.8))
