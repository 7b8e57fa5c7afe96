"""The price of a full-graph candidate: seconds per epoch, which is one step, memory, traffic.

    epoch = max_i (sample + forward_backward + packing)_i + exposed exchange + straggler
            + all-reduce + optimizer

What the typical rank waits for the largest part counts as halo_exchange, where a run's meter sees
it (all_reduce where nothing crosses); stages are those of a typical rank and add up to the epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.all_reduce import all_reduce_seconds, gradient_bytes
from planner.cost.budget import Budgets
from planner.cost.full_graph import columns_per_row, epoch_bytes
from planner.cost.interval import relative_half_width, spanned
from planner.cost.memory import sum_text
from planner.cost.model import link_of
from planner.cost.rates import topology_bytes
from planner.cost.startup import startup_seconds
from planner.cost.straggler import straggler_seconds
from planner.fullgraph.candidate import FullCandidate
from planner.fullgraph.exchange import Exchanges, exchange_seconds
from planner.fullgraph.memory import memory_use, rank_parts
from planner.fullgraph.profile import CutProfile
from planner.fullgraph.request import CaseSeconds
from planner.fullgraph.seconds import rank_seconds
from planner.machine import MachineModel
from runtime.plan import GraphRef, Prediction, Workload

NEVER_BELOW_BALANCE = "this cut's own work shared equally, its exchange free"
"""What the lower bound of a candidate means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullRequest:
    """What every candidate of one request has in common."""

    graph: GraphRef
    workload: Workload
    machine: MachineModel
    budgets: Budgets
    oversubscribe: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FullPriced:
    """A candidate and its price."""

    candidate: FullCandidate
    prediction: Prediction
    bound_seconds: float
    """Below which no balance and no exchange brings this cut."""

    @property
    def seconds(self) -> float:
        """Predicted seconds per epoch."""
        return self.prediction.epoch_seconds.value

    @property
    def overflow(self) -> str:
        """The memory sum that does not fit; empty where all fit."""
        for name, use in self.prediction.memory_bytes.items():
            if use.headroom < 0:
                return sum_text(name, use)
        return ""


def price(request: FullRequest, profile: CutProfile, candidate: FullCandidate) -> FullPriced:
    """Price one candidate.

    Raises:
        KeyError: its draws were not timed.
        MachineError: the machine has no all-to-all or all-reduce table.
    """
    machine, settings, cut = request.machine, candidate.settings, candidate.cut
    ranks = rank_seconds(profile, settings)
    exchange = exchange_seconds(
        machine, profile.sizes, profile.widths, [r.windows for r in ranks],
        keep=settings.keep, threads=cut.threads,
        precomputed=settings.precompute_first_layer, overlap=candidate.overlap,
    )  # fmt: skip
    stages, bound = _stages(request, profile, ranks, exchange)
    epoch = sum(stages.values())
    half = relative_half_width(
        epoch,
        stages,
        {
            "sample": max(r.spread for r in ranks),
            "forward_backward": max(r.spread for r in ranks),
            "halo_exchange": exchange.spread,
            "all_reduce": _all_reduce(request, profile)[1],
        },
        noise=machine.noise,
        profile_error=0.0,
        oversubscribed=cut.ranks * cut.threads > machine.num_cores,
    )
    span = spanned(epoch, half)
    largest = max(stages, key=lambda name: stages[name])
    prediction = Prediction(
        step_seconds=span,
        epoch_seconds=span,
        steps_per_epoch=1,
        startup_seconds=_startup(request, profile),
        stages=stages,
        stage_core_seconds=_core_seconds(profile, ranks, stages),
        traffic_bytes=_traffic(request, profile, candidate),
        hit_rates={f"rank{r}": _shares(profile, r, settings.keep) for r in range(cut.ranks)},
        memory_bytes=memory_use(
            rank_parts(profile, candidate, request.workload),
            request.graph, machine, request.budgets, profile.process.launcher_bytes,
        ),
        bottleneck=f"{largest} of the largest part" if cut.ranks > 1 else largest,
        provenance=_provenance(profile, candidate, exchange, request),
    )  # fmt: skip
    return FullPriced(candidate=candidate, prediction=prediction, bound_seconds=bound)


def _stages(
    request: FullRequest, profile: CutProfile, ranks: Sequence[CaseSeconds], exchange: Exchanges
) -> tuple[dict[str, float], float]:
    """Seconds of a typical rank by stage, and what perfect balance and a free exchange leave."""
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
        reduced = _all_reduce(request, profile)[0]
        packing = float(np.mean([r.packing for r in ranks]))
        crosses = exchange.seconds > 0
        stages["halo_exchange"] = packing + exchange.exposed + (waited if crosses else 0.0)
        stages["all_reduce"] = reduced + (0.0 if crosses else waited)
        bound += reduced
    return stages, bound


def _all_reduce(request: FullRequest, profile: CutProfile) -> tuple[float, float, str]:
    """Seconds, spread and words; the ranks compute before the call and wait in it."""
    count, machine = len(profile.sizes), request.machine
    if count == 1:
        return 0.0, 0.0, "derived: one rank has nothing to sum"
    name = "all_reduce_stepped" if "all_reduce_stepped" in machine.tables else "all_reduce"
    table = machine.table(name)
    size = float(gradient_bytes(profile.num_parameters))
    words = f"{table.provenance}: table {name} at the gradient's bytes"
    return all_reduce_seconds(table, size, count), table.spread, words


def _core_seconds(
    profile: CutProfile, ranks: Sequence[CaseSeconds], stages: dict[str, float]
) -> dict[str, float]:
    """Over all ranks; a rank's threads are taken to be busy while it computes."""
    threads, count = profile.cut.threads, len(ranks)
    return {
        name: seconds * count * (threads if name == "forward_backward" else 1)
        for name, seconds in stages.items()
    }


def _startup(request: FullRequest, profile: CutProfile) -> float:
    machine, count = request.machine, float(profile.cut.ranks)
    started = profile.process.start_seconds
    if "process_start" in machine.tables:
        started = machine.table("process_start").at(ranks=count)
    rows = max(part.inner for part in profile.sizes) * 4 * request.graph.feature_dim
    return startup_seconds(
        process_seconds=started,
        own_row_bytes=float(rows),
        topology_bytes=float(topology_bytes(request.graph)),
        copy_bytes_per_second=machine.table("copy").at(readers=count),
    )


def halo_bytes(profile: CutProfile, candidate: FullCandidate) -> float:
    """Bytes of boundary rows over all ranks and one epoch, on average over draws; exact for p = 1.

    p Vol elt (d_0 + 2 sum of the hidden widths), docs/formulas.md 3.4; no ids are sent.
    """
    known = candidate.settings.precompute_first_layer
    rows = candidate.settings.keep * profile.volume
    return float(epoch_bytes(rows, profile.widths, precomputed=known))


def _traffic(
    request: FullRequest, profile: CutProfile, candidate: FullCandidate
) -> dict[str, float]:
    """Bytes per epoch over all ranks by link: boundary rows, and the gradient's ring."""
    count = candidate.cut.ranks
    if count == 1:
        return {}
    ring = 2.0 * (count - 1) * gradient_bytes(profile.num_parameters)
    return {link_of(request.machine, "all_reduce"): halo_bytes(profile, candidate) + ring}


def _shares(profile: CutProfile, rank: int, keep: float) -> dict[str, float]:
    """Where the rows of one layer are: a rank's own, and received ones."""
    sizes = profile.sizes[rank]
    rows = sizes.inner + keep * sizes.halo
    if rows == 0 or sizes.halo == 0:
        return {"own": 1.0}
    return {"own": sizes.inner / rows, "peer": keep * sizes.halo / rows}


def _provenance(
    profile: CutProfile, candidate: FullCandidate, exchange: Exchanges, request: FullRequest
) -> dict[str, str]:
    measured = "measured: the runtime's own epoch on each part, nothing sent"
    if 0 < candidate.settings.keep < 1:
        measured = f"derived: linear in p through {measured.removeprefix('measured: ')}"
    cut = candidate.cut
    words = {
        "sample": measured,
        "forward_backward": measured,
        "optimizer": "measured: on the model",
    }
    if cut.ranks > 1:
        words["halo_exchange"] = f"{exchange.provenance}; wait for the largest part: derived"
        words["all_reduce"] = _all_reduce(request, profile)[2]
        known = candidate.settings.precompute_first_layer
        share = profile.volume / max(1, request.graph.num_nodes)
        columns = columns_per_row(profile.widths, precomputed=known)
        words["partition"] = (
            f"{cut.partitioner}: volume {profile.volume} rows per exchange, {share:.2f} of the "
            f"nodes; {columns} numbers per row and epoch"
        )
    words["startup"] = "measured: process start; derived: bytes over copy bandwidth"
    return words
