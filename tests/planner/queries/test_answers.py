"""A plan says how validation and test run beside its sum: way, pieces, outputs and ids."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gnnplan.planner.queries.answers import evaluation_words
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import MemoryUse, Plan
from gnnplan.runtime.train.evaluation_room import EXACT_EDGES
from tests.support.plans import make_plan

MB, GB = 10**6, 10**9


def free(size: int) -> MemoryUse:
    return MemoryUse(parts={"own rows": GB}, total=GB, capacity=GB + size, headroom=size)


def planned(
    graph: Graph, folder: Path, kind: str = "cuda", own: int = 40 * GB, host: int = 100 * GB,
    **settings: Any,
) -> Plan:  # fmt: skip
    """A plan for ten million nodes with memories that are so far free."""
    made = make_plan(graph, folder, **{"fanouts": [3] * 3, "hidden": 100} | settings)
    ranks = {f"rank{rank}": free(own) for rank in range(made.num_ranks)}
    devices = [replace(device, kind=kind) for device in made.strategy.devices]
    return replace(
        made,
        graph=replace(made.graph, num_nodes=10 * MB),
        strategy=replace(made.strategy, devices=devices),
        prediction=replace(made.prediction, memory_bytes={**ranks, "host0": free(host)}),
    )


def test_outputs_lie_where_the_runtime_puts_them(small_graph: Graph, tmp_path: Path) -> None:
    layered = "beside these, validation and test run layer by layer in pieces of at most "
    outputs, ids = "two layers' outputs of 4.0 GB lie", "ids of 440.0 MB lie on the host"
    for name, plan, size, where in (
        ("gpu", planned(small_graph, tmp_path / "gpu"), "1 GiB", "on the GPU"),
        ("host", planned(small_graph, tmp_path / "host", own=2 * GB), "1 GiB", "on the host"),
        (
            "file", planned(small_graph, tmp_path / "file", own=100 * MB, host=10 * GB), "100.0 MB",
            "in a file",
        ),
        (
            "ranks", planned(small_graph, tmp_path / "ranks", ranks=2), "1 GiB",
            "in a file that ranks share",
        ),
        (
            "cores", planned(small_graph, tmp_path / "cores", kind="cpu", own=GB), "280.0 MB",
            "in a file",
        ),
    ):  # fmt: skip
        words = f"{layered}{size} on rank0; {outputs} {where}; {ids}"
        assert evaluation_words(plan) == words, name


def test_other_ways_are_named(small_graph: Graph, tmp_path: Path) -> None:
    plan = planned(small_graph, tmp_path / "p", fanouts=[3, 2])
    assert "; a layer's output of 4.0 GB lies on the GPU; " in evaluation_words(plan)
    large = replace(plan, graph=replace(plan.graph, num_edges=EXACT_EDGES + 1))
    assert evaluation_words(large) == (
        "beside these, validation and test run sampled with fan-outs 3,2 in pieces of at most "
        "1 GiB on rank0; ids of 80.0 MB lie on the host"
    )
    typed = replace(plan, workload=replace(plan.workload, model="rgcn"))
    assert " run on whole neighbourhoods in pieces of " in evaluation_words(typed)
    assert "output" not in evaluation_words(typed)
    own = replace(plan, workload=replace(plan.workload, model="mine:make"))
    assert " layer by layer as far as the model has layers in " in evaluation_words(own)


def test_ids_that_find_no_room_are_told(small_graph: Graph, tmp_path: Path) -> None:
    plan = planned(small_graph, tmp_path / "p", host=400 * MB)
    assert evaluation_words(plan).endswith(
        "ids of 440.0 MB lie on the host, which leaves 40.0 MB too little"
    )
    none = replace(plan, prediction=replace(plan.prediction, memory_bytes={}))
    assert evaluation_words(none) == ""
