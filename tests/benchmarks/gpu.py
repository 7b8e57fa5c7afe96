"""The GPU data path against the memory's and the bus's own rates, on one CUDA device.

`python -m tests.benchmarks.gpu --json` measures gathers, sampling, a training epoch against PyG and
the curve of cache splits, in one command of at most `--budget-seconds`. Each limit is measured in
the same run, in turns with what it limits: copies on the device and from page-locked memory for the
gathers, random 4-byte reads by a kernel for sampling from page-locked topology. Lines that a bar
exists for carry it, and whether it was met.

Without a CUDA device one line says so. `--interpret` runs every part on tiny sizes in Triton's
interpreter instead: its seconds mean nothing, its checks do.
"""

import argparse
import dataclasses
import os
import sys

import torch

from tests.benchmarks.common import record
from tests.benchmarks.gpu_curve import measure_curve
from tests.benchmarks.gpu_epoch import measure_epoch
from tests.benchmarks.gpu_memory import measure_gathers
from tests.benchmarks.gpu_sampling import measure_sampling
from tests.benchmarks.gpu_setup import FULL, TINY, Bench

BUDGET_SECONDS = 440.0
PARTS = ("gathers", "sampling", "epoch", "curve")


def main() -> None:
    """Parse the arguments and measure, or say that there is nothing to measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON lines (the only form there is)")
    parser.add_argument("--scale", type=int, default=FULL.scale, help="rmat scale of the graph")
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, comma-separated")
    parser.add_argument("--interpret", action="store_true", help="tiny, without a GPU")
    arguments = parser.parse_args()
    if arguments.interpret:
        bench = Bench(TINY, torch.device("cpu"), arguments.budget_seconds)
    elif torch.cuda.is_available():
        sizes = dataclasses.replace(FULL, scale=arguments.scale)
        bench = Bench(sizes, torch.device("cuda", 0), arguments.budget_seconds)
    else:
        print("no CUDA device here: nothing was measured")
        return
    run(bench, arguments.parts.split(","))
    bench.guard.cancel()
    # PyG's workers would be waited for, five seconds each.
    sys.stdout.flush()
    os._exit(0)


def run(bench: Bench, parts: list[str]) -> None:
    """Measure the parts; each ends in time or says what it left out."""
    on_gpu = bench.device.type == "cuda"
    name = torch.cuda.get_device_name(bench.device) if on_gpu else "Triton's interpreter"
    record("device", 1.0, "device", device=name)
    reads = 1e9
    if "sampling" in parts:
        reads = 1e9 * measure_sampling(bench).median
    if "curve" in parts and "sampling" in parts:
        measure_curve(bench, reads)
    if "epoch" in parts:
        measure_epoch(bench)
    if "gathers" in parts:
        measure_gathers(bench)
    record("seconds_left", bench.left(), "s")


if __name__ == "__main__":
    if "--interpret" in sys.argv:
        # Triton decides when a kernel is defined whether to interpret it: before its first import.
        os.environ["TRITON_INTERPRET"] = "1"
    main()
