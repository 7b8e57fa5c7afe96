"""Batches that the model is timed on: blocks of given sizes with random ids, or drawn ones.

A sampler numbers vertices in the order in which it first meets them, so neighbouring edges of a
real block often name neighbouring rows. Synthetic blocks are made by the same process from the
sizes alone: of a hop's edges, some are first meetings and get the next free number, the others
name an earlier vertex at random.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.minibatch import Block, Dialect, MiniBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """Mean sizes of a batch, in JSON's types."""

    vertices: list[int]
    """Distinct vertices up to each hop, seeds first; length L + 1."""
    edges: list[int]
    """Edges drawn at each hop; length L."""
    dialect: str = Dialect.FIRST_SEEN.value
    num_links: int = 0
    """Links that are scored; 0: the seeds themselves are."""
    edge_types: list[float] = field(default_factory=list[float])
    """Share of each edge type; empty where edges have none."""
    node_types: list[float] = field(default_factory=list[float])
    """Share of each node type; empty where nodes have none."""
    weighted: bool = False
    """The sampler's edges have an estimator's weights, which layers then read."""

    def scaled(self, factor: float) -> "BatchShape":
        """All sizes times a factor, at least one seed."""
        return replace(
            self,
            vertices=[max(1, round(v * factor)) for v in self.vertices],
            edges=[max(0, round(e * factor)) for e in self.edges],
            num_links=max(1, round(self.num_links * factor)) if self.num_links else 0,
        )


def synthetic_batch(shape: BatchShape, seed: int) -> MiniBatch:
    """A batch of that shape; ids count from 0 and mean nothing.

    Args:
        shape: sizes per hop.
        seed: of the draws.

    Returns:
        Blocks outermost first, as a sampler of that dialect would leave them.
    """
    rng = np.random.default_rng(seed)
    first_seen = Dialect(shape.dialect) is Dialect.FIRST_SEEN
    hops = len(shape.edges)
    pieces: list[NDArray[np.int32]] = []
    lengths: list[NDArray[np.int64]] = []
    blocks: list[Block] = []
    for hop in range(hops):
        before, after = shape.vertices[hop], max(shape.vertices[hop : hop + 2])
        expanded = before
        if first_seen:
            expanded -= shape.vertices[hop - 1] if hop else 0
        indices = _meet(rng, before, after, shape.edges[hop])
        spread = _spread(shape.edges[hop], expanded)
        if first_seen:
            pieces.append(indices)
            lengths.append(spread)
            blocks.append(_block(after, before, np.concatenate(lengths), np.concatenate(pieces)))
        else:
            blocks.append(_block(after, before, spread, indices))
    blocks.reverse()
    _give_types(rng, shape, blocks)
    for block in blocks if shape.weighted else []:
        block.weight = rng.random(block.num_edges, dtype=np.float32)
    seeds = np.arange(shape.vertices[0], dtype=np.int64)
    return MiniBatch(
        blocks=blocks,
        n_id=np.arange(shape.vertices[-1], dtype=np.int64),
        seeds=seeds,
        input_id=seeds,
        dialect=Dialect(shape.dialect),
        num_sampled_nodes=np.diff(shape.vertices, prepend=0).tolist(),
        num_sampled_edges=list(shape.edges),
        global_num_seeds=shape.num_links or shape.vertices[0],
    )


def synthetic_links(shape: BatchShape, num_negatives: int, seed: int) -> NDArray[np.int64]:
    """Links between the seeds of such a batch: int64 [num_links, 2 + num_negatives]."""
    rng = np.random.default_rng([seed, 1])
    return rng.integers(0, shape.vertices[0], (shape.num_links, 2 + num_negatives))


def _meet(rng: np.random.Generator, before: int, after: int, num_edges: int) -> NDArray[np.int32]:
    """Sources of a hop's edges: new vertices in order of meeting, others at random."""
    new = min(after - before, num_edges)
    at = np.sort(rng.choice(num_edges, size=new, replace=False)) if new else np.zeros(0, np.int64)
    met = np.zeros(num_edges, np.int64)
    met[at] = 1
    known = before + np.cumsum(met) - met
    sources = (rng.random(num_edges) * np.maximum(known, 1)).astype(np.int64)
    sources[at] = before + np.arange(new)
    return sources.astype(np.int32)


def _spread(num_edges: int, destinations: int) -> NDArray[np.int64]:
    """Edges dealt evenly over destinations."""
    if destinations <= 0:
        return np.zeros(0, np.int64)
    ends = np.linspace(0, num_edges, destinations + 1).round().astype(np.int64)
    return np.diff(ends)


def _give_types(rng: np.random.Generator, shape: BatchShape, blocks: list[Block]) -> None:
    """Deal types to edges, and to the outermost block's sources, in their profiled shares."""
    types = len(shape.edge_types)
    for block in blocks if types else []:
        rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
        drawn = rng.choice(types, size=block.num_edges, p=_to_one(shape.edge_types))
        # Sources are random, so only how many of a row's edges have each type matters.
        counts = np.bincount(rows * types + drawn, minlength=block.num_dst * types)
        block.relation_ptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    if shape.node_types:
        of_source = rng.choice(
            len(shape.node_types), size=blocks[0].num_src, p=_to_one(shape.node_types)
        )
        blocks[0].src_type = of_source.astype(np.int32)


def _to_one(shares: list[float]) -> NDArray[np.float64]:
    """Shares that add up to 1 after having been written as text; equal ones where all are 0."""
    given = np.asarray(shares, dtype=np.float64)
    return given / given.sum() if given.sum() > 0 else np.full(len(given), 1 / len(given))


def _block(
    num_src: int, num_dst: int, lengths: NDArray[np.int64], indices: NDArray[np.int32]
) -> Block:
    indptr = np.zeros(num_dst + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    return Block(
        num_src=num_src,
        num_dst=num_dst,
        indptr=indptr,
        indices=np.ascontiguousarray(indices[: indptr[-1]]),
    )
