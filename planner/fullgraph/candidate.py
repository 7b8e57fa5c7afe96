"""Enumerate candidates that train the whole graph: ranks, partition, p, draws, overlap."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from gnnplan.planner.candidate import Candidate, list_cores, make_candidate
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel, joins_hosts, num_hosts, one_host
from gnnplan.planner.search.dimensions.ranks import machine_candidates, plans_gpus, rank_counts
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import counted
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import Device, FullGraph, Sampler, Threads, Workload
from gnnplan.runtime.sampling.statistics import StatisticsClass, full_graph_class

PARTITIONERS = ("kaminpar", "random")
"""Partitioners: kaminpar, refined for volume, is planned; random is priced beside it."""
PLANNED = PARTITIONERS[0]
DROPPED = {"nodes": "boundary nodes", "edges": "edges", "boundary-edges": "edges over the boundary"}
"""What p keeps a share of, in words."""
DRAWS: tuple[Literal["layer", "shared"], ...] = ("layer", "shared")
ROUNDINGS: tuple[Literal["stochastic", "bernoulli"], ...] = ("stochastic", "bernoulli")
"""Roundings; the first has the lower variance (docs/formulas.md 3.3) and is kept at equal times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A partition of the graph over ranks, made and timed once for all its candidates."""

    ranks: int
    threads: int
    """Compute threads of each rank."""
    partitioner: str
    """Name of the partitioner; `none` for one rank, which has no boundary."""
    devices: list[Device] = field(
        default_factory=list[Device], hash=False, metadata=codec.UNLESS_SET
    )
    """Devices of the ranks; empty for cores of one host."""

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks are GPUs."""
        return any(each.kind == "cuda" for each in self.devices)

    @property
    def hosts(self) -> int:
        """Number of hosts that the ranks are spread over."""
        return len({each.host for each in self.devices}) or 1

    @property
    def name(self) -> str:
        """Name that a reader sees, e.g. "2 ranks x 1 thread, kaminpar"."""
        where = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        ranks = f"{counted(self.ranks, 'rank')} x {counted(self.threads, 'thread')}"
        if self.on_gpus:
            ranks = counted(self.ranks, "GPU")
        return f"{ranks}{where}" + (f", {self.partitioner}" if self.ranks > 1 else "")


def whole_graph_candidate(cut: Cut, settings: FullGraph, *, overlap: bool) -> Candidate:
    """Make a candidate that trains the whole graph, before the parts are placed.

    With `overlap` exchanges run beside compute: of cores on a thread and a process group of their
    own.
    """
    plain = make_candidate(
        cut.devices or list_cores(cut.ranks),
        threads=Threads(compute=cut.threads, comm=int(overlap)),
        policy="partition",
        sampler=Sampler(name="full"),
    )
    mode = "full-graph"
    return replace(plain, mode=mode, partition=cut.partitioner, full_graph=settings, pipeline=[])


def cut_of(candidate: Candidate) -> Cut:
    """Return the cut that a candidate trains on."""
    plain = candidate.kind == "cpu" and candidate.hosts == 1
    return Cut(
        ranks=candidate.num_ranks,
        threads=candidate.threads.compute,
        partitioner=candidate.partition,
        devices=[] if plain else candidate.devices,
    )


def overlaps(candidate: Candidate) -> bool:
    """Return whether a candidate's exchanges run beside compute."""
    return candidate.threads.comm > 0


def with_keep(candidate: Candidate, keep: float) -> Candidate:
    """Return the same candidate with another p."""
    return replace(candidate, full_graph=replace(candidate.full_graph, keep=keep))


def describe_whole_graph(candidate: Candidate) -> str:
    """Name a candidate as readers see it."""
    settings = candidate.full_graph
    words = [cut_of(candidate).name]
    if settings.exchange == "broadcast" and candidate.num_ranks > 1:
        words.append("whole slices")
    elif candidate.num_ranks > 1 or settings.drop == "edges":
        what = "" if settings.drop == "nodes" else f" of {DROPPED[settings.drop]}"
        words.append(f"p {settings.keep:.3g}{what}")
        if settings.keep < 1:
            rounded = f", {settings.rounding}" if settings.drop == "nodes" else ""
            words.append(f"{settings.draws} draws{rounded}")
    if candidate.num_ranks > 1:
        words.append("overlapped" if overlaps(candidate) else "in line")
    if settings.precompute_first_layer:
        words.append("first layer precomputed")
    return ", ".join(words)


def cuts_of(settings: PlanSettings, machine: MachineModel) -> list[Cut]:
    """List the cuts of a machine: over its GPUs, else over cores of one host and of several.

    Raises:
        SettingsError: more devices or hosts than there are, or hosts cannot share them evenly.
    """
    if plans_gpus(machine):
        return _gpu_cuts(settings, machine)
    known = num_hosts(machine) if joins_hosts(machine) else 1
    if (settings.hosts or 1) > known:
        raise SettingsError(
            f"expected at most {known} hosts (the machine's, with links between them), found "
            f"{settings.hosts}; ask for fewer or probe more together (gnnplan probe --hosts)"
        )
    cores = [one_host(machine, host).num_cores for host in range(known)]
    hosts = [settings.hosts] if settings.hosts else [2**i for i in range(known.bit_length())]
    if known not in hosts and not settings.hosts:
        hosts.append(known)
    found = [cut for count in hosts for cut in _core_cuts(settings, count, min(cores[:count]))]
    if not found:
        most = max(hosts) * min(cores)
        raise SettingsError(
            f"expected at most {most} devices (the cores), shared evenly by {max(hosts)} "
            f"{'hosts' if max(hosts) > 1 else 'host'}, found {settings.devices}; ask for fewer or "
            "add --oversubscribe"
        )
    return found


def _core_cuts(settings: PlanSettings, hosts: int, cores: int) -> Iterator[Cut]:
    """Yield cuts over equally many cores of each host."""
    asked = settings.devices
    here = None if asked is None else asked // hosts
    if asked is not None and (asked % hosts or asked < hosts):
        return
    if here is not None and here > cores and not settings.oversubscribe:
        return
    for cut in list_cuts(cores, here):
        ranks = cut.ranks * hosts
        if hosts == 1:
            yield cut
        elif ranks > cut.ranks and cut.partitioner == "none":
            for name in PARTITIONERS:
                yield replace(cut, ranks=ranks, partitioner=name, devices=list_cores(ranks, hosts))
        else:
            yield replace(cut, ranks=ranks, devices=list_cores(ranks, hosts))


def _gpu_cuts(settings: PlanSettings, machine: MachineModel) -> list[Cut]:
    """List every number of GPUs in the first choice of the search, with its cliques."""
    batch = max(settings.workload.batch_size, len(machine.gpus))  # a whole graph has none
    widened = replace(settings, workload=replace(settings.workload, batch_size=batch))
    devices: dict[int, list[Device]] = {}
    for candidate in machine_candidates(widened, machine, ("none",)):
        devices.setdefault(candidate.num_ranks, candidate.devices)
    return [
        Cut(ranks=ranks, threads=1, partitioner=name, devices=chosen)
        for ranks, chosen in sorted(devices.items())
        for name in (("none",) if ranks == 1 else PARTITIONERS)
    ]


def list_cuts(num_cores: int, devices: int | None) -> list[Cut]:
    """List powers of two ranks up to a host's cores, or the user's number, by every partitioner."""
    found: list[Cut] = []
    for ranks in rank_counts(num_cores, devices, batch_size=max(num_cores, devices or 1)):
        threads = max(1, num_cores // ranks)
        names = ("none",) if ranks == 1 else PARTITIONERS
        found += [Cut(ranks=ranks, threads=threads, partitioner=name) for name in names]
    return found


def exact_candidates(all_cuts: Iterable[Cut], asked: PlanSettings | None = None) -> list[Candidate]:
    """List candidates of p = 1: with and without overlap, the first layer computed once or not.

    GPUs exchange beside compute in any case, which takes no thread. `asked` may fix the first layer
    and what is sent.
    """
    asked = asked or PlanSettings()
    return [
        whole_graph_candidate(
            cut,
            FullGraph(exchange=asked.exchange, precompute_first_layer=known),
            overlap=overlap,
        )
        for cut in all_cuts
        for overlap in _overlaps_of(cut)
        for known in first_layers(asked)
    ]


def _overlaps_of(cut: Cut) -> tuple[bool, ...]:
    if cut.ranks == 1:
        return (False,)
    return (True,) if cut.on_gpus else (False, True)


def first_layers(asked: PlanSettings) -> tuple[bool, ...]:
    """Return whether the first layer may be computed each epoch, once, or both."""
    if asked.first_layer != "auto":
        return (asked.first_layer == "once",)
    return (False,) if asked.drop == "edges" else (False, True)


def settings_of(asked: PlanSettings) -> list[FullGraph]:
    """List every way of sampling that a request leaves open; a p to be found stands as 0.5."""
    roundings = ROUNDINGS if asked.drop == "nodes" else ("bernoulli",)
    return [
        FullGraph(
            keep=0.5 if asked.keep is None else asked.keep,
            drop=asked.drop,
            draws=draws,
            rounding=rounding,
            precompute_first_layer=known,
        )
        for known in first_layers(asked)
        for draws in DRAWS
        if asked.draws in ("auto", draws)
        for rounding in roundings
        if asked.rounding in ("auto", rounding)
    ]


def sampled_candidates(
    all_cuts: Iterable[Cut],
    workload: Workload,
    allowed: StatisticsClass,
    asked: PlanSettings | None = None,
) -> list[Candidate]:
    """List candidates of p < 1, by every way of drawing that request and class permit.

    One rank has no boundary; only DropEdge drops anything there.
    """
    asked = asked or PlanSettings()
    return [
        whole_graph_candidate(cut, settings, overlap=overlap)
        for cut in all_cuts
        if cut.ranks > 1 or asked.drop == "edges"
        for overlap in _overlaps_of(cut)
        for settings in settings_of(asked)
        if allowed.allows(full_graph_class(settings, workload.model, workload.num_layers))
    ]
