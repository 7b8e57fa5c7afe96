"""The stages of one optimiser step: one vocabulary from prediction to measurement.

One cost file, one meter row, one report row and one dashboard row exist per stage.
"""

from enum import StrEnum


class Stage(StrEnum):
    """A named part of a training step, in the order in which a batch passes through it."""

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
    """Boundary rows between partitions in full-graph training; hidden rows of other ranks in the
    forward and backward pass of cooperative batches."""
    ALL_REDUCE = "all_reduce"
    """Summing gradients over ranks, the wait for the slowest rank included."""
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
