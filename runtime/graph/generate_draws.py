"""Random edges, features, labels and splits of synthetic graphs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.device import usable_ram_bytes
from gnnplan.runtime.errors import DatasetError

Ids = NDArray[np.int64]
Rng = np.random.Generator
Drawer = Callable[[int], tuple[Ids, Ids]]
"""Draws up to that many edges: two equally long arrays of node ids."""

DRAW_EDGES = 1 << 21
BYTES_PER_EDGE = 40
"""Memory for a stored edge while a graph is made, about."""
GRAPH500 = (0.57, 0.19, 0.19)
"""Probabilities a, b, c of the quadrants; d is the rest (0.05)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clustering:
    """What decides how far the batches of a graph meet the same nodes, beyond its sizes."""

    spread: float
    """Standard deviation of the log of nodes' degrees."""
    inside: float
    """Share of a list's ends inside the node's community."""
    community: float
    """Nodes of a community."""
    seed_lean: float = 0.0
    """Exponent: training nodes are chosen in proportion to their degree to this power."""
    seed_spread: float = 0.0
    """Standard deviation of the log of communities' shares of training nodes."""
    both_ways: bool = True
    """Whether each edge is stored in both directions; else list lengths and names are unrelated."""
    region: float = 1.0
    """Share of the nodes that lists reach from training nodes."""
    lists: float = 1.0
    """Mean list length in the region over the graph's."""
    named: float = 1.0
    """Mean number of lists that name a node of the region over the graph's."""
    stray: float = 0.0
    """Share of a batch's input nodes outside the region; of its lists' ends, in what is made."""
    rest_spread: float | None = None
    """Standard deviation of the log of degrees outside the region; None where it is `spread`."""


def check_sizes(
    num_nodes: int,
    degree: float | int,
    feature_dim: int,
    num_classes: int,
    *,
    in_memory: bool = True,
) -> None:
    """Refuse sizes of which no graph can be made, or none in this machine's memory.

    Raises DatasetError.
    """
    if num_nodes < 2 or num_classes < 1 or feature_dim < 1 or num_classes > num_nodes:
        raise DatasetError(
            "expected at least 2 nodes, 1 feature column and from 1 to num_nodes classes, found "
            f"{num_nodes} nodes, {feature_dim} columns and {num_classes} classes"
        )
    if not 0 < degree <= (num_nodes - 1) / 2:
        raise DatasetError(
            f"expected a mean degree above 0 and at most {(num_nodes - 1) / 2:g} (half of a "
            f"complete graph's) for {num_nodes} nodes, found {degree:g}"
        )
    need, usable = num_nodes * max(degree, 1) * BYTES_PER_EDGE, usable_ram_bytes()
    if in_memory and need > usable:
        raise DatasetError(
            f"expected sizes whose edges fit in memory, found {num_nodes} nodes * a mean degree of "
            f"{degree:g} * {BYTES_PER_EDGE} bytes = {need / 1e9:.1f} GB > {usable / 1e9:.1f} GB"
        )


def rmat_drawer(num_nodes: int, rng: Rng) -> Drawer:
    """Draw R-MAT edges: each bit level of (u, v) falls into one of four quadrants."""
    levels = max(1, (num_nodes - 1).bit_length())
    a, b, c = (np.float32(p) for p in GRAPH500)

    def draw(count: int) -> tuple[Ids, Ids]:
        u = np.zeros(count, np.int64)
        v = np.zeros(count, np.int64)
        for _ in range(levels):
            r = rng.random(count, dtype=np.float32)
            lower = r >= a + b
            u <<= 1
            u |= lower
            v <<= 1
            v |= np.where(lower, r >= a + b + c, r >= a)
        inside = (u < num_nodes) & (v < num_nodes)
        return u[inside], v[inside]

    return draw


def block_model_drawer(
    weights: NDArray[np.float64], communities: Ids, homophily: float, rng: Rng
) -> Drawer:
    """Draw edges of a degree-corrected block model, by weights and rising communities of nodes."""
    ends = np.cumsum(weights)
    first = np.searchsorted(communities, communities, side="left")
    last = np.searchsorted(communities, communities, side="right") - 1
    low, high = (ends - weights)[first], ends[last]

    def draw(count: int) -> tuple[Ids, Ids]:
        u = np.searchsorted(ends, rng.random(count) * ends[-1], side="right")
        inside = rng.random(count) < homophily
        start, stop = np.where(inside, low[u], 0.0), np.where(inside, high[u], ends[-1])
        v = np.searchsorted(ends, start + rng.random(count) * (stop - start), side="right")
        most = len(ends) - 1  # rounding may land on the total itself
        return np.minimum(u, most), np.minimum(v, most)

    return draw


def equal_communities(num_nodes: int, num_communities: int) -> Ids:
    """Return the communities of nodes in rising order, equally large."""
    return np.arange(num_nodes) * num_communities // num_nodes


def communities_of(shape: Clustering, num_nodes: int) -> int:
    """Return how many communities so many nodes fall into."""
    return max(1, round(num_nodes / shape.community))


def community_weights(
    shape: Clustering, num_nodes: int, region: int, mean: float, rng: Rng
) -> NDArray[np.float64]:
    """Draw log-normal weights with the given mean in the region, and 1 over all."""
    weights = rng.standard_normal(num_nodes)
    spread = shape.spread if shape.rest_spread is None else shape.rest_spread
    rest = max(0.0, num_nodes - region * mean) / max(1, num_nodes - region)
    for part, sigma, of in (
        (weights[:region], shape.spread, mean),
        (weights[region:], spread, rest),
    ):
        part[:] = of * np.exp(sigma * part - sigma**2 / 2)
    return weights


def seed_chances(
    shape: Clustering, names: NDArray[np.float64], region: int, rng: Rng
) -> NDArray[np.float64]:
    """Weigh nodes by their chance to be training nodes, 0 outside the region."""
    chances = np.where(np.arange(len(names)) < region, names**shape.seed_lean, 0.0)
    if shape.seed_spread:
        number = communities_of(shape, region)
        dense = np.exp(shape.seed_spread * rng.standard_normal(number))
        chances[:region] *= dense[equal_communities(region, number)]
    return chances


def draw_communities(
    shape: Clustering, names: NDArray[np.float64], region: int, degree: float | int, rng: Rng
) -> Ids:
    """Draw the keys of the edges (named node, node of the list)."""
    num_nodes = len(names)
    number = [communities_of(shape, each) for each in (region, num_nodes - region)]
    communities = np.concatenate(
        [
            equal_communities(region, number[0]),
            number[0] + equal_communities(num_nodes - region, number[1]),
        ]
    )
    lists, crossing = names, 0.0
    if not shape.both_ways:
        lists = community_weights(shape, num_nodes, region, shape.lists, rng)
        into = (names[:region].sum() - lists[:region].sum()) / max(lists[region:].sum(), 1e-300)
        crossing = float(np.clip(into / max(1e-9, 1 - shape.inside), 0.0, 1.0))
    leaving = min(1.0, shape.stray / max(1e-9, 1 - shape.inside))
    draw = _community_drawer(
        lists,
        names,
        communities,
        inside=shape.inside,
        region=region,
        recent=(1 - leaving, crossing),
        rng=rng,
    )
    return distinct_pairs(draw, num_nodes, degree, rng, both_ways=shape.both_ways, crowded=True)


def _community_drawer(
    lists: NDArray[np.float64],
    names: NDArray[np.float64],
    communities: Ids,
    *,
    inside: float,
    region: int,
    recent: tuple[float, float],
    rng: Rng,
) -> Drawer:
    """Draw edges (named node, node of the list) by weights of both, in rising communities.

    An edge that does not stay in its community begins among the first `region` nodes with the first
    chance of `recent` if its list is one of theirs, else with the second.
    """
    owners, ends = np.cumsum(lists), np.cumsum(names)
    bounds = np.searchsorted(communities, np.arange(communities[-1] + 2), side="left")
    border, edges = float(ends[region - 1]), np.concatenate([[0.0], ends])[bounds]

    def draw(count: int) -> tuple[Ids, Ids]:
        owner = np.searchsorted(owners, rng.random(count) * owners[-1], side="right")
        owner = np.minimum(owner, len(ends) - 1)  # rounding may land on the total itself
        stays, community = rng.random(count) < inside, communities[owner]
        first = rng.random(count) < np.where(owner < region, *recent)
        start = np.where(stays, edges[community], np.where(first, 0.0, border))
        stop = np.where(stays, edges[community + 1], np.where(first, border, ends[-1]))
        named = np.searchsorted(ends, start + rng.random(count) * (stop - start), side="right")
        return np.minimum(named, len(ends) - 1), owner

    return draw


def distinct_pairs(
    draw: Drawer,
    num_nodes: int,
    degree: float | int,
    rng: Rng,
    *,
    both_ways: bool = True,
    crowded: bool = False,
) -> Ids:
    """Draw `num_nodes * degree / 2` distinct edges u < v as sorted keys `u * num_nodes + v`.

    Edges that are not `both_ways` are twice as many, and their ends as they were drawn. Where few
    draws of a `crowded` graph are new, more are made at once.
    """
    wanted = max(1, round(num_nodes * degree / (2 if both_ways else 1)))
    keys, rate = np.empty(0, np.int64), 1.0
    while len(keys) < wanted:
        have = len(keys)
        missing = wanted - have
        count = int(min(missing / rate, wanted) * 1.1) + 1024
        fresh: list[Ids] = [keys]
        for start in range(0, count, DRAW_EDGES):
            u, v = draw(min(DRAW_EDGES, count - start))
            low, high = (np.minimum(u, v), np.maximum(u, v)) if both_ways else (u, v)
            key = low * num_nodes + high
            fresh.append(key[u != v])
        keys = np.concatenate(fresh)
        keys.sort()
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
        if crowded:
            rate = max(0.01, (len(keys) - have) / count)
        if len(keys) - have < min(missing, max(64, missing // 100)):
            raise DatasetError(
                f"found only {len(keys)} distinct edges of {wanted} among {num_nodes} nodes; "
                "lower the degree or raise the number of nodes"
            )
    if len(keys) > wanted:
        surplus = rng.choice(len(keys), len(keys) - wanted, replace=False, shuffle=False)
        keys = np.delete(keys, surplus)
    return keys


def signal_length(num_classes: int, feature_signal: float) -> float:
    """Return the length s of the class signal for which features alone reach the wanted accuracy.

    With C = `num_classes` orthogonal directions and unit noise the best classifier takes the
    largest of C independent normals, one of which is shifted by s:

        P(right) = integral phi(t - s) Phi(t)^(C - 1) dt = 1/C + feature_signal (1 - 1/C)
    """
    from scipy.stats import norm  # half a second of imports, for generators alone

    if num_classes == 1 or feature_signal <= 0:
        return 0.0
    goal = 1 / num_classes + min(feature_signal, 0.999) * (1 - 1 / num_classes)
    grid = np.linspace(-8.0, 28.0, 4001)
    others = norm.cdf(grid) ** (num_classes - 1)

    low, high = 0.0, 20.0
    for _ in range(60):  # bisection: the probability rises with s
        middle = (low + high) / 2
        right = np.trapezoid(norm.pdf(grid - middle) * others, grid)
        low, high = (middle, high) if right < goal else (low, middle)
    return low


def noisy_labels(communities: Ids, num_classes: int, share: float, rng: Rng) -> Ids:
    """Return each node's community, but a random other class for a share of the nodes."""
    if num_classes == 1:
        return communities
    wrong = rng.random(len(communities)) < share
    shift = rng.integers(1, num_classes, len(communities))
    return np.where(wrong, (communities + shift) % num_classes, communities)


def split_nodes(candidates: Ids, fractions: tuple[float, float, float], rng: Rng) -> list[Ids]:
    """Draw disjoint sorted id sets of the wanted shares, each with at least one node."""
    if min(fractions) < 0 or sum(fractions) > 1 + 1e-9 or fractions[0] <= 0:
        raise DatasetError(
            "expected split fractions of 0 or more that add up to at most 1, with a training "
            f"share above 0, found {', '.join(f'{f:g}' for f in fractions)}"
        )
    shuffled = rng.permutation(candidates)
    sizes = [max(1, int(f * len(candidates))) if f > 0 else 0 for f in fractions]
    ends = np.cumsum(sizes)
    return [np.sort(shuffled[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def split_by_chance(
    candidates: Ids, chances: NDArray[np.float64], fractions: tuple[float, float, float], rng: Rng
) -> list[Ids]:
    """Draw training nodes in proportion to chances, and the others as `split_nodes`."""
    train = min(max(1, int(fractions[0] * len(candidates))), int(np.count_nonzero(chances)))
    with np.errstate(divide="ignore"):
        order = np.argsort(rng.exponential(size=len(candidates)) / chances, kind="stable")
    rest = rng.permutation(candidates[order[train:]])
    val, test = (max(1, int(f * len(candidates))) if f > 0 else 0 for f in fractions[1:])
    return [
        np.sort(candidates[order[:train]]),
        np.sort(rest[:val]),
        np.sort(rest[val : val + test]),
    ]


def split_pairs(
    pairs: Ids, fractions: tuple[float, float, float], rng: Rng
) -> tuple[Ids, list[Ids]]:
    """Split pairs [k, 2] at random; return the stored ones, and those of train, val and test."""
    train, val, test = fractions
    if min(fractions) < 0 or train <= 0 or val + test >= 1 or train > 1 - val - test + 1e-9:
        raise DatasetError(
            "expected a training share above 0 and validation and test shares of 0 or more that "
            f"add up to at most 1, found {', '.join(f'{f:g}' for f in fractions)}"
        )
    shuffled = pairs[rng.permutation(len(pairs))]
    ends = np.cumsum([int(val * len(pairs)), int(test * len(pairs))])
    held_val, held_test, stored = np.split(shuffled, ends)
    return stored, [stored[: max(1, int(train * len(pairs)))], held_val, held_test]
