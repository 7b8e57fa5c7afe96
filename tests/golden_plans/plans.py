"""A case's plan, made from its kept profile, and what differs from the plan that is kept."""

import gzip
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gnnplan.planner import pipeline
from gnnplan.planner.cost.host_memory import DISK_BUDGET_BYTES
from gnnplan.planner.cost.memory import BatchTail
from gnnplan.planner.cost.request import row_bytes, seeds_per_rank
from gnnplan.planner.search.dimensions.ranks import plans_gpus
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.features.disk import staging_bytes
from gnnplan.runtime.features.location import scratch_bytes
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.sampling.registry import SAMPLERS
from gnnplan.runtime.sampling.seeds import order_bytes
from tests.golden_plans.cases import MACHINES, Case
from tests.golden_plans.fixtures import Fixtures, replayed

KEPT = Path(__file__).with_name("plans.json.gz")
RENAMED: dict[str, str] = {}
"""Spellings of today by those with which the plans were kept: new -> old, keys and values."""
PARTS = (
    "workload", "strategy", "prediction", "shadow_prices", "statistics_class", "certificate",
)  # fmt: skip
"""Of a plan, what is kept beside its alternatives' seconds and its arrays' hashes: neither version
nor identity."""
FREE_TEXT = {("prediction", "provenance"), ("certificate", "status"), ("certificate", "solver")}
RELATIVE, ABSOLUTE = 1e-9, 1e-13
"""Within which two figures are equal: sums differ in their last bits between processors."""

Document = dict[str, Any]


def make_plan(case: Case, settings: PlanSettings, graph: Graph, out: Path) -> Plan:
    """Plan for the case's machine, with whatever profiles there are.

    Raises:
        GnnplanError: the plan is refused.
    """
    return pipeline.plan(graph.path, settings, machine=MACHINES[case.machine](), out=out)


def room_of(case: Case, graph: Graph, fixtures: Fixtures) -> int | None:
    """Bytes of a rank's memory where it is tight: those kept, and what cores count besides.

    Rooms were kept before the order of seeds, tables of a draw, reads of the disk, and all that
    threads make of a batch were counted.
    """
    room = fixtures.room(case.profile)
    if room is None or plans_gpus(MACHINES[case.machine]()):
        return room
    name = case.sampler.split("-")[0]
    spec = SAMPLERS.get(name)
    draws = spec.draw_bytes(spec.parameters, False).node * graph.num_nodes if spec else 0
    room += draws + order_bytes(graph.num_train, links=str(graph.task) == "link")
    if case.mode != "full-graph":
        batches = fixtures.take(case.profile)[0].numbers.batches
        seeds = seeds_per_rank(case.settings().workload.batch_size, case.ranks)
        largest = BatchTail.of(min(batches, key=lambda each: abs(each.seeds_per_rank - seeds)))
        room += scratch_bytes(round(largest.vertices)) + round(64 * largest.edges)
    if case.room == "disk":
        room += staging_bytes(graph.num_nodes, row_bytes(graph), DISK_BUDGET_BYTES)
    return room


def plan_case(case: Case, graph: Graph, fixtures: Fixtures) -> Document:
    """What the case's plan decides and predicts from its kept profile; or the kind of a refusal."""
    settings = case.settings(room_of(case, graph, fixtures))
    with tempfile.TemporaryDirectory() as folder, replayed(case, fixtures):
        try:
            plan = make_plan(case, settings, graph, Path(folder) / "plan")
        except GnnplanError as error:
            return {"refused": type(error).__name__}
    return document_of(plan)


def document_of(plan: Plan) -> Document:
    """What is compared of a plan, as plain JSON in the spelling of the record."""
    plain = codec.to_plain(plan)
    kept = {name: plain[name] for name in PARTS}
    for part, name in FREE_TEXT:
        del kept[part][name]
    kept["alternatives"] = [each["step_seconds"] for each in plain["alternatives"]]
    kept["arrays"] = {name: each["sha256"] for name, each in plain["arrays"].items()}
    return _renamed(kept)


def differences(expected: Any, found: Any, place: str = "plan") -> Iterator[str]:
    """Each place where two documents differ, with what was expected there and what was found."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted({*expected, *found}):
            if name in expected and name in found:
                yield from differences(expected[name], found[name], f"{place}.{name}")
            else:
                yield f"{place}.{name}: only in the plan {'kept' if name in expected else 'made'}"
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for i, pair in enumerate(zip(expected, found, strict=True)):
            yield from differences(*pair, f"{place}[{i}]")
    elif not _equal(expected, found):
        yield f"{place}: expected {expected}, found {found}"


def read_kept() -> dict[str, Document]:
    """The plans that are kept, by the names of their cases."""
    return json.loads(gzip.decompress(KEPT.read_bytes()))


def write_kept(plans: dict[str, Document]) -> None:
    """Replace them."""
    text = json.dumps(plans, indent=0, sort_keys=True)
    KEPT.write_bytes(gzip.compress(text.encode(), mtime=0))


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, float | int):
        return math.isclose(expected, found, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(expected) is type(found) and expected == found


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {RENAMED.get(key, key): _renamed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    return RENAMED.get(value, value) if isinstance(value, str) else value
