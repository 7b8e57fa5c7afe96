"""Total time of counted batches whose GPUs make them ahead of training, on lanes of their own."""

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate
from planner.cost.gpu_reads import memory_seconds_per_byte, read_seconds
from planner.cost.gpu_sample import NEIGHBOUR_BYTES, OFFSETS_BYTES, gpu_sample_seconds
from planner.cost.pipeline_time import finish_times
from planner.machine import MachineModel
from planner.simulate_time import BatchWork

_LEAST = 1e-12
"""The recursion wants positive seconds."""


def near_seconds(
    machine: MachineModel,
    candidate: Candidate,
    rank: int,
    batch: BatchWork,
    *,
    expanded: float,
    own_topology: float,
    row_bytes: int,
) -> float:
    """Seconds that a GPU's own memory is busy with sampling and gathering one batch.

    Args:
        machine: its links.
        candidate: which GPUs.
        rank: whose.
        batch: counted.
        expanded: vertices whose lists are read.
        own_topology: share of the adjacency reads in its own memory.
        row_bytes: of a stored row.
    """
    ids = read_seconds(machine, candidate, NEIGHBOUR_BYTES)["own"][rank]
    offsets = read_seconds(machine, candidate, OFFSETS_BYTES)["own"][rank]
    sample = gpu_sample_seconds(
        float(batch.edges),
        expanded,
        0.0,
        neighbour_seconds=own_topology * ids,
        offsets_seconds=own_topology * offsets,
        hash_seconds=ids,
        kernel_seconds=0.0,
    )
    own = batch.rows.get("own", 0) * read_seconds(machine, candidate, row_bytes)["own"][rank]
    written = sum(batch.bytes.values()) * memory_seconds_per_byte(machine, candidate)
    return sample + own + written


def lanes_total(
    seconds: NDArray[np.float64],
    near: NDArray[np.float64],
    launches: NDArray[np.float64],
    *,
    depth: int,
    hidden: float = 0.0,
    started: float = 0.0,
) -> float:
    """Seconds of all steps: lanes run ahead by the depth, each step ends with its slowest rank.

    Args:
        seconds: [ranks, steps, 7] of sample, gather, copy, batch, forward_backward, all_reduce,
            optimizer.
        near: [ranks, steps], of the loader's stages on the GPU's own memory.
        launches: [ranks, steps], of the loader's kernels' starts.
        depth: batches made ahead.
        hidden: share of an all-reduce that compute was measured to hide.
        started: seconds of starting a step's kernels on the training thread.

    Source: docs/formulas.md 8.2 [A2]: the recursion, and what the GPU, its links and the host's
    interpreter take together.
    """
    sample, gather = seconds[:, :, 0], seconds[:, :, 1:4].sum(axis=2)
    training = seconds[:, :, 4:].sum(axis=2)
    slowest = training.max(axis=0)
    ends = [
        finish_times(
            np.maximum(np.stack([mine, rows, slowest]), _LEAST),
            [depth, depth],
            freed_at_start=True,
        )[-1, -1]
        for mine, rows in zip(sample, gather, strict=True)
    ]
    batch, compute = seconds[:, :, 3], seconds[:, :, 4] + seconds[:, :, 6]
    exchange = seconds[:, :, 5]
    on_gpu = (near + batch + compute + (1 - hidden) * exchange).sum(axis=1).max()
    reads = np.maximum(sample + gather - near - batch - launches, 0.0)
    on_links = (reads + exchange).sum(axis=1).max()
    on_host = (launches + started).sum(axis=1).max()
    return float(max(*ends, on_gpu, on_links, on_host))
