"""Seeds per second on a graph in the shape of papers100M, with rows on the GPU and on the host.

R-MAT of 20 million nodes with 29 stored entries each (as papers100M has, made symmetric) and 128
columns; GraphSAGE of 2 layers of 256, fan-outs 25 and 10, batches of 8,000. The graph is drawn on
the device, in seconds, and lives in this process alone.
"""

import statistics
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import GraphMeta
from gnnplan.runtime.plan.schema import StepShapes
from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from tests.benchmarks.common import record
from tests.silicon.bars import open_bars
from tests.silicon.captured import DRAWN, device_of, find_shapes, open_captured
from tests.silicon.setting import Setting
from tests.silicon.training import Sizes, seconds_of

NODES, ENTRIES, COLUMNS, CLASSES, SEEDS = 20_000_000, 580_000_000, 128, 172, 1_200_000
TINY = (300, 3_000, 8, 5, 80)
"""The same on cores."""
SIZES: Sizes = (8_000, 256, [25, 10])
WARM_STEPS, COUNTED_STEPS = 30, 90
LEAST_SEEDS_PER_SECOND = 1.2e6
PUBLISHED = 1.05e6
"""Seeds per second of one A100, as published."""
LEAST_SHARE = 0.9
"""Bar of rows read from the host, over the rate of copies from page-locked memory."""
GRAPH500 = (0.57, 0.19, 0.19)
CHUNK = 1 << 26
"""Edges, or numbers of rows, that are drawn at once."""
COPY_BYTES, COPIES = 1 << 28, 7


def feed_papers(setting: Setting) -> None:
    """Train with all rows on the GPU, then with all of them on the host."""
    with open_bars(setting) as (bars, folder):
        graph = draw_graph(setting, folder)
        record("papers_graph", float(graph.num_edges), "entries", nodes=graph.num_nodes)
        shapes = draw_shapes(setting, graph)
        with bars.attempt("papers_gpu_rows"):
            seeds, _ = _feed(setting, graph, folder / "own", shapes, rows_on_host=False)
            bars.hold(
                "papers_gpu_rows", seeds, "seeds/s", least=LEAST_SEEDS_PER_SECOND,
                baseline=PUBLISHED, ratio=seeds / PUBLISHED,
            )  # fmt: skip
        setting.release()
        with bars.attempt("papers_host_rows"):
            copied = pinned_copy_rate(setting)
            seeds, read = _feed(setting, graph, folder / "host", shapes, rows_on_host=True)
            bars.hold(
                "papers_host_rows", read, "B/s", least_ratio=LEAST_SHARE,
                baseline=copied, ratio=read / copied, seeds_per_second=seeds,
            )  # fmt: skip


def _feed(
    setting: Setting, graph: Graph, folder: Path, shapes: StepShapes, *, rows_on_host: bool
) -> tuple[float, float]:
    """Return seeds and bytes of rows from the host per second."""
    warm, counted = (2, 6) if setting.emulated else (WARM_STEPS, COUNTED_STEPS)
    with open_captured(
        setting, graph, folder, shapes=shapes, rows_on_host=rows_on_host, sizes=SIZES
    ) as training:
        loader = training.loader

        def host_bytes() -> int:
            return loader.meter.totals()[1].get("host", 0)

        training.run(warm)
        before = host_bytes()
        step = training.time(counted)
        read = (host_bytes() - before) / counted
        overflows = float(training.loop.overflowed)
    record("papers_step", step, "s", rows_on_host=rows_on_host, overflows=overflows)
    # Batches are whole: their size divides the seeds.
    return loader.batch_size / step, read / step


def draw_shapes(setting: Setting, graph: Graph) -> StepShapes:
    """Find a step's shapes by batches without rows, which would be copied for them alone."""
    batch, _, fanouts = (8, 8, [2, 2]) if setting.emulated else SIZES
    device = device_of(setting)
    topology = DeviceTopology.load(graph.indptr, graph.indices, device)
    sampler = DeviceNeighborSampler(topology, fanouts, device=device)
    steps = range(3 if setting.emulated else DRAWN)
    seeds = [graph.train_idx[step * batch : (step + 1) * batch] for step in steps]  # in any order
    drawn = [sampler.sample(seeds[step], epoch=0, step=step).to_host() for step in steps]
    return find_shapes(drawn, 1.0)


def pinned_copy_rate(setting: Setting) -> float:
    """Return bytes per second of copies from page-locked memory to the device."""
    size = 1 << 16 if setting.emulated else COPY_BYTES
    source = torch.empty(size, dtype=torch.uint8, pin_memory=not setting.emulated)
    target = torch.empty(size, dtype=torch.uint8, device=setting.device)
    taken = [
        seconds_of(setting, lambda: target.copy_(source, non_blocking=True))
        for _ in range(COPIES + 1)
    ]
    return size / statistics.median(taken[1:])


def draw_graph(setting: Setting, folder: Path) -> Graph:
    """Draw lists, rows, labels and seeds."""
    nodes, entries, columns, classes, seeds = (
        TINY if setting.emulated else (NODES, ENTRIES, COLUMNS, CLASSES, SEEDS)
    )
    indptr, indices = draw_lists(nodes, entries, setting.device)
    rng = np.random.default_rng(1)
    connected = np.flatnonzero(np.diff(indptr))
    none = np.empty(0, np.int64)
    return Graph(
        path=folder,
        meta=GraphMeta(
            name="papers", num_nodes=nodes, num_edges=len(indices), feature_dim=columns,
            feature_storage="dense", num_classes=classes,
        ),
        fingerprint="papers",
        indptr=indptr,
        indices=indices,
        x=draw_rows(nodes, columns, setting.device),
        y=rng.integers(0, classes, nodes),
        train_idx=rng.choice(connected, seeds, replace=False),
        val_idx=none,
        test_idx=none,
    )  # fmt: skip


def draw_lists(
    nodes: int, entries: int, device: torch.device
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Draw symmetric R-MAT lists of about so many entries, repeated ones left out."""
    levels = max(1, (nodes - 1).bit_length())
    a, b, c = GRAPH500
    generator = torch.Generator(device).manual_seed(0)
    place = torch.randperm(nodes, generator=generator, device=device)  # hubs lie anywhere
    keys = list[torch.Tensor]()
    for begin in range(0, entries // 2, CHUNK):
        count = min(CHUNK, entries // 2 - begin)
        u, v = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
        for _ in range(levels):
            drawn = torch.rand(count, generator=generator, device=device)
            lower = drawn >= a + b
            u = 2 * u + lower
            v = 2 * v + torch.where(lower, drawn >= a + b + c, drawn >= a)
        u, v = (place[(ends * nodes) >> levels] for ends in (u, v))
        keys += [u * nodes + v, v * nodes + u]
    joined = torch.cat(keys)
    keys.clear()
    found = torch.unique_consecutive(joined.sort().values)
    indptr = torch.zeros(nodes + 1, dtype=torch.int64, device=device)
    torch.cumsum(torch.bincount(found // nodes, minlength=nodes), 0, out=indptr[1:])
    indices = (found % nodes).to(torch.int32)
    return indptr.cpu().numpy(), indices.cpu().numpy()


def draw_rows(nodes: int, columns: int, device: torch.device) -> NDArray[np.float32]:
    """Draw some rows on the device, and repeat them in the host's memory."""
    generator = torch.Generator(device).manual_seed(1)
    rows = np.empty((nodes, columns), np.float32)
    most = min(nodes, max(1, CHUNK // columns))
    drawn = torch.randn((most, columns), generator=generator, device=device).cpu()
    for begin in range(0, nodes, most):
        some = torch.from_numpy(rows[begin : begin + most])
        some.copy_(drawn[: len(some)])  # by all cores, unlike a copy from the device
    return rows
