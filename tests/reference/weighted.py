"""The definition of weighted neighbour sampling: slow, obvious Python the kernels must equal.

A row has d edges of weight w_j > 0 (weight 0 is never drawn and does not count), W = sum w_j, and
a fan-out of k. Word i of a node is u_i = draw(stream, node, i) as a number in [0, 1).

replacement   k independent draws, edge j with probability q_j = w_j / W, by inverse transform: the
              first edge whose running sum exceeds u_i W; where all rows are uniform,
              bounded(word i, d). HT weight 1 / (d k q_j) per draw (formulas 1.6).
without       k different edges, the first k arrivals of exponential times t_j = -ln(1 - u_j) / w_j.
              Edges come in the order of successive sampling: each next one is edge j with
              probability w_j over the weights left. Let T be the next arrival after the k. Given
              the times of all others, edge j is among the k with probability 1 - exp(-w_j T), and
              1 / (d (1 - exp(-w_j T))) is its HT weight: unbiased without knowing the inclusion
              probabilities (rank conditioning: Cohen and Kaplan, PODC 2007). d <= k takes all.
poisson       edge j where u_j < pi_j = min(1, c w_j), sum pi = k (formulas 5.4). HT weight
              1 / (d pi_j). d <= k takes all.

A fan-out of -1 takes all. HT weights estimate the mean over the d edges; Hajek weights are the same
over their sum in the row. No edge, no weight: the layer's aggregate is 0.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.rng import Purpose, bounded, draw, stream
from gnnplan.runtime.sampling.statistics import Draws, Estimator

Row = list[tuple[int, float]]
"""Offset and weight of each edge drawn."""
Law = Callable[[int, int, int], float]
"""Weight of an edge: of (hop, position in `indices`, source)."""


def _unit(word: NDArray[np.uint64]) -> float:
    return (int(word) >> 11) * 2.0**-53


def draw_row(
    source: np.uint64, node: int, law: Sequence[float], fanout: int, draws: Draws, uniform: bool
) -> Row:
    """One row's draws with their HT weights, 1 / (d pi_j).

    Args:
        source: Stream of the hop.
        node: Global id of the destination.
        law: Weight of each edge of the row.
        fanout: Edges to draw, or -1.
        draws: How.
        uniform: No row of the graph has weights (with replacement draws are made otherwise).
    """
    able = [j for j, w in enumerate(law) if w > 0]
    count = len(able)
    if fanout == -1 or count == 0 or (count <= fanout and draws is not Draws.REPLACEMENT):
        return [(j, 1 / count) for j in able]
    if draws is Draws.REPLACEMENT:
        return _independent(source, node, law, fanout, uniform)
    words = [_unit(draw(source, node, j)) for j in range(len(law))]
    if draws is Draws.WITHOUT_REPLACEMENT:
        times = {j: -math.log1p(-words[j]) / law[j] for j in able}
        after = sorted(able, key=lambda j: (times[j], j))[fanout]
        first = [j for j in able if (times[j], j) < (times[after], after)]
        return [(j, 1 / (-math.expm1(-law[j] * times[after]) * count)) for j in first]
    pi = poisson_probabilities(law, fanout)
    return [(j, 1 / (pi[j] * count)) for j in able if words[j] < pi[j]]


def _independent(
    source: np.uint64, node: int, law: Sequence[float], fanout: int, uniform: bool
) -> Row:
    words = [draw(source, node, i) for i in range(fanout)]
    if uniform:
        return [(int(bounded(word, len(law))), 1 / fanout) for word in words]
    sums = np.cumsum(np.asarray(law, dtype=np.float64))
    last = max(j for j, w in enumerate(law) if w > 0)
    count = sum(w > 0 for w in law)
    row: Row = []
    for word in words:
        j = min(int(np.searchsorted(sums, _unit(word) * sums[-1], side="right")), last)
        row.append((j, float(sums[-1]) / (count * fanout * law[j])))
    return row


def poisson_probabilities(law: Sequence[float], fanout: int) -> list[float]:
    """min(1, c w) with sum `fanout`, or all 1 where there are no more edges (weight 0: 0).

    With the m largest weights at 1 the others share fanout - m in proportion; m is the first with
    which none of the others exceeds 1.
    """
    order = sorted((w for w in law if w > 0), reverse=True)
    if len(order) <= fanout:
        return [1.0 if w > 0 else 0.0 for w in law]
    levels = [(fanout - m) / sum(order[m:]) for m in range(fanout)]
    level = next((c for m, c in enumerate(levels) if c * order[m] <= 1), levels[-1])
    return [min(1.0, level * w) for w in law]


def sample_weighted_reference(
    indptr: NDArray[np.int64],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seeds: NDArray[np.int64],
    *,
    law: Law | None,
    draws: Draws,
    estimator: Estimator,
    dialect: Dialect,
    seed: int,
    epoch: int,
    step: int,
) -> tuple[list[int], list[list[tuple[int, int, float]]]]:
    """One batch: ids in local order, and for each hop (destination, position, weight) per edge.

    `law` None is uniform; the weights of the plain estimator are those of Horvitz-Thompson.
    """
    nodes = [int(node) for node in seeds]
    known, hops, first = set(nodes), [], 0
    for hop, fanout in enumerate(fanouts):
        source = stream(seed, epoch, step, hop, Purpose.NEIGHBOR)
        edges: list[tuple[int, int, float]] = []
        expanded = nodes[first:]
        first = len(nodes) if dialect is Dialect.FIRST_SEEN else 0
        for node in expanded:
            places = range(int(indptr[node]), int(indptr[node + 1]))
            weights = [1.0 if law is None else law(hop, e, int(indices[e])) for e in places]
            row = draw_row(source, node, weights, fanout, draws, law is None)
            total = sum(w for _, w in row) if estimator is Estimator.HAJEK else 1.0
            edges += [(node, places[j], w / total) for j, w in row]
        for _, edge, _ in edges:
            neighbor = int(indices[edge])
            if neighbor not in known:
                known.add(neighbor)
                nodes.append(neighbor)
        hops.append(edges)
    return nodes, hops
