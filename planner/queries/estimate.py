"""Estimate a training on machines that nobody has here: all presets at once, nothing measured.

    sizes of a graph -> each machine, every number of GPUs and way to train (price_ways)
        -> the best that fits, or what is missing; seconds and costs of an epoch

Batches come from the law of the graph's sizes, rates from presets or machine files, prices from a
dated file. What is said is an estimate, neither a prediction nor a measurement.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from gnnplan.planner.errors import MachineError, SettingsError
from gnnplan.planner.machine.model import MachineModel, num_hosts
from gnnplan.planner.probe.presets import find_machine, is_preset, list_presets, load_preset
from gnnplan.planner.queries.list_prices import ListPrice, read_prices
from gnnplan.planner.settings import PlanSettings, check_values
from gnnplan.planner.units import seconds_text
from gnnplan.runtime.plan.schema import GraphRef, Interval, Workload
from gnnplan.runtime.plan.setting import Range, Setting

if TYPE_CHECKING:
    from gnnplan.planner.candidate import RankRows
    from gnnplan.planner.graph_presets import KnownGraph
    from gnnplan.planner.queries.price_ways import UnplacedWay

_MANY = Range(least=1, most=1e13, whole=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateSettings:
    """What a user asks an estimate of; sizes that are left out are those of a known graph."""

    nodes: Annotated[
        float | None,
        Setting(
            help="Nodes of the graph, such as 111e6.", unset="of --like or DATASET", range=_MANY
        ),
    ] = None
    edges: Annotated[
        float | None,
        Setting(help="Stored edges, both directions.", unset="of --like or DATASET", range=_MANY),
    ] = None
    features: Annotated[
        int | None,
        Setting(
            help="Columns of a feature row.",
            unset="of --like or DATASET",
            range=Range(least=1, most=1 << 20),
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float16", "float32", "bfloat16"],
        Setting(help="Type of stored features; auto: of --like or DATASET, else float32."),
    ] = "auto"
    train: Annotated[
        float | None,
        Setting(
            help="Share of all nodes that are trained on.",
            unset="of --like or DATASET, else 0.1; with --types 0.1 of the seeds' type",
            range=Range(least=0, most=1, whole=False, above_least=True),
        ),
    ] = None
    classes: Annotated[
        int | None,
        Setting(
            help="Classes.",
            unset="of --like or DATASET, else 50",
            range=Range(least=1, most=1 << 20),
        ),
    ] = None
    like: Annotated[
        str | None,
        Setting(help="Data set whose sizes are taken, such as papers100m.", unset="none"),
    ] = None
    machine: Annotated[
        str | None,
        Setting(
            help="Presets, separated by commas; NAME:4 is four hosts.", unset="all of one host"
        ),
    ] = None
    hosts: Annotated[
        int | None,
        Setting(
            help="Hosts, with equally many GPUs and their own copy of the data.",
            unset="1",
            range=Range(least=1, most=1024),
        ),
    ] = None
    devices: Annotated[
        int | None,
        Setting(
            help="GPUs of each host.", unset="the fastest number", range=Range(least=1, most=4096)
        ),
    ] = None
    model: Annotated[
        Literal["sage", "gcn", "gat", "rgcn", "rgat"],
        Setting(help="Model; rgcn and rgat (which is not trained yet) are of --types."),
    ] = "sage"
    hidden: Annotated[int, Setting(help="Hidden columns.", range=Range(least=1, most=65_536))] = 256
    heads: Annotated[
        int, Setting(help="Attention heads (gat).", range=Range(least=1, most=1024))
    ] = 4
    fanouts: Annotated[
        list[int],
        Setting(help="Neighbours per hop, the hop next to the seeds first; -1 takes all."),
    ] = field(default_factory=lambda: [15, 10])
    dialect: Annotated[
        Literal["first_seen", "every_hop"],
        Setting(help="Which nodes a hop expands: those met first (PyG), or all again (DGL)."),
    ] = "first_seen"
    batch_size: Annotated[
        int,
        Setting(
            help="Global batch: seeds per optimiser step over all GPUs of all hosts.",
            range=Range(least=1, most=2**31 - 1),
        ),
    ] = 1024
    precision: Annotated[
        Literal["float32", "tf32", "bfloat16"],
        Setting(help="Of products in training; bfloat16 is priced for rgat alone."),
    ] = "float32"
    all_numbers: Annotated[
        bool,
        Setting(help="Show each number of GPUs of a machine, not the fastest alone.", flag="all"),
    ] = False
    sort: Annotated[
        Literal["time", "cost"], Setting(help="Order of the answers, by an epoch's time or cost.")
    ] = "time"

    def __post_init__(self) -> None:
        check_values(self)

    def workload(self) -> Workload:
        """Return the training that these settings describe."""
        return Workload(
            model="rgcn" if self.model == "rgat" else self.model,
            num_layers=len(self.fanouts),
            hidden=self.hidden,
            heads=self.heads,
            fanouts=self.fanouts,
            batch_size=self.batch_size,
            precision=self.precision,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a training would take on one machine, or what the machine lacks for it."""

    machine: str
    hosts: int
    gpus: int
    """GPUs of all hosts; 0 where ranks are cores."""
    gpu: str
    """Model of the GPUs, or of the processor."""
    fits: bool
    missing: str = ""
    """Sum of the memory that is too small; empty where all fits."""
    memory: str = ""
    """Name of the memory that is too small."""
    short_bytes: int = 0
    """Bytes by which that memory is too small."""
    step_seconds: Interval | None = None
    epoch_seconds: Interval | None = None
    bottleneck: str = ""
    stages: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds per step by stage."""
    row_shares: dict[str, float] = field(default_factory=dict[str, float])
    """Share of feature rows by the place they are read from."""
    topology: str = ""
    """Where adjacency lists are read."""
    dollars_per_hour: float | None = None
    """List price of all hosts; None where the price file has none."""
    dollars_per_epoch: Interval | None = None
    price: str = ""
    """Source and date of the price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Estimates of one training on several machines, best first."""

    nodes: int
    edges: int
    feature_dim: int
    feature_dtype: str
    num_train: int
    num_classes: int
    steps_per_epoch: int
    sizes: str
    """Where the sizes and the law of degrees come from."""
    rates: str
    """Where the rates come from, and what the intervals are worth."""
    estimates: list[Estimate]
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Reason for which a machine has no estimate, by the machine's name."""


def estimate(
    settings: EstimateSettings,
    dataset: Path | None = None,
    *,
    types: Path | None = None,
    prices: Path | None = None,
) -> Estimates:
    """Estimate a training on every machine that is asked for.

    Args:
        settings: the graph's sizes, the training and the machines.
        dataset: folder whose sizes are taken; its features are not read.
        types: file with a typed graph's nodes and edges by type.
        prices: price file in place of the one that comes with gnnplan.

    Raises:
        SettingsError: something cannot be estimated; the line names the flag.
        DatasetError, MachineError, InputError: what is named is not there or damaged.
    """
    _refuse_two_sources(settings, dataset, types)
    from gnnplan.planner.graph_presets import know_graph

    PlanSettings(workload=settings.workload())
    listed, known = read_prices(prices), know_graph(settings, dataset, types)
    found, refused = list[Estimate](), dict[str, str]()
    names = machine_names(settings)
    for name in names:
        try:
            found += on_machine(name, settings, known, listed.get(name.partition(":")[0]))
        except (SettingsError, MachineError) as error:
            if settings.machine is not None and len(names) == 1:
                raise
            refused[name] = str(error)
    graph = known.graph
    return Estimates(
        nodes=graph.num_nodes,
        edges=graph.num_edges,
        feature_dim=graph.feature_dim,
        feature_dtype=graph.feature_dtype,
        num_train=graph.num_train,
        num_classes=graph.num_classes,
        steps_per_epoch=-(-graph.num_train // settings.batch_size),
        sizes=known.words,
        rates=_rates_words(names),
        estimates=sorted(found, key=functools.partial(_order, settings.sort)),
        refused=refused,
    )


TYPED_MODELS = ("rgat", "rgcn")
"""Models of typed graphs."""


def _refuse_two_sources(
    settings: EstimateSettings, dataset: Path | None, types: Path | None
) -> None:
    """Refuse sizes from two places, and a model that does not go with the types."""
    sources = {"a dataset": dataset, "--like": settings.like, "--types": types}
    named = [source for source, given in sources.items() if given is not None]
    if len(named) > 1:
        raise SettingsError(
            f"estimate: expected one of {', '.join(sources)}, found {' and '.join(named)}; drop one"
        )
    if settings.precision == "bfloat16" and settings.model != "rgat":
        raise SettingsError(
            f"--precision bfloat16: expected --model rgat, found {settings.model}, whose products "
            "are priced in float32 and tf32; choose one of these"
        )
    if (settings.model in TYPED_MODELS) != (types is not None):
        wanted = "sage, gcn or gat without" if types is None else "rgat or rgcn with"
        raise SettingsError(
            f"--model {settings.model}: expected {wanted} --types FILE; change one of them"
        )


def _order(sort: str, each: Estimate) -> tuple[float, ...]:
    """Return a key: those that fit first, by cost where that is known, then by time."""
    epoch = math.inf if each.epoch_seconds is None else each.epoch_seconds.value
    cost = math.inf if each.dollars_per_epoch is None else each.dollars_per_epoch.value
    return (cost, epoch, each.short_bytes) if sort == "cost" else (epoch, cost, each.short_bytes)


def machine_names(settings: EstimateSettings) -> list[str]:
    """List the machines that are asked for; of all presets those that can be so many hosts."""
    hosts = settings.hosts or 1
    if settings.machine is None:
        names = [name for name in list_presets() if hosts == 1 or _joins(name, hosts)]
        if not names:
            from gnnplan.planner.probe.box import MOST_HOSTS  # on use: a start imports little

            raise SettingsError(
                f"--hosts: expected at most {MOST_HOSTS}, found {hosts}; ask for fewer"
            )
        return names
    names = [name.strip() for name in settings.machine.split(",") if name.strip()]
    if not names:
        raise SettingsError(
            "--machine: expected presets or machine files, separated by commas, found "
            f"{settings.machine!r}; name one, or leave it out for all presets"
        )
    for name in names:
        find_machine(name)
    return list(dict.fromkeys(names))


def _joins(name: str, hosts: int) -> bool:
    """Tell whether a preset can be asked for as so many hosts."""
    try:
        load_preset(f"{name}:{hosts}")
    except MachineError:
        return False
    return True


def _hosts_of(name: str, settings: EstimateSettings) -> int:
    """Return the number of hosts that a machine is asked for as."""
    count = name.partition(":")[2] if is_preset(name) else ""
    if count and settings.hosts not in (None, int(count)):
        raise SettingsError(
            f"--hosts: expected {int(count)}, as --machine {name} says, found {settings.hosts}; "
            "drop one of them"
        )
    return int(count) if count else settings.hosts or 1


def _rates_words(names: Sequence[str]) -> str:
    """Say where the rates of machines come from, and what the intervals are worth."""
    said = list[str]()
    if any(is_preset(name) for name in names):
        said.append("rates of presets, which `gnnplan machine show NAME` lists with their sources")
    for name in (each for each in names if not is_preset(each)):
        measured = find_machine(name).provenance == "measured"
        words = "measured as far as a probe did, else of such hardware"
        said.append(f"rates of {name}, {words if measured else 'which were not measured there'}")
    return "; ".join([*said, "intervals are meant to hold 90%, which no run has verified"])


def on_machine(
    name: str, settings: EstimateSettings, known: "KnownGraph", price: ListPrice | None = None
) -> list[Estimate]:
    """Estimate a training on one machine: its fastest number of GPUs, or each."""
    from gnnplan.planner.queries.price_ways import list_ways
    from gnnplan.planner.search.dimensions.ranks import machine_of_ranks

    base = name.partition(":")[0] if is_preset(name) else name
    hosts, machine = _hosts_of(name, settings), find_machine(base)
    if max(hosts, num_hosts(machine)) > 1:
        if not is_preset(name):
            raise SettingsError(
                f"--hosts: expected a preset for several hosts, found {name}; name a preset, or a "
                "file of one host"
            )
        load_preset(f"{base}:{hosts}")  # an error where it cannot be so many
    work = settings.workload()
    # No batch has more seeds than there are nodes to train on.
    seeds = min(work.batch_size, known.graph.num_train)
    asked = PlanSettings(
        workload=replace(work, batch_size=-(-seeds // hosts)), devices=settings.devices
    )
    machine = machine_of_ranks(machine, asked)
    ways: dict[int, list[UnplacedWay]] = {}
    for each in list_ways(machine, asked, known, hosts=hosts, model=settings.model):
        number = each.candidate.num_ranks if settings.all_numbers else 0
        ways.setdefault(number, []).append(each)
    return [
        _answer(base, machine, hosts, each, known.graph, work, price)
        for _, each in sorted(ways.items())
    ]


def _answer(
    name: str,
    machine: MachineModel,
    hosts: int,
    ways: "list[UnplacedWay]",
    graph: GraphRef,
    work: Workload,
    price: ListPrice | None,
) -> Estimate:
    """Say what the fastest of some ways takes, or what the machine lacks for the least of them."""
    from gnnplan.planner.candidate import topology_words  # on use: a start imports little
    from gnnplan.planner.cost.memory import sum_text
    from gnnplan.planner.queries.price_ways import best_way

    best = best_way(ways)
    if best is None:
        placed = max((way.place() for way in ways), key=lambda each: each.headroom)
    else:
        placed = best.placed
    candidate = placed.way.candidate
    cpu = next(p.model for p in machine.processors if p.kind == "cpu")
    told = Estimate(
        machine=name,
        hosts=hosts,
        gpus=hosts * len(candidate.gpus),
        gpu=machine.gpus[0].model if candidate.gpus else cpu,
        fits=best is not None,
        topology=topology_words(candidate.topology) if candidate.gpus else "on the host",
        dollars_per_hour=None if price is None else hosts * price.dollars_per_hour,
        price="" if price is None else price.words,
    )
    if best is None:
        memory = min(placed.memories, key=lambda each: placed.memories[each].headroom)
        use = placed.memories[memory]
        return replace(
            told, memory=memory, short_bytes=-use.headroom, missing=sum_text(memory, use)
        )
    step, epoch = best.step, best.epoch_seconds(graph.num_train, work.batch_size)
    spent = _around(epoch, best.half_width)
    hourly = told.dollars_per_hour
    paid = None if hourly is None else _around(epoch * hourly / 3600, best.half_width)
    return replace(
        told,
        step_seconds=_around(step.seconds, best.half_width),
        epoch_seconds=spent,
        bottleneck=step.bottleneck,
        stages=step.stages,
        row_shares=_mean_shares(placed.rows.ranks),
        dollars_per_epoch=paid,
    )


def _mean_shares(ranks: "Sequence[RankRows]") -> dict[str, float]:
    """Return the share of rows by place over all ranks, which read as many rows each."""
    places = dict.fromkeys(place for rank in ranks for place in rank.shares)
    return {
        place: sum(rank.shares.get(place, 0.0) for rank in ranks) / len(ranks) for place in places
    }


def _around(value: float, half_width: float) -> Interval:
    """Return the interval of an estimate: as likely so many times more as less (DEC-144)."""
    factor = 1.0 + half_width
    return Interval(value=value, low=value / factor, high=value * factor)


HOST_BOUND = (
    "host: starting kernels sets the pace, taken as alike on the hosts of all presets; a faster "
    "GPU or more GPUs change nothing there, a larger batch does"
)
"""Sentence below a table in which the host sets the pace of some machine."""
COLUMNS = ["machine", "GPUs", "step", "epoch (interval)", "bottleneck", "rows", "$/epoch"]


def render(found: Estimates) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
    """Return the columns and rows of a table of estimates, and the lines below it."""
    rows = [_row(each) for each in found.estimates]
    paid = dict[str, dict[str, None]]()
    for each in found.estimates:
        if each.dollars_per_hour is not None:
            what, _, terms = each.price.partition(", ")
            named = f"{each.machine} {each.dollars_per_hour / each.hosts:g} ({what})"
            paid.setdefault(terms, {})[named] = None
    lines = [
        f"estimated, no step was measured: {found.sizes}: {found.nodes:,} nodes, {found.edges:,} "
        f"edges, {found.feature_dim} features of {found.feature_dtype}; {found.num_train:,} to "
        f"train on, {found.steps_per_epoch:,} step{'s' * (found.steps_per_epoch > 1)} an epoch",
        found.rates,
        *({HOST_BOUND: None} if any(x.bottleneck == "host" for x in found.estimates) else {}),
        *(f"$/h of a host, {terms}: {', '.join(named)}" for terms, named in paid.items()),
        *(f"{name}: no estimate: {why}" for name, why in found.refused.items()),
    ]
    return COLUMNS, rows, lines


def _row(each: Estimate) -> tuple[str, ...]:
    from gnnplan.planner.cost.memory import size_text  # on use: a start imports little

    boxes = f" x {each.hosts}" if each.hosts > 1 else ""
    first = (f"{each.machine}{boxes}", f"{each.gpus} {each.gpu}" if each.gpus else each.gpu)
    if each.step_seconds is None or each.epoch_seconds is None:
        short = f"does not fit: {each.memory} lacks {size_text(each.short_bytes)}"
        return (*first, "", short, "", "", "")
    epoch, paid = each.epoch_seconds, each.dollars_per_epoch
    return (
        *first,
        seconds_text(each.step_seconds.value),
        f"{seconds_text(epoch.value)} ({seconds_text(epoch.low)} to {seconds_text(epoch.high)})",
        each.bottleneck,
        ", ".join(f"{share:.0%} {place}" for place, share in each.row_shares.items()),
        "" if paid is None else f"{paid.value:.3g}",
    )
