"""`gnnplan report`: a plan as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from planner.commands.common import JsonFlag, console, emit_json
from planner.errors import SettingsError
from planner.machine import MachineModel
from runtime.codec import write_text_atomically
from runtime.errors import InputError
from runtime.plan import Plan, load_plan
from runtime.report import REPORT_FILE, RunReport, load_report


def register(parent: typer.Typer) -> None:
    """Add the verb to the top level."""
    parent.command("report")(report_command)


def report_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    machine: Annotated[
        str | None,
        typer.Option(help="Machine file or preset; default: the one the plan was made for."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Folder with a run's report.json; default: the plan's own, if any."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a plan as one self-contained page: pictures, tables, reasons."""
    from planner.report.page import report_html

    found = load_plan(plan)
    if out.is_dir():
        raise InputError(f"{out}: expected a file to write the page to, found a folder")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: expected a folder to write the page in, found none")
    model = _machine(found, machine)
    measured = _run_report(plan, run)
    write_text_atomically(out, report_html(found, model, measured))
    result = {
        "file": str(out),
        "plan_id": found.plan_id,
        "machine_drawn": model is not None,
        "measured": measured is not None,
    }
    if as_json:
        emit_json(result)
        return
    drawn = "" if model else "; its machine was not at hand (name it with --machine)"
    console().print(f"{out}: plan {found.plan_id[:12]}{drawn}", markup=False, soft_wrap=True)


def _machine(plan: Plan, named: str | None) -> MachineModel | None:
    """The named machine, or the one the plan was made for.

    Raises:
        MachineError: the named one cannot be read.
        SettingsError: the named one is another machine.
    """
    from planner.commands.machines import find_machine
    from planner.report.machine import machine_of

    if named is None:
        return machine_of(plan)
    found = find_machine(named)
    if found.fingerprint != plan.machine.fingerprint:
        raise SettingsError(
            f"--machine {named}: expected the machine of the plan ({plan.machine.name}), "
            f"found {found.name}; leave the option out or name that one"
        )
    return found


def _run_report(plan: Path, run: Path | None) -> RunReport | None:
    if run is not None:
        return load_report(run.parent if run.name == REPORT_FILE else run)
    return load_report(plan) if (plan / REPORT_FILE).is_file() else None
