"""Profiles of full-graph training written down by hand: real parts, round seconds, no process."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.fullgraph.candidate import Cut
from gnnplan.planner.fullgraph.parts import (
    Case,
    CaseSeconds,
    PartAnswer,
    cases_of,
    connect_cut,
    crossing_of,
    cut_graph,
)
from gnnplan.planner.fullgraph.price import FullRequest
from gnnplan.planner.fullgraph.profile import CutProfile, FullProfile, Variance
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.pipeline import graph_ref
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import ProcessCost
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.schema import Workload
from tests.support.machines import constant, machine

EDGE_SECONDS = 1e-6
"""Of one edge in one epoch: forward, backward, all layers."""
BYTE_SECONDS = 1e-9
"""Of the all-to-all: a byte per nanosecond, its own share included."""
WORK = Workload(hidden=8, num_layers=3, fanouts=[-1] * 3)


def linked_machine(*, byte_seconds: float = BYTE_SECONDS, eta: float = 0.5) -> MachineModel:
    """Two cores whose all-to-all takes `byte_seconds` per byte from 1 KB to 1 GB."""
    sizes = [1e3, 1e9]
    table = Table(
        unit="seconds", axes=["bytes", "ranks"], points=[sizes, [2.0]],
        values=[byte_seconds * s for s in sizes], spread=0.05,
    )  # fmt: skip
    overlap = constant("ratio", ["ranks", "threads"], eta)
    return machine().with_tables({"all_to_all": table, "overlap_eta": overlap})


def case_seconds(case: Case, edges: float, halo: float, exchanges: int) -> CaseSeconds:
    """Seconds in proportion to the edges left; half of them lie beside the exchanges."""
    left = edges + case.settings.keep * halo
    work = EDGE_SECONDS * left * (0.8 if case.settings.precompute_first_layer else 1.0)
    if case.draws_only:
        return CaseSeconds(sample=2e-3, forward_backward=0.0, packing=0.0, windows=[], spread=0.05)
    sampled = case.settings.keep < 1
    return CaseSeconds(
        sample=(1e-3 if case.settings.draws == "shared" else 3e-3) if sampled else 0.0,
        forward_backward=work,
        packing=1e-3 * case.settings.keep if exchanges else 0.0,
        windows=[work / 2 / max(1, exchanges)] * exchanges,
        spread=0.05,
    )


def hand_profile(
    graph: Graph,
    settings: PlanSettings,
    cut: Cut,
    draws: Sequence[str],
    *,
    variance: Variance | None = None,
) -> FullProfile:
    """A cut's real parts with seconds by the formula of `case_seconds`."""
    work = settings.workload
    parts = connect_cut(graph, cut_graph(graph, cut), cut.ranks, work.model)
    model = build_model(work, graph.feature_dim, graph.num_classes, str(graph.task))
    widths = [graph.feature_dim, *[work.hidden] * (work.num_layers - 1), graph.num_classes]
    cases = cases_of(cut, draws, settings)
    answers: list[PartAnswer] = []
    for sizes in parts.sizes:
        found: list[CaseSeconds] = []
        for case in cases:
            known = case.settings.precompute_first_layer
            exchanges = 2 * work.num_layers - (2 if known else 1)
            if case.settings.exchange == "broadcast":
                exchanges *= max(1, cut.ranks - 1)
            found.append(case_seconds(case, sizes.inner_edges, sizes.halo_edges, exchanges))
        answers.append(
            PartAnswer(
                cases=found, optimizer_seconds=1e-4, widths=widths,
                num_parameters=sum(p.numel() for p in model.parameters()),
            )
        )  # fmt: skip
    numbers = CutProfile(
        cut=cut, sizes=parts.sizes, seeds=parts.seeds, cases=cases, ranks=answers,
        variance=variance or Variance(boundary=1.0, signal=10.0, nodes=100),
        process=ProcessCost(start_seconds=1.0, resident_bytes=100_000_000),
        crossing=crossing_of(parts, settings.keep or 0) if settings.drop != "nodes" else [],
    )  # fmt: skip
    return FullProfile(numbers=numbers, partition=parts.partition)


def hand_profiles(**options: Variance) -> Callable[..., list[FullProfile]]:
    """In the place of `profile_cuts`."""

    def made(
        graph: Graph, settings: PlanSettings, _machine: MachineModel,
        cuts: Sequence[Cut], draws: Sequence[str], **_: object,
    ) -> list[FullProfile]:  # fmt: skip
        return [hand_profile(graph, settings, cut, draws, **options) for cut in cuts]

    return made


def hand_request(
    graph: Graph,
    work: Workload = WORK,
    model: MachineModel | None = None,
    budgets: Budgets | None = None,
) -> FullRequest:
    """What candidates have in common."""
    return FullRequest(
        graph=graph_ref(graph), workload=work, machine=model or linked_machine(),
        budgets=budgets or Budgets(),
    )  # fmt: skip


def uneven(profile: CutProfile, factors: Sequence[float]) -> CutProfile:
    """The profile with each rank's compute multiplied by its factor."""
    ranks = [
        replace(
            answer,
            cases=[replace(c, forward_backward=c.forward_backward * f) for c in answer.cases],
        )
        for answer, f in zip(profile.ranks, factors, strict=True)
    ]
    return replace(profile, ranks=ranks)
