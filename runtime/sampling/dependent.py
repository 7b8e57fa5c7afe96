"""Dependent mini-batches: which stream each batch draws from (formulas 5.5; GraphBolt's kappa).

A sampler asks its policy for the streams of a step and draws per vertex (or per vertex and turn)
from them. Nothing else changes: every batch has the law it has alone, and only the sequence of
batches is correlated, so that consecutive ones share vertices and a cache sees them again.

- smooth: a segment of kappa batches goes from the words of one stream to those of the next:
  r(c) = Phi(cos(c pi/2) n(z1) + sin(c pi/2) n(z2)), c = (i mod kappa) / kappa, n = Phi^-1 of the
  word drawn. r(0) is the word of z1 itself, so kappa = 1 is the plain generator.
- frozen: all kappa batches of a segment (a mega-batch) draw the very same words.
- kappa = infinity: one frozen stream for the whole run.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.errors import SamplerError
from runtime.sampling.compiled import kernel
from runtime.sampling.dependent_normal import (
    normal,
    normal_kernel,
    normal_word,
    normal_word_kernel,
    normal_words_kernel,
    normals_kernel,
)
from runtime.sampling.rng import Integers, Purpose, draw, key_kernel, stream, value_kernel

CHUNK = 512
"""Words that are worked on together: their scratch stays in the first-level cache."""


class Dependence(StrEnum):
    """How the batches of a segment hang together."""

    SMOOTH = "smooth"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class HopStreams:
    """What one step draws from, hop by hop."""

    first: NDArray[np.uint64]
    """Stream z1 of each hop. Shape (L,)."""
    second: NDArray[np.uint64]
    """Stream z2 of each hop; unused where sine is 0. Shape (L,)."""
    cosine: float
    sine: float

    @property
    def plain(self) -> bool:
        """Whether the words are those of `rng.draw(first[hop], id, j)`."""
        return self.sine == 0.0

    def words(self, hop: int, id: Integers, j: Integers = 0) -> NDArray[np.uint64]:
        """The j-th random word of each id at a hop: uint64 of the broadcast shape."""
        words = draw(self.first[hop], id, j)
        if self.plain:
            return words
        one, other = np.atleast_1d(words), np.atleast_1d(draw(self.second[hop], id, j))
        mixed = normal_word(self.cosine * normal(one) + self.sine * normal(other))
        return mixed.reshape(words.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPolicy:
    """Chooses the streams of every step; two equal policies choose the same everywhere.

    Args:
        seed: The run's seed.
        purpose: What the draws are for.
        kappa: Batches per segment, a whole number of at least 1, or infinity.
        dependence: Smooth or frozen within a segment; with kappa 1 they are the same.
        layer_dependent: All hops of a step draw from one stream, so that a vertex taken at one
            hop is likely taken at the next. Otherwise each hop has its own, derived by hash.
        steps_per_epoch: Lets segments run on over the ends of epochs. None starts a new one with
            each epoch.

    Raises:
        SamplerError: kappa is below 1, no whole number, or not a number.
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
        """Streams of the hops first_hop .. first_hop + num_hops - 1 of one step."""
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
        numbers = [0 if self.layer_dependent else hop for hop in hops]
        words = [stream(self.seed, epoch, segment, hop, self.purpose) for hop in numbers]
        return np.array(words, dtype=np.uint64)


def quarter_turn(c: float) -> tuple[float, float]:
    """Cosine and sine of c pi/2, 0 <= c <= 1, by Taylor series: the same bits on any machine."""
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
    """Numba twin of `HopStreams.words` for one id and one turn."""
    word = value_kernel(key_kernel(first, id), j)
    if sine == 0.0:
        return word
    other = value_kernel(key_kernel(second, id), j)
    return normal_word_kernel(cosine * normal_kernel(word) + sine * normal_kernel(other))


@kernel
@no_type_check
def words_kernel(first, second, cosine, sine, ids, count, out):
    """The words (turn 0) of the first `count` ids."""
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
