"""Sums over rows of numbers on a GPU: totals, counts, running sums, and searches in those.

Every sum is taken in a fixed order, so that results do not depend on the order of programs.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.sampling.segments_triton import by_rows, row_of

_BLOCK = 256


@triton.jit
@no_type_check
def _prefix_kernel(
    ptr, values, sums, num_rows, above, most, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    _, _, begin, degree = row_of(ptr, num_rows, above, most, ROWS)
    columns = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    before = tl.zeros((ROWS,), tl.float64)
    for first in range(0, tl.max(degree, axis=0), COLUMNS):
        place = first + columns
        inside = place < degree[:, None]
        each = tl.load(values + begin[:, None] + place, mask=inside, other=0.0)
        running = tl.cumsum(each, axis=1) + before[:, None]
        tl.store(sums + begin[:, None] + place, running, mask=inside)
        # The last sum itself, so that sums cannot fall from one tile to the next.
        before = tl.maximum(before, tl.max(tl.where(inside, running, 0.0), axis=1))


@triton.jit
@no_type_check
def _upper_kernel(sums, lows, highs, goals, places, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    low = tl.load(lows + at, mask=mask, other=0)
    high = tl.load(highs + at, mask=mask, other=0)
    goal = tl.load(goals + at, mask=mask, other=0.0)
    while tl.max((low < high).to(tl.int32), axis=0) > 0:
        middle = (low + high) >> 1
        searching = low < high
        above = tl.load(sums + middle, mask=searching, other=0.0) > goal
        high = tl.where(searching & above, middle, high)
        low = tl.where(searching & (above == 0), middle + 1, low)
    tl.store(places + at, low, mask=mask)


def prefix_sums(ptr: Tensor, values: Tensor, widest: int) -> Tensor:
    """Inclusive sums of each row's entries (not negative), float64 as `values`; they never fall."""
    sums = torch.empty_like(values)
    by_rows(_prefix_kernel, ptr, (values, sums), widest)
    return sums


def upper_bounds(sums: Tensor, lows: Tensor, highs: Tensor, goals: Tensor) -> Tensor:
    """First place p in lows .. highs-1 with sums[p] > goal, or highs; int64 [m].

    Args:
        sums: float64, from `prefix_sums`.
        lows: int64 [m].
        highs: int64 [m], not below `lows`.
        goals: float64 [m].
    """
    places = torch.empty_like(lows)
    if lows.numel():
        _upper_kernel[(triton.cdiv(lows.numel(), _BLOCK),)](
            sums, lows, highs, goals, places, lows.numel(), BLOCK=_BLOCK
        )
    return places


def segment_sums(ptr: Tensor, values: Tensor) -> Tensor:
    """Sums of each row's entries in a fixed order; float64 [n]."""
    lengths = ptr[1:] - ptr[:-1]
    if values.numel() == 0 or lengths.numel() == 0:
        return torch.zeros(lengths.shape, dtype=torch.float64, device=ptr.device)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0.0)


def segment_counts(ptr: Tensor, marks: Tensor) -> Tensor:
    """How many marks (bool) are set in each row; int64 [n]."""
    before = torch.zeros(marks.numel() + 1, dtype=torch.int64, device=marks.device)
    torch.cumsum(marks, 0, out=before[1:])
    return before[ptr[1:]] - before[ptr[:-1]]


def segment_largest(ptr: Tensor, values: Tensor) -> Tensor:
    """The largest of each row's entries (not negative), 0 for an empty row; float64 [n]."""
    lengths = ptr[1:] - ptr[:-1]
    if values.numel() == 0 or lengths.numel() == 0:
        return torch.zeros(lengths.shape, dtype=torch.float64, device=ptr.device)
    return torch.segment_reduce(values, "max", lengths=lengths, unsafe=True, initial=0.0)
