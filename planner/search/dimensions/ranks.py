"""Choose what the ranks are: how many, on which cores or GPUs, with which threads and depth.

On cores every split of the threads is tried. GPUs are taken clique by clique (packed), so that
peers are near, or one from each PCIe switch before a second one shares its port (spread). They load
synchronously, or ahead by one loader thread on lanes of its own; more threads would queue up for
the same lanes.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, list_cores, list_gpus, make_candidate
from gnnplan.planner.cost.link_use import link_of
from gnnplan.planner.cost.memory import host_memory
from gnnplan.planner.cost.request import Request
from gnnplan.planner.errors import MachineError, SettingsError
from gnnplan.planner.machine.model import (
    GPUS_LOST,
    Link,
    MachineModel,
    Memory,
    first_hosts,
    joins_hosts,
    num_hosts,
    one_host,
    prefix_of,
    with_one_kind,
    without_gpus,
)
from gnnplan.planner.machine.routes import routes
from gnnplan.planner.machine.table import check_tables
from gnnplan.planner.search.dimensions.dimension import Dimension, Draws, Proposal, ProposalInputs
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import counted
from gnnplan.runtime.plan.schema import Threads, TopologyPlacement

DEPTHS = (2, 4)
"""Prefetch depths to try: 2 removes the regular stall, 4 most of the random one [A2]."""
LOADER_THREADS = (1, 2, 3, 4, 6)


def _powers_of_two(most: int) -> set[int]:
    """Return one, two, four ... and `most`.

    >>> sorted(_powers_of_two(6)), sorted(_powers_of_two(1))
    ([1, 2, 4, 6], [1])
    """
    return {2**i for i in range(most.bit_length())} | {most}


def rank_counts(num_cores: int, devices: int | None, batch_size: int) -> list[int]:
    """Return the numbers of ranks to try: the user's, or powers of two and all cores.

    >>> rank_counts(6, None, 1024), rank_counts(6, 3, 1024), rank_counts(8, None, 2)
    ([1, 2, 4, 6], [3], [1, 2])
    """
    if devices is not None:
        return [devices]
    return sorted(c for c in _powers_of_two(num_cores) if c <= batch_size)


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

    Raises:
        SettingsError: more ranks than cores, or than seeds in a batch.
    """
    batch = settings.workload.batch_size
    asked = settings.devices
    if settings.topology != "auto":
        raise SettingsError(
            f"expected --topology auto where ranks are cores, which map the host's lists, found "
            f"{settings.topology}; leave it out"
        )
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
    return [
        make_candidate(list_cores(ranks), threads=threads, prefetch_depth=depth, policy=policy)
        for ranks in rank_counts(num_cores, asked, batch)
        for threads in thread_splits(num_cores // ranks, oversubscribe=settings.oversubscribe)
        for depth in (DEPTHS if threads.sample else DEPTHS[:1])
        for policy in policies
    ]


AHEAD = ((0, 2), *((1, depth) for depth in DEPTHS))
"""Loader threads of a GPU's rank, and batches made ahead."""
GPU_TABLES = ("gpu_flops", "gpu_kernel", "gpu_context", "gpu_process")
"""Tables that plans on GPUs need."""
MESSAGE = "gpu_message"
"""Table that plans on several GPUs need."""


def plans_gpus(machine: MachineModel) -> bool:
    """Return whether there are GPUs and enough is known of them to plan on one."""
    return bool(machine.gpus) and all(name in machine.tables for name in GPU_TABLES)


def machine_of_ranks(machine: MachineModel, settings: PlanSettings) -> MachineModel:
    """Return the machine that ranks may use: its GPUs of one model, or none for cores.

    Raises:
        MachineError: no plan can be made for its GPUs, or a table has another unit than is read.
    """
    check_tables(machine.tables)  # those of terms, too, which reading the machine did not know
    if settings.cores:
        return without_gpus(machine)
    lost = [note for note in machine.notes if _WHY_LOST.match(note)]
    if plans_gpus(machine) or not (machine.gpus or lost):
        return with_one_kind(machine)
    missing = [name for name in GPU_TABLES if name not in machine.tables]
    why = lost[0].rstrip(".") if lost else f"no measurement of {', '.join(missing)}"
    count = f"{len(machine.gpus)} " if machine.gpus else ""
    raise MachineError(
        f"machine {machine.name}: expected {count}GPUs that plans can use, found {why}; mend that "
        "and run `gnnplan probe` again while nothing else runs, or add --cores to plan on cores"
    )


_WHY_LOST = re.compile(
    rf"{GPUS_LOST}|gpu\d+: (not measured|refused|memory size|no memory)|time: .*(gpu|GPUs)"
)


def machine_candidates(
    settings: PlanSettings, machine: MachineModel, policies: tuple[str, ...]
) -> list[Candidate]:
    """Return every way to run the workload on a machine: on its GPUs, or else on its cores."""
    if not plans_gpus(machine):
        return candidates(settings, machine.num_cores, policies)
    found: list[Candidate] = []
    hosts, batch_size = settings.hosts, settings.workload.batch_size
    orders = _orders(machine)
    for count in gpu_counts(machine, settings.devices, batch_size, hosts=hosts):
        for gpus, cliques in _choices(machine, orders, count, hosts):
            devices = list_gpus(machine, gpus, cliques)
            for topology in _topologies(settings):
                for (loaders, depth), policy in itertools.product(AHEAD, policies):
                    plain = make_candidate(
                        devices,
                        threads=Threads(compute=1, sample=loaders, gather=1),
                        prefetch_depth=depth,
                        policy=policy,
                    )
                    found.append(replace(plain, topology=topology))
    return found


def _topologies(settings: PlanSettings) -> list[TopologyPlacement]:
    """List where GPUs may read adjacency lists: as asked, or on the host and in copies of all."""
    match settings.topology:
        case "auto":
            return [TopologyPlacement(), TopologyPlacement(policy="replicated")]
        case "clique":
            return [TopologyPlacement(policy="cached", peers=True)]
        case policy:
            return [TopologyPlacement(policy=policy)]


def gpu_counts(
    machine: MachineModel, devices: int | None, batch_size: int, *, hosts: int | None = None
) -> list[int]:
    """Return the numbers of GPUs to try: the user's, or powers of two on a host, then hosts.

    With `hosts`, every host has equally many of them.

    Raises:
        SettingsError: the machine has not so many GPUs or hosts, or hosts cannot share them evenly.
    """
    total, each = len(machine.gpus), min(Counter(gpu.host for gpu in machine.gpus).values())
    if hosts is not None:
        if hosts > num_hosts(machine):
            raise SettingsError(
                f"expected at most {counted(num_hosts(machine), 'host')} (those of {machine.name})"
                f", found {hosts}; ask for fewer or probe more together (gnnplan probe --hosts)"
            )
        total = each * hosts
        if devices is not None and devices % hosts:
            raise SettingsError(
                f"expected a number of devices that {hosts} hosts share evenly, found {devices}; "
                f"ask for {devices // hosts * hosts or hosts} or for other --hosts"
            )
    if total > 1 and MESSAGE not in machine.tables:
        if (asked := devices or hosts or 1) > 1:
            raise SettingsError(
                f"machine {machine.name}: expected seconds of messages between its GPUs to plan on "
                f"{asked} of them, found none (table {MESSAGE}); run `gnnplan probe` again while "
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
    if hosts is not None:
        return [n * hosts for n in sorted(_powers_of_two(each)) if n * hosts <= batch_size]
    counts = _powers_of_two(each) | {each * n for n in _powers_of_two(total // each)}
    return sorted(c for c in counts | {total} if c <= batch_size)


def _orders(machine: MachineModel) -> list[tuple[list[list[str]], list[list[str]]]]:
    """Return each cover with the orders in which GPUs are taken: packed, and spread."""
    hosts, spread = {gpu.name: gpu.host for gpu in machine.gpus}, _spread(machine)
    found = list[tuple[list[list[str]], list[list[str]]]]()
    for cover in [machine.cliques, *machine.other_covers]:
        whole = _covering(machine, cover)
        packed = [gpu for clique in sorted(whole, key=len, reverse=True) for gpu in clique]
        found.append((whole, [sorted(packed, key=lambda name: hosts[name]), spread]))
    return found


def _choices(
    machine: MachineModel,
    orders: list[tuple[list[list[str]], list[list[str]]]],
    count: int,
    num_hosts: int | None = None,
) -> list[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """Return GPUs with their cliques of ranks, without repetition, the best cover packed first.

    `num_hosts` hosts have equally many; None: host after host is filled.
    """
    found: list[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = []
    hosts = {gpu.name: gpu.host for gpu in machine.gpus}
    for whole, taken in orders:
        for order in taken:
            # Ranks go by the machine's order, so that a host's are next to each other.
            chosen = set(order[:count])
            if num_hosts is not None:
                here = count // num_hosts
                mine = [[n for n in order if hosts[n] == h][:here] for h in range(num_hosts)]
                chosen = set(itertools.chain(*mine))
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


def _spread(machine: MachineModel) -> list[str]:
    """Order GPUs so that each next one shares the fewest links to its host's memory."""
    crossed: dict[str, set[str]] = {}
    for gpu in machine.gpus:
        ways = routes(machine, f"{prefix_of(gpu.host)}host0", gpu.name)
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


GIB = 2**30
FASTER = 1.1
"""Factor on a link's bandwidth."""
LINK_TABLES = {
    "memory": ("gather", "mapped_gather"),
    "disk": ("disk_read",),
    "exchange": ("all_reduce", "all_reduce_stepped", "all_to_all", "all_to_all_stepped"),
}
"""Tables of seconds that a faster link shortens."""


def faster(machine: MachineModel, tables: Sequence[str], factor: float = FASTER) -> MachineModel:
    """Return the machine with the seconds of some tables shorter by a factor."""
    known = {name: machine.tables[name] for name in tables if name in machine.tables}
    return machine.with_tables(
        {name: replace(t, values=[v / factor for v in t.values]) for name, t in known.items()}
    )


def faster_link(link: Link, factor: float = FASTER) -> Link:
    """Return the link with its bandwidths larger by a factor."""
    return replace(
        link,
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * factor,
        gather_bytes_per_second=link.gather_bytes_per_second * factor,
    )


LINKS: dict[str, Callable[[Link], bool]] = {
    "GPU memory bandwidth": lambda x: x.name.endswith(".hbm"),
    "NVLink": lambda x: "nvlink." in x.name,
    "PCIe": lambda x: x.name.endswith((".h2d", ".d2h")),
    "host memory and bridges": lambda x: "dram" in x.name or "bridge." in x.name,
    "disk": lambda x: "disk" in x.name,
}
"""Links of one sort, made faster together."""


def _larger(machine: MachineModel, is_such: Callable[[Memory], bool]) -> MachineModel:
    memories = [
        replace(m, capacity_bytes=m.capacity_bytes + GIB) if is_such(m) else m
        for m in machine.memories
    ]
    return replace(machine, memories=memories)


def _more(limit_bytes: int | None) -> int | None:
    return None if limit_bytes is None else limit_bytes + GIB


class Cores(Dimension):
    """Ranks that are processes on cores."""

    name = "cores"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the ranks are processes on cores."""
        return candidate.kind == "cpu"

    def describe(self, candidate: Candidate) -> str:
        """Name the number of hosts where there are several."""
        return f"{candidate.hosts} hosts" if candidate.hosts > 1 else ""

    def family(self, candidate: Candidate) -> Hashable:
        """Tell numbers of hosts apart."""
        return candidate.hosts

    def dedup_key(self, candidate: Candidate) -> Candidate:
        """Leave out the prefetch depth, which changes time only where batches vary."""
        return replace(candidate, prefetch_depth=0)

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield ranks on the first host alone, and spread over two, four ... and all hosts."""
        del base
        settings, machine = asked.settings, asked.machine
        if plans_gpus(machine):
            yield self.omit("ranks are GPUs where the machine has them")
            return
        known = num_hosts(machine) if joins_hosts(machine) else 1
        wanted = settings.hosts or known
        if wanted > known:
            raise SettingsError(
                f"expected at most {known} hosts (the machine's, with links between them), found "
                f"{wanted}; ask for fewer or probe more together (gnnplan probe --hosts)"
            )
        if not joins_hosts(machine):
            one = first_hosts(machine, 1)
            yield from candidates(settings, one.num_cores, asked.policies)
        else:
            cores = [one_host(machine, host).num_cores for host in range(known)]
            found = [
                each
                for hosts in ([settings.hosts] if settings.hosts else sorted(_powers_of_two(known)))
                for each in _spread_over_hosts(settings, hosts, min(cores[:hosts]), asked.policies)
            ]
            if not found:
                raise SettingsError(
                    f"expected a number of devices that {wanted} hosts of "
                    f"{min(cores)} cores share evenly, found {settings.devices}; ask for fewer or "
                    f"for {wanted * min(cores)}"
                )
            yield from found

    def adapt_request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """Return the request on the hosts that the candidate uses."""
        del draws
        machine = request.machine
        if candidate.hosts == num_hosts(machine):
            return request
        return replace(request, machine=first_hosts(machine, candidate.hosts))

    def relax_request(self, request: Request) -> dict[str, Request]:
        """Give 1 GiB more to a device's limit and to the host, and make each link 10% faster."""
        machine, budgets = request.machine, request.budgets
        host, capacity = host_memory(machine)
        more: dict[str, Request] = {}
        if budgets.device_bytes is not None:
            wider = replace(budgets, device_bytes=_more(budgets.device_bytes))
            more["device memory +1 GiB"] = replace(request, budgets=wider)
        wider = replace(budgets, host_bytes=_more(budgets.host_bytes or capacity))
        more[f"{host} +1 GiB"] = replace(
            request, machine=_larger(machine, lambda m: m.name == host), budgets=wider
        )
        for kind, name in (("host", "memory"), ("disk", "disk"), ("all_reduce", "exchange")):
            quicker = faster(machine, LINK_TABLES[name])
            more[f"{link_of(machine, kind)} +10%"] = replace(request, machine=quicker)
        return more


def _spread_over_hosts(
    settings: PlanSettings, hosts: int, cores: int, policies: tuple[str, ...]
) -> list[Candidate]:
    """Return candidates with equally many ranks on each of some hosts."""
    asked, batch = settings.devices, settings.workload.batch_size
    here = None if asked is None else asked // hosts
    if asked is not None and (asked % hosts or asked < hosts):
        return []
    if here is not None and here > cores and not settings.oversubscribe:
        return []
    local = candidates(replace(settings, devices=here), cores, policies)
    return [
        replace(c, devices=list_cores(c.num_ranks * hosts, hosts))
        for c in local
        if c.num_ranks * hosts <= batch
    ]


class Gpus(Dimension):
    """Ranks that each have a GPU."""

    name = "GPUs"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the ranks are GPUs."""
        return candidate.kind == "cuda"

    def family(self, candidate: Candidate) -> Hashable:
        """Tell numbers of GPUs apart."""
        return candidate.num_ranks

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield every number of GPUs in every cover by cliques."""
        del base
        if plans_gpus(asked.machine):
            yield from machine_candidates(asked.settings, asked.machine, asked.policies)
            return
        why = "the machine has none" if not asked.machine.gpus else "too little is known of them"
        yield self.omit(why)

    def dedup_key(self, candidate: Candidate) -> Candidate:
        """Leave out the prefetch depth."""
        return replace(candidate, prefetch_depth=0)

    def relax_request(self, request: Request) -> dict[str, Request]:
        """Give GPUs or hosts 1 GiB more, or make one sort of link 10% faster."""
        budgets, machine = request.budgets, request.machine
        wider_gpus = _larger(machine, lambda m: m.kind == "device")
        wider_host = _larger(machine, lambda m: m.kind == "host")
        on_gpus = replace(budgets, device_bytes=_more(budgets.device_bytes))
        on_host = replace(budgets, host_bytes=_more(budgets.host_bytes))
        found = {
            "GPU memory +1 GiB": replace(request, machine=wider_gpus, budgets=on_gpus),
            "host memory +1 GiB": replace(request, machine=wider_host, budgets=on_host),
        }
        for name, is_such in LINKS.items():
            if any(is_such(x) for x in machine.links):
                links = [faster_link(x) if is_such(x) else x for x in machine.links]
                found[f"{name} +10%"] = replace(request, machine=replace(machine, links=links))
        return found
