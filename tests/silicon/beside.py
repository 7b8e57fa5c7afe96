"""`python -m tests.silicon.beside GRAPH [--emulate]`: seconds of PyG's step, fed by the cores.

A process of its own: PyG's workers would be waited for at its end, seconds each. It loads its
libraries, and trains when a line comes in.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch_geometric.loader  # noqa: F401 - what is timed imports it late

from gnnplan.runtime.graph.dataset import open_graph
from tests.benchmarks.common import record
from tests.benchmarks.gpu_epoch import time_pyg
from tests.benchmarks.gpu_setup import FULL, TINY, Bench

BUDGET_SECONDS = 30.0
"""Of which PyG's steps take half at most."""
WARM_STEPS, COUNTED_STEPS = 40, 60
"""Its workers have two batches each ready before the first step: those are not counted."""


def main(arguments: list[str]) -> None:
    """Time PyG and end without waiting for its workers."""
    emulated = "--emulate" in arguments
    device = torch.device("cpu") if emulated else torch.device("cuda", 0)
    graph = open_graph(Path(arguments[0]), validate=False)
    torch.zeros(1, device=device)
    if not sys.stdin.readline():
        return
    sizes = TINY if emulated else replace(FULL, warm_steps=WARM_STEPS, epoch_steps=COUNTED_STEPS)
    seconds, feeder, steps = time_pyg(Bench(sizes, device, BUDGET_SECONDS), graph)
    record("pyg_step", seconds, "s", baseline=feeder, steps=steps)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
