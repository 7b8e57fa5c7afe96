"""`--server URL`: a service does the work of a command, whose output stays the same."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.planner.cli.common import progress_bar
from gnnplan.planner.errors import SettingsError
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import Plan

if TYPE_CHECKING:
    from gnnplan.planner.client import Client, Event
    from gnnplan.planner.queries.compare import Comparison
    from gnnplan.planner.settings import PlanSettings
    from gnnplan.runtime.launch.config import TrainOptions
    from gnnplan.runtime.report import RunReport

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        help="Address of a gnnplan service that does the work, such as http://127.0.0.1:8000; its "
        "key is taken from $GNNPLAN_API_KEY.",
    ),
]


@contextmanager
def service(url: str) -> "Generator[Client]":
    """Open a client of the service."""
    from gnnplan.planner.client import Client

    with Client(url) as client:
        yield client


def plan_id(plan: Path) -> str:
    """Return the id of a plan of the service, given as such or by a folder with that plan."""
    from gnnplan.runtime.plan.io import PLAN_FILE, load_plan

    if not (plan / PLAN_FILE).is_file() and re.fullmatch(r"[0-9a-f]{32}", str(plan)):
        return str(plan)
    return load_plan(plan).plan_id


def is_upload(machine: str) -> bool:
    """Return whether a machine is named by the id that a service gave it."""
    return re.fullmatch(r"[0-9a-f]{32}", machine) is not None


def machine_name(client: "Client", machine: str | None) -> str | None:
    """Return the service's name of a machine: a preset, or an id; a file is uploaded first."""
    from gnnplan.planner.probe.presets import find_machine, is_preset

    if machine is None or is_preset(machine) or is_upload(machine):
        return machine
    return client.machines.upload(find_machine(machine)).id


def refuse_local(server: str, given: dict[str, bool]) -> None:
    """Refuse options that concern this machine alone."""
    for option, was_given in given.items():
        if was_given:
            raise SettingsError(
                f"{option}: expected no such option with --server {server}, which runs the command "
                "by its own settings; leave one of the two out"
            )


def plan(
    server: str,
    graph: Path,
    output: Path,
    settings: "PlanSettings",
    *,
    machine: str | None,
    calibrated: bool,
) -> Plan:
    """Let the service plan, and write the plan's folder here."""
    from gnnplan.planner.queries.rivals import save_runners_up

    with service(server) as client, progress_bar("plan") as progress:
        made = client.plans.make(
            str(graph),
            settings,
            machine=machine_name(client, machine),
            calibrated=calibrated,
            progress=progress,
        )
        progress("writing the plan", 0.95)
        save_runners_up(client.plans.explain(made.plan_id).runners_up, made.plan_id)
        return client.plans.download(made.plan_id, output)


def train(server: str, plan: Path, options: "TrainOptions", on_event: Any) -> "RunReport":
    """Let the service train, and write its report into the plan's folder, if there is one."""
    from gnnplan.runtime.plan.io import PLAN_FILE
    from gnnplan.runtime.report import REPORT_FILE

    def relay(event: "Event") -> None:
        if event.name not in ("log", "state", "end"):
            on_event({"event": event.name, **event.data})

    with service(server) as client:
        job = client.runs.start(plan_id(plan), **asdict(options))
        report = client.runs.wait(job, on_event=relay, cancel_on_interrupt=True)
    if (plan / PLAN_FILE).is_file():
        codec.write_text_atomically(plan / REPORT_FILE, codec.dumps(report))
    return report


def report_page(server: str, plan: Path, run: Path | None) -> tuple[str, str]:
    """Return the id and the page of a plan, with measurements of a run; None: the newest."""
    with service(server) as client:
        wanted = plan_id(plan)
        if run is None:
            return wanted, client.plans.artefact(wanted, "report.html").decode()
        return wanted, client.runs.page(str(run)).decode()


def trace(server: str, plan: Path, run: Path | None) -> str:
    """Return the trace of a plan with the steps of a run; None: its newest."""
    with service(server) as client:
        if run is None:
            return client.plans.artefact(plan_id(plan), "trace.json").decode()
        return client.runs.trace(str(run)).decode()


def comparison(server: str, plan: Path, run: Path | None) -> "Comparison":
    """Compare predicted with measured seconds of a run; None: the newest successful one."""
    with service(server) as client:
        if run is not None:
            return client.runs.comparison(str(run))
        wanted = plan_id(plan)
        newest = next(client.runs.list(plan=wanted, state="succeeded"), None)
        if newest is None:
            raise SettingsError(
                f"expected a run of plan {wanted[:12]} that has succeeded at {server}, found none; "
                "train it there first, or name a run with --run"
            )
        return client.runs.comparison(newest.id)
