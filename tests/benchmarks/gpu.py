"""The GPU data path against the memory's and the bus's own rates, on one CUDA device.

`python -m tests.benchmarks.gpu --json [--scale 21]`. Each limit is measured in the same run, in
turns with what it limits: copies on the device and from page-locked memory for the gathers, random
4-byte reads by a kernel for sampling from page-locked topology. Times are of CUDA events around
several calls. One epoch's training time and the curve of cache splits are `end_to_end`'s and
`placement`'s to measure. Without a CUDA device one line says so.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.benchmarks.common import REPEATS, Spread, bench_graph, bench_seeds, record

WIDTHS = (1, 4, 16, 32, 64, 100, 128, 256, 1024)
GATHER_BYTES = 1 << 28
"""Bytes that one gather writes: far above what the device's caches hold."""
TABLE_BYTES = 1 << 32
FANOUTS = (15, 10, 5)
BATCH = 1024
BULK = 64
"""Batches' worth of seeds drawn at once in bulk mode."""


def seconds(task: Callable[[], object], calls: int) -> float:
    """Seconds of one call, of `calls` in a row between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        task()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / calls


def in_turns(tasks: dict[str, Callable[[], object]], calls: int = 5) -> dict[str, list[float]]:
    """Seconds of each task, REPEATS times, taken in turns after one call to warm up."""
    for task in tasks.values():
        task()
    torch.cuda.synchronize()
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(REPEATS):
        for name, task in tasks.items():
            taken[name].append(seconds(task, calls))
    return taken


def rates(work: float, taken: list[float]) -> Spread:
    """Work per second, in 10^9."""
    return Spread.of([work / each / 1e9 for each in taken])


class Rows:
    """A table of random float32 rows in two memories, and a batch of distinct random ids."""

    def __init__(self, width: int, device: torch.device) -> None:
        from runtime.features.gather_triton import DeviceRows, DeviceTable
        from runtime.features.location import encode

        row_bytes = 4 * width
        num_rows = min(TABLE_BYTES // row_bytes, 1 << 26)
        self.count = min(GATHER_BYTES // row_bytes, num_rows // 4)
        generator = torch.Generator().manual_seed(width)
        host = torch.empty((num_rows, width), pin_memory=True)
        host.random_(0, 1 << 20, generator=generator)
        self.pinned, self.own = host, host.to(device)
        slots = np.arange(num_rows)
        self.ids = torch.randperm(num_rows, generator=generator)[: self.count].to(device)
        self.out = torch.empty((self.count, width), device=device)
        self.bytes = self.count * row_bytes

        def table(numbers: Any) -> DeviceTable:
            sources = {0: DeviceRows("own", self.own), 1: DeviceRows("host", self.pinned)}
            return DeviceTable(encode(numbers, slots), sources, device)

        share = np.random.default_rng(width).random(num_rows) < 0.1
        self.tables = {
            "hbm": table(np.zeros(num_rows, np.uint8)),
            "uva": table(np.ones(num_rows, np.uint8)),
            "mixed": table(share.astype(np.uint8)),
        }
        self.counts = self.tables["hbm"].new_counts()

    def gather(self, name: str) -> Callable[[], object]:
        """A gather through one of the tables, checked once."""
        table = self.tables[name]
        table.gather(self.ids, self.out, self.counts)
        if not torch.equal(self.out, self.own[self.ids]):
            raise AssertionError(f"{name}: the gather did not return table[ids]")
        return lambda: table.gather(self.ids, self.out, self.counts)


def measure_gathers(device: torch.device) -> None:
    """HBM, UVA and mixed gathers by row size, over the copy rates of the same turns."""
    for width in WIDTHS:
        rows = Rows(width, device)
        like = torch.empty_like(rows.out)
        staged = rows.pinned[: rows.count]
        taken = in_turns(
            {
                "device_copy": lambda like=like, rows=rows: like.copy_(rows.out),
                "pinned_copy": lambda like=like, staged=staged: like.copy_(
                    staged, non_blocking=True
                ),
                **{f"{name}_gather": rows.gather(name) for name in rows.tables},
            }
        )
        end = f"{width}xfp32"
        for name, times in taken.items():
            limit = "pinned_copy" if name == "uva_gather" else "device_copy"
            extra: dict[str, Any] = {"baseline": limit, "row_bytes": 4 * width}
            ratios = [a / b for a, b in zip(taken[limit], times, strict=True)]
            if name == "mixed_gather":
                # The parts' times on a tenth and nine tenths of the rows; they may overlap, so the
                # sum is an upper and the larger a lower prediction.
                parts = zip(taken["hbm_gather"], taken["uva_gather"], strict=True)
                both = [(0.9 * near, 0.1 * far) for near, far in parts]
                extra["baseline"] = "sum of parts"
                ratios = [sum(pair) / t for pair, t in zip(both, times, strict=True)]
                extra["ratio_to_larger_part"] = statistics.median(
                    max(pair) / t for pair, t in zip(both, times, strict=True)
                )
            ratio = statistics.median(ratios)
            record(f"{name}_{end}", rates(rows.bytes, times), "GB/s", ratio=ratio, **extra)


def measure_sampling(device: torch.device, scale: int) -> None:
    """Neighbour sampling and LABOR-0 in HBM and from page-locked memory, per batch and in bulk."""
    from runtime.sampling.minibatch import Dialect
    from runtime.sampling.neighbor import NeighborSampler
    from runtime.sampling.neighbor_triton import DeviceNeighborSampler, DeviceTopology

    graph = bench_graph(f"rmat-{scale}")
    seeds = bench_seeds(graph)
    bulk = seeds[: BULK * BATCH]
    read_limit = random_reads(device, graph.indices.shape[0])
    batch_rate = 0.0
    for place, pinned in (("hbm", False), ("pinned", True)):
        topology = DeviceTopology.load(graph.indptr, graph.indices, device, pinned=pinned)
        for method in ("neighbor", "labor"):
            sampler = DeviceNeighborSampler(
                topology, FANOUTS, device=device, method=method, dialect=Dialect.EVERY_HOP
            )
            if method == "neighbor" and not pinned:
                oracle = NeighborSampler(
                    graph.indptr, graph.indices, FANOUTS, dialect=Dialect.EVERY_HOP
                )
                found = sampler.sample(seeds[:BATCH], epoch=0, step=0).to_host()
                expected = oracle.sample(seeds[:BATCH], epoch=0, step=0)
                if not np.array_equal(found.blocks[0].indices, expected.blocks[0].indices):
                    raise AssertionError("the device's blocks differ from the CPU sampler's")
            for mode, chosen in (("batch", seeds[:BATCH]), ("bulk", bulk)):
                drawn = sampler.sample(chosen, epoch=0, step=0)
                num_edges = sum(drawn.num_sampled_edges)
                if method == "labor":
                    degrees = np.diff(graph.indptr)
                    rows = [drawn.n_id[: block.num_dst] for block in drawn.blocks]
                    num_edges = sum(int(degrees[part.cpu().numpy()].sum()) for part in rows)
                taken = in_turns(
                    {"sample": lambda s=sampler, c=chosen: s.sample(c, epoch=0, step=0)}, calls=3
                )
                rate = rates(num_edges, taken["sample"])
                ratio, baseline = None, None
                if pinned:
                    ratio, baseline = rate.median / read_limit.median, "random_uva_4_byte_reads"
                elif method == "neighbor" and mode == "batch":
                    batch_rate = rate.median
                elif method == "neighbor":
                    ratio, baseline = rate.median / batch_rate, "per-batch mode"
                unit = "G edges scanned/s" if method == "labor" else "G edges/s"
                name = f"sample_{method}_{mode}_{place}"
                record(name, rate, unit, baseline=baseline, ratio=ratio, edges=num_edges)


def random_reads(device: torch.device, num_entries: int) -> Spread:
    """Random 4-byte reads per second (10^9) by a kernel from page-locked memory."""
    from runtime.features.gather_triton import DeviceRows, DeviceTable
    from runtime.features.location import encode

    entries = min(num_entries, 1 << 26)
    table = torch.zeros((entries, 1), pin_memory=True)
    codes = encode(np.zeros(entries, np.uint8), np.arange(entries))
    rows = DeviceTable(codes, {0: DeviceRows("host", table)}, device)
    ids = torch.randint(0, entries, (1 << 24,), device=device)
    out, counts = torch.empty((1 << 24, 1), device=device), rows.new_counts()
    taken = in_turns({"read": lambda: rows.gather(ids, out, counts)})
    rate = rates(ids.numel(), taken["read"])
    record("random_uva_4_byte_reads", rate, "G reads/s", entries=entries)
    return rate


def main() -> None:
    """Parse the arguments and measure, or say that there is nothing to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON lines (the only form there is)")
    parser.add_argument("--scale", type=int, default=21, help="rmat scale of the sampled graph")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    device = torch.device("cuda")
    record("device", 1.0, "device", device=torch.cuda.get_device_name(device))
    measure_gathers(device)
    measure_sampling(device, arguments.scale)


if __name__ == "__main__":
    main()
