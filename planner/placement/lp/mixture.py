"""Row weights that bound best, and the mixture of fills they price: Dantzig and Wolfe's columns.

    minimise z  subject to  constant_k + sum over cliques and their fills of share . load_k <= z
                            shares of each clique's fills sum to 1

The multipliers of its rows weigh the objective, each clique's cheapest fill at those weights joins
the programme, and the value of the Lagrangian there is a lower bound (formulas 6.4). Both meet at
the optimum over fractions of single items, which no buckets blur. A mixture of fills is rounded
item by item: one that some fills replicate and others deal goes to what is most behind its share.

At given weights of the rows the cliques no longer touch each other, and what a move of an item is
worth per byte is its density (bytes read per byte held) times a factor of its kind (formulas 6.3
[C22]). So a kind's items are sorted once, and a fill is two positions in that order: up to which
items are replicated, and up to which they are held. Bytes and reads of a fill are prefix sums.
"""

import typing
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import CROSS, HOST, OWN, PEER, ObjectiveRows, drop_dominated
from gnnplan.planner.placement.lp.formulate import Groups, LinearProgram
from gnnplan.planner.placement.lp.relax import Prices
from gnnplan.planner.placement.lp.round_solution import WantedCopies, fill_devices
from gnnplan.planner.placement.lp.solver import SHARED, Failure
from gnnplan.planner.placement.order import hotness_order, prefix_sums
from gnnplan.planner.placement.placement import ItemPlacement, Placement, mark_holders
from gnnplan.planner.placement.problem import PlacementProblem

HALVINGS = 200
"""Halvings of the interval that holds a price: more than a float has bits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ladder:
    """One kind's items by density, for the devices of one clique, which draw from one law."""

    ids: NDArray[np.int64]
    """Ids, densest first, without those that nobody reads or no device has room for."""
    density: NDArray[np.float32]
    """Bytes read per byte held, with the other sign so that it rises."""
    size: NDArray[np.float64]
    """Bytes of the first i items, shape [len(ids) + 1]."""
    reads: NDArray[np.float64]
    """Bytes a device reads of the first i items, of the same shape."""
    total: float
    """Bytes that a device reads of all items."""


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
class CheapestFill:
    """The optimum of one clique."""

    fills: tuple[tuple[float, Fill], ...]
    """One fill, or two with shares that sum to 1, where the items do not fit as a whole."""
    price: float
    """Seconds that a byte more on each device saves each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Factors:
    """Seconds a move saves per byte it takes, over the item's density."""

    dealt: float
    """Factor of the move from the host to one copy in the clique."""
    whole: float
    """Factor of the move from one copy, or from the host, to copies everywhere."""
    at_once: bool
    """Whether one copy is never worth more than copies everywhere: P is off the lower hull."""
    peers: bool


def make_ladder(problem: PlacementProblem, t: int, device: int, limit: int) -> Ladder:
    """Sort a kind's items as one device reads them; those larger than the limit are left out."""
    kind = problem.kinds[t]
    heat, size = kind.heat[kind.laws[device]], kind.size_array()
    density = np.asarray(_densities(heat, size, kind.read_bytes, limit))
    order = hotness_order(density)
    order = order[: int(np.count_nonzero(density))]
    sizes = np.broadcast_to(kind.size_array(order), order.shape)
    return Ladder(
        ids=order,
        density=-density[order],
        size=prefix_sums(sizes),
        reads=prefix_sums(kind.read_bytes * heat[order].astype(np.float64)),
        total=kind.read_bytes * float(heat.sum(dtype=np.float64)),
    )


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _densities(heat: np.ndarray, size: np.ndarray, read_bytes: float, limit: int) -> np.ndarray:
    """Compute the bytes read per byte held [N]; 0 for items larger than the limit."""
    found = np.zeros(heat.size, np.float32)
    for v in range(heat.size):
        bytes_ = size[v if size.size > 1 else 0]
        if bytes_ <= limit:
            found[v] = read_bytes * heat[v] / max(bytes_, 1)
    return found


def find_cheapest_fill(
    ladders: list[Ladder], seconds: NDArray[np.float64], num_devices: int, limit: int
) -> CheapestFill:
    """Fill a clique so that its devices read for the fewest priced seconds.

    `seconds` are per byte that a device reads, by kind and place [T, 5]; each device has `limit`
    bytes.
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
        return CheapestFill(fills=((1.0, most),), price=0.0)
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
    return CheapestFill(fills=((1.0 - share, less), (share, more)), price=high)


def fill_reads(ladders: list[Ladder], fill: Fill, num_devices: int) -> NDArray[np.float64]:
    """Count the bytes each device reads by kind and place, dealt items spread evenly; [T, 5]."""
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
    """Count the items whose move saves more per byte than the price."""
    if factor <= 0:
        return 0
    least = np.float32(max(-price / factor, float(np.finfo(np.float32).min)))
    return int(np.searchsorted(ladder.density, least, side="left"))


MOST_ITEMS = 16_000_000
"""Most items of all kinds: sorting more for every clique takes longer than it gains."""
ROUNDS = 60
"""Most weights that are tried."""
SECONDS = 5.0
"""Processor seconds of one programme of a few hundred unknowns."""
ENOUGH = 1e-5
"""Relative distance of the programme's value from the best bound that ends the search."""
STEADY = 0.5
"""Share of the best weights so far in the next ones: multipliers of few columns jump about."""

Shares = tuple[tuple[float, Fill], ...]
"""Fills of a clique by shares that sum to 1."""
Columns = list[list[tuple[NDArray[np.float64], CheapestFill]]]
"""By clique: what a fill loads the rows with, shape [K'], and the fill."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mixture:
    """Mixture of fills, and the prices that bound it."""

    prices: Prices
    """Prices of the best bound."""
    value: float
    """Objective of the mixture, in which items may be split."""
    bound: float
    """Bound at the prices, by the prefix sums of the ladders."""
    reads: NDArray[np.float64]
    """Bytes of the mixture by kind, device and place, shape [T, G, 5]."""
    shares: tuple[Shares, ...]
    ladders: list[list[Ladder]]

    @property
    def met(self) -> bool:
        """Whether value and bound are as one."""
        return self.value <= self.bound * (1 + 10 * ENOUGH)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Loads:
    """The objective's rows by clique, without those that differ only in which alike device."""

    weights: NDArray[np.float64]
    """Seconds per byte that each device of a clique reads, shape [K', T, C, 5]."""
    constants: NDArray[np.float64]
    spread: NDArray[np.float64]
    """Weights of all rows from those of these, shape [K, K']."""

    def of(self, clique: int, reads: NDArray[np.float64]) -> NDArray[np.float64]:
        """Load every row with what each device of a clique reads [T, 5]."""
        return np.einsum("kts,ts->k", self.weights[:, :, clique], reads)


class _Cliques:
    """The cliques' subproblems."""

    def __init__(self, problem: PlacementProblem, loads: _Loads) -> None:
        self.loads = loads
        self.sizes = [len(clique) for clique in problem.cliques]
        self.limits = [min(problem.device_bytes[g] for g in c) for c in problem.cliques]
        self.ladders = [
            [make_ladder(problem, t, clique[0], limit) for t in range(len(problem.kinds))]
            for clique, limit in zip(problem.cliques, self.limits, strict=True)
        ]

    def at(self, weights: NDArray[np.float64]) -> tuple[float, list[CheapestFill]]:
        """Return the Lagrangian's value at weights that sum to 1, and the fills that reach it."""
        value, found = float(weights @ self.loads.constants), list[CheapestFill]()
        seconds = np.einsum("k,ktcs->tcs", weights, self.loads.weights)
        for c, (n, limit) in enumerate(zip(self.sizes, self.limits, strict=True)):
            found.append(find_cheapest_fill(self.ladders[c], seconds[:, c] / n, n, limit))
            value += float((seconds[:, c] * self.reads(c, found[-1].fills)).sum())
        return value, found

    def reads(self, c: int, shares: Shares) -> NDArray[np.float64]:
        """Count the bytes each device of a clique reads, shape [T, 5]."""
        parts = [s * fill_reads(self.ladders[c], f, self.sizes[c]) for s, f in shares]
        return np.sum(parts, axis=0)


def can_fill(problem: PlacementProblem, groups: Groups) -> bool:
    """Tell whether cliques differ in their laws, are alike inside, and share nothing but links."""
    return (
        any(kind.heat.shape[0] > 1 for kind in problem.kinds)
        and all(len(each.groups) == 1 for each in groups.classes)
        and problem.host_bytes is None
        and bool(np.isfinite(problem.network.alone[:, :, HOST]).all())
        and not np.isfinite(problem.network.alone[:, :, CROSS]).any()
        and sum(kind.num_items for kind in problem.kinds) <= MOST_ITEMS
    )


def mix_fills(problem: PlacementProblem, rows: ObjectiveRows) -> Mixture | None:
    """Find the weights that bound best, where `can_fill`; None where no solver answers."""
    loads = _by_clique(problem, rows)
    cliques = _Cliques(problem, loads)
    columns: Columns = [[] for _ in problem.cliques]
    best = tried = np.full(len(loads.constants), 1 / len(loads.constants))
    bound, prices = -np.inf, list[float]()
    value, mixed = np.inf, np.zeros(0)
    for _ in range(ROUNDS):
        found, fills = cliques.at(tried)
        for c, each in enumerate(fills):
            columns[c].append((loads.of(c, cliques.reads(c, each.fills)), each))
        if found > bound:
            bound, best, prices = found, tried, [each.price for each in fills]
        answer = _solve(loads, columns)
        if answer is None:
            return None
        value, mixed, weights = answer
        if value <= bound * (1 + ENOUGH):
            break
        tried = STEADY * best + (1 - STEADY) * weights
    shares = _shares(columns, mixed)
    device, reads = np.zeros(problem.num_devices), np.zeros(problem.network.alone.shape)
    for c, clique in enumerate(problem.cliques):
        device[list(clique)] = prices[c]
        reads[:, list(clique)] = cliques.reads(c, shares[c])[:, None]
    return Mixture(
        prices=Prices(rows=loads.spread @ best, device=device, host=0.0),
        value=value,
        bound=bound,
        reads=reads,
        shares=shares,
        ladders=cliques.ladders,
    )


def round_mixture(problem: PlacementProblem, mixture: Mixture) -> Placement:
    """Round to whole items by the fills' shares, within every device's bytes."""
    none = np.zeros(0, np.int64)
    chosen = [
        WantedCopies(
            replicated=[none] * len(problem.cliques),
            dealt=[none] * len(problem.cliques),
            single=[none] * problem.num_devices,
        )
        for _ in problem.kinds
    ]
    unread = [[none] * len(problem.cliques) for _ in problem.kinds]
    for c, shares in enumerate(mixture.shares):
        for t, ladder in enumerate(mixture.ladders[c]):
            state = _states(ladder, t, shares)
            ids = ladder.ids[: len(state)]
            chosen[t].replicated[c] = ids[state == _EVERY]
            chosen[t].dealt[c] = ids[(state == _PART) | (state == _UNREAD)]
            unread[t][c] = ids[state == _UNREAD]
    own = fill_devices(problem, chosen)
    held: list[ItemPlacement] = []
    for t, kind in enumerate(problem.kinds):
        codes: list[NDArray[np.uint8]] = []
        for c, clique in enumerate(problem.cliques):
            place = np.full(kind.num_items, HOST, np.uint8)
            if len(clique) > 1 and np.isfinite(problem.network.alone[t, clique[0], PEER]):
                place[mark_holders([own[t][d] for d in clique], kind.num_items) >= 0] = PEER
                place[unread[t][c]] = HOST
            codes.append(place)
        held.append(ItemPlacement(own=own[t], fallback_places=codes, on_host=None))
    return Placement(policy="joint", cliques=problem.cliques, items=tuple(held), variant="prices")


def _by_clique(problem: PlacementProblem, rows: ObjectiveRows) -> _Loads:
    weights = np.stack(
        [rows.weights[:, :, list(clique)].sum(axis=2) for clique in problem.cliques], axis=2
    )
    names = tuple(map(str, range(len(rows.names))))
    kept = drop_dominated(ObjectiveRows(names=names, weights=weights, constants=rows.constants))
    flat = weights.reshape(len(weights), -1)
    scale = max(float(flat.max(initial=0.0)), 1e-300)
    spread = np.zeros((len(rows.names), len(kept.names)))
    for at, name in enumerate(kept.names):
        same = np.abs(flat - flat[int(name)]).max(axis=1) <= 1e-12 * scale
        same &= rows.constants == rows.constants[int(name)]
        spread[same, at] = 1.0 / np.count_nonzero(same)
    return _Loads(weights=kept.weights, constants=kept.constants, spread=spread)


def _solve(
    loads: _Loads, columns: Columns
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]] | None:
    """Return value, shares of all columns by clique, and weights; None without a solver."""
    load = np.stack([column for mine in columns for column, _ in mine], axis=1)
    num_rows, num = len(loads.constants), int(load.shape[1])
    unit = max(float(load.max(initial=0.0)), float(loads.constants.max(initial=0.0))) or 1.0
    clique = np.repeat(np.arange(len(columns)), [len(mine) for mine in columns])
    at = np.arange(num_rows)
    linear = LinearProgram(
        cost=np.append(np.zeros(num), 1.0),
        upper=np.append(np.ones(num), np.inf),
        row=np.concatenate([np.repeat(at, num), at, num_rows + clique]),
        column=np.concatenate([np.tile(np.arange(num), num_rows), np.full(num_rows, num),
                               np.arange(num)]),
        value=np.concatenate([load.ravel() / unit, -np.ones(num_rows), np.ones(num)]),
        rhs=np.concatenate([-loads.constants / unit, np.ones(len(columns))]),
        num_less=num_rows,
    )  # fmt: skip
    answer = SHARED.solve(linear, seconds=SECONDS)
    if isinstance(answer, Failure):
        return None
    weights = np.maximum(0.0, -answer.duals[:num_rows])
    total = float(weights.sum())
    weights = weights / total if total > 0 else np.full(num_rows, 1 / num_rows)
    return float(answer.x[-1]) * unit, np.clip(answer.x[:-1], 0.0, 1.0), weights


def _shares(columns: Columns, mixed: NDArray[np.float64]) -> tuple[Shares, ...]:
    found: list[Shares] = []
    at = 0
    for mine in columns:
        shares = mixed[at : at + len(mine)]
        at += len(mine)
        total = float(shares.sum()) or 1.0
        found.append(
            tuple(
                (float(x) * part / total, fill)
                for x, (_, each) in zip(shares, mine, strict=True)
                for part, fill in each.fills
                if x * part > 0
            )
        )
    return tuple(found)


_EVERY, _PART, _UNREAD, _NONE = range(4)


def _states(ladder: Ladder, t: int, shares: Shares) -> NDArray[np.int8]:
    """Find for each item who holds it: every device, one, one unread by others, or none."""
    length = max((each.held[t] for _, each in shares), default=0)
    wanted = np.zeros((4, length + 1))
    for share, each in shares:
        whole, held = each.whole[t], each.held[t]
        part = _PART if each.peers[t] else _UNREAD
        for state, start, end in ((_EVERY, 0, whole), (part, whole, held), (_NONE, held, length)):
            wanted[state, start] += share
            wanted[state, end] -= share
    return np.asarray(_share_out(wanted, ladder.size))


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _share_out(steps: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Give each item [N] the state that is furthest behind its share of bytes.

    `steps` [S, N + 1] are what each state's share of the items changes by from an item on, `ends`
    the bytes of the first i items.
    """
    wanted, behind = np.zeros(steps.shape[0]), np.zeros(steps.shape[0])
    state = np.empty(steps.shape[1] - 1, np.int8)
    for i in range(state.size):
        size = ends[i + 1] - ends[i]
        best = -1
        for s in range(behind.size):
            wanted[s] += steps[s, i]
            behind[s] += wanted[s] * size
            if wanted[s] > 1e-12 and (best < 0 or behind[s] > behind[best]):
                best = s
        state[i] = best
        behind[best] -= size
    return state
