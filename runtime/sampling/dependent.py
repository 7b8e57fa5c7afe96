"""Choose the streams that dependent mini-batches draw from (formulas 5.5; GraphBolt's kappa).

Each batch has the law that it has alone. Only successive batches are correlated, so that they share
vertices and a cache sees them again. A segment is kappa batches long:

- smooth: words move from one stream to the next, r(c) = Phi(cos(c pi/2) n(z1) + sin(c pi/2) n(z2)),
  with c = (i mod kappa) / kappa and n = Phi^-1 of the word drawn. r(0) is the word of z1 itself.
- frozen: all batches of a segment draw the same words.
- kappa = infinity: one frozen stream for the whole run.

Phi and its inverse must have the same bits on every machine, so only operations that IEEE 754
rounds exactly occur: + - * /, square root and powers of two. The inverse is Wichura's (Algorithm AS
241, PPND16, Applied Statistics 37, 1988; relative error 1e-16), with a logarithm by the series of
atanh. Phi is Hart's approximation (Computer Approximations, 1968, algorithm 5666) in the form of G.
West (Wilmott, 2005), error 1e-15, with an exponential by a Taylor series after reduction.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import no_type_check

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.rng import (
    Integers,
    Purpose,
    draw,
    hop_streams,
    key_kernel,
    value_kernel,
)

_CENTRE = 0.425
_TAIL = 5.0
_FAR = 7.07106781186547
_ROOT_TWO_PI = 2.506628274631000502
_LN2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476
_BELOW_ONE = 1.0 - 2.0**-53
_WORD = 2.0**64
_STEP = 2.0**-52
_TWELVE = np.uint64(12)

# Polynomials, highest power first. AS 241: numerator and denominator of the three regions.
_CENTRE_OVER = (
    2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
    13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080,
)  # fmt: skip
_CENTRE_UNDER = (
    5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
    5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0,
)  # fmt: skip
_MIDDLE_OVER = (
    7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
    1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959,
    1.42343711074968357734,
)  # fmt: skip
_MIDDLE_UNDER = (
    1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
    0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187,
    1.0,
)  # fmt: skip
_OUTER_OVER = (
    2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386,
    0.026532189526576123093, 0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699,
    6.6579046435011037772,
)  # fmt: skip
_OUTER_UNDER = (
    2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5,
    7.868691311456132591e-4, 0.0148753612908506148525, 0.13692988092273580531,
    0.59983220655588793769, 1.0,
)  # fmt: skip
_HART_OVER = (
    0.0352624965998911, 0.700383064443688, 6.37396220353165, 33.912866078383, 112.079291497871,
    221.213596169931, 220.206867912376,
)  # fmt: skip
_HART_UNDER = (
    0.0883883476483184, 1.75566716318264, 16.064177579207, 86.7807322029461, 296.564248779674,
    637.333633378831, 793.826512519948, 440.413735824752,
)  # fmt: skip
_ATANH = tuple(1.0 / (2 * i + 1) for i in reversed(range(13)))
_EXP = tuple((-1.0) ** i / math.factorial(i) for i in reversed(range(17)))


@register_jitable
@no_type_check
def _polynomial(x, coefficients):
    """Evaluate a polynomial by Horner's scheme; for arrays and single numbers, like all here."""
    value = x * 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


@register_jitable
@no_type_check
def _logarithm(mantissa, exponent):
    """Return the natural logarithm of mantissa * 2^exponent, mantissa in [1/2, 1)."""
    low = mantissa < _ROOT_HALF
    mantissa = mantissa + mantissa * low
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    return (exponent - low) * _LN2 + 2.0 * ratio * _polynomial(ratio * ratio, _ATANH)


@register_jitable
@no_type_check
def _centre(q):
    r = 0.180625 - q * q
    return q * _polynomial(r, _CENTRE_OVER) / _polynomial(r, _CENTRE_UNDER)


@register_jitable
@no_type_check
def _middle(r):
    return _polynomial(r - 1.6, _MIDDLE_OVER) / _polynomial(r - 1.6, _MIDDLE_UNDER)


@register_jitable
@no_type_check
def _outer(r):
    return _polynomial(r - _TAIL, _OUTER_OVER) / _polynomial(r - _TAIL, _OUTER_UNDER)


@register_jitable
@no_type_check
def _near_tail(z, exponential):
    return exponential * _polynomial(z, _HART_OVER) / _polynomial(z, _HART_UNDER)


@register_jitable
@no_type_check
def _far_tail(z, exponential):
    fraction = z + 1.0 / (z + 2.0 / (z + 3.0 / (z + 4.0 / (z + 0.65))))
    return exponential / fraction / _ROOT_TWO_PI


def normal(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return standard normal numbers from the high 52 bits of random words, by inversion."""
    u = ((bits >> _TWELVE).astype(np.float64) + 0.5) * _STEP
    q = u - 0.5
    out = _centre(q)
    tail = np.abs(q) > _CENTRE
    r = np.sqrt(-_logarithm(*np.frexp(np.minimum(u, 1.0 - u)[tail])))
    size = np.where(r <= _TAIL, _middle(r), _outer(r))
    out[tail] = np.where(q[tail] < 0, -size, size)
    return out


def normal_word(x: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return Phi(x) as a 64-bit fraction: a uniform random word where x is standard normal."""
    z = np.abs(x)
    half = 0.5 * z * z
    turns = np.floor(half / _LN2 + 0.5)
    small = _polynomial(half - turns * _LN2, _EXP)
    exponential = np.ldexp(small, -turns.astype(np.int32))
    tail = np.where(z < _FAR, _near_tail(z, exponential), _far_tail(z, exponential))
    probability = np.where(x > 0, 1.0 - tail, tail)
    return (np.minimum(probability, _BELOW_ONE) * _WORD).astype(np.uint64)


@kernel
@no_type_check
def normal_kernel(bits):
    """Compute `normal` of one word in numba."""
    u = (np.float64(bits >> _TWELVE) + 0.5) * _STEP
    q = u - 0.5
    if abs(q) <= _CENTRE:
        return _centre(q)
    mantissa, exponent = math.frexp(min(u, 1.0 - u))
    r = math.sqrt(-_logarithm(mantissa, exponent))
    size = _middle(r) if r <= _TAIL else _outer(r)
    return -size if q < 0 else size


@kernel
@no_type_check
def normal_word_kernel(x):
    """Compute `normal_word` of one number in numba."""
    z = abs(x)
    half = 0.5 * z * z
    turns = math.floor(half / _LN2 + 0.5)
    exponential = math.ldexp(_polynomial(half - turns * _LN2, _EXP), -int(turns))
    tail = _near_tail(z, exponential) if z < _FAR else _far_tail(z, exponential)
    probability = 1.0 - tail if x > 0 else tail
    return np.uint64(min(probability, _BELOW_ONE) * _WORD)


@kernel
@no_type_check
def normals_kernel(bits, count, out):
    """Write `normal` of the first `count` words to `out`; no branch in the middle of the law."""
    for i in range(count):
        u = (np.float64(np.int64(bits[i] >> _TWELVE)) + 0.5) * _STEP
        out[i] = _centre(u - 0.5)
    for i in range(count):
        u = (np.float64(np.int64(bits[i] >> _TWELVE)) + 0.5) * _STEP
        if abs(u - 0.5) > _CENTRE:
            out[i] = normal_kernel(bits[i])


@kernel
@no_type_check
def normal_words_kernel(x, count, powers, tails, out):
    """Write `normal_word` of the first `count` numbers to `out`, in loops that vectorise.

    `powers` (int64) and `tails` (float64) are scratch of at least `count`.
    """
    for i in range(count):
        half = 0.5 * x[i] * x[i]
        turns = np.floor(half / _LN2 + 0.5)
        powers[i] = (1023 - np.int64(turns)) << 52  # 2^-turns, by its exponent
        tails[i] = _polynomial(half - turns * _LN2, _EXP)
    scales = powers.view(np.float64)
    for i in range(count):
        tails[i] = _near_tail(abs(x[i]), tails[i] * scales[i])
    for i in range(count):
        probability = 1.0 - tails[i] if x[i] > 0 else tails[i]
        out[i] = np.uint64(min(probability, _BELOW_ONE) * _WORD)
    for i in range(count):
        if abs(x[i]) >= _FAR:
            out[i] = normal_word_kernel(x[i])


CHUNK = 512
"""Words worked on together, so that their scratch stays in the first-level cache."""


class Dependence(StrEnum):
    """How the batches of a segment depend on each other."""

    SMOOTH = "smooth"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class HopStreams:
    """Streams that one step draws from, hop by hop."""

    first: NDArray[np.uint64]
    """Stream z1 of each hop, shape (L,)."""
    second: NDArray[np.uint64]
    """Stream z2 of each hop, shape (L,); unused where sine is 0."""
    cosine: float
    sine: float

    @property
    def plain(self) -> bool:
        """Tell whether the words are those of `rng.draw(first[hop], id, j)`."""
        return self.sine == 0.0

    def words(self, hop: int, id: Integers, j: Integers = 0) -> NDArray[np.uint64]:
        """Draw the j-th random word of each id at a hop: uint64 of the broadcast shape."""
        words = draw(self.first[hop], id, j)
        if self.plain:
            return words
        one, other = np.atleast_1d(words), np.atleast_1d(draw(self.second[hop], id, j))
        mixed = normal_word(self.cosine * normal(one) + self.sine * normal(other))
        return mixed.reshape(words.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPolicy:
    """Chooses the streams of every step; equal policies choose the same everywhere.

    Args:
        seed: Run's seed.
        purpose: What the draws are for.
        kappa: Batches per segment, a whole number of at least 1, or infinity.
        dependence: Smooth or frozen within a segment.
        layer_dependent: All hops of a step draw from one stream, so that a vertex taken at one hop
            is likely taken at the next; else each hop has its own.
        steps_per_epoch: Steps of an epoch, so that segments go on beyond its end; None: each epoch
            begins a new segment.
    """

    seed: int = 0
    purpose: Purpose = Purpose.VERTEX
    kappa: int | float = 1
    dependence: Dependence = Dependence.SMOOTH
    layer_dependent: bool = False
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if not (self.kappa >= 1 and (math.isinf(self.kappa) or self.kappa == int(self.kappa))):
            raise SamplerError(
                f"expected kappa to be a whole number of batches, at least 1 (or inf: one frozen "
                f"sample), found {self.kappa}; 1 makes batches independent"
            )

    def streams(self, epoch: int, step: int, num_hops: int, first_hop: int = 0) -> HopStreams:
        """Return the streams of the hops first_hop .. first_hop + num_hops - 1 of one step."""
        hops = range(first_hop, first_hop + num_hops)
        if math.isinf(self.kappa):
            first = self._segment(0, 0, hops)
            return HopStreams(first, first, 1.0, 0.0)
        if self.steps_per_epoch is not None:
            epoch, step = 0, epoch * self.steps_per_epoch + step
        segment, place = divmod(step, int(self.kappa))
        first = self._segment(epoch, segment, hops)
        if place == 0 or self.dependence is Dependence.FROZEN:
            return HopStreams(first, first, 1.0, 0.0)
        cosine, sine = quarter_turn(place / int(self.kappa))
        return HopStreams(first, self._segment(epoch, segment + 1, hops), cosine, sine)

    def _segment(self, epoch: int, segment: int, hops: range) -> NDArray[np.uint64]:
        first, stride = (0, 0) if self.layer_dependent else (hops.start, 1)
        return hop_streams(self.seed, epoch, segment, first, len(hops), self.purpose, stride=stride)


def quarter_turn(c: float) -> tuple[float, float]:
    """Return cosine and sine of c pi/2, 0 <= c <= 1, with the same bits on any machine."""
    angle = c * (math.pi / 2)
    term, cosine, sine = 1.0, 0.0, 0.0
    for power in range(28):
        sign = -1.0 if power & 2 else 1.0
        if power & 1:
            sine += sign * term
        else:
            cosine += sign * term
        term *= angle / (power + 1)
    return cosine, sine


@kernel
@no_type_check
def word_kernel(first, second, cosine, sine, id, j):
    """Compute `HopStreams.words` of one id and one turn in numba."""
    word = value_kernel(key_kernel(first, id), j)
    if sine == 0.0:
        return word
    other = value_kernel(key_kernel(second, id), j)
    return normal_word_kernel(cosine * normal_kernel(word) + sine * normal_kernel(other))


@kernel
@no_type_check
def words_kernel(first, second, cosine, sine, ids, count, out):
    """Write the words (turn 0) of the first `count` ids to `out`."""
    if sine == 0.0:
        for i in range(count):
            out[i] = value_kernel(key_kernel(first, ids[i]), 0)
        return
    words, powers = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int64)
    one, other = np.empty(CHUNK, np.float64), np.empty(CHUNK, np.float64)
    for begin in range(0, count, CHUNK):
        size = min(CHUNK, count - begin)
        for i in range(size):
            words[i] = value_kernel(key_kernel(first, ids[begin + i]), 0)
        normals_kernel(words, size, one)
        for i in range(size):
            words[i] = value_kernel(key_kernel(second, ids[begin + i]), 0)
        normals_kernel(words, size, other)
        for i in range(size):
            one[i] = cosine * one[i] + sine * other[i]
        normal_words_kernel(one, size, powers, other, out[begin:])
