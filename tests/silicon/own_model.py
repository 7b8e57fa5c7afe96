"""A PyG model of a user's own, replayed over the padded batches of `PlannedLoader`.

The same batches train it kernel by kernel first: losses must agree, and seconds stand beside.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn.models import GraphSAGE

from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.plan.schema import TopologyPlacement
from tests.benchmarks.common import record
from tests.silicon.setting import Setting
from tests.silicon.step import BATCH, DIM, FANOUTS, HIDDEN, NODES
from tests.support.plans import make_plan

WARM_STEPS, COUNTED_STEPS = 10, 40
TOLERANCE = 1e-3
"""Largest difference of a loss, relative: sums over edges are taken in any order."""


class Seeds(torch.nn.Module):
    """A model's outputs of the seeds, from tensors alone."""

    def __init__(self, model: GraphSAGE, batch: Any) -> None:
        super().__init__()
        self.model, self.batch_size = model, batch.batch_size
        self.nodes, self.edges = batch.num_sampled_nodes, batch.num_sampled_edges

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        hops = {"num_sampled_nodes_per_hop": self.nodes, "num_sampled_edges_per_hop": self.edges}
        return self.model(x, edge_index, **hops)[: self.batch_size]


def replay_own_model(setting: Setting) -> None:
    """Losses of a replayed model are those of its kernels one by one; records seconds of both."""
    tiny = setting.emulated
    nodes, dim, hidden, batch = (400, 8, 8, 8) if tiny else (NODES, DIM, HIDDEN, BATCH)
    fanouts, steps = ([2, 2], 3) if tiny else (FANOUTS, WARM_STEPS + COUNTED_STEPS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = generate_rmat(
            folder / "graph", num_nodes=nodes, degree=20.0, feature_dim=dim, num_classes=47, seed=0
        )
        make_plan(
            graph, folder / "plan", hidden=hidden, fanouts=fanouts, batch_size=batch,
            own_rows=graph.num_nodes, topology=TopologyPlacement(policy="replicated"),
        )  # fmt: skip
        loader = PlannedLoader(
            folder / "plan", graph, device=setting.device, on_device=True, blocks=False, padded=True
        )
        batches = [batch for batch in loader.batches(steps) if batch.padded]
        overflowed = loader.overflowed
        loader.close()
    plain, seconds = _train(setting, batches, hidden, 47, replays=False)
    again, replayed = _train(setting, batches, hidden, 47, replays=not tiny)
    worst = max(abs(a / b - 1) for a, b in zip(again, plain, strict=True))
    record(
        "own_model_replayed", replayed, "s", baseline="its kernels one by one",
        baseline_seconds=seconds, ratio=replayed / seconds, overflows=overflowed, worst=worst,
    )  # fmt: skip
    assert worst < TOLERANCE, f"a loss differs by {worst:.1e} of itself"


def _train(
    setting: Setting, batches: list[Any], hidden: int, classes: int, *, replays: bool
) -> tuple[list[float], float]:
    """Losses of one step per batch, and the seconds of a step once all is warm."""
    torch.manual_seed(0)
    first = batches[0]
    layers = len(first.num_sampled_edges)
    model = GraphSAGE(first.x.shape[1], hidden, num_layers=layers, out_channels=classes)
    forward: Any = Seeds(model.to(setting.device), first)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if replays:
        inputs = (first.x.clone(), first.edge_index.clone())
        forward = torch.cuda.make_graphed_callables(forward, inputs)
    warm = len(batches) - max(1, len(batches) * COUNTED_STEPS // (WARM_STEPS + COUNTED_STEPS))
    losses, start = list[torch.Tensor](), 0.0
    for number, batch in enumerate(batches):
        if number == warm:
            setting.wait()
            start = time.perf_counter()
        loss = cross_entropy(forward(batch.x, batch.edge_index), batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    setting.wait()
    seconds = (time.perf_counter() - start) / (len(batches) - warm)
    return [float(loss) for loss in losses], seconds
