"""The subject "GPUs" of the probe: measured by one process of the team, or a note says why not."""

from planner.probe.context import ProbeContext
from planner.probe.gpu_bench import GpuFindings
from planner.probe.nvml import Inventory
from planner.probe.sizes import FULL
from runtime.device import available_ram_bytes
from runtime.errors import WorkerFailed

TASK = "planner.probe.gpu_torch:measure_task"


def measure(context: ProbeContext, gpus: Inventory | None) -> list[GpuFindings]:
    """Measure the GPUs that the driver lists; a crash leaves a note and the rest of the probe.

    Args:
        context: the probe; its team's first process makes the CUDA contexts.
        gpus: from `inventory`, or None.
    """
    if gpus is None:
        return []
    quick, room = context.sizes.name != FULL.name, available_ram_bytes()
    try:
        found = context.team.run(TASK, ranks=1, quick=quick, host_bytes=room)[0]
    except WorkerFailed as error:
        context.notes.append(f"GPUs: not measured: {error}")
        return []
    if isinstance(found, str):
        context.notes.append(found)
        return []
    return found
