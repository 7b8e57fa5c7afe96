"""The machine a plan was made for, where it can still be had."""

from planner.errors import MachineError
from planner.machine.model import MachineModel
from planner.probe.presets import is_preset, load_preset
from planner.profile.cache import load_record, record_path
from planner.units import counted
from runtime.plan.schema import Plan


def machine_line(machine: MachineModel) -> str:
    """What a machine has, in a line.

    >>> machine_line(load_preset("siton"))
    '8 GPUs (NVIDIA A100-PCIE-40GB), 4 cliques, 96 cores'
    """
    parts = list[str]()
    if machine.gpus:
        models = dict.fromkeys(gpu.model for gpu in machine.gpus)
        parts.append(f"{counted(len(machine.gpus), 'GPU')} ({', '.join(models)})")
    if 0 < len(machine.cliques) < len(machine.gpus):  # else each is on its own
        parts.append(counted(len(machine.cliques), "clique"))
    return ", ".join([*parts, counted(machine.num_cores, "core")])


def machine_of(plan: Plan) -> MachineModel | None:
    """The machine kept with the planning request, or the same preset; None where neither is here.

    Raises:
        SettingsError: the kept request is damaged.
    """
    if record_path(plan.plan_id).is_file():
        return load_record(plan).machine
    if not is_preset(plan.machine.name):
        return None
    try:
        found = load_preset(plan.machine.name)
    except MachineError:
        return None
    return found if found.calibration == plan.machine.calibration else None
