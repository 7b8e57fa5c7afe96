"""Any mix of own, host and disk returns the dataset's rows, and counts what it did."""

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.errors import BudgetExceeded, DatasetError, PlanError
from gnnplan.runtime.features import store as store_module
from gnnplan.runtime.features.store import (
    AbstractFeatureStore,
    OwnRows,
    load_own_rows,
    open_host_rows,
    open_store,
    read_location,
)
from gnnplan.runtime.features.tier import TypedHost, sum_counters
from gnnplan.runtime.graph.dataset import Graph, write_graph
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.plan.schema import Plan, Source

MakeGraph = Callable[..., Graph]
MakePlan = Callable[..., Plan]

OWN, HOST, DISK = Source(kind="own"), Source(kind="host"), Source(kind="disk")
MIXES = {
    "host": [HOST],
    "disk": [DISK],
    "own-host": [OWN, HOST],
    "own-disk": [OWN, DISK],
    "host-disk": [HOST, DISK],
    "own-host-disk": [DISK, OWN, HOST],
}


def _rows(graph: Graph) -> Any:
    """The features as one dense float32 array, without the code under test."""
    if graph.x is not None:
        return convert_rows(np.array(graph.x), np.dtype(np.float32))
    csr = graph.x_csr
    assert csr is not None
    rows = np.zeros((graph.num_nodes, graph.feature_dim), np.float32)
    row = np.repeat(np.arange(graph.num_nodes), np.diff(csr.indptr))
    rows[row, csr.indices] = csr.data
    return rows


def _id_lists(num_nodes: int) -> list[Any]:
    rng = np.random.default_rng(3)
    return [
        rng.integers(0, num_nodes, 3000),
        np.empty(0, np.int64),
        np.array([0]),
        np.array([num_nodes - 1, 0, num_nodes - 1]),
        np.full(700, 7),
        np.arange(num_nodes)[::-1].copy(),
    ]


def _check_reads(store: AbstractFeatureStore, graph: Graph, plan: Plan, folder: Path) -> None:
    """Rows equal x[ids]; counters equal a count made from the plan's own arrays."""
    x = _rows(graph)
    codes = np.load(folder / plan.arrays["feature_location_0"].file)
    kinds = np.array([s.kind for s in plan.strategy.features.sources])[codes & 0xFF]
    for ids in _id_lists(graph.num_nodes):
        out = np.full((ids.size, graph.feature_dim), np.nan, np.float32)
        counters = store.read(ids, out)
        assert np.array_equal(out, x[ids])
        if graph.x is not None and graph.x.dtype == BFLOAT16:
            stored = np.empty(out.shape, BFLOAT16)  # as they are: nothing is widened on the way
            store.read(ids, stored)
            assert np.array_equal(convert_rows(stored, out.dtype), out)
        for kind in ("own", "host", "disk", "peer"):
            rows = int((kinds[ids] == kind).sum())
            assert counters.rows.get(kind, 0) == rows
            assert counters.bytes.get(kind, 0) == rows * graph.row_bytes


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dim", [100, 33])
def test_any_mix_returns_the_rows_and_counts_them(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path, mix: str, dim: int, dtype: Any
) -> None:
    graph = make_graph(dim=dim, dtype=dtype)
    plan = make_plan(graph, MIXES[mix])
    store = open_store(graph, plan, tmp_path / "plan", 0, threads=2)
    _check_reads(store, graph, plan, tmp_path / "plan")
    store.close()


def test_one_store_serves_several_threads_at_once(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    graph = make_graph()
    plan = make_plan(graph, MIXES["own-host-disk"])
    store = open_store(graph, plan, tmp_path / "plan", 0, threads=1)
    x = _rows(graph)

    def read(seed: int) -> bool:
        ids = np.random.default_rng(seed).integers(0, graph.num_nodes, 800)
        out = np.empty((800, graph.feature_dim), np.float32)
        store.read(ids, out)
        return np.array_equal(out, x[ids])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(40)))
    store.close()


@pytest.mark.parametrize("mix", ["host", "own-host"])
def test_csr_features_become_dense_rows(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path, mix: str
) -> None:
    graph = make_graph(dim=40, sparse=True)
    plan = make_plan(graph, MIXES[mix])
    store = open_store(graph, plan, tmp_path / "plan", 0, threads=2)
    x = _rows(graph)
    codes = np.load(tmp_path / "plan" / plan.arrays["feature_location_0"].file)
    on_host = np.array([s.kind == "host" for s in plan.strategy.features.sources])[codes & 0xFF]
    for ids in _id_lists(graph.num_nodes):
        out = np.full((ids.size, 40), np.nan, np.float32)
        counters = store.read(ids, out)
        assert np.array_equal(out, x[ids])
        # Independent count: 8 bytes of column (int64) and 4 of value for each non-zero entry.
        assert counters.bytes["host"] == 12 * int((x[ids[on_host[ids]]] != 0).sum())
        assert counters.rows["host"] == int(on_host[ids].sum())
    store.close()


def test_own_rows_may_be_halved_only_where_nothing_is_lost(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    graph = make_graph()
    plan = make_plan(graph, MIXES["own-host"], storage_dtype="float16")
    with pytest.raises(PlanError, match="differ from the dataset's float32, and the plan is exact"):
        open_store(graph, plan, tmp_path / "plan", 0, threads=1)
    whole = write_graph(
        tmp_path / "whole",
        name="whole",
        indptr=np.array(graph.indptr),
        indices=np.array(graph.indices),
        train_idx=graph.train_idx,
        val_idx=graph.val_idx,
        test_idx=graph.test_idx,
        task="multiclass",
        num_classes=2,
        y=graph.y,
        x=np.round(np.array(graph.x) * 8),
    )
    store = open_store(whole, plan, tmp_path / "plan", 0, threads=1)
    ids = np.arange(whole.num_nodes)
    out = np.empty((ids.size, whole.feature_dim), np.float32)
    counters = store.read(ids, out)
    assert np.array_equal(out, np.array(whole.x))
    assert counters.bytes["own"] == counters.rows["own"] * 200
    assert counters.bytes["host"] == counters.rows["host"] * 400
    store.close()


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_another_type_are_converted_part_by_part(
    make_graph: MakeGraph,
    make_plan: MakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sparse: bool,
) -> None:
    monkeypatch.setattr(store_module, "_PART_BYTES", 1 << 14)
    graph, folder = make_graph(num_nodes=4000, dim=500, sparse=sparse), tmp_path / "plan"
    plan = make_plan(graph, MIXES["own-host"], storage_dtype="bfloat16")
    rounded = dataclasses.replace(plan, statistics_class="approximate")
    location, own_ids = read_location(graph, plan, folder, 0)
    served, hosts = open_host_rows(graph, plan, folder, 0, location, 1)
    ids = own_ids[0]
    compiled = OwnRows(served, rounded, 0, ids[:1], hosts, None, 1)
    load_own_rows(compiled)  # before it is measured
    tracemalloc.start()
    try:
        rows = load_own_rows(OwnRows(served, rounded, 0, ids, hosts, None, 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expected = convert_rows(_rows(graph)[ids], BFLOAT16)
    np.testing.assert_array_equal(rows.view(np.uint16), expected.view(np.uint16))
    assert peak < 1.5 * rows.nbytes
    with pytest.raises(PlanError, match="stored as bfloat16 differ from the dataset's float32"):
        load_own_rows(OwnRows(served, plan, 0, ids, hosts, None, 1))


def test_a_range_of_typed_rows_takes_the_memory_of_the_range_alone() -> None:
    node_type = np.tile([1, 0], 1 << 19).astype(np.int32)
    tables = [np.arange(1 << 19, dtype=np.float32)[:, None], np.zeros((1 << 19, 2), np.float32)]
    host = TypedHost(tables, node_type)
    np.testing.assert_array_equal(host[:3], [[0, 0], [0, 0], [0, 0]])
    tracemalloc.start()
    try:
        last = host[(1 << 20) - 4 : 1 << 21]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(last[:, 0], [0, (1 << 19) - 2, 0, (1 << 19) - 1])
    assert peak < 1 << 16


def test_resident_bytes_are_own_rows_buffers_and_scratch(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    graph = make_graph()
    plan = make_plan(graph, MIXES["own-host-disk"], disk_budget_bytes=100_000)
    store = open_store(graph, plan, tmp_path / "plan", 0, threads=1)
    own_bytes = plan.strategy.features.own_rows[0] * 400
    assert own_bytes < store.resident_bytes <= own_bytes + 100_000
    store.read(np.arange(400), np.empty((400, 100), np.float32))
    # 33 bytes of scratch per id and a quarter to spare.
    assert store.resident_bytes <= own_bytes + 100_000 + 33 * 500
    before = store.resident_bytes
    store.read(np.arange(400), np.empty((400, 100), np.float32))
    assert store.resident_bytes == before
    store.close()
    assert store.resident_bytes == 33 * 500


def test_ids_and_shapes_that_do_not_fit_are_refused(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    graph = make_graph()
    for mix in ("host", "own-host-disk"):
        store = open_store(graph, make_plan(graph, MIXES[mix]), tmp_path / "plan", 0, threads=1)
        for bad in (-1, graph.num_nodes):
            with pytest.raises(IndexError, match=f"found {bad}"):
                store.read(np.array([3, bad]), np.empty((2, 100), np.float32))
        with pytest.raises(ValueError, match="expected an output"):
            store.read(np.array([3]), np.empty((2, 100), np.float32))
        store.close()


def test_a_wrong_table_is_refused_on_opening(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    graph = make_graph()

    def swap_two_own_slots(arrays: dict[str, Any]) -> None:
        own = arrays["feature_own_ids_0"]
        located = np.flatnonzero(arrays["feature_location_0"] & 0xFF == 0)
        first = np.flatnonzero(own == located[0])[0]
        own[[first, first - 1]] = own[[first - 1, first]]

    plan = make_plan(graph, MIXES["own-host"], change=swap_two_own_slots)
    with pytest.raises(PlanError, match="points to own slot"):
        open_store(graph, plan, tmp_path / "plan", 0, threads=1)

    def cut(arrays: dict[str, Any]) -> None:
        arrays["feature_location_0"] = arrays["feature_location_0"][:-1]

    plan = make_plan(graph, MIXES["own-host"], change=cut)
    with pytest.raises(PlanError, match="expected 500 unsigned location codes"):
        open_store(graph, plan, tmp_path / "plan", 0, threads=1)


def test_plans_that_need_what_is_not_there_are_refused(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    graph = make_graph()
    plan = make_plan(graph, MIXES["disk"], disk_budget_bytes=0)
    with pytest.raises(BudgetExceeded, match=r"buffers 8192 = 8192 > 0 bytes"):
        open_store(graph, plan, tmp_path / "plan", 0, threads=1)
    plan = make_plan(graph, [HOST, Source(kind="peer", rank=1)], num_ranks=2)
    with pytest.raises(PlanError, match="communicator of 2 ranks, found 1"):
        open_store(graph, plan, tmp_path / "plan", 0, threads=1)
    sparse = make_graph(sparse=True)
    with pytest.raises(PlanError, match="needs dense features"):
        open_store(sparse, make_plan(sparse, MIXES["disk"]), tmp_path / "plan", 0, threads=1)


def test_counters_add_up(make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path) -> None:
    graph = make_graph()
    store = open_store(
        graph, make_plan(graph, MIXES["own-host-disk"]), tmp_path / "plan", 0, threads=1
    )
    out = np.empty((50, 100), np.float32)
    reads = [store.read(np.arange(50) + k, out) for k in range(4)]
    summed = sum_counters(reads)
    assert sum(summed.rows.values()) == 200
    assert sum(summed.bytes.values()) == 200 * 400
    assert summed.disk_reads == sum(each.disk_reads for each in reads) > 0
    store.close()


def test_a_topology_only_dataset_has_no_features_to_read(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path
) -> None:
    graph = make_graph()
    plan = make_plan(graph, MIXES["host"])
    bare = write_graph(
        tmp_path / "bare",
        name="bare",
        indptr=np.array(graph.indptr),
        indices=np.array(graph.indices),
        train_idx=graph.train_idx,
        val_idx=graph.val_idx,
        test_idx=graph.test_idx,
        task="multiclass",
        num_classes=2,
        feature_dim=100,
    )
    with pytest.raises(DatasetError, match="topology-only"):
        open_store(bare, plan, tmp_path / "plan", 0, threads=1)
