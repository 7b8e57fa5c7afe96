"""Counter-based random numbers: a pure function of (stream, id, j), the same on every worker.

A sampler chooses the stream (the policy: seed, epoch, step, hop, purpose); what is drawn then
depends on a global node or edge id alone, never on a row, a rank, a thread or a batch size. So one
process and any split of the seeds over ranks draw the same neighbours.

The mixer is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014; variant 13 of Stafford):
`key = mix(stream ^ id * ODD)`, `draw = mix(key + (j + 1) * GOLDEN)`, that is, the SplitMix64
sequence seeded by the key. Only uint64 multiply, xor, shift and add occur, so numpy, numba and
Triton give the same bits.
"""

from enum import IntEnum
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.intrinsics import mulhi
from gnnplan.runtime.sampling.compiled import inlined_kernel, kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ODD = np.uint64(0xD1342543DE82EF95)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)

Integers = int | np.integer | NDArray[np.integer]

_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = int(GOLDEN), int(MIX_1), int(MIX_2)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


class Purpose(IntEnum):
    """What random numbers are for; two purposes never share a stream."""

    NEIGHBOR = 1
    SHUFFLE = 2
    CALIBRATION = 3
    """Profiling and probing: draws that training must not repeat."""
    DROPOUT = 4
    """Seeds of torch's generator, by step and rank (in the place of hop)."""
    NEGATIVE = 9
    """Negative destinations of links, by the link's global id."""
    VERTEX = 5
    """Inclusion of a candidate vertex: one number, shared by all that may draw the vertex."""
    DART = 6
    """Darts thrown at a probability row, by the dart's number."""
    BOUNDARY = 7
    """Boundary nodes of full-graph training, by layer (in the place of hop) and receiving part."""
    EDGE = 8
    """Edges kept in full-graph training, by layer (in the place of hop)."""


def stream(seed: int, epoch: int, step: int, hop: int, purpose: Purpose) -> np.uint64:
    """Derive the stream of one hop of one step.

    `seed` is any integer, taken modulo 2^64; `hop` is 0 for the neighbours of the seeds, then 1,
    ...
    """
    state = 0
    for word in (seed, epoch, step, hop, int(purpose)):
        state = _mix_int((state ^ (word & _MASK)) + _GOLDEN & _MASK)
    return np.uint64(state)


def _mix_int(z: int) -> int:
    """Apply `mix` to one Python integer (numpy scalars would warn of the wanted overflow)."""
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def mix(z: Integers) -> NDArray[np.uint64]:
    """Apply SplitMix64's finaliser, a bijection of uint64, element by element."""
    z = np.asarray(z, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (z ^ (z >> _S30)) * MIX_1
        z = (z ^ (z >> _S27)) * MIX_2
    return np.asarray(z ^ (z >> _S31))


def draw(stream: np.uint64, id: Integers, j: Integers) -> NDArray[np.uint64]:
    """Draw the j-th 64-bit number of each id: uint64 of the broadcast shape.

    Ids are global node or edge ids; `j` is broadcast against them. Both are non-negative integers.
    """
    ids = np.asarray(id).astype(np.uint64)
    turns = np.asarray(j).astype(np.uint64)
    with np.errstate(over="ignore"):
        key = mix(np.uint64(stream) ^ (ids * ODD))
        return mix(key + (turns + np.uint64(1)) * GOLDEN)


def bounded(bits: Integers, bound: Integers) -> NDArray[np.int64]:
    """Map 64 random bits to 0 .. bound-1: the high 64 bits of the product bits * bound.

    The law is uniform up to bound / 2^64. The bound is a positive integer below 2^63, broadcast
    against the bits. The product is taken by 32-bit halves.
    """
    a = np.asarray(bits, dtype=np.uint64)
    b = np.asarray(bound).astype(np.uint64)
    a_low, a_high = a & _LOW, a >> _HALF
    b_low, b_high = b & _LOW, b >> _HALF
    middle = a_high * b_low + ((a_low * b_low) >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    high = a_high * b_high + (middle >> _HALF) + (other >> _HALF)
    return np.asarray(high.astype(np.int64))


@inlined_kernel
@no_type_check
def mix_kernel(z):
    """Apply `mix` to one uint64 in numba."""
    z = (z ^ (z >> _S30)) * MIX_1
    z = (z ^ (z >> _S27)) * MIX_2
    return z ^ (z >> _S31)


@kernel
@no_type_check
def _fill_streams(seed, epoch, step, first_hop, stride, purpose, out):
    """Fill the streams of hops first_hop, first_hop + stride, ... as `stream` derives them."""
    for i in range(out.shape[0]):
        state = np.uint64(0)
        for word in (seed, epoch, step, first_hop + i * stride, purpose):
            state = mix_kernel((state ^ np.uint64(word)) + GOLDEN)
        out[i] = state


def hop_streams(
    seed: int, epoch: int, step: int, first_hop: int, count: int, purpose: Purpose, *, stride: int
) -> NDArray[np.uint64]:
    """Derive the streams of hops first_hop, first_hop + stride, ... of one step: uint64 [count].

    Each is that of `stream`; a stride of 0 gives all hops the first one's.
    """
    words = (_signed(word & _MASK) for word in (seed, epoch, step))
    out = np.empty(count, np.uint64)
    _fill_streams(*words, first_hop, stride, int(purpose), out)
    return out


def _signed(word: int) -> int:
    """Return the integer of as many bits that numba takes as its own."""
    return word - (1 << 64) if word >> 63 else word


@inlined_kernel
@no_type_check
def key_kernel(stream, id):
    """Compute what all the draws of one id share: the first half of `draw`."""
    return mix_kernel(stream ^ (np.uint64(id) * ODD))


@inlined_kernel
@no_type_check
def value_kernel(key, j):
    """Compute the j-th number of a key: the second half of `draw`."""
    return mix_kernel(key + (np.uint64(j) + np.uint64(1)) * GOLDEN)


@inlined_kernel
@no_type_check
def bounded_kernel(bits, bound):
    """Apply `bounded` to one word in numba."""
    return np.int64(mulhi(bits, np.uint64(bound)))
