"""Planning jobs, each a function (request, job) that returns the outcome's result.

A job's graph, machine and settings are checked again before they open.
"""

from pathlib import Path
from typing import Any

from gnnplan.api.jobs.events import JobContext
from gnnplan.api.jobs.recording import PLAN_FOLDER, write_result
from gnnplan.api.requests import graph_fingerprint, request_key
from gnnplan.api.security import dataset_folder
from gnnplan.planner.machine.model import MachineModel, load_machine
from gnnplan.planner.pipeline import plan, searches_for
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.cache import load_record
from gnnplan.planner.progress import Progress, portion
from gnnplan.planner.queries.calibrate import load_calibration
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.plan.io import load_plan

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
        from gnnplan.planner.probe.probe import load_or_probe

        return load_or_probe(quick=False, progress=progress)
    if "preset" in machine:
        return load_preset(machine["preset"])
    return load_machine(Path(machine["file"]))


def factors_of(request: dict[str, Any], machine: MachineModel, graph: str) -> dict[str, float]:
    """What `compare` has learnt of the machine for the graph of that fingerprint, if asked for."""
    return load_calibration(machine.fingerprint).factors(graph) if request["calibrated"] else {}


def make_plan(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Plan into the job's folder."""
    graph, settings = graph_of(request), settings_of(request)
    job.progress("machine", 0.0)
    machine = machine_of(request, portion(job.progress, 0.0, PROBED))
    fingerprint = graph_fingerprint(graph)
    factors = factors_of(request, machine, fingerprint)
    made = plan(
        graph,
        settings,
        machine=machine,
        out=job.folder / PLAN_FOLDER,
        progress=portion(job.progress, PROBED, 1.0),
        calibrate=bool(request["calibrated"]),
    )
    key = request_key(fingerprint, machine, settings, factors)
    return {"plan_id": made.plan_id, "request_key": key}


def profile_graph(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Draw batches and time the model, or read what was measured before."""
    from gnnplan.planner.search.samplers import with_samplers

    graph = open_graph(graph_of(request))
    machine = machine_of(request, portion(job.progress, 0.0, PROBED))
    each_sampler = with_samplers(graph, settings_of(request)).by_sampler()
    search = searches_for(
        graph, each_sampler, machine, progress=portion(job.progress, PROBED, 1.0)
    )[0]
    numbers = search.request.profile
    write_result(job, numbers)
    return {
        "profile_id": codec.content_hash(numbers)[:32],
        "graph": graph.name,
        "graph_fingerprint": graph.fingerprint,
        "machine": machine.name[:128],
    }


def simulate_plan(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Count exactly what the batches read, and model their time."""
    from gnnplan.planner.queries.simulate import simulate

    folder = Path(request["plan_folder"])
    if request["machine"] is None:
        machine = load_record(load_plan(folder)).machine
    else:
        machine = machine_of(request, job.progress)
    found = simulate(folder, machine, batches=request["batches"], progress=job.progress)
    write_result(job, found)
    return {}


def change_plan(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Plan again from the cached profile with something changed; nothing is measured."""
    from gnnplan.planner.queries.whatif import cheapest_for, whatif

    made, changes = load_plan(Path(request["plan_folder"])), request["changes"]
    target = request["target_epoch_seconds"]
    if target is None:
        write_result(job, whatif(made, changes))
    else:
        write_result(job, cheapest_for(made, target, changes))
    return {}


def hold_policy(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Hold the policy against the plan, from the cached profile."""
    from gnnplan.planner.queries.whatif import why_not

    write_result(job, why_not(load_plan(Path(request["plan_folder"])), request["policy"]))
    return {}
