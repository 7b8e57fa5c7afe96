"""`gnnplan plan` and `gnnplan explain`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnplan.planner.cli import remote
from gnnplan.planner.cli.common import JsonFlag, console, emit_json, print_text, progress_bar
from gnnplan.planner.cli.options import with_options
from gnnplan.planner.cli.remote import ServerOption
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.gpu.inventory import gpu_notes
from gnnplan.planner.probe.presets import choose_machine
from gnnplan.planner.request import check_machine_name, check_output, check_request
from gnnplan.planner.settings import PlanSettings, change_settings
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan


def register(parent: typer.Typer) -> None:
    """Add the verbs to the top level."""
    parent.command("plan")(plan_command)
    parent.command("explain")(explain_command)


def _asked(values: Mapping[str, Any]) -> PlanSettings:
    """The request of the flags' values; full-graph training takes every neighbour of any hop."""
    asked = dict(values)
    if asked["mode"] == "full-graph":
        hops = asked.get("num_layers", len(asked["fanouts"]))
        asked["fanouts"] = [-1] * hops
    return change_settings(PlanSettings(), asked)


@with_options(settings=_asked)
def plan_command(
    graph: Annotated[Path, typer.Argument(help="Dataset folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Plan folder to write.")],
    *,
    machine: Annotated[
        str | None,
        typer.Option(help="Machine file or preset; without it this machine is probed (cached)."),
    ] = None,
    settings: PlanSettings,
    calibrated: Annotated[
        bool,
        typer.Option("--calibrated", help="Scale stages by what compare learnt on this machine."),
    ] = False,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the plan with the lowest predicted time per step."""
    if server is not None:
        check_output(output)
        if machine is not None and not remote.is_upload(machine):
            check_machine_name(machine)
        made = remote.make_plan(
            server, graph, output, settings, machine=machine, calibrated=calibrated
        )
        print_plan(made, output, as_json=as_json)
        return
    make_plan(graph, output, settings, machine=machine, as_json=as_json, calibrated=calibrated)


def make_plan(
    graph: Path,
    output: Path,
    settings: PlanSettings,
    *,
    machine: str | None,
    as_json: bool,
    calibrated: bool = False,
) -> None:
    """Plan, write the folder and print the explanation."""
    check_request(graph, settings, out=output, machine=machine, calibrate=calibrated)
    from gnnplan.planner.pipeline import plan

    model = machine_for_planning(machine, graph)
    with progress_bar("plan") as progress:
        result = plan(
            graph, settings, machine=model, out=output, progress=progress, calibrate=calibrated
        )
    print_plan(result, output, as_json=as_json)


def print_plan(result: Plan, output: Path, *, as_json: bool) -> None:
    """Print a plan that was written: as it is, or explained."""
    if as_json:
        emit_json(result)
        return
    print_explanation(output)
    console().print(f"written to {output}", markup=False, soft_wrap=True)


def machine_for_planning(name: str | None, graph: Path | None = None) -> MachineModel:
    """Choose the machine, and print to stderr what a reader must know of it.

    That is what its GPUs' notes say, and what a probe had no time for. Arguments and errors are
    those of `choose_machine`.
    """
    with progress_bar("probe") as progress:
        machine = choose_machine(name, graph, progress=progress)
    late = [note for note in machine.notes if note.startswith("time: ")]
    for note in [*late, *gpu_notes(machine.notes)]:
        print_text(f"note: {note}", as_json=True)
    return machine


def explain_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder (with --server also an id).")],
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Where the time goes, where rows live, and why the runner-up lost."""
    from gnnplan.planner.queries.explain import explain, render

    found = explain(load_plan(plan)) if server is None else remote.explain(server, plan)
    if as_json:
        emit_json(found)
        return
    print_text(render(found))


def print_explanation(folder: Path) -> None:
    """Print a plan's explanation."""
    from gnnplan.planner.queries.explain import explain, render

    print_text(render(explain(load_plan(folder))))
