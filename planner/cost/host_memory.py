"""Count the bytes of a host's memory that batches pass through on their way to ranks.

Rows of the disk are read into buffers of each rank, and for a GPU into page-locked memory, which is
also where rows lie that cores gather for one. Where cores draw a GPU's batches, their tables and
blocks are on the host too.
"""

import math

from gnnplan.planner.candidate import Candidate, PlacedRows
from gnnplan.planner.cost.graph_memory import (
    block_bytes,
    draws_on_gpu,
    node_parts,
    sampling_bytes,
)
from gnnplan.planner.cost.memory import (
    BatchTail,
    batch_bytes,
    code_bytes,
    live_batches,
)
from gnnplan.planner.cost.request import (
    Request,
    row_bytes,
    sampler_of,
    seeds_per_rank,
    steps_per_epoch,
)
from gnnplan.planner.workload import BatchProfile
from gnnplan.runtime.features.disk import staging_bytes
from gnnplan.runtime.sampling.seeds import order_bytes

DISK_BUDGET_BYTES = 64 * 2**20
"""Most bytes of buffers and index in which a rank reads rows of the disk."""
FLOAT_BYTES = 4
RING_SPARE = 1.125
"""Factor by which a buffer for gathered rows is larger than the rows that it was made for."""


def locked_bytes(size: float) -> int:
    """Return the bytes of torch's page-locked block of a size: a power of two.

    >>> locked_bytes(1000), locked_bytes(1024), locked_bytes(0)
    (1024, 1024, 0)
    """
    return 1 << (math.ceil(size) - 1).bit_length() if size > 0 else 0


def disk_bytes(request: Request, candidate: Candidate, share: float = 1.0) -> int:
    """Return the bytes in which a rank reads a share of its batches' rows from the disk.

    A GPU's rows are staged in page-locked blocks, which torch keeps: of the mean batch, and of the
    largest where that needs a longer one.
    """
    if share <= 0:
        return 0
    most, scale = _largest_rows(request, candidate)
    stored, rows = row_bytes(request.graph), share * most
    size = staging_bytes(math.ceil(rows), stored, DISK_BUDGET_BYTES)
    if candidate.gpus:
        size += sum({locked_bytes(stored * each) for each in (rows, rows / scale)})
    return size


def disk_parts(request: Request, candidate: Candidate, placed: PlacedRows) -> list[dict[str, int]]:
    """Return the bytes in which each rank reads rows of the disk.

    A cache that fills itself is empty at first: what it serves later comes from the disk then.
    """
    found: list[dict[str, int]] = []
    for rank in placed.ranks:
        share = rank.shares.get("disk", 0.0)
        if share > 0:
            share += rank.shares.get("cache", 0.0)
        size = disk_bytes(request, candidate, share)
        found.append({"rows from disk": size} if size else {})
    return found


def passing_parts(
    request: Request, candidate: Candidate, placed: PlacedRows
) -> list[dict[str, int]]:
    """Return the bytes of its host that each GPU's batches pass through, by what they hold."""
    drawn = ordered_parts(request, candidate) | drawn_parts(request, candidate)
    return [drawn | read for read in disk_parts(request, candidate, placed)]


def ordered_parts(request: Request, candidate: Candidate) -> dict[str, int]:
    """Return the bytes in which a rank orders the seeds, or links, of an epoch."""
    graph = request.graph
    by_parts = candidate.partition != "none" and candidate.batching == "independent"
    size = order_bytes(graph.num_train, links=graph.task == "link", by_parts=by_parts)
    return {"seeds": size}


def gather_parts(candidate: Candidate, batch: BatchProfile) -> dict[str, int]:
    """Return the bytes in which the threads of a rank's loader look up rows that cores gather."""
    from gnnplan.runtime.features.location import scratch_bytes  # on use: with numba

    rows = math.ceil(BatchTail.of(batch).vertices)
    return {"gather": max(1, candidate.threads.sample) * scratch_bytes(rows)}


def drawn_parts(request: Request, candidate: Candidate) -> dict[str, int]:
    """Return the bytes of a host in which cores draw a GPU's batches; none where it draws them.

    Rows that cores gather too lie in a ring of page-locked buffers, one more than batches live.
    """
    sampler, graph = sampler_of(request.user_sampler, candidate), request.graph
    if draws_on_gpu(request, sampler):
        return {}
    batch_size, threads = request.workload.batch_size, candidate.threads.sample
    seeds = seeds_per_rank(batch_size, candidate.num_ranks)
    batch = request.profile.batch(seeds)
    largest = BatchTail.of(batch)
    vertices, nodes = largest.vertices, graph.num_nodes
    ahead = candidate.prefetch_depth if threads else 0
    live = live_batches(ahead, steps_per_epoch(graph.num_train, batch_size))
    parts = {
        "sampling": sampling_bytes(request, candidate, batch),
        "batches": batch_bytes(vertices, block_bytes(request, candidate, batch), 0, live),
        **node_parts(request, candidate),
    }
    if request.sparse:
        rows = locked_bytes(RING_SPARE * vertices * FLOAT_BYTES * graph.feature_dim)
        parts["batches"] += (live + 1) * rows
        parts["location table"] = code_bytes(nodes) * nodes
        parts |= gather_parts(candidate, batch)
    return parts


def _largest_rows(request: Request, candidate: Candidate) -> tuple[float, float]:
    """Return the rows of a rank's largest batch, and their ratio to the mean batch's.

    Of a shared batch a rank reads the rows that it owns.
    """
    work, profile = request.workload, request.profile
    if candidate.batching != "cooperative":
        seeds = seeds_per_rank(work.batch_size, candidate.num_ranks)
        largest = BatchTail.of(profile.batch(seeds))
        return largest.vertices, largest.scale
    largest = BatchTail.of(profile.batch(work.batch_size))
    parts = candidate.owner == "partition" and request.owned is not None
    uneven = request.owned.fullest if parts and request.owned is not None else 1.0
    return uneven * largest.vertices / candidate.num_ranks, largest.scale
