"""Batches that the model is timed on: blocks of given sizes with random ids, or drawn ones.

A sampler numbers vertices in the order in which it first meets them, so neighbouring edges of a
real block often name neighbouring rows. Synthetic blocks are made likewise: of a hop's edges, some
are first meetings and get the next free number, the others name an earlier vertex at random.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.profile.protocol import BatchShape, TimingRequest
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch


def synthetic_batch(shape: BatchShape, seed: int) -> MiniBatch:
    """Make a batch of that shape, whose ids count from 0, as a sampler would leave it."""
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
    """Draw links between the seeds of a batch: int64 [num_links, 2 + num_negatives]."""
    rng = np.random.default_rng([seed, 1])
    return rng.integers(0, shape.vertices[0], (shape.num_links, 2 + num_negatives))


def _meet(rng: np.random.Generator, before: int, after: int, num_edges: int) -> NDArray[np.int32]:
    """Return the sources of a hop's edges: new vertices in order of meeting, others at random."""
    new = min(after - before, num_edges)
    at = np.sort(rng.choice(num_edges, size=new, replace=False)) if new else np.zeros(0, np.int64)
    met = np.zeros(num_edges, np.int64)
    met[at] = 1
    known = before + np.cumsum(met) - met
    sources = (rng.random(num_edges) * np.maximum(known, 1)).astype(np.int64)
    sources[at] = before + np.arange(new)
    return sources.astype(np.int32)


def _spread(num_edges: int, destinations: int) -> NDArray[np.int64]:
    """Return edge counts per destination, as equal as can be."""
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
    """Return shares that add up to 1, despite rounding; equal ones where all are 0."""
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


def timed_batch(request: TimingRequest, scale: float, seed: int) -> MiniBatch:
    """Make a synthetic batch with features, labels and the model's edge weights."""
    import torch

    from gnnplan.runtime.models.weights import fill_weights

    batch = synthetic_batch(request.shape.scaled(scale), seed)
    fill_weights(batch, request.workload, some_degrees(batch))  # in place
    generator = torch.Generator().manual_seed(seed)
    batch.x = torch.randn(batch.n_id.shape[0], request.in_dim, generator=generator)
    if request.task == "link":
        shape, negatives = request.shape.scaled(scale), request.workload.links.num_negatives
        batch.y = torch.as_tensor(synthetic_links(shape, negatives, seed))
    else:
        batch.y = _some_labels(request, batch, generator)
    return batch


def drawn_batch(
    request: TimingRequest, batch: MiniBatch, out: NDArray[np.float32] | None, seed: int
) -> MiniBatch:
    """Make a drawn batch of nodes ready for a step, with edge weights, rows and some labels.

    `out` are the rows that a loader reads, float32 [rows, feature_dim]; None: it reads none.
    """
    import torch

    from gnnplan.runtime.models.weights import fill_weights

    fill_weights(batch, request.workload, some_degrees(batch))  # in place
    generator = torch.Generator().manual_seed(seed)
    size = batch.n_id.size
    rows = torch.randn(size, request.in_dim) if out is None else torch.as_tensor(out)
    if size > len(rows):
        rows = rows.repeat(-(-size // len(rows)), 1)
    return replace(batch, x=rows[:size], y=_some_labels(request, batch, generator))


def _some_labels(request: TimingRequest, batch: MiniBatch, generator: Any) -> Any:
    import torch

    if request.task == "multilabel":
        shape = (batch.num_seeds, request.num_classes)
        return torch.randint(0, 2, shape, generator=generator)
    classes = 2 if request.task == "binary" else request.num_classes
    return torch.randint(0, classes, (batch.num_seeds,), generator=generator)


def on_rows(batches: Sequence[MiniBatch], out: NDArray[np.float32]) -> list[MiniBatch]:
    """Put batches on rows `out` that a loader reads anew before each step (DEC-28)."""
    import torch

    rows = torch.as_tensor(out)
    return [replace(batch, x=rows[: batch.n_id.size]) for batch in batches]


def some_degrees(batch: MiniBatch) -> NDArray[np.int64]:
    """Return one degree for all vertices; its value does not change the work."""
    degrees: NDArray[np.int64] = np.full(int(batch.n_id.size), 16, dtype=np.int64)
    return degrees


def rehearse() -> bool:
    """Take a rank's step on a ring of a few nodes; return whether a kernel was compiled."""
    from numba.core import event

    compiling: Any = event  # numba has no types
    with compiling.install_recorder("numba:compile") as compiled:
        _train_a_step()
    return len(compiled.buffer) > 0


def _train_a_step() -> None:
    import torch

    from gnnplan.runtime.features.gather import gather_rows
    from gnnplan.runtime.models.adjacency import torch_blocks
    from gnnplan.runtime.models.build import build_model
    from gnnplan.runtime.models.weights import fill_weights
    from gnnplan.runtime.plan.schema import Workload
    from gnnplan.runtime.sampling.neighbor import NeighborSampler
    from gnnplan.runtime.train.minibatch import make_optimizer

    nodes, degree, width = 256, 4, 16
    work = Workload(num_layers=2, hidden=16, fanouts=[2, 2])
    neighbours = np.arange(nodes)[:, None] + np.arange(1, degree + 1)
    indptr = np.arange(0, nodes * degree + 1, degree, dtype=np.int64)
    indices = (neighbours % nodes).astype(np.int32).ravel()
    sampler = NeighborSampler(indptr, indices, work.fanouts)
    batch = fill_weights(sampler.sample(np.arange(32), epoch=0, step=0), work)
    x = np.empty((batch.n_id.shape[0], width), np.float32)
    gather_rows(np.zeros((nodes, width), np.float32), batch.n_id, x)
    model = build_model(work, width, 4, "multiclass")
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.0)
    model(torch.as_tensor(x), torch_blocks(batch)).sum().backward()
    optimizer.step()
