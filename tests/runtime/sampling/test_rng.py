"""Draws are the same bits everywhere and pass the tests that weak mixers fail."""

import numba
import numpy as np
import pytest
from scipy import stats

from gnnplan.runtime.sampling.rng import (
    Purpose,
    bounded,
    bounded_kernel,
    draw,
    key_kernel,
    mix,
    stream,
    value_kernel,
)

STREAMS = [11949023478716900198, 9226626058180140843]
DRAWS = [
    6156891643879854478,
    10609625945874379626,
    5932508743901518967,
    17593546208228883397,
    13378151167381007269,
]
SCALAR = 5870257602230052749
ANY = stream(3, 1, 4, 1, Purpose.NEIGHBOR)


@numba.njit
def draw_kernel(stream, ids, j, out):
    for i in range(ids.shape[0]):
        out[i] = value_kernel(key_kernel(stream, ids[i]), j[i])


@numba.njit
def bounded_all_kernel(bits, bounds, out):
    for i in range(bits.shape[0]):
        out[i] = bounded_kernel(bits[i], bounds[i])


def test_mixer_is_splitmix64() -> None:
    # First outputs of SplitMix64 seeded with 1234567: the vectors of its published test programs
    # (e.g. Rosetta Code, "Pseudo-random numbers/Splitmix64").
    golden, seed = 0x9E3779B97F4A7C15, 1234567
    states = np.array([(seed + i * golden) % 2**64 for i in range(1, 6)], dtype=np.uint64)
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_streams_and_draws_keep_their_golden_values() -> None:
    # Recorded from the first version; a change would change every batch of every saved run.
    streams = [stream(0, 0, 0, 0, Purpose.NEIGHBOR), stream(1, 2, 3, 4, Purpose.SHUFFLE)]
    assert [int(s) for s in streams] == STREAMS
    found = draw(streams[0], np.array([0, 0, 1, 2**31, 2**40]), np.array([0, 1, 0, 7, 24]))
    assert found.tolist() == DRAWS
    assert int(draw(streams[1], 5, 6)) == SCALAR


def test_numba_draws_the_same_bits_as_numpy() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2**62, 10_000)
    j = rng.integers(0, 200, 10_000)
    found = np.zeros(10_000, dtype=np.uint64)
    draw_kernel(ANY, ids, j, found)
    np.testing.assert_array_equal(found, draw(ANY, ids, j))


def test_bounded_is_the_high_half_of_the_exact_product() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**64, 2_000, dtype=np.uint64)
    bits[:4] = [0, 2**64 - 1, 2**32, 2**32 - 1]
    bounds = rng.integers(1, 2**62, 2_000)
    bounds[:4] = [1, 2**62, 2**33, 7]
    exact = [int(a) * int(b) >> 64 for a, b in zip(bits, bounds, strict=True)]
    found = np.zeros(2_000, dtype=np.int64)
    bounded_all_kernel(bits, bounds, found)
    assert bounded(bits, bounds).tolist() == exact
    assert found.tolist() == exact


def stream_of(words: list[int], purpose: Purpose) -> np.uint64:
    seed, epoch, step, hop = words
    return stream(seed, epoch, step, hop, purpose)


@pytest.mark.parametrize("changed", range(5))
def test_streams_differ_in_every_argument(changed: int) -> None:
    words = [5, 6, 7, 8]
    purpose = Purpose.SHUFFLE if changed == 4 else Purpose.NEIGHBOR
    others = [word + (i == changed) for i, word in enumerate(words)]
    assert stream_of(others, purpose) != stream_of(words, Purpose.NEIGHBOR)
    assert stream(0, 1, 0, 0, Purpose.NEIGHBOR) != stream(0, 0, 1, 0, Purpose.NEIGHBOR)


def grid(num_ids: int, num_draws: int, source: np.uint64 = ANY) -> np.ndarray:
    """Draws of consecutive ids (rows) and consecutive j (columns)."""
    return draw(source, np.arange(num_ids)[:, None], np.arange(num_draws)[None, :])


def test_bits_are_balanced_and_pairwise_uncorrelated() -> None:
    bits = (grid(4096, 16).reshape(-1, 1) >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    signs = bits.astype(np.float64) * 2 - 1
    # z of each bit's mean and of each pair's product; 2080 numbers, the largest |z| stays below 5
    # with probability 0.999 for fair bits.
    z = signs.T @ signs / np.sqrt(len(signs))
    assert np.abs(signs.sum(axis=0)).max() / np.sqrt(len(signs)) < 5
    assert np.abs(z - np.diag(np.diag(z))).max() < 5


@pytest.mark.parametrize(("id_lag", "j_lag"), [(1, 0), (0, 1), (1, 1), (2, 0), (64, 0), (1, -1)])
def test_lags_in_id_and_j_are_uncorrelated(id_lag: int, j_lag: int) -> None:
    unit = grid(4096, 24).astype(np.float64) / 2**64 - 0.5
    left = unit[: len(unit) - id_lag, max(0, -j_lag) : unit.shape[1] - max(0, j_lag)]
    right = unit[id_lag:, max(0, j_lag) : unit.shape[1] - max(0, -j_lag)]
    z = (left * right).sum() / (np.sqrt(left.size) / 12)
    assert abs(z) < 4


def test_pairs_fill_the_square_evenly() -> None:
    # Pairs (draw(id, 0), draw(id + 1, 0)) and (draw(id, 0), draw(id, 1)) on a 32 x 32 grid.
    cells = (grid(200_000, 2) >> np.uint64(59)).astype(np.int64)
    for left, right in ((cells[:-1, 0], cells[1:, 0]), (cells[:, 0], cells[:, 1])):
        counts = np.bincount(left * 32 + right, minlength=1024)
        assert stats.chisquare(counts).pvalue > 1e-4


def test_neighbouring_streams_are_unrelated() -> None:
    one = grid(1000, 20, stream(0, 0, 1, 0, Purpose.NEIGHBOR)).astype(np.float64) / 2**64 - 0.5
    two = grid(1000, 20, stream(0, 0, 2, 0, Purpose.NEIGHBOR)).astype(np.float64) / 2**64 - 0.5
    assert abs((one * two).sum() / (np.sqrt(one.size) / 12)) < 4


def test_draws_of_different_ids_and_turns_do_not_collide() -> None:
    # 800 k draws: the chance of any collision of fair 64-bit numbers is 2e-8.
    values = grid(20_000, 40)
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize("bound", [3, 10, 137])
def test_bounded_draws_are_uniform(bound: int) -> None:
    counts = np.bincount(bounded(grid(10_000, 12), bound).ravel(), minlength=bound)
    assert len(counts) == bound
    assert stats.chisquare(counts).pvalue > 1e-4
