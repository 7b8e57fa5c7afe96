"""What prediction and training share: a step's stages, an all-reduce's parts, what is captured.

Each stage has one cost file, one meter row, one report row and one dashboard row.
"""

from enum import StrEnum

from gnnplan.runtime.plan.schema import Strategy, Workload


class Stage(StrEnum):
    """Part of a training step, in the order in which a batch passes through it."""

    SEEDS = "seeds"
    """Choosing this rank's share of the global batch."""
    SAMPLE = "sample"
    """Drawing neighbours and relabelling them into blocks."""
    EXCHANGE_IDS = "exchange_ids"
    """Sending vertex ids to the ranks that own them."""
    GATHER = "gather"
    """Reading feature rows from the tiers into the batch's buffer."""
    EXCHANGE_ROWS = "exchange_rows"
    """Sending feature rows back to the ranks that asked for them."""
    COPY = "copy"
    """Moving a batch from the host to the device."""
    BATCH = "batch"
    """Adding labels and edge weights."""
    WAIT = "wait"
    """The training thread waiting for the next batch to be ready."""
    FORWARD_BACKWARD = "forward_backward"
    """Model forward, loss and backward."""
    HALO_EXCHANGE = "halo_exchange"
    """Exchange of boundary rows (full-graph training) or hidden rows (cooperative batches)."""
    ALL_REDUCE = "all_reduce"
    """Summing gradients over ranks, with the wait for the slowest rank."""
    OPTIMIZER = "optimizer"
    """The parameter update."""


LOADER_STAGES = (
    Stage.SEEDS,
    Stage.SAMPLE,
    Stage.EXCHANGE_IDS,
    Stage.GATHER,
    Stage.EXCHANGE_ROWS,
    Stage.COPY,
    Stage.BATCH,
)
"""Stages that may run ahead of the training thread."""

TRAINING_STAGES = (
    Stage.WAIT,
    Stage.FORWARD_BACKWARD,
    Stage.HALO_EXCHANGE,
    Stage.ALL_REDUCE,
    Stage.OPTIMIZER,
)
"""Stages on the training thread; their sum is the step."""

PART_BYTES = 1 << 20
"""Least size of a gradient's part but the last: below, latency outweighs what is hidden."""


def most_parts(gradient_bytes: float) -> int:
    """Return the most parts that a gradient is sent in while the backward pass runs.

    >>> most_parts(900_000), most_parts(4 * 2**20)
    (1, 4)
    """
    return max(1, int(gradient_bytes // PART_BYTES))


LOOK_EVERY = 16
"""Captured steps between two looks of the host at losses and flags (DEC-168)."""
CAPTURED_MODELS = ("sage", "gcn", "gat", "rgcn")
"""Models whose layers leave padding out."""


def refuse_captured(strategy: Strategy, workload: Workload) -> str:
    """Return why a strategy's step cannot be captured; empty where it can."""
    if strategy.kind == "cpu":
        return "a step is captured on GPUs alone, and these ranks are on cores"
    if strategy.mode == "full-graph":
        return "steps over the whole graph are not built as one graph of kernels"
    if strategy.batching == "cooperative":
        return "ranks that share a batch exchange rows whose number the host must know"
    if strategy.threads.comm:
        return "a gradient sent in parts beside the backward pass is not built into the graph"
    return refuse_captured_model(workload)


def refuse_captured_model(workload: Workload) -> str:
    """Return why no step of a workload can be captured; empty where one can."""
    if workload.model not in CAPTURED_MODELS:
        known = ", ".join(CAPTURED_MODELS)
        return f"models {known} are built for padded shapes, {workload.model} is not"
    if workload.precision == "float16":
        return "the factor of float16's loss is the host's, which looks at each step"
    return ""
