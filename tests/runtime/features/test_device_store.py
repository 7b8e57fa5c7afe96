"""The device's store reads what the host's store reads, and counts the same."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import BudgetExceeded, SlowerPathWarning, forget_warnings
from gnnplan.runtime.features import store as store_module
from gnnplan.runtime.features.cache import CachedFeatureStore
from gnnplan.runtime.features.store import open_store
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.plan.schema import DynamicCache, Source
from tests.support.inprocess import run_in_process

pytest.importorskip("triton")

from gnnplan.runtime.features import device_open
from gnnplan.runtime.features.device_open import open_device_store
from gnnplan.runtime.features.device_store import Staged

OWN_AND_HOST = [Source(kind="own"), Source(kind="host")]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("dim", [1, 100])
def test_rows_and_counters_equal_the_host_stores(
    make_graph: Any, make_plan: Any, tmp_path: Path, dtype: Any, dim: int,
    kernel_device: torch.device,
) -> None:  # fmt: skip
    graph = make_graph(num_nodes=120, dim=dim, dtype=dtype)
    plan = make_plan(graph, OWN_AND_HOST)
    store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    host = open_store(graph, plan, tmp_path / "plan", 0, threads=1)
    ids = np.concatenate([[0, 119, 0], np.random.default_rng().integers(0, 120, 60)])
    for count in (0, 1, ids.size):
        found, expected = (np.full((count, dim), np.nan, np.float32) for _ in range(2))
        mine, theirs = store.read(ids[:count], found), host.read(ids[:count], expected)
        np.testing.assert_array_equal(found, expected)
        assert (mine.rows, mine.bytes) == (theirs.rows, theirs.bytes)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_rows_of_a_disk_cross_in_the_width_that_they_are_stored_in(
    make_graph: Any, make_plan: Any, tmp_path: Path, dtype: Any, kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    graph = make_graph(num_nodes=60, dim=8, dtype=dtype)
    plan = make_plan(graph, [Source(kind="own"), Source(kind="disk")])
    store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    (staged,) = store._others
    assert isinstance(staged, Staged)
    ((tier, _),) = staged._tiers
    seen: list[Any] = []
    read = tier.read

    def watch(slots: Any, positions: Any, counts: Any, out: Any, counters: Any) -> None:
        seen.append(out.dtype)
        read(slots, positions, counts, out, counters)

    monkeypatch.setattr(tier, "read", watch)
    found = np.empty((60, 8), np.float32)
    store.read(np.arange(60), found)
    np.testing.assert_array_equal(found, convert_rows(np.array(graph.x), found.dtype))
    assert seen == [dtype]
    store.close()


def test_gathers_count_on_the_device_until_asked(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device
) -> None:
    graph = make_graph(num_nodes=50, dim=4)
    plan = make_plan(graph, OWN_AND_HOST)
    store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    ids = torch.arange(50, device=kernel_device)
    out = torch.empty((50, 4), device=kernel_device)
    counts = store.new_counts()
    for _ in range(3):
        store.gather(ids, out, counts)
    np.testing.assert_array_equal(out.cpu().numpy(), np.asarray(graph.x))
    assert sum(store.named(counts.tolist()).rows.values()) == 150
    store.gather(ids + 1, out, counts)
    with pytest.raises(IndexError, match="found 1 outside"):
        store.named(counts.tolist())


def test_ids_outside_the_graph_are_refused(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device
) -> None:
    graph = make_graph(num_nodes=10, dim=4)
    store = open_device_store(
        graph, make_plan(graph, OWN_AND_HOST), tmp_path / "plan", 0, kernel_device
    )
    with pytest.raises(IndexError, match="found 2 outside"):
        store.read(np.array([-1, 3, 10]), np.empty((3, 4), np.float32))


MIXES = [
    [Source(kind="disk")],
    [Source(kind="own"), Source(kind="disk")],
    [Source(kind="disk"), Source(kind="own"), Source(kind="host")],
]


@pytest.mark.parametrize("mix", range(len(MIXES)))
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_rows_on_disk_are_staged_and_counted_as_the_host_stores(
    make_graph: Any, make_plan: Any, tmp_path: Path, mix: int, dtype: Any,
    kernel_device: torch.device,
) -> None:  # fmt: skip
    graph = make_graph(num_nodes=200, dim=7, dtype=dtype)
    plan = make_plan(graph, MIXES[mix])
    store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    host = open_store(graph, plan, tmp_path / "plan", 0, threads=1)
    ids = np.concatenate([[0, 199, 0], np.random.default_rng().integers(0, 200, 60)])
    for count in (0, 1, ids.size):
        found, expected = (np.full((count, 7), np.nan, np.float32) for _ in range(2))
        mine, theirs = store.read(ids[:count], found), host.read(ids[:count], expected)
        np.testing.assert_array_equal(found, expected)
        for kind in theirs.rows:
            assert mine.rows.get(kind, 0) == theirs.rows[kind]
            assert mine.bytes.get(kind, 0) == theirs.bytes[kind]
        assert mine.disk_read_bytes == theirs.disk_read_bytes
    store.close()
    host.close()


def test_beside_a_disk_the_host_holds_what_its_ranks_read_there_and_no_more(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device
) -> None:
    """Two ranks of host 0 share the rows that either reads; host 1 holds its own."""
    graph = make_graph(num_nodes=200, dim=7)
    plan = make_plan(graph, MIXES[2], num_ranks=3, hosts=[0, 0, 1], dealt="replicated")
    read = list[set[int]]()
    for number in range(3):
        codes = np.load(tmp_path / "plan" / plan.arrays[f"feature_location_{number}"].file)
        read.append(set(np.flatnonzero((codes & 0xFF) == 2).tolist()))
    expected = [len(read[0] | read[1]), len(read[0] | read[1]), len(read[2])]

    def rank(comm: Any) -> tuple[int, bool]:
        store = open_device_store(
            graph, plan, tmp_path / "plan", comm.rank, kernel_device, comm=comm
        )
        (held,) = {s.table.shape[0] for s in store._table.sources.values() if s.kind == "host"}
        found = np.full((200, 7), np.nan, np.float32)
        store.read(np.arange(200), found)
        comm.barrier()
        store.close()
        return held, bool((found == np.asarray(graph.x)).all())

    assert run_in_process(3, rank, in_turn=True) == [(held, True) for held in expected]
    assert max(expected) < 200


@pytest.mark.parametrize("policy", ["lru", "clock"])
@pytest.mark.parametrize("mix", [0, 2])
@pytest.mark.parametrize("slots", [1, 9, 60, 400])
def test_a_dynamic_cache_decides_what_the_hosts_decides(
    make_graph: Any, make_plan: Any, tmp_path: Path, policy: Any, mix: int, slots: int,
    kernel_device: torch.device,
) -> None:  # fmt: skip
    graph = make_graph(num_nodes=90, dim=3)
    plan = make_plan(graph, MIXES[mix], cache=DynamicCache(policy=policy, rows=[slots]))
    store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    host = open_store(graph, plan, tmp_path / "plan", 0, threads=1)
    assert isinstance(host, CachedFeatureStore)
    assert store.cache is not None
    store.cache.rows.fill_(np.nan)
    rng = np.random.default_rng()
    for step in range(25):
        # Repeated ids, empty batches, and batches of more distinct rows than the cache has slots.
        ids = np.minimum(rng.zipf(1.3, rng.integers(0, 60)) - 1, 89).astype(np.int64)
        found, expected = (np.full((ids.size, 3), np.nan, np.float32) for _ in range(2))
        mine, theirs = store.read(ids, found), host.read(ids, expected)
        np.testing.assert_array_equal(found, expected, err_msg=f"step {step}")
        assert store.cache.totals.tolist() == [host.num_touched, host.num_hits]
        for kind in theirs.rows:
            assert (kind, mine.rows.get(kind, 0)) == (kind, theirs.rows[kind])
        nodes, rows = store.cache.held()
        held, _ = host.cached()
        assert nodes.tolist() == held.tolist()  # in the same slots too
        np.testing.assert_array_equal(rows.numpy(), np.asarray(graph.x)[nodes.numpy()])
    store.close()
    host.close()


def test_a_gather_that_fails_leaves_an_empty_cache(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device
) -> None:
    graph = make_graph(num_nodes=40, dim=3)
    plan = make_plan(graph, MIXES[0], cache=DynamicCache(policy="lru", rows=[20]))
    store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    assert store.cache is not None
    ids, rows = np.arange(15), np.empty((15, 3), np.float32)
    store.read(ids, rows)
    tier = store._others[0]._tiers[0][0]  # type: ignore[union-attr]
    tier.rows = replace(tier.rows, num_rows=1)  # type: ignore[attr-defined]
    with pytest.raises(IndexError, match="expected rows"):
        store.read(np.arange(10, 30), np.empty((20, 3), np.float32))
    assert store.cache.held()[0].numel() == 0
    tier.rows = replace(tier.rows, num_rows=40)  # type: ignore[attr-defined]
    store.read(ids, rows)
    np.testing.assert_array_equal(rows, np.asarray(graph.x)[:15])
    store.close()


def test_rows_that_find_no_room_are_read_from_the_host_with_one_warning(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    graph = make_graph(num_nodes=80, dim=5)
    plan = make_plan(graph, [Source(kind="own"), Source(kind="disk")])
    whole = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    real = device_open.padded_rows

    def small(count: int, *rest: Any) -> torch.Tensor:
        if count > 12:
            raise torch.OutOfMemoryError("no room")
        return real(count, *rest)

    monkeypatch.setattr(device_open, "padded_rows", small)
    forget_warnings()
    with pytest.warns(SlowerPathWarning, match=r"own rows: \d+ of \d+ find room.*plan"):
        store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
    open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device).close()  # warns no more
    ids = np.arange(80)
    rows = np.full((80, 5), np.nan, np.float32)
    counted, before = store.read(ids, rows), whole.read(ids, rows.copy())
    np.testing.assert_array_equal(rows, np.asarray(graph.x))
    assert 0 < counted.rows["own"] <= 12 < before.rows["own"]
    assert counted.rows["own"] + counted.rows["host"] == before.rows["own"]
    assert counted.rows["disk"] == before.rows["disk"]
    for each in (store, whole):
        each.close()


def test_own_rows_pass_through_little_of_the_hosts_memory(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(store_module, "_PART_BYTES", 1 << 18)
    graph = make_graph(num_nodes=4000, dim=1000)
    sources = [Source(kind="own"), Source(kind="disk")]
    plan = make_plan(graph, sources, disk_budget_bytes=1 << 18)
    ids = np.load(tmp_path / "plan" / plan.arrays["feature_own_ids_0"].file)
    open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device).close()  # compiles
    tracemalloc.start()  # of numpy's arrays: torch's, where the device's rows lie, are not seen
    try:
        store = open_device_store(graph, plan, tmp_path / "plan", 0, kernel_device)
        peak = tracemalloc.get_traced_memory()[1]
        (own,) = store._table.sources.values()
        rows = own.table.cpu().numpy().copy()
        store.close()  # stopping while a thread of it allocates crashes the interpreter
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(rows, np.asarray(graph.x)[ids])
    assert peak < ids.size * own.row_bytes / 2


def test_rows_that_find_no_room_and_are_nowhere_else_stop_the_run_with_the_sum(
    make_graph: Any, make_plan: Any, tmp_path: Path, kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    graph = make_graph(num_nodes=30, dim=5)
    held = {0: np.arange(25), 1: np.arange(30)}
    plan = make_plan(
        graph, [Source(kind="own"), Source(kind="host"), Source(kind="remote", rank=1)],
        num_ranks=2, hosts=[0, 1], host_rows=held,
    )  # fmt: skip

    def nothing(count: int, *rest: Any) -> torch.Tensor:
        del rest
        if count:
            raise torch.OutOfMemoryError("no room")
        return torch.empty((0, 5))

    monkeypatch.setattr(device_open, "padded_rows", nothing)
    forget_warnings()

    def rank(comm: Any) -> None:
        open_device_store(graph, plan, tmp_path / "plan", comm.rank, kernel_device, comm=comm)

    with (
        pytest.warns(SlowerPathWarning),
        pytest.raises(BudgetExceeded, match="no memory prediction"),
    ):
        run_in_process(2, rank)
