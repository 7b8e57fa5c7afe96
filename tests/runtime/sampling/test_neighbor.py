"""The fast sampler equals its definition, edge for edge, and does not depend on who samples."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from gnnplan.planner.profile.analytic import neighbor_hotness, seed_probability
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.reference.neighbor import sample_reference

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]
DIALECTS = list(Dialect)
DENSE, HASHED = 1 << 30, 0


def random_graph(number: int) -> Graph:
    """A small multigraph with self-loops, isolated nodes, and degrees on both sides of 64."""
    rng = np.random.default_rng([20261121, number])
    num_nodes = int(rng.integers(2, 120))
    degrees = rng.integers(0, 12, num_nodes)
    degrees[rng.random(num_nodes) < 0.3] = 0
    degrees[rng.random(num_nodes) < 0.1] += int(rng.integers(40, 200))
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, num_nodes, int(indptr[-1]))
    return indptr, indices.astype(np.int32 if number % 2 else np.int64)


def random_settings(number: int) -> tuple[list[int], int]:
    rng = np.random.default_rng([7, number])
    choices = [-1, 1, 2, 3, 5, 10, 15, 63, 64, 65, 150]
    fanouts = [int(k) for k in rng.choice(choices, int(rng.integers(1, 4)))]
    return fanouts, int(rng.integers(0, 40))


def assert_equal_blocks(found: Block, expected: Block) -> None:
    assert (found.num_src, found.num_dst) == (expected.num_src, expected.num_dst)
    assert found.indptr.dtype == np.int64
    assert found.indices.dtype == np.int32
    np.testing.assert_array_equal(found.indptr, expected.indptr)
    np.testing.assert_array_equal(found.indices, expected.indices)
    if found.e_id is not None:
        np.testing.assert_array_equal(found.e_id, expected.e_id)


def assert_equal_batches(found: MiniBatch, expected: MiniBatch) -> None:
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    np.testing.assert_array_equal(found.seeds, expected.seeds)
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
    assert len(found.blocks) == len(expected.blocks)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        assert_equal_blocks(block, other)


@pytest.mark.parametrize("budget", [DENSE, HASHED])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_sampler_equals_the_reference_on_200_random_graphs(dialect: Dialect, budget: int) -> None:
    for number in range(200):
        indptr, indices = random_graph(number)
        fanouts, num_seeds = random_settings(number)
        num_nodes = len(indptr) - 1
        rng = np.random.default_rng([3, number])
        seeds = rng.permutation(num_nodes)[:num_seeds].astype(np.int64)
        settings = {"dialect": dialect, "seed": number}
        sampler = NeighborSampler(
            indptr, indices, fanouts, edge_ids=True, relabel_budget_bytes=budget, **settings
        )
        found = sampler.sample(seeds, epoch=number % 5, step=number % 3)
        expected = sample_reference(
            indptr, indices, fanouts, seeds, epoch=number % 5, step=number % 3, **settings
        )
        assert all(block.e_id is not None for block in found.blocks)
        assert_equal_batches(found, expected)


def shares(seeds: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]]:
    return [seeds[len(seeds) * r // ranks : len(seeds) * (r + 1) // ranks] for r in range(ranks)]


def sample_shares(dialect: Dialect, ranks: int) -> list[MiniBatch]:
    indptr, indices = rmat_like()
    sampler = NeighborSampler(indptr, indices, [5, 4, 3], dialect=dialect, seed=1, edge_ids=True)
    seeds = np.random.default_rng(2).permutation(len(indptr) - 1)[:60].astype(np.int64)
    return [sampler.sample(share, epoch=2, step=3) for share in shares(seeds, ranks)]


def rmat_like(num_nodes: int = 3000) -> Graph:
    """A graph with skewed degrees, so that seeds share many neighbours."""
    rng = np.random.default_rng(11)
    degrees = np.minimum(rng.zipf(1.6, num_nodes), 400)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    skewed = (num_nodes * rng.random(int(indptr[-1])) ** 3).astype(np.int32)
    return indptr, skewed


def edges_per_hop(batch: MiniBatch) -> list[dict[int, tuple[int, ...]]]:
    """For each hop (next to the seeds first): global destination -> its edges in order."""
    hops: list[dict[int, tuple[int, ...]]] = []
    for block in reversed(batch.blocks):
        assert block.e_id is not None
        # In first_seen a block holds the rows of the hops inside it first; its own come after.
        first = 0 if batch.dialect is Dialect.EVERY_HOP else sum(len(hop) for hop in hops)
        rows = range(first, block.num_dst)
        hops.append(
            {
                int(batch.n_id[row]): tuple(block.e_id[block.indptr[row] : block.indptr[row + 1]])
                for row in rows
            }
        )
    return hops


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_hop_draws_the_same_whatever_the_split_over_ranks(ranks: int) -> None:
    (whole,) = sample_shares(Dialect.EVERY_HOP, 1)
    parts = [edges_per_hop(batch) for batch in sample_shares(Dialect.EVERY_HOP, ranks)]
    for hop, rows in enumerate(edges_per_hop(whole)):
        union: dict[int, tuple[int, ...]] = {}
        for part in parts:
            assert all(union.get(node, edges) == edges for node, edges in part[hop].items())
            union |= part[hop]
        assert union == rows


@pytest.mark.parametrize("ranks", [2, 4])
def test_first_seen_draws_the_same_for_an_equal_hop_and_node(ranks: int) -> None:
    (whole,) = sample_shares(Dialect.FIRST_SEEN, 1)
    expected = edges_per_hop(whole)
    compared = 0
    for batch in sample_shares(Dialect.FIRST_SEEN, ranks):
        for hop, rows in enumerate(edges_per_hop(batch)):
            for node in rows.keys() & expected[hop].keys():
                assert rows[node] == expected[hop][node]
                compared += 1
    assert compared > 100


def as_bytes(batch: MiniBatch) -> bytes:
    arrays = [batch.n_id, *(a for b in batch.blocks for a in (b.indptr, b.indices))]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


@pytest.mark.parametrize("budget", [DENSE, HASHED])
def test_batches_are_byte_identical_for_1_2_and_4_threads(budget: int) -> None:
    indptr, indices = rmat_like()
    seeds = np.random.default_rng(5).permutation(len(indptr) - 1).astype(np.int64)
    found: list[list[bytes]] = []
    for threads in (1, 2, 4):
        sampler = NeighborSampler(indptr, indices, [10, 5], relabel_budget_bytes=budget)

        def one(step: int, sampler: NeighborSampler = sampler) -> bytes:
            return as_bytes(sampler.sample(seeds[50 * step : 50 * step + 50], epoch=0, step=step))

        with ThreadPoolExecutor(threads) as pool:
            found.append(list(pool.map(one, range(40))))
    assert found[0] == found[1] == found[2]


def test_a_returned_batch_is_not_overwritten_by_later_ones() -> None:
    indptr, indices = rmat_like()
    sampler = NeighborSampler(indptr, indices, [10, 5])
    seeds = np.arange(500, dtype=np.int64)
    batch = sampler.sample(seeds, epoch=0, step=0)
    before = as_bytes(batch)
    for step in range(1, 5):
        sampler.sample(seeds[::-1].copy(), epoch=0, step=step)
    assert as_bytes(batch) == before


@pytest.mark.parametrize("dialect", DIALECTS)
def test_first_seen_blocks_share_one_csr_and_every_hop_blocks_do_not(dialect: Dialect) -> None:
    indptr, indices = rmat_like()
    sampler = NeighborSampler(indptr, indices, [4, 3, 2], dialect=dialect)
    batch = sampler.sample(np.arange(50, dtype=np.int64), epoch=0, step=0)
    outer = batch.blocks[0]
    shared = [np.shares_memory(outer.indices, block.indices) for block in batch.blocks[1:]]
    assert shared == [dialect is Dialect.FIRST_SEEN] * 2
    for block, inner in zip(batch.blocks, batch.blocks[1:], strict=False):
        assert block.num_dst == inner.num_src
    assert outer.num_src == len(batch.n_id)
    assert batch.blocks[-1].num_dst == 50


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("budget", [DENSE, HASHED])
def test_an_empty_seed_list_gives_an_empty_batch_with_all_blocks(
    dialect: Dialect, budget: int
) -> None:
    indptr, indices = rmat_like(100)
    sampler = NeighborSampler(
        indptr, indices, [3, 2], dialect=dialect, edge_ids=True, relabel_budget_bytes=budget
    )
    batch = sampler.sample(np.zeros(0, dtype=np.int64), epoch=0, step=0, global_num_seeds=8)
    assert [(b.num_src, b.num_dst, b.num_edges) for b in batch.blocks] == [(0, 0, 0)] * 2
    assert [b.indptr.tolist() for b in batch.blocks] == [[0], [0]]
    assert (len(batch.n_id), batch.num_seeds, batch.global_num_seeds) == (0, 0, 8)


@pytest.mark.parametrize(("degree", "fanout"), [(7, 3), (64, 5), (65, 5), (200, 70), (20, 19)])
def test_every_neighbour_and_every_pair_is_drawn_equally_often(degree: int, fanout: int) -> None:
    # Fan-outs and degrees on all three paths of the selection (one word, filter, hash set).
    trials = 4000
    indptr = np.array([0, degree, *[degree] * degree], dtype=np.int64)
    indices = np.arange(1, degree + 1, dtype=np.int32)
    sampler = NeighborSampler(indptr, indices, [fanout], edge_ids=True, seed=9)
    seed = np.zeros(1, dtype=np.int64)
    taken = np.zeros((trials, degree))
    for step in range(trials):
        e_id = sampler.sample(seed, epoch=0, step=step).blocks[0].e_id
        assert e_id is not None
        taken[step, e_id] = 1
    assert (taken.sum(axis=1) == fanout).all()
    # One coordinate is 1 with probability pi = k/d; the coordinates have covariance
    # -pi(1-pi)/(d-1), so sum z^2 (d-1)/d is chi-square with d-1 degrees of freedom.
    pi = fanout / degree
    z = (taken.sum(axis=0) - trials * pi) / np.sqrt(trials * pi * (1 - pi))
    assert stats.chi2.sf((z**2).sum() * (degree - 1) / degree, degree - 1) > 1e-4
    pair = pi * (fanout - 1) / (degree - 1)
    both = (taken[:, :-1] * taken[:, 1:]).sum(axis=0)
    assert np.abs(both - trials * pair).max() < 5 * np.sqrt(trials * pair * (1 - pair))


def test_a_vertex_that_both_seeds_list_is_in_every_batch_of_one() -> None:
    # [C5] vertices 0 and 1 train and list u = 2 alone: P(u) = 1, where independent seeds give .75.
    indptr, indices = np.array([0, 1, 2, 2]), np.array([2, 2])
    sampler = NeighborSampler(indptr, indices, [1])
    batches = [sampler.sample(np.array([seed]), epoch=0, step=seed) for seed in (0, 1)]
    assert [batch.n_id.tolist() for batch in batches] == [[0, 2], [1, 2]]
    p0 = seed_probability(2, 1)
    found = neighbor_hotness(indptr, indices, np.array([p0, p0, 0.0]), [1], dialect="first_seen")
    assert found[2] == pytest.approx(0.75)


@pytest.mark.parametrize("fanouts", [[], [0], [5, -2]])
def test_unusable_fanouts_are_refused(fanouts: list[int]) -> None:
    with pytest.raises(SamplerError, match="fan-out") as caught:
        NeighborSampler(*rmat_like(100), fanouts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("budget", [DENSE, HASHED])
@pytest.mark.parametrize(
    ("seeds", "message"),
    [([0, 100], "between 0 and 99, found 100"), ([-1], "found -1"), ([4, 7, 4], "node 4 twice")],
)
def test_bad_seeds_are_refused_and_leave_the_sampler_usable(
    seeds: list[int], message: str, budget: int
) -> None:
    sampler = NeighborSampler(*rmat_like(100), [3, 2], relabel_budget_bytes=budget)
    good = np.arange(20, dtype=np.int64)
    before = as_bytes(sampler.sample(good, epoch=0, step=0))
    with pytest.raises(SamplerError, match=message):
        sampler.sample(np.array(seeds, dtype=np.int64), epoch=0, step=0)
    assert as_bytes(sampler.sample(good, epoch=0, step=0)) == before


@pytest.mark.parametrize("wrong", ["indptr type", "indices type", "lengths"])
def test_arrays_that_are_no_graph_are_refused(wrong: str) -> None:
    indptr, indices = rmat_like(100)
    if wrong == "indptr type":
        indptr = indptr.astype(np.int32)
    elif wrong == "indices type":
        indices = indices.astype(np.uint8)
    else:
        indices = indices[:-1]
    with pytest.raises(SamplerError, match="expected"):
        NeighborSampler(indptr, indices, [3])


@pytest.mark.parametrize("budget", [DENSE, HASHED])
def test_table_entries_that_run_out_start_over_with_a_clean_table(budget: int) -> None:
    sampler = NeighborSampler(*rmat_like(100), [3, 2], relabel_budget_bytes=budget)
    seeds = np.arange(20, dtype=np.int64)
    first = as_bytes(sampler.sample(seeds, epoch=0, step=0))
    sampler.sample(seeds[::-1].copy(), epoch=0, step=0)
    sampler._workspace().table.stamp[0] = (1 << 32) - 250
    assert [as_bytes(sampler.sample(seeds, epoch=0, step=0)) for _ in range(5)] == [first] * 5
    assert sampler._workspace().table.stamp[0] < 1000


def test_hashed_table_stays_near_the_size_of_the_batch() -> None:
    num_nodes = 1_000_000
    indptr = np.arange(num_nodes + 1, dtype=np.int64)
    indices = ((np.arange(num_nodes) + 1) % num_nodes).astype(np.int32)
    sampler = NeighborSampler(indptr, indices, [2, 2], relabel_budget_bytes=HASHED)
    batch = sampler.sample(np.arange(0, 1000, 5, dtype=np.int64), epoch=0, step=0)
    assert len(batch.n_id) == 600
    assert sampler._workspace().nbytes < 100_000
