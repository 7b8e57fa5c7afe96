"""What planning jobs are given: a graph, a machine and settings, checked again before they open."""

import json
from pathlib import Path
from typing import Any

from api.jobs.events import JobContext
from api.jobs.recording import RESULT_FILE
from api.security.requests import dataset_folder
from planner.machine.model import MachineModel, load_machine
from planner.probe.presets import load_preset
from planner.progress import Progress
from planner.queries.calibrate import load_calibration
from planner.settings import PlanSettings
from runtime import codec

PROBED = 0.4
"""Of the progress of a job: the probe of the machine, where there was none yet."""


def graph_of(request: dict[str, Any]) -> Path:
    """The dataset's folder; what has become a way out of the roots since is refused."""
    return dataset_folder([Path(root) for root in request["roots"]], request["graph"])


def settings_of(request: dict[str, Any]) -> PlanSettings:
    """The request's settings."""
    return codec.decode(PlanSettings, request["settings"])


def machine_of(request: dict[str, Any], progress: Progress) -> MachineModel:
    """A preset, an uploaded machine, or the one the service runs on, probed once."""
    machine = request["machine"]
    if machine is None:
        from planner.probe.probe import load_or_probe

        return load_or_probe(quick=False, progress=progress)
    if "preset" in machine:
        return load_preset(machine["preset"])
    return load_machine(Path(machine["file"]))


def factors_of(request: dict[str, Any], machine: MachineModel, graph: str) -> dict[str, float]:
    """What `compare` has learnt of the machine for the graph of that fingerprint, if asked for."""
    return load_calibration(machine.fingerprint).factors(graph) if request["calibrated"] else {}


def write_result(job: JobContext, document: Any) -> None:
    """Write a job's document for the service to keep."""
    # In the document's own order, which is the one it is shown in.
    text = json.dumps(codec.to_plain(document), allow_nan=False)
    codec.write_text_atomically(job.folder / RESULT_FILE, text)
