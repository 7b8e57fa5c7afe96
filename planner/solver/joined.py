"""Every way to run a workload before rows are placed, and what must be timed for them."""

from collections.abc import Iterable

from planner.candidate import Candidate
from planner.machine import MachineModel
from planner.settings import PlanSettings
from planner.solver.kinds.kind import Ask
from planner.solver.kinds.registry import first_candidates
from planner.workload import Combination, WorkloadProfile


def joined_candidates(
    settings: PlanSettings,
    machine: MachineModel,
    policies: tuple[str, ...],
    *,
    task: str,
    profile: WorkloadProfile | None = None,
) -> list[Candidate]:
    """Every way to run the workload: the plain ones, then those that join ranks.

    Args:
        settings: the request.
        machine: one host or several.
        policies: placements to try.
        task: of the graph.
        profile: what was profiled; kinds that were not are left out. None: all of them.

    Raises:
        SettingsError: more devices than there are cores or GPUs, or than seeds in a batch.
    """
    ask = Ask(settings=settings, machine=machine, policies=policies, task=task, profile=profile)
    return first_candidates(ask).candidates


def combinations_of(tried: Iterable[Candidate]) -> list[Combination]:
    """What the model is timed in for these candidates, and what is counted beside."""
    found: dict[tuple[int, int, int, bool], bool] = {}
    for c in tried:
        shared = c.batching == "cooperative"
        key = (c.num_ranks // c.hosts, c.threads.compute, c.hosts, shared)
        found[key] = found.get(key, False) or c.topology == "partitioned"
    return [
        Combination(ranks=ranks, threads=threads, hosts=hosts, shared=shared, parts=parts)
        for (ranks, threads, hosts, shared), parts in sorted(found.items())
    ]
