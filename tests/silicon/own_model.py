"""A PyG model of a user's own, replayed over the padded batches of `PlannedLoader`.

The same batches train it kernel by kernel first: losses must agree, and seconds stand beside. A
thread makes batches ahead, and the graph is captured as runtime/HOWTO_capture_your_model.md has it.
"""

import time
from contextlib import closing
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn.models import GraphSAGE

from gnnplan.runtime.loader.loader import PlannedLoader
from tests.silicon.bars import open_bars
from tests.silicon.graphs import open_kind
from tests.silicon.setting import Setting
from tests.silicon.training import worst_apart, write_plan

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
    """Hold losses of a replayed model against those of its kernels one by one; seconds of both."""
    steps = 3 if setting.emulated else WARM_STEPS + COUNTED_STEPS
    with open_bars(setting) as (bars, folder):
        graph = open_kind(setting, "nodes", folder)
        work = write_plan(setting, graph, folder / "plan", sample_threads=1).workload
        loader = PlannedLoader(
            folder / "plan", graph, device=setting.device, on_device=True, blocks=False, padded=True
        )
        steps = min(steps, len(loader))
        with closing(loader):
            plain, seconds = _train(setting, loader, steps, work.hidden, replays=False)
            again, replayed = _train(
                setting, loader, steps, work.hidden, replays=not setting.emulated
            )
        bars.hold(
            "own_model_replayed", replayed, "s", baseline="its kernels one by one",
            baseline_seconds=seconds, ratio=replayed / seconds, overflows=loader.overflowed,
        )  # fmt: skip
        apart = worst_apart(again, plain)
        bars.hold("own_model_replayed_apart", apart, "relative", most=TOLERANCE)


def _train(
    setting: Setting, loader: PlannedLoader, steps: int, hidden: int, *, replays: bool
) -> tuple[list[float], float]:
    """Losses of the first steps, and the seconds of one, its batch included, once all is warm."""
    torch.manual_seed(0)
    drawn: Any = iter(loader)
    with closing(drawn) as batches:
        first = next(batch for batch in batches if batch.padded)
    loader.set_epoch(0)
    layers, classes = len(first.num_sampled_edges), loader.graph.num_classes
    model = GraphSAGE(first.x.shape[1], hidden, num_layers=layers, out_channels=classes)
    model = model.to(setting.device)
    padded: Any = Seeds(model, first)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if replays:
        padded = torch.cuda.make_graphed_callables(padded, (first.x, first.edge_index))
    counted = max(1, steps * COUNTED_STEPS // (WARM_STEPS + COUNTED_STEPS))
    losses, start = list[torch.Tensor](), 0.0
    for number, batch in enumerate(loader.batches(steps)):
        if number == steps - counted:
            setting.wait()
            start = time.perf_counter()
        forward = padded if batch.padded else Seeds(model, batch)
        loss = cross_entropy(forward(batch.x, batch.edge_index), batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    setting.wait()
    seconds = (time.perf_counter() - start) / counted
    return [float(loss) for loss in losses], seconds
