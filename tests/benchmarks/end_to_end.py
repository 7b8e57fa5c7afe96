"""Seconds of a whole training epoch, ours and PyG's, on the same batches.

    python -m tests.benchmarks.end_to_end --json

R-MAT with 2^18 nodes and 7.8 million stored edges, 8% seeds, 100 float32 columns, 47 classes;
2-layer GraphSAGE of 256, fan-outs 15,10, batch 1024, Adam. Ours samples, gathers, trains and
updates; so do the baselines, with PyG's layers:

csr    SAGEConv on rectangular torch CSR blocks, rows by index_select;
plain  SAGEConv on the sampled edge_index, as an unmodified PyG script does.

PyG's sampler needs pyg-lib, which many machines have not. Where it imports, it is timed beside
ours; elsewhere its time is its recorded rate (8.7 million edges a second, one thread, R-MAT of 2^18
nodes, on a machine whose random-read limit was 171 million a second) scaled by this machine's limit
in the same run: the line then says `sampling: scaled`.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from gnnplan.runtime.comm.mesh import open_mesh
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.models.planned import planned
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.process import pin_to, usable_core_ids
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.worker import make_loop
from tests.benchmarks.common import (
    REPEATS,
    RandomReadLimit,
    Spread,
    bench_graph,
    bench_seeds,
    record,
    steady,
)
from tests.support.plans import make_plan

RECORDED_EDGES_PER_SECOND = 8.7e6
"""pyg-lib 0.9, int64, one thread, relabelling included."""
RECORDED_READ_LIMIT = 171e6
PLAIN_STEPS = 3
FANOUTS = [15, 10]
HIDDEN = 256


class Sage(nn.Module):
    """What a PyG user writes: two SAGEConv with a rectifier between."""

    def __init__(self, in_dim: int, num_classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(in_dim, HIDDEN), SAGEConv(HIDDEN, num_classes)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index).relu()
        return self.convs[1](x, edge_index)

    def on_blocks(self, x: Tensor, batch: MiniBatch) -> Tensor:
        """The same layers on rectangular CSR blocks, the fastest form PyG has on a CPU."""
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            size = (block.num_dst, block.num_src)
            values = torch.ones(block.num_edges)
            indptr = torch.from_numpy(block.indptr[: block.num_dst + 1].astype(np.int32))
            indices = torch.from_numpy(block.indices)
            adjacency = torch.sparse_csr_tensor(
                indptr, indices, values, size, check_invariants=False
            )
            x = conv((x, x[: block.num_dst]), adjacency)
            x = x.relu() if layer == 0 else x
        return x


class Ours:
    """Our loader and loop, with our built model or with a user's own under `planned`."""

    def __init__(self, graph: Graph, folder: Path, threads: int, *, own_model: bool) -> None:
        name = f"{threads}-{own_model}"
        make_plan(
            graph,
            folder / name,
            hidden=HIDDEN,
            fanouts=FANOUTS,
            batch_size=1024,
            sample_threads=threads,
        )
        plan = load_plan(folder / name)
        self.own_model = own_model
        self.loader = PlannedLoader(folder / name, graph)
        self.loop = make_loop(plan, graph, open_mesh(plan), self.loader)
        self.model = planned(Sage(graph.feature_dim, graph.num_classes))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def epoch(self) -> float:
        """Seconds of the next epoch."""
        start = time.perf_counter()
        if self.own_model:
            for batch in self.loader:
                update(self.optimizer, self.model(batch), batch.y)
        else:
            self.loop.run(self.loader.batches(), self.loader.handed_out, lambda loss: None)
        return time.perf_counter() - start


def update(optimizer: torch.optim.Optimizer, logits: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits, y).backward()
    optimizer.step()


class PyG:
    """PyG's layers fed with batches drawn beforehand; sampling is added as `sampling_seconds`."""

    def __init__(self, graph: Graph, loader: PlannedLoader) -> None:
        torch.manual_seed(0)
        self.graph = graph
        self.model = Sage(graph.feature_dim, graph.num_classes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.x = torch.from_numpy(np.array(graph.x))
        self.batches = list(loader)
        self.num_edges = sum(batch.num_edges for batch in self.batches)

    def csr_epoch(self) -> tuple[float, float]:
        """(seconds of gathering rows, seconds of the steps) over an epoch."""
        gather = step = 0.0
        for batch in self.batches:
            start = time.perf_counter()
            x = torch.index_select(self.x, 0, torch.from_numpy(batch.n_id))
            middle = time.perf_counter()
            update(self.optimizer, self.model.on_blocks(x, batch), batch.y)
            gather += middle - start
            step += time.perf_counter() - middle
        return gather, step

    def plain_step(self, batch: MiniBatch) -> float:
        """Seconds of one gather and step on the sampled edge_index."""
        outer = batch.blocks[0]
        rows = np.repeat(np.arange(outer.num_dst), np.diff(outer.indptr))
        edge_index = torch.from_numpy(np.stack([outer.indices.astype(np.int64), rows]))
        start = time.perf_counter()
        x = torch.index_select(self.x, 0, torch.from_numpy(batch.n_id))
        logits = self.model(x, edge_index)[: batch.num_seeds]
        update(self.optimizer, logits, batch.y)
        return time.perf_counter() - start


def pyg_sampler(graph: Graph, seeds: list[np.ndarray]) -> Callable[[], float] | None:
    """Seconds of sampling an epoch with pyg-lib itself; None where it cannot be imported."""
    if importlib.util.find_spec("pyg_lib") is None:
        return None
    pyg_lib = importlib.import_module("pyg_lib")

    indptr, indices = (torch.from_numpy(np.array(a)).long() for a in (graph.indptr, graph.indices))
    shares = [torch.from_numpy(share) for share in seeds]

    def sample() -> float:
        start = time.perf_counter()
        for share in shares:
            pyg_lib.sampler.neighbor_sample(indptr, indices, share, FANOUTS, csc=True)
        return time.perf_counter() - start

    return sample


def compare(graph: Graph, folder: Path, threads: int, repeats: int) -> None:
    """One record each for our model and an unmodified one, against both baselines."""
    cores = usable_core_ids()[: 1 + threads]
    pin_to(cores)
    mine = Ours(graph, folder, threads, own_model=False)
    theirs = Ours(graph, folder, threads, own_model=True)
    drawn = Ours(graph, folder, 0, own_model=False)
    pyg = PyG(graph, drawn.loader)
    sampler = pyg_sampler(graph, [batch.seeds for batch in pyg.batches])
    limit = RandomReadLimit(graph.num_edges)
    for warm in (mine.epoch, theirs.epoch, pyg.csr_epoch):
        warm()
    limits = [limit.measure()]
    built, unmodified, csr, csr_ahead, plain, sampling = [], [], [], [], [], []
    for repeat in range(repeats):
        built.append(mine.epoch())
        gather, step = pyg.csr_epoch()
        unmodified.append(theirs.epoch())
        one_plain = pyg.plain_step(pyg.batches[repeat % len(pyg.batches)])
        limits.append(limit.measure())
        rate = RECORDED_EDGES_PER_SECOND * limits[-1] / RECORDED_READ_LIMIT
        sampling.append(sampler() if sampler else pyg.num_edges / rate)
        csr.append(sampling[-1] + gather + step)
        csr_ahead.append(max(sampling[-1] + gather, step))
        plain.append(sampling[-1] + one_plain * len(pyg.batches))
    facts = {
        "cores": len(cores),
        "prefetch_threads": threads,
        "steps": len(pyg.batches),
        "sampling": "measured" if sampler else "scaled",
        "sampling_seconds": float(np.median(sampling)),
        "read_limit": float(np.median(limits)),
        "steady": steady(min(limits), max(limits)),
        "stages": {k: s.median for k, s in mine.loader.meter.stages(skip_steps=30).items()},
    }
    suffix = "one core" if threads == 0 else "one compute and one prefetch thread"
    for name, ours in (("our model", built), ("unmodified model, planned(model)", unmodified)):
        versus(f"epoch, {name}, {suffix}", ours, "csr", csr, facts)
        if threads:
            versus(f"epoch, {name}, {suffix}", ours, "csr, prefetched too", csr_ahead, facts)
        versus(f"epoch, {name}, {suffix}", ours, "plain", plain, facts)
    for each in (mine, theirs, drawn):
        each.loader.close()
    pin_to(usable_core_ids())


def versus(
    name: str, ours: list[float], baseline: str, seconds: list[float], facts: dict[str, Any]
) -> None:
    """Print a record with the median of the ratios of neighbouring runs."""
    ratios = Spread.of([b / a for a, b in zip(ours, seconds, strict=True)])
    record(
        name,
        Spread.of(ours),
        "s",
        baseline=f"PyG {baseline}, sampling {facts['sampling']}",
        ratio=ratios.median,
        ratio_p10=ratios.p10,
        ratio_p90=ratios.p90,
        baseline_seconds=float(np.median(seconds)),
        **facts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always)")
    parser.add_argument("--graph", default="rmat-18")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--threads", default="0,1", help="prefetch threads, comma-separated")
    parser.add_argument(
        "--clock",
        choices=("elapsed", "cpu"),
        default="elapsed",
        help="cpu counts processor seconds: for a busy machine, and one core only",
    )
    options = parser.parse_args()
    graph = bench_graph(options.graph, feature_dim=100)
    graph = dataclasses.replace(graph, train_idx=bench_seeds(graph))
    cores = usable_core_ids()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    if options.clock == "cpu":
        time.perf_counter = time.process_time
    with tempfile.TemporaryDirectory() as folder:
        for threads in map(int, options.threads.split(",")):
            compare(graph, Path(folder), threads, options.repeats)
            pin_to(cores)


if __name__ == "__main__":
    main()
