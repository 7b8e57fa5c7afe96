"""What batches touch, computed from the graph instead of drawn.

From the adjacency lists: P_l(u), the probability that u is among the vertices drawn up to hop l, by
one pass over the edges per hop, as if all vertices were drawn independently (formulas 1.4 b). It is
exact for one hop from independent seeds under neighbour sampling. Otherwise it ranks and does not
measure [C5]:

* batches of fixed size draw seeds without replacement, and the formula is low by O(b / |train|);
* deeper hops share vertices, and for neighbour sampling the formula is high [C26].

From a law of degrees alone: expected frontiers of a graph that is not at hand. Nodes fall into
classes by w, the probability that an edge's end is one given node; degrees are Poisson around w
times the ends of all edges, and all that a batch touches is a sum over classes. Two laws:

    rmat       Graph500's: w = .76^(L-k) .24^k for the C(L, k) nodes with k ones among L bits
    lognormal  log w normal with standard deviation sigma: data sets are less skewed than R-MAT

Repeated edges are not taken out, so hubs are a little hotter here than in a generated graph.

From the lengths of a graph's lists alone: nodes of one class have lists of one length, or nearly,
and edges end at a node in proportion to it, as if a list were as long as the number of lists that
name the node and neighbours were independent. It is the law of a first answer (DEC-144).

Layers drawn for a whole batch follow from it: a node is named k times by the batch's lists, k of
Poisson's law around its mean, and drawn with the chance that the sampler gives to k (DEC-184).
"""

import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.profile.community_law import Numbers, mean_drawn
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import BatchProfile, Hotness, Spread
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.registry import (
    Draws,
    find_sampler,
    law_of,
    layer_sizes,
    parameters_of,
    sampler_or_unknown,
)

Indices = NDArray[np.int32] | NDArray[np.int64]
Chances = NDArray[np.float32] | NDArray[np.float64]
"""Probabilities of being hit, shape [N]; those of being missed would lose the digits near 0."""


def seed_probability(
    num_train: int, batch_size: int, *, num_ranks: int = 1, drop_last: bool = False
) -> float:
    """Return P_0 of a training vertex: its chance of being a seed of one rank's batch.

        1 / (ceil(T / B) * ranks), or B / (T * ranks) where a last partial batch is dropped

    T are training vertices, B is the global batch (formulas 1.4 b).

    >>> seed_probability(1000, 512), seed_probability(1000, 512, drop_last=True)
    (0.5, 0.512)
    """
    if drop_last:
        return min(1.0, batch_size / num_train) / num_ranks
    return 1 / (-(-num_train // batch_size) * num_ranks)


def neighbor_hotness(
    indptr: NDArray[np.int64],
    indices: Indices,
    seeds: Chances,
    fanouts: Sequence[int],
    *,
    dialect: Literal["first_seen", "every_hop"] = "every_hop",
) -> Chances:
    """Return P_L under neighbour sampling without replacement (formulas 1.4 b).

        P_{l+1}(u) = 1 - (1 - P_l(u)) * prod over s != u that list u of (1 - E_l(s) * q_s(u))
        q_s(u)     = min(1, k / d_s); 1 - C(d-m, k) / C(d, k) where s lists u m times

    E_l(s) is the chance that s is expanded at hop l: P_l(s) in dialect every_hop, and P_l(s) -
    P_{l-1}(s) in first_seen, where a vertex is expanded only where it first appears.

    Args:
        indptr: shape [N + 1].
        indices: shape [E]; the list of s is `indices[indptr[s]:indptr[s+1]]`.
        seeds: P_0, shape [N]; float32 halves the memory.
        fanouts: k by hop, the hop next to the seeds first; -1 takes all.
        dialect: which vertices are expanded at each hop.

    Returns:
        P_L, shape [N], in the type of the seeds; O(L * E) time.
    """
    # Many small terms may meet in one sum: float32 would lose them.
    p, hit = seeds.copy(), np.zeros(len(seeds))
    expanded = seeds.copy() if dialect == "first_seen" else p
    seen = np.zeros(len(seeds), np.int32)
    for k in fanouts:
        _spread_neighbor(indptr, indices, expanded, k, hit, seen)
        _advance(p, expanded, hit, dialect == "first_seen")
    return p


def smooth(measured: Chances, analytic: Chances, num_batches: int) -> None:
    """Replace zeros of measured hotness by 0.5 / m times the analytic value (formulas 1.4 c).

    `measured` [N], shares of m = `num_batches` batches, is changed in place.
    """
    _order_zeros(measured, analytic, 0.5 / num_batches)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _order_zeros(measured: np.ndarray, analytic: np.ndarray, factor: float) -> None:
    for v in range(measured.size):
        if not measured[v] > 0:
            measured[v] = factor * analytic[v]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _advance(p: np.ndarray, expanded: np.ndarray, hit: np.ndarray, first_seen: bool) -> None:
    """Advance P [N] by the new hits and clear `hit`; in first_seen `expanded` [N] keeps them."""
    for v in range(p.size):
        new = (1.0 - p[v]) * hit[v]
        hit[v] = 0.0
        p[v] += new
        if first_seen:
            expanded[v] = new


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _miss_draws(degree: int, multiplicity: int, k: int) -> float:
    """Return C(d-m, k) / C(d, k), the chance that k of d places miss all of m given ones."""
    miss = 1.0
    for i in range(multiplicity):
        miss *= max(0.0, (degree - k - i) / (degree - i))
    return miss


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _spread_neighbor(
    indptr: np.ndarray,
    indices: np.ndarray,
    expanded: np.ndarray,
    k: int,
    hit: np.ndarray,
    seen: np.ndarray,
) -> None:
    """Add to hit [N] the chance that each s draws u; `seen` [N] is zero before and after."""
    for s in range(expanded.size):
        if expanded[s] <= 0.0:
            continue
        start, end = indptr[s], indptr[s + 1]
        degree = end - start
        for e in range(start, end):
            seen[indices[e]] += 1
        for e in range(start, end):
            u = indices[e]
            m = seen[u]
            seen[u] = 0
            if m == 0 or u == s:
                continue
            q = 1.0 if k < 0 or k >= degree else 1.0 - _miss_draws(degree, m, k)
            hit[u] += (1.0 - hit[u]) * (expanded[s] * q)


UPPER = 0.57 + 0.19
"""Probability that one bit of a node's number is 0: a + b, which equals a + c (Graph500)."""
CLASSES, LAST_SIGMA = 161, 5.0
"""Number of classes of the log-normal law, and the standard deviations that they span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DegreeClasses:
    """Nodes grouped by degree; arrays have shape [classes]."""

    nodes: Numbers
    weight: Numbers
    """Probability that an edge's end is one given node of the class."""
    degree: Numbers
    """Mean degree."""
    exact: bool = False
    """Whether each node has exactly its class's degree; else degrees are Poisson around it."""

    def drawn(self, fanout: int) -> Numbers:
        """Return the mean neighbours drawn of a node's list; all of them where `fanout` is -1."""
        if fanout < 0:
            return self.degree
        return np.minimum(self.degree, fanout) if self.exact else mean_drawn(self.degree, fanout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontiers:
    """Expected vertices and edges of a batch by hop."""

    vertices: list[Numbers]
    """Vertices by class up to each hop, seeds first."""
    expanded: list[Numbers]
    """Vertices by class that each hop expands."""
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
    classes: DegreeClasses,
    start: Numbers,
    fanouts: Sequence[int],
    sampler: str,
    *,
    new_alone: bool = False,
) -> Frontiers:
    """Return the frontiers that follow from `start`, the expected vertices by class.

    Each hop expands all vertices so far, or with `new_alone` those that the last hop added.
    """
    held, expanded, edges = [start], list[Numbers](), list[float]()
    seen = np.zeros_like(start)
    for fanout in fanouts:
        now = held[-1] - held[-2] if new_alone and expanded else held[-1]
        expanded.append(now)
        drawn = classes.drawn(fanout)
        edges.append(float(now @ drawn))
        ends = float(now @ classes.degree)
        seen = -np.expm1(-ends * classes.weight)
        if sampler_or_unknown(sampler).one_draw_per_vertex:
            hit = _labor_hit(classes, now, fanout)
        else:
            hit = -np.expm1(-edges[-1] * classes.weight)
        share = np.divide(held[-1], classes.nodes, out=np.zeros_like(now), where=classes.nodes > 0)
        held.append(classes.nodes * (1 - (1 - np.minimum(1.0, share)) * (1 - hit)))
    return Frontiers(vertices=held, expanded=expanded, edges=edges, seen=seen)


def _labor_hit(classes: DegreeClasses, now: Numbers, fanout: int) -> Numbers:
    """Return the expected largest min(1, k/d) over frontier nodes whose list names a node."""
    # As drawn on average, which for Poisson degrees near the fan-out is a little below min(1, k/d).
    q = classes.drawn(fanout) / np.maximum(classes.degree, 1e-300)
    q = np.minimum(1.0, q)
    order = np.argsort(-q, kind="stable")
    reach = np.cumsum((now * classes.degree)[order])  # edge ends of nodes with at least that q
    upper = q[order]
    width = upper - np.append(upper[1:], 0.0)
    chance = -np.expm1(-np.outer(classes.weight, reach))
    return chance @ width


MOST_NAMED = 96
"""Most lists that name a node for which each number of lists is told apart."""


def draw_layers(
    classes: DegreeClasses, start: Numbers, sizes: Sequence[int], sampler: Sampler
) -> Frontiers:
    """Return the frontiers of layers drawn for a whole batch that begins with `start` by class.

    Source: docs/formulas.md 4.2, 4.3 and 5.4.
    """
    held, expanded, edges, mean = [start], list[Numbers](), list[float](), np.zeros_like(start)
    draws, norm = law_of(sampler).draws, parameters_of(sampler).get("norm")
    for size in sizes:
        expanded.append(held[-1])
        mean = _mentions(classes, held[-1])
        share, named = _times_named(mean)
        nodes = classes.nodes[:, None] * share
        # Without a norm chances are those of the whole graph, whether a batch's list names a node.
        power = classes.weight[:, None] if norm is None else named ** (1 + (norm == "count2"))
        chance = _drawn_chance(nodes, np.broadcast_to(power, named.shape), size, draws)
        edges.append(float((nodes * named * chance).sum()))
        left = 1 - np.minimum(1.0, held[-1] / classes.nodes)
        held.append(classes.nodes * (1 - left * (1 - (share * chance).sum(axis=1))))
    return Frontiers(vertices=held, expanded=expanded, edges=edges, seen=-np.expm1(-mean))


def _mentions(classes: DegreeClasses, rows: Numbers) -> Numbers:
    """Return how many lists of `rows` by class name a node, which none names twice."""
    scale, mean, ends = 1.0, rows, float(rows @ classes.degree)
    for _ in range(4):
        mean = rows @ -np.expm1(-scale * np.outer(classes.degree, classes.weight))
        scale *= ends / max(1e-300, float(classes.nodes @ mean))
    return mean


def _times_named(mean: Numbers) -> tuple[Numbers, Numbers]:
    """Return shares of the nodes of each class by how often they are named, and how often."""
    times = np.arange(MOST_NAMED, dtype=np.float64)
    logs = np.concatenate([[0.0], np.cumsum(np.log(times[1:]))])
    found = np.exp(times * np.log(np.maximum(mean, 1e-300))[:, None] - mean[:, None] - logs)
    named = np.broadcast_to(times, found.shape).copy()
    often = mean > MOST_NAMED / 3  # the law is narrow there
    found[often], named[often] = 0.0, 0.0
    found[often, 1], named[often, 1] = 1.0, mean[often]
    return found, named


def _drawn_chance(nodes: Numbers, power: Numbers, size: int, draws: Draws) -> Numbers:
    """Return the chance that a node is drawn, whose weight is `power`, where `size` are drawn."""
    total, there = float((nodes * power).sum()), power > 0
    if total <= 0:
        return np.zeros_like(nodes)
    if draws is Draws.REPLACEMENT:
        return -np.expm1(-size * power / total)
    if float(nodes[there].sum()) <= size:
        return there.astype(np.float64)

    def chance(level: float) -> Numbers:
        each = level * power
        return np.minimum(1.0, each) if draws is Draws.POISSON else -np.expm1(-each)

    low = high = size / total  # no more than `size` nodes
    while float((nodes * chance(high)).sum()) < size * (1 - 1e-9):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        fewer = float((nodes * chance(middle)).sum()) < size
        low, high = (middle, high) if fewer else (low, middle)
    return chance(high)


WIDTH = 1.05
"""Largest over smallest degree of a class of nodes with long lists."""
SHORT = 64
"""Largest degree that is a class of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphLaw:
    """Classes of a graph's nodes by degree, from which batches are predicted."""

    classes: DegreeClasses
    class_of: NDArray[np.uint16]
    """Class of each node, shape [N]."""
    seeds: Numbers
    """Share of the training nodes by class."""


def read_law(indptr: NDArray[np.int64], training: NDArray[np.int64]) -> GraphLaw:
    """Group a graph's nodes by the lengths of their lists; nothing but `indptr` [N + 1] is read.

    >>> law = read_law(np.array([0, 2, 4, 4, 7]), np.array([0, 3]))
    >>> law.classes.nodes.tolist(), law.seeds.tolist()
    ([1.0, 2.0, 1.0], [0.0, 0.5, 0.5])
    """
    degrees = np.diff(np.asarray(indptr))
    counts = np.bincount(degrees)
    present = np.flatnonzero(counts)
    long = np.log(np.maximum(present, SHORT) / SHORT) / math.log(WIDTH)
    _, place = np.unique(np.minimum(present, SHORT) + long.astype(np.int64), return_inverse=True)
    nodes = np.bincount(place, counts[present]).astype(np.float64)
    degree = np.bincount(place, counts[present] * present) / nodes
    of_degree = np.zeros(counts.size, np.uint16)
    of_degree[present] = place
    class_of = of_degree[degrees]
    seeds = np.bincount(class_of[training], minlength=nodes.size) / max(1, training.size)
    ends = float(nodes @ degree)
    weight = degree / ends if ends > 0 else degree
    classes = DegreeClasses(nodes=nodes, weight=weight, degree=degree, exact=True)
    return GraphLaw(classes=classes, class_of=class_of, seeds=seeds)


LAW_ERROR, REPEATED_ERROR, LAYERS_ERROR = 0.05, 0.15, 0.1
"""Relative standard errors of predicted input vertices (DEC-144): the usual one; where vertices are
drawn once but expanded by several hops, which the law takes for new lists; and of layers."""


def expected_seeds(
    law: GraphLaw, settings: PlanSettings, seeds: int, *, num_train: int, links: bool
) -> Numbers:
    """Return the mean nodes of each class that a rank's batch begins with, repetitions counted.

    With `links` they are both ends of each link, and its negative destinations.
    """
    drawn = min(seeds, num_train)
    if not links:
        return drawn * law.seeds
    any_node, work = law.classes.nodes / law.classes.nodes.sum(), settings.workload
    negatives = work.links.num_negatives if work.links.negatives == "uniform" else 0
    return drawn * (2 * law.seeds + negatives * any_node)


def _expected_frontiers(
    classes: DegreeClasses, start: Numbers, fanouts: Sequence[int], settings: PlanSettings
) -> tuple[Frontiers, float]:
    """Return the frontiers of the settings' sampler, and the relative error of the last."""
    named, new_alone = find_sampler(settings.sampler), settings.dialect == "first_seen"
    if named.layerwise:
        sampler = Sampler(name=settings.sampler, parameters=settings.sampler_parameters)
        sizes = layer_sizes(sampler.name, parameters_of(sampler), settings.workload.fanouts)
        return draw_layers(classes, start, sizes, sampler), LAYERS_ERROR
    repeated = named.one_draw_per_vertex and not new_alone
    found = expand(classes, start, fanouts, settings.sampler, new_alone=new_alone)
    return found, REPEATED_ERROR if repeated else LAW_ERROR


def expected_batch(
    law: GraphLaw, settings: PlanSettings, seeds_per_rank: int, seeds: Numbers
) -> tuple[BatchProfile, Hotness]:
    """Return one rank's batches and the reads of each node as the law of the lists has them.

    `seeds` are the mean number of nodes of each class that a batch begins with.
    """
    classes, new_alone = law.classes, settings.dialect == "first_seen"
    start = classes.nodes * -np.expm1(-seeds / classes.nodes) if seeds.sum() else seeds
    named, fanouts = find_sampler(settings.sampler), settings.workload.fanouts
    if named.takes_all or named.layerwise:  # which read whole lists
        fanouts = [-1] * len(fanouts)
    found, error = _expected_frontiers(classes, start, fanouts, settings)
    blocks = np.cumsum(found.edges) if new_alone else np.asarray(found.edges)
    batch = BatchProfile(
        seeds_per_rank=seeds_per_rank,
        num_batches=1,
        vertices=[Spread.expected(found.count(hop)) for hop in range(len(found.vertices))],
        edges=[Spread.expected(edges) for edges in found.edges],
        block_edges=[Spread.expected(float(edges)) for edges in blocks[::-1]],
        input_standard_error=error,
        half_epoch_error=0.0,
        list_entries=float(sum(each @ classes.degree for each in found.expanded)),
    )
    read = sum(
        (each * classes.drawn(k) for each, k in zip(found.expanded, fanouts, strict=True)),
        start=np.zeros_like(classes.nodes),
    )
    chance, reads = found.vertices[-1] / classes.nodes, read / classes.nodes
    return batch, Hotness.expected(seeds_per_rank, chance, reads, law.class_of)


def expected_draws(
    indptr: NDArray[np.int64], training: NDArray[np.int64], settings: PlanSettings, *, links: bool
) -> Callable[[int], tuple[BatchProfile, Hotness]]:
    """Return a function that predicts the batch of so many seeds, by `expected_batch`."""
    law, num_train = read_law(indptr, training.reshape(-1)), training.shape[0]

    def draw(seeds: int) -> tuple[BatchProfile, Hotness]:
        first = expected_seeds(law, settings, seeds, num_train=num_train, links=links)
        return expected_batch(law, settings, seeds, first)

    return draw
