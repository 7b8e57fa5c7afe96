"""One training epoch on the device, against the same model fed by PyG from the host's cores.

GraphSAGE of 3 layers, R-MAT with features. Ours: the loader's stages on the device, topology and
rows in its memory. PyG: SAGEConv with trim_to_layer on the device, batches from NeighborLoader
where pyg-lib imports; elsewhere from PyG's NodeLoader with our CPU sampler in as many workers, and
the line says so. Both take the same batch size; an epoch longer than the steps allowed is scaled.
"""

import dataclasses
import importlib
import importlib.util
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gnnplan.runtime.graph.dataset import Graph
from tests.benchmarks.common import bench_seeds, record
from tests.benchmarks.gpu_setup import Bench, with_bar

BAR = 5.0
PYG_SECONDS = 60.0
"""Most that PyG's steps may take."""


class Utilisation:
    """Share of the time in which the device ran a kernel, as the driver samples it."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Utilisation":
        self._thread.start()
        self._ready.wait()  # loading the driver's library holds up every other thread
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        nvml = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByIndex(0)
            nvml.nvmlDeviceGetUtilizationRates(handle)
            self._ready.set()
            while not self._stop.wait(0.1):
                self._seen.append(int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        except nvml.NVMLError as error:
            print(f"utilisation unknown: {error}", file=sys.stderr)
        finally:
            self._ready.set()

    @property
    def share(self) -> float | None:
        """The mean of what was seen; None: unknown."""
        return float(np.mean(self._seen)) / 100 if self._seen else None


class PygSage(nn.Module):
    """What a PyG user writes, with the layers trimmed to what they need."""

    def __init__(self, in_dim: int, hidden: int, num_classes: int, num_layers: int) -> None:
        super().__init__()
        from torch_geometric.nn import SAGEConv

        widths = [in_dim, *[hidden] * (num_layers - 1), num_classes]
        self.convs = nn.ModuleList(SAGEConv(widths[i], widths[i + 1]) for i in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor, nodes: Any, edges: Any) -> Tensor:
        from torch_geometric.utils import trim_to_layer

        for layer, conv in enumerate(self.convs):
            x, edge_index, _ = trim_to_layer(layer, nodes, edges, x, edge_index)
            x = conv(x, edge_index)
            x = x.relu() if layer < len(self.convs) - 1 else x
        return x


def measure_epoch(bench: Bench) -> None:
    """Seconds of an epoch, ours and PyG's."""
    if not bench.allows("epoch", 90):
        return
    graph = bench.graph()
    graph = dataclasses.replace(graph, train_idx=bench_seeds(graph))
    with tempfile.TemporaryDirectory() as folder:
        ours, stages, used, steps = _ours(bench, graph, Path(folder))
    theirs, feeder, their_steps = time_pyg(bench, graph)
    num_steps = -(-len(graph.train_idx) // bench.sizes.batch)
    extra: dict[str, Any] = {
        "steps": num_steps, "steps_measured": steps, "baseline_steps_measured": their_steps,
        "baseline_seconds": theirs * num_steps, "stages": stages, "utilisation": used,
    }  # fmt: skip
    ratio = theirs / ours
    record(
        "epoch_sage", ours * num_steps, "s", baseline=feeder, ratio=ratio, **extra,
        **with_bar(ratio, BAR),
    )  # fmt: skip


def _ours(
    bench: Bench, graph: Graph, folder: Path
) -> tuple[float, dict[str, float], float | None, int]:
    """Seconds per step, medians of the stages, utilisation, and the steps taken."""
    from gnnplan.runtime.comm.collectives import Communicator
    from gnnplan.runtime.loader.loader import PlannedLoader
    from gnnplan.runtime.models.build import build_model
    from gnnplan.runtime.plan.schema import TopologyPlacement
    from gnnplan.runtime.train.gradients import GradientBuffer
    from gnnplan.runtime.train.minibatch import TrainLoop, make_optimizer
    from tests.support.plans import make_plan

    sizes, device = bench.sizes, bench.device
    make_plan(
        graph, folder / "plan", hidden=sizes.hidden, fanouts=list(sizes.fanouts),
        batch_size=sizes.batch, own_rows=graph.num_nodes, sample_threads=1, prefetch_depth=3,
        capture=1, topology=TopologyPlacement(policy="replicated"),
    )  # fmt: skip
    loader = PlannedLoader(folder / "plan", graph, device=device, on_device=True)
    model = build_model(
        loader.plan.workload, graph.feature_dim, graph.num_classes, str(graph.task)
    ).to(device)
    loop = TrainLoop(
        model=model,
        optimizer=make_optimizer(model, learning_rate=3e-3, weight_decay=0.0),
        gradients=GradientBuffer(model),
        comm=Communicator(),
        meter=loader.meter,
        task=str(graph.task),
        seed=0,
    )
    warm = sizes.warm_steps
    loop.run(loader.batches(warm), 0, lambda loss: None)
    steps = min(sizes.epoch_steps, len(loader) - warm)
    bench.wait()
    with Utilisation() as used:
        start = time.perf_counter()
        loop.run(loader.batches(steps), warm, lambda loss: None)
        bench.wait()
        seconds = (time.perf_counter() - start) / steps
    stages = {str(k): s.median for k, s in loader.meter.stages(skip_steps=warm).items()}
    loader.close()
    return seconds, stages, used.share, steps


def time_pyg(bench: Bench, graph: Graph) -> tuple[float, str, int]:
    """Return seconds per step of PyG, what fed the model, and the steps taken."""
    sizes, device = bench.sizes, bench.device
    torch.manual_seed(0)
    model = PygSage(graph.feature_dim, sizes.hidden, graph.num_classes, len(sizes.fanouts))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader, feeder = _pyg_loader(bench, graph)
    taken: list[float] = []
    deadline = time.monotonic() + min(PYG_SECONDS, max(bench.left() / 2, 1.0))
    batches: Iterator[Any] = iter(loader)
    for number in range(sizes.warm_steps + sizes.epoch_steps):
        start = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        batch = batch.to(device, non_blocking=True)
        optimizer.zero_grad()
        logits = model(batch.x, batch.edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)[
            : batch.batch_size
        ]
        loss = nn.functional.cross_entropy(logits, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        loss.item()  # ours hands its loss out every step too
        if number >= sizes.warm_steps:
            taken.append(time.perf_counter() - start)
        if time.monotonic() > deadline and taken:
            break
    return sum(taken) / len(taken), feeder, len(taken)


def _pyg_loader(bench: Bench, graph: Graph) -> tuple[Any, str]:
    from torch_geometric.data import Data

    sizes = bench.sizes
    rows = torch.repeat_interleave(torch.from_numpy(np.diff(graph.indptr)))
    sources = torch.from_numpy(np.array(graph.indices)).to(torch.int64)
    data = Data(
        x=torch.from_numpy(np.array(graph.x)),
        y=torch.from_numpy(np.array(graph.y)).to(torch.int64),
        edge_index=torch.stack([sources, rows]),
    )
    common: dict[str, Any] = {
        "input_nodes": torch.from_numpy(np.array(graph.train_idx)), "batch_size": sizes.batch,
        "shuffle": True, "num_workers": sizes.workers, "pin_memory": bench.device.type == "cuda",
        "persistent_workers": sizes.workers > 0,
    }  # fmt: skip
    if importlib.util.find_spec("pyg_lib") is not None:
        from torch_geometric.loader import NeighborLoader

        feeder = f"PyG NeighborLoader (pyg-lib), {sizes.workers} workers"
        return NeighborLoader(data, list(sizes.fanouts), **common), feeder
    from torch_geometric.loader import NodeLoader

    from gnnplan.runtime.sampling.neighbor import NeighborSampler
    from gnnplan.runtime.sampling.pyg_sampler import PygSampler

    sampler = NeighborSampler(graph.indptr, graph.indices, sizes.fanouts, edge_ids=True)
    # The data lists its edges in the order of the sampler's graph.
    ours = PygSampler(sampler, num_nodes=graph.num_nodes)
    feeder = f"PyG NodeLoader with our CPU sampler, {sizes.workers} workers (no pyg-lib here)"
    return NodeLoader(data, ours, **common), feeder
