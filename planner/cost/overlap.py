"""How much of an exchange compute hides: as measured, and nothing where it was not.

A table holds for what it was measured on: `overlap_eta` for ranks on the cores of one host,
`gpu_overlap_eta` for GPUs of one host. Between hosts neither does.
"""

from planner.candidate import Candidate
from planner.machine import MachineModel

TABLES = {"cpu": "overlap_eta", "cuda": "gpu_overlap_eta"}
"""By what ranks compute on."""
UNMEASURED = "how far compute hides it was not measured"


def measured_eta(machine: MachineModel, candidate: Candidate) -> float | None:
    """Eta of the candidate's exchanges; None where it was not measured.

    Source: docs/modelling.md 5.
    """
    on = {gpu.host for gpu in machine.gpus if gpu.name in candidate.gpus}
    if candidate.hosts > 1 or len(on) > 1:
        return None
    table = machine.tables.get(TABLES[candidate.kind])
    if table is None:
        return None
    here = {"ranks": float(candidate.num_ranks), "threads": float(candidate.threads.compute)}
    return table.at(**{axis: here[axis] for axis in table.axes})


def hidden_share(machine: MachineModel, candidate: Candidate) -> float:
    """eta, and 0 where it was not measured: nothing is taken to be hidden."""
    return measured_eta(machine, candidate) or 0.0
