"""Negatives follow their definition, avoid what they must, and have the law they claim."""

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.exclusion import Candidates, NegativeSampler
from gnnplan.runtime.sampling.rng import Purpose, stream
from tests.reference.links import negatives_of_link

NUM_NODES = 40


def make_graph() -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 30, NUM_NODES)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, rng.integers(0, NUM_NODES, int(indptr[-1])).astype(np.int32)


def edges_of(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> set[tuple[int, int]]:
    return {(int(u), v) for v in range(NUM_NODES) for u in indices[indptr[v] : indptr[v + 1]]}


@pytest.mark.parametrize("candidates", list(Candidates))
@pytest.mark.parametrize("avoid", [True, False])
def test_draws_equal_the_reference(candidates: Candidates, avoid: bool) -> None:
    indptr, indices = make_graph()
    rng = np.random.default_rng(1)
    pairs, links = rng.integers(0, NUM_NODES, (50, 2)), rng.permutation(5000)[:50]
    destinations = pairs[:, 1].copy()
    sampler = NegativeSampler(indptr, indices, 3, candidates=candidates, avoid_edges=avoid, seed=4)
    found = sampler.draw(pairs, links, epoch=2, step=7, batch_destinations=destinations)
    pool = destinations if candidates is Candidates.IN_BATCH else np.arange(NUM_NODES)
    for row, (source, destination), link in zip(found, pairs, links, strict=True):
        expected = negatives_of_link(
            stream(4, 2, 7, 0, Purpose.NEGATIVE),
            int(link),
            int(source),
            int(destination),
            pool,
            edges_of(indptr, indices) if avoid else set(),
            3,
        )
        assert row.tolist() == expected


def test_negatives_of_a_link_do_not_depend_on_who_else_is_there() -> None:
    indptr, indices = make_graph()
    sampler = NegativeSampler(indptr, indices, 2)
    pairs = np.random.default_rng(2).integers(0, NUM_NODES, (30, 2))
    links = np.arange(30)
    whole = sampler.draw(pairs, links, epoch=0, step=0)
    parts = [sampler.draw(pairs[p], links[p], epoch=0, step=0) for p in np.split(links, [7, 19])]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    again = sampler.draw(pairs, links, epoch=0, step=1)
    assert not np.array_equal(whole, again)


def test_neither_the_destination_nor_a_neighbour_is_drawn_where_another_is_likely() -> None:
    indptr, indices = make_graph()
    edges = edges_of(indptr, indices)
    pairs = np.random.default_rng(3).integers(0, NUM_NODES, (400, 2))
    found = NegativeSampler(indptr, indices, 2).draw(pairs, np.arange(400), epoch=0, step=0)
    # A try is refused with probability about 0.33; 16 refusals in a row have 2e-8.
    for (source, destination), row in zip(pairs, found, strict=True):
        assert all(v != destination and (int(source), int(v)) not in edges for v in row)


def test_uniform_negatives_are_uniform_over_the_others() -> None:
    """z-test: 20000 draws over 39 nodes; each count within 4 standard deviations."""
    indptr, indices = make_graph()
    pairs = np.tile([[5, 9]], (20000, 1))
    sampler = NegativeSampler(indptr, indices, 1, avoid_edges=False, seed=1)
    found = sampler.draw(pairs, np.arange(20000), epoch=0, step=0)[:, 0]
    counts = np.bincount(found, minlength=NUM_NODES)
    assert counts[9] == 0
    p = 1 / (NUM_NODES - 1)
    z = (np.delete(counts, 9) - 20000 * p) / np.sqrt(20000 * p * (1 - p))
    assert np.abs(z).max() < 4


def test_in_batch_negatives_are_as_frequent_as_destinations_of_the_batch() -> None:
    """Destinations 1, 2, 2, 2: for a link to 7 the shares are 1/4 and 3/4."""
    indptr, indices = make_graph()
    sampler = NegativeSampler(indptr, indices, 1, candidates=Candidates.IN_BATCH, avoid_edges=False)
    pairs = np.tile([[0, 7]], (8000, 1))
    found = sampler.draw(
        pairs, np.arange(8000), epoch=0, step=0, batch_destinations=np.array([1, 2, 2, 2])
    )
    assert set(found[:, 0].tolist()) == {1, 2}
    z = ((found == 2).sum() - 6000) / np.sqrt(8000 * 0.25 * 0.75)
    assert abs(z) < 4


def test_a_hopeless_search_ends_with_its_last_candidate() -> None:
    indptr, indices = np.array([0, 1, 2], dtype=np.int64), np.array([0, 0], dtype=np.int32)
    found = NegativeSampler(indptr, indices, 1).draw(
        np.array([[0, 1]]), np.array([0]), epoch=0, step=0
    )
    assert found[0, 0] in (0, 1)  # 0 -> 0 and 0 -> 1 are both edges


def test_bad_input_is_refused() -> None:
    graph = make_graph()
    with pytest.raises(SamplerError, match="at least one negative per link, found 0"):
        NegativeSampler(*graph, 0)
    sampler = NegativeSampler(*graph, 1, candidates=Candidates.IN_BATCH)
    with pytest.raises(SamplerError, match="pass batch_destinations"):
        sampler.draw(np.array([[0, 1]]), np.array([0]), epoch=0, step=0)
    with pytest.raises(SamplerError, match="found node 40"):
        sampler.draw(np.array([[0, 40]]), np.array([0]), epoch=0, step=0)
