"""LABOR's probabilities against the formulas: worked examples, variance, concavity."""

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.sampling.choose.labor import Candidates, LaborSolver
from gnnplan.runtime.sampling.choose.poisson import row_scale, row_scale_weighted
from gnnplan.runtime.sampling.dependent import StreamPolicy
from gnnplan.runtime.sampling.labor import Form, LaborSampler
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.support.labor import Graph, graph_of

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

    def chances(self, row: int) -> NDArray[np.floating]:
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


def mean_vertices(graph: Graph, fanout: int, variant: int) -> NDArray[np.floating]:
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


@pytest.mark.parametrize(
    ("name", "layer_dependent"),
    [
        ("labor-0", False),
        ("labor-0", True),
        ("exact-k", False),
        ("exact-k", True),
        ("neighbor", False),
    ],
)
def test_work_is_concave_and_monotone_in_the_batch_size(name: str, layer_dependent: bool) -> None:
    # 5.7 and [R7]: for fixed draws |S^2| over all batches of every size.
    sampler: LaborSampler | NeighborSampler
    if name == "neighbor":
        sampler = NeighborSampler(*SEVEN, [1, 1], dialect=Dialect.EVERY_HOP, seed=3)
    else:
        form = Form.POISSON if name == "labor-0" else Form.EXACT_K
        sampler = LaborSampler(*SEVEN, [1, 1], form=form, layer_dependent=layer_dependent, seed=3)
    for step in range(6):
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
