"""Batches are the same to the byte wherever adjacency lists lie, and lists are read where they lie.

The dataset's lists of the nodes that a rank holds itself are poisoned after opening: a batch that
is right did not read them there.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.loader.topology import Topology
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Sampler, TopologyPlacement
from gnnplan.runtime.sampling.build import build_sampler
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.placed_indices import PlacedIndices
from tests.support.locations import cached_arrays
from tests.support.plans import make_plan

SAMPLERS = [
    Sampler(name="neighbor"),
    Sampler(name="labor"),
]
SLOW_SAMPLERS = [
    Sampler(name="neighbor", dialect="every_hop"),
    Sampler(name="full"),
    Sampler(name="neighbor", parameters={"draws": "replacement"}),
    Sampler(name="labor", parameters={"form": "exact_k"}, dialect="every_hop"),
    Sampler(name="labor", parameters={"variant": 1.0}),
    Sampler(name="labor", parameters={"kappa": 4.0}),
    Sampler(name="las", parameters={"factor": 4.0}),
    Sampler(name="ladies", dialect="every_hop"),
    Sampler(name="pladies", dialect="every_hop"),
]
ON_ITS_OWN = Sampler(name="fastgcn", dialect="every_hop")
"""Counts all edges once, in the dataset: not with poison."""


def _same(a: MiniBatch, b: MiniBatch) -> bool:
    fields = ("indptr", "indices", "e_id", "weight")
    pairs: list[tuple[Any, Any]] = [
        (getattr(p, name), getattr(q, name))
        for p, q in zip(a.blocks, b.blocks, strict=True)
        for name in fields
    ]
    pairs += [(a.n_id, b.n_id), (a.seeds, b.seeds)]
    return all(
        np.array_equal(p, q) if p is not None and q is not None else p is q for p, q in pairs
    )


def _hot(graph: Graph, count: int = 700) -> Any:
    """Nodes of the largest degree, hottest first."""
    return np.argsort(-np.diff(graph.indptr), kind="stable")[:count].astype(np.int64)


def _cached_plan(
    graph: Graph, folder: Path, own: Any, rest: str = "host", **settings: Any
) -> TopologyPlacement:
    codes, ids = cached_arrays(graph.num_nodes, own, rest=rest)
    codes = settings.pop("codes", codes)
    placement = TopologyPlacement(policy="cached", own_rows=[own.size])
    arrays = {"topology_location_0": codes, "topology_own_ids_0": ids}
    make_plan(graph, folder, topology=placement, more_arrays=arrays, **settings)
    return placement


def _poisoned(graph: Graph, own: Any) -> PlacedIndices:
    """The graph's indices with the own lists at hand, and garbage in their places in the rest."""
    placed = PlacedIndices(graph.indptr, graph.indices, own)
    garbage = np.array(graph.indices)
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    garbage[np.isin(rows, own)] = 0
    garbage.setflags(write=False)  # as a dataset's mapping is, and as plain lists are to kernels
    result = PlacedIndices(graph.indptr, garbage, own)
    result.own, result.words = placed.own, placed.words
    return result


def _check_sampler(graph: Graph, sampler: Sampler, *, poison: bool = True) -> None:
    own = _hot(graph)
    fanouts = [300, 200] if sampler.name in ("ladies", "pladies", "fastgcn") else [7, 5]
    if sampler.name == "full":
        fanouts = [-1, -1]
    settings: dict[str, Any] = {"edge_ids": True, "local": own[:50], "steps_per_epoch": 10}
    placed = _poisoned(graph, own) if poison else PlacedIndices(graph.indptr, graph.indices, own)
    plain = build_sampler(sampler, graph.indptr, graph.indices, fanouts, 3, **settings)
    other = build_sampler(sampler, graph.indptr, placed, fanouts, 3, **settings)
    rng = np.random.default_rng(0)
    for step in range(4):  # in turn: one process may draw from both, in either order
        seeds = rng.permutation(graph.num_nodes)[: 100 * (step > 0)].astype(np.int64)
        batches = [each.sample(seeds, epoch=1, step=step) for each in (plain, other)]
        assert _same(*batches)
        assert step == 0 or batches[0].num_edges > 100


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_placed_lists_give_the_same_batches(small_graph: Graph, sampler: Sampler) -> None:
    _check_sampler(small_graph, sampler)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SLOW_SAMPLERS, ids=str)
def test_placed_lists_give_the_same_batches_with_every_sampler(
    small_graph: Graph, sampler: Sampler
) -> None:
    _check_sampler(small_graph, sampler)


@pytest.mark.slow
def test_fastgcn_counts_edges_in_the_dataset_and_samples_placed_lists(small_graph: Graph) -> None:
    _check_sampler(small_graph, ON_ITS_OWN, poison=False)


@pytest.mark.slow
def test_lists_with_wide_ids_are_placed_too(small_graph: Graph) -> None:
    wide = dataclasses.replace(small_graph, indices=np.array(small_graph.indices, np.int64))
    for name in ("neighbor", "labor"):
        _check_sampler(wide, Sampler(name=name))


@pytest.mark.parametrize("count", [0, 1, 700, 3000])
def test_a_placed_list_holds_exactly_the_lists_asked_for(small_graph: Graph, count: int) -> None:
    rng = np.random.default_rng(count)
    nodes = rng.permutation(small_graph.num_nodes)[:count]
    placed = PlacedIndices(small_graph.indptr, small_graph.indices, nodes)
    expected = [small_graph.indices[small_graph.indptr[v] : small_graph.indptr[v + 1]]
                for v in np.sort(nodes)]  # fmt: skip
    assert np.array_equal(placed.own, np.concatenate([*expected, np.empty(0, np.int32)]))
    # Formulas 2.3: 4 bytes per neighbour; and 16 bytes of directory in 64 edges.
    degree = int(np.diff(small_graph.indptr)[nodes].sum())
    words = small_graph.num_edges // 64 + 1
    assert placed.resident_bytes == 4 * degree + 16 * words


def _expected_counts(graph: Graph, batches: list[MiniBatch], kinds: Any) -> tuple[Any, Any]:
    """Lists and bytes by kind, from edge ids and the first-seen rule alone."""
    lists: dict[str, int] = {}
    num_bytes: dict[str, int] = {"host": 0}
    for batch in batches:
        expanded = batch.n_id[: sum(batch.num_sampled_nodes[:-1])]
        for v in expanded:
            lists[kinds[v]] = lists.get(kinds[v], 0) + 1
            num_bytes["host"] += 16
        assert batch.blocks[0].e_id is not None
        rows = np.searchsorted(graph.indptr, batch.blocks[0].e_id, side="right") - 1
        for kind, edges in zip(*np.unique(kinds[rows], return_counts=True), strict=True):
            num_bytes[str(kind)] = num_bytes.get(str(kind), 0) + 4 * int(edges)
    return lists, num_bytes


@pytest.mark.parametrize("rest", ["host", "disk"])
def test_lists_and_bytes_are_counted_where_they_lie(
    small_graph: Graph, tmp_path: Path, rest: Literal["host", "disk"]
) -> None:
    own = _hot(small_graph, 400)
    _cached_plan(small_graph, tmp_path / "plan", own, rest)
    loader = PlannedLoader(tmp_path / "plan", small_graph, blocks=True)
    plan = load_plan(tmp_path / "plan")
    topology = Topology(small_graph, plan, tmp_path / "plan", 0)
    settings: dict[str, Any] = {"edge_ids": True}
    workload = plan.workload
    inner = build_sampler(
        plan.strategy.sampler, topology.graph.indptr, topology.graph.indices, workload.fanouts,
        workload.seed, **settings,
    )  # fmt: skip
    sampler = topology.counted(inner, "neighbor")
    batches = list(loader)
    again = [sampler.sample(b.seeds, epoch=b.epoch, step=b.step) for b in batches]
    kinds = np.full(small_graph.num_nodes, rest, "<U4")
    kinds[own] = "own"
    lists, num_bytes = _expected_counts(small_graph, again, kinds)
    assert loader.meter.list_totals() == (lists, num_bytes)
    assert sum(b.list_bytes_by_source["own"] for b in batches) == num_bytes["own"] > 1000
    loader.close()


def test_every_policy_gives_the_loaders_batches(small_graph: Graph, tmp_path: Path) -> None:
    make_plan(small_graph, tmp_path / "host")
    replicated = TopologyPlacement(policy="replicated")
    make_plan(small_graph, tmp_path / "replicated", topology=replicated)
    _cached_plan(small_graph, tmp_path / "cached", _hot(small_graph), "disk", sample_threads=2)
    graph = open_graph(small_graph.path, validate=False)
    loaders = [PlannedLoader(tmp_path / name, graph) for name in ("host", "replicated", "cached")]
    for batches in zip(*loaders, strict=True):
        assert all(_same(batches[0], other) for other in batches[1:])
        assert not batches[0].lists_by_source
        assert set(batches[1].lists_by_source) == {"own"}
    edges = small_graph.num_edges
    copied = loaders[1].topology
    assert isinstance(copied, Topology)
    assert copied.resident_bytes == 4 * edges + 8 * (small_graph.num_nodes + 1)
    assert not np.shares_memory(copied.graph.indices, graph.indices)
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("policy", ["replicated", "cached"])
def test_cores_that_draw_for_a_gpu_copy_no_lists_to_the_host(
    policy: Literal["replicated", "cached"], small_graph: Graph, tmp_path: Path
) -> None:
    if policy == "cached":
        _cached_plan(small_graph, tmp_path, _hot(small_graph))
    else:
        make_plan(small_graph, tmp_path, topology=TopologyPlacement(policy=policy))
    plan = load_plan(tmp_path)
    gpu = dataclasses.replace(plan.strategy.devices[0], kind="cuda")
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, devices=[gpu]))
    graph = open_graph(small_graph.path, validate=False)
    found = Topology(graph, plan, tmp_path, 0)
    assert found.graph.indices is graph.indices
    assert found.resident_bytes == (small_graph.num_nodes if policy == "cached" else 0)
    sampler = build_sampler(Sampler(), graph.indptr, graph.indices, [5], 0)
    batch = found.counted(sampler, "neighbor").sample(_hot(small_graph)[:9], epoch=0, step=0)
    assert batch.lists_by_source == {"own": 9}


def test_wrong_topology_tables_are_refused(small_graph: Graph, tmp_path: Path) -> None:
    own = _hot(small_graph, 20)
    codes, _ = cached_arrays(small_graph.num_nodes, own)

    def refusal(wrong: Any) -> str:
        _cached_plan(small_graph, tmp_path / "plan", own, codes=wrong)
        with pytest.raises(PlanError) as caught:
            PlannedLoader(tmp_path / "plan", small_graph)
        return str(caught.value)

    swapped = codes.copy()
    swapped[own[[0, 1]]] = codes[own[[1, 0]]]
    assert f"points to own slot {'1' if own[0] < own[1] else '0'} of 20" in refusal(swapped)
    elsewhere = codes.copy()
    elsewhere[7 if 7 not in own else 8] += 256
    assert "points to host row" in refusal(elsewhere)
    assert "expected 3000 unsigned topology codes" in refusal(codes[:-1])
    unused = codes.copy()
    unused[own[3]] = int(own[3]) << 8 | 1
    assert "expected the 20 own lists of rank 0 to be located once each, found 19" in refusal(
        unused
    )
