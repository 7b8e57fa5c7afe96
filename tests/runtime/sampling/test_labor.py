"""LABOR sampling against its formulas: worked examples, exact laws, z-tests with fixed seeds."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.errors import SamplerError
from runtime.sampling.dependent import StreamPolicy
from runtime.sampling.labor import Form, LaborSampler
from runtime.sampling.labor_candidates import Candidates
from runtime.sampling.labor_solve import LaborSolver
from runtime.sampling.minibatch import Dialect, MiniBatch
from runtime.sampling.neighbor import NeighborSampler
from runtime.sampling.poisson import offer, row_scale, row_scale_weighted
from runtime.sampling.reference_labor import Row, draw_row, weigh
from runtime.sampling.statistics import Estimator

Graph = tuple[NDArray[np.int64], NDArray[np.int32]]
PLAIN, HT, HAJEK = Estimator
Z = 4.5
"""Standard errors allowed; the seeds are fixed, so nothing here is flaky."""


def graph_of(rows: dict[int, list[int]], num_nodes: int) -> Graph:
    lists = [rows.get(v, []) for v in range(num_nodes)]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in lists])]).astype(np.int64)
    return indptr, np.array([t for row in lists for t in row], dtype=np.int32)


# [R1] N(s1) = {a, b, c, d}, N(s2) = {a, b}: nodes 0, 1 and 2 .. 5.
TWO_SEEDS = graph_of({0: [2, 3, 4, 5], 1: [2, 3]}, 6)
# [C24] its six vertices.
SIX = graph_of({0: [2, 3, 5], 1: [2, 3, 5], 2: [3, 4], 3: [0, 1, 4], 4: [0, 1, 3], 5: [3]}, 6)
# [R7] seven vertices.
SEVEN = graph_of({0: [1, 2, 3], 1: [0, 2], 2: [0, 1, 4, 5], 3: [0, 6], 4: [2], 5: [2, 6], 6: [3, 5]}, 7)  # fmt: skip  # noqa: E501


class Solved:
    """Scales and probabilities of one hop, as the sampler solves them."""

    def __init__(
        self,
        graph: Graph,
        seeds: list[int],
        fanout: int,
        variant: int | str,
        *,
        tolerance: float = 1e-4,
        weight: NDArray | None = None,
    ) -> None:
        indptr, indices = graph
        nodes = np.array(seeds, dtype=np.int64)
        c = Candidates(len(indptr) - 1, indices.dtype, dense=True)
        streams = StreamPolicy().streams(0, 0, 1)
        c.collect(indptr, indices, nodes, 0, len(nodes), streams, 0)
        solver = LaborSolver(variant, tolerance, weight)
        self.expected, self.passes = solver.solve(c, indptr[nodes], fanout)
        self.rows = [c.numbers[c.row_ptr[i] : c.row_ptr[i + 1]] for i in range(len(nodes))]
        self.scale, self.pi = c.scale[: len(nodes)], c.pi
        self.ids = c._space.node_ids[: c.count]

    def chances(self, row: int) -> NDArray[np.float64]:
        return np.minimum(1, self.scale[row] * self.pi[self.rows[row]])


@pytest.mark.parametrize(
    ("variant", "expected"),
    # [R1] LABOR-0 1.5, LABOR-1 1.375, LABOR-2 1.34375, LABOR-* 4/3 (neighbour sampling: 1.75).
    [(0, 1.5), (1, 1.375), (2, 1.34375), ("star", 4 / 3)],
)
def test_expected_vertices_of_the_worked_example(variant: int | str, expected: float) -> None:
    found = Solved(TWO_SEEDS, [0, 1], 1, variant, tolerance=1e-12)
    assert found.expected == pytest.approx(expected, abs=1e-9)


def test_probabilities_and_variance_of_the_worked_example() -> None:
    # [R1] LABOR-1: pi = .5, .5, .25, .25 and c = .75, 1; LABOR-*: pi_c = pi_d = 1/6, c = 1.
    one = Solved(TWO_SEEDS, [0, 1], 1, 1)
    np.testing.assert_allclose(one.pi[one.rows[0]], [0.5, 0.5, 0.25, 0.25])
    np.testing.assert_allclose(one.scale, [0.75, 1])
    star = Solved(TWO_SEEDS, [0, 1], 1, "star", tolerance=1e-12)
    np.testing.assert_allclose(star.chances(0), [0.5, 0.5, 1 / 6, 1 / 6], rtol=1e-5)
    np.testing.assert_allclose(star.scale, [1, 1], rtol=1e-5)
    # The variance of s1 is that of neighbour sampling, 1/k - 1/d = .75.
    assert sum(1 / star.chances(0)) / 16 - 1 / 4 == pytest.approx(0.75)


def test_labor_star_is_a_stationary_point_not_the_minimiser() -> None:
    # [C18] N(s1) = {a, b}, N(s2) = {a, c}, k = 1: 1.5 for both, the optimum is 1.4571.
    graph = graph_of({0: [2, 3], 1: [2, 4]}, 5)
    assert Solved(graph, [0, 1], 1, 0).expected == pytest.approx(1.5)
    assert Solved(graph, [0, 1], 1, "star", tolerance=1e-12).expected == pytest.approx(1.5)


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (100, 10), (100, 99), (40, 39), (7, 1)])
def test_closed_form_of_a_rows_scale(degree: int, fanout: int) -> None:
    # [C18] the sizes of the check; 100 draws of pi each.
    rng = np.random.default_rng(0)
    for _ in range(100):
        pi = rng.uniform(0.05, 1, degree)
        scale = row_scale(1 / pi, degree, degree * degree / fanout)
        assert (1 / np.minimum(1, scale * pi)).sum() == pytest.approx(degree**2 / fanout, rel=1e-9)


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (40, 39), (100, 10)])
def test_closed_form_of_a_weighted_rows_scale(degree: int, fanout: int) -> None:
    # [R12] sum A^2 / min(1, c pi) = a^2/k - a^2/d + sum A^2; A = 1 gives d^2/k.
    rng = np.random.default_rng(12)
    for _ in range(100):
        weight, pi = rng.uniform(0.2, 2, degree), rng.uniform(0.05, 1, degree)
        excess = weight.sum() ** 2 * (1 / fanout - 1 / degree)
        scale = row_scale_weighted(1 / pi, weight**2, degree, excess)
        found = (weight**2 / np.minimum(1, scale * pi)).sum()
        assert found == pytest.approx(excess + (weight**2).sum(), rel=1e-9)
        plain = row_scale_weighted(1 / pi, np.ones(degree), degree, degree**2 / fanout - degree)
        assert plain == pytest.approx(row_scale(1 / pi, degree, degree**2 / fanout))


def test_fanout_equal_to_the_degree_takes_every_weighted_edge() -> None:
    # [R12] A = (.5, 2, 1), k = d = 3: the target is sum A^2, so every pi is 1.
    graph = graph_of({0: [1, 2, 3]}, 4)
    weight = np.array([0.5, 2, 1], dtype=np.float32)
    for variant, form in itertools.product((0, 1, "star"), Form):
        sampler = LaborSampler(*graph, [3], variant=variant, form=form, edge_weight=weight)
        block = sampler.sample(np.zeros(1, dtype=np.int64), epoch=0, step=0).blocks[0]
        assert block.weight is not None
        np.testing.assert_allclose(block.weight, weight / 3.5, rtol=1e-6)


def random_graph(number: int) -> tuple[Graph, list[int]]:
    rng = np.random.default_rng([150, number])
    num_nodes, num_seeds = int(rng.integers(8, 40)), int(rng.integers(2, 8))
    rows = {
        s: rng.choice(num_nodes, int(rng.integers(1, num_nodes // 2 + 2)), replace=False).tolist()
        for s in range(num_seeds)
    }
    return graph_of(rows, num_nodes), list(range(num_seeds))


def test_passes_never_raise_the_expected_vertices_and_keep_every_rows_variance() -> None:
    for number in range(60):
        graph, seeds = random_graph(number)
        fanout = 1 + number % 4
        before = math.inf
        for variant in (0, 1, 2, 3, 20):
            found = Solved(graph, seeds, fanout, variant)
            assert found.expected <= before + 1e-9
            before = found.expected
            for row, numbers in enumerate(found.rows):
                d = len(numbers)
                total = (1 / found.chances(row)).sum()
                assert total == pytest.approx(d**2 / min(fanout, d), rel=1e-9)


def test_at_the_fixed_point_unsaturated_vertices_have_a_highest_scale_of_one() -> None:
    for number in range(40):
        graph, seeds = random_graph(number)
        found = Solved(graph, seeds, 2, 2000)
        for t in set(np.concatenate(found.rows).tolist()):
            scales = [found.scale[s] for s, row in enumerate(found.rows) if t in row]
            if max(scales) * found.pi[t] < 1 - 1e-3:
                assert max(scales) == pytest.approx(1, abs=2e-3)


def mean_vertices(graph: Graph, fanout: int, variant: int) -> NDArray[np.float64]:
    """E|S^1| by batch size, over all batches of that size."""
    nodes = range(len(graph[0]) - 1)
    return np.array(
        [
            np.mean(
                [
                    size + Solved(graph, list(batch), fanout, variant).expected
                    for batch in itertools.combinations(nodes, size)
                ]
            )
            for size in range(1, len(nodes) + 1)
        ]
    )


def test_labor_with_passes_is_not_concave_in_the_batch_size_and_labor_0_is() -> None:
    # [C24] 5 passes, k = 2.
    found = mean_vertices(SIX, 2, 5)
    np.testing.assert_allclose(found, [2.8333, 4.1810, 4.9786, 5.4318, 5.7143, 6], atol=6e-5)
    assert found[5] - found[4] > found[4] - found[3] + 0.002
    assert (np.diff(found / np.arange(1, 7)) <= 1e-9).all()
    assert (np.diff(mean_vertices(SIX, 2, 0), 2) <= 1e-9).all()


@pytest.mark.parametrize("layer_dependent", [False, True])
@pytest.mark.parametrize("name", ["labor-0", "exact-k", "neighbor"])
def test_work_is_concave_and_monotone_in_the_batch_size(name: str, layer_dependent: bool) -> None:
    # 5.7 and [R7]: for fixed draws |S^2| over all batches of every size.
    sampler: LaborSampler | NeighborSampler
    if name == "neighbor":
        sampler = NeighborSampler(*SEVEN, [1, 1], dialect=Dialect.EVERY_HOP, seed=3)
    else:
        form = Form.POISSON if name == "labor-0" else Form.EXACT_K
        sampler = LaborSampler(*SEVEN, [1, 1], form=form, layer_dependent=layer_dependent, seed=3)
    for step in range(8):
        work = [0.0]
        for size in range(1, 8):
            batches = [
                sampler.sample(np.array(batch, dtype=np.int64), epoch=0, step=step)
                for batch in itertools.combinations(range(7), size)
            ]
            work.append(float(np.mean([len(batch.n_id) for batch in batches])))
        per_seed = np.array(work[1:]) / np.arange(1, 8)
        assert (np.diff(per_seed) <= 1e-12).all()
        assert (np.diff(work, 2) <= 1e-12).all()


def row_of(weights: list[float], scale: float = 1.0) -> Row:
    places = list(range(len(weights)))
    return Row(node=9, edges=places, targets=places, weights=weights, scale=scale)


def test_weighted_estimates_are_unbiased_by_enumeration() -> None:
    # [R2] M = 1, -1, 2, -2 with pi = .5, .5, .25, .25: mean 0, variance (1/d^2) sum M^2 (1/pi - 1).
    values, pi = np.array([1.0, -1, 2, -2]), np.array([0.5, 0.5, 0.25, 0.25])
    mean = second = empty = hajek = 0.0
    for kept in itertools.product((False, True), repeat=4):
        probability = float(np.prod(np.where(kept, pi, 1 - pi)))
        places = [i for i in range(4) if kept[i]]
        chances = pi[places].tolist()
        total = np.dot(weigh(row_of([1.0] * 4), places, chances, HT), values[places])
        mean, second = mean + probability * total, second + probability * total**2
        weights = weigh(row_of([1.0] * 4), places, chances, HAJEK)
        hajek += probability * sum(weights)
        empty += probability * (not places)
    assert mean == pytest.approx(0)
    assert second == pytest.approx((values**2 * (1 / pi - 1)).sum() / 16)
    # Hajek weights sum to 1, or to 0 where nothing was drawn.
    assert hajek == pytest.approx(1 - empty)


def test_order_sampling_keeps_the_smallest_ratios() -> None:
    # [R4] r = .7, .2, .4, .9 and k = 2 give {b, c}; with pi = .9, .1, .4, .9 the order is a c d b.
    words = dict(enumerate(int(r * 2**64) for r in (0.7, 0.2, 0.4, 0.9)))
    assert draw_row(row_of([1.0] * 4), words, None, 2, "exact_k")[0] == [1, 2]
    pi = {0: 0.9, 1: 0.1, 2: 0.4, 3: 0.9}
    kept = [set(draw_row(row_of([1.0] * 4), words, pi, k, "exact_k")[0]) for k in (1, 2, 3)]
    assert kept == [{0}, {0, 2}, {0, 2, 3}]


def test_the_heap_keeps_the_smallest_keys_and_the_first_among_equals() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        keys = rng.integers(0, 12, int(rng.integers(1, 60))).astype(np.uint64)
        size = int(rng.integers(1, len(keys) + 1))
        heap, places = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=np.int64)
        count = 0
        for place, key in enumerate(keys):
            count = offer(heap, places, count, key, place)
        assert count == size
        order = sorted(range(len(keys)), key=lambda i: (keys[i], i))[:size]
        assert sorted(places.tolist()) == sorted(order)
        assert (heap[0], places[0]) == (keys[order[-1]], order[-1])


def copies(rows: dict[int, list[int]], size: int, count: int) -> Graph:
    """Many disjoint copies of a graph: one batch gives independent trials."""
    return graph_of(
        {
            v + size * i: [t + size * i for t in row]
            for i in range(count)
            for v, row in rows.items()
        },
        size * count,
    )


def stars(degree: int, count: int) -> tuple[Graph, NDArray[np.int64]]:
    """Copies of one row, and the seeds that own the rows."""
    graph = copies({0: list(range(1, degree + 1))}, degree + 1, count)
    return graph, np.arange(0, (degree + 1) * count, degree + 1, dtype=np.int64)


def drawn(sampler: LaborSampler, seeds: list[int], steps: int) -> list[MiniBatch]:
    nodes = np.array(seeds, dtype=np.int64)
    return [sampler.sample(nodes, epoch=0, step=step) for step in range(steps)]


def edges_of(batch: MiniBatch) -> NDArray[np.int64]:
    assert batch.blocks[0].e_id is not None
    return batch.blocks[0].e_id


def test_an_empty_row_is_as_likely_as_the_formula_says() -> None:
    # 5.2: (1 - k/d)^d = .316 for four neighbours and k = 1.
    graph, seeds = stars(4, 20_000)
    block = LaborSampler(*graph, [1], seed=1).sample(seeds, epoch=0, step=0).blocks[0]
    empty, p = float((np.diff(block.indptr) == 0).mean()), 0.75**4
    assert p == pytest.approx(0.316, abs=5e-4)
    assert empty == pytest.approx(p, abs=Z * math.sqrt(p * (1 - p) / 20_000))


@pytest.mark.parametrize(("degree", "fanout"), [(7, 3), (16, 5), (37, 10), (200, 3)])
@pytest.mark.parametrize("form", list(Form))
def test_every_edge_is_drawn_with_probability_k_over_d(
    form: Form, degree: int, fanout: int
) -> None:
    trials, pi = 3000, fanout / degree
    graph, seeds = stars(degree, trials)
    sampler = LaborSampler(*graph, [fanout], form=form, seed=2, edge_ids=True)
    batch = sampler.sample(seeds, epoch=0, step=0)
    counts = np.bincount(edges_of(batch) % degree, minlength=degree)
    sizes = np.diff(batch.blocks[0].indptr)
    assert np.abs(counts - trials * pi).max() < Z * math.sqrt(trials * pi * (1 - pi))
    if form is Form.EXACT_K:
        assert (sizes == fanout).all()
    else:
        # A sum of independent indicators: variance d pi (1 - pi).
        variance = degree * pi * (1 - pi)
        assert sizes.mean() == pytest.approx(fanout, abs=Z * math.sqrt(variance / trials))
        assert sizes.var() == pytest.approx(variance, rel=0.15)


def test_uniform_exact_k_draws_every_subset_equally_often() -> None:
    # [R3] then the mean of k of d has variance 1/k - 1/d = .3 for unit variances, k = 2, d = 5.
    graph, seeds = stars(5, 4000)
    sampler = LaborSampler(*graph, [2], form=Form.EXACT_K, seed=5, edge_ids=True)
    pairs = (edges_of(sampler.sample(seeds, epoch=0, step=0)) % 5).reshape(-1, 2)
    subsets = list(itertools.combinations(range(5), 2))
    counts = [(pairs == subset).all(axis=1).sum() for subset in subsets]
    assert sum(counts) == 4000
    assert max(abs(count - 400) for count in counts) < Z * math.sqrt(4000 * 0.1 * 0.9)
    means = np.array([[0.5 if t in subset else 0.0 for t in range(5)] for subset in subsets])
    assert ((means - 0.2) ** 2).sum(axis=1).mean() == pytest.approx(1 / 2 - 1 / 5)


@pytest.mark.parametrize(("seeds", "hit"), [([0], 0.25), ([1], 0.5), ([0, 1], 0.5)])
def test_a_shared_vertex_is_hit_as_often_as_its_likeliest_row_says(
    seeds: list[int], hit: float
) -> None:
    # [S5] degrees 4 and 2, k = 1: given both seeds u is hit with max(1/4, 1/2), not 5/8.
    graph = copies({0: [2, 3, 4, 5], 1: [2, 6]}, 7, 10_000)
    nodes = (np.array(seeds)[:, None] + 7 * np.arange(10_000)).ravel()
    batch = LaborSampler(*graph, [1]).sample(nodes, epoch=0, step=0)
    found = float((batch.n_id % 7 == 2).mean() * len(batch.n_id) / 10_000)
    assert found == pytest.approx(hit, abs=Z * math.sqrt(hit * (1 - hit) / 10_000))


def test_hit_probability_of_independent_seeds() -> None:
    # [S5] seeds with P = (.5, .25): LABOR-0 .21875, neighbour sampling .234375.
    hits = {(0,): 0.25, (1,): 0.5, (0, 1): 0.5}
    law = {(0,): 0.5 * 0.75, (1,): 0.5 * 0.25, (0, 1): 0.5 * 0.25}
    assert sum(law[seeds] * hits[seeds] for seeds in law) == pytest.approx(0.21875)
    apart = law[0, 1] * (1 - 0.75 * 0.5) + law[0,] * 0.25 + law[1,] * 0.5
    assert apart == pytest.approx(0.234375)


def skewed_graph(num_nodes: int = 300) -> Graph:
    rng = np.random.default_rng(21)
    degrees = np.minimum(rng.zipf(1.5, num_nodes) + 2, 80)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    rows = [(num_nodes * rng.random(d) ** 2).astype(np.int32) for d in degrees]
    return indptr, np.concatenate(rows)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("variant", [0, 1, "star"])
def test_horvitz_thompson_weights_are_unbiased_with_the_variance_of_the_formula(
    variant: int | str, weighted: bool
) -> None:
    indptr, indices = skewed_graph()
    rng = np.random.default_rng(22)
    x = rng.normal(size=300)
    weight = rng.uniform(0.1, 2, len(indices)) if weighted else np.ones(len(indices))
    sampler = LaborSampler(
        indptr,
        indices,
        [4],
        variant=variant,
        estimator=HT,
        seed=6,
        edge_weight=weight if weighted else None,
    )
    steps, seeds = 250, list(range(60))
    estimates = np.zeros((steps, 60))
    for step, batch in enumerate(drawn(sampler, seeds, steps)):
        block = batch.blocks[0]
        assert block.weight is not None
        terms = block.weight * x[batch.n_id[block.indices]]
        rows = np.repeat(np.arange(60), np.diff(block.indptr))
        estimates[step] = np.bincount(rows, terms, minlength=60)
    spans = [slice(indptr[s], indptr[s + 1]) for s in seeds]
    exact = np.array([np.average(x[indices[s]], weights=weight[s]) for s in spans])
    error = estimates.std(axis=0, ddof=1) / math.sqrt(steps)
    assert (np.abs(estimates.mean(axis=0) - exact) <= Z * error + 1e-6).all()
    # With messages of unit variance: sum A^2 / pi / a^2 - sum A^2 / a^2 = 1/k - 1/d [R1], [R12].
    d = np.diff(indptr)[:60]
    found = (estimates.var(axis=0).sum()) / (1 / np.minimum(4, d) - 1 / d).sum()
    assert 0.5 < found < 2


@pytest.mark.parametrize("form", list(Form))
def test_hajek_weights_of_a_row_sum_to_one(form: Form) -> None:
    weight = np.random.default_rng(3).uniform(0, 2, len(skewed_graph()[1]))
    for variant, given in itertools.product((0, 2), (None, weight)):
        sampler = LaborSampler(
            *skewed_graph(), [3, 2], variant=variant, form=form, edge_weight=given
        )
        for block in drawn(sampler, list(range(40)), 1)[0].blocks:
            assert block.weight is not None
            rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
            sums = np.bincount(rows, block.weight, minlength=block.num_dst)
            np.testing.assert_allclose(sums[np.diff(block.indptr) > 0], 1, rtol=1e-5)


def test_uniform_labor_0_weights_are_the_plain_mean_of_what_was_drawn() -> None:
    plain, hajek = (
        drawn(LaborSampler(*skewed_graph(), [5], estimator=e), list(range(50)), 1)[0].blocks[0]
        for e in (PLAIN, HAJEK)
    )
    assert plain.weight is None
    assert hajek.weight is not None
    counts = np.diff(hajek.indptr)
    np.testing.assert_allclose(hajek.weight, 1 / np.repeat(counts, counts), rtol=1e-6)


def test_zero_weights_are_never_drawn() -> None:
    indptr, indices = skewed_graph()
    weight = np.random.default_rng(1).integers(0, 2, len(indices)).astype(np.float32)
    for variant, form in itertools.product((0, 1, "star"), Form):
        sampler = LaborSampler(
            indptr, indices, [4, 3], variant=variant, form=form, edge_weight=weight, edge_ids=True
        )
        for block in drawn(sampler, list(range(60)), 1)[0].blocks:
            assert block.num_edges > 50
            assert (weight[block.e_id] == 1).all()


def as_bytes(batch: MiniBatch) -> bytes:
    arrays = [batch.n_id, *(a for b in batch.blocks for a in (b.indptr, b.indices, b.weight))]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


@pytest.mark.parametrize(
    "settings",
    [{}, {"form": "exact_k"}, {"variant": "star"}, {"kappa": 8}, {"relabel_budget_bytes": 0}],
)
def test_batches_are_byte_identical_for_1_2_and_4_threads(settings: dict[str, Any]) -> None:
    order = np.random.default_rng(5).permutation(300).astype(np.int64)
    found: list[list[bytes]] = []
    for threads in (1, 2, 4):
        sampler = LaborSampler(*skewed_graph(), [5, 3], **settings)

        def one(step: int, sampler: LaborSampler = sampler) -> bytes:
            return as_bytes(sampler.sample(order[step : step + 30], epoch=0, step=step))

        with ThreadPoolExecutor(threads) as pool:
            found.append(list(pool.map(one, range(30))))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", list(Form))
def test_labor_0_draws_the_same_rows_whatever_the_split_over_ranks(form: Form, ranks: int) -> None:
    sampler = LaborSampler(*skewed_graph(), [5, 3], form=form, edge_ids=True, seed=9)
    seeds = np.random.default_rng(2).permutation(300)[:64].astype(np.int64)

    def rows(part: NDArray[np.int64]) -> list[dict[int, tuple[int, ...]]]:
        batch = sampler.sample(part, epoch=1, step=2)
        return [
            {
                int(batch.n_id[i]): tuple(block.e_id[block.indptr[i] : block.indptr[i + 1]])
                for i in range(block.num_dst)
                if block.e_id is not None
            }
            for block in batch.blocks
        ]

    union: list[dict[int, tuple[int, ...]]] = [{}, {}]
    for part in np.split(seeds, ranks):
        for hop, found in enumerate(rows(part)):
            assert all(union[hop].get(node, edges) == edges for node, edges in found.items())
            union[hop] |= found
    assert union == rows(seeds)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("variant", [0, "star"])
def test_an_empty_seed_list_gives_an_empty_batch(variant: int | str, dialect: Dialect) -> None:
    sampler = LaborSampler(*skewed_graph(), [3, 2], variant=variant, dialect=dialect)
    batch = drawn(sampler, [], 1)[0]
    assert [(b.num_src, b.num_dst, b.num_edges) for b in batch.blocks] == [(0, 0, 0)] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fanouts": [0]}, "fan-out"),
        ({"fanouts": [3, -2]}, "fan-out"),
        ({"fanouts": []}, "fan-out"),
        ({"variant": -1}, "variant"),
        ({"variant": "all"}, "variant"),
        ({"form": "exact"}, "form"),
        ({"edge_weight": np.array([1.0, -1, 1, 1, 1, 1])}, "found -1.0 at edge 1"),
        ({"edge_weight": np.array([1.0, 1, np.nan, 1, 1, 1])}, "found nan at edge 2"),
        ({"edge_weight": np.ones(5)}, r"\[6\]"),
        ({"edge_weight": np.ones(6, dtype=np.float16)}, "float32 or float64"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    fanouts = settings.pop("fanouts", [1])
    with pytest.raises(SamplerError, match=message) as caught:
        LaborSampler(*TWO_SEEDS, fanouts, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("seeds", "message"), [([0, 300], "found 300"), ([-1], "found -1"), ([4, 4], "node 4 twice")]
)
def test_bad_seeds_are_refused_and_leave_the_sampler_usable(seeds: list[int], message: str) -> None:
    sampler = LaborSampler(*skewed_graph(), [3, 2], variant=1)
    before = as_bytes(drawn(sampler, [1, 2, 3], 1)[0])
    with pytest.raises(SamplerError, match=message):
        drawn(sampler, seeds, 1)
    assert as_bytes(drawn(sampler, [1, 2, 3], 1)[0]) == before
