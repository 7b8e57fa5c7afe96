"""Make a full-graph plan: check, time the parts (cached), price, choose p and candidate.

The array `partition` holds each node's rank. Nothing is timed but the profile: with the same
machine file and cached profile a repeated plan is the same to the byte.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from gnnplan.planner.assemble import make_plan
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.link_use import link_of
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.rates import topology_bytes
from gnnplan.planner.cost.request import row_bytes
from gnnplan.planner.cost.stages.all_reduce import gradient_bytes
from gnnplan.planner.cost.systems import EpochWork
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.fullgraph.candidate import DRAWS, Cut, cut_of, cuts_of, settings_of
from gnnplan.planner.fullgraph.choose import FullGraphChoice, alternatives, choose, runners_up
from gnnplan.planner.fullgraph.exchange import exchanged_widths
from gnnplan.planner.fullgraph.price import FullRequest, PricedEpoch, halo_bytes, price
from gnnplan.planner.fullgraph.profile import (
    CUTTING_SECONDS,
    CutProfile,
    estimate_cuts,
    profile_cuts,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.profile.roofline import check_model
from gnnplan.planner.queries.rivals import RunnersUp, TodayCounts
from gnnplan.planner.request import check_training_data
from gnnplan.planner.search.choose import shadow_prices
from gnnplan.planner.search.dimensions.ranks import (
    LINK_TABLES,
    LINKS,
    faster,
    faster_link,
    plans_gpus,
)
from gnnplan.planner.settings import NO_FULL_GRAPH, PlanSettings, refuse_changed
from gnnplan.planner.units import Progress
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.fullgraph import check_settings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import (
    Alternative,
    Certificate,
    FullGraph,
    GraphRef,
    Interval,
    Plan,
    Source,
    Strategy,
)
from gnnplan.runtime.sampling.registry import is_default
from gnnplan.runtime.sampling.statistics import StatisticsClass, full_graph_class

WHERE = "mode full-graph"


def check_choices(settings: PlanSettings) -> None:
    """Refuse choices of full-graph training that contradict each other (SettingsError)."""
    work, keep = settings.workload, settings.keep
    sampled = keep is None or keep < 1
    if settings.drop != "nodes" and (keep is None or keep >= 1):
        raise SettingsError(
            f"--drop {settings.drop}: expected --keep below 1, the share of the edges to keep (the "
            f"planner finds that of boundary nodes alone), found {keep}; add it, such as --keep 0.5"
        )
    if settings.drop == "edges" and settings.first_layer == "once":
        raise SettingsError(
            "--first-layer once: expected inputs that stay the same, found --drop edges, which "
            "drops others each epoch; drop one of the two"
        )
    if settings.exchange == "broadcast" and (work.model == "gat" or (keep is not None and sampled)):
        found = "--model gat" if work.model == "gat" else f"--keep {keep:g}"
        raise SettingsError(
            "--exchange broadcast: expected model sage or gcn and nothing dropped, since whole "
            f"slices are sent, found {found}; drop one of the two"
        )
    if settings.drop != "nodes":
        refuse_changed(settings, ("rounding",), "--drop nodes, whose numbers it rounds")
    if not sampled or settings.exchange == "broadcast":
        refuse_changed(settings, ("draws", "rounding"), "draws, of which there are none")
    allowed = StatisticsClass(work.allow)
    drawn = any(value != "auto" for value in (settings.draws, settings.rounding))
    if (drawn or (keep is not None and sampled)) and not draws_of(settings, allowed):
        found = min(classes_of(settings), key=list(StatisticsClass).index)
        raise SettingsError(
            f"--allow {allowed.value}: expected {found.value} or looser, since --keep, --draws and "
            f"--rounding drop some of each layer's sums; add --allow {found.value}"
        )


def check_training(graph: Graph, settings: PlanSettings, *, calibrate: bool = False) -> None:
    """Refuse what full-graph training cannot do on any machine, in one line (SettingsError)."""
    work = settings.workload
    try:
        check_settings(FullGraph(), work.model, str(graph.task))
    except PlanError as error:
        raise SettingsError(f"{error}; use --mode minibatch") from None
    if not is_default(settings.sampler, settings.sampler_parameters):
        raise SettingsError(
            f"{WHERE}: expected no sampler, since every neighbour is aggregated, found "
            f"{settings.sampler}; drop --sampler"
        )
    for names, why in NO_FULL_GRAPH.items():
        refuse_changed(settings, names, f"the default in {WHERE}, {why}")
    check_choices(settings)
    if calibrate:
        raise SettingsError(
            f"{WHERE}: expected no --calibrated, whose factors are those of mini-batches; drop it"
        )
    check_training_data(graph)
    if graph.x_by_type:
        raise SettingsError(
            f"{WHERE}: expected features of one width, found features by node type in "
            f"{graph.name}; use --mode minibatch with --model rgcn"
        )


def plan_full_graph(
    graph: Graph,
    reference: GraphRef,
    settings: PlanSettings,
    machine: MachineModel,
    progress: Progress | None,
    *,
    calibrate: bool,
) -> tuple[Plan, dict[str, NDArray[Any]], RunnersUp, list[Interval]]:
    """Make the full-graph plan with the lowest predicted time per epoch, its array, and what lost.

    What lost is the best of each number of ranks, and the step of every other candidate that fits;
    of a cut that was not made it may be anything. Arguments and errors are those of
    `planner.pipeline.plan`, which writes what is found; factors are learnt from mini-batches, so
    `calibrate` is refused.

    Raises:
        WorkerFailed: the parts could not be timed.
    """
    check_training(graph, settings, calibrate=calibrate)
    asked = settings.devices
    if asked is not None and asked > graph.num_nodes:
        raise SettingsError(
            f"expected at most {graph.num_nodes} devices (the nodes), found {asked}"
        )
    if plans_gpus(machine):
        check_model(settings.workload, machine)
    request = FullRequest(
        graph=reference,
        workload=settings.workload,
        machine=machine,
        budgets=Budgets(
            device_bytes=settings.device_memory_bytes, host_bytes=settings.host_memory_bytes
        ),
        settings=settings,
    )
    cuts, left = cuts_of(settings, machine), list[Cut]()
    allowed = StatisticsClass(settings.workload.allow)
    if settings.quick:
        request = replace(request, settings=replace(settings, keep=1.0))
        made, left = estimate_cuts(graph, request.settings, machine, cuts)
    else:
        draws = draws_of(settings, allowed)
        made = profile_cuts(graph, settings, machine, cuts, draws, progress=progress)
    found = {p.numbers.cut: p for p in made}
    profiles = {cut: p.numbers for cut, p in found.items()}
    choice = choose(request, profiles, allowed)
    if settings.quick and settings.keep is None:
        choice = replace(choice, why_keep=NOTHING_DROPPED)
    chosen = found[cut_of(choice.chosen.candidate)]
    plan = assemble(request, profiles, choice)
    plan = replace(plan, alternatives=[*_not_cut(left), *plan.alternatives])
    runners = runners_up(choice, asked=asked is not None)
    runners = replace(runners, today=_count_for_today(request, chosen.numbers, choice.chosen))
    return plan, {"partition": chosen.partition}, runners, _rivals(choice, left)


NOTHING_DROPPED = "p = 1: what dropping rows adds to the variance takes the features to estimate"


def _rivals(choice: FullGraphChoice, left: Sequence[Cut]) -> list[Interval]:
    step = choice.chosen.prediction.step_seconds
    others = [
        each.prediction.step_seconds
        for each in (*choice.exact, *choice.sampled)
        if each.candidate != choice.chosen.candidate and each.eligible
    ]
    return others + [replace(step, low=0.0) for _ in left]


def _not_cut(left: Sequence[Cut]) -> list[Alternative]:
    """Name the cuts that a first answer has no time for."""
    why = f"not priced: cutting the graph takes more than {CUTTING_SECONDS:g} s; drop --quick"
    return [Alternative(name=cut.name, step_seconds=None, why=why) for cut in left]


def _count_for_today(
    request: FullRequest, profile: CutProfile, chosen: PricedEpoch
) -> TodayCounts | None:
    """Count what a framework of today computes and sends on the plan's GPUs; None on cores."""
    candidate, stages = chosen.candidate, chosen.prediction.stages
    if not candidate.gpus:
        return None
    once = candidate.full_graph.precompute_first_layer
    work = EpochWork(
        batches=1,
        input_rows=0.0,
        edges=0.0,
        expanded=0.0,
        row_bytes=row_bytes(request.graph),
        compute_seconds=stages["forward_backward"] + stages["optimizer"],
        gradient_bytes=gradient_bytes(profile.num_parameters),
        exchange_bytes=halo_bytes(profile, candidate) / candidate.num_ranks,
        exchanges=len(exchanged_widths(profile.widths, precomputed=once)),
    )
    return TodayCounts(
        work=work,
        gpus=len(candidate.gpus),
        num_nodes=request.graph.num_nodes,
        list_bytes=topology_bytes(request.graph),
        hit_shares=[1.0],
        hit_rates=[1.0],
        whole=True,
    )


def draws_of(settings: PlanSettings, allowed: StatisticsClass) -> tuple[str, ...]:
    """List ways of drawing that some candidate may use, and that are therefore timed."""
    if (settings.keep is not None and settings.keep >= 1) or settings.exchange == "broadcast":
        return ()
    return tuple(
        name
        for name in DRAWS
        if settings.draws in ("auto", name)
        and any(map(allowed.allows, classes_of(replace(settings, draws=name))))
    )


def classes_of(settings: PlanSettings) -> list[StatisticsClass]:
    """List the statistics of every way of drawing that the user leaves open."""
    work, keep = settings.workload, 0.5 if settings.keep is None else settings.keep
    return [
        full_graph_class(replace(each, keep=keep), work.model, work.num_layers)
        for each in settings_of(settings)
    ]


def assemble(
    request: FullRequest, profiles: dict[Cut, CutProfile], choice: FullGraphChoice
) -> Plan:
    """Assemble the plan of the chosen candidate, without its arrays."""
    chosen, work = choice.chosen, request.workload
    prediction = chosen.prediction
    words = {**prediction.provenance, "keep": choice.why_keep}
    made = full_graph_class(chosen.candidate.full_graph, work.model, work.num_layers)
    return make_plan(
        request.graph,
        request.machine,
        request.settings,
        _strategy(request, profiles[cut_of(chosen.candidate)], chosen),
        prediction=replace(prediction, provenance=dict(sorted(words.items()))),
        certificate=certificate(choice),
        shadow_prices=_prices(request, profiles[cut_of(chosen.candidate)], chosen),
        alternatives=alternatives(choice),
        statistics=made,
    )


def certificate(choice: FullGraphChoice) -> Certificate:
    """Bound these cuts, their work shared equally and their exchange free.

    Not bounded: partitions that were not made, whose boundary may be smaller; another p.
    """
    keep = choice.chosen.candidate.full_graph.keep
    same = [
        p
        for p in (*choice.exact, *choice.sampled, choice.chosen)
        if p.candidate.full_graph.keep == keep and p.eligible
    ]
    objective = choice.chosen.seconds
    bound = min(min(p.bound_seconds for p in same), objective)
    return Certificate(
        objective=objective,
        lower_bound=bound,
        gap=(objective - bound) / objective if objective > 0 else 0.0,
        solver="enumeration over partitions made by heuristics",
        status=(
            f"feasible: every candidate at p = {keep:.3g} was priced; the limit shares these "
            "cuts' work equally and exchanges for nothing; other partitions and other p are not "
            "bounded"
        ),
    )


def _strategy(request: FullRequest, profile: CutProfile, chosen: PricedEpoch) -> Strategy:
    """Return the chosen candidate with the rows that each rank's part holds."""
    features = replace(
        chosen.candidate.features,
        sources=[Source(kind="own")],
        own_rows=[part.inner for part in profile.sizes],
        row_bytes=row_bytes(request.graph),
        storage_dtype=request.graph.feature_dtype,
    )
    return replace(chosen.candidate, features=features)


def _prices(request: FullRequest, profile: CutProfile, chosen: PricedEpoch) -> dict[str, float]:
    """Price what a tenth more bandwidth between the ranks would save."""
    if chosen.candidate.num_ranks == 1:
        return {}
    quicker = _faster_machines(request.machine, chosen.candidate)

    def again(name: str) -> float:
        return price(replace(request, machine=quicker[name]), profile, chosen.candidate).seconds

    return shadow_prices(chosen.seconds, again, list(quicker))


def _faster_machines(machine: MachineModel, candidate: Candidate) -> dict[str, MachineModel]:
    """Return machines with a link between the ranks a tenth faster, by what is faster."""
    if not candidate.gpus:
        tables = LINK_TABLES["exchange"]
        if candidate.hosts > 1:
            tables = (*tables, *(f"hosts_{name}" for name in tables))
        name = "network" if candidate.hosts > 1 else link_of(machine, "all_reduce")
        return {f"{name} +10%": faster(machine, tables)}
    found: dict[str, MachineModel] = {}
    kinds = {name: LINKS[name] for name in ("NVLink", "PCIe")}
    kinds["network"] = lambda link: link.name.startswith("nic")
    for name, is_such in kinds.items():
        if any(is_such(link) for link in machine.links):
            links = [faster_link(x) if is_such(x) else x for x in machine.links]
            found[f"{name} +10%"] = replace(machine, links=links)
    return found
