"""Bulk sampling: the blocks of the batches one by one, whatever the stack, within a byte budget."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from gnnplan.runtime.errors import BudgetExceeded, SamplerError
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.reference.matrix import adjacency, sample_layers_reference

Graph = tuple[NDArray[np.int64], NDArray[np.int32]]
METHODS = ["sage", "ladies", "pladies", "fastgcn"]


def skewed_graph(num_nodes: int = 2000, exponent: float = 1.7) -> Graph:
    """A multigraph with skewed degrees, isolated nodes and self-loops."""
    rng = np.random.default_rng(11)
    degrees = np.minimum(rng.zipf(exponent, num_nodes), 300)
    degrees[rng.random(num_nodes) < 0.1] = 0
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = (num_nodes * rng.random(int(indptr[-1])) ** 3).astype(np.int32)
    return indptr, indices


def seed_batches(num_nodes: int, sizes: list[int], *, number: int = 0) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng([9, number])
    return [rng.permutation(num_nodes)[:size].astype(np.int64) for size in sizes]


def contents(batch: MiniBatch) -> list[bytes | str]:
    """All that a batch says, and the types it says it in."""
    arrays = [batch.n_id, batch.seeds, batch.input_id]
    for block in batch.blocks:
        arrays += [block.indptr, block.indices]
        arrays += [a for a in (block.e_id, block.weight) if a is not None]
    plain = [batch.num_sampled_nodes, batch.num_sampled_edges, batch.dialect, batch.epoch]
    plain += [batch.step, batch.global_num_seeds, [(b.num_src, b.num_dst) for b in batch.blocks]]
    return [repr(plain), *(str(a.dtype) for a in arrays), *(a.tobytes() for a in arrays)]


@pytest.mark.parametrize("budget", [1 << 30, 0])
@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("fanouts", [[5, 4, 3], [-1, 2], [70, 1], [3]])
def test_uniform_rows_give_the_blocks_of_the_batches_one_by_one(
    fanouts: list[int], dialect: Dialect, budget: int
) -> None:
    graph = skewed_graph(600)
    seeds = seed_batches(600, [40, 0, 1, 200, 7, 64])
    settings = {"dialect": dialect, "seed": 3, "edge_ids": True, "relabel_budget_bytes": budget}
    single = NeighborSampler(*graph, fanouts, **settings)
    bulk = BulkSampler(*graph, fanouts, **settings)
    for first_step in (0, 5):
        found = bulk.sample_many(seeds, epoch=2, first_step=first_step)
        for i, batch in enumerate(found):
            expected = single.sample(seeds[i], epoch=2, step=first_step + i)
            assert contents(batch) == contents(expected)


# Not LADIES without replacement: darts in bulk, the race one by one, equal in law, tested below.
@pytest.mark.parametrize(
    ("method", "replace"),
    [
        ("ladies", True),
        ("pladies", False),
        ("pladies", True),
        ("fastgcn", False),
        ("fastgcn", True),
    ],
)
def test_layers_drawn_by_the_same_numbers_give_the_blocks_of_the_batches_one_by_one(
    method: str, replace: bool
) -> None:
    graph = skewed_graph(600)
    seeds = seed_batches(600, [40, 0, 1, 100])
    settings = {"method": method, "replace": replace, "seed": 3, "edge_ids": True}
    single = LayerwiseSampler(*graph, [30, 50], **settings)
    found = BulkSampler(*graph, [30, 50], **settings).sample_many(seeds, epoch=1, first_step=4)
    for i, batch in enumerate(found):
        assert contents(batch) == contents(single.sample(seeds[i], epoch=1, step=4 + i))


@pytest.mark.parametrize("method", METHODS)
def test_k_1_and_k_all_and_any_budget_between_give_equal_blocks(method: str) -> None:
    graph = skewed_graph()
    seeds = seed_batches(2000, [30] * 12)
    whole = BulkSampler(*graph, [8, 6], method=method)
    expected = [contents(batch) for batch in whole.sample_many(seeds, epoch=0)]
    one_by_one = [whole.sample_many([ids], epoch=0, first_step=i) for i, ids in enumerate(seeds)]
    assert [contents(batch) for (batch,) in one_by_one] == expected
    predicted = whole.predict_bytes(seeds)
    stacks: list[int] = []
    for size in (3, 5, 9):
        step = predicted.peak_bytes(size + 1) - predicted.peak_bytes(size)
        budget = predicted.peak_bytes(size) + int(0.15 * size * step + 0.5 * step)
        bulk = BulkSampler(*graph, [8, 6], method=method, budget_bytes=budget)
        requests = [Request(seeds=ids, epoch=0, step=i) for i, ids in enumerate(seeds)]
        found = list(bulk.stacks(requests))
        assert [contents(batch) for stack in found for batch in stack] == expected
        stacks.append(max(map(len, found)))
    assert stacks == sorted(stacks)
    assert stacks[0] < stacks[-1] < len(seeds)


@pytest.mark.parametrize("method", METHODS)
def test_batches_do_not_depend_on_the_threads_that_sample(method: str) -> None:
    graph = skewed_graph()
    seeds = seed_batches(2000, [30] * 24)
    bulk = BulkSampler(*graph, [8, 6], method=method)

    def part(first: int) -> list[list[bytes | str]]:
        batches = bulk.sample_many(seeds[first : first + 3], epoch=0, first_step=first)
        return [contents(batch) for batch in batches]

    found = []
    for threads in (1, 2, 4):
        with ThreadPoolExecutor(threads) as pool:
            found.append(list(pool.map(part, range(0, 24, 3))))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_batches", [12, 40])
def test_peak_bytes_are_predicted_within_a_tenth(method: str, num_batches: int) -> None:
    graph = skewed_graph(20000, exponent=1.9)
    seeds = seed_batches(20000, [512] * num_batches)
    sizes = [10, 5] if method == "sage" else [300, 300]
    bulk = BulkSampler(*graph, sizes, method=method)
    # What the thread keeps is there before the measurement starts.
    predicted = bulk.predict_bytes(seeds).peak_bytes(num_batches) - bulk.scratch_bytes()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        batches = bulk.sample_many(seeds, epoch=3)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(batches) == num_batches
    assert predicted == pytest.approx(peak, rel=0.10)


def test_a_budget_holds_for_every_stack() -> None:
    graph = skewed_graph(20000, exponent=1.9)
    seeds = seed_batches(20000, [256] * 40)
    bulk = BulkSampler(*graph, [10, 5])
    budget = bulk.predict_bytes(seeds).peak_bytes(10)
    bulk = BulkSampler(*graph, [10, 5], budget_bytes=budget)
    requests = [Request(seeds=ids, epoch=0, step=i) for i, ids in enumerate(seeds)]
    bulk.predict_bytes(seeds)  # so that the thread's table and scratch are there
    table_bytes = bulk.scratch_bytes()
    sizes = []
    tracemalloc.start()
    try:
        stacks = bulk.stacks(requests)
        while True:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            stack = next(stacks, None)
            if stack is None:
                break
            sizes.append(len(stack))
            del stack
            assert tracemalloc.get_traced_memory()[1] - before + table_bytes <= budget
    finally:
        tracemalloc.stop()
    assert sum(sizes) == 40
    assert 7 <= max(sizes) <= 10


def test_a_budget_too_small_for_one_batch_is_refused_with_the_sum() -> None:
    bulk = BulkSampler(*skewed_graph(), [8, 6], budget_bytes=10_000)
    with pytest.raises(BudgetExceeded, match=r"fit 10000 bytes, found \d+ .* \+ \d+ .* = \d+"):
        bulk.sample_many(seed_batches(2000, [30]), epoch=0)


def first_layer(batch: MiniBatch, indices: NDArray[np.int32]) -> tuple[int, ...]:
    e_id = batch.blocks[-1].e_id
    assert e_id is not None
    return tuple(np.unique(indices[e_id]).tolist())


@pytest.mark.parametrize("norm", ["fro", "count2"])
def test_bulk_ladies_has_the_law_of_the_single_one_and_of_scipy(norm: str) -> None:
    # [M1]-[M4]'s graph and batch {1, 5}: four candidates, two drawn, six sets.
    pairs = [(0, 1), (0, 2), (1, 2), (1, 4), (2, 3), (3, 4), (4, 5), (3, 5)]
    dense = np.zeros((6, 6), dtype=int)
    for a, b in pairs:
        dense[a, b] = dense[b, a] = 1
    indptr = np.concatenate([[0], np.cumsum(dense.sum(1))]).astype(np.int64)
    indices = np.nonzero(dense)[1].astype(np.int32)
    trials = 2000
    seeds = [np.array([1, 5], dtype=np.int64)] * trials
    bulk = BulkSampler(indptr, indices, [2], method="ladies", norm=norm, edge_ids=True)
    single = LayerwiseSampler(indptr, indices, [2], norm=norm, edge_ids=True)
    reference = sample_layers_reference(
        adjacency(indptr, indices), [2], seeds, norm=norm, rng=np.random.default_rng(1)
    )
    found = [
        [first_layer(batch, indices) for batch in bulk.sample_many(seeds, epoch=0)],
        [first_layer(single.sample(seeds[0], epoch=0, step=i), indices) for i in range(trials)],
        [tuple(ids.tolist()) for ids in reference[0][0]],
    ]
    weights = np.array([1, 0, 1, 1, 2, 0]) ** (2 if norm == "count2" else 1)
    p = weights / weights.sum()
    law = {}
    for a in range(6):
        for b in range(a + 1, 6):
            if p[a] * p[b] > 0:
                law[a, b] = p[a] * p[b] / (1 - p[a]) + p[a] * p[b] / (1 - p[b])
    expected = np.array([trials * chance for chance in law.values()])
    for sets in found:
        assert set(sets) == set(law)
        observed = np.array([sets.count(key) for key in law])
        assert stats.chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "sag"}, "found 'sag'"),
        ({"sizes": [5, 0]}, "fan-out"),
        ({"sizes": []}, "fan-out"),
        ({"method": "ladies", "sizes": [5, -1]}, "size"),
        ({"method": "ladies", "sizes": [101]}, "between 1 and the graph's 100 nodes, found 101"),
        ({"method": "ladies", "dialect": Dialect.FIRST_SEEN}, "every_hop"),
        ({"replace": True}, "without replacement"),
        ({"edge_weight": np.ones(3)}, "found edge weights"),
        ({"method": "ladies", "edge_weight": np.ones(3)}, "one edge weight per stored edge"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict, message: str) -> None:
    sizes = settings.pop("sizes", [3])
    with pytest.raises(SamplerError, match=message):
        BulkSampler(*skewed_graph(100), sizes, **settings)


@pytest.mark.parametrize(
    ("seeds", "message"), [([0, 100], "found 100"), ([-1], "found -1"), ([4, 7, 4], "node 4 twice")]
)
def test_bad_seeds_in_any_batch_are_refused(seeds: list[int], message: str) -> None:
    bulk = BulkSampler(*skewed_graph(100), [3, 2])
    good = np.arange(20, dtype=np.int64)
    before = [contents(batch) for batch in bulk.sample_many([good, good], epoch=0)]
    with pytest.raises(SamplerError, match=message):
        bulk.sample_many([good, np.array(seeds, dtype=np.int64)], epoch=0)
    assert [contents(batch) for batch in bulk.sample_many([good, good], epoch=0)] == before
    assert bulk.sample_many([], epoch=0) == []
