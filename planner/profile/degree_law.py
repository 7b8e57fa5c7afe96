"""What batches of a graph look like by the law of its degrees alone: nothing generated or drawn.

Nodes fall into classes of like weight w, the probability that an edge's end is that node; degrees
are Poisson around w times the ends of all edges, and all that a batch touches is a sum over
classes. Two laws:

    rmat       Graph500's: w = .76^(L-k) .24^k for the C(L, k) nodes with k ones among L bits
    lognormal  log w normal with standard deviation sigma: data sets are less skewed than R-MAT

Repeated edges are not taken out, so hubs are a little hotter here than in a generated graph.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.registry import sampler_or_unknown

UPPER = 0.57 + 0.19
"""Probability that one bit of a node's number is 0: a + b, which equals a + c (Graph500)."""
CLASSES, LAST_SIGMA = 161, 5.0
"""Number of classes of the log-normal law, and the standard deviations that they span."""
MOST_POISSON = 60.0
"""Mean degree above which every fan-out is taken to be filled."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DegreeClasses:
    """Nodes grouped by degree; arrays have shape [classes]."""

    nodes: Numbers
    weight: Numbers
    """Probability that an edge's end is one given node of the class."""
    degree: Numbers
    """Mean degree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontiers:
    """Expected vertices and edges of a batch by hop; every hop expands all vertices so far."""

    vertices: list[Numbers]
    """Vertices by class up to each hop, seeds first."""
    edges: list[float]
    seen: Numbers
    """Probability that the last hop's lists name a given node, drawn or not, shape [classes]."""

    def count(self, hop: int) -> float:
        """Return the expected vertices up to a hop."""
        return float(self.vertices[hop].sum())


def rmat_classes(num_nodes: int, num_edges: int) -> DegreeClasses:
    """Return the classes of an R-MAT graph with `num_edges` stored (directed) edges.

    >>> classes = rmat_classes(1 << 10, 10_240)
    >>> round(classes.nodes.sum()), round(float(classes.nodes @ classes.degree))
    (1024, 10240)
    """
    levels = max(1, (num_nodes - 1).bit_length())
    ones = np.arange(levels + 1)
    share = np.array([math.comb(levels, int(k)) for k in ones], dtype=np.float64) / 2.0**levels
    nodes = share * num_nodes
    weight = UPPER ** (levels - ones) * (1 - UPPER) ** ones * (2.0**levels / num_nodes)
    return DegreeClasses(nodes=nodes, weight=weight, degree=weight * num_edges)


def lognormal_classes(num_nodes: int, num_edges: int, sigma: float) -> DegreeClasses:
    """Return `CLASSES` classes whose degrees are log-normal around the mean degree.

    >>> classes = lognormal_classes(1000, 20_000, 1.0)
    >>> round(classes.nodes.sum()), round(float(classes.nodes @ classes.degree))
    (1000, 20000)
    """
    z = np.linspace(-LAST_SIGMA, LAST_SIGMA, CLASSES)
    share = np.exp(-(z**2) / 2)
    nodes = num_nodes * share / share.sum()
    weight = np.exp(sigma * z)
    weight /= float(nodes @ weight)
    return DegreeClasses(nodes=nodes, weight=weight, degree=weight * num_edges)


def mean_drawn(degree: Numbers, fanout: int) -> Numbers:
    """Return E min(d, fanout) of Poisson degrees d with the given means.

    >>> [round(float(x), 3) for x in mean_drawn(np.array([0.5, 1e6]), 10)]
    [0.5, 10.0]
    """
    low = np.minimum(degree, MOST_POISSON)
    term, total = np.exp(-low), np.full_like(low, float(fanout))
    for d in range(fanout):
        total -= term * (fanout - d)
        term = term * low / (d + 1)
    return np.where(degree > MOST_POISSON, np.minimum(degree, float(fanout)), total)


def frontiers(
    classes: DegreeClasses, num_seeds: float, fanouts: Sequence[int], sampler: str
) -> Frontiers:
    """Return the expected frontiers of a batch of uniform seeds among nodes with an edge.

    NS       S_{l+1} = n (1 - (1 - S_l/n) exp(-m w)),  m edges drawn in the hop
    LABOR-0  the same with P(hit) = integral_0^1 1 - exp(-w sum of degrees whose k/d >= x) dx

    Args:
        classes: degree classes of the graph.
        num_seeds: seeds of the batch.
        fanouts: fan-out per hop, next to the seeds first.
        sampler: name of the sampler; LABOR draws by vertex.

    Source: docs/formulas.md 1.4 (b) for Poisson numbers of edges between a frontier and a node.
    """
    connected = classes.nodes * -np.expm1(-classes.degree)
    start = num_seeds * connected / connected.sum()
    return expand(classes, np.minimum(start, classes.nodes), fanouts, sampler)


def expand(
    classes: DegreeClasses, start: Numbers, fanouts: Sequence[int], sampler: str
) -> Frontiers:
    """Return the frontiers that follow from `start`, the expected vertices by class."""
    held, edges = [start], list[float]()
    seen = np.zeros_like(start)
    for fanout in fanouts:
        now = held[-1]
        drawn = mean_drawn(classes.degree, fanout)
        edges.append(float(now @ drawn))
        ends = float(now @ classes.degree)
        seen = -np.expm1(-ends * classes.weight)
        if sampler_or_unknown(sampler).one_draw_per_vertex:
            hit = _labor_hit(classes, now, fanout)
        else:
            hit = -np.expm1(-edges[-1] * classes.weight)
        share = np.divide(now, classes.nodes, out=np.zeros_like(now), where=classes.nodes > 0)
        held.append(classes.nodes * (1 - (1 - np.minimum(1.0, share)) * (1 - hit)))
    return Frontiers(vertices=held, edges=edges, seen=seen)


def _labor_hit(classes: DegreeClasses, now: Numbers, fanout: int) -> Numbers:
    """Return the expected largest min(1, k/d) over frontier nodes whose list names a node."""
    # As drawn on average, which for Poisson degrees near the fan-out is a little below min(1, k/d).
    q = mean_drawn(classes.degree, fanout) / np.maximum(classes.degree, 1e-300)
    q = np.minimum(1.0, q)
    order = np.argsort(-q, kind="stable")
    reach = np.cumsum((now * classes.degree)[order])  # edge ends of nodes with at least that q
    upper = q[order]
    width = upper - np.append(upper[1:], 0.0)
    chance = -np.expm1(-np.outer(classes.weight, reach))
    return chance @ width
