"""Small graphs, a reference in PyG's own layers, and one training step over a partition."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.fullgraph.forward import FullGraphModel
from gnnplan.runtime.models.build import BlockModel, build_model
from gnnplan.runtime.plan.schema import FullGraph, Workload

B1_EDGES = [(0, 1), (1, 2), (2, 3), (3, 4), (1, 3), (0, 4)]
"""The graph of [B1] and [B2] (docs/formulas.md 3.1), undirected."""
B1_PARTS = [0, 0, 0, 1, 1]


_ONE_AT_A_TIME = threading.Lock()
"""Parameters are drawn from torch's one generator; ranks here may be threads."""


@dataclass(frozen=True)
class Case:
    """A graph with inputs, labels and the nodes to train on."""

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    x: Tensor
    y: Tensor
    train: NDArray[np.int64]


def csc(num_nodes: int, edges: list[tuple[int, int]]) -> tuple[Any, Any]:
    """Both directions of undirected edges, by destination."""
    src = np.array([a for a, _ in edges] + [b for _, b in edges])
    dst = np.array([b for _, b in edges] + [a for a, _ in edges])
    order = np.lexsort((src, dst))
    indptr = np.concatenate(([0], np.cumsum(np.bincount(dst, minlength=num_nodes))))
    return indptr.astype(np.int64), src[order].astype(np.int32)


def random_case(
    num_nodes: int = 300, degree: int = 6, width: int = 7, seed: int = 0, *, loops: bool = True
) -> Case:
    """A directed random graph with self-loops, isolated nodes and a hub."""
    rng = np.random.default_rng(seed)
    src = rng.integers(0, num_nodes - 10, num_nodes * degree)
    dst = rng.integers(0, num_nodes - 10, num_nodes * degree)
    src[:40] = 3
    if loops:
        src[50:60] = dst[50:60]
    pairs = np.unique(np.stack([dst, src]), axis=1)
    if not loops:
        pairs = pairs[:, pairs[0] != pairs[1]]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(pairs[0], minlength=num_nodes))))
    generator = torch.Generator().manual_seed(seed)
    return Case(
        indptr=indptr.astype(np.int64),
        indices=pairs[1].astype(np.int32),
        x=torch.randn(num_nodes, width, generator=generator),
        y=torch.randint(0, 4, (num_nodes,), generator=generator),
        train=np.sort(rng.choice(num_nodes, num_nodes // 3, replace=False)).astype(np.int64),
    )


def new_model(name: str, in_dim: int, *, layers: int = 3, **workload: Any) -> BlockModel:
    """A model of four outputs, the same for the same arguments."""
    settings: dict[str, Any] = {"hidden": 8, "heads": 2, "seed": 1} | workload
    planned = Workload(model=name, num_layers=layers, fanouts=[-1] * layers, **settings)
    with _ONE_AT_A_TIME:
        made = build_model(planned, in_dim, 4, "multiclass")
    assert isinstance(made, BlockModel)
    return made


def pyg_loss(model: BlockModel, case: Case) -> Tensor:
    """The mean loss over training nodes by PyG's layers on the whole graph's edge_index."""
    degree = np.diff(case.indptr)
    dst = torch.from_numpy(np.repeat(np.arange(degree.shape[0]), degree))
    edge_index = torch.stack([torch.from_numpy(case.indices.astype(np.int64)), dst])
    h = case.x
    for number, conv in enumerate(model.convs):
        h = conv(h, edge_index)
        h = h.relu() if number < len(model.convs) - 1 else h
    rows = torch.from_numpy(case.train)
    return torch.nn.functional.cross_entropy(h[rows], case.y[rows])


def gradient_of(model: BlockModel) -> Tensor:
    """All gradients in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def full_graph_gradient(
    case: Case,
    name: str,
    partition: NDArray[np.int32],
    settings: FullGraph,
    comm: Communicator,
    *,
    epoch: int = 0,
    overlap: bool = False,
    **options: Any,
) -> tuple[float, Tensor, FullGraphModel]:
    """Loss and gradient summed over ranks, after one forward and backward; and the rank's model."""
    model = new_model(name, case.x.shape[1], **options)
    full = FullGraphModel(
        model, name, case.indptr, case.indices, partition, settings, comm=comm, overlap=overlap
    )
    try:
        x = case.x[torch.from_numpy(full.part.inner)]
        if settings.precompute_first_layer:
            full.precompute(x)
        logits = full.forward(x, full.layers(epoch))
        rows = torch.from_numpy(np.flatnonzero(np.isin(full.part.inner, case.train)))
        y = case.y[torch.from_numpy(full.part.inner)][rows]
        loss = torch.nn.functional.cross_entropy(logits[rows], y, reduction="sum")
        (loss / len(case.train)).backward()
    finally:
        full.close()
    flat = torch.cat([gradient_of(model), loss.detach().reshape(1) / len(case.train)])
    comm.all_reduce_sum(flat)
    return float(flat[-1]), flat[:-1], full
