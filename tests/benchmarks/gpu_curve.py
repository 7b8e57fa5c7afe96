"""Step time over how a fixed cache is divided between adjacency lists and feature rows.

Legion's question (formulas 2.4) answered in seconds. Counts of one sampled epoch say what each
split leaves to read of the host; rates of this run price it:

    T(alpha) = T(all on the device) + rows of the host (c_uva - c_hbm) + entries of the host c_4

with c the seconds per row gathered and c_4 those of a random 4-byte read. Batches of another epoch
are then sampled, gathered and trained under every split. The planner's split is the one of the
least prediction; Legion's own, in transactions, stands beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.planner.placement.policies.legion import list_bytes, split_cache
from gnnplan.runtime.graph.dataset import Graph
from tests.benchmarks.common import Spread, bench_seeds, record
from tests.benchmarks.gpu_setup import Bench, with_bar

NEAR_BEST, WITHIN = 1 / 1.05, 0.9
"""Bars: the planner's split over the best measured; a prediction's distance from 1."""
COUNTED_EPOCH, MEASURED_EPOCH = 0, 1


@dataclass(frozen=True, slots=True)
class Counts:
    """Of an epoch's batches, per batch on average."""

    rows: NDArray[np.float64]
    """Times that each node's feature row is read."""
    entries: NDArray[np.float64]
    """Neighbours drawn from each node's list."""


class Curve:
    """The graph in both memories, and a model to train."""

    def __init__(self, bench: Bench, graph: Graph) -> None:
        self.bench, self.graph = bench, graph
        seeds, batch = bench_seeds(graph), bench.sizes.curve_batch
        count = min(bench.sizes.curve_batches, max(len(seeds) // batch, 1))
        self.batches = [seeds[i * batch : (i + 1) * batch] for i in range(count)]
        features = torch.from_numpy(np.array(graph.x))
        self.host_rows = bench.pinned(features)
        self.labels = torch.from_numpy(np.array(graph.y)).to(bench.device)
        self.model, self.optimizer = self._model()
        self.row_bytes = features.shape[1] * features.element_size()

    def _model(self) -> tuple[Any, Any]:
        from torch import nn

        from gnnplan.runtime.models.build import build_model
        from gnnplan.runtime.plan.schema import Workload

        sizes, graph = self.bench.sizes, self.graph
        workload = Workload(
            model="sage", num_layers=len(sizes.fanouts), hidden=sizes.hidden,
            fanouts=list(sizes.fanouts), batch_size=sizes.curve_batch, learning_rate=3e-3, seed=0,
        )  # fmt: skip
        model: nn.Module = build_model(
            workload, graph.feature_dim, graph.num_classes, str(graph.task)
        ).to(self.bench.device)
        return model, torch.optim.Adam(model.parameters(), lr=3e-3)

    def counted(self) -> Counts:
        """Reads of one epoch's batches, with everything on the device."""
        sampler, _ = self.placed(None, None)
        rows, entries = np.zeros((2, self.graph.num_nodes))
        for step, seeds in enumerate(self.batches):
            found = sampler.sample(seeds, epoch=COUNTED_EPOCH, step=step).to_host()
            rows[found.n_id] += 1
            outer = found.blocks[0]
            entries[found.n_id[: outer.num_dst]] += np.diff(outer.indptr[: outer.num_dst + 1])
        return Counts(rows / len(self.batches), entries / len(self.batches))

    def placed(
        self, lists: NDArray[np.int64] | None, rows: NDArray[np.int64] | None
    ) -> tuple[Any, Any]:
        """Sampler and gather table with these lists and rows on the device; None: all."""
        from gnnplan.runtime.features.device_rows import DeviceRows
        from gnnplan.runtime.features.gather_triton import DeviceTable
        from gnnplan.runtime.features.location import encode
        from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
        from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

        graph, device = self.graph, self.bench.device
        topology = DeviceTopology.load(
            graph.indptr, graph.indices, device, pinned=lists is not None, hot=lists
        )
        sampler = DeviceNeighborSampler(topology, self.bench.sizes.fanouts, device=device)
        held = np.arange(graph.num_nodes) if rows is None else rows
        numbers, slots = np.ones(graph.num_nodes, np.uint8), np.arange(graph.num_nodes)
        numbers[held], slots[held] = 0, np.arange(len(held))
        sources = {1: DeviceRows("host", self.host_rows)}
        if len(held):
            own = self.host_rows[torch.from_numpy(held)].to(device)
            sources[0] = DeviceRows("own", own)
        return sampler, DeviceTable(encode(numbers, slots), sources, device)

    def steps(self, sampler: Any, table: Any) -> Callable[[], object]:
        """A task that trains on every batch of the measured epoch."""
        from gnnplan.runtime.loader.device import drawn_blocks

        counts = table.new_counts()

        def run() -> None:
            for step, seeds in enumerate(self.batches):
                drawn = sampler.sample(seeds, epoch=MEASURED_EPOCH, step=step)
                x = torch.empty((drawn.n_id.numel(), table.feature_dim), device=table.device)
                table.gather(drawn.n_id, x, counts)
                self.optimizer.zero_grad()
                logits = self.model(x, drawn_blocks(drawn))
                y = self.labels[drawn.n_id[: len(seeds)]].to(torch.int64)
                torch.nn.functional.cross_entropy(logits, y).backward()
                self.optimizer.step()

        return run

    def step_seconds(self, sampler: Any, table: Any) -> Spread:
        """Seconds of one step."""
        taken = self.bench.in_turns({"steps": self.steps(sampler, table)}, 1)["steps"]
        return Spread.of([seconds / len(self.batches) for seconds in taken])

    def row_seconds(self) -> tuple[float, float]:
        """Seconds of gathering a row of the host's memory, and of the device's."""
        device, found = self.bench.device, list[float]()
        ids = torch.randint(0, self.graph.num_nodes, (self.bench.sizes.reads // 64 + 1,))
        held = ids.to(device)
        for rows in (np.zeros(0, np.int64), None):
            _, table = self.placed(np.zeros(0, np.int64), rows)
            out = torch.empty((held.numel(), table.feature_dim), device=device)
            counts = table.new_counts()
            tasks: dict[str, Callable[[], object]] = {
                "gather": lambda t=table, o=out, c=counts: t.gather(held, o, c)
            }
            taken = self.bench.in_turns(tasks)["gather"]
            found.append(float(np.median(taken)) / held.numel())
        return found[0], found[1]


def split_rows(
    counts: Counts, degrees: NDArray[np.int64], share: float, cache: int, row_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lists (by count per byte) and rows (by count) that a share of the cache holds."""
    sizes = list_bytes(degrees)
    queue = np.argsort(-counts.entries / sizes, kind="stable")
    lists = queue[: int(np.searchsorted(np.cumsum(sizes[queue]), share * cache, side="right"))]
    rows = np.argsort(-counts.rows, kind="stable")[: int((1 - share) * cache) // row_bytes]
    return lists.astype(np.int64), rows.astype(np.int64)


def measure_curve(bench: Bench, reads_per_second: float) -> None:
    """Measured and predicted seconds of every split, and what the planner's choice costs.

    Args:
        bench: the run.
        reads_per_second: random 4-byte reads of host memory, of this run.
    """
    if not bench.allows("cache_curve", 60):
        return
    curve = Curve(bench, bench.graph())
    graph = curve.graph
    degrees = np.diff(graph.indptr)
    counts, (far, near) = curve.counted(), curve.row_seconds()
    whole = int(list_bytes(degrees).sum()) + curve.row_bytes * graph.num_nodes
    cache = int(bench.sizes.cache_share * whole)
    base = curve.step_seconds(*curve.placed(None, None))
    record("cache_curve_all_on_device", base, "s/step", cache_bytes=whole)
    measured: dict[float, float] = {}
    predicted: dict[float, float] = {}
    for share in bench.sizes.shares:
        lists, rows = split_rows(counts, degrees, share, cache, curve.row_bytes)
        host_rows = float(counts.rows.sum() - counts.rows[rows].sum())
        host_entries = float(counts.entries.sum() - counts.entries[lists].sum())
        predicted[share] = base.median + host_rows * (far - near) + host_entries / reads_per_second
        if not bench.allows(f"cache_curve_{share:.1f}", 10):
            continue
        found = curve.step_seconds(*curve.placed(lists, rows))
        measured[share] = found.median
        ratio = predicted[share] / found.median
        record(
            f"cache_curve_{share:.1f}", found, "s/step", baseline="predicted", ratio=ratio,
            predicted_seconds=predicted[share], host_rows=host_rows, host_entries=host_entries,
            cache_bytes=cache, **with_bar(min(ratio, 1 / ratio), WITHIN),
        )  # fmt: skip
    if measured:
        _choices(counts, degrees, curve.row_bytes, cache, measured, predicted)


def _choices(
    counts: Counts,
    degrees: NDArray[np.int64],
    row_bytes: int,
    cache: int,
    measured: dict[float, float],
    predicted: dict[float, float],
) -> None:
    """What the planner's split, and Legion's, cost over the best that was measured."""
    best = min(measured.values())
    legion = split_cache(
        np.rint(counts.rows * 1000).astype(np.int64),
        np.rint(counts.entries * 1000).astype(np.int64),
        degrees, row_bytes=row_bytes, clique_bytes=cache, order="density",
    )  # fmt: skip
    chosen = {
        "planner": min(measured, key=lambda share: predicted[share]),
        "legion": min(measured, key=lambda share: abs(share - legion.alpha)),
    }
    for name, share in chosen.items():
        ratio = best / measured[share]
        bar = with_bar(ratio, NEAR_BEST) if name == "planner" else {}
        record(
            f"cache_curve_{name}_split", measured[share], "s/step", baseline="best measured",
            ratio=ratio, share=share, best_seconds=best, **bar,
        )  # fmt: skip
