"""The relaxation over buckets, the prices of its limits, and the lower bound that these give.

One sort solves it where that is proved exact, else the linear programme. A solver that fails or
runs out of time leaves the density order, and the status says so. The sort: of one clique, item by
item, placement is a fractional knapsack.

    minimise   sum_i cR_i x_i^R + cP_i x_i^P + cH_i x_i^H         mean cost per GPU
    subject to x_i^R + x_i^P + x_i^H = 1,  x >= 0                 every item has a place
               sum_i s_i (x_i^R + x_i^P / n) <= M                 bytes (or rows) of one GPU

R is replicated on all n GPUs, P one copy dealt over them, H left on the host (or disk). Each item
moves from H to P and from P to R, and each move has a value and a size; where the first move is
worth less per byte than the second, P is off the lower hull and the item moves from H to R at once.
With one capacity and an additive objective the moves sorted by value per byte solve the linear
programme, up to one fractional move (formulas 6.3 [C22]); else they are what a time-out gets. Host
memory, where it is short, is then filled by density too, which is exact nowhere.

The bound is weak duality, node by node (formulas 6.4), which no solver can spoil:

    LB = sum_k w_k constant_k + sum over items of min over all ways to place and read the item of
         [ sum_k w_k . seconds it adds to row k  +  price of the bytes it takes ]
         - sum_g lambda_g M_g - mu M_host

It is at most the objective of any placement, for any weights w >= 0 of the rows that sum to 1 and
any prices lambda, mu >= 0. The minimum over the ways is exact: for every clique, the set of
devices that hold the item; for all together, whether the host has it (mu is paid once, [C25]) and
whether some device has it (which alone allows reads across cliques). Each device has its own law,
so the bound also holds where the R/P form does not ([C23]).
"""

import math
import typing
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import CROSS, DISK, HOST, OWN, PEER, Goal, ObjectiveRows
from gnnplan.planner.placement.lp.formulate import (
    Buckets,
    Groups,
    Program,
    asked_bytes,
    build_program,
    join_buckets,
)
from gnnplan.planner.placement.lp.solver import SHARED, Failure, Point
from gnnplan.planner.placement.problem import PlacementProblem
from gnnplan.runtime.process import side_by_side


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prices:
    """Seconds that one unit more of each limit saves; any prices from 0 give a lower bound."""

    rows: NDArray[np.float64]
    """Weight of each row of the objective, summing to 1; shape [K]."""
    device: NDArray[np.float64]
    """Seconds per byte of each device's memory, shape [G]."""
    host: float
    """Seconds per byte of host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnapsackItems:
    """Items to place: sizes, and mean cost per GPU in each state; arrays of shape [N]."""

    size: NDArray[np.float64]
    replicated: NDArray[np.float64]
    """Cost of a copy on every device, cR."""
    dealt: NDArray[np.float64]
    """Cost of one copy among the devices, cP."""
    host: NDArray[np.float64]
    """Cost of no copy but the host's, cH."""
    num_devices: int
    """Number of devices, n."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """Moves of items to a better state: seconds saved, and bytes it takes of each GPU."""

    value: NDArray[np.float64]
    size: NDArray[np.float64]
    item: NDArray[np.int64]
    to_dealt: NDArray[np.bool_]
    """Whether the move is to P; else it is to R, from P where the item has both moves."""

    def fill(self, capacity: float) -> tuple[NDArray[np.float64], float]:
        """Take moves by value per unit of size until the capacity is full.

        Returns:
            The share taken of each move, and what one more unit of capacity would save.
        """
        order = np.argsort(-self.value / self.size, kind="stable")
        filled = np.cumsum(self.size[order])
        whole = int(np.searchsorted(filled, capacity * (1 + 1e-12), side="right"))
        taken, price = np.zeros(len(order)), 0.0
        taken[order[:whole]] = 1.0
        if whole < len(order):
            used = float(filled[whole - 1]) if whole else 0.0
            last = order[whole]
            taken[last] = max(0.0, capacity - used) / self.size[last]
            price = float(self.value[last] / self.size[last])
        return taken, price


def list_moves(items: KnapsackItems) -> Moves:
    """List two moves per item, or one where P is off the lower hull; none without value.

    H -> P: cH - cP on s/n bytes,   P -> R: cP - cR on s*(n-1)/n bytes
    """
    n, every = items.num_devices, np.arange(items.size.size)
    if n == 1:
        alone = np.zeros(every.size, np.bool_)
        return _worthwhile(items.host - items.replicated, items.size, every, alone)
    first = items.host - items.dealt
    second = items.dealt - items.replicated
    on_hull = first * (n - 1) >= second  # value per byte; the common factor s/n cancels
    hull, off = np.flatnonzero(on_hull), np.flatnonzero(~on_hull)
    value = np.concatenate([first[hull], second[hull], (first + second)[off]])
    size = items.size
    taken = np.concatenate([size[hull] / n, size[hull] * ((n - 1) / n), size[off]])
    dealt = np.zeros(value.size, np.bool_)
    dealt[: hull.size] = True
    return _worthwhile(value, taken, np.concatenate([hull, hull, off]), dealt)


def _worthwhile(
    value: NDArray[np.float64],
    size: NDArray[np.float64],
    item: NDArray[np.int64],
    to_dealt: NDArray[np.bool_],
) -> Moves:
    keep = (value > 0) & (size > 0)
    return Moves(value=value[keep], size=size[keep], item=item[keep], to_dealt=to_dealt[keep])


def sort_is_exact(problem: PlacementProblem, goal: Goal, groups: Groups) -> bool:
    """Tell whether one sort gives the programme's optimum (formulas 6.3 [C22]).

    One clique of alike devices, an objective that adds places up, memory of devices the only
    capacity, and no link that several devices share.
    """
    additive = goal == "transactions" or (
        goal == "serial"
        and problem.network.compute_seconds == 0
        and not problem.network.shared().any()
    )
    return (
        additive
        and len(groups.groups) == 1
        and len(problem.cliques) == 1
        and problem.host_bytes is None
        and bool(np.isfinite(problem.network.alone[:, :, HOST]).all())
    )


LEAST_BYTES = 1e-6
"""Bytes that a bucket without any counts as, so that its items have a density."""


def density_shares(
    problem: PlacementProblem, rows: ObjectiveRows, groups: Groups, buckets: list[Buckets]
) -> tuple[list[NDArray[np.float64]], Prices]:
    """Share out buckets by group and place in the order of density, and price them.

    Returns:
        By kind, shape [groups, K, 5]; and the prices of the last moves taken.
    """
    sizes, kind_of, fits = join_buckets(buckets)
    asked = asked_bytes(problem, groups, buckets)
    shares = np.zeros((len(groups.groups), len(sizes), 5))
    device = np.zeros(problem.num_devices)
    missing = np.zeros(len(sizes))
    for each in groups.classes:
        for name in each.groups:
            group = groups.groups[name]
            g, n = group.devices[0], each.size
            heat = asked[name]
            cost = _seconds(problem, rows, g)[kind_of]
            host = np.minimum(cost[:, HOST], cost[:, DISK])
            peer = np.minimum(cost[:, PEER], host)
            # devices that differ do not count on each other's copies
            n = n if len(each.groups) == 1 else 1
            items = KnapsackItems(
                size=np.where(fits, np.maximum(sizes, LEAST_BYTES), np.inf),
                replicated=heat * cost[:, OWN],
                dealt=heat * (cost[:, OWN] / n + peer * (n - 1) / n),
                host=heat * host,
                num_devices=n,
            )
            found = list_moves(items)
            taken, price = found.fill(float(min(problem.device_bytes[d] for d in group.devices)))
            device[list(group.devices)] = price / problem.num_devices
            dealt, whole = np.zeros(len(sizes)), np.zeros(len(sizes))
            np.add.at(dealt, found.item[found.to_dealt], taken[found.to_dealt])
            np.add.at(whole, found.item[~found.to_dealt], taken[~found.to_dealt])
            dealt = np.maximum(dealt, whole) - whole
            shares[name, :, OWN] = whole + dealt / n
            # a peer that is no faster than the host is never read (formulas 1.1)
            read = dealt * (n - 1) / n
            from_peer = cost[:, PEER] < host
            shares[name, :, PEER] = np.where(from_peer, read, 0.0)
            left = np.maximum(0.0, 1.0 - whole - dealt) + np.where(from_peer, 0.0, read)
            shares[name, :, HOST] = left
            missing += left * heat * len(group.devices)
    _leave_to_disk(problem, shares, missing, sizes)
    prices = Prices(rows=_weights(rows, problem), device=device, host=0.0)
    return _by_kind(shares, buckets), prices


def _seconds(problem: PlacementProblem, rows: ObjectiveRows, g: int) -> NDArray[np.float64]:
    """Find the seconds per byte of a device by kind and place, shape [T, 5]."""
    alone = problem.network.alone[:, g].copy()
    if rows.names == ("transactions",):
        alone = np.where(np.isfinite(alone), rows.weights[0, :, g], np.inf)
    alone[:, CROSS] = np.inf
    return np.minimum(alone, 1e30)


def _weights(rows: ObjectiveRows, problem: PlacementProblem) -> NDArray[np.float64]:
    """Weigh equally the rows that belong to one device each, else all."""
    touched = np.any(rows.weights > 0, axis=(1, 3)).sum(axis=1)
    single = touched == 1 if problem.num_devices > 1 else touched > 0
    chosen = single if single.any() else np.ones(len(rows.names), np.bool_)
    return chosen / chosen.sum()


def _leave_to_disk(
    problem: PlacementProblem,
    shares: NDArray[np.float64],
    missing: NDArray[np.float64],
    sizes: NDArray[np.float64],
) -> None:
    """Read from disk what host memory has no room for, the least asked for first."""
    if problem.host_bytes is None:
        return
    order = np.argsort(-missing / np.maximum(sizes, 1e-300), kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    room = np.empty(len(sizes))
    room[order] = np.clip((problem.host_bytes - before) / np.maximum(sizes[order], 1e-300), 0, 1)
    kept = np.minimum(shares[:, :, HOST], room[None])
    shares[:, :, DISK] += shares[:, :, HOST] - kept
    shares[:, :, HOST] = kept


SECONDS = 20.0
"""Processor seconds that one linear programme may take."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Relaxation:
    """Solution of the programme."""

    seconds: float
    """Value over buckets: between the node-level optimum and rho times it."""
    shares: list[NDArray[np.float64]]
    """Shares by kind: [groups, K, 5]; none where no buckets were made."""
    reads: NDArray[np.float64]
    """Bytes by kind, device and place, shape [T, G, 5]."""
    prices: Prices
    row_names: tuple[str, ...]
    """Names of the objective's rows that the prices weigh."""
    solver: str
    status: str
    """"optimal", or why it is not."""


def relax(
    problem: PlacementProblem,
    rows: ObjectiveRows,
    groups: Groups,
    buckets: list[Buckets],
    *,
    goal: Goal,
    seconds: float = SECONDS,
    solver: str = "",
) -> Relaxation:
    """Solve the relaxation over buckets."""
    exact = sort_is_exact(problem, goal, groups)
    if solver == "sort" and not exact:
        raise ValueError("expected a problem that one sort solves; leave the solver out")
    why = "optimal" if exact else "density order, as asked for"
    if solver != "density" and not (exact and solver in ("", "sort")):
        program = build_program(problem, rows, groups, buckets)
        answer = SHARED.solve(program.linear, seconds=seconds, solver=solver)
        if not isinstance(answer, Failure):
            return _read(problem, rows, groups, buckets, program, answer)
        why = f"density order, since {answer.why}"
    shares, prices = density_shares(problem, rows, groups, buckets)
    reads = _reads(problem, groups, buckets, shares)
    return Relaxation(
        seconds=float(rows.values(reads).max()),
        shares=shares,
        reads=reads,
        prices=prices,
        row_names=rows.names,
        solver="sort" if exact else "density",
        status=why,
    )


def _by_kind(shares: NDArray[np.float64], buckets: list[Buckets]) -> list[NDArray[np.float64]]:
    ends = np.cumsum([len(b.bytes) for b in buckets])[:-1]
    return list(np.split(shares, ends, axis=1))


def _reads(
    problem: PlacementProblem,
    groups: Groups,
    buckets: list[Buckets],
    shares: list[NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Count the bytes read at given shares, shape [T, G, 5]."""
    read = np.zeros((len(problem.kinds), problem.num_devices, 5))
    for t, (kind, b) in enumerate(zip(problem.kinds, buckets, strict=True)):
        for name, group in enumerate(groups.groups):
            for g in group.devices:
                read[t, g] = kind.read_bytes * (b.heat[:, kind.laws[g]] @ shares[t][name])
    return read


def _read(
    problem: PlacementProblem,
    rows: ObjectiveRows,
    groups: Groups,
    buckets: list[Buckets],
    program: Program,
    answer: Point,
) -> Relaxation:
    shape = len(groups.groups), sum(len(b.bytes) for b in buckets), 5
    whole = np.clip(answer.x[: math.prod(shape)], 0.0, 1.0).reshape(shape)
    shares = _by_kind(whole, buckets)
    return Relaxation(
        seconds=float(answer.x[-1]) * program.unit_seconds,
        shares=shares,
        reads=_reads(problem, groups, buckets, shares),
        prices=read_prices(program, answer.duals, problem, groups),
        row_names=rows.names,
        solver=answer.solver,
        status="optimal",
    )


def read_prices(
    program: Program, duals: NDArray[np.float64], problem: PlacementProblem, groups: Groups
) -> Prices:
    """Read prices from the multipliers, those of a group spread evenly over its devices.

    `duals` of `<=` constraints are not positive, as solvers report them.
    """
    duals = np.maximum(0.0, -duals)
    shared = np.bincount(program.objective_rows, minlength=len(duals))
    weights = duals[program.objective_rows] / shared[program.objective_rows]
    total = float(weights.sum())
    weights = weights / total if total > 0 else np.full(len(weights), 1.0 / len(weights))
    device = np.zeros(problem.num_devices)
    for g, group in enumerate(groups.groups):
        limit = max(min(problem.device_bytes[d] for d in group.devices), 1)
        price = duals[program.device_rows[g]] / limit * program.unit_seconds
        device[list(group.devices)] = price / len(group.devices)
    host = 0.0
    if problem.host_bytes is not None:
        host = float(duals[program.host_row]) / max(problem.host_bytes, 1) * program.unit_seconds
    return Prices(rows=weights, device=device, host=host)


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
