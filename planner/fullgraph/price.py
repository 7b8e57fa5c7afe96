"""Price a full-graph candidate: seconds per epoch, which is one step, memory, traffic.

    epoch = max_i (sample + forward_backward + packing)_i + exposed exchange + straggler
            + all-reduce + optimizer

What the typical rank waits for the largest part counts as halo_exchange, where a run's meter sees
it (all_reduce where nothing crosses); stages are those of a typical rank and add up to the epoch.

A rank's own seconds follow from the cases that were timed. p = 1 is timed itself. Below, each
quantity q is linear in p through its two anchors a < b:
    q(p) = q(a) + (p - a) / (b - a) (q(b) - q(a)), never below 0
A first layer that is computed once takes away what it took away at p = 1, by the edges that are
left: (E_in + p E_halo) / (E_in + E_halo), and its draw.

Source: docs/formulas.md 3.4, 8.4 [A4]; docs/modelling.md 4 and 5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.backends.backend import startup_seconds
from gnnplan.planner.cost.link_use import link_of
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.pipeline_time import straggler_seconds
from gnnplan.planner.cost.rates import Rate, core_rates_words, ranks_here, topology_bytes
from gnnplan.planner.cost.stages.all_reduce import (
    all_reduce_seconds,
    gpu_all_reduce,
    gradient_bytes,
)
from gnnplan.planner.cost.stages.exchange import hosts_all_reduce
from gnnplan.planner.cost.stages.gather_gpu import copy_seconds_per_byte
from gnnplan.planner.cost.step import interval_around, relative_half_width
from gnnplan.planner.fullgraph.candidate import cut_of
from gnnplan.planner.fullgraph.exchange import (
    ITEM_BYTES,
    Exchanges,
    asked_bytes,
    asking_seconds,
    crossing_share,
    crossing_sizes,
    drops_edges,
    exchange_seconds,
    exchanged_widths,
    num_draws,
)
from gnnplan.planner.fullgraph.formulas import ID_BYTES, PartSizes, columns_per_row, epoch_bytes
from gnnplan.planner.fullgraph.memory import memory_use
from gnnplan.planner.fullgraph.parts import ANCHORS, CaseSeconds
from gnnplan.planner.fullgraph.profile import CutProfile
from gnnplan.planner.machine.model import MachineModel, one_host, prefix_of
from gnnplan.planner.search.choose import PricedCandidate, find_refusal
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.plan.schema import FullGraph, GraphRef, Prediction, Workload


def rank_seconds(profile: CutProfile, settings: FullGraph) -> list[CaseSeconds]:
    """Find the seconds of every rank of a cut; KeyError: such draws were not timed."""
    if settings.exchange == "broadcast" or drops_edges(settings):
        return _timed(profile, settings)
    if settings.keep >= 1:
        whole = FullGraph(precompute_first_layer=settings.precompute_first_layer)
        return _timed(profile, whole)
    plain = replace(settings, rounding="bernoulli", precompute_first_layer=False)
    low, high = (_timed(profile, replace(plain, keep=a)) for a in ANCHORS)
    found = [_between(a, b, settings.keep) for a, b in zip(low, high, strict=True)]
    if settings.rounding == "stochastic":
        rounded = [
            _timed(profile, replace(plain, keep=a, rounding="stochastic"), draws_only=True)
            for a in ANCHORS
        ]
        drawn = [_between(a, b, settings.keep).sample for a, b in zip(*rounded, strict=True)]
        found = [replace(f, sample=s) for f, s in zip(found, drawn, strict=True)]
    if settings.precompute_first_layer:
        found = _without_first(profile, settings, found)
    return found


def _timed(
    profile: CutProfile, settings: FullGraph, *, draws_only: bool = False
) -> list[CaseSeconds]:
    """Find what was measured of a case, by rank."""
    for place, case in enumerate(profile.cases):
        if case.settings == settings and case.draws_only == draws_only:
            return [answer.cases[place] for answer in profile.ranks]
    raise KeyError(f"{profile.cut.name}: {settings} was not timed")


def _between(low: CaseSeconds, high: CaseSeconds, keep: float) -> CaseSeconds:
    share = (keep - ANCHORS[0]) / (ANCHORS[1] - ANCHORS[0])

    def line(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    return CaseSeconds(
        sample=line(low.sample, high.sample),
        forward_backward=line(low.forward_backward, high.forward_backward),
        packing=line(low.packing, high.packing),
        windows=[line(a, b) for a, b in zip(low.windows, high.windows, strict=True)],
        spread=max(low.spread, high.spread),
    )


def _without_first(
    profile: CutProfile, settings: FullGraph, found: list[CaseSeconds]
) -> list[CaseSeconds]:
    """Take away what the first layer's sums and its exchange take."""
    layers = len(profile.widths) - 1
    whole, known = (
        _timed(profile, FullGraph()),
        _timed(profile, FullGraph(precompute_first_layer=True)),
    )
    # Of draws per layer one falls away; a shared draw is made in either case.
    drawn = 1.0 if settings.draws == "shared" else (layers - 1) / layers
    left: list[CaseSeconds] = []
    for now, all_, less, sizes in zip(found, whole, known, profile.sizes, strict=True):
        share = edges_left(sizes, settings.keep)

        def reduced(
            pick: Callable[[CaseSeconds], float],
            now: CaseSeconds = now, all_: CaseSeconds = all_, less: CaseSeconds = less,
            share: float = share,
        ) -> float:  # fmt: skip
            return max(0.0, pick(now) - share * max(0.0, pick(all_) - pick(less)))

        left.append(
            replace(
                now,
                sample=now.sample * drawn,
                forward_backward=reduced(lambda c: c.forward_backward),
                packing=reduced(lambda c: c.packing),
                windows=now.windows[1:],
            )
        )
    return left


def edges_left(sizes: PartSizes, keep: float) -> float:
    """Compute the share of a part's edges that an epoch aggregates over.

    >>> edges_left(PartSizes(inner=1, halo=1, sent=1, inner_edges=30, halo_edges=10), 0.2)
    0.8
    """
    whole = sizes.inner_edges + sizes.halo_edges
    return 1.0 if whole == 0 else (sizes.inner_edges + keep * sizes.halo_edges) / whole


@dataclass(frozen=True, kw_only=True, slots=True)
class FullRequest:
    """Inputs that all candidates of a full-graph request have in common."""

    graph: GraphRef
    workload: Workload
    machine: MachineModel
    budgets: Budgets
    settings: PlanSettings = field(default_factory=PlanSettings)
    """Planning request of the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedEpoch(PricedCandidate):
    """A candidate whose optimiser step is an epoch, and its price."""

    bound_seconds: float
    """Seconds per epoch with this cut's own work shared equally and its exchange free."""


def price(request: FullRequest, profile: CutProfile, candidate: Candidate) -> PricedEpoch:
    """Price one candidate.

    Raises:
        KeyError: its draws were not timed.
        MachineError: the machine has no all-to-all or all-reduce table.
    """
    machine, settings, cut = request.machine, candidate.full_graph, cut_of(candidate)
    crossing, layers = crossing_sizes(profile, settings), len(profile.widths) - 1
    ranks = rank_seconds(profile, settings)
    if asking := asking_seconds(machine, candidate, crossing, layers):
        ranks = [replace(r, sample=r.sample + asking) for r in ranks]
    windows = [r.windows for r in ranks]
    exchange = exchange_seconds(machine, crossing, profile.widths, windows, candidate)
    reduced = _all_reduce(request, profile, candidate)
    stages, bound = _stages(request, profile, ranks, exchange, reduced.seconds)
    epoch = sum(stages.values())
    half = relative_half_width(
        epoch,
        stages,
        {
            "sample": max(r.spread for r in ranks),
            "forward_backward": max(r.spread for r in ranks),
            "halo_exchange": exchange.spread,
            "all_reduce": reduced.spread,
        },
        noise=machine.noise,
        profile_error=0.0,
        oversubscribed=not cut.on_gpus and cut.ranks * cut.threads > machine.num_cores,
    )
    span = interval_around(epoch, half)
    largest = max(stages, key=lambda name: stages[name])
    prediction = Prediction(
        step_seconds=span,
        epoch_seconds=span,
        steps_per_epoch=1,
        startup_seconds=_startup(request, profile, candidate),
        stages=stages,
        stage_core_seconds=_core_seconds(profile, ranks, stages),
        traffic_bytes=_traffic(request, profile, candidate),
        hit_rates={f"rank{r}": _shares(part, settings) for r, part in enumerate(crossing)},
        memory_bytes=memory_use(
            profile, candidate, request.workload, request.graph, machine, request.budgets
        ),
        bottleneck=f"{largest} of the largest part" if cut.ranks > 1 else largest,
        provenance=_provenance(profile, candidate, exchange, reduced, request),
    )  # fmt: skip
    return PricedEpoch(
        candidate=candidate,
        prediction=prediction,
        refusal=find_refusal(request.settings, candidate, prediction),
        bound_seconds=bound,
    )


def _stages(
    request: FullRequest,
    profile: CutProfile,
    ranks: Sequence[CaseSeconds],
    exchange: Exchanges,
    reduced: float,
) -> tuple[dict[str, float], float]:
    """Split an epoch of a typical rank into stages, and bound it by perfect balance."""
    busy = [r.sample + r.forward_backward + r.packing for r in ranks]
    count, mean, longest = len(ranks), float(np.mean(busy)), max(busy)
    optimizer = max(a.optimizer_seconds for a in profile.ranks)
    stages = {
        "sample": float(np.mean([r.sample for r in ranks])),
        "forward_backward": float(np.mean([r.forward_backward for r in ranks])),
        "optimizer": optimizer,
    }
    bound = mean + optimizer
    if count > 1:
        waited = longest - mean
        waited += straggler_seconds(longest, request.machine.noise * longest, count)
        packing = float(np.mean([r.packing for r in ranks]))
        crosses = exchange.seconds > 0
        stages["halo_exchange"] = packing + exchange.exposed + (waited if crosses else 0.0)
        stages["all_reduce"] = reduced + (0.0 if crosses else waited)
        bound += reduced
    return stages, bound


def _all_reduce(request: FullRequest, profile: CutProfile, candidate: Candidate) -> Rate:
    """Price the gradient's sum; the ranks compute before the call and wait in it."""
    count, machine = len(profile.sizes), request.machine
    size = float(gradient_bytes(profile.num_parameters))
    if candidate.gpus:
        return gpu_all_reduce(machine, candidate, size)
    if candidate.hosts > 1:
        return hosts_all_reduce(machine, candidate, size)
    if count == 1:
        words = "derived: one rank has nothing to sum"
        return Rate(seconds=0.0, spread=0.0, provenance=words)
    name = "all_reduce_stepped" if "all_reduce_stepped" in machine.tables else "all_reduce"
    table = machine.table(name)
    words = f"{table.provenance}: table {name} at the gradient's bytes"
    seconds = all_reduce_seconds(table, size, count)
    return Rate(seconds=seconds, spread=table.spread, provenance=words)


def _core_seconds(
    profile: CutProfile, ranks: Sequence[CaseSeconds], stages: dict[str, float]
) -> dict[str, float]:
    """Multiply by ranks, and by a rank's threads while it computes."""
    threads, count = profile.cut.threads, len(ranks)
    return {
        name: seconds * count * (threads if name == "forward_backward" else 1)
        for name, seconds in stages.items()
    }


def _startup(request: FullRequest, profile: CutProfile, candidate: Candidate) -> float:
    machine, count = request.machine, float(ranks_here(candidate))
    started = profile.process.start_seconds
    if "process_start" in machine.tables:
        started = machine.table("process_start").at(ranks=count)
    rows = max(part.inner for part in profile.sizes) * 4 * request.graph.feature_dim
    if candidate.gpus:
        copied = 1 / max(copy_seconds_per_byte(machine, candidate))
    else:
        copied = machine.table("copy").at(readers=count)
    return startup_seconds(
        process_seconds=started,
        own_row_bytes=float(rows),
        topology_bytes=float(topology_bytes(request.graph)),
        copy_bytes_per_second=copied,
    )


def halo_bytes(profile: CutProfile, candidate: Candidate) -> float:
    """Count the bytes of boundary rows over all ranks and one epoch, on average over draws.

    p Vol elt (d_0 + 2 sum of the hidden widths), docs/formulas.md 3.4; where edges are dropped, ids
    of the rows that are asked for too.
    """
    settings, layers = candidate.full_graph, len(profile.widths) - 1
    sizes = crossing_sizes(profile, settings)
    rows = crossing_share(settings) * sum(part.halo for part in sizes)
    found = epoch_bytes(rows, profile.widths, precomputed=settings.precompute_first_layer)
    return float(found) + asked_bytes(settings, sizes, layers)


def _traffic(request: FullRequest, profile: CutProfile, candidate: Candidate) -> dict[str, float]:
    """Count the bytes per epoch over all ranks by link: boundary rows, and the gradient's ring.

    Of GPUs, rows alone: between peers of a clique, over the host, and what leaves by each card.
    """
    count, machine = candidate.num_ranks, request.machine
    if count == 1:
        return {}
    ring = 2.0 * (count - 1) * gradient_bytes(profile.num_parameters)
    if not candidate.gpus and candidate.hosts == 1:
        return {link_of(machine, "all_reduce"): halo_bytes(profile, candidate) + ring}
    settings, layers = candidate.full_graph, len(profile.widths) - 1
    columns = exchanged_widths(profile.widths, precomputed=settings.precompute_first_layer)
    forward = layers - int(settings.precompute_first_layer)
    size, sizes = crossing_share(settings) * ITEM_BYTES, crossing_sizes(profile, settings)
    asks, draws = asked_bytes(settings, sizes, layers) > 0, num_draws(settings, layers)
    total: dict[str, float] = {}
    for receiver, part in enumerate(sizes):
        for owner, rows in enumerate(part.received):
            out = _link_between(machine, candidate, owner, receiver)
            back = _link_between(machine, candidate, receiver, owner)
            total[out] = total.get(out, 0.0) + size * rows * sum(columns[:forward])
            total[back] = total.get(back, 0.0) + size * rows * sum(columns[forward:])
            if asks and owner != receiver:
                total[back] += ID_BYTES * (rows + 1) * draws
    if not candidate.gpus:
        for host in range(candidate.hosts):
            card = f"nic{host}.out"
            total[card] = total.get(card, 0.0) + ring / count
    return {link: size for link, size in sorted(total.items()) if size > 0}


def _link_between(machine: MachineModel, candidate: Candidate, owner: int, receiver: int) -> str:
    """Name what a row crosses on its way from one rank to another."""
    source, target = candidate.devices[owner], candidate.devices[receiver]
    if source.host != target.host:
        return f"nic{source.host}.out"
    if not candidate.gpus:
        inside = link_of(one_host(machine, source.host), "all_reduce")
        return f"{prefix_of(source.host)}{inside}"
    return "peer" if source.clique == target.clique else "host"


def _shares(sizes: PartSizes, settings: FullGraph) -> dict[str, float]:
    """Share the rows of one layer out to a rank's own and received ones."""
    keep = crossing_share(settings)
    rows = sizes.inner + keep * sizes.halo
    if rows == 0 or sizes.halo == 0:
        return {"own": 1.0}
    return {"own": sizes.inner / rows, "peer": keep * sizes.halo / rows}


def _provenance(
    profile: CutProfile, candidate: Candidate, exchange: Exchanges, reduced: Rate,
    request: FullRequest,
) -> dict[str, str]:  # fmt: skip
    sample = measured = _measured_words(candidate)
    if candidate.gpus:
        measured = "derived: roofline of each part's shapes, the machine's flops and bandwidth"
        sample = "derived: the host's draws, kept edges over the GPU's bandwidth"
    elif profile.is_derived:
        rates = core_rates_words(request.machine)
        measured = f"derived: operations and bytes of each part at {rates}"
        sample = "derived: nothing is drawn"
    if drops_edges(candidate.full_graph) and candidate.num_ranks > 1:
        sample += "; rows of kept edges are asked for"
    cut = cut_of(candidate)
    words = {
        "sample": sample,
        "forward_backward": measured,
        "optimizer": measured if candidate.gpus or profile.is_derived else "measured: on the model",
    }
    if cut.ranks > 1:
        words["halo_exchange"] = f"{exchange.provenance}; wait for the largest part: derived"
        words["all_reduce"] = reduced.provenance
        known = candidate.full_graph.precompute_first_layer
        volume = sum(part.halo for part in crossing_sizes(profile, candidate.full_graph))
        share = volume / max(1, request.graph.num_nodes)
        columns = columns_per_row(profile.widths, precomputed=known)
        words["partition"] = (
            f"{cut.partitioner}: volume {volume} rows per exchange, {share:.2f} of the "
            f"nodes; {columns} numbers per row and epoch"
        )
    words["startup"] = "measured: process start; derived: bytes over copy bandwidth"
    if profile.is_derived:
        words["startup"] = "derived: such processes' start, bytes over copy bandwidth"
    if candidate.gpus:
        words["startup"] = "derived: the machine's process start, bytes over the links to the GPUs"
    return words


def _measured_words(candidate: Candidate) -> str:
    measured = "measured: the runtime's own epoch on each part, nothing sent"
    if 0 < candidate.full_graph.keep < 1 and not drops_edges(candidate.full_graph):
        measured = f"derived: linear in p through {measured.removeprefix('measured: ')}"
    return measured
