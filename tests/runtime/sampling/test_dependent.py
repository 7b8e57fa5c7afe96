"""Dependent mini-batches: correlations, marginal laws and overlaps as the formulas say."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special, stats

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.dependent import (
    Dependence,
    HopStreams,
    StreamPolicy,
    normal,
    normal_kernel,
    normal_word,
    normal_word_kernel,
    normal_words_kernel,
    normals_kernel,
    quarter_turn,
    words_kernel,
)
from gnnplan.runtime.sampling.labor import LaborSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.rng import Purpose, draw, stream
from tests.reference.dependent_neighbor import DependentNeighborSampler

IDS = np.arange(200_000)


def random_words(count: int) -> NDArray[np.uint64]:
    """Random words, the extreme ones, and some in both far tails."""
    rng = np.random.default_rng(20261121)
    words = rng.integers(0, 2**64, count, dtype=np.uint64)
    small = rng.integers(0, 2**64, 1000, dtype=np.uint64) >> np.uint64(30)
    return np.concatenate([words, small, ~small, np.array([0, 1 << 12, 2**64 - 1], np.uint64)])


def test_normal_numbers_are_the_inverse_distribution_to_fifteen_digits() -> None:
    words = random_words(100_000)
    exact = special.ndtri(((words >> np.uint64(12)).astype(float) + 0.5) * 2.0**-52)
    np.testing.assert_allclose(normal(words), exact, rtol=3e-15, atol=1e-16)


def test_the_distribution_function_is_right_to_fifteen_digits_of_one() -> None:
    x = np.concatenate([np.linspace(-11.8, 11.8, 20_001), [-7.0710678, 7.0710678]])
    np.testing.assert_allclose(normal_word(x) / 2.0**64, special.ndtr(x), rtol=0, atol=1e-15)
    # Further out the 64 bits of a word hold fewer digits.
    near = x[np.abs(x) < 4]
    np.testing.assert_allclose(normal_word(near) / 2.0**64, special.ndtr(near), rtol=1e-12)


def test_numpy_and_numba_agree_on_every_bit() -> None:
    words = random_words(3000)
    assert [normal_kernel(word) for word in words] == normal(words).tolist()
    x = np.random.default_rng(1).normal(0, 3, 3000)
    assert [int(normal_word_kernel(one)) for one in x] == normal_word(x).tolist()


def test_loops_over_many_words_agree_with_single_ones_on_every_bit() -> None:
    words = np.append(random_words(3000), np.array([0, 1, 2**64 - 1, 2**63], np.uint64))
    out = np.empty(words.size)
    normals_kernel(words, words.size, out)
    assert out.tolist() == [normal_kernel(word) for word in words]
    far = np.array([0.0, 7.0710678118654, 7.0710678118655, 9.5, -7.08, -11.7, 11.9])
    x = np.append(np.random.default_rng(2).normal(0, 3, 3000), far)
    found, powers = np.empty(x.size, np.uint64), np.empty(x.size, np.int64)
    normal_words_kernel(x, x.size, powers, np.empty(x.size), found)
    assert found.tolist() == [int(normal_word_kernel(one)) for one in x]


@pytest.mark.parametrize("step", [0, 3, 5])
def test_kernel_words_are_the_definitions_words(step: int) -> None:
    streams = StreamPolicy(seed=3, kappa=4).streams(1, step, 2)
    found = np.zeros(5000, dtype=np.uint64)
    words_kernel(
        streams.first[1], streams.second[1], streams.cosine, streams.sine, IDS, 5000, found
    )
    np.testing.assert_array_equal(found, streams.words(1, IDS[:5000]))


def test_quarter_turns_are_the_cosine_and_the_sine() -> None:
    for c in np.linspace(0, 1, 257):
        found = quarter_turn(float(c))
        assert found == pytest.approx((math.cos(c * math.pi / 2), math.sin(c * math.pi / 2)))


def test_kappa_1_is_the_plain_generator_and_segments_begin_with_it() -> None:
    # [R6] the end points: r(0) = Phi(n(z1)) = the word of z1 itself, r(1) that of z2.
    for step in range(5):
        words = StreamPolicy(seed=9).streams(2, step, 1).words(0, IDS[:100])
        np.testing.assert_array_equal(
            words, draw(stream(9, 2, step, 0, Purpose.VERTEX), IDS[:100], 0)
        )
    policy = StreamPolicy(seed=9, kappa=8)
    last, following = policy.streams(0, 7, 1), policy.streams(0, 8, 1)
    assert last.second[0] == following.first[0]
    assert following.plain
    np.testing.assert_array_equal(
        following.words(0, IDS), draw(stream(9, 0, 1, 0, Purpose.VERTEX), IDS, 0)
    )


def normals(policy: StreamPolicy, step: int, hop: int = 0, epoch: int = 0) -> NDArray[np.float64]:
    return normal(policy.streams(epoch, step, 2).words(hop, IDS))


@pytest.mark.parametrize("step", [1, 2, 3, 6])
def test_numbers_of_a_smooth_batch_are_uniform(step: int) -> None:
    # [R6] mean 1/2, variance 1/12, here the whole law.
    words = StreamPolicy(seed=1, kappa=4).streams(0, step, 1).words(0, IDS)
    counts = np.bincount((words >> np.uint64(56)).astype(int), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    assert stats.kstest(words[:20_000] / 2.0**64, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    ("kappa", "one", "other", "expected"),
    [
        # [R6] consecutive batches: cos(pi / (2 kappa)).
        (2, 0, 1, 0.70710678),
        (64, 0, 1, 0.99969882),
        (64, 30, 31, 0.99969882),
        # [C21] kappa 4, within and across segments.
        (4, 0, 3, 0.38268343),
        (4, 3, 5, 0.85355339),
        (4, 2, 6, 0.5),
        (4, 0, 4, 0.0),
        (4, 3, 4, 0.92387953),
        # Two segments apart.
        (4, 1, 9, 0.0),
        (2, 1, 4, 0.0),
    ],
)
def test_correlation_of_two_batches(kappa: int, one: int, other: int, expected: float) -> None:
    policy = StreamPolicy(seed=5, kappa=kappa)
    x, y = normals(policy, one), normals(policy, other)
    # The estimate of a correlation c has standard error (1 - c^2) / sqrt(n).
    error = max(1 - expected**2, 1e-4) / math.sqrt(len(IDS))
    assert np.corrcoef(x, y)[0, 1] == pytest.approx(expected, abs=4 * error)


def exact_overlap(q: float, kappa: float) -> float:
    """P(r <= q, r' <= q) / q of consecutive batches: the bivariate normal distribution [R13]."""
    rho, z = math.cos(math.pi / (2 * kappa)), special.ndtri(q)
    covariance: Any = np.array([[1, rho], [rho, 1]])
    law = stats.multivariate_normal(cov=covariance, allow_singular=True)
    return float(law.cdf(np.array([z, z]))) / q


@pytest.mark.parametrize(
    ("kappa", "expected"),
    # [R13] q = .1.
    [(1, 0.1), (2, 0.474), (4, 0.728), (16, 0.931), (64, 0.983), (256, 0.996)],
)
def test_overlap_of_consecutive_batches(kappa: int, expected: float) -> None:
    assert exact_overlap(0.1, kappa) == pytest.approx(expected, abs=6e-4)
    policy, limit = StreamPolicy(seed=11, kappa=kappa), np.uint64(2**64 // 10)
    below = [policy.streams(0, step, 1).words(0, IDS) < limit for step in range(5)]
    shared = sum(int((a & b).sum()) for a, b in itertools.pairwise(below))
    total = sum(int(a.sum()) for a in below[1:])
    error = 4 * math.sqrt(expected * (1 - expected) / (0.1 * len(IDS)))
    assert shared / total == pytest.approx(expected, abs=error + 6e-4)


def test_frozen_batches_draw_the_same_within_a_segment_and_fresh_ones_after() -> None:
    policy = StreamPolicy(seed=2, kappa=3, dependence=Dependence.FROZEN)
    words = [policy.streams(0, step, 1).words(0, IDS) for step in range(4)]
    np.testing.assert_array_equal(words[0], words[2])
    assert abs(np.corrcoef(words[2] / 2.0**64, words[3] / 2.0**64)[0, 1]) < 0.01


def test_infinite_kappa_is_one_sample_for_the_whole_run() -> None:
    policy = StreamPolicy(seed=2, kappa=math.inf)
    first = policy.streams(0, 0, 1).words(0, IDS)
    np.testing.assert_array_equal(first, policy.streams(7, 123, 1).words(0, IDS))


def test_segments_end_with_the_epoch_unless_told_its_length() -> None:
    alone = StreamPolicy(seed=4, kappa=64)
    assert abs(np.corrcoef(normals(alone, 9), normals(alone, 0, epoch=1))[0, 1]) < 0.01
    joined = StreamPolicy(seed=4, kappa=64, steps_per_epoch=10)
    assert np.corrcoef(normals(joined, 9), normals(joined, 0, epoch=1))[0, 1] > 0.999


def test_hops_are_independent_unless_layers_depend() -> None:
    # Not z + l: hop 1 of a step must not be hop 0 of the next one.
    apart = StreamPolicy(seed=6)
    assert apart.streams(0, 0, 3).first[1] != apart.streams(0, 1, 3).first[0]
    assert abs(np.corrcoef(normals(apart, 0, 0), normals(apart, 0, 1))[0, 1]) < 0.01
    joined = StreamPolicy(seed=6, kappa=4, layer_dependent=True)
    np.testing.assert_array_equal(normals(joined, 1, 0), normals(joined, 1, 1))


@pytest.mark.parametrize("kappa", [0, -1, 0.5, 1.5, math.nan])
def test_kappa_below_one_or_between_numbers_is_refused(kappa: float) -> None:
    with pytest.raises(SamplerError, match="kappa") as caught:
        StreamPolicy(kappa=kappa)
    assert "\n" not in str(caught.value)
    with pytest.raises(SamplerError, match="kappa"):
        LaborSampler(*dense_graph(), [2], kappa=kappa)


def dense_graph(num_nodes: int = 400, degree: int = 60) -> tuple[NDArray, NDArray]:
    rng = np.random.default_rng(8)
    indptr = np.arange(0, num_nodes * degree + 1, degree, dtype=np.int64)
    rows = [rng.choice(num_nodes, degree, replace=False) for _ in range(num_nodes)]
    return indptr, np.concatenate(rows).astype(np.int32)


def chosen(batch: MiniBatch) -> NDArray[np.int64]:
    assert batch.blocks[0].e_id is not None
    return batch.blocks[0].e_id


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize(("kappa", "step"), [(1, 0), (1, 3), (4, 4)])
def test_dependent_neighbour_sampling_is_neighbour_sampling_on_its_streams(
    kappa: int, step: int, dialect: Dialect
) -> None:
    seeds = np.arange(50, dtype=np.int64)
    fanouts = [5, -1, 70, 3]
    sampler = DependentNeighborSampler(
        *dense_graph(), fanouts, kappa=kappa, dialect=dialect, seed=1, edge_ids=True
    )
    plain = NeighborSampler(*dense_graph(), fanouts, dialect=dialect, seed=1, edge_ids=True)
    found = sampler.sample(seeds, epoch=2, step=step)
    expected = plain.sample(seeds, epoch=2, step=step // kappa)
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        np.testing.assert_array_equal(block.indptr, other.indptr)
        np.testing.assert_array_equal(block.indices, other.indices)
        np.testing.assert_array_equal(block.e_id, other.e_id)


def floyd(streams: HopStreams, node: int, degree: int, fanout: int) -> list[int]:
    taken: list[int] = []
    for j in range(fanout):
        last = degree - fanout + j
        offset = int(streams.words(0, node, j)) * (last + 1) >> 64
        taken.append(last if offset in taken else offset)
    return taken


def test_smooth_neighbour_sampling_is_floyds_method_on_smooth_words() -> None:
    indptr, indices = dense_graph()
    sampler = DependentNeighborSampler(indptr, indices, [7], kappa=16, seed=3, edge_ids=True)
    batch = sampler.sample(np.arange(80, dtype=np.int64), epoch=0, step=21)
    streams = sampler.streams.streams(0, 21, 1)
    expected = [60 * v + offset for v in range(80) for offset in floyd(streams, v, 60, 7)]
    assert chosen(batch).tolist() == expected


@pytest.mark.parametrize("make", [LaborSampler, DependentNeighborSampler])
def test_a_larger_kappa_keeps_more_of_the_batch_before(make: Callable[..., LaborSampler]) -> None:
    seeds = np.arange(200, dtype=np.int64)
    shared = []
    for kappa in (1, 4, 64, 1024):
        sampler = make(*dense_graph(), [6], kappa=kappa, seed=5, edge_ids=True)
        batches = [set(chosen(sampler.sample(seeds, epoch=0, step=i))) for i in range(6)]
        pairs = itertools.pairwise(batches)
        shared.append(sum(len(a & b) for a, b in pairs) / sum(map(len, batches[1:])))
    # A tenth of 60 neighbours: a tenth is shared by chance alone, [R13] gives LABOR-0 the rest.
    assert shared[0] == pytest.approx(0.1, abs=0.03)
    assert shared == sorted(shared)
    assert shared[-1] > 0.95


def test_smooth_neighbours_are_drawn_equally_often() -> None:
    indptr, indices = dense_graph(2000, 12)
    sampler = DependentNeighborSampler(indptr, indices, [5], kappa=8, seed=7, edge_ids=True)
    batch = sampler.sample(np.arange(2000, dtype=np.int64), epoch=0, step=3)
    counts = np.bincount(chosen(batch) % 12, minlength=12)
    # Without replacement: each count has variance n pi (1 - pi), and they sum to n k.
    pi = 5 / 12
    z = (counts - 2000 * pi) / math.sqrt(2000 * pi * (1 - pi))
    assert stats.chi2.sf((z**2).sum() * 11 / 12, 11) > 1e-4
