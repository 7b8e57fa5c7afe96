"""Tests for planner/partition/cliques.py; wirings as `nvidia-smi topo -m` shows them."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.planner.partition.cliques import clique_covers, greedy_cover


def wiring(num_gpus: int, links: dict[tuple[int, int], int]) -> NDArray[np.int64]:
    matrix = np.zeros((num_gpus, num_gpus), np.int64)
    for (a, b), count in links.items():
        matrix[a, b] = matrix[b, a] = count
    return matrix


CUBE_MESH = wiring(
    8,
    {
        # DGX-1 with V100: six links per GPU; quads all to all, four links across.
        (0, 1): 1,
        (0, 2): 1,
        (0, 3): 2,
        (1, 2): 2,
        (1, 3): 1,
        (2, 3): 2,
        (4, 5): 1,
        (4, 6): 1,
        (4, 7): 2,
        (5, 6): 2,
        (5, 7): 1,
        (6, 7): 2,
        (0, 4): 2,
        (1, 5): 2,
        (2, 6): 1,
        (3, 7): 1,
    },
)
BRIDGED_2_2 = wiring(4, {(0, 1): 4, (2, 3): 4})
SITON = wiring(8, {(0, 1): 4, (2, 3): 4, (4, 5): 4, (6, 7): 4})
NVSWITCH = wiring(8, dict.fromkeys(itertools.combinations(range(8), 2), 12))


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (CUBE_MESH, [(0, 1, 2, 3), (4, 5, 6, 7)]),  # [L1]
        (BRIDGED_2_2, [(0, 1), (2, 3)]),
        (SITON, [(0, 1), (2, 3), (4, 5), (6, 7)]),  # [L1] K_c = 4, K_g = 2
        (NVSWITCH, [tuple(range(8))]),
        (wiring(3, {}), [(0,), (1,), (2,)]),  # [L1] no NVLink
        (wiring(4, {(0, 2): 1, (1, 3): 1}), [(0, 2), (1, 3)]),  # ids need not be consecutive
        (wiring(3, {(0, 1): 1}), [(0, 1), (2,)]),
    ],
    ids=["cube-mesh", "bridged", "siton", "nvswitch", "none", "crossed", "unequal"],
)
def test_known_wirings(links: NDArray[np.int64], expected: list[tuple[int, ...]]):
    cover = clique_covers(links)[0]
    assert list(cover.cliques) == expected
    assert cover.exact


def test_the_cube_mesh_has_one_other_cover_by_two():
    """None: its only cliques of four are the quads, so nothing else covers eight GPUs by two."""
    assert len(clique_covers(CUBE_MESH)) == 1


def test_covers_of_equal_count_are_kept_best_bandwidth_first():
    """A ring of four with two strong sides is covered by either pair of opposite sides."""
    links = wiring(4, {(0, 1): 1, (1, 2): 2, (2, 3): 1, (3, 0): 2})
    covers = clique_covers(links)
    assert [cover.cliques for cover in covers] == [((0, 3), (1, 2)), ((0, 1), (2, 3))]
    assert [cover.bandwidth for cover in covers] == [4.0, 2.0]


def test_largest_first_is_not_minimal_on_the_examples_of_c8():
    path = wiring(4, {(0, 2): 1, (0, 1): 1, (1, 3): 1})
    assert greedy_cover(path).cliques == ((0, 1), (2,), (3,))
    assert clique_covers(path)[0].cliques == ((0, 2), (1, 3))
    triangle = wiring(6, {(0, 1): 1, (0, 2): 1, (1, 2): 1, (0, 3): 1, (1, 4): 1, (2, 5): 1})
    assert len(greedy_cover(triangle).cliques) == 4
    assert clique_covers(triangle)[0].cliques == ((0, 3), (1, 4), (2, 5))


def brute_fewest(links: NDArray[np.int64]) -> int:
    """Over all ways to write a set as disjoint groups."""

    def ways(rest: list[int]) -> int:
        if not rest:
            return 0
        low, others = rest[0], rest[1:]
        best = len(rest)
        for count in range(len(others) + 1):
            for mates in itertools.combinations(others, count):
                group = (low, *mates)
                if all(links[a, b] for a, b in itertools.combinations(group, 2)):
                    best = min(best, 1 + ways([g for g in others if g not in mates]))
        return best

    return ways(list(range(len(links))))


def test_exact_on_random_wirings_and_never_above_largest_first():
    rng = np.random.default_rng(0)
    worse = 0
    for _ in range(150):
        pairs = [pair for pair in itertools.combinations(range(6), 2) if rng.random() < 0.5]
        links = wiring(6, {pair: int(rng.integers(1, 3)) for pair in pairs})
        covers, greedy = clique_covers(links), greedy_cover(links)
        assert len(covers[0].cliques) == brute_fewest(links) <= len(greedy.cliques)
        worse += len(greedy.cliques) > len(covers[0].cliques)
        for cover in covers:
            assert sorted(g for clique in cover.cliques for g in clique) == list(range(6))
            assert all(links[a, b] for c in cover.cliques for a, b in itertools.combinations(c, 2))
        assert len({cover.cliques for cover in covers}) == len(covers)
        assert [c.order for c in covers] == sorted(c.order for c in covers)
    assert worse > 0  # [C8]: 31 of 300


def test_sixteen_gpus_of_two_cube_meshes_with_a_link_between_them():
    links = np.zeros((16, 16), np.int64)
    links[:8, :8] = links[8:, 8:] = CUBE_MESH
    links[7, 8] = links[8, 7] = 1
    cover = clique_covers(links)[0]
    assert cover.cliques == tuple(tuple(range(i, i + 4)) for i in range(0, 16, 4))


def test_a_switch_of_any_size_is_one_clique_and_larger_odd_groups_say_they_are_not_exact():
    everything = np.ones((72, 72), np.int64)
    assert clique_covers(everything)[0].cliques == (tuple(range(72)),)
    ring = np.zeros((18, 18), np.int64)
    for a in range(18):
        ring[a, (a + 1) % 18] = ring[(a + 1) % 18, a] = 1
    assert not clique_covers(ring)[0].exact


def test_a_matrix_that_is_none_is_refused():
    with pytest.raises(ValueError, match="symmetric"):
        clique_covers(np.array([[0, 1], [0, 0]]))
    with pytest.raises(ValueError, match="negative"):
        clique_covers(np.array([[0, -1], [-1, 0]]))
