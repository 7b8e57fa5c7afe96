r"""Cliques of a machine: the fewest groups of GPUs that are linked all to all (formulas 2.1).

    f[0] = 0;  f[S] = 1 + min over cliques Q in S with the lowest GPU of S of f[S \ Q]

over subsets S as bit masks, exact. Taking the largest clique first is not: on the path 2-0-1-3 it
takes {0, 1} and leaves two GPUs alone ([C8]). The NVLinks between two GPUs break ties.
"""

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numba
import numpy as np
from numpy.typing import NDArray

MAX_EXACT = 16
"""Most GPUs of a connected group whose cover is exact: 3^16 steps take a second."""
KEPT = 3
PLAIN = 8
"""Most GPUs of a group whose cover is found without compiled code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cover:
    """Disjoint cliques that hold every GPU once, each and all in ascending order."""

    cliques: tuple[tuple[int, ...], ...]
    bandwidth: float
    """Sum of the links' weights inside the cliques."""
    exact: bool
    """Whether all covers were tried."""

    @property
    def order(self) -> tuple[int, int, float, tuple[tuple[int, ...], ...]]:
        """Key that ranks covers: fewest, most equal, most bandwidth, lowest ids."""
        squares = sum(len(clique) ** 2 for clique in self.cliques)
        return len(self.cliques), squares, -self.bandwidth, self.cliques


def clique_covers(links: NDArray[np.float64] | NDArray[np.int64], kept: int = KEPT) -> list[Cover]:
    """Find at most `kept` best covers by the fewest cliques, best first.

    Args:
        links: NVLinks (or bandwidth) between each two GPUs, symmetric [n, n]; 0: not linked.
        kept: most covers to return.

    Raises:
        ValueError: `links` is not square, symmetric and free of negative counts.

        >>> path = np.array([[0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
        >>> clique_covers(path)[0].cliques
        ((0, 2), (1, 3))
    """
    if links.ndim != 2 or links.shape[0] != links.shape[1] or (links != links.T).any():
        raise ValueError(f"expected a symmetric matrix of links, found shape {links.shape}")
    if (links < 0).any():
        raise ValueError("expected counts of links of at least 0, found a negative one")
    covers = [Cover(cliques=(), bandwidth=0.0, exact=True)]
    for group in _connected(links):
        found = _covers_of(links, group, kept)
        joined = [_join(a, b) for a in covers for b in found]
        covers = sorted(joined, key=lambda cover: cover.order)[:kept]
    return covers


def greedy_cover(links: NDArray[np.float64] | NDArray[np.int64]) -> Cover:
    """Cover by the largest clique first, as Legion's and Quiver's releases do, to compare with."""
    import networkx as nx

    rest: nx.Graph[int] = nx.Graph()
    rest.add_nodes_from(range(len(links)))
    rest.add_edges_from((int(a), int(b)) for a, b in np.argwhere(np.triu(links, 1) > 0))
    cliques: list[tuple[int, ...]] = []
    while rest.number_of_nodes():
        found = [tuple(sorted(clique)) for clique in nx.find_cliques(rest)]
        best = min(found, key=lambda clique: (-len(clique), clique))
        cliques.append(best)
        rest.remove_nodes_from(best)
    return _cover(links, cliques, exact=False)


def _cover(
    links: NDArray[np.float64] | NDArray[np.int64],
    cliques: Sequence[tuple[int, ...]],
    *,
    exact: bool,
) -> Cover:
    bandwidth = sum(float(links[a, b]) for clique in cliques for a in clique for b in clique) / 2
    return Cover(cliques=tuple(sorted(cliques)), bandwidth=bandwidth, exact=exact)


def _join(a: Cover, b: Cover) -> Cover:
    return Cover(
        cliques=tuple(sorted(a.cliques + b.cliques)),
        bandwidth=a.bandwidth + b.bandwidth,
        exact=a.exact and b.exact,
    )


def _connected(links: NDArray[np.float64] | NDArray[np.int64]) -> list[list[int]]:
    """Group GPUs that links join: the groups' covers do not depend on each other."""
    left, groups = set(range(len(links))), list[list[int]]()
    while left:
        group, reached = set[int](), {min(left)}
        while reached:
            group |= reached
            near = (links[sorted(reached)] > 0).any(axis=0)
            reached = {int(other) for other in np.flatnonzero(near)} - group
        groups.append(sorted(group))
        left -= group
    return groups


def _covers_of(
    links: NDArray[np.float64] | NDArray[np.int64], group: list[int], kept: int
) -> list[Cover]:
    inner = links[np.ix_(group, group)] > 0
    size = len(group)
    np.fill_diagonal(inner, val=True)
    if inner.all():
        return [_cover(links, [tuple(group)], exact=True)]
    if size > MAX_EXACT:
        greedy = greedy_cover(links[np.ix_(group, group)])
        cliques = [tuple(group[i] for i in clique) for clique in greedy.cliques]
        return [_cover(links, cliques, exact=False)]
    linked = np.array([sum(1 << b for b in range(size) if inner[a, b]) for a in range(size)])
    compiled = cast("Any", _fewest)
    # To load the compiled form takes longer than to find the cover of few.
    fewest, is_clique = (compiled if size > PLAIN else compiled.py_func)(linked, size)

    def named(mask: int) -> tuple[int, ...]:
        return tuple(group[i] for i in range(size) if mask >> i & 1)

    @cache
    def best(rest: int) -> tuple[Cover, ...]:
        if rest == 0:
            return (Cover(cliques=(), bandwidth=0.0, exact=True),)
        low = rest & -rest
        found: list[Cover] = []
        others = rest ^ low
        sub = others
        while True:
            mask = sub | low
            if is_clique[mask] and fewest[rest ^ mask] == fewest[rest] - 1:
                first = _cover(links, [named(mask)], exact=True)
                found += [_join(first, cover) for cover in best(rest ^ mask)]
            if sub == 0:
                break
            sub = (sub - 1) & others
        return tuple(sorted(found, key=lambda cover: cover.order)[:kept])

    return list(best((1 << size) - 1))


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _fewest(linked: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute f[S], and whether S is a clique, of all masks; linked [size] has own bits set."""
    count = 1 << size
    is_clique = np.zeros(count, np.bool_)
    is_clique[0] = True
    fewest = np.zeros(count, np.int8)
    for mask in range(1, count):
        low = mask & -mask
        index = 0
        while (1 << index) != low:
            index += 1
        is_clique[mask] = is_clique[mask ^ low] and (linked[index] & mask) == mask
        others = mask ^ low
        best = 127
        sub = others
        while True:
            if is_clique[sub | low]:
                best = min(best, 1 + fewest[others ^ sub])
            if sub == 0:
                break
            sub = (sub - 1) & others
        fewest[mask] = best
    return fewest, is_clique
