"""Every part of a probe of GPUs, measured in this process."""

import math
import time

from gnnplan.planner.probe.gpu.inventory import Inventory
from gnnplan.planner.probe.gpu.measure import GpuDevice, GpuFindings, GpuSizes
from gnnplan.planner.probe.gpu.parts import measure_part, measure_parts, survey_of
from gnnplan.planner.probe.grid import Budget
from gnnplan.planner.probe.timing import Clock


def measure_gpus(
    device: GpuDevice,
    sizes: GpuSizes,
    *,
    inventory: Inventory | None = None,
    seconds: float = math.inf,
    clock: Clock = time.perf_counter,
) -> list[GpuFindings]:
    """Measure every GPU of a device, and all pairs, in this process."""
    survey = survey_of(device)
    return measure_parts(
        survey,
        inventory,
        Budget(seconds, clock),
        lambda part, left: measure_part(device, sizes, part, seconds=left, clock=clock),
    )
