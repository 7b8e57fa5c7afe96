"""`python -m tests.golden_plans.record [NAME ...]`: make the profiles and plans that are kept.

README.md beside this file says when a case may be named. A profile that is kept stays as it is.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnnplan.planner.fullgraph import plan as full_graph_plan
from gnnplan.planner.profile import profile as product
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.workload import ModelTiming, ProcessCost, WorkloadProfile
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan
from tests.golden_plans.cases import GRAPHS, Case, drawn, joined
from tests.golden_plans.fixtures import FILE, Fixtures, patched
from tests.golden_plans.plans import KEPT, make_plan, plan_case, read_kept, write_kept
from tests.golden_plans.timings import least_timing, whole_timing, with_gpu

ROWS = 0.4
"""Of a graph's rows, those for which a rank has room where it is tight."""
NOT_ON_GPUS = ("links", "typed")
"""Graphs whose batches a GPU does not draw: nothing is timed there."""


def made_up(graph: Graph, wanted: Sequence[Any], *args: Any, **named: Any) -> list[Profile]:
    """Batches as drawn; the model's seconds from their sizes."""
    found = list[Profile]()
    make = whole_timing if GRAPHS[graph.path.name].timed_whole else least_timing
    for each in wanted:
        drawn_batches = product._Drawn(graph, each, None)
        timings = dict[str, ModelTiming]()
        for key, timed in zip(drawn_batches._keys, drawn_batches.timed, strict=True):
            threads = tuple(sorted({c.threads for c in timed.combinations}))
            timings[key] = make(timed.batch, timed.combinations[0].ranks, threads)
        batches = drawn_batches._batches
        numbers = WorkloadProfile(
            graph_fingerprint=graph.fingerprint,
            sampler_fingerprint="made up",
            batches=[batches[seeds] for seeds in sorted(batches, reverse=True)],
            timing=timings,
            process=ProcessCost(start_seconds=2.0, resident_bytes=200_000_000),
            shared=drawn_batches._shared,
            stacks=drawn_batches._stacks,
        )
        found.append(Profile(numbers=numbers, hotness=drawn_batches._hotness))
    return found


def on_gpus(case: Case, profile: Profile) -> Profile:
    """The derived profile, or what a GPU would have timed beside it."""
    if not GRAPHS[case.graph].timed_whole or case.graph in NOT_ON_GPUS:
        return profile
    numbers, captures = profile.numbers, case.sampler == "neighbor"
    timing = {
        # Batches that ranks share are not timed: their seconds stay derived.
        key: with_gpu(each, numbers.batch(int(key)), captures=captures) if key.isdecimal() else each
        for key, each in numbers.timing.items()
    }
    return replace(profile, numbers=replace(numbers, timing=timing))


def record_profile(case: Case, graph: Graph, fixtures: Fixtures) -> None:
    """Plan once, in ample memory and without copies; keep each profile that was asked for."""
    kept = list[Any]()
    of_gpus, of_full_graph = product.gpu_profile, full_graph_plan.profile_cuts

    def keep(found: list[Any]) -> list[Any]:
        kept.extend(found)
        return found

    def cores(*args: Any, **named: Any) -> list[Any]:
        return keep(made_up(*args, **named))

    def gpus(*args: Any, **named: Any) -> Any:
        return keep([on_gpus(case, of_gpus(*args, **named))])[0]

    def full_graph(*args: Any, **named: Any) -> list[Any]:
        return keep(of_full_graph(*args, **named))

    room = 0
    with patched(cores, gpus, full_graph), tempfile.TemporaryDirectory() as folder:
        settings = replace(case, room="ample", policy="none").settings()
        if case.mode == "full-graph":
            settings = case.settings()
        try:
            room = room_bytes(make_plan(case, settings, graph, Path(folder) / "plan"))
        except GnnplanError as error:
            sys.stderr.write(f"{case.profile}: {error}\n")
    fixtures.add(case.profile, kept, room)


def room_bytes(plan: Plan) -> int:
    """What each rank of a plan without copies needs, with room for some of the rows."""
    uses = [use for name, use in plan.prediction.memory_bytes.items() if name.startswith("rank")]
    need = max(use.total - use.parts.get("reserve", 0) for use in uses)
    reserved = 0.95 if any(use.parts.get("reserve", 0) for use in uses) else 1.0
    rows = round(ROWS * plan.graph.num_nodes) * plan.strategy.features.row_bytes
    return int((need + rows) / reserved) + 1


def main(names: list[str]) -> None:
    """Plan the cases that are named, or all where nothing is kept."""
    fixtures = Fixtures.read() if FILE.exists() else Fixtures()
    plans = read_kept() if KEPT.exists() else {}
    if plans and not names:
        raise SystemExit("expected names of cases, since plans are kept; see README.md")
    cases = [Case.named(name) for name in names] or [*drawn(), *joined()]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GNNPLAN_CACHE"] = f"{folder}/cache"  # nothing that an older version found
        graph_of = graphs_in(Path(folder))
        for number, case in enumerate(cases):
            graph = graph_of(case.graph)
            if case.profile not in fixtures:
                record_profile(case, graph, fixtures)
            plans[case.name] = plan_case(case, graph, fixtures)
            sys.stderr.write(f"{number} {case.name}: {plans[case.name].get('refused', 'kept')}\n")
    fixtures.write()
    write_kept(plans)


def graphs_in(folder: Path) -> Callable[[str], Graph]:
    """Graphs by name, generated in that folder when first asked for."""
    made = dict[str, Graph]()

    def graph(name: str) -> Graph:
        if name not in made:
            made[name] = GRAPHS[name].make(folder / name)
        return made[name]

    return graph


if __name__ == "__main__":
    main(sys.argv[1:])
