"""The draws of `rng` as Triton functions: the same bits on a GPU.

Only modules of kernels import this one; the runtime goes without Triton where no GPU is.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.sampling import rng

GOLDEN = tl.constexpr(int(rng.GOLDEN))
ODD = tl.constexpr(int(rng.ODD))
MIX_1 = tl.constexpr(int(rng.MIX_1))
MIX_2 = tl.constexpr(int(rng.MIX_2))


@triton.jit
@no_type_check
def mix(z):
    """SplitMix64's finaliser on uint64."""
    z = (z ^ (z >> 30)) * tl.full((), MIX_1, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), MIX_2, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
@no_type_check
def key_of(stream, ids):
    """First half of a draw: what all the draws of one id share; `stream` as `signed` gives it."""
    spread = ids.to(tl.uint64) * tl.full((), ODD, tl.uint64)
    return mix(stream.to(tl.int64).to(tl.uint64) ^ spread)


@triton.jit
@no_type_check
def value_of(key, j):
    """Second half: the j-th number of a key; j is a tensor of any integer type."""
    return mix(key + (j.to(tl.uint64) + 1) * tl.full((), GOLDEN, tl.uint64))


@triton.jit
@no_type_check
def bounded(bits, bound):
    """High 64 bits of bits * bound, as int64; `bound` is a positive integer tensor."""
    return tl.umulhi(bits, bound.to(tl.uint64)).to(tl.int64)


@triton.jit(do_not_specialize=["stream"])
@no_type_check
def _draw_kernel(stream, ids, turns, bounds, out, chosen, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    bits = value_of(
        key_of(stream, tl.load(ids + at, mask=mask, other=0)),
        tl.load(turns + at, mask=mask, other=0),
    )
    tl.store(out + at, bits.to(tl.int64, bitcast=True), mask=mask)
    tl.store(chosen + at, bounded(bits, tl.load(bounds + at, mask=mask, other=1)), mask=mask)


@triton.jit
@no_type_check
def _rows_kernel(streams, owners, ids, turns, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    stream = tl.load(streams + tl.load(owners + at, mask=mask, other=0), mask=mask, other=0)
    key = key_of(stream, tl.load(ids + at, mask=mask, other=0))
    bits = value_of(key, tl.load(turns + at, mask=mask, other=0))
    tl.store(out + at, bits.to(tl.int64, bitcast=True), mask=mask)


def draw_rows(streams: Tensor, owners: Tensor, ids: Tensor, turns: Tensor) -> Tensor:
    """`rng.draw` of ids by several streams at once; the bits held in int64 [n].

    Args:
        streams: int64 [k], as `signed` gives them.
        owners: int64 [n], which stream an id draws from.
        ids: int64 [n], contiguous as all.
        turns: int64 [n], j.
    """
    bits = torch.empty_like(ids)
    if ids.numel():
        grid = (triton.cdiv(ids.numel(), 256),)
        _rows_kernel[grid](streams, owners, ids, turns, bits, ids.numel(), BLOCK=256)
    return bits


def signed(stream: Any) -> int:
    """A stream's 64 bits as a signed number, the form in which kernels take it."""
    value = int(stream)
    return value - (1 << 64) if value >= 1 << 63 else value


def draw(stream: Any, ids: Tensor, j: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """`rng.draw` and `rng.bounded` of it, on the tensors' device.

    Args:
        stream: from `rng.stream`.
        ids: int64 [n], contiguous.
        j: int64 [n], contiguous.
        bounds: int64 [n], positive.

    Returns:
        The 64 bits of each draw held in int64 [n], and the bounded numbers, int64 [n].
    """
    bits, chosen = torch.empty_like(ids), torch.empty_like(ids)
    if ids.numel():
        grid = (triton.cdiv(ids.numel(), 256),)
        _draw_kernel[grid](signed(stream), ids, j, bounds, bits, chosen, ids.numel(), BLOCK=256)
    return bits, chosen
