"""The definition of LABOR sampling: slow, obvious Python that the fast sampler must equal.

Per hop, every vertex t has one random word; r_t is the word over 2^64. A row s of degree d and
fan-out k < d draws its edge to t where r_t < pi_ts, or draws the k edges with the smallest
r_t / pi_ts, the first of the row among equals. A row of at most k edges of positive weight takes
them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.dependent import StreamPolicy
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.sampling.statistics import Estimator


@dataclass(kw_only=True)
class Row:
    """A vertex and the edges it may draw, those of positive weight."""

    node: int
    edges: list[int]
    targets: list[int]
    weights: list[float]
    scale: float = 0.0
    """c_s."""

    def taken_whole(self, fanout: int) -> bool:
        """Whether the fan-out covers all edges."""
        return fanout < 0 or len(self.edges) <= fanout


def solve_scale(p: list[float], weights: list[float], fanout: int) -> float:
    """Solve sum A^2 / min(1, c p) = a^2/k - a^2/d + sum A^2 for c: [C18] and [R12] by sorting."""
    d, total = len(p), sum(weights)
    if fanout < 0 or d <= fanout:
        return max((1.0 / one for one in p), default=0.0)
    target = total**2 / fanout - total**2 / d + sum(a * a for a in weights)
    pairs = sorted(zip(p, weights, strict=True), reverse=True)
    c = 0.0
    for m, (one, _) in enumerate(pairs):
        rest = sum(a * a / q for q, a in pairs[m:])
        c = rest / (target - sum(a * a for _, a in pairs[:m]))
        if c * one < 1:
            break
    return c


def solve(
    rows: list[Row], fanout: int, variant: int | str, known: set[int], tolerance: float
) -> tuple[dict[int, float] | None, list[float]]:
    """Set every row's scale; return p_t (None: p_ts is the weight) and E[new vertices] by pass."""
    pi: dict[int, float] | None = None
    for row in rows:
        row.scale = solve_scale(row.weights, row.weights, fanout)
    history = [_expected(rows, pi, known)]
    while variant == "star" or len(history) <= int(variant):
        pi = {t: value * (pi or {}).get(t, 1.0) for t, value in _highest(rows, pi).items()}
        for row in rows:
            row.scale = solve_scale([pi[t] for t in row.targets], row.weights, fanout)
        history.append(_expected(rows, pi, known))
        gain = history[-2] - history[-1]
        if variant == "star" and gain <= tolerance * history[-2]:
            break
    return pi, history


def _highest(rows: list[Row], pi: dict[int, float] | None) -> dict[int, float]:
    """max_s c_s of every candidate, or max_s c_s A_ts before the first pass."""
    top: dict[int, float] = {}
    for row in rows:
        for t, weight in zip(row.targets, row.weights, strict=True):
            value = row.scale * (weight if pi is None else 1.0)
            top[t] = max(top.get(t, 0.0), value)
    return top


def _expected(rows: list[Row], pi: dict[int, float] | None, known: set[int]) -> float:
    top = _highest(rows, pi)
    new = [min(1.0, top[t] * (1.0 if pi is None else pi[t])) for t in top if t not in known]
    return sum(new, 0.0)


def draw_row(
    row: Row, words: dict[int, int], pi: dict[int, float] | None, fanout: int, form: str
) -> tuple[list[int], list[float]]:
    """Which edges of the row are drawn (as places in it), and pi_ts of each."""
    d = len(row.edges)
    if row.taken_whole(fanout):
        return list(range(d)), [1.0] * d
    uniform = pi is None and len(set(row.weights)) == 1 and row.weights[0] == 1.0
    if uniform:
        chances = [fanout / d] * d
        keys: list[float] = [words[t] for t in row.targets]
        below = [words[t] < (fanout << 64) // d for t in row.targets]
    else:
        p = row.weights if pi is None else [pi[t] for t in row.targets]
        chances = [min(1.0, row.scale * one) for one in p]
        numbers = [(words[t] >> 11) * 2.0**-53 for t in row.targets]
        keys = [r / chance for r, chance in zip(numbers, chances, strict=True)]
        below = [r < chance for r, chance in zip(numbers, chances, strict=True)]
    if form == "exact_k":
        places = sorted(sorted(range(d), key=lambda i: (keys[i], i))[:fanout])
    else:
        places = [i for i in range(d) if below[i]]
    return places, [chances[i] for i in places]


def weigh(row: Row, places: list[int], chances: list[float], estimator: Estimator) -> list[float]:
    """The block's weights of the drawn edges."""
    values = [row.weights[i] / chance for i, chance in zip(places, chances, strict=True)]
    total = sum(row.weights) if estimator is Estimator.HORVITZ_THOMPSON else sum(values)
    return [value / total for value in values]


def sample_labor_reference(
    indptr: NDArray[np.int64],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seeds: NDArray[np.int64],
    *,
    streams: StreamPolicy,
    epoch: int,
    step: int,
    variant: int | str = 0,
    form: str = "poisson",
    estimator: Estimator = Estimator.HAJEK,
    dialect: Dialect = Dialect.EVERY_HOP,
    edge_weight: NDArray[np.floating] | None = None,
    tolerance: float = 1e-4,
) -> MiniBatch:
    """Sample one batch with edge ids; arguments as in `LaborSampler`, seeds valid."""
    source = streams.streams(epoch, step, len(fanouts))
    all_words = [source.words(hop, np.arange(len(indptr) - 1)) for hop in range(len(fanouts))]
    weight = np.ones(len(indices)) if edge_weight is None else edge_weight
    nodes = [int(node) for node in seeds]
    ends, first = [len(nodes)], 0
    hops: list[list[tuple[list[int], list[float]]]] = []
    for hop, fanout in enumerate(fanouts):
        rows = [_row(node, indptr, indices, weight) for node in nodes[first:]]
        pi = None
        if edge_weight is not None or variant != 0:
            pi, _ = solve(rows, fanout, variant, set(nodes), tolerance)
        words = dict(enumerate(all_words[hop].tolist()))
        drawn = []
        for row in rows:
            places, chances = draw_row(row, words, pi, fanout, form)
            weights = weigh(row, places, chances, estimator)
            drawn.append(([row.edges[i] for i in places], weights))
        hops.append(drawn)
        first = ends[-1] if dialect is Dialect.FIRST_SEEN else 0
        known = set(nodes)
        for neighbor in (int(indices[edge]) for edges, _ in drawn for edge in edges):
            if neighbor not in known:
                known.add(neighbor)
                nodes.append(neighbor)
        ends.append(len(nodes))
    local = {node: i for i, node in enumerate(nodes)}
    blocks = []
    for hop in range(len(fanouts)):
        inner = 0 if dialect is Dialect.FIRST_SEEN else hop
        nested = [row for rows in hops[inner : hop + 1] for row in rows]
        weighted = estimator is not Estimator.PLAIN
        blocks.append(_block(nested, indices, local, ends[hop + 1], weighted=weighted))
    return MiniBatch(
        blocks=blocks[::-1],
        n_id=np.array(nodes, dtype=np.int64),
        seeds=seeds,
        input_id=np.arange(len(seeds), dtype=np.int64),
        dialect=dialect,
        num_sampled_nodes=[ends[0], *(int(n) for n in np.diff(ends))],
        num_sampled_edges=[sum(len(edges) for edges, _ in rows) for rows in hops],
        global_num_seeds=len(seeds),
        epoch=epoch,
        step=step,
    )


def _row(
    node: int, indptr: NDArray[np.int64], indices: NDArray[np.integer], weight: NDArray
) -> Row:
    edges = [e for e in range(int(indptr[node]), int(indptr[node + 1])) if weight[e] > 0]
    return Row(
        node=node,
        edges=edges,
        targets=[int(indices[e]) for e in edges],
        weights=[float(weight[e]) for e in edges],
    )


def _block(
    rows: list[tuple[list[int], list[float]]],
    indices: NDArray[np.integer],
    local: dict[int, int],
    num_src: int,
    *,
    weighted: bool,
) -> Block:
    """One CSR from the drawn edges and weights of every destination."""
    edges = [edge for row, _ in rows for edge in row]
    indptr = np.zeros(len(rows) + 1, dtype=np.int64)
    indptr[1:] = np.cumsum([len(row) for row, _ in rows])
    weights = np.array([w for _, row in rows for w in row], dtype=np.float32)
    return Block(
        num_src=num_src,
        num_dst=len(rows),
        indptr=indptr,
        indices=np.array([local[int(indices[edge])] for edge in edges], dtype=np.int32),
        e_id=np.array(edges, dtype=np.int64),
        weight=weights if weighted else None,
    )
