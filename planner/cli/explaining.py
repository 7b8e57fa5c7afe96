"""`gnnplan simulate`, `why-not`, `diff`, `whatif`, and `report`: questions about a plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as Grid

from gnnplan.planner.cli import remote
from gnnplan.planner.cli.common import (
    JsonFlag,
    bytes_text,
    console,
    emit_json,
    print_text,
    progress_bar,
    seconds_text,
)
from gnnplan.planner.cli.remote import ServerOption
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.runtime.codec import write_text_atomically
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import REPORT_FILE, RunReport, load_report

if TYPE_CHECKING:
    from gnnplan.planner.queries.diff import PlanDiff
    from gnnplan.planner.queries.simulate import Simulation
    from gnnplan.planner.queries.whatif import Cheapest, WhatIf, WhyNot

PlanArgument = Annotated[Path, typer.Argument(help="Plan folder (with --server also an id).")]


def register(parent: typer.Typer) -> None:
    """Add the verbs to the top level."""
    parent.command("simulate")(simulate_command)
    parent.command("why-not")(why_not_command)
    parent.command("diff")(diff_command)
    parent.command("whatif")(whatif_command)
    parent.command("report")(report_command)


def simulate_command(
    plan: PlanArgument,
    machine: Annotated[
        str | None,
        typer.Option(help="Machine file or preset; without it the machine the plan was made for."),
    ] = None,
    batches: Annotated[
        int | None, typer.Option(help="Optimiser steps from epoch 0 on; default: one epoch.")
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Count exactly what the plan's batches read, and model their time on a machine."""
    if server is None:
        result = _simulated(plan, machine, batches)
    else:
        with remote.service(server) as client, progress_bar("simulate") as progress:
            name = remote.machine_name(client, machine)
            result = client.plans.simulate(
                remote.plan_id(plan), machine=name, batches=batches, progress=progress
            )
    if as_json:
        emit_json(result)
        return
    print_simulation(result)


def _simulated(plan: Path, machine: str | None, batches: int | None) -> "Simulation":
    found = load_plan(plan)
    if machine is None:
        from gnnplan.planner.profile.cache import load_record

        model = load_record(found).machine
    else:
        from gnnplan.planner.probe.presets import find_machine

        model = find_machine(machine)
    from gnnplan.planner.queries.simulate import simulate

    with progress_bar("simulate") as progress:
        return simulate(plan, model, batches=batches, progress=progress)


def print_simulation(result: "Simulation") -> None:
    """Print what was counted by rank, link and device, and the modelled times."""
    screen = console()
    counted = Grid("rank", "source", "rows", "bytes", box=None, title="counted")
    for rank in result.ranks:
        for kind, rows in rank.rows_by_source.items():
            size = bytes_text(float(rank.bytes_by_source[kind]))
            counted.add_row(str(rank.rank), kind, f"{rows}", size)
        for kind, lists in rank.lists_by_source.items():
            size = bytes_text(float(rank.list_bytes_by_source[kind]))
            counted.add_row(str(rank.rank), f"lists: {kind}", f"{lists}", size)
    screen.print(counted)
    links = Grid("link", "bytes", "moved", "PCIe lines", "modelled", box=None)
    for name, use in result.links.items():
        lines = f"{use.pcie_lines:.0f}" if use.pcie_lines else ""
        moved, busy = bytes_text(use.moved_bytes), seconds_text(use.seconds)
        links.add_row(name, bytes_text(use.bytes), moved, lines, busy)
    screen.print(links)
    devices = Grid("rank", "processor", "read", "served", "PCIe lines", "busiest link", box=None)
    for rank, use in enumerate(result.devices):
        lines = f"{use.pcie_lines:.0f}" if use.pcie_lines else ""
        read = bytes_text(sum(use.read_bytes.values()))
        busy = f"{use.busiest_link} {seconds_text(use.link_seconds)}" if use.busiest_link else ""
        row = (str(rank), use.processor, read, bytes_text(use.served_bytes), lines, busy)
        devices.add_row(*row)
    screen.print(devices)
    times = result.times
    moving = f"{seconds_text(times.movement_seconds)} per step on {times.busiest_link}"
    screen.print(f"{result.batches} steps on {result.machine}; busiest link, modelled: {moving}")
    if times.step_seconds is not None:
        screen.print(f"modelled step {seconds_text(times.step_seconds)}")
        for stage, seconds in times.stages.items():
            screen.print(f"  {stage}: {seconds_text(seconds)}")
    for source, words in {**result.provenance, **times.provenance}.items():
        print_text(f"  {source}: {words}")
    for note in result.notes:
        print_text(f"note: {note}")


def why_not_command(
    plan: PlanArgument,
    policy: Annotated[str, typer.Option(help="Placement policy that the plan did not take.")],
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Price the plan with another placement policy, and say what it would cost."""
    found: WhyNot
    if server is None:
        made = load_plan(plan)
        from gnnplan.planner.queries.whatif import why_not

        found = why_not(made, policy)
    else:
        with remote.service(server) as client, progress_bar("why-not") as progress:
            found = client.plans.why_not(remote.plan_id(plan), policy, progress=progress)
    if as_json:
        emit_json(found)
        return
    from gnnplan.planner.queries.whatif import render_why_not

    print_text(render_why_not(found))


def diff_command(
    plan_a: PlanArgument,
    plan_b: PlanArgument,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What two plans decide and predict differently."""
    from gnnplan.planner.queries.diff import diff, render

    found: PlanDiff
    if server is None:
        found = diff(load_plan(plan_a), load_plan(plan_b))
    else:
        with remote.service(server) as client:
            found = client.plans.diff(remote.plan_id(plan_a), remote.plan_id(plan_b))
    if as_json:
        emit_json(found)
        return
    print_text(render(found))


def whatif_command(
    plan: PlanArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="KEY=VALUE, repeatable: link.NAME.bandwidth=x2, memory.NAME.capacity=16GiB, "
            "devices=1, device_memory=8GiB, host_memory=64GiB, policy=NAME.",
        ),
    ] = None,
    target_epoch_seconds: Annotated[
        float | None,
        typer.Option(help="Instead: fewest devices and least memory for an epoch this short."),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Plan again from the cached profile with something changed; nothing is measured or written."""
    if target_epoch_seconds is not None:
        if not target_epoch_seconds > 0:
            raise SettingsError(
                f"--target-epoch-seconds: expected seconds above 0, found {target_epoch_seconds:g}"
            )
        answer = _cheapest(plan, target_epoch_seconds, changes or [], server)
        if as_json:
            emit_json(answer)
            return
        from gnnplan.planner.queries.whatif import render_cheapest

        print_text(render_cheapest(answer))
        return
    if not changes:
        raise SettingsError(
            "whatif: expected --set KEY=VALUE or --target-epoch-seconds, found none"
        )
    result = _changed(plan, changes, server)
    if as_json:
        emit_json(result)
        return
    from gnnplan.planner.queries.whatif import render_whatif

    print_text(render_whatif(result))


def _cheapest(plan: Path, target: float, changes: list[str], server: str | None) -> "Cheapest":
    if server is None:
        made = load_plan(plan)
        from gnnplan.planner.queries.whatif import cheapest_for

        return cheapest_for(made, target, changes)
    with remote.service(server) as client, progress_bar("whatif") as progress:
        return client.plans.cheapest(remote.plan_id(plan), target, changes, progress=progress)


def _changed(plan: Path, changes: list[str], server: str | None) -> "WhatIf":
    if server is None:
        made = load_plan(plan)
        from gnnplan.planner.queries.whatif import whatif

        return whatif(made, changes)
    with remote.service(server) as client, progress_bar("whatif") as progress:
        return client.plans.what_if(remote.plan_id(plan), changes, progress=progress)


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
    found = load_plan(plan)
    from gnnplan.planner.report.page import report_html

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
    from gnnplan.planner.probe.presets import find_machine
    from gnnplan.planner.report.page import machine_of

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
