"""`gnnplan report`: a plan as one HTML page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from planner.cli import remote
from planner.cli.common import JsonFlag, emit_json, print_text
from planner.cli.remote import ServerOption
from planner.errors import SettingsError
from planner.machine.model import MachineModel
from runtime.codec import write_text_atomically
from runtime.errors import InputError
from runtime.plan.io import load_plan
from runtime.plan.schema import Plan
from runtime.report import REPORT_FILE, RunReport, load_report

TOPOLOGY = "Links of the machine, as a table"
MEASURED = '<h2 id="run">'
"""What stands on a page whose machine is drawn, and on one with measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A plan's page, and what is on it."""

    html: str
    plan_id: str
    machine_drawn: bool
    measured: bool


def register(parent: typer.Typer) -> None:
    """Add the verb to the top level."""
    parent.command("report")(report_command)


def report_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder (with --server also an id).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    machine: Annotated[
        str | None,
        typer.Option(help="Machine file or preset; default: the one the plan was made for."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a run's report.json (with --server: a run's id); default: the "
            "plan's own, if any."
        ),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a plan as one self-contained page: pictures, tables, reasons."""
    if out.is_dir():
        raise InputError(f"{out}: expected a file to write the page to, found a folder")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: expected a folder to write the page in, found none")
    if server is None:
        page = _page(plan, machine, run)
    else:
        remote.refuse_local(server, {"--machine": machine is not None})
        page = _remote_page(server, plan, run)
    write_text_atomically(out, page.html)
    if as_json:
        emit_json(
            {
                "file": str(out),
                "plan_id": page.plan_id,
                "machine_drawn": page.machine_drawn,
                "measured": page.measured,
            }
        )
        return
    drawn = "" if page.machine_drawn else "; its machine was not at hand (name it with --machine)"
    print_text(f"{out}: plan {page.plan_id[:12]}{drawn}")


def _page(plan: Path, machine: str | None, run: Path | None) -> Page:
    from planner.report.page import report_html

    found = load_plan(plan)
    model, measured = _machine(found, machine), _run_report(plan, run)
    return Page(
        html=report_html(found, model, measured),
        plan_id=found.plan_id,
        machine_drawn=model is not None,
        measured=measured is not None,
    )


def _remote_page(server: str, plan: Path, run: Path | None) -> Page:
    plan_id, html = remote.report_page(server, plan, run)
    return Page(
        html=html,
        plan_id=plan_id,
        machine_drawn=TOPOLOGY in html,
        measured=MEASURED in html,
    )


def _machine(plan: Plan, named: str | None) -> MachineModel | None:
    """The named machine, or the one the plan was made for.

    Raises:
        MachineError: the named one cannot be read.
        SettingsError: the named one is another machine.
    """
    from planner.probe.presets import find_machine
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
        return load_report(run)
    return load_report(plan) if (plan / REPORT_FILE).is_file() else None
