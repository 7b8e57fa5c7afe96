"""Rows of numbers on the device: sorting, levels, sums and searches beside plain numpy."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gnnplan.runtime.sampling.choose.poisson import row_scale, row_scale_weighted, water_level

pytest.importorskip("triton")

LENGTHS = [[], [0], [1], [0, 3, 0, 16, 33, 1], [300, 2, 0, 257, 256], [1024, 1, 1025]]
WIDEST = 1025


def rows_of(lengths: list[int]) -> tuple[NDArray[np.int64], np.random.Generator]:
    return np.cumsum([0, *lengths]).astype(np.int64), np.random.default_rng()


def on(device: torch.device, array: NDArray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


@pytest.mark.usefixtures("poisoned", "shuffled")
@pytest.mark.parametrize("distinct", [3, 2**62])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_smallest_keys_are_those_of_a_stable_sort(
    lengths: list[int], distinct: int, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu.segments import nth_smallest, smallest

    ptr, rng = rows_of(lengths)
    keys = rng.integers(0, distinct, int(ptr[-1]))
    keys[: keys.size // 9] = 2**63 - 2
    wanted = np.array([rng.integers(0, n + 1) for n in lengths], dtype=np.int64)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    ends, held, asked = (on(kernel_device, a) for a in (ptr, keys, wanted))
    marks, limit = smallest(ends, on(kernel_device, row_of), held, asked, WIDEST)
    same, below = nth_smallest(ends, held, asked, WIDEST)
    assert torch.equal(same, limit)
    for row, count in enumerate(wanted):
        part = slice(ptr[row], ptr[row + 1])
        order = np.argsort(keys[part], kind="stable")[:count]
        np.testing.assert_array_equal(np.flatnonzero(marks.cpu().numpy()[part]), np.sort(order))
        if count:
            assert int(limit[row]) == keys[part][order[-1]]
            assert int(below[row]) == (keys[part] < keys[part][order[-1]]).sum()


@pytest.mark.usefixtures("poisoned", "shuffled")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("counts", [False, True])
def test_scales_and_levels_are_those_of_the_cpu_kernels(
    lengths: list[int], counts: bool, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu.segments import row_scales, water_levels

    ptr, rng = rows_of(lengths)
    inverse, weight = rng.uniform(1, 9, int(ptr[-1])), rng.uniform(0.2, 3, int(ptr[-1]))
    if counts:  # entries that meet 1 but for rounding
        weight = rng.integers(1, 12, int(ptr[-1])) / 33.0
    degrees = np.diff(ptr)
    fanout = np.maximum(degrees // 2, 1)
    excess = np.where(degrees > fanout, degrees * (degrees / fanout) - degrees, 0.0)
    ends, held, squares, over = (on(kernel_device, a) for a in (ptr, inverse, weight**2, excess))
    plain = row_scales(ends, held, None, over, WIDEST).cpu().numpy()
    weighted = row_scales(ends, held, squares, over, WIDEST).cpu().numpy()
    sizes = np.where(degrees > fanout, fanout, 0)
    levels = water_levels(ends, on(kernel_device, weight), on(kernel_device, sizes), WIDEST)
    for row, degree in enumerate(degrees):
        part = slice(ptr[row], ptr[row + 1])
        if degree <= fanout[row]:
            assert plain[row] == weighted[row] == float(levels[row]) == 0
            continue
        expected = row_scale(inverse[part], degree, degree + excess[row])
        assert plain[row] == pytest.approx(expected, rel=1e-12)
        expected = row_scale_weighted(inverse[part], weight[part] ** 2, degree, excess[row])
        assert weighted[row] == pytest.approx(expected, rel=1e-12)
        expected = water_level(weight[part], int(sizes[row]))
        assert float(levels[row]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("poisoned", "shuffled")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_sums_searches_and_counts_are_numpys(
    lengths: list[int], kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu import segments as s

    ptr, rng = rows_of(lengths)
    values = rng.integers(0, 5, int(ptr[-1])).astype(np.float64)
    held, ends = on(kernel_device, values), on(kernel_device, ptr)
    sums = s.prefix_sums(ends, held, WIDEST)
    marks = s.segment_counts(ends, held > 2).cpu().numpy()
    totals = s.segment_sums(ends, held).cpu().numpy()
    largest = s.segment_largest(ends, held).cpu().numpy()
    for row in range(len(lengths)):
        part = values[ptr[row] : ptr[row + 1]]
        running = np.cumsum(part)
        np.testing.assert_array_equal(sums.cpu().numpy()[ptr[row] : ptr[row + 1]], running)
        assert (marks[row], totals[row]) == ((part > 2).sum(), part.sum())
        assert largest[row] == part.max(initial=0)
        goals = rng.integers(0, int(part.sum()) + 2, 7).astype(np.float64)
        low = torch.full((7,), int(ptr[row]), device=kernel_device)
        high = torch.full((7,), int(ptr[row + 1]), device=kernel_device)
        found = s.upper_bounds(sums, low, high, on(kernel_device, goals)).cpu().numpy()
        np.testing.assert_array_equal(
            found, ptr[row] + np.searchsorted(running, goals, side="right")
        )


@pytest.mark.usefixtures("shuffled")
def test_what_lies_before_and_behind_the_rows_stays_as_it_is(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.segments import (
        _prefix_kernel,
        by_rows,
        nth_smallest,
        prefix_sums,
    )

    rng = np.random.default_rng()
    # Rows from the third entry to the fifth from the end; all others are somebody else's.
    ptr = on(kernel_device, np.array([3, 20, 20, 57], dtype=np.int64))
    values = on(kernel_device, rng.integers(0, 9, 62).astype(np.float64))
    sums = torch.full_like(values, -5.0)
    by_rows(_prefix_kernel, ptr, (values, sums), 37)
    outside = torch.cat([sums[:3], sums[57:]])
    assert (outside == -5).all()
    assert torch.equal(sums[3:20], torch.cumsum(values[3:20], 0))
    assert torch.equal(prefix_sums(ptr, values, 37)[20:57], torch.cumsum(values[20:57], 0))
    wanted = on(kernel_device, np.array([17, 0, 5], dtype=np.int64))
    found, below = nth_smallest(ptr, values.to(torch.int64), wanted, 37)
    assert int(found[0]) == int(values[3:20].max())
    assert (int(found[1]), int(below[1])) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="offsets past 2^31 elements need a GPU")
def test_rows_past_two_to_the_31_elements_are_exact() -> None:
    from gnnplan.runtime.sampling.gpu.segments import nth_smallest, prefix_sums, upper_bounds

    device, first, length = torch.device("cuda"), 2**31 + 5, 700
    free, _ = torch.cuda.mem_get_info(device)
    if free < 5 * 8 * (first + length) // 2:
        pytest.skip("needs 43 GB of the GPU's memory")
    values = torch.zeros(first + length, dtype=torch.float64, device=device)
    row = torch.randint(1, 9, (length,), device=device).double()
    values[first:] = row
    ptr = torch.tensor([first, first + length], device=device)
    sums = prefix_sums(ptr, values, length)
    running = torch.cumsum(row, 0)
    assert torch.equal(sums[first:], running)
    goal = running[400:401] - 0.5
    place = upper_bounds(sums, ptr[:1], ptr[1:], goal)
    assert int(place) == first + 400
    keys = values.view(torch.int64)  # positive numbers sort as their bits do
    found, _ = nth_smallest(ptr, keys, torch.tensor([350], device=device), length)
    assert float(found.view(torch.float64)) == float(row.sort().values[349])
