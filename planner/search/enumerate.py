"""Enumerate ranks: how many, on which cores or GPUs, with which threads and prefetch depth.

On cores every split of the threads is tried. GPUs are taken clique by clique (packed), so that
peers are near, or one from each PCIe switch before a second one shares its port (spread). They load
synchronously, or ahead by one loader thread on lanes of its own; more threads would queue up for
the same lanes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, list_cores, list_gpus, make_candidate
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.routes import routes
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.plan.schema import Threads, TopologyPlacement

DEPTHS = (2, 4)
"""Prefetch depths to try: 2 removes the regular stall, 4 most of the random one [A2]."""
LOADER_THREADS = (1, 2, 3, 4, 6)


def rank_counts(num_cores: int, devices: int | None, batch_size: int) -> list[int]:
    """Return the numbers of ranks to try: the user's, or powers of two and all cores.

    >>> rank_counts(6, None, 1024), rank_counts(6, 3, 1024), rank_counts(8, None, 2)
    ([1, 2, 4, 6], [3], [1, 2])
    """
    if devices is not None:
        return [devices]
    counts = {2**i for i in range(num_cores.bit_length()) if 2**i <= num_cores} | {num_cores}
    return sorted(c for c in counts if c <= batch_size)


def thread_splits(cores_per_rank: int, *, oversubscribe: bool = False) -> list[Threads]:
    """Return the ways to share a rank's cores between training and loader threads.

    A gather uses one thread: the probe does not measure what more threads of a process gain.

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
    """Return every way to run the workload on the cores of one host, simplest first.

    Args:
        settings: the user's request.
        num_cores: cores of the host.
        policies: placements to try, in order of preference.

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
        devices = list_cores(ranks)
        splits = thread_splits(num_cores // ranks, oversubscribe=settings.oversubscribe)
        for threads in splits:
            for depth in DEPTHS if threads.sample else DEPTHS[:1]:
                for policy in policies:
                    found.append(
                        make_candidate(
                            devices, threads=threads, prefetch_depth=depth, policy=policy
                        )
                    )
    return found


AHEAD = ((0, 2), *((1, depth) for depth in DEPTHS))
"""Loader threads of a GPU's rank, and batches made ahead."""
GPU_TABLES = ("gpu_flops", "gpu_kernel", "gpu_context", "gpu_process")
"""Tables that plans on GPUs need."""
MESSAGE = "gpu_message"
"""Table that plans on several GPUs need."""


def plans_gpus(machine: MachineModel) -> bool:
    """Return whether there are GPUs and enough is known of them to plan on one."""
    return bool(machine.gpus) and all(name in machine.tables for name in GPU_TABLES)


def machine_candidates(
    settings: PlanSettings, machine: MachineModel, policies: tuple[str, ...]
) -> list[Candidate]:
    """Return every way to run the workload on a machine: on its GPUs, or else on its cores.

    Raises:
        SettingsError: more devices than the machine has, or than seeds in a batch.
    """
    if not plans_gpus(machine):
        return candidates(settings, machine.num_cores, policies)
    found: list[Candidate] = []
    for count in gpu_counts(machine, settings.devices, settings.workload.batch_size):
        for gpus, cliques in _choices(machine, count):
            devices = list_gpus(machine, gpus, cliques)
            for topology in ("host", "replicated"):
                for (loaders, depth), policy in itertools.product(AHEAD, policies):
                    plain = make_candidate(
                        devices,
                        threads=Threads(compute=1, sample=loaders, gather=1),
                        prefetch_depth=depth,
                        policy=policy,
                    )
                    found.append(replace(plain, topology=TopologyPlacement(policy=topology)))
    return found


def gpu_counts(machine: MachineModel, devices: int | None, batch_size: int) -> list[int]:
    """Return the numbers of GPUs to try: the user's, or powers of two on a host, then hosts.

    Raises:
        SettingsError: more than there are or than seeds in a batch, or several GPUs between which
            nothing was measured.
    """
    total = len(machine.gpus)
    if total > 1 and MESSAGE not in machine.tables:
        if devices is not None and devices > 1:
            raise SettingsError(
                f"machine {machine.name}: expected seconds of messages between its GPUs to plan on "
                f"{devices} of them, found none (table {MESSAGE}); run `gnnplan probe` again while "
                "nothing else runs, or ask for one"
            )
        return [1]
    if devices is not None:
        if devices > min(total, batch_size):
            what = f"{total} devices (the GPUs of {machine.name})"
            if batch_size < total:
                what = f"{batch_size} devices (the seeds of a batch)"
            raise SettingsError(f"expected at most {what}, found {devices}; ask for fewer")
        return [devices]
    each = sum(gpu.host == machine.gpus[0].host for gpu in machine.gpus)
    counts = {2**i for i in range(each.bit_length()) if 2**i <= each} | {each}
    hosts = total // each
    counts |= {each * 2**i for i in range(hosts.bit_length()) if 2**i <= hosts} | {total}
    return sorted(c for c in counts if c <= batch_size)


def _choices(
    machine: MachineModel, count: int
) -> list[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """Return GPUs with their cliques of ranks, without repetition, the best cover packed first."""
    found: list[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = []
    for cover in [machine.cliques, *machine.other_covers]:
        whole = _covering(machine, cover)
        packed = [gpu for clique in sorted(whole, key=len, reverse=True) for gpu in clique]
        for order in (_by_host(machine, packed), _spread(machine)):
            # Ranks go by the machine's order, so that a host's are next to each other.
            chosen = set(order[:count])
            gpus = tuple(gpu.name for gpu in machine.gpus if gpu.name in chosen)
            rank = {name: r for r, name in enumerate(gpus)}
            cliques = tuple(
                tuple(rank[g] for g in clique if g in rank)
                for clique in whole
                if any(g in rank for g in clique)
            )
            if (gpus, cliques) not in found:
                found.append((gpus, cliques))
    return found


def _covering(machine: MachineModel, cover: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the cover's cliques of GPUs; a GPU outside the cover is a clique."""
    names = {gpu.name for gpu in machine.gpus}
    cliques = [[g for g in clique if g in names] for clique in cover]
    held = {g for clique in cliques for g in clique}
    return [c for c in cliques if c] + [[g.name] for g in machine.gpus if g.name not in held]


def _by_host(machine: MachineModel, order: Sequence[str]) -> list[str]:
    hosts = {gpu.name: gpu.host for gpu in machine.gpus}
    return sorted(order, key=lambda name: hosts[name])


def _spread(machine: MachineModel) -> list[str]:
    """Order GPUs so that each next one shares the fewest links to its host's memory."""
    crossed: dict[str, set[str]] = {}
    for gpu in machine.gpus:
        memory = "host0" if gpu.host == 0 else f"h{gpu.host}.host0"
        ways = routes(machine, memory, gpu.name)
        crossed[gpu.name] = {x.name for way in ways for x in way.links if "h2d" in x.name}
    left, order = [gpu.name for gpu in machine.gpus], list[str]()
    used: dict[str, int] = {}
    hosts = {gpu.name: gpu.host for gpu in machine.gpus}
    while left:
        host = min(hosts[name] for name in left)
        mine = [name for name in left if hosts[name] == host]
        best = min(mine, key=lambda name: sum(used.get(x, 0) for x in crossed[name]))
        for link in crossed[best]:
            used[link] = used.get(link, 0) + 1
        order.append(best)
        left.remove(best)
    return order
