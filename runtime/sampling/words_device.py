"""Random words on a device: plain draws, and those of dependent batches, as `dependent` has them.

The smooth mixing of two streams takes the normal distribution and its inverse in the operations
that IEEE 754 rounds exactly, one torch call each: no compiler joins a product and a sum here, so
the bits are those of numpy and numba. Two of torch's shortcuts are avoided (`rounding.root`,
`_constant`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.rounding import root
from runtime.sampling import dependent_normal as shared
from runtime.sampling.dependent import HopStreams
from runtime.sampling.rng import mix
from runtime.sampling.rng_triton import draw, draw_rows, signed

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
        moved = [signed(mix(bits % (1 << 64))) for bits in self.first.tolist()]
        return replace(self, first=torch.tensor(moved, device=self.first.device))


def normal(words: Tensor) -> Tensor:
    """`dependent_normal.normal` of words held in int64; float64 of their shape."""
    u = (((words >> 12) & _ALL_52).to(torch.float64) + 0.5) * shared._STEP
    q = u - 0.5
    r = root(-_logarithm(torch.minimum(u, 1.0 - u)))
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
    """`dependent_normal`'s natural logarithm, of 0 < x < 1."""
    mantissa, exponent = torch.frexp(x)
    low = (mantissa < shared._ROOT_HALF).to(torch.float64)
    mantissa = mantissa + mantissa * low
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = shared._polynomial(ratio * ratio, shared._ATANH)
    return (exponent.to(torch.float64) - low) * shared._LN2 + 2.0 * ratio * series
