"""Make a plan from graph and machine: the whole path on one page.

    open the graph -> profile it -> enumerate candidates -> place rows and price each
        -> choose, with the bound and what more memory would buy -> write the plan folder

Nothing here is timed but the profile, which is cached: with the same machine file and the same
cached profile a repeated plan is the same to the byte.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.array_cache import declare_final
from gnnplan.planner.assemble import assemble, refuse_disk
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.request import Request
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.partition.partition import hierarchical_parts, partition, predict_need
from gnnplan.planner.partition.problem import make_problem
from gnnplan.planner.placement.order import ENOUGH, count_out_degree, downsample_hotness
from gnnplan.planner.probe.presets import machine_at_once, on_hosts
from gnnplan.planner.profile.cache import PlanRecord, Profile, save_record
from gnnplan.planner.profile.estimated import estimated_profile
from gnnplan.planner.queries.calibrate import calibrate_search, load_calibration
from gnnplan.planner.queries.remedies import (
    add_remedies,
    count_for_today,
    find_remedies,
    find_runners_up,
)
from gnnplan.planner.queries.rivals import RunnersUp, save_runners_up
from gnnplan.planner.request import (
    check_graph,
    check_output,
    check_outputs,
    check_settings,
    no_estimate,
    rates_of_such_cores,
)
from gnnplan.planner.search.choose import PlacedCandidate, choose, why_it_lost
from gnnplan.planner.search.dimensions.dimension import ProposalInputs
from gnnplan.planner.search.dimensions.ranks import machine_of_ranks, plans_gpus
from gnnplan.planner.search.dimensions.registry import propose_first
from gnnplan.planner.search.samplers import (
    fix_placement,
    plan_sampler,
    sampler_words,
    why_fed_by_cores,
    with_samplers,
)
from gnnplan.planner.search.search import Search, SearchResult, best_over_samplers
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, onward, portion, silent
from gnnplan.planner.workload import Combination, WorkloadProfile
from gnnplan.runtime.device import usable_ram_bytes
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.npy import release_pages
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import GraphRef, Interval, Plan


def joined_candidates(
    settings: PlanSettings,
    machine: MachineModel,
    policies: tuple[str, ...],
    *,
    task: str,
    profile: WorkloadProfile | None = None,
) -> list[Candidate]:
    """Return every way to run the workload: the plain ones, then those that join ranks.

    Choices that `profile` has not are left out; None for all of them.

    Raises:
        SettingsError: more devices than there are cores or GPUs, or than seeds in a batch.
    """
    asked = ProposalInputs(
        settings=settings, machine=machine, policies=policies, task=task, profile=profile
    )
    return propose_first(asked).candidates


def combinations_of(tried: Iterable[Candidate]) -> list[Combination]:
    """Return the combinations in which the candidates' model is timed."""
    found: dict[tuple[int, int, int, bool], bool] = {}
    for c in tried:
        shared = c.batching == "cooperative"
        key = (c.num_ranks // c.hosts, c.threads.compute, c.hosts, shared)
        found[key] = found.get(key, False) or c.topology.policy == "partitioned"
    return [
        Combination(ranks=ranks, threads=threads, hosts=hosts, shared=shared, parts=parts)
        for (ranks, threads, hosts, shared), parts in sorted(found.items())
    ]


TOLD_APART = 1 << 16
"""Least vertices by which a first answer stands for a graph; placing more takes seconds."""
PROFILED = 0.8
"""Share of a plan's progress that profiling takes."""


def plan(
    graph_folder: Path,
    settings: PlanSettings,
    *,
    machine: MachineModel,
    out: Path,
    progress: Progress | None = None,
    calibrate: bool = False,
) -> Plan:
    """Find the plan with the lowest predicted time per step, and write it.

    Args:
        graph_folder: dataset folder.
        settings: what is to be trained and what may be used.
        machine: what was measured of the machine; a preset of one host stands for as many as
            `settings.hosts` says.
        out: plan folder to write; an earlier plan there is replaced, or moved aside if trained.
        progress: called with what is going on and the share done.
        calibrate: whether to multiply stages by what `compare` learnt from this machine's runs.

    Returns:
        The plan as written.

    Raises:
        DatasetError: the graph is missing, damaged or inconsistent.
        SettingsError: the settings contradict each other, the graph or the machine.
        MachineError: the machine has GPUs that no plan can use, and cores are not asked for.
        PlanDoesNotFit: no candidate fits; the text is the sum.
        PlanError: `out` holds something that is not a plan.
        InputError: `out` cannot be written.
        MachineError: a preset cannot be joined to that many hosts.
    """
    check_output(out)
    say = onward(progress or silent)
    made = draft(graph_folder, settings, machine=machine, progress=say, calibrate=calibrate)
    say("writing the plan", 0.95)
    written = write_draft(made, out)
    say("done", 1.0)
    return written


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A plan that is not written yet."""

    plan: Plan
    arrays: dict[str, NDArray[Any]]
    record: PlanRecord
    rivals: list[Interval] = field(default_factory=list[Interval])
    """Seconds of a step of the other candidates that fit."""
    runners: RunnersUp = field(default_factory=RunnersUp)
    """Best candidates by number of ranks, and the plainest."""


def write_draft(made: Draft, out: Path) -> Plan:
    """Write a plan's folder, and keep its request."""
    written = save_plan(made.plan, made.arrays, out)
    save_record(made.record, written.plan_id)
    save_runners_up(made.runners, written.plan_id)
    return written


def draft(
    graph_folder: Path,
    settings: PlanSettings,
    *,
    machine: MachineModel,
    progress: Progress | None = None,
    calibrate: bool = False,
    seconds: float | None = None,
) -> Draft:
    """Find the plan with the lowest predicted time per step; arguments and errors are `plan`'s.

    Of measuring nothing is begun after so many `seconds`; None for as many as it takes.
    """
    machine = machine_of_ranks(on_hosts(machine, settings.hosts), settings)
    graph = open_graph(Path(graph_folder), validate=not settings.quick)
    check_graph(graph, settings, calibrate=calibrate)
    check_outputs(graph, settings, machine)
    say, factors = onward(progress or silent), dict[str, float]()
    settings = with_samplers(graph, settings)
    if settings.mode == "full-graph":
        from gnnplan.planner.fullgraph.plan import plan_full_graph

        found, arrays, runners, rivals = plan_full_graph(
            graph, graph_ref(graph), settings, machine, portion(say, 0.0, PROFILED),
            calibrate=calibrate,
        )  # fmt: skip
        record = PlanRecord(settings=settings, machine=machine)
        return Draft(plan=found, arrays=arrays, record=record, rivals=rivals, runners=runners)
    if calibrate:
        factors = load_calibration(machine.fingerprint).factors(graph.fingerprint)
    raw = searches_for(graph, settings.by_sampler(), machine, progress=say, seconds=seconds)
    outcome = best_over_samplers([calibrate_search(search, factors) for search in raw], _choose)
    best = outcome.best
    record = PlanRecord(settings=best.search.settings, machine=machine, factors=factors)
    made = draft_candidate(
        best.search, best.explored, best.chosen, record, elsewhere=outcome.elsewhere
    )
    refuse_disk(graph, made.plan)
    complete = replace(made.plan, alternatives=[*outcome.lost, *made.plan.alternatives])
    return replace(made, plan=complete, rivals=outcome.rivals)


def draft_candidate(
    search: Search,
    explored: SearchResult,
    chosen: PlacedCandidate,
    record: PlanRecord,
    *,
    elsewhere: Sequence[float] = (),
) -> Draft:
    """Draft the plan of one candidate of a search, with what the search priced beside it.

    `record` is the request of the search; `elsewhere` is `assemble`'s.
    """
    made, arrays = assemble(search, explored, chosen, elsewhere=elsewhere)
    runners = find_runners_up(
        explored.priced, chosen, asked=search.settings.devices is not None,
        name_of=lambda p: p.name, why=why_it_lost,
    )  # fmt: skip
    runners = replace(runners, today=count_for_today(search, chosen))
    return Draft(plan=made, arrays=arrays, record=record, runners=runners)


def first_answer(
    graph_folder: Path,
    settings: PlanSettings,
    *,
    machine: MachineModel | None = None,
    out: Path,
    progress: Progress | None = None,
) -> Plan:
    """Plan from what is known at once, and write the plan; nothing is drawn or timed.

    The plan's prediction is marked `estimated`. `machine` None is this one, as it was probed or at
    the rates of such hardware.

    Raises:
        SettingsError: as `plan`; or the request has no estimate (`request.no_estimate`).
        DatasetError: as `plan`; values of edges and features are not checked.
        MachineError, PlanDoesNotFit, PlanError, InputError: as `plan`.
    """
    quick = replace(settings, quick=True, thorough=False)
    here = machine_at_once() if machine is None else machine
    return plan(graph_folder, quick, machine=here, out=out, progress=progress)


def search_for(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    *,
    progress: Progress | None = None,
    measure: bool = True,
) -> Search:
    """Check a request, profile its graph, and return a search that can price its candidates.

    With `measure` False the profile is taken from the cache.

    Raises:
        SettingsError: bad settings, several samplers (`searches_for` takes them, by_sampler), or
            no cached profile where nothing may be measured.
        DatasetError: as `plan`.
    """
    settings = with_samplers(graph, settings)
    if settings.other_samplers:
        raise SettingsError(
            f"expected one sampler to search under, found {1 + len(settings.other_samplers)}; "
            "search for each of settings.by_sampler()"
        )
    return searches_for(graph, [settings], machine, progress=progress, measure=measure)[0]


def searches_for(
    graph: Graph,
    requests: Sequence[PlanSettings],
    machine: MachineModel,
    *,
    progress: Progress | None = None,
    measure: bool = True,
    seconds: float | None = None,
) -> list[Search]:
    """Return a search for each of several requests, which are profiled together.

    Of profiling nothing is begun after so many `seconds`; None for as many as it takes.
    """
    machine = machine_of_ranks(machine, requests[0])
    gpus = plans_gpus(machine)
    for settings in requests:
        check_settings(graph, settings, gpus=gpus)
    settled_requests = [fix_placement(graph, settings, gpus=gpus) for settings in requests]
    if (why := no_estimate(graph, requests[0])) and requests[0].quick:
        raise SettingsError(f"expected a request that can be estimated at once, found {why}")
    say = onward(progress or silent)
    profiling = portion(say, 0.0, PROFILED)
    profiled = _profiles(
        graph, settled_requests, machine, profiling, measure=measure, seconds=seconds
    )
    say("pricing candidates", PROFILED)
    search = functools.partial(
        _search, self_loops=_has_self_loops(graph, requests[0], gpus=gpus), measure=measure,
        brief=seconds is not None,
    )  # fmt: skip
    for array in (graph.indptr, graph.indices):
        release_pages(array)  # a large graph's lists leave room for what is priced
    return [
        search(graph, settings, machine, found)
        for settings, found in zip(settled_requests, profiled, strict=True)
    ]


def _search(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    found: Profile,
    *,
    self_loops: bool,
    measure: bool,
    brief: bool,
) -> Search:
    parts = functools.cache(functools.partial(_parts, graph))
    by_cores = plans_gpus(machine) and why_fed_by_cores(graph, settings)
    draws = None
    if not settings.quick:
        from gnnplan.planner.profile.draws import GraphDraws  # on use: with torch

        draws = GraphDraws(
            graph=graph, settings=settings, machine=machine.fingerprint, measure=measure,
            brief=brief, parts=parts,
        )  # fmt: skip
    return Search(
        request=Request(
            graph=graph_ref(graph),
            workload=settings.workload,
            profile=found.numbers,
            machine=machine,
            sampler=sampler_words(graph, settings),
            user_sampler=plan_sampler(settings),
            self_loops=self_loops,
            sparse=graph.x_csr is not None,
            core_rates=rates_of_such_cores(machine) if by_cores else {},
            every_hop=settings.dialect == "every_hop",
            budgets=Budgets(
                device_bytes=settings.device_memory_bytes, host_bytes=settings.host_memory_bytes
            ),
        ),
        settings=settings,
        hotness={
            seeds: downsample_hotness(hot.finished(), TOLD_APART if settings.quick else ENOUGH)
            for seeds, hot in found.hotness.items()
        },
        out_degree=functools.cache(
            functools.partial(_in_degree if settings.quick else _out_degree, graph)
        ),
        parts=parts,
        in_degree=functools.cache(functools.partial(_in_degree, graph)),
        shards=functools.cache(functools.partial(_shards, graph)),
        draws=draws,
    )


def _has_self_loops(graph: Graph, settings: PlanSettings, *, gpus: bool) -> bool:
    """Look for self-loops where their number would lie on GPUs; else, and at once, say yes."""
    work = settings.workload
    if not gpus or settings.quick or work.model != "gcn" or work.gcn_norm != "full":
        return True
    from gnnplan.runtime.models.weights import count_self_loops  # on use: with torch

    return count_self_loops(graph.indptr, graph.indices) is not None


def _profiles(
    graph: Graph,
    requests: Sequence[PlanSettings],
    machine: MachineModel,
    progress: Progress | None,
    *,
    measure: bool,
    seconds: float | None,
) -> list[Profile]:
    """Draw batches and time the model on these cores, or take its roofline on a preset's GPUs."""
    tried = [
        joined_candidates(settings, machine, ("none",), task=str(graph.task))
        for settings in requests
    ]
    if requests[0].quick:
        return [
            estimated_profile(
                graph, settings, machine, combinations_of(candidates), gpus=plans_gpus(machine)
            )
            for settings, candidates in zip(requests, tried, strict=True)
        ]
    from gnnplan.planner.profile import profile  # on use: a first answer does without torch

    if plans_gpus(machine):
        return [
            profile.gpu_profile(
                graph, settings, machine, [c.num_ranks for c in candidates],
                progress=progress, measure=measure,
            )
            for settings, candidates in zip(requests, tried, strict=True)
        ]  # fmt: skip
    wanted = [
        profile.Wanted(settings=settings, combinations=combinations_of(candidates))
        for settings, candidates in zip(requests, tried, strict=True)
    ]
    return profile.profiles(
        graph, wanted, machine, progress=progress, measure=measure, seconds=seconds
    )


def _choose(search: Search, priced: list[PlacedCandidate]) -> PlacedCandidate:
    """Return the best candidate; where there is none, the error names the cheapest remedies."""
    try:
        return choose(priced, search.request.machine.noise)
    except PlanDoesNotFit as error:
        raise add_remedies(error, lambda: find_remedies(search, priced)) from None


def _out_degree(graph: Graph) -> NDArray[np.int64]:
    """Count the lists that each node is in, and release the lists."""
    counted = declare_final(count_out_degree(graph.indices, graph.num_nodes))
    release_pages(graph.indices)
    return counted


def _parts(graph: Graph, name: str, ranks: int) -> NDArray[np.int32]:
    """Return the rank of each node; `metis` means an edge cut, which kaminpar makes too."""
    if ranks == 1:
        return np.zeros(graph.num_nodes, np.int32)
    partitioner = "kaminpar" if name == "metis" else name
    return partition(
        graph.indptr, graph.indices, parts=ranks, name=partitioner, training=graph.train_idx,
        memory_bytes=usable_ram_bytes(),
    )  # fmt: skip


def _in_degree(graph: Graph) -> NDArray[np.int64]:
    """Count the entries of each node's list."""
    return declare_final(np.diff(np.asarray(graph.indptr)))


def _shards(graph: Graph, cliques: tuple[tuple[int, ...], ...]) -> NDArray[np.int32]:
    """Return the rank that draws each node as a seed, under the hierarchical partition."""
    found = hierarchical_parts(
        graph.indptr, graph.indices, cliques=cliques, training=graph.train_idx,
        name=_partitioner(graph, len(cliques)),
    )  # fmt: skip
    release_pages(graph.indices)
    return found


PARTITION_SECONDS = 900.0
"""Most seconds that cutting a graph between cliques may take."""


def _partitioner(graph: Graph, parts: int) -> str:
    """Return the partitioner with the fewest edges cut that is done in minutes and fits here."""
    problem = make_problem(graph.indptr, graph.indices, parts=parts, training=graph.train_idx)
    for name in ("kaminpar", "ldg"):
        need = predict_need(problem, name)
        if need.high_seconds <= PARTITION_SECONDS and need.memory_bytes <= usable_ram_bytes():
            return name
    return "hash"


def graph_ref(graph: Graph) -> GraphRef:
    """Return what a plan says of its graph."""
    return GraphRef(
        name=graph.name,
        path=str(graph.path.resolve()),
        fingerprint=graph.fingerprint,
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        feature_dim=graph.feature_dim,
        feature_dtype=graph.feature_dtype,
        num_classes=graph.num_classes,
        task=str(graph.task),
        num_train=graph.num_train,
        topology_only=graph.topology_only,
    )
