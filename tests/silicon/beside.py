"""`python -m tests.silicon.beside GRAPH [--emulate]`: seconds of PyG's step, fed by the cores.

A process of its own: PyG's workers would be waited for at its end, seconds each.
"""

import os
import sys
from pathlib import Path

import torch

from gnnplan.runtime.graph.dataset import open_graph
from tests.benchmarks.common import record
from tests.benchmarks.gpu_epoch import time_pyg
from tests.benchmarks.gpu_setup import FULL, TINY, Bench

BUDGET_SECONDS = 30.0
"""Of which PyG's steps take half at most."""


def main(arguments: list[str]) -> None:
    """Time PyG and end without waiting for its workers."""
    emulated = "--emulate" in arguments
    device = torch.device("cpu") if emulated else torch.device("cuda", 0)
    bench = Bench(TINY if emulated else FULL, device, BUDGET_SECONDS)
    seconds, feeder, steps = time_pyg(bench, open_graph(Path(arguments[0]), validate=False))
    record("pyg_step", seconds, "s", baseline=feeder, steps=steps)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
