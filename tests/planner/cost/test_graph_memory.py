"""Predicted bytes of a graph on a GPU are those of the tensors that the runtime's stages hold."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.planner.cost.backends.grid import Fetched, grid_parts
from gnnplan.planner.cost.graph_memory import ADDRESS_BYTES, draw_bytes, graph_parts
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.request import handed_row_bytes, held_row_bytes
from gnnplan.planner.pipeline import graph_ref
from gnnplan.planner.placement.place import Capacity, capacity
from gnnplan.planner.probe.presets import load_preset
from gnnplan.runtime.graph.dataset import Graph, is_typed, types_of, write_graph
from gnnplan.runtime.graph.generate import generate_links, generate_typed
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.models.weights import count_self_loops
from gnnplan.runtime.plan.schema import Plan, Sampler, TopologyPlacement
from gnnplan.runtime.sampling.registry import SAMPLERS
from tests.planner.cost.by_hand import BATCH, NODES as NODES_BY_HAND, request
from tests.support.candidates import candidate_of_ranks
from tests.support.locations import cached_arrays
from tests.support.plans import make_plan, with_rows
from tests.support.profiles import batch_profile

pytest.importorskip("triton")

from gnnplan.runtime.features.device_rows import padded_rows
from gnnplan.runtime.loader.device import DeviceBatchStage, DeviceSampleStage

NODES, DEGREE = 300, 4
HOT = 20
"""Lists that the rank of a cached topology keeps."""


def ring_graph(folder: Path, *, self_loops: bool) -> Graph:
    """Every node has the next four as neighbours, or itself and the next three; with weights."""
    first = 0 if self_loops else 1
    indices = (np.arange(NODES)[:, None] + np.arange(first, first + DEGREE)) % NODES
    seeds = np.arange(NODES)
    return write_graph(
        folder, name="ring", indptr=np.arange(NODES + 1) * DEGREE,
        indices=indices.flatten().astype(np.int32), train_idx=seeds[:200], val_idx=seeds[200:250],
        test_idx=seeds[250:], task="multiclass", num_classes=3, y=seeds % 3,
        x=np.zeros((NODES, 5), np.float32),
        edge_weight=np.full(NODES * DEGREE, 0.5, np.float32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Graph]:
    folder = tmp_path_factory.mktemp("graphs")
    return {
        "plain": ring_graph(folder / "plain", self_loops=False),
        "loops": ring_graph(folder / "loops", self_loops=True),
        "links": generate_links(folder / "links", num_nodes=NODES, degree=6.0, feature_dim=5),
        "typed": generate_typed(folder / "typed", num_papers=200, num_authors=150, seed=7),
    }


def sampled_by(name: str, **parameters: float | str) -> dict[str, Any]:
    """A plan's sampler, with sizes where it draws layers."""
    layers = name in ("ladies", "pladies", "fastgcn")
    more: dict[str, float | str] = {"sizes": "30,20"} if layers else {}
    dialect = "every_hop" if layers else "first_seen"
    return {"sampler": Sampler(name=name, dialect=dialect, parameters={**more, **parameters})}


REPLICATED = {"topology": TopologyPlacement(policy="replicated")}
CACHED = {"topology": TopologyPlacement(policy="cached", own_rows=[HOT])}
IN_PARTS = {"topology": TopologyPlacement(policy="partitioned", replication=1)}
PLANS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "host": ("plain", {}, set()),
    "replicated": ("plain", REPLICATED, set()),
    "cached": ("plain", CACHED, set()),
    "in parts": ("plain", IN_PARTS, set()),
    "in parts by weights": (
        "plain", {**IN_PARTS, **sampled_by("ladies", weights="graph")}, {"edge weights"},
    ),
    "links": ("links", {}, set()),
    "typed": ("typed", {"model": "rgcn"}, set()),
    "typed, replicated": ("typed", {"model": "rgcn", **REPLICATED}, set()),
    "gcn": ("plain", {"model": "gcn"}, {"degrees"}),
    "gcn with self-loops": ("loops", {"model": "gcn", **REPLICATED}, {"degrees"}),
    "gcn sampled": ("loops", {"model": "gcn", "gcn_norm": "sampled"}, set()),
    "neighbor by weights": ("plain", sampled_by("neighbor", weights="graph"), {"edge weights"}),
    "labor": ("plain", sampled_by("labor"), set()),
    "labor by weights": ("plain", sampled_by("labor", weights="graph"), {"edge weights"}),
    "ladies by weights": ("plain", sampled_by("ladies", weights="graph"), {"edge weights"}),
    "fastgcn": ("plain", sampled_by("fastgcn"), {"sampler tables"}),
    "las by weights": (
        "plain", sampled_by("las", factor=3, weights="graph"), {"edge weights", "sampler tables"},
    ),
    "las over ladies": ("plain", {"sampler": Sampler(name="las", dialect="every_hop", parameters={
        "factor": 3, "over": "ladies", "sizes": "30,20"})}, {"sampler tables"}),
    "las that changes": (
        "loops", {"model": "gcn", **sampled_by("las", factor=2, schedule="measured")}, set(),
    ),
}  # fmt: skip
"""By name: the graph, the plan, and what the rank keeps beside the topology."""


def held(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object of the runtime holds, each storage once."""
    mark = value.data_ptr() if isinstance(value, torch.Tensor) else id(value)
    if mark in seen:
        return
    seen.add(mark)
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = list[Any]()
    if isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, list | tuple):
        parts = [*value]
    elif type(value).__module__.startswith("gnnplan.runtime."):
        parts = [*getattr(value, "__dict__", {}).values()]
        if is_dataclass(value):
            parts += [getattr(value, each.name) for each in fields(value)]
    for part in parts:
        yield from held(part, seen)


def held_bytes(loader: PlannedLoader) -> int:
    """Bytes that drawing and weighting keep on the device, of tensors as long as the graph."""
    kept, graph, seen = list[torch.Tensor](), loader.graph, set[int]()
    for stage in (loader.topology, *loader.stages):
        if isinstance(stage, DeviceSampleStage):
            if loader.plan.strategy.topology.policy in ("host", "cached"):
                seen.add(stage.sampler.topology.indices.data_ptr())  # the host's
            kept += held(stage.sampler, seen)
        elif isinstance(stage, DeviceBatchStage):
            kept += held(stage, seen)
    return sum(t.numel() * t.element_size() for t in kept if t.numel() >= graph.num_nodes)


def predicted_parts(plan: Plan, graph: Graph) -> dict[str, int]:
    """What the planner predicts of the plan's rank."""
    batch = batch_profile(20)
    if is_typed(plan.workload):
        types = types_of(graph)
        batch = replace(
            batch,
            edge_types=[1.0] * len(types.edge_types),
            node_types=[1.0] * len(types.node_types),
        )
    asked = replace(
        request(), graph=graph_ref(graph), workload=plan.workload,
        user_sampler=plan.strategy.sampler,
        self_loops=count_self_loops(graph.indptr, graph.indices) is not None,
    )  # fmt: skip
    parts = graph_parts(asked, plan.strategy, batch)
    if plan.strategy.topology.policy == "partitioned":
        nothing = Fetched(rows=[0.0], entries=[0.0], batches=1.0, steps=1.0)
        parts["topology"] = grid_parts(plan.strategy, asked.graph, nothing)["topology"]
    return parts


@pytest.mark.parametrize("name", PLANS)
def test_predicted_bytes_are_those_that_are_held(
    name: str, graphs: dict[str, Graph], tmp_path: Path, kernel_device: torch.device
) -> None:
    of, settings, kept = PLANS[name]
    graph, arrays = graphs[of], dict[str, Any]()
    if name == "cached":
        codes, ids = cached_arrays(graph.num_nodes, np.arange(HOT))
        arrays = {"topology_location_0": codes, "topology_own_ids_0": ids}
    folder = tmp_path / "plan"
    plan = make_plan(
        graph, folder, fanouts=[3, 2], batch_size=20, own_rows=0 if of == "typed" else 40,
        more_arrays=arrays, **settings,
    )  # fmt: skip
    loader = PlannedLoader(folder, graph, device=kernel_device, on_device=True)
    found, parts = held_bytes(loader), predicted_parts(plan, graph)
    loader.close()
    assert {*parts} == {"topology", *kept}
    # Room of one address more, for the entry behind the lists of its own.
    spare = ADDRESS_BYTES if name == "cached" else 0
    assert sum(parts.values()) == found + spare
    assert (found == 0) == (name == "las that changes")


@pytest.mark.parametrize(("dtype", "width"), [(np.float16, 75), (np.float32, 5), (np.float32, 8)])
def test_rows_take_the_whole_words_that_are_counted(
    dtype: Any, width: int, graphs: dict[str, Graph], tmp_path: Path, kernel_device: torch.device
) -> None:
    x = np.ones((NODES, width), dtype)
    graph = with_rows(graphs["plain"], tmp_path / "graph", x)
    make_plan(graph, tmp_path / "plan", fanouts=[3, 2], batch_size=20, own_rows=40)
    loader = PlannedLoader(tmp_path / "plan", graph, device=kernel_device, on_device=True)
    alone, asked = candidate_of_ranks(gpus=["gpu0"]), replace(request(), graph=graph_ref(graph))
    each = held_row_bytes(asked.graph, alone)
    held = {
        source.kind: source.table.untyped_storage().nbytes()
        for source in loader.store._table.sources.values()  # type: ignore[attr-defined]
    }
    loader.close()
    assert held == {"own": 40 * each, "host": NODES * each}
    batch = padded_rows(20, width, torch.float32)
    assert batch.untyped_storage().nbytes() == 20 * handed_row_bytes(asked, alone)


def test_rows_are_placed_as_far_as_whole_words_have_room() -> None:
    graph = replace(request().graph, feature_dim=75, feature_dtype="float16")
    alone = candidate_of_ranks(gpus=["gpu0"])
    asked = replace(request(load_preset("siton")), graph=graph)

    def room(device_bytes: int) -> Capacity:
        limited = replace(asked, budgets=Budgets(device_bytes=device_bytes))
        return capacity(limited, alone, shared_host=True)

    much = 4 << 30  # of which a twentieth is the allocator's
    few = room(much - round((room(much).own_bytes - 8_000_000) / 0.95))
    assert few.own_bytes == pytest.approx(8_000_000, abs=2)
    assert few.own_rows == few.own_bytes // 160


def test_a_grid_keeps_its_share_of_weights_and_shared_batches_all_owners() -> None:
    asked = replace(request(), user_sampler=Sampler(name="ladies", parameters={"weights": "graph"}))
    four = candidate_of_ranks(
        gpus=["gpu0", "gpu1", "gpu2", "gpu3"], topology="partitioned", replication=2
    )
    parts = graph_parts(asked, four, batch_profile(20))
    assert parts["edge weights"] == 4 * asked.graph.num_edges * 2 // 4
    shared = replace(four, batching="cooperative", owner="partition", topology=TopologyPlacement())
    parts = graph_parts(request(), shared, batch_profile(20))
    assert parts == {"topology": 8 * (NODES_BY_HAND + 1), "owners": 8 * NODES_BY_HAND}


def test_a_sampler_without_a_form_on_gpus_keeps_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SAMPLERS, "labor", replace(SAMPLERS["labor"], gpu=""))
    asked = replace(request(), user_sampler=Sampler(name="labor"))
    alone = candidate_of_ranks(gpus=["gpu0"], topology="replicated")
    assert graph_parts(asked, alone, batch_profile(20)) == {"topology": 0}


def test_rows_are_placed_in_what_the_graph_leaves() -> None:
    plain, alone = request(load_preset("siton")), candidate_of_ranks(gpus=["gpu0"])
    by_weights = replace(plain, user_sampler=Sampler(parameters={"weights": "graph"}))
    rooms = [capacity(each, alone, shared_host=True).own_bytes for each in (plain, by_weights)]
    lists = draw_bytes(by_weights, alone, plain.profile.batch(BATCH), on_gpu=True)
    assert rooms[0] - rooms[1] == 4 * plain.graph.num_edges + lists
