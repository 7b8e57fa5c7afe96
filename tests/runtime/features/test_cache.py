"""A dynamic cache never changes a row, and hits what a slow simulation hits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import cos, pi, sin
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.cache import LOG, CachedFeatureStore, Slots
from gnnplan.runtime.features.store import open_store
from gnnplan.runtime.features.tier import AbstractFeatureStore, Counters
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.schema import DynamicCache, Plan, Source
from tests.support.caches import SlowClock, SlowLru
from tests.support.locations import host_table
from tests.support.plans import make_plan as write_plan

MakeGraph = Callable[..., Graph]
MakePlan = Callable[..., Plan]
Policy = Literal["lru", "clock"]
SLOW: dict[str, Any] = {"lru": SlowLru, "clock": SlowClock}
MIX = [Source(kind="disk"), Source(kind="own"), Source(kind="host")]


class _Table(AbstractFeatureStore):
    """Rows of an array that are counted, and that fail when told to."""

    def __init__(self, x: Any) -> None:
        self.x, self.feature_dim = x, x.shape[1]
        self.fails = False
        self.reads: list[int] = []

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        self.reads.append(ids.size)
        out[:] = np.nan  # what a read that breaks off leaves behind
        if self.fails:
            raise OSError("no disk")
        out[:] = self.x[ids]
        counters = Counters()
        counters.add_rows("host", ids.size, ids.size * 4 * self.feature_dim)
        return counters

    @property
    def resident_bytes(self) -> int:
        return 1000

    def close(self) -> None:
        self.reads.append(-1)


def _cached(x: Any, policy: str, num_slots: int, dtype: Any = np.float32) -> CachedFeatureStore:
    store = CachedFeatureStore(
        _Table(x), host_table(len(x)), rank=0, policy=policy, num_slots=num_slots, dtype=dtype
    )
    store._table[:] = np.nan
    return store


def _batches(num_nodes: int, count: int, largest: int, seed: int) -> list[Any]:
    """Skewed ids with repeats, some batches empty, some with more rows than any cache here."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, largest, count)
    return [np.minimum(rng.zipf(1.3, size) - 1, num_nodes - 1).astype(np.int64) for size in sizes]


def _read(store: AbstractFeatureStore, ids: Any) -> tuple[Any, Counters]:
    out = np.full((ids.size, store.feature_dim), np.nan, np.float32)
    return out, store.read(ids, out)


@pytest.mark.parametrize("policy", SLOW)
@pytest.mark.parametrize("num_slots", [1, 7, 60, 400])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_are_right_and_hits_are_those_of_a_slow_simulation(
    policy: str, num_slots: int, dtype: Any
) -> None:
    n = 300
    x = np.random.default_rng(0).standard_normal((n, 5)).astype(dtype).astype(np.float32)
    store, slow = _cached(x, policy, num_slots, dtype), SLOW[policy](min(num_slots, n))
    for ids in _batches(n, 150, 120, seed=num_slots):
        before = store.num_touched, store.num_hits
        out, counters = _read(store, ids)
        assert np.array_equal(out, x[ids])
        touched, hits = slow.touch(ids)
        assert (store.num_touched - before[0], store.num_hits - before[1]) == (touched, hits)
        # Every distinct miss is read once below; hits and repeats of a miss are not.
        assert counters.rows == {"host": touched - hits, "cache": ids.size - touched + hits}
        assert counters.bytes["cache"] == counters.rows["cache"] * 5 * np.dtype(dtype).itemsize
        nodes, rows = store.cached()
        assert set(nodes.tolist()) == slow.held()
        assert np.array_equal(rows, x[nodes].astype(dtype))


def _a7_batches(kappa: int | None, count: int, seed: int) -> list[Any]:
    """docs/formulas.md 8.7 [A7]: N 2000, q .2, a = min(.9, 30/rank^.9); kappa 0 is frozen."""
    rng = np.random.default_rng(seed)
    n = 2000
    seen = np.minimum(0.9, 30 / np.arange(1, n + 1) ** 0.9)
    first, second = rng.standard_normal((2, n))
    batches: list[Any] = []
    for i in range(count):
        if kappa is None:
            r = rng.random(n)
        elif kappa == 0:
            r = norm.cdf(first)
        else:
            if i and i % kappa == 0:
                first, second = second, rng.standard_normal(n)
            angle = (i % kappa) / kappa * pi / 2
            r = norm.cdf(cos(angle) * first + sin(angle) * second)
        batches.append(rng.permutation(np.flatnonzero((rng.random(n) < seen) & (r <= 0.2))))
    return batches


@pytest.mark.parametrize(
    ("kappa", "model"), [(None, 0.367), (4, 0.483), (16, 0.686), (64, 0.815), (0, 0.898)]
)
def test_lru_hit_rates_are_the_models_on_its_worked_example(
    kappa: int | None, model: float
) -> None:
    # [A7]: C 300, values and the error of .015 stated there; frozen r is averaged over draws.
    hits = touched = 0
    steps, warm, draws = (250, 100, 6) if kappa == 0 else (600, 150, 2)
    for seed in range(draws):
        store = _cached(np.zeros((2000, 1), np.float32), "lru", 300)
        for i, ids in enumerate(_a7_batches(kappa, steps, seed)):
            if i == warm:
                hits, touched = hits - store.num_hits, touched - store.num_touched
            _read(store, ids)
        hits, touched = hits + store.num_hits, touched + store.num_touched
    assert abs(hits / touched - model) <= 0.015


@pytest.mark.parametrize("policy", SLOW)
def test_a_read_that_fails_leaves_no_wrong_row_behind(policy: str) -> None:
    x = np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32)
    store = _cached(x, policy, 10)
    below = store.below
    assert isinstance(below, _Table)
    rng = np.random.default_rng(2)
    for step in range(60):
        ids = rng.integers(0, 50, rng.integers(0, 20))
        below.fails = step % 5 == 4
        if below.fails:
            with pytest.raises(OSError, match="no disk"):
                _read(store, ids)
        else:
            assert np.array_equal(_read(store, ids)[0], x[ids])
        nodes, rows = store.cached()
        assert np.array_equal(rows, x[nodes])
        assert len(set(nodes.tolist())) == len(nodes)
    held = store.cached()[0]
    with pytest.raises(IndexError, match="found 50"):
        _read(store, np.array([1, 50]))
    assert np.array_equal(store.cached()[0], held)


def test_the_store_below_is_read_even_where_nothing_is_missing() -> None:
    store = _cached(np.ones((9, 2), np.float32), "lru", 9)
    for _ in range(3):
        _read(store, np.arange(9))
    _read(store, np.empty(0, np.int64))
    store.close()
    below = store.below
    assert isinstance(below, _Table)
    assert below.reads == [9, 0, 0, 0, -1]  # other ranks may wait in it: every call counts


@pytest.mark.parametrize("policy", SLOW)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_a_plans_cache_stands_before_all_but_own_rows(
    make_graph: MakeGraph, make_plan: MakePlan, tmp_path: Path, policy: Policy, dtype: Any
) -> None:
    graph = make_graph(dtype=dtype)
    plan = make_plan(graph, MIX, cache=DynamicCache(policy=policy, rows=[64]))
    plain = make_plan(graph, MIX, name="plain")
    store = open_store(graph, plan, tmp_path / "plan", 0, threads=2)
    bare = open_store(graph, plain, tmp_path / "plain", 0, threads=1)
    assert isinstance(store, CachedFeatureStore)
    codes = np.load(tmp_path / "plan" / plan.arrays["feature_location_0"].file)
    own = np.array([s.kind == "own" for s in MIX])[codes & 0xFF]
    slow = SLOW[policy](64)
    x = convert_rows(np.array(graph.x), np.dtype(np.float32))
    for ids in _batches(500, 60, 300, seed=5):
        out, counters = _read(store, ids)
        assert np.array_equal(out, x[ids])
        rest = ids[~own[ids]]
        touched, hits = slow.touch(rest)
        assert counters.rows["own"] == int(own[ids].sum())
        assert counters.rows["cache"] == rest.size - touched + hits
        assert counters.rows["host"] + counters.rows["disk"] == touched - hits
        assert not own[store.cached()[0]].any()
    _read(bare, np.arange(300))
    _read(store, np.arange(300))
    # Rows; 4 bytes a node to find them; node, last touch and log or mark of each slot; staging.
    directory = 500 * 4 + 64 * (8 + 4 + (3 * 4 if policy == "lru" else 1)) + 4 * 8
    staging = store._staging.nbytes
    rows = 64 * graph.row_bytes
    below = store.below.resident_bytes
    assert store.resident_bytes == below + rows + directory + staging
    store.close()
    bare.close()


@pytest.mark.parametrize("policy", SLOW)
def test_reads_from_many_threads_give_the_rows(policy: str) -> None:
    n = 2000
    x = np.random.default_rng(3).standard_normal((n, 6)).astype(np.float32)
    store = _cached(x, policy, 100)
    batches = _batches(n, 80, 700, seed=9)

    def right(ids: Any) -> bool:
        return np.array_equal(_read(store, ids)[0], x[ids])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, batches))
    nodes, rows = store.cached()
    assert np.array_equal(rows, x[nodes])


@pytest.mark.parametrize("policy", SLOW)
def test_prefetched_batches_hit_as_often_as_serial_ones(
    small_graph: Graph, tmp_path: Path, policy: Policy
) -> None:
    counts: list[Any] = []
    for threads in (0, 3):
        folder = tmp_path / f"plan-{threads}"
        write_plan(
            small_graph, folder, batch_size=64, sample_threads=threads, own_rows=200,
            cache=DynamicCache(policy=policy, rows=[500]),
        )  # fmt: skip
        loader = PlannedLoader(folder, small_graph)
        seen: list[Any] = []
        for _ in range(2):
            for batch in loader:
                assert small_graph.x is not None
                assert np.array_equal(batch.x.numpy(), small_graph.x[batch.n_id])
                seen.append((dict(batch.rows_by_source), dict(batch.bytes_by_source)))
        loader.close()
        counts.append(seen)
    assert counts[0] == counts[1]
    assert sum(rows["cache"] for rows, _ in counts[0]) > 1000


def test_a_directory_takes_four_bytes_for_a_place_of_a_slot() -> None:
    # LRU: a node's slot, a slot's node of 8 bytes and last touch, and a log of several places.
    for clock, per_slot in ((False, 8 + 4 + 4 * LOG), (True, 8 + 4 + 1)):
        one, more = (Slots(1000, slots, clock=clock).nbytes for slots in (10, 110))
        assert more - one == 100 * per_slot
        assert Slots(2000, 10, clock=clock).nbytes - one == 4 * 1000


def test_settings_that_mean_nothing_are_refused() -> None:
    x = np.zeros((4, 1), np.float32)
    with pytest.raises(PlanError, match="lru, clock, found fifo"):
        _cached(x, "fifo", 2)
    with pytest.raises(PlanError, match="at least one row"):
        _cached(x, "lru", 0)
