"""Gathers from the device, from page-locked host memory and both, over copies of the same turns."""

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.benchmarks.common import Spread, record
from tests.benchmarks.gpu_setup import Bench, rates, with_bar

BARS = {"uva_gather_128xfp32": 0.9, "mixed_gather_128xfp32": 0.9}
HBM_BAR, HBM_ROW_BYTES = 0.8, 512
"""HBM gathers of rows of at least so many bytes."""
MIXED_HOST_SHARE = 0.1


class Rows:
    """A table of random float32 rows in two memories, and a batch of distinct random ids."""

    def __init__(self, width: int, bench: Bench) -> None:
        from gnnplan.runtime.features.device_rows import DeviceRows
        from gnnplan.runtime.features.gather_triton import DeviceTable
        from gnnplan.runtime.features.location import encode

        row_bytes, device, sizes = 4 * width, bench.device, bench.sizes
        num_rows = max(min(sizes.table_bytes // row_bytes, 1 << 26), 8)
        self.count = max(min(sizes.gather_bytes // row_bytes, num_rows // 4), 1)
        generator = torch.Generator(device).manual_seed(width)
        self.own = torch.empty((num_rows, width), device=device)
        self.own.random_(0, 1 << 20, generator=generator)
        self.pinned = bench.pinned(torch.empty((num_rows, width)))
        self.pinned.copy_(self.own)
        slots = np.arange(num_rows)
        order = torch.randperm(num_rows, generator=generator, device=device)
        self.ids = order[: self.count].clone()
        self.out = torch.empty((self.count, width), device=device)
        self.bytes = self.count * row_bytes

        def table(numbers: Any) -> DeviceTable:
            sources = {0: DeviceRows("own", self.own), 1: DeviceRows("host", self.pinned)}
            return DeviceTable(encode(numbers, slots), sources, device)

        share = np.random.default_rng(width).random(num_rows) < MIXED_HOST_SHARE
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


def measure_gathers(bench: Bench) -> None:
    """HBM, UVA and mixed gathers by row size, over the copy rates of the same turns."""
    for width in bench.sizes.widths:
        if not bench.allows(f"gathers_{width}xfp32", 20):
            return
        rows = Rows(width, bench)
        like, staged = torch.empty_like(rows.out), rows.pinned[: rows.count]
        tasks: dict[str, Callable[[], object]] = {
            "device_copy": lambda like=like, rows=rows: like.copy_(rows.out),
            "pinned_copy": lambda like=like, staged=staged: like.copy_(staged, non_blocking=True),
        }
        gathers = {f"{name}_gather": rows.gather(name) for name in rows.tables}
        taken = bench.in_turns(tasks | gathers, held=True)
        for name, times in taken.items():
            _record(f"{name}_{width}xfp32", name, rows, taken, times)


def _record(
    line: str, name: str, rows: Rows, taken: dict[str, list[float]], times: list[float]
) -> None:
    limit = "pinned_copy" if name == "uva_gather" else "device_copy"
    row_bytes = rows.bytes // rows.count
    extra: dict[str, Any] = {"baseline": limit, "row_bytes": row_bytes}
    ratio = statistics.median([a / b for a, b in zip(taken[limit], times, strict=True)])
    if name == "mixed_gather":
        # The cost model's own prediction: rows by source times seconds per row, added up. Reads of
        # both memories may overlap, so the larger part alone is given as well.
        parts = [
            ((1 - MIXED_HOST_SHARE) * near, MIXED_HOST_SHARE * far)
            for near, far in zip(taken["hbm_gather"], taken["uva_gather"], strict=True)
        ]
        pairs = list(zip(parts, times, strict=True))
        ratio = statistics.median(sum(pair) / t for pair, t in pairs)
        extra["baseline"] = "sum of parts"
        extra["ratio_to_larger_part"] = statistics.median(max(pair) / t for pair, t in pairs)
        extra["within"] = min(ratio, 1 / ratio)
        extra |= with_bar(extra["within"], 0.9) if line in BARS else {}
    elif line in BARS:
        extra |= with_bar(ratio, BARS[line])
    elif name == "hbm_gather" and row_bytes >= HBM_ROW_BYTES:
        extra |= with_bar(ratio, HBM_BAR)
    record(line, rates(rows.bytes, times), "GB/s", ratio=ratio, **extra)


def random_reads(bench: Bench, num_entries: int, *, host: bool) -> Spread:
    """Random 4-byte reads per second (10^9) by a kernel, of the host's memory or the device's."""
    from gnnplan.runtime.features.device_rows import DeviceRows
    from gnnplan.runtime.features.gather_triton import DeviceTable
    from gnnplan.runtime.features.location import encode

    entries, device = min(num_entries, 1 << 26), bench.device
    table = torch.zeros((entries, 1))
    table = bench.pinned(table) if host else table.to(device)
    codes = encode(np.zeros(entries, np.uint8), np.arange(entries))
    rows = DeviceTable(codes, {0: DeviceRows("host" if host else "own", table)}, device)
    ids = torch.randint(0, entries, (bench.sizes.reads,), device=device)
    out, counts = torch.empty((ids.numel(), 1), device=device), rows.new_counts()
    taken = bench.in_turns({"read": lambda: rows.gather(ids, out, counts)}, held=True)
    rate = rates(ids.numel(), taken["read"])
    name = "random_uva_4_byte_reads" if host else "random_hbm_4_byte_reads"
    record(name, rate, "G reads/s", entries=entries)
    return rate
