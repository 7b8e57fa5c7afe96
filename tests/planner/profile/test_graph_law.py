"""Batches by a law of degrees against batches that are drawn from it, node by node."""

import numpy as np
import pytest

from gnnplan.planner.profile.analytic import DegreeClasses, frontiers, mean_drawn

NODES, EDGES, SEEDS, TRIALS = 800, 16_000, 20, 40


@pytest.fixture(scope="module")
def classes() -> DegreeClasses:
    """Every node a class of its own, weights over a factor of 30.

    Degrees are 20 in the mean: the law knows nothing of lists that happen to be empty.
    """
    weight = np.geomspace(1.0, 30.0, NODES)
    weight /= weight.sum()
    return DegreeClasses(nodes=np.ones(NODES), weight=weight, degree=weight * EDGES)


def draw(
    classes: DegreeClasses, fanouts: list[int], sampler: str, rng: np.random.Generator
) -> tuple[list[int], list[int], np.ndarray]:
    """Vertices and edges by hop of one batch, and the nodes that the last hop's lists name."""
    degrees = rng.poisson(classes.degree)
    lists = [rng.choice(NODES, size=d, p=classes.weight) for d in degrees]
    seeds = rng.choice(np.flatnonzero(degrees), size=SEEDS, replace=False)
    held, counts, edges = set(seeds.tolist()), [SEEDS], list[int]()
    named = set[int]()
    for fanout in fanouts:
        lot, found, drawn = rng.random(NODES), set[int](), 0
        named = {int(end) for node in held for end in lists[node]}
        for node in held:
            ends = lists[node]
            if sampler == "labor":
                taken = ends[lot[ends] < fanout / max(len(ends), 1)]
            else:
                taken = rng.permutation(ends)[:fanout]
            drawn += len(taken)
            found |= set(taken.tolist())
        held |= found
        counts.append(len(held))
        edges.append(drawn)
    seen = np.zeros(NODES)
    seen[list(named)] = 1.0
    return counts, edges, seen


# Not LABOR over two hops: the law takes the lists of a hop for new ones, but vertices that are
# expanded again bring the same; LABOR, which takes what many lists name, meets fewer than it says.
@pytest.mark.parametrize(
    ("sampler", "fanouts"), [("neighbor", [3]), ("neighbor", [2, 3]), ("labor", [3])]
)
def test_frontiers_are_those_of_drawn_batches(
    classes: DegreeClasses, sampler: str, fanouts: list[int]
):
    rng = np.random.default_rng(5)
    trials = [draw(classes, fanouts, sampler, rng) for _ in range(TRIALS)]
    law = frontiers(classes, SEEDS, fanouts, sampler)
    for hop in range(len(fanouts) + 1):
        drawn = np.mean([counts[hop] for counts, _, _ in trials])
        assert law.count(hop) == pytest.approx(drawn, rel=0.04)
    for hop in range(len(fanouts)):
        drawn = np.mean([edges[hop] for _, edges, _ in trials])
        assert law.edges[hop] == pytest.approx(drawn, rel=0.05)
    seen = np.mean([seen for _, _, seen in trials], axis=0)
    assert law.seen.sum() == pytest.approx(seen.sum(), rel=0.06)
    hot = np.argsort(classes.weight)[-100:]
    assert law.seen[hot].sum() == pytest.approx(seen[hot].sum(), rel=0.06)


def test_labor_meets_fewer_vertices_than_neighbour_sampling(classes: DegreeClasses):
    labor, neighbor = (frontiers(classes, 20, [4, 4], name) for name in ("labor", "neighbor"))
    assert labor.count(2) < neighbor.count(2)
    assert labor.edges[0] == neighbor.edges[0]


@pytest.mark.parametrize("fanout", [1, 5, 70, 200])
def test_a_long_list_fills_its_fanout_and_a_short_one_is_taken_whole(fanout: int):
    low, high = mean_drawn(np.array([0.05, 1e5]), fanout)
    assert low == pytest.approx(0.05, rel=0.05)
    assert high == fanout
