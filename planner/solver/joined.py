"""Candidates whose ranks do more together than sum gradients.

    several hosts       ranks on each, features and topology in every host's memory
    cooperative batch   the ranks sample one batch and each vertex has one owner
    topology in parts   a 1.5D grid over hosts: no host holds all adjacency lists

They are made from the plain candidates of one host; the runtime carries out every one of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.errors import SettingsError
from planner.machine import MachineModel
from planner.machine_hosts import first_hosts, joins_hosts, num_hosts, one_host
from planner.settings import PlanSettings
from planner.solver.candidates import candidates
from planner.solver.candidates_gpu import machine_candidates, plans_gpus
from planner.workload import Combination, WorkloadProfile
from runtime.errors import SamplerError
from runtime.plan import Sampler
from runtime.sampling.parameters import number, parameters_of

SHARED_MODELS = ("sage", "gcn", "gat")
"""Models that can stop between two layers to exchange rows."""
GRID_BULKS = (1, 8)
"""Batches of each rank that a grid samples at once."""


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
    if plans_gpus(machine):
        return machine_candidates(settings, machine, policies)
    found = _over_hosts(settings, machine, policies)
    if "none" not in policies:
        return found
    plain = [c for c in found if c.policy == "none"]
    if shares_batches(settings, task) and (profile is None or profile.shared is not None):
        found += [replace(c, batching="cooperative") for c in plain if c.num_ranks > 1]
    if shares_topology(settings, task) and (profile is None or profile.stacks):
        found += list(_on_grids(plain, settings))
    return found


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


def shares_batches(settings: PlanSettings, task: str) -> bool:
    """Whether ranks can share a batch of this request: what the runtime would refuse is not tried.

    >>> shares_batches(PlanSettings(), "multiclass"), shares_batches(PlanSettings(), "link")
    (True, False)
    """
    work = settings.workload
    if settings.batching == "independent" or task == "link" or work.model not in SHARED_MODELS:
        return False
    if (work.model == "gcn" and work.gcn_norm == "sampled") or work.precision != "float32":
        return False
    sampler = Sampler(name=settings.sampler, parameters=settings.sampler_parameters)
    try:
        values = parameters_of(sampler)
        return settings.sampler in ("neighbor", "full") or (
            settings.sampler == "labor"
            and values["variant"] != "star"
            and number("labor", values, "variant") == 0
        )
    except SamplerError:
        return False


def shares_topology(settings: PlanSettings, task: str) -> bool:
    """Whether a grid can sample this request: uniform neighbours of one node type.

    >>> shares_topology(PlanSettings(), "multiclass"), shares_topology(PlanSettings(), "link")
    (True, False)
    """
    named = settings.sampler == "neighbor" and not settings.sampler_parameters
    return named and task != "link" and settings.workload.model in SHARED_MODELS


def _over_hosts(
    settings: PlanSettings, machine: MachineModel, policies: tuple[str, ...]
) -> list[Candidate]:
    """On the first host alone, and spread over two, four ... and all of them."""
    if not joins_hosts(machine):
        return machine_candidates(settings, first_hosts(machine, 1), policies)
    total, found = num_hosts(machine), list[Candidate]()
    cores = [one_host(machine, host).num_cores for host in range(total)]
    counts = sorted({2**i for i in range(total.bit_length()) if 2**i <= total} | {total})
    for hosts in counts:
        found += _spread(settings, hosts, min(cores[:hosts]), policies)
    if not found:
        raise SettingsError(
            f"expected a number of devices that {total} hosts of {min(cores)} cores share evenly, "
            f"found {settings.devices}; ask for fewer or for {total * min(cores)}"
        )
    return found


def _spread(
    settings: PlanSettings, hosts: int, cores: int, policies: tuple[str, ...]
) -> list[Candidate]:
    """Equal numbers of ranks on each of some hosts."""
    asked, batch = settings.devices, settings.workload.batch_size
    here = None if asked is None else asked // hosts
    if asked is not None and (asked % hosts or asked < hosts):
        return []
    if here is not None and here > cores and not settings.oversubscribe:
        return []
    local = candidates(replace(settings, devices=here), cores, policies)
    return [_on_hosts(c, hosts) for c in local if c.num_ranks * hosts <= batch]


def _on_hosts(candidate: Candidate, hosts: int) -> Candidate:
    """A candidate of one host on each of several; ranks of a host are a clique."""
    if hosts == 1:
        return candidate
    here = candidate.num_ranks
    cliques = tuple(tuple(range(h * here, (h + 1) * here)) for h in range(hosts))
    return replace(candidate, num_ranks=here * hosts, hosts=hosts, cliques=cliques)


def _on_grids(plain: Iterable[Candidate], settings: PlanSettings) -> Iterator[Candidate]:
    """The topology in parts over hosts: on one host its shared mapping holds all lists once."""
    del settings
    for base in plain:
        if base.hosts == 1:
            continue
        for copies in range(1, base.num_ranks):
            if base.num_ranks % copies == 0:
                for bulk in GRID_BULKS:
                    yield replace(base, topology="partitioned", replication=copies, bulk=bulk)
