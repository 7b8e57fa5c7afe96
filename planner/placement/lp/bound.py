"""A lower bound that no solver can spoil: weak duality, node by node (formulas 6.4).

    LB = sum_k w_k constant_k + sum over items of min over all ways to place and read the item of
         [ sum_k w_k . seconds it adds to row k  +  price of the bytes it takes ]
         - sum_g lambda_g M_g - mu M_host

It is at most the objective of any placement, for any weights w >= 0 of the rows that sum to 1 and
any prices lambda, mu >= 0. The minimum over the ways is exact: for every clique, the set of
devices that hold the item; for all together, whether the host has it (mu is paid once, [C25]) and
whether some device has it (which alone allows reads across cliques). Each device has its own law,
so the bound also holds where the R/P form does not ([C23]).
"""

import typing
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.parallel import side_by_side
from gnnplan.planner.placement.costs import DISK, HOST, ObjectiveRows
from gnnplan.planner.placement.lp.formulate import Prices
from gnnplan.planner.placement.problem import PlacementProblem

NEVER = 1e30
"""Seconds per byte where there is no such place."""


def lagrangian_bound(problem: PlacementProblem, rows: ObjectiveRows, prices: Prices) -> float:
    """Bound the objective, which no placement comes below, at any prices.

    Those of the linear programme give the best bound.
    """
    total = float(prices.rows.sum())
    weights = np.maximum(prices.rows, 0.0) / total if total > 0 else prices.rows
    device, host = np.maximum(prices.device, 0.0), max(prices.host, 0.0)
    seconds = np.einsum("k,ktgs->tgs", weights, rows.weights)
    seconds[~np.isfinite(problem.network.alone)] = NEVER
    if problem.host_bytes is None:  # what the host has is not read from disk
        on_host = np.isfinite(problem.network.alone[:, :, HOST])
        seconds[:, :, DISK] = np.where(on_host, NEVER, seconds[:, :, DISK])
    bound = float(weights @ rows.constants)
    bound -= sum(float(p) * m for p, m in zip(device, problem.device_bytes, strict=True))
    if problem.host_bytes is not None:
        bound -= host * problem.host_bytes

    def least(t: int) -> float:
        kind = problem.kinds[t]
        laws, priced, device_price, room, clique, number = _alike(
            problem, kind.laws, seconds[t] * kind.read_bytes, device
        )
        return float(
            _least(
                kind.heat,
                laws,
                priced,
                device_price,
                room,
                clique,
                number,
                kind.size_array(),
                host,
                len(problem.cliques),
                problem.host_bytes is not None,
            )
        )

    items = max(kind.num_items for kind in problem.kinds)
    for found in side_by_side(least, range(len(problem.kinds)), items=items):
        bound += found
    return bound


def _alike(
    problem: PlacementProblem,
    laws: tuple[int, ...],
    seconds: NDArray[np.float64],
    device: NDArray[np.float64],
) -> tuple[NDArray[Any], ...]:
    """Group the devices that differ in nothing: laws, seconds, prices, room, clique and number."""
    clique = problem.clique_of()
    table = np.column_stack([clique, laws, problem.device_bytes, device, seconds])
    _, first, number = np.unique(table, axis=0, return_index=True, return_counts=True)
    room = np.array(problem.device_bytes, np.int64)
    return (
        np.array(laws)[first],
        np.ascontiguousarray(seconds[first]),
        device[first],
        room[first],
        clique[first],
        number.astype(np.int64),
    )


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _least(
    heat: np.ndarray,
    laws: np.ndarray,
    seconds: np.ndarray,
    device: np.ndarray,
    room: np.ndarray,
    clique: np.ndarray,
    number: np.ndarray,
    size: np.ndarray,
    host: float,
    num_cliques: int,
    limited: bool,
) -> float:
    """Add up the least price of every item; seconds [G, 5] are per read."""
    num_devices = laws.size
    total = 0.0
    held, empty, forced = np.empty(num_cliques), np.empty(num_cliques), np.empty(num_cliques)
    for v in range(heat.shape[1]):
        bytes_ = size[v if size.size > 1 else 0]
        best = np.inf
        for hosting in range(0 if limited else 1, 2):
            nobody = 0.0
            held[:], empty[:], forced[:] = 0.0, 0.0, np.inf
            for g in range(num_devices):
                x, c = heat[laws[g], v], clique[g]
                own = x * seconds[g, 0] + device[g] * bytes_
                far = seconds[g, 4]
                if hosting and seconds[g, 3] < far:
                    far = seconds[g, 3]
                nobody += number[g] * x * far
                far = min(far, seconds[g, 2])
                empty[c] += number[g] * x * far
                peer = x * min(far, seconds[g, 1])
                if bytes_ > room[g]:  # no whole item fits, whatever its bytes cost
                    held[c] += number[g] * peer
                else:
                    held[c] += number[g] * min(own, peer)
                    forced[c] = min(forced[c], max(0.0, own - peer))
            somebody, least = 0.0, np.inf
            for c in range(num_cliques):
                filled = held[c] + forced[c]
                somebody += min(filled, empty[c])
                least = min(least, max(0.0, filled - empty[c]))
            best = min(
                best,
                min(nobody, somebody + least) + (host * bytes_ if limited and hosting else 0.0),
            )
        total += best
    return total
