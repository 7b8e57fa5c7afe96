"""Draw the numbers of `rng` and `dependent` on a GPU: the same bits, as Triton and torch functions.

Only modules of kernels import this one; the runtime goes without Triton where no GPU is.

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

from gnnplan.runtime.processor import square_root
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
    """Apply SplitMix64's finaliser to uint64."""
    z = (z ^ (z >> 30)) * tl.full((), MIX_1, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), MIX_2, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
@no_type_check
def key_of(stream, ids):
    """Compute what all the draws of one id share; `stream` as `signed` gives it."""
    spread = ids.to(tl.uint64) * tl.full((), ODD, tl.uint64)
    return mix(stream.to(tl.int64).to(tl.uint64) ^ spread)


@triton.jit
@no_type_check
def value_of(key, j):
    """Compute the j-th number of a key; j is a tensor of any integer type."""
    return mix(key + (j.to(tl.uint64) + 1) * tl.full((), GOLDEN, tl.uint64))


@triton.jit
@no_type_check
def bounded(bits, bound):
    """Return the high 64 bits of bits * bound, as int64; `bound` is a positive integer tensor."""
    return tl.umulhi(bits, bound.to(tl.uint64)).to(tl.int64)


@triton.jit
@no_type_check
def stream_of(seed, epoch, step, hop, purpose):
    """Compute `rng.stream` as uint64; all arguments are int64 tensors of one shape."""
    golden = tl.full((), GOLDEN, tl.uint64)
    state = mix(seed.to(tl.uint64) + golden)
    state = mix((state ^ epoch.to(tl.uint64)) + golden)
    state = mix((state ^ step.to(tl.uint64)) + golden)
    state = mix((state ^ hop.to(tl.uint64)) + golden)
    return mix((state ^ purpose.to(tl.uint64)) + golden)


@triton.jit
@no_type_check
def write_streams(cursor, streams, HOPS: tl.constexpr, LANES: tl.constexpr, PURPOSE: tl.constexpr):
    """Write the streams of a batch's hops; a cursor has step, seed, epoch and first step."""
    hop = tl.arange(0, LANES).to(tl.int64)
    same = hop * 0
    word = stream_of(
        same + tl.load(cursor + 3), same + tl.load(cursor + 4),
        same + tl.load(cursor + 5) + tl.load(cursor + 1), hop, same + PURPOSE,
    )  # fmt: skip
    tl.store(streams + hop, word.to(tl.int64, bitcast=True), mask=hop < HOPS)


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
    """Draw `rng.draw` of ids, turns j, by streams[owners[i]]; the bits held in int64 [n]."""
    bits = torch.empty_like(ids)
    if ids.numel():
        grid = (triton.cdiv(ids.numel(), 256),)
        _rows_kernel[grid](streams, owners, ids, turns, bits, ids.numel(), BLOCK=256)
    return bits


def signed(stream: Any) -> int:
    """Return a stream's 64 bits as a signed number, the form in which kernels take it."""
    value = int(stream)
    return value - (1 << 64) if value >= 1 << 63 else value


def draw(stream: Any, ids: Tensor, j: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Draw `rng.draw`, and `rng.bounded` of it, on the tensors' device; contiguous int64 [n].

    Return the 64 bits of each draw held in int64 [n], and the bounded numbers.
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
"""Word whose exclusive or makes signed comparison that of unsigned numbers."""


def unit(words: Tensor) -> Tensor:
    """Return words as float64 in [0, 1), from their high 53 bits."""
    return high_bits(words).to(torch.float64) * 2.0**-53


def high_bits(words: Tensor) -> Tensor:
    """Return the high 53 bits of each word, as a number."""
    return (words >> 11) & _ALL_53


def plain_words(stream: int, ids: Tensor, turns: Tensor | None = None) -> Tensor:
    """Draw `rng.draw(stream, ids, turns)`, the bits held in int64; without turns j = 0."""
    turns = torch.zeros_like(ids) if turns is None else turns
    return draw(stream, ids.contiguous(), turns.contiguous(), torch.ones_like(ids))[0]


def hop_words(streams: HopStreams, hop: int, ids: Tensor, turns: Tensor | None = None) -> Tensor:
    """Draw `HopStreams.words` on the ids' device; int64 [n]."""
    one = plain_words(int(streams.first[hop]), ids, turns)
    if streams.plain:
        return one
    other = plain_words(int(streams.second[hop]), ids, turns)
    return normal_word(streams.cosine * normal(one) + streams.sine * normal(other))


@dataclass(frozen=True, slots=True)
class StackStreams:
    """Streams that k batches draw from at one hop, on the device, int64 or float64 [k]."""

    first: Tensor
    second: Tensor
    cosine: Tensor
    sine: Tensor
    plain: bool
    """Whether every batch draws the words of its first stream."""

    @staticmethod
    def of(steps: Sequence[HopStreams], hop: int, device: torch.device) -> "StackStreams":
        """Return the streams of some steps."""
        return StackStreams(
            first=torch.tensor([signed(s.first[hop]) for s in steps], device=device),
            second=torch.tensor([signed(s.second[hop]) for s in steps], device=device),
            cosine=torch.tensor([s.cosine for s in steps], dtype=torch.float64, device=device),
            sine=torch.tensor([s.sine for s in steps], dtype=torch.float64, device=device),
            plain=all(s.plain for s in steps),
        )

    def words(self, owners: Tensor, ids: Tensor, turns: Tensor | None = None) -> Tensor:
        """Draw `HopStreams.words` of ids (int64 [n]) by the streams of their batches."""
        turns = torch.zeros_like(ids) if turns is None else turns
        one = draw_rows(self.first, owners, ids, turns)
        if self.plain:
            return one
        other = draw_rows(self.second, owners, ids, turns)
        sine = self.sine[owners]
        mixed = normal_word(self.cosine[owners] * normal(one) + sine * normal(other))
        return torch.where(sine == 0, one, mixed)

    def mixed(self) -> "StackStreams":
        """Return streams that are a step away from these, as the race after darts takes them."""
        moved = [signed(rng_mix(bits % (1 << 64))) for bits in self.first.tolist()]
        return replace(self, first=torch.tensor(moved, device=self.first.device))


def normal(words: Tensor) -> Tensor:
    """Compute `dependent.normal` of words held in int64; float64 of their shape."""
    u = (((words >> 12) & _ALL_52).to(torch.float64) + 0.5) * shared._STEP
    q = u - 0.5
    r = square_root(-_logarithm(torch.minimum(u, 1.0 - u)))
    size = torch.where(r <= shared._TAIL, shared._middle(r), shared._outer(r))
    tail = torch.where(q < 0, -size, size)
    return torch.where(q.abs() <= shared._CENTRE, shared._centre(q), tail)


def normal_word(x: Tensor) -> Tensor:
    """Compute `dependent.normal_word`: Phi(x) as a word held in int64."""
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
    """Make a divisor on the device: by a host's number torch multiplies with the reciprocal."""
    return torch.full((), value, dtype=torch.float64, device=like.device)


def _logarithm(x: Tensor) -> Tensor:
    """Return `dependent`'s natural logarithm, of 0 < x < 1."""
    mantissa, exponent = torch.frexp(x)
    low = (mantissa < shared._ROOT_HALF).to(torch.float64)
    mantissa = mantissa + mantissa * low
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = shared._polynomial(ratio * ratio, shared._ATANH)
    return (exponent.to(torch.float64) - low) * shared._LN2 + 2.0 * ratio * series
