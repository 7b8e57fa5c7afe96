"""Work of planning jobs; each function takes the request and the job, and returns a result.

Graph, machine and settings are checked again when a job begins.
"""

from pathlib import Path
from typing import Any

from gnnplan.api.jobs.process import JobContext
from gnnplan.api.jobs.recording import PLAN_FOLDER, write_result
from gnnplan.api.requests import graph_fingerprint, request_key
from gnnplan.api.security import dataset_folder
from gnnplan.planner.machine.model import MachineModel, load_machine
from gnnplan.planner.pipeline import searches_for
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.probe import cached_machine
from gnnplan.planner.profile.cache import load_record
from gnnplan.planner.queries.calibrate import load_calibration
from gnnplan.planner.refine import plan_in_time
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import Progress, portion
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.plan.io import load_plan

PROBED = 0.4
"""Share of a job's progress for the probe of this machine."""


def graph_of(request: dict[str, Any]) -> Path:
    """Return the dataset's folder; refuse one that leads out of the roots by now."""
    return dataset_folder([Path(root) for root in request["roots"]], request["graph"])


def settings_of(request: dict[str, Any]) -> PlanSettings:
    """Return the request's settings."""
    return codec.decode(PlanSettings, request["settings"])


def machine_of(request: dict[str, Any], progress: Progress) -> MachineModel:
    """Return a preset, an uploaded machine, or this machine, probed where it is unknown."""
    machine = request["machine"]
    if machine is None:
        from gnnplan.planner.probe.probe import load_or_probe

        return load_or_probe(quick=False, progress=progress)
    if "preset" in machine:
        return load_preset(machine["preset"])
    return load_machine(Path(machine["file"]))


def factors_of(request: dict[str, Any], machine: MachineModel, graph: str) -> dict[str, float]:
    """Return the machine's calibration for a graph's fingerprint, if the request wants it."""
    return load_calibration(machine.fingerprint).factors(graph) if request["calibrated"] else {}


def make_plan(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Make a plan in the job's folder."""
    graph, settings = graph_of(request), settings_of(request)
    job.progress("machine", 0.0)
    reached = [0.0]

    def report(words: str, share: float) -> None:
        reached[0] = share
        job.progress(words, share)

    named = None if request["machine"] is None else machine_of(request, report)
    made = plan_in_time(
        graph,
        settings,
        machine=named,
        out=job.folder / PLAN_FOLDER,
        progress=report,
        say=lambda words: job.progress(words, reached[0]),
        calibrate=bool(request["calibrated"]),
    )
    fingerprint = graph_fingerprint(graph)
    machine = named or cached_machine(quick=not settings.thorough) or load_record(made).machine
    factors = factors_of(request, machine, fingerprint)
    key = request_key(graph, fingerprint, machine, settings, factors)
    return {"plan_id": made.plan_id, "request_key": key}


def profile_graph(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Profile a graph, or read its cached profile."""
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
    """Count what a plan's batches read, and model their time."""
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
    """Plan again from the cached profile with something changed."""
    from gnnplan.planner.queries.cheapest import cheapest_for
    from gnnplan.planner.queries.whatif import whatif

    made, changes = load_plan(Path(request["plan_folder"])), request["changes"]
    target = request["target_epoch_seconds"]
    if target is None:
        write_result(job, whatif(made, changes))
    else:
        write_result(job, cheapest_for(made, target, changes))
    return {}


def hold_policy(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Price another policy, or other settings."""
    from gnnplan.planner.queries.why_not import why_not

    made, changes = load_plan(Path(request["plan_folder"])), request.get("changes", [])
    write_result(job, why_not(made, request["policy"], changes))
    return {}
