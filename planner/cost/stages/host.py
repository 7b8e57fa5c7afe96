"""Count what the host starts for a step on a GPU, and price it: one formula for every way.

    T_host = t_s (K_sample + K_gather + K_copy + K_blocks + K_training)

K counts kernels and copies that the runtime starts, and in training the nodes of the backward pass
too, each of which is a turn of Python or of the engine; t_s is the host's seconds of one, Python
included. Over L layers or hops:

    K_sample     the sampler's own (stages.sample), by itself, in a stack, or around a CUDA graph
    K_gather     3: the kernel, its counters set to zero and copied back
    K_copy       2: seeds and labels
    K_blocks     GCN's edge weights, 36 L; other models add none
    K_training   a + b L forward and back, with the loss; 2 for the update

tests/planner/cost/stages/test_gpu_launches.py counts all of them again (DEC-114).
"""

from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.machine.model import MachineModel

GATHER_STARTS = 3
"""Starts of a gather: its kernel, and the counters' reset and copy."""
COPY_STARTS = 2
"""Copies per batch: seeds and labels."""
UPDATE_STARTS = 2
"""Starts of an update by Adam in torch's fused form."""
TRAINING_STARTS = {"sage": (8, 17), "gcn": (8, 14), "gat": (13, 96)}
"""a, b of a pass forward and back, by model."""
BLOCK_STARTS = {"gcn": 36}
"""Starts per layer of adding a model's edge weights."""
START_PER_KERNEL = 2.35
"""t_s over the seconds of starting an empty kernel, where only those are known (DEC-114)."""


def start_seconds(machine: MachineModel) -> float:
    """Return the host's seconds of starting one kernel, with the Python that leads to it."""
    if MachineTable.GPU_START in machine.tables:
        return machine.table(MachineTable.GPU_START).at(ranks=1.0)
    return START_PER_KERNEL * machine.table(MachineTable.GPU_KERNEL).at(ranks=1.0)


def pass_starts(model: str, layers: int) -> float:
    """Return what the host starts for a pass forward and back, the loss included.

    >>> pass_starts("sage", 3), pass_starts("gcn", 2)
    (59.0, 36.0)
    """
    constant, per_layer = TRAINING_STARTS[model]
    return float(constant + per_layer * layers)


def block_starts(model: str, layers: int) -> float:
    """Return what the host starts to add edge weights to a batch.

    >>> block_starts("gcn", 2), block_starts("sage", 2)
    (72.0, 0.0)
    """
    return float(BLOCK_STARTS.get(model, 0) * layers)
