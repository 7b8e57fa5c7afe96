"""`gnnplan doctor`, `probe`, `machine` and `estimate`: what machines are, and what they can do."""

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gnnplan.planner.cli import remote
from gnnplan.planner.cli.common import (
    HostOptions,
    JsonFlag,
    bytes_text,
    console,
    emit_json,
    print_answer,
    print_text,
    print_wide,
    progress_bar,
    seconds_text,
    table_of,
    with_options,
)
from gnnplan.planner.cli.remote import ServerOption
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel, load_machine, save_machine
from gnnplan.planner.probe.presets import find_machine, list_presets
from gnnplan.planner.queries.estimate import Estimates, EstimateSettings, estimate, render
from gnnplan.runtime.errors import InputError

if TYPE_CHECKING:
    from gnnplan.planner.probe.hosts import Meeting

process_began: float | None = None
"""Start of this process on time.monotonic()'s clock, where it runs one command alone."""
app = typer.Typer(help="Machines: presets and probed files.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add `doctor`, `probe`, `estimate` and `machine` to the top level."""
    parent.add_typer(app, name="machine")
    parent.command("doctor")(doctor)
    parent.command("probe")(probe_command)
    parent.command("estimate")(estimate_command)


def doctor(
    machine: Annotated[
        Path | None,
        typer.Option(help="Machine file made here earlier: say what has changed since."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """What this machine can do, what is missing, what to change."""
    from gnnplan.planner.probe.doctor import data_path, examine

    findings = examine(None if machine is None else load_machine(machine)) + data_path()
    if as_json:
        emit_json({"findings": findings, "ok": all(f.level != "problem" for f in findings)})
        return
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    rows = [(marks[f.level], f.check, f.found, f.advice) for f in findings]
    console().print(table_of(("", "check", "found", "what to do"), rows))


@with_options(place=None)
def probe_command(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="Machine file to write.")] = Path(
        "machine.json"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Coarser grid; limit 30 s.")] = False,
    disk: Annotated[
        bool, typer.Option("--disk", help="Measure the disk alone, anew, in the file of --output.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Limit in seconds; default 180, with --quick 30. A busy machine is measured less "
            "by then, and marked uncertain; what plans need is measured however late it is.",
        ),
    ] = None,
    hosts: Annotated[
        int, typer.Option(min=1, help="Hosts to probe together; run this on each of them.")
    ] = 1,
    place: HostOptions,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine: memory, disk, exchange between ranks, sampling.

    Plans that name no machine use it too; --thorough ones want a full one. With --hosts, the links
    between hosts as well; host 0 writes the file of all. With --disk only the disk, in seconds:
    those of virtual machines swing, and a plan that reads one hangs on it.
    """
    from gnnplan.planner.probe.probe import keep_for_plans, probe, probe_hosts, with_disk_again

    if disk and seconds is not None:
        raise InputError(
            "--seconds: expected a probe of more than the disk, found --disk; leave one of them out"
        )
    if seconds is not None and not math.isfinite(seconds):
        raise InputError(f"--seconds: expected a number of seconds, found {seconds:g}; correct it")
    _check_output(output)
    limit = {} if seconds is None else {"seconds": seconds}
    with progress_bar("probe") as progress:
        if disk:
            machine = with_disk_again(own_machine(output, hosts), progress=progress)
        elif hosts == 1:
            machine = probe(quick=quick, progress=progress, began=process_began, **limit)
        else:
            meeting = meeting_of(hosts, place)
            machine = probe_hosts(meeting, quick=quick, progress=progress, **limit)
    if hosts > 1 and place.node_rank > 0:
        console(as_json).print(f"host 0 writes the machine of {hosts} hosts")
        return
    save_machine(machine, output)
    kept = hosts == 1 and keep_for_plans(machine)
    used = "; plans that name no machine use it" if kept else ""
    _print_written(machine, f"{output}{used}", as_json=as_json)


def _check_output(output: Path) -> None:
    """Make the folder of a machine file; refuse one that cannot be written before any work."""
    if output.is_dir():
        raise InputError(f"{output}: expected a file name for -o, found a folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise InputError(
            f"{output}: expected a file in a folder that can be written, found {output.parent} "
            f"({error.strerror or error}); choose another --output"
        ) from None


def own_machine(path: Path, hosts: int) -> MachineModel:
    """Load this machine's model, of which a part is to be measured again."""
    if hosts > 1:
        raise InputError(f"--disk: expected one host, found --hosts {hosts}; leave one of them out")
    from gnnplan.runtime.device import machine_fingerprint

    machine, here = load_machine(path), machine_fingerprint()
    if machine.fingerprint != here:
        raise MachineError(
            f"{path}: expected the model of this machine ({here}), found that of {machine.name} "
            f"({machine.fingerprint}); run `gnnplan probe` without --disk"
        )
    return machine


def meeting_of(hosts: int, place: HostOptions) -> "Meeting":
    """Return this host's place among those that are probed together."""
    from gnnplan.planner.probe.hosts import Meeting
    from gnnplan.runtime.comm.route import split_endpoint

    if not 0 <= place.node_rank < hosts:
        raise InputError(
            f"expected a --node-rank from 0 to {hosts - 1} (--hosts {hosts}), found "
            f"{place.node_rank}"
        )
    split_endpoint(place.rdzv_endpoint)
    return Meeting(
        node_rank=place.node_rank,
        num_hosts=hosts,
        endpoint=place.rdzv_endpoint,
        wait_seconds=place.rdzv_timeout,
    )


@app.command("list")
def list_command(server: ServerOption = None, as_json: JsonFlag = False) -> None:
    """Presets that can be planned for without owning the machine; with --server also uploads."""
    if server is None:
        names = dict.fromkeys(list_presets(), "")
    else:
        with remote.service(server) as client:
            found = list(client.machines.list())
        names = {m.id: "" if m.id == m.name else f"  {m.name} ({m.origin})" for m in found}
    lines = [name + words for name, words in names.items()]
    print_answer(list(names), lambda _: typer.echo("\n".join(lines)), as_json=as_json)


@app.command("show")
def show_command(
    machine: Annotated[
        str, typer.Argument(help="Preset name or machine file (with --server: name or id).")
    ],
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a machine: processors, memories, links, measured tables."""
    if server is None:
        model = find_machine(machine)
    else:
        with remote.service(server) as client:
            model = client.machines.get(machine)
    print_answer(model, print_machine, as_json=as_json)


@app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="NCCL topology XML, or nvbandwidth -j output.")],
    onto: Annotated[
        str, typer.Option(help="Preset or machine file that supplies what the file does not say.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Machine file to write.")] = Path(
        "machine.json"
    ),
    as_json: JsonFlag = False,
) -> None:
    """Put what other tools know of a machine onto a machine model."""
    from gnnplan.planner.probe.imports import import_machine

    _check_output(output)
    machine = import_machine(source, find_machine(onto))
    save_machine(machine, output)
    _print_written(machine, str(output), as_json=as_json)


def _print_written(machine: MachineModel, place: str, *, as_json: bool) -> None:
    print_answer(machine, print_machine, as_json=as_json)
    if not as_json:
        console().print(f"written to {place}", markup=False, soft_wrap=True)


def print_machine(machine: MachineModel) -> None:
    """Print a machine as tables."""
    screen = console()
    screen.print(
        f"{machine.name} ({machine.provenance}), noise {machine.noise:.1%}, "
        f"fingerprint {machine.fingerprint}",
        markup=False,
    )
    memories = [
        (memory.name, memory.kind, bytes_text(float(memory.capacity_bytes)))
        for memory in machine.memories
    ]
    shown = [table_of(("memory", "kind", "capacity"), memories)]
    links = [
        (
            link.name,
            link.source,
            link.target,
            seconds_text(link.latency_seconds),
            bytes_text(link.bandwidth_bytes_per_second) + "/s",
            link.provenance,
        )
        for link in machine.links
    ]
    columns = ("link", "from", "to", "latency", "bandwidth", "provenance")
    shown.append(table_of(columns, links))
    tables = [
        (
            name,
            table.unit,
            " x ".join(table.axes),
            f"{min(table.values):.3g}",
            f"{max(table.values):.3g}",
            f"{table.spread:.1%}" + (" uncertain" if table.uncertain else ""),
        )
        for name, table in sorted(machine.tables.items())
    ]
    shown.append(table_of(("table", "unit", "axes", "least", "largest", "spread"), tables))
    for each in shown:
        each.columns[0].no_wrap = True  # names whole, for --set and --machine
    print_wide(*shown)
    for note in machine.notes:
        screen.print(f"note: {note}", markup=False)


@with_options(settings=None)
def estimate_command(
    dataset: Annotated[
        Path | None,
        typer.Argument(help="Dataset folder whose sizes are taken (with --server: its name)."),
    ] = None,
    *,
    settings: EstimateSettings,
    types: Annotated[
        Path | None,
        typer.Option(help="File with nodes and edges by type, for --model rgcn or rgat."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(help="Price file in place of gnnplan's own, by preset, in dollars an hour."),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """What a training would take on each known machine, and cost; nothing is measured.

    Sizes are --nodes, --edges and --features, or those of --like NAME or of a dataset.
    """
    if server is None:
        found = estimate(settings, dataset, types=types, prices=prices)
    else:
        remote.refuse_local(server, {"--prices": prices is not None, "--types": types is not None})
        with remote.service(server) as client:
            found = client.estimate(settings, graph=None if dataset is None else str(dataset))
    print_answer(found, print_estimates, as_json=as_json)


def print_estimates(found: Estimates) -> None:
    """Print estimates as a table, and what they rest on."""
    columns, rows, lines = render(found)
    table = table_of(columns, rows)
    table.columns[0].no_wrap = True
    print_wide(table)
    for line in lines:
        print_text(line)
