"""What slows what on GPUs: compute beside a gather from the host, compute beside an all-reduce.

- `gpu_beside`, `gpu_beside_gather`: slowdowns of the two beside each other, by the gather's grid
- `gpu_overlap_eta`: share of an all-reduce that compute hides (modelling rule 5), by GPUs
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.probe.gpu_bench import Bench, GpuFindings
from planner.probe.gpu_seam import MIB, Work
from planner.probe.timing import Measurement

EXCHANGE_BYTES = 4 * MIB
"""Of the all-reduce, as on cores: long enough to be worth hiding."""
LEAST_ETA = 1e-3
"""Tables hold positive values: nothing hidden is written as this."""


def beside_gathers(bench: Bench, found: GpuFindings, grids: Sequence[int]) -> None:
    """Compute beside a gather from host memory, for every grid whose gather alone is known."""
    row_bytes = max(bench.sizes.row_bytes)
    compute = Work(kind="compute", gpu=bench.gpu, num_bytes=bench.sizes.flops)
    for programs in grids:
        alone, burst = found.uva.get((row_bytes, programs)), found.flops.get(())
        if alone is None or burst is None:
            continue
        gather = Work(
            kind="gather", gpu=bench.gpu, place="host", row_bytes=row_bytes, programs=programs,
            num_bytes=bench.sizes.gather_bytes,
        )  # fmt: skip
        rows = max(gather.num_bytes // row_bytes, 1)
        slowed = bench.point(
            f"compute beside {programs} programs", compute, compute.num_bytes, [gather]
        )
        delayed = bench.point(f"gather of {programs} programs", gather, rows, [compute])
        if slowed is not None:
            found.beside[(programs,)] = slowdown(slowed, burst)
        if delayed is not None:
            found.beside_gather[(programs,)] = slowdown(delayed, alone)


def slowdown(top: Measurement, bottom: Measurement) -> Measurement:
    """A slowdown, at least 1; its spread joins both."""
    spread = (top.spread**2 + bottom.spread**2) ** 0.5
    value = max(1.0, top.value / bottom.value)
    return replace(top, value=value, p90=max(value, top.p90 / bottom.value), spread=spread)


def beside_all_reduce(bench: Bench, found: GpuFindings) -> None:
    """The share of an all-reduce that compute hides, for 2, 4 ... and all GPUs from the first on.

    Every GPU of the ring computes, as in training. The first GPU measures for all.
    """
    total = bench.device.num_gpus
    if bench.gpu != 0:
        return
    for count in sorted({2**i for i in range(1, total.bit_length()) if 2**i <= total} | {total}):
        if count > 1:
            _hidden(bench, found, count)


def _hidden(bench: Bench, found: GpuFindings, count: int) -> None:
    ring = Work(kind="all_reduce", gpu=0, ranks=count, num_bytes=EXCHANGE_BYTES)
    computes = [Work(kind="compute", gpu=g, num_bytes=bench.sizes.flops) for g in range(count)]
    burst = found.flops.get(())
    if burst is None:
        return
    words = f"all-reduce of {count} GPUs"
    alone = bench.point(words, ring)
    beside = bench.point(f"{words} beside compute", ring, 1.0, computes)
    slowed = bench.point(
        f"compute beside an {words}", computes[0], bench.sizes.flops, [ring, *computes[1:]]
    )
    if alone is not None and beside is not None and slowed is not None:
        found.hidden[(count,)] = hidden_share(slowdown(slowed, burst), slowdown(beside, alone))


def hidden_share(compute: Measurement, exchange: Measurement) -> Measurement:
    """Eta of modelling rule 5 from the two's slowdowns while both go on.

    An exchange of A seconds inside compute of C takes s_a A, in which compute gets on by s_a A /
    s_c: overlapped = C + s_a A (1 - 1 / s_c), so

        eta = (serial - overlapped) / (serial - compute) = 1 - s_a (1 - 1 / s_c)

    Args:
        compute: s_c, at least 1.
        exchange: s_a, at least 1.

    Returns:
        Within [0.001, 1].
    """
    share = 1 - exchange.value * (1 - 1 / compute.value)
    worst = 1 - exchange.p90 * (1 - 1 / compute.p90)
    spread = (compute.spread**2 + exchange.spread**2) ** 0.5
    least, most = (float(np.clip(x, LEAST_ETA, 1.0)) for x in (worst, share))
    return replace(exchange, value=most, p90=least, spread=spread)
