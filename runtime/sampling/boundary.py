"""Which boundary nodes or edges an epoch of full-graph training keeps.

A draw depends on the global id of the node or edge and on the receiving part alone, so the rank
that sends a node and the rank that receives it agree without a word. Each ordered pair of parts
has draws of its own.

Source: BNS-GCN (Wan et al., MLSys 2022); with stochastic rounding in place of its fixed size
int(p b), which never sends anything where p b < 1 (docs/formulas.md 3.3).
"""

from typing import Literal, no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.compiled import kernel
from runtime.sampling.rng import draw, key_kernel, value_kernel

Rounding = Literal["bernoulli", "stochastic"]
_TWO_64 = 1 << 64


def threshold(keep: float) -> np.uint64:
    """The largest 64-bit number that counts as kept, for 0 < keep < 1."""
    return np.uint64(min(max(int(keep * _TWO_64), 1), _TWO_64 - 1) - 1)


@kernel
@no_type_check
def _below(stream, ids, turn, largest, kept):
    for i in range(ids.shape[0]):
        kept[i] = ids[i] < 0 or value_kernel(key_kernel(stream, ids[i]), turn) <= largest


@kernel
@no_type_check
def _numbers(stream, ids, turn, out):
    for i in range(ids.shape[0]):
        out[i] = value_kernel(key_kernel(stream, ids[i]), turn)


def kept_nodes(
    stream: np.uint64,
    ids: NDArray[np.int64],
    *,
    owner: int,
    receiver: int,
    size: int,
    keep: float,
    rounding: Rounding = "bernoulli",
) -> NDArray[np.bool_]:
    """Which of the nodes that part `owner` has for part `receiver` are sent.

    Args:
        stream: of the epoch and layer (`rng.stream`, purpose BOUNDARY).
        ids: global ids of all the pair's boundary nodes, shape (b,).
        owner: sending part.
        receiver: receiving part; its draws are its own.
        size: number of parts.
        keep: p in [0, 1].
        rounding: bernoulli: each by itself with probability p. stochastic: exactly floor(p b) or
            floor(p b) + 1 of them, p b on average, all sets of that size equally likely.

    Returns:
        bool, shape (b,); every node is kept with probability p.
    """
    if keep >= 1 or ids.size == 0:
        return np.ones(ids.shape[0], np.bool_)
    if keep <= 0:
        return np.zeros(ids.shape[0], np.bool_)
    if rounding == "bernoulli":
        kept = np.empty(ids.shape[0], np.bool_)
        _below(stream, ids, np.int64(receiver), threshold(keep), kept)
        return kept
    count = rounded_size(stream, ids.shape[0], owner=owner, receiver=receiver, size=size, keep=keep)
    if count == 0:
        return np.zeros(ids.shape[0], np.bool_)
    numbers = np.empty(ids.shape[0], np.uint64)
    _numbers(stream, ids, np.int64(receiver), numbers)
    return numbers <= np.partition(numbers, count - 1)[count - 1]


def rounded_size(
    stream: np.uint64, num_nodes: int, *, owner: int, receiver: int, size: int, keep: float
) -> int:
    """Floor of p b, or one more with the probability that makes p b the mean."""
    whole, part = divmod(keep * num_nodes, 1.0)
    # Nodes use the turns 0 .. size - 1 of their ids; the pair's own number lies beyond them.
    number = int(draw(stream, owner, size + receiver))
    return int(whole) + (number < part * _TWO_64)


def kept_edges(stream: np.uint64, edges: NDArray[np.int64], keep: float) -> NDArray[np.bool_]:
    """Which edges are kept, each with probability p.

    Args:
        stream: of the epoch and layer (`rng.stream`, purpose EDGE).
        edges: global edge ids, shape (e,); negative ones (self-loops that a layer adds) stay.
        keep: p in [0, 1].

    Returns:
        bool, shape (e,).
    """
    if keep >= 1:
        return np.ones(edges.shape[0], np.bool_)
    if keep <= 0:
        return edges < 0
    kept = np.empty(edges.shape[0], np.bool_)
    _below(stream, edges, np.int64(0), threshold(keep), kept)
    return kept
