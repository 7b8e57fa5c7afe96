"""Which of the machine's GPUs torch measured: by UUID, never by number.

torch and the driver number GPUs each in its own order, and torch shows what CUDA shows alone. Ranks
are placed by torch's numbers, so that the machine's GPUs are put into its order.
"""

from collections.abc import Sequence
from dataclasses import replace

from planner.machine import MachineModel, Processor
from planner.probe.gpu_bench import GpuFindings, Points


def matched(
    machine: MachineModel, findings: Sequence[GpuFindings]
) -> tuple[MachineModel, list[GpuFindings]]:
    """The machine with the GPUs that torch shows, and their findings by the driver's numbers.

    Args:
        machine: as the driver describes it.
        findings: by torch's numbers; with none, or none that is this machine's, it stays as it is.

    Returns:
        The machine, with its GPUs in torch's order, and a note for each that torch does not show or
        that the driver does not list; and the findings of those GPUs.
    """
    pairs = _pairs(machine, findings)
    known = {found.gpu for found, _ in pairs}
    notes = [
        f"torch shows GPU {found.uuid}, which is none of this machine's: what was measured of it "
        "is not used"
        for found in findings
        if found.gpu not in known
    ]
    if not pairs:
        return replace(machine, notes=[*machine.notes, *notes]), []
    shown = [gpu for _, gpu in sorted(pairs, key=lambda pair: pair[0].gpu)]
    hidden = [gpu for gpu in machine.gpus if gpu.host == 0 and gpu not in shown]
    notes += [f"{gpu.name}: torch does not show it; left out of the machine" for gpu in hidden]
    machine = replace(_with_gpus(machine, shown, hidden), notes=[*machine.notes, *notes])
    return machine, _renumbered(pairs)


def _pairs(
    machine: MachineModel, findings: Sequence[GpuFindings]
) -> list[tuple[GpuFindings, Processor]]:
    """Findings with their GPUs, in the findings' order."""
    here = {_bare(gpu.uuid): gpu for gpu in machine.gpus if gpu.host == 0}
    found = {f.gpu: here[_bare(f.uuid)] for f in findings if _bare(f.uuid) in here}
    # Of a divided GPU whose slices the driver does not name, torch knows the slice alone.
    divided = [gpu for gpu in here.values() if is_divided(gpu) and gpu not in found.values()]
    others = [f.gpu for f in findings if f.gpu not in found]
    found |= dict(zip(others, divided, strict=False))
    return [(f, found[f.gpu]) for f in findings if f.gpu in found]


def is_divided(gpu: Processor) -> bool:
    """Whether this is a slice of a GPU (MIG), or stands for one."""
    return gpu.uuid.startswith("MIG-") or " MIG" in gpu.model


def _bare(uuid: str) -> str:
    """A UUID without what it is of: torch calls slices GPUs."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _with_gpus(
    machine: MachineModel, shown: list[Processor], hidden: list[Processor]
) -> MachineModel:
    """The machine with the first host's GPUs in that order, without the hidden ones."""
    gone = {gpu.name for gpu in hidden} | {gpu.memory for gpu in hidden}
    others = [p for p in machine.processors if p.kind != "cuda" or p.host != 0]
    before = [p for p in others if p.host == 0]

    def left(cover: list[list[str]]) -> list[list[str]]:
        cliques = [[name for name in clique if name not in gone] for clique in cover]
        return [clique for clique in cliques if clique]

    return replace(
        machine,
        processors=[*before, *shown, *(p for p in others if p.host != 0)],
        memories=[m for m in machine.memories if m.name not in gone],
        links=[x for x in machine.links if not {x.source, x.target} & gone],
        cliques=left(machine.cliques),
        other_covers=[left(cover) for cover in machine.other_covers],
    )


def _renumbered(pairs: Sequence[tuple[GpuFindings, Processor]]) -> list[GpuFindings]:
    """The findings by the driver's numbers; points with GPUs that are none here are left out."""
    joined = {found.gpu: int(gpu.name.removeprefix("gpu")) for found, gpu in pairs}

    def of(points: Points) -> Points:
        return {(joined[o], *rest): m for (o, *rest), m in points.items() if o in joined}

    return [
        replace(
            found,
            gpu=joined[found.gpu],
            peer_copy=of(found.peer_copy),
            peer_message=of(found.peer_message),
            peer_gather=of(found.peer_gather),
        )
        for found, _ in pairs
    ]
