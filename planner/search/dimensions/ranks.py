"""Choose what the ranks are: processes on the cores of one host or several, or GPUs."""

from collections.abc import Hashable, Iterator
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, list_cores
from gnnplan.planner.cost.link_use import link_of
from gnnplan.planner.cost.memory import host_memory
from gnnplan.planner.cost.request import Request
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.hosts import first_hosts, joins_hosts, num_hosts, one_host
from gnnplan.planner.search.dimensions.dimension import Dimension, LeftOut, Proposing
from gnnplan.planner.search.drawn import Draws
from gnnplan.planner.search.enumerate import candidates, machine_candidates, plans_gpus
from gnnplan.planner.search.sensitivity import GIB, LINK_TABLES, faster, relaxed_gpus
from gnnplan.planner.settings import PlanSettings


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
        """Ignore the prefetch depth, which changes time only where batches vary."""
        return replace(candidate, prefetch_depth=0)

    def propose(self, asked: Proposing, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Yield ranks on the first host alone, and spread over two, four ... and all hosts."""
        del base
        settings, machine = asked.settings, asked.machine
        known = num_hosts(machine) if joins_hosts(machine) else 1
        wanted = settings.hosts or known
        if wanted > known:
            raise SettingsError(
                f"expected at most {known} hosts (the machine's, with links between them), found "
                f"{wanted}; ask for fewer or probe more together (gnnplan probe --hosts)"
            )
        if plans_gpus(machine):
            yield LeftOut(name=self.name, why="ranks are GPUs where the machine has them")
        elif not joins_hosts(machine):
            one = first_hosts(machine, 1)
            yield from candidates(settings, one.num_cores, asked.policies)
        else:
            any_found = False
            cores = [one_host(machine, host).num_cores for host in range(known)]
            for hosts in [settings.hosts] if settings.hosts else _host_counts(known):
                for found in _spread(settings, hosts, min(cores[:hosts]), asked.policies):
                    any_found = True
                    yield found
            if not any_found:
                raise SettingsError(
                    f"expected a number of devices that {wanted} hosts of "
                    f"{min(cores)} cores share evenly, found {settings.devices}; ask for fewer or "
                    f"for {wanted * min(cores)}"
                )

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
        device_limit, host_limit = budgets.device_bytes, budgets.host_bytes
        more: dict[str, Request] = {}
        if device_limit is not None:
            wider = replace(budgets, device_bytes=device_limit + GIB)
            more["device memory +1 GiB"] = replace(request, budgets=wider)
        memories = [
            replace(m, capacity_bytes=m.capacity_bytes + GIB) if m.name == host else m
            for m in machine.memories
        ]
        wider = replace(budgets, host_bytes=(host_limit or capacity) + GIB)
        more[f"{host} +1 GiB"] = replace(
            request, machine=replace(machine, memories=memories), budgets=wider
        )
        for kind, name in (("host", "memory"), ("disk", "disk"), ("all_reduce", "exchange")):
            quicker = faster(machine, LINK_TABLES[name])
            more[f"{link_of(machine, kind)} +10%"] = replace(request, machine=quicker)
        return more


def _host_counts(known: int) -> list[int]:
    """Return one, two, four ... and all.

    >>> _host_counts(6), _host_counts(1)
    ([1, 2, 4, 6], [1])
    """
    return sorted({2**i for i in range(known.bit_length()) if 2**i <= known} | {known})


def _spread(
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
    return [_on_hosts(c, hosts) for c in local if c.num_ranks * hosts <= batch]


def _on_hosts(candidate: Candidate, hosts: int) -> Candidate:
    """Return a candidate of one host on several hosts, each of whose ranks are a clique."""
    return replace(candidate, devices=list_cores(candidate.num_ranks * hosts, hosts))


class Gpus(Dimension):
    """Ranks that each have a GPU."""

    name = "GPUs"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the ranks are GPUs."""
        return candidate.kind == "cuda"

    def family(self, candidate: Candidate) -> Hashable:
        """Tell numbers of GPUs apart."""
        return candidate.num_ranks

    def propose(self, asked: Proposing, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Yield every number of GPUs in every cover by cliques."""
        del base
        if plans_gpus(asked.machine):
            yield from machine_candidates(asked.settings, asked.machine, asked.policies)
            return
        why = "the machine has none" if not asked.machine.gpus else "too little is known of them"
        yield LeftOut(name=self.name, why=why)

    def dedup_key(self, candidate: Candidate) -> Candidate:
        """Ignore the prefetch depth."""
        return replace(candidate, prefetch_depth=0)

    def relax_request(self, request: Request) -> dict[str, Request]:
        """Give GPUs and hosts more memory, and make links of one sort faster."""
        return relaxed_gpus(request)
