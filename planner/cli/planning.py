"""`gnnplan plan`, and questions about plans: explain, simulate, why-not, diff, whatif, report."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnplan.planner.cli import remote
from gnnplan.planner.cli.common import (
    Answer,
    JsonFlag,
    ProgressCallback,
    bytes_text,
    console,
    emit_json,
    make_request,
    print_answer,
    print_text,
    progress_bar,
    seconds_text,
    table_of,
    with_options,
)
from gnnplan.planner.cli.remote import ServerOption
from gnnplan.planner.cli.training import check_trace_file, write_trace
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import find_machine
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import counted
from gnnplan.runtime.codec import write_text_atomically
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan

if TYPE_CHECKING:
    from gnnplan.planner.client.client import Plans
    from gnnplan.planner.queries.simulate import Simulation
    from gnnplan.runtime.report import RunReport

PlanArgument = Annotated[Path, typer.Argument(help="Plan folder (with --server also an id).")]
TodayOption = Annotated[
    str | None,
    typer.Option(
        "--today",
        metavar="SYSTEM[:workers=N]",
        help="What you run today, whose epoch is estimated beside the plan's, such as "
        "pyg-loader:workers=8, dgl-uva or quiver; default: pyg-loader on half of the cores.",
    ),
]


def register(parent: typer.Typer) -> None:
    """Add the verbs to the top level."""
    parent.command("plan")(plan_command)
    parent.command("explain")(explain_command)
    parent.command("simulate")(simulate_command)
    parent.command("why-not")(why_not_command)
    parent.command("diff")(diff_command)
    parent.command("whatif")(whatif_command)
    parent.command("report")(report_command)


@with_options(settings=make_request)
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
    today: TodayOption = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the plan with the lowest predicted time per step."""
    if today is not None:
        from gnnplan.planner.queries.rivals import read_today

        read_today(today)
    if server is not None:
        from gnnplan.planner.request import check_machine_name, check_output

        check_output(output)
        if machine is not None and not remote.is_upload(machine):
            check_machine_name(machine)
        made = remote.plan(server, graph, output, settings, machine=machine, calibrated=calibrated)
        if as_json:
            emit_json(made)
            return
        explain_command(Path(made.plan_id), today, server=server)  # its machine, counts are there
        console().print(f"written to {output}", markup=False, soft_wrap=True)
        return
    plan_here(
        graph, output, settings, machine=machine, as_json=as_json, calibrated=calibrated,
        today=today,
    )  # fmt: skip


def plan_here(
    graph: Path,
    output: Path,
    settings: PlanSettings,
    *,
    machine: str | None,
    as_json: bool,
    calibrated: bool = False,
    today: str | None = None,
) -> None:
    """Plan, write the folder and print the explanation."""
    from gnnplan.planner.request import check_request

    check_request(graph, settings, out=output, machine=machine, calibrate=calibrated)
    from gnnplan.planner.profile.cache import load_record
    from gnnplan.planner.refine import plan_in_time

    with progress_bar("plan") as progress:
        result = plan_in_time(
            graph, settings, machine=machine, out=output, progress=progress,
            say=print_aside, calibrate=calibrated,
        )  # fmt: skip
    print_machine_notes(load_record(result).machine)
    print_plan(result, output, as_json=as_json, today=today)


def print_aside(words: str) -> None:
    """Print a line to stderr, beside what stdout carries."""
    print_text(words, as_json=True)


def print_plan(result: Plan, output: Path, *, as_json: bool, today: str | None = None) -> None:
    """Print a written plan as JSON, or explained beside what is run today."""
    if as_json:
        emit_json(result)
        return
    print_explanation(output, today)
    console().print(f"written to {output}", markup=False, soft_wrap=True)


def print_machine_notes(machine: MachineModel) -> None:
    """Print to stderr the notes of a machine that matter for plans."""
    from gnnplan.planner.probe.gpu.inventory import gpu_notes

    late = [note for note in machine.notes if note.startswith("time: ")]
    if len(late) > 1:
        late = [f"{late[0]}; {len(late) - 1} more such notes: gnnplan machine show"]
    for note in [*late, *gpu_notes(machine.notes)]:
        print_aside(f"note: {note}")


def explain_command(
    plan: PlanArgument,
    today: TodayOption = None,
    alternatives: Annotated[
        int | None,
        typer.Option(
            help="How many of the plan's alternatives the text lists, in its order; 0: none; "
            "default: the runner-up and the first that differs in earnest. --json has all.",
        ),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Why this many ranks, what fills memory, what would be faster; where the time goes."""
    if alternatives is not None and alternatives < 0:
        raise SettingsError(f"--alternatives: expected 0 or more, found {alternatives}; correct it")
    from gnnplan.planner.queries.explain import explain, render

    if server is None:
        found = explain(load_plan(plan), today)
    else:
        with remote.service(server) as client:
            found = client.plans.explain(remote.plan_id(plan), today=today)
    print_answer(found, lambda told: render(told, alternatives), as_json=as_json)


def print_explanation(folder: Path, today: str | None = None) -> None:
    """Print the explanation of a plan folder; beside what is run today, if it can be estimated."""
    from gnnplan.planner.queries.explain import explain, render

    plan = load_plan(folder)
    try:
        found = explain(plan, today)
    except SettingsError as error:  # the plan is written: what cannot be estimated is a note
        print_aside(f"note: {error}")
        found = explain(plan)
    print_text(render(found))


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
    if server is not None:
        with remote.service(server) as client, progress_bar("simulate") as progress:
            name = remote.machine_name(client, machine)
            result = client.plans.simulate(
                remote.plan_id(plan), machine=name, batches=batches, progress=progress
            )
    else:
        found = load_plan(plan)
        from gnnplan.planner.profile.cache import load_record
        from gnnplan.planner.queries.simulate import simulate

        model = load_record(found).machine if machine is None else find_machine(machine)
        with progress_bar("simulate") as progress:
            result = simulate(plan, model, batches=batches, progress=progress)
    print_answer(result, print_simulation, as_json=as_json)


def print_simulation(result: "Simulation") -> None:
    """Print what was counted by rank, link and device, and the modelled times."""
    screen = console()
    read = list[tuple[str, ...]]()
    for rank in result.ranks:
        for kind, rows in rank.rows_by_source.items():
            size = bytes_text(float(rank.bytes_by_source[kind]))
            read.append((str(rank.rank), kind, f"{rows}", size))
        for kind, lists in rank.lists_by_source.items():
            size = bytes_text(float(rank.list_bytes_by_source[kind]))
            read.append((str(rank.rank), f"lists: {kind}", f"{lists}", size))
    screen.print(table_of(("rank", "source", "rows", "bytes"), read, title="counted"))
    links = [
        (
            name,
            bytes_text(use.bytes),
            bytes_text(use.moved_bytes),
            f"{use.pcie_lines:.0f}" if use.pcie_lines else "",
            seconds_text(use.seconds),
        )
        for name, use in result.links.items()
    ]
    screen.print(table_of(("link", "bytes", "moved", "PCIe lines", "modelled"), links))
    devices = [
        (
            str(rank),
            use.processor,
            bytes_text(sum(use.read_bytes.values())),
            bytes_text(use.served_bytes),
            f"{use.pcie_lines:.0f}" if use.pcie_lines else "",
            f"{use.busiest_link} {seconds_text(use.link_seconds)}" if use.busiest_link else "",
        )
        for rank, use in enumerate(result.devices)
    ]
    columns = ("rank", "processor", "read", "served", "PCIe lines", "busiest link")
    screen.print(table_of(columns, devices))
    times = result.times
    moving = f"{seconds_text(times.movement_seconds)} per step on {times.busiest_link}"
    steps = f"{counted(result.batches, 'step')} on {result.machine}"
    screen.print(f"{steps}; busiest link, modelled: {moving}")
    if times.step_seconds is not None:
        screen.print(f"modelled step {seconds_text(times.step_seconds)}")
        for stage, seconds in times.stages.items():
            more = times.hidden.get(stage, 0.0)
            beside = f" and {seconds_text(more)} beside the start of the model's kernels"
            screen.print(f"  {stage}: {seconds_text(seconds)}{beside if more else ''}")
    for source, words in {**result.provenance, **times.provenance}.items():
        print_text(f"  {source}: {words}")
    for note in result.notes:
        print_text(f"note: {note}")


def why_not_command(
    plan: PlanArgument,
    policy: Annotated[str, typer.Option(help="Placement policy that the plan did not take.")] = "",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="KEY=VALUE, repeatable, as of gnnplan whatif: a setting of gnnplan plan that it "
            "did not take, such as batching=cooperative, topology=clique or mode=full-graph.",
        ),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Price the plan with another placement or other settings, and say what it would cost."""
    wanted = changes or []
    if not policy and not wanted:
        raise SettingsError("why-not: expected --policy NAME or --set KEY=VALUE, found none")
    asked = _open(plan, server)
    from gnnplan.planner.queries.why_not import render_why_not, why_not

    found = _ask(
        server,
        "why-not",
        asked,
        lambda made: why_not(made, policy, wanted),
        lambda plans, name, progress: plans.why_not(name, policy, wanted, progress=progress),
    )
    print_answer(found, render_why_not, as_json=as_json)


def _open(plan: Path, server: str | None) -> Plan | Path:
    """Load a plan that is here before anything heavy is imported; a service's keeps its name."""
    return load_plan(plan) if server is None else plan


def _ask(
    server: str | None,
    title: str,
    plan: Plan | Path,
    here: Callable[[Plan], Answer],
    there: Callable[["Plans", str, ProgressCallback], Answer],
) -> Answer:
    """Answer a question about a plan, here or by the service."""
    if server is None or isinstance(plan, Plan):
        return here(load_plan(plan) if isinstance(plan, Path) else plan)
    with remote.service(server) as client, progress_bar(title) as progress:
        return there(client.plans, remote.plan_id(plan), progress)


def diff_command(
    plan_a: PlanArgument,
    plan_b: PlanArgument,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What two plans decide and predict differently."""
    from gnnplan.planner.queries.diff import diff, render

    if server is None:
        found = diff(load_plan(plan_a), load_plan(plan_b))
    else:
        with remote.service(server) as client:
            found = client.plans.diff(remote.plan_id(plan_a), remote.plan_id(plan_b))
    print_answer(found, render, as_json=as_json)


def whatif_command(
    plan: PlanArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="KEY=VALUE, repeatable: link.NAME.bandwidth=x2, memory.NAME.capacity=16GiB, or a "
            "setting of gnnplan plan, such as devices=1, device_memory=8GiB or policy=NAME.",
        ),
    ] = None,
    target_epoch_seconds: Annotated[
        float | None,
        typer.Option(help="Instead: fewest devices and least memory for an epoch this short."),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Plan again with something changed, by what is known; nothing is timed or written."""
    target = target_epoch_seconds
    if target is not None and not target > 0:
        raise SettingsError(f"--target-epoch-seconds: expected seconds above 0, found {target:g}")
    if target is None and not changes:
        raise SettingsError(
            "whatif: expected --set KEY=VALUE or --target-epoch-seconds, found none"
        )
    asked = _open(plan, server)
    from gnnplan.planner.queries.cheapest import cheapest_for, render_cheapest
    from gnnplan.planner.queries.whatif import render_whatif, whatif

    wanted = changes or []
    if target is None:
        changed = _ask(
            server,
            "whatif",
            asked,
            lambda made: whatif(made, wanted),
            lambda plans, name, progress: plans.what_if(name, wanted, progress=progress),
        )
        print_answer(changed, render_whatif, as_json=as_json)
        return
    cheapest = _ask(
        server,
        "whatif",
        asked,
        lambda made: cheapest_for(made, target, wanted),
        lambda plans, name, progress: plans.cheapest(name, target, wanted, progress=progress),
    )
    print_answer(cheapest, render_cheapest, as_json=as_json)


TOPOLOGY = "Links of the machine, as a table"
MEASURED = '<h2 id="run">'
"""Texts of a page whose machine is drawn, and of a page with measurements."""


def report_command(
    plan: PlanArgument,
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
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Also write a timeline for ui.perfetto.dev: predicted and measured stages by rank."
        ),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a plan as one self-contained page: pictures, tables, reasons."""
    check_trace_file(trace)
    if out.is_dir():
        raise InputError(f"{out}: expected a file to write the page to, found a folder")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: expected a folder to write the page in, found none")
    if server is None:
        made = load_plan(plan)
        from gnnplan.planner.report.page import report_html

        plan_id, measured_run = made.plan_id, _run_report(plan, run)
        html = report_html(made, _machine(made, machine), measured_run)
        if trace is not None:
            write_trace(trace, made, measured_run)
    else:
        remote.refuse_local(server, {"--machine": machine is not None})
        plan_id, html = remote.report_page(server, plan, run)
        if trace is not None:
            write_text_atomically(trace, remote.trace(server, plan, run))
    write_text_atomically(out, html)
    drawn, measured = TOPOLOGY in html, MEASURED in html
    if as_json:
        facts = {"plan_id": plan_id, "machine_drawn": drawn, "measured": measured}
        emit_json({"file": str(out), **facts})
        return
    missing = "" if drawn else "; its machine was not at hand (name it with --machine)"
    print_text(f"{out}: plan {plan_id[:12]}{missing}")


def _machine(plan: Plan, named: str | None) -> MachineModel | None:
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


def _run_report(plan: Path, run: Path | None) -> "RunReport | None":
    from gnnplan.runtime.report import REPORT_FILE, load_report

    if run is not None:
        return load_report(run)
    return load_report(plan) if (plan / REPORT_FILE).is_file() else None
