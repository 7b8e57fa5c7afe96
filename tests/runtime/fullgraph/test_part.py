"""Parts: the published example, empty boundaries, isolated nodes, every edge in one place."""

import numpy as np
import pytest

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.fullgraph.part import Part, build_part, connect_parts
from tests.runtime.fullgraph.cases import B1_EDGES, B1_PARTS, csc, random_case


def all_parts(indptr, indices, partition, size: int, **options) -> list[Part]:
    partition = np.asarray(partition, np.int32)
    return connect_parts(
        [build_part(indptr, indices, partition, r, size, **options) for r in range(size)]
    )


def test_inner_and_boundary_of_the_published_example() -> None:
    """[B1]: n_in 3, 2; U = {3, 4}, {0, 1, 2}; Vol 5."""
    parts = all_parts(*csc(5, B1_EDGES), B1_PARTS, 2)
    assert [p.inner.tolist() for p in parts] == [[0, 1, 2], [3, 4]]
    assert [p.halo.tolist() for p in parts] == [[3, 4], [0, 1, 2]]
    assert sum(p.num_halo for p in parts) == 5
    assert [3 * p.num_inner + p.num_halo for p in parts] == [11, 9]
    assert [p.inner[p.send].tolist() for p in parts] == [[0, 1, 2], [3, 4]]


def test_a_hub_sends_more_than_it_receives() -> None:
    """[C13]: ten leaves need 100 hub nodes each, the hub one of each leaf's."""
    hub, leaves = 1000, 10
    edges = [(100 * k + i, hub + k) for k in range(leaves) for i in range(100)]
    src = np.array([a for a, _ in edges] + [hub + k for k in range(leaves)])
    dst = np.array([b for _, b in edges] + [0] * leaves)
    order = np.lexsort((src, dst))
    counts = np.bincount(dst, minlength=hub + leaves)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    partition = np.concatenate((np.zeros(hub), 1 + np.arange(leaves)))
    parts = all_parts(indptr, src[order].astype(np.int32), partition, leaves + 1)
    assert max(p.num_halo for p in parts) == 100
    assert max(len(p.send) for p in parts) == 1000


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("loops", [False, True])
def test_every_edge_is_in_one_part_and_every_list_has_its_partner(size: int, loops: bool) -> None:
    case = random_case()
    num_nodes = len(case.y)
    partition = np.random.default_rng(0).integers(0, size, num_nodes)
    parts = all_parts(case.indptr, case.indices, partition, size, loops=loops, edge_ids=True)
    ids = np.concatenate([lists[2] for p in parts for lists in (p.inner_edges, p.halo_edges)])
    destination = np.repeat(np.arange(num_nodes), np.diff(case.indptr))
    expected = np.arange(len(case.indices))
    if loops:
        expected = expected[case.indices != destination]
        assert (ids < 0).sum() == num_nodes  # one loop each, also of the isolated nodes
    np.testing.assert_array_equal(np.sort(ids[ids >= 0]), expected)
    for p in parts:
        for (indptr, columns, edges), nodes in ((p.inner_edges, p.inner), (p.halo_edges, p.halo)):
            rows = np.repeat(p.inner, np.diff(indptr))
            own = edges >= 0
            np.testing.assert_array_equal(nodes[columns][own], case.indices[edges[own]])
            np.testing.assert_array_equal(rows[own], destination[edges[own]])
        starts = np.cumsum(p.send_counts) - p.send_counts
        for other in parts:
            sent = p.inner[p.send[starts[other.rank] :][: p.send_counts[other.rank]]]
            begin = int(other.halo_counts[: p.rank].sum())
            wanted = other.halo[begin : begin + int(other.halo_counts[p.rank])]
            np.testing.assert_array_equal(sent, wanted)


def test_a_partition_that_does_not_fit_is_refused() -> None:
    indptr, indices = csc(5, B1_EDGES)
    for wrong, words in (([0, 1], "one part per node"), ([0, 1, 2, 0, 0], "expected parts 0 to 1")):
        with pytest.raises(PlanError, match=words):
            build_part(indptr, indices, np.array(wrong, np.int32), 0, 2)
