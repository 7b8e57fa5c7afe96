"""Forward and backward of one step, on one thread: `python -m tests.benchmarks.compute --json`.

2-layer GraphSAGE of hidden 256 on 100 features and 47 classes; synthetic first_seen batches of the
size that 1024 seeds with fan-outs 15, 10 give on the rmat-18 graph (about 13 thousand destinations,
62 thousand inputs, 120 thousand edges). Four ways, interleaved batch by batch in one process, each
on the same batches and parameters:

    plain     PyG's layers on all vertices and the flat edge_index
    csr       PyG's layers on rectangular torch CSR blocks, conv((x, x[:num_dst]), adjacency)
    planned   the unmodified PyG model under `planned`
    ours      `build_model`

Ratio: seconds of `csr` over those of the line. The allocator keeps freed memory for all four (as
the worker does) unless --default-allocator is given.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn.models import GraphSAGE

from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.models.planned import planned
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.process import keep_freed_memory
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from tests.benchmarks.common import Spread, record

SEEDS, FEATURES, CLASSES = 1024, 100, 47
WARMUP = 12
Step = Callable[[int], float]


def synthetic_batch(rng: np.random.Generator) -> MiniBatch:
    """A first_seen batch whose vertices all occur and whose sources are drawn at random."""
    inner, outer = rng.integers(4, 16, SEEDS), int(rng.integers(11_500, 12_500))
    degrees = np.r_[inner, rng.integers(7, 11, outer)]
    num_dst, num_src = SEEDS + outer, 62_000
    starts = np.r_[0, np.cumsum(degrees)].astype(np.int64)
    first, total = int(starts[SEEDS]), int(starts[-1])
    indices = rng.integers(0, num_src, total).astype(np.int32)
    indices[:first] = rng.integers(SEEDS, num_dst, first)
    blocks = [
        Block(num_src=num_src, num_dst=num_dst, indptr=starts, indices=indices),
        Block(num_src=num_dst, num_dst=SEEDS, indptr=starts[: SEEDS + 1], indices=indices[:first]),
    ]
    return MiniBatch(
        blocks=blocks,
        n_id=np.arange(num_src),
        seeds=np.arange(SEEDS),
        input_id=np.arange(SEEDS),
        dialect=Dialect.FIRST_SEEN,
        num_sampled_nodes=[SEEDS, outer, num_src - num_dst],
        num_sampled_edges=[first, total - first],
        x=torch.from_numpy(rng.standard_normal((num_src, FEATURES), np.float32)),
        y=torch.from_numpy(rng.integers(0, CLASSES, SEEDS)),
    )


def on_csr(model: GraphSAGE, batch: MiniBatch) -> Tensor:
    """PyG's layers on torch CSR blocks."""
    x = batch.x
    for layer, (conv, block) in enumerate(zip(model.convs, torch_blocks(batch), strict=True)):
        values = torch.ones(block.num_edges)
        size = (block.num_dst, block.num_src)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls its CSR layout a beta
            adjacency = torch.sparse_csr_tensor(block.indptr.int(), block.indices, values, size)
        x = conv((x, x[: block.num_dst]), adjacency)
        x = x.relu() if layer == 0 else x
    return x


def ways(batches: list[MiniBatch]) -> dict[str, Step]:
    """One step of each way, by name; all start from the same parameters."""
    ours = build_model(Workload(), FEATURES, CLASSES, "multiclass")

    def pyg() -> GraphSAGE:
        model = GraphSAGE(FEATURES, 256, 2, CLASSES)
        model.load_state_dict(ours.state_dict())
        return model

    plain, csr, unmodified = pyg(), pyg(), planned(pyg())
    edge_indices = [torch_blocks(batch)[0].edge_index() for batch in batches]

    def step(model: nn.Module, forward: Callable[[int], Tensor]) -> Step:
        def run(index: int) -> float:
            model.zero_grad()
            logits = forward(index)
            loss = loss_sum(logits[:SEEDS], batches[index].y, "multiclass") / SEEDS
            loss.backward()
            return float(loss.detach())

        return run

    return {
        "plain": step(plain, lambda i: plain(batches[i].x, edge_indices[i])),
        "csr": step(csr, lambda i: on_csr(csr, batches[i])),
        "planned": step(unmodified, lambda i: unmodified(batches[i])),
        "ours": step(ours, lambda i: ours(batches[i].x, torch_blocks(batches[i]))),
    }


def interleaved(
    steps: dict[str, Step], num_batches: int, repeats: int
) -> dict[str, tuple[Spread, float]]:
    """Elapsed seconds and median core-seconds of each way's step.

    The ways take turns; `plain` takes every fourth turn only.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    core_seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARMUP + repeats):
        for name, step in steps.items():
            if name == "plain" and turn % 4:
                continue
            start, core = time.perf_counter(), time.process_time()
            step(turn % num_batches)
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
                core_seconds[name].append(time.process_time() - core)
    return {
        name: (Spread.of(samples), statistics.median(core_seconds[name]))
        for name, samples in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON object per line (always so)")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--default-allocator", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keeps = not arguments.default_allocator and keep_freed_memory()
    rng = np.random.default_rng(0)
    batches = [synthetic_batch(rng) for _ in range(arguments.batches)]
    steps = ways(batches)
    losses = {name: step(0) for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"expected equal losses of all ways, found {losses}")
    found = interleaved(steps, arguments.batches, arguments.repeats)
    csr, csr_core = found["csr"][0].median, found["csr"][1]
    for name, (spread, core) in found.items():
        low, high = 1e3 * spread.p10, 1e3 * spread.p90
        each = Spread(1e3 * spread.median, low, high, spread.count)
        ratio = csr / spread.median
        extra = {"core_ms": 1e3 * core, "core_ratio": csr_core / core}
        extra |= {"threads": 1, "keeps_freed_memory": keeps, "load": os.getloadavg()[0]}
        record(f"compute/{name}", each, "ms/step", baseline="csr", ratio=ratio, **extra)


if __name__ == "__main__":
    main()
