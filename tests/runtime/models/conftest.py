"""Small graphs and batches made by hand, independent of the samplers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch

Csc = tuple[NDArray[np.int64], NDArray[np.int32]]


def random_csc(num_nodes: int, degree: int, seed: int, *, self_loops: bool = False) -> Csc:
    """A symmetric simple graph; every seventh node isolated."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, num_nodes, (2, num_nodes * degree // 2))
    keep = (a != b) & (a % 7 != 0) & (b % 7 != 0)
    a, b = a[keep], b[keep]
    pairs = np.unique(np.stack([np.r_[a, b], np.r_[b, a]], 1), axis=0)
    if self_loops:
        own = np.arange(0, num_nodes, 3)
        pairs = np.unique(np.r_[pairs, np.stack([own, own], 1)], axis=0)
    target, source = pairs[:, 0], pairs[:, 1]
    indptr = np.r_[0, np.cumsum(np.bincount(target, minlength=num_nodes))].astype(np.int64)
    return indptr, source.astype(np.int32)


def sample_by_hand(csc: Csc, seeds: list[int], fanouts: list[int], seed: int) -> MiniBatch:
    """A first_seen batch: each vertex expanded once, where it first appears; -1 takes all."""
    indptr, indices = csc
    rng = np.random.default_rng(seed)
    local = {v: i for i, v in enumerate(seeds)}
    rows: list[list[int]] = []
    new_nodes, new_edges, frontier = [len(seeds)], [], list(seeds)
    for fanout in fanouts:
        following: list[int] = []
        before = sum(map(len, rows))
        for v in frontier:
            neighbours = indices[indptr[v] : indptr[v + 1]]
            if 0 <= fanout < len(neighbours):
                neighbours = rng.choice(neighbours, fanout, replace=False)
            for u in map(int, neighbours):
                if u not in local:
                    local[u] = len(local)
                    following.append(u)
            rows.append([local[int(u)] for u in neighbours])
        new_nodes.append(len(following))
        new_edges.append(sum(map(len, rows)) - before)
        frontier = following
    starts = np.r_[0, np.cumsum([len(row) for row in rows])].astype(np.int64)
    flat = np.array([u for row in rows for u in row], np.int32)
    nodes = np.cumsum(new_nodes)
    blocks = [
        Block(
            num_src=int(nodes[hop + 1]),
            num_dst=int(nodes[hop]),
            indptr=starts[: nodes[hop] + 1],
            indices=flat[: starts[nodes[hop]]],
        )
        for hop in reversed(range(len(fanouts)))
    ]
    return MiniBatch(
        blocks=blocks,
        n_id=np.array(list(local), np.int64),
        seeds=np.array(seeds, np.int64),
        input_id=np.arange(len(seeds)),
        dialect=Dialect.FIRST_SEEN,
        num_sampled_nodes=new_nodes,
        num_sampled_edges=new_edges,
        global_num_seeds=len(seeds),
    )


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def make_csc() -> Callable[..., Csc]:
    return random_csc


@pytest.fixture
def make_batch() -> Callable[..., MiniBatch]:
    return sample_by_hand
