"""The draws of `rng` as Triton functions: the same bits on a GPU.

Only modules of kernels import this one; the runtime goes without Triton where no GPU is.

Random words on a device: plain draws, and those of dependent batches, as `dependent` has them.

The smooth mixing of two streams takes the normal distribution and its inverse in the operations
that IEEE 754 rounds exactly, one torch call each: no compiler joins a product and a sum here, so
the bits are those of numpy and numba. Two of torch's shortcuts are avoided (`square_root`,
`_constant`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnplan.runtime.rounding import square_root
from gnnplan.runtime.sampling import dependent as shared, rng
from gnnplan.runtime.sampling.dependent import HopStreams
from gnnplan.runtime.sampling.rng import mix as rng_mix

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


_ALL_53 = (1 << 53) - 1
_ALL_52 = (1 << 52) - 1
_HALF_WORD = 2.0**63
LOWEST = -(1 << 63)
"""Added to a word (exclusive or), it makes signed comparison that of unsigned numbers."""


def unit(words: Tensor) -> Tensor:
    """Words as float64 in [0, 1), from their high 53 bits."""
    return high_bits(words).to(torch.float64) * 2.0**-53


def high_bits(words: Tensor) -> Tensor:
    """The high 53 bits of each word, as a number."""
    return (words >> 11) & _ALL_53


def plain_words(stream: int, ids: Tensor, turns: Tensor | None = None) -> Tensor:
    """`rng.draw(stream, ids, turns)`, the bits held in int64.

    Args:
        stream: as `HopStreams` holds it.
        ids: int64 [n].
        turns: int64 [n], or None: 0.
    """
    turns = torch.zeros_like(ids) if turns is None else turns
    return draw(stream, ids.contiguous(), turns.contiguous(), torch.ones_like(ids))[0]


def hop_words(streams: HopStreams, hop: int, ids: Tensor, turns: Tensor | None = None) -> Tensor:
    """`HopStreams.words` on the ids' device; int64 [n]."""
    one = plain_words(int(streams.first[hop]), ids, turns)
    if streams.plain:
        return one
    other = plain_words(int(streams.second[hop]), ids, turns)
    return normal_word(streams.cosine * normal(one) + streams.sine * normal(other))


@dataclass(frozen=True, slots=True)
class StackStreams:
    """What k batches draw from at one hop, on the device."""

    first: Tensor
    """int64 [k], as all."""
    second: Tensor
    cosine: Tensor
    """float64 [k]."""
    sine: Tensor
    plain: bool
    """Whether every batch draws the words of its first stream."""

    @staticmethod
    def of(steps: Sequence[HopStreams], hop: int, device: torch.device) -> "StackStreams":
        """The streams of some steps."""
        return StackStreams(
            first=torch.tensor([signed(s.first[hop]) for s in steps], device=device),
            second=torch.tensor([signed(s.second[hop]) for s in steps], device=device),
            cosine=torch.tensor([s.cosine for s in steps], dtype=torch.float64, device=device),
            sine=torch.tensor([s.sine for s in steps], dtype=torch.float64, device=device),
            plain=all(s.plain for s in steps),
        )

    def words(self, owners: Tensor, ids: Tensor, turns: Tensor | None = None) -> Tensor:
        """`HopStreams.words` of ids (int64 [n]) by the streams of batches `owners` (int64 [n])."""
        turns = torch.zeros_like(ids) if turns is None else turns
        one = draw_rows(self.first, owners, ids, turns)
        if self.plain:
            return one
        other = draw_rows(self.second, owners, ids, turns)
        sine = self.sine[owners]
        mixed = normal_word(self.cosine[owners] * normal(one) + sine * normal(other))
        return torch.where(sine == 0, one, mixed)

    def mixed(self) -> "StackStreams":
        """Streams that are a step away from these, as the race after darts takes them."""
        moved = [signed(rng_mix(bits % (1 << 64))) for bits in self.first.tolist()]
        return replace(self, first=torch.tensor(moved, device=self.first.device))


def normal(words: Tensor) -> Tensor:
    """`dependent_normal.normal` of words held in int64; float64 of their shape."""
    u = (((words >> 12) & _ALL_52).to(torch.float64) + 0.5) * shared._STEP
    q = u - 0.5
    r = square_root(-_logarithm(torch.minimum(u, 1.0 - u)))
    size = torch.where(r <= shared._TAIL, shared._middle(r), shared._outer(r))
    tail = torch.where(q < 0, -size, size)
    return torch.where(q.abs() <= shared._CENTRE, shared._centre(q), tail)


def normal_word(x: Tensor) -> Tensor:
    """`dependent_normal.normal_word`: Phi(x) as a word held in int64."""
    z = x.abs()
    half = 0.5 * z * z
    turns = torch.floor(half / _constant(shared._LN2, half) + 0.5)
    small = shared._polynomial(half - turns * shared._LN2, shared._EXP)
    # 2^-turns by its exponent's bits: |x| is below 12, so turns stays below 110.
    power = ((1023 - turns.to(torch.int64)) << 52).view(torch.float64)
    exponential = small * power
    fraction = z + 1.0 / (z + 2.0 / (z + 3.0 / (z + 4.0 / (z + 0.65))))
    far = exponential / fraction / _constant(shared._ROOT_TWO_PI, z)
    tail = torch.where(z < shared._FAR, shared._near_tail(z, exponential), far)
    probability = torch.where(x > 0, 1.0 - tail, tail)
    scaled = torch.clamp(probability, max=shared._BELOW_ONE) * shared._WORD
    high = scaled >= _HALF_WORD
    whole = torch.where(high, scaled - _HALF_WORD, scaled).to(torch.int64)
    return torch.where(high, whole ^ LOWEST, whole)


def _constant(value: float, like: Tensor) -> Tensor:
    """A divisor where it is used: by a host's number torch multiplies with the reciprocal."""
    return torch.full((), value, dtype=torch.float64, device=like.device)


def _logarithm(x: Tensor) -> Tensor:
    """`dependent`'s natural logarithm, of 0 < x < 1."""
    mantissa, exponent = torch.frexp(x)
    low = (mantissa < shared._ROOT_HALF).to(torch.float64)
    mantissa = mantissa + mantissa * low
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = shared._polynomial(ratio * ratio, shared._ATANH)
    return (exponent.to(torch.float64) - low) * shared._LN2 + 2.0 * ratio * series
