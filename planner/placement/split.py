"""split_k: replicate the hottest rows, deal the next ones, leave the rest on the host.

k of a GPU's b slots are dealt, R = b - k hold replicated rows. Each k is a placement on whole
slots, a restriction that comes within n - 1 swaps of the optimum of the mean when b is large, and
whose balanced deal often wins on the maximum (formulas 1.3). Everything here works on ranks, the
positions of vertices in hot-to-cold order.
"""

import typing

import numba
import numpy as np
from numpy.typing import NDArray

from planner.placement.costs import RowCosts


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _first_rising(q: np.ndarray, n: int, b: int, last: int, peer: float, host: float) -> int:
    """The k = 0..last of least F(k) by bisection: F is convex, its increments never fall."""
    low, high = 0, last
    while low < high:
        k = (low + high) // 2
        top = b + (n - 1) * k
        newly_dealt = 0.0
        for i in range(top, top + n - 1):
            newly_dealt += q[i]
        dealt_cost = peer * (n - 1) / n
        if dealt_cost * q[b - k - 1] - (host - dealt_cost) * newly_dealt >= 0:
            high = k
        else:
            low = k + 1
    return low


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _least_maximum(
    q: np.ndarray, n: int, b: int, last: int, start: int, peer: float, host: float
) -> int:
    """The k of least maximum, ties to the smallest; only k with F(k) <= best so far are scored.

    max >= mean = F(k) and F is convex, so each direction from its minimum `start` ends at the
    first k beyond the best maximum. The mass a serpentine deal gives one GPU is two runs of stride
    2n, so with prefix sums of that stride a k costs O(n), not O(b).
    """
    stride = 2 * n
    prefix = np.zeros(q.size + 1)
    strided = np.zeros(q.size + stride)  # strided[i + 2n] = q[i] + q[i - 2n] + ...
    for i in range(q.size):
        prefix[i + 1] = prefix[i] + q[i]
        strided[i + stride] = strided[i] + q[i]
    total = prefix[q.size]
    best, best_k = np.inf, start
    for direction in (1, -1):
        k = start if direction == 1 else start - 1
        while 0 <= k <= last:
            first, top = b - k, b + (n - 1) * k
            dealt = prefix[top] - prefix[first]
            mean = peer * (n - 1) / n * dealt + host * (total - prefix[top])
            if mean > best:
                break
            worst = -np.inf
            for g in range(n):
                even, odd = first + g, first + n + n - 1 - g
                held = strided[even + stride * ((k + 1) // 2)] - strided[even]
                held += strided[odd + stride * (k // 2)] - strided[odd]
                worst = max(worst, peer * (dealt - held) + host * (total - prefix[top]))
            if worst < best or (worst == best and k < best_k):
                best, best_k = worst, k
            k += direction
    return best_k


def whole_rounds(num_nodes: int, num_devices: int, buffer_rows: int) -> int:
    """Largest k whose n * k dealt rows all exist: b + (n - 1) * k <= N and k <= b."""
    return min(buffer_rows, (num_nodes - buffer_rows) // (num_devices - 1))


def best_split(q: NDArray[np.float64], num_devices: int, buffer_rows: int, costs: RowCosts) -> int:
    """The k in 0..whole_rounds of least max_i E[C_i].

        F(k) = C_gpu*(n-1)/n * sum(q, dealt ranks) + C_cpu * sum(q, ranks on the host)    (net)

    Args:
        q: Hotness in descending order, shape [N].
        num_devices: n >= 2.
        buffer_rows: b, 0 < b < N.
        costs: Gross costs with C_gpu < C_cpu.
    """
    last = whole_rounds(q.size, num_devices, buffer_rows)
    args = (q, num_devices, buffer_rows, last)
    peer, host = costs.net_peer, costs.net_host
    start = int(_first_rising(*args, peer, host))
    return int(_least_maximum(*args, start, peer, host))


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _write_split(num_nodes: int, num_dealt: int, ranks: np.ndarray) -> None:
    n, b = ranks.shape
    first = b - num_dealt
    for g in range(n):
        ranks[g, :first] = np.arange(first)
        hottest_lacking = first + 1 if g == 0 else first  # GPU 0 was dealt rank `first`
        for t in range(num_dealt):
            dealt = first + t * n + (g if t % 2 == 0 else n - 1 - g)
            ranks[g, first + t] = dealt if dealt < num_nodes else hottest_lacking


def split_ranks(
    num_nodes: int,
    num_devices: int,
    buffer_rows: int,
    num_dealt: int,
    *,
    out: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Ranks each GPU holds under split_k, shape [n, b].

    Slots 0..R-1 hold the replicated ranks, slot R + t the GPU's rank of round t. Rounds run back
    and forth (serpentine) so that local masses differ by at most the first dealt row's. Slots that
    the last round cannot fill take the hottest dealt rank the GPU lacks.

    Args:
        num_nodes: N.
        num_devices: n >= 2.
        buffer_rows: b < N.
        num_dealt: k, at most `whole_rounds(...)` plus one partial round.
        out: Array of that shape to write to; None: a new one.

    Example:
        >>> split_ranks(6, 2, 2, 2).tolist()
        [[0, 3], [1, 2]]
    """
    ranks = np.empty((num_devices, buffer_rows), np.int64) if out is None else out
    _write_split(num_nodes, num_dealt, ranks)
    return ranks
