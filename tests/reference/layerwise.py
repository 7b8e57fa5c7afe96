"""The definition of layer-wise sampling: slow, obvious Python that the fast samplers must equal.

Formulas 4.2, 4.3 and 5.4. Candidates are listed in order of first appearance (FastGCN: by id), the
vertices drawn by id.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.choose.layerwise import PATIENCE, Law, Method, Norm
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.sampling.rng import Purpose, draw, mix, stream
from gnnplan.runtime.sampling.statistics import Estimator

Rows = list[list[tuple[int, int, float]]]
"""For each destination its edges: (position in indices, source, entry of A)."""


def uniform(stream: np.uint64, id: int, j: int) -> float:
    """A number in [0, 1)."""
    return (int(draw(stream, id, j)) >> 11) * 2.0**-53


def exponential(stream: np.uint64, id: int, j: int) -> float:
    """A number of the law Exp(1)."""
    return -math.log1p(-uniform(stream, id, j))


def probabilities(law: Law, rows: Rows, everything: Rows) -> dict[int, float]:
    """Of every candidate for the sources of these rows; `everything` is the whole graph."""
    total: dict[int, float] = {}
    power = 1 if law.norm is Norm.COUNT2 else 2
    for _, source, value in itertools.chain(
        *(everything if law.method is Method.FASTGCN else rows)
    ):
        total[source] = total.get(source, 0.0) + value**power
    if law.method is Method.FASTGCN:
        total = {v: total[v] for v in sorted(total) if total[v] > 0}
    if law.norm is Norm.COUNT2:
        total = {v: e**2 for v, e in total.items()}
    scale = 0.0
    for e in total.values():
        scale += e
    return {v: e / scale for v, e in total.items()} if scale > 0 else {}


def choose(law: Law, p: dict[int, float], size: int, source: np.uint64) -> dict[int, float]:
    """The vertices drawn, and for each 1 / pi (with replacement: hits / (size p))."""
    p = {v: value for v, value in p.items() if value > 0}
    if law.method is Method.PLADIES:
        return _poisson_hits(p, size, source) if law.replace else _poisson(p, size, source)
    if law.replace:
        hits = [_its(p, uniform(source, 0, 2 * dart)) for dart in range(size)] if p else []
        return {v: hits.count(v) / (size * p[v]) for v in hits}
    if len(p) <= size:
        return dict.fromkeys(p, 1.0)
    if law.uses_darts:
        now, times = _darts(p, size, source)
        source = np.uint64(mix(source))
    else:
        now, times = 0.0, {}
    if len(times) <= size:
        times |= {v: now + exponential(source, v, 0) / p[v] for v in p if v not in times}
    order = sorted(times, key=lambda v: (times[v], v))
    tau = times[order[size]]
    return {v: -1 / math.expm1(-p[v] * tau) for v in order[:size]}


def _its(p: dict[int, float], r: float) -> int:
    """The first vertex whose inclusive prefix sum exceeds r * total."""
    sums = list(itertools.accumulate(p.values()))
    goal = min(r * sums[-1], math.nextafter(sums[-1], -1.0))
    return next(v for v, c in zip(p, sums, strict=True) if c > goal)


def _darts(p: dict[int, float], size: int, source: np.uint64) -> tuple[float, dict[int, float]]:
    """When the last dart flew, and the first hit of each vertex: size + 1, if patience lasts."""
    times: dict[int, float] = {}
    now = 0.0
    for dart in range(PATIENCE * size + 64):
        now += exponential(source, 0, 2 * dart + 1)
        times.setdefault(_its(p, uniform(source, 0, 2 * dart)), now)
        if len(times) > size:
            break
    return now, times


def _poisson(p: dict[int, float], size: int, source: np.uint64) -> dict[int, float]:
    level = math.inf
    if size < len(p):
        # At level c the sum of min(1, c p) grows with c: bisect, then solve for the rest.
        low, high = 0.0, size / min(p.values())
        for _ in range(200):
            level = (low + high) / 2
            low, high = (
                (level, high) if sum(min(1, level * x) for x in p.values()) < size else (low, level)
            )
    inclusion = {v: 1.0 if level == math.inf else min(1.0, level * x) for v, x in p.items()}
    return {v: 1 / pi for v, pi in inclusion.items() if uniform(source, v, 0) < pi}


def _poisson_hits(p: dict[int, float], size: int, source: np.uint64) -> dict[int, float]:
    factor: dict[int, float] = {}
    for v, x in p.items():
        hits, now = 0, exponential(source, v, 0)
        while now < size * x:
            hits += 1
            now += exponential(source, v, hits)
        if hits:
            factor[v] = hits / (size * x)
    return factor


def sample_layerwise_reference(
    indptr: NDArray[np.int64],
    indices: NDArray[np.integer],
    sizes: Sequence[int],
    seeds: NDArray[np.int64],
    *,
    law: Law,
    edge_weight: NDArray[np.float32] | None = None,
    seed: int = 0,
    epoch: int = 0,
    step: int = 0,
) -> MiniBatch:
    """Sample one batch with edge ids; arguments as in `LayerwiseSampler`, seeds valid."""
    value = [1.0] * len(indices) if edge_weight is None else [float(w) for w in edge_weight]

    def rows_of(nodes: Sequence[int]) -> Rows:
        return [
            [(e, int(indices[e]), value[e]) for e in range(indptr[v], indptr[v + 1])] for v in nodes
        ]

    everything = rows_of(range(len(indptr) - 1))
    nodes = [int(node) for node in seeds]
    known, blocks = [len(nodes)], []
    for hop, size in enumerate(sizes):
        purpose = Purpose.DART if law.uses_darts else Purpose.VERTEX
        source = stream(seed, epoch, step, hop, purpose)
        rows = rows_of(nodes)
        factor = choose(law, probabilities(law, rows, everything), size, source)
        nodes = nodes + sorted(set(factor) - set(nodes))
        local = {node: i for i, node in enumerate(nodes)}
        blocks.append(_block(rows, factor, local, law.estimator))
        known.append(len(nodes))
    return MiniBatch(
        blocks=blocks[::-1],
        n_id=np.array(nodes, dtype=np.int64),
        seeds=seeds,
        input_id=np.arange(len(seeds), dtype=np.int64),
        dialect=Dialect.EVERY_HOP,
        num_sampled_nodes=[known[0], *(int(n) for n in np.diff(known))],
        num_sampled_edges=[block.num_edges for block in blocks],
        global_num_seeds=len(seeds),
        epoch=epoch,
        step=step,
    )


def _block(
    rows: Rows, factor: dict[int, float], local: dict[int, int], estimator: Estimator
) -> Block:
    """The edges to drawn vertices, weighted."""
    indptr, indices, e_id, weight = [0], [], [], []
    for row in rows:
        kept = [(e, v, value) for e, v, value in row if v in factor and value > 0]
        raw = [value * factor[v] for _, v, value in kept]
        hajek = estimator is Estimator.HAJEK
        total = sum(raw) if hajek else sum(value for _, _, value in row)
        e_id += [e for e, _, _ in kept]
        indices += [local[v] for _, v, _ in kept]
        weight += [x / total for x in raw]
        indptr.append(len(indices))
    plain = estimator is Estimator.PLAIN
    return Block(
        num_src=len(local),
        num_dst=len(rows),
        indptr=np.array(indptr, dtype=np.int64),
        indices=np.array(indices, dtype=np.int32),
        e_id=np.array(e_id, dtype=np.int64),
        weight=None if plain else np.array(weight, dtype=np.float32),
    )
