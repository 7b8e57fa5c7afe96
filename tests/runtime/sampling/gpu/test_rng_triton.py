"""Triton draws the same bits as numpy and numba: on CUDA where there is one, else interpreted."""

import numpy as np
import pytest
import torch

from gnnplan.runtime.sampling.rng import Purpose, bounded, draw, stream

pytest.importorskip("triton")


def found_by_triton(
    source: np.uint64, ids: np.ndarray, j: np.ndarray, bounds: np.ndarray, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    from gnnplan.runtime.sampling.gpu import rng as rng_triton

    tensors = (torch.from_numpy(a.astype(np.int64)).to(device) for a in (ids, j, bounds))
    bits, chosen = rng_triton.draw(source, *tensors)
    return bits.cpu().numpy().view(np.uint64), chosen.cpu().numpy()


def test_triton_keeps_the_golden_values(kernel_device: torch.device) -> None:
    # The vectors of tests/runtime/sampling/test_rng.py.
    ids, j = np.array([0, 0, 1, 2**31, 2**40]), np.array([0, 1, 0, 7, 24])
    source = stream(0, 0, 0, 0, Purpose.NEIGHBOR)
    bits, _ = found_by_triton(source, ids, j, np.ones(5), kernel_device)
    assert bits.tolist() == [
        6156891643879854478,
        10609625945874379626,
        5932508743901518967,
        17593546208228883397,
        13378151167381007269,
    ]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 1001])
@pytest.mark.parametrize("source", [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_triton_draws_the_same_bits_as_numpy(
    source: int, count: int, kernel_device: torch.device
) -> None:
    rng = np.random.default_rng([count, source % 1000])
    ids, j = rng.integers(0, 2**62, count), rng.integers(0, 2**40, count)
    bounds = rng.integers(1, 2**62, count)
    bounds[:4] = [1, 2**62, 2**33, 7][: min(count, 4)]
    bits, chosen = found_by_triton(np.uint64(source), ids, j, bounds, kernel_device)
    expected = draw(np.uint64(source), ids, j)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(chosen, bounded(expected, bounds))


@pytest.mark.usefixtures("poisoned", "shuffled")
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1001])
def test_ids_draw_from_the_streams_of_their_owners(count: int, kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.rng import draw_rows, signed

    rng = np.random.default_rng()
    sources = [stream(3, 0, step, 0, Purpose.VERTEX) for step in range(5)]
    owners, turns = rng.integers(0, 5, count), rng.integers(0, 2**40, count)
    ids = rng.integers(0, 2**62, count)
    ids[: min(count, 2)] = [0, 2**62][: min(count, 2)]
    streams = torch.tensor([signed(s) for s in sources], device=kernel_device)
    tensors = (torch.from_numpy(a.astype(np.int64)).to(kernel_device) for a in (owners, ids, turns))
    found = draw_rows(streams, *tensors).cpu().numpy().view(np.uint64)
    for number, source in enumerate(sources):
        mine = owners == number
        np.testing.assert_array_equal(found[mine], draw(source, ids[mine], turns[mine]))
