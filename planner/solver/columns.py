"""The cheapest fill of one clique at given prices of reading: thresholds on one order per kind.

At given weights of the objective's rows the cliques no longer touch each other, and what a move of
an item is worth per byte is its density (bytes read per byte held) times a factor of its kind
(formulas 6.3 [C22]). So the order of a kind's items does not depend on the weights: it is sorted
once, and a fill is two positions in it, up to which items are replicated and up to which they are
held. Bytes and reads of a fill are prefix sums, and weights can be tried by the hundred.
"""

import typing
from dataclasses import dataclass
from typing import cast

import numba
import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Instance
from planner.placement.order import hotness_order
from planner.placement.reads import HOST, OWN, PEER

HALVINGS = 200
"""Of the interval that holds a price: more than a float has bits."""


_Sums = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ladder:
    """One kind's items by density, for the devices of one clique, which draw from one law."""

    ids: NDArray[np.int64]
    """Densest first, without those that nobody reads or no device has room for."""
    density: NDArray[np.float32]
    """Bytes read per byte held, with the other sign so that it rises."""
    size: NDArray[np.float64]
    """Bytes of the first i items, shape [len(ids) + 1]."""
    reads: NDArray[np.float64]
    """Bytes a device reads of the first i, likewise."""
    total: float
    """Bytes it reads of all items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """A clique's items by positions in its ladders, one of each per kind."""

    whole: tuple[int, ...]
    """Items that every device holds."""
    held: tuple[int, ...]
    """Items that some device holds: the first `whole` and those that are dealt."""
    peers: tuple[bool, ...]
    """Whether devices read dealt items from each other; else from the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest:
    """The optimum of one clique."""

    fills: tuple[tuple[float, Fill], ...]
    """One or two with shares that sum to 1: what does not fit as a whole is split."""
    price: float
    """Seconds that a byte more on each device saves each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Factors:
    """Seconds a move saves per byte it takes, over the item's density."""

    dealt: float
    """From the host to one copy in the clique."""
    whole: float
    """From one copy to copies everywhere, or from the host at once."""
    at_once: bool
    """Whether one copy is never worth more than copies everywhere: P is off the lower hull."""
    peers: bool


def make_ladder(instance: Instance, t: int, device: int, limit: int) -> Ladder:
    """Sort a kind's items as one device reads them.

    Args:
        instance: the problem.
        t: index of the kind.
        device: whose law.
        limit: bytes of the device; larger items are left out.
    """
    kind = instance.kinds[t]
    heat, size = kind.heat[kind.laws[device]], kind.size_array()
    density = np.asarray(_densities(heat, size, kind.read_bytes, limit))
    order = hotness_order(density)
    order = order[: int(np.count_nonzero(density))]
    ends, reads = cast(_Sums, _sums(heat, size, kind.read_bytes, order))
    return Ladder(
        ids=order,
        density=-density[order],
        size=ends,
        reads=reads,
        total=kind.read_bytes * float(heat.sum(dtype=np.float64)),
    )


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _densities(heat: np.ndarray, size: np.ndarray, read_bytes: float, limit: int) -> np.ndarray:
    """Bytes read per byte held [N]; 0 for items larger than the limit."""
    found = np.zeros(heat.size, np.float32)
    for v in range(heat.size):
        bytes_ = size[v if size.size > 1 else 0]
        if bytes_ <= limit:
            found[v] = read_bytes * heat[v] / bytes_
    return found


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _sums(heat: np.ndarray, size: np.ndarray, read_bytes: float, order: np.ndarray) -> tuple:
    """Bytes and reads of the first i items of the order, two of shape [len(order) + 1]."""
    ends, reads = np.zeros(order.size + 1), np.zeros(order.size + 1)
    for i in range(order.size):
        v = order[i]
        ends[i + 1] = ends[i] + size[v if size.size > 1 else 0]
        reads[i + 1] = reads[i] + read_bytes * heat[v]
    return ends, reads


def cheapest(
    ladders: list[Ladder], seconds: NDArray[np.float64], num_devices: int, limit: int
) -> Cheapest:
    """Fill a clique so that its devices read for the fewest priced seconds.

    Args:
        ladders: of each kind.
        seconds: per byte that a device reads, by kind and place; shape [T, 5].
        num_devices: of the clique.
        limit: bytes of each of its devices.
    """
    factors = [_factors(of_kind, num_devices) for of_kind in seconds]

    def fill(price: float) -> Fill:
        whole, held, peers = list[int](), list[int](), list[bool]()
        for ladder, factor in zip(ladders, factors, strict=True):
            every = _worth(ladder, factor.whole, price)
            whole.append(every)
            held.append(
                every if factor.at_once else max(every, _worth(ladder, factor.dealt, price))
            )
            peers.append(factor.peers)
        return Fill(whole=tuple(whole), held=tuple(held), peers=tuple(peers))

    def used(found: Fill) -> float:
        return sum(
            float(ladder.size[whole] + (ladder.size[held] - ladder.size[whole]) / num_devices)
            for ladder, whole, held in zip(ladders, found.whole, found.held, strict=True)
        )

    most = fill(0.0)
    if used(most) <= limit:
        return Cheapest(fills=((1.0, most),), price=0.0)
    low, high = 0.0, max(
        (-float(x.density[0]) * max(f.dealt, f.whole) for x, f in zip(ladders, factors, strict=True)
         if len(x.density)), default=0.0,
    )  # fmt: skip
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if used(fill(middle)) > limit else (low, middle)
    less, more = fill(high), fill(low)
    share = (limit - used(less)) / (used(more) - used(less))
    return Cheapest(fills=((1.0 - share, less), (share, more)), price=high)


def fill_reads(ladders: list[Ladder], fill: Fill, num_devices: int) -> NDArray[np.float64]:
    """Bytes each device reads by kind and place, dealt items spread evenly; shape [T, 5]."""
    found = np.zeros((len(ladders), 5))
    for t, ladder in enumerate(ladders):
        whole = float(ladder.reads[fill.whole[t]])
        dealt = float(ladder.reads[fill.held[t]]) - whole
        found[t, OWN] = whole + dealt / num_devices
        found[t, PEER if fill.peers[t] else HOST] = dealt * (num_devices - 1) / num_devices
        found[t, HOST] += ladder.total - whole - dealt
    return found


def _factors(seconds: NDArray[np.float64], num_devices: int) -> _Factors:
    own, host = float(seconds[OWN]), float(seconds[HOST])
    if num_devices == 1:
        return _Factors(dealt=0.0, whole=host - own, at_once=True, peers=False)
    n, peer = num_devices, min(float(seconds[PEER]), host)
    dealt = own / n + peer * (n - 1) / n
    first, second = (host - dealt) * n, (dealt - own) * n / (n - 1)
    at_once = first < second
    return _Factors(
        dealt=first,
        whole=host - own if at_once else second,
        at_once=at_once,
        peers=float(seconds[PEER]) < host,
    )


def _worth(ladder: Ladder, factor: float, price: float) -> int:
    """How many items' move saves more per byte than the price."""
    if factor <= 0:
        return 0
    least = np.float32(max(-price / factor, float(np.finfo(np.float32).min)))
    return int(np.searchsorted(ladder.density, least, side="left"))
