"""`gnnplan plan` and `gnnplan explain`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.cache_folder import cache_folder
from planner.cli import remote
from planner.cli.common import (
    JsonFlag,
    console,
    emit_json,
    parse_integers,
    parse_sampler,
    parse_type_fanouts,
    print_text,
    progress_bar,
)
from planner.cli.remote import ServerOption
from planner.errors import SettingsError
from planner.machine.model import MachineModel
from planner.probe.gpu.inventory import gpu_notes
from planner.probe.presets import find_machine
from planner.request import check_machine_name, check_output, check_request
from planner.settings import AUTO_SAMPLER, POLICIES, PlanSettings
from planner.units import parse_bytes
from runtime.graph.dataset import open_graph
from runtime.plan.io import load_plan
from runtime.plan.schema import Links, Plan, Workload


class Allow(StrEnum):
    """How far the planner may change training statistics."""

    EXACT = "exact"
    UNBIASED = "unbiased"
    APPROXIMATE = "approximate"


class Mode(StrEnum):
    """Kinds of training."""

    AUTO = "auto"
    MINIBATCH = "minibatch"
    FULL_GRAPH = "full-graph"


class Dialect(StrEnum):
    """Which vertices a hop expands."""

    FIRST_SEEN = "first_seen"
    EVERY_HOP = "every_hop"


class Batching(StrEnum):
    """Whether ranks may make batches together."""

    AUTO = "auto"
    INDEPENDENT = "independent"


class Precision(StrEnum):
    """Of the forward pass's products."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class GcnNorm(StrEnum):
    """Degrees a GCN normalises by."""

    FULL = "full"
    SAMPLED = "sampled"


class Negatives(StrEnum):
    """Where negative destinations come from."""

    UNIFORM = "uniform"
    IN_BATCH = "in-batch"


class Exclude(StrEnum):
    """Directions of a step's own links that sampling does not see."""

    NONE = "none"
    FORWARD = "forward"
    BOTH = "both"


def register(parent: typer.Typer) -> None:
    """Add the verbs to the top level."""
    parent.command("plan")(plan_command)
    parent.command("explain")(explain_command)


def plan_command(
    graph: Annotated[Path, typer.Argument(help="Dataset folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Plan folder to write.")],
    machine: Annotated[
        str | None,
        typer.Option(help="Machine file or preset; without it this machine is probed (cached)."),
    ] = None,
    devices: Annotated[str, typer.Option(help="Number of ranks, or auto.")] = "auto",
    hosts: Annotated[
        int | None, typer.Option(help="Hosts to spread the ranks over; left out: the fastest.")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory per device, e.g. 8GiB; default: measured.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory, e.g. 64GiB; default: measured.")
    ] = None,
    model: Annotated[str, typer.Option(help="sage | gcn | gat | rgcn | module:factory.")] = "sage",
    layers: Annotated[int | None, typer.Option(help="Layers; default: one per fan-out.")] = None,
    hidden: Annotated[int, typer.Option(help="Hidden columns.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads (gat).")] = 4,
    dropout: Annotated[float, typer.Option(help="Dropout between layers.")] = 0.0,
    fanouts: Annotated[
        str, typer.Option(help="Neighbours per hop, hop next to the seeds first; -1 takes all.")
    ] = "15,10",
    type_fanouts: Annotated[
        list[str] | None,
        typer.Option(help="Other fan-outs of an edge type (rgcn), as NAME=5,3; repeat per type."),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(help="GLOBAL batch: seeds (or links) per optimiser step over all devices."),
    ] = 1024,
    negatives: Annotated[
        Negatives, typer.Option(help="Where links' negative destinations come from.")
    ] = Negatives.UNIFORM,
    num_negatives: Annotated[int, typer.Option(help="Negatives per link in training.")] = 1,
    exclude: Annotated[
        Exclude, typer.Option(help="Which of a step's own links are left out of sampling.")
    ] = Exclude.BOTH,
    eval_negatives: Annotated[
        int, typer.Option(help="Negatives per link in validation and test.")
    ] = 100,
    learning_rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = 3e-3,
    weight_decay: Annotated[float, typer.Option(help="L2 penalty.")] = 0.0,
    sampler: Annotated[
        list[str] | None,
        typer.Option(
            help="neighbor, full, labor, ladies, pladies, fastgcn or las; parameters follow as "
            "NAME:key=value,key=value. Repeat it to have the fastest of several. Left out (auto): "
            "neighbor and, where --allow lets it, labor."
        ),
    ] = None,
    dialect: Annotated[Dialect, typer.Option(help="Which vertices a hop expands.")] = (
        Dialect.FIRST_SEEN
    ),
    gcn_norm: Annotated[GcnNorm, typer.Option(help="Degrees a GCN normalises by.")] = GcnNorm.FULL,
    precision: Annotated[
        Precision,
        typer.Option(help="Of products in training; sums and parameters stay float32."),
    ] = Precision.FLOAT32,
    mode: Annotated[Mode, typer.Option(help="Kind of training.")] = Mode.AUTO,
    batching: Annotated[
        Batching,
        typer.Option(
            help="independent: ranks never share a batch, as PlannedLoader(blocks=False)."
        ),
    ] = Batching.AUTO,
    policy: Annotated[str, typer.Option(help=f"Placement policy: {', '.join(POLICIES)}.")] = "auto",
    allow: Annotated[
        Allow, typer.Option(help="How far training statistics may change.")
    ] = Allow.EXACT,
    seed: Annotated[int, typer.Option(help="Seed of shuffling, sampling and weights.")] = 0,
    shared_host: Annotated[
        bool, typer.Option(help="Use the host's shared mapping of features.")
    ] = True,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more threads than cores.")
    ] = False,
    calibrated: Annotated[
        bool,
        typer.Option("--calibrated", help="Scale stages by what compare learnt on this machine."),
    ] = False,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the plan with the lowest predicted time per step."""
    fanout_list = parse_integers(fanouts, "--fanouts")
    if mode is Mode.FULL_GRAPH:  # every neighbour, whatever the fan-outs of mini-batches are
        fanout_list = [-1] * (len(fanout_list) if layers is None else layers)
    first, *others = [parse_sampler(each) for each in sampler or [AUTO_SAMPLER]]
    settings = PlanSettings(
        workload=Workload(
            model=model,
            num_layers=len(fanout_list) if layers is None else layers,
            hidden=hidden,
            heads=heads,
            dropout=dropout,
            fanouts=fanout_list,
            type_fanouts=parse_type_fanouts(type_fanouts or []),
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            gcn_norm=gcn_norm.value,
            precision=precision.value,
            seed=seed,
            allow=allow.value,
            links=Links(
                negatives=negatives.value,
                num_negatives=num_negatives,
                exclude=exclude.value,
                eval_negatives=eval_negatives,
            ),
        ),
        devices=_devices(devices),
        hosts=hosts,
        device_memory_bytes=parse_bytes(device_memory, "--device-memory"),
        host_memory_bytes=parse_bytes(host_memory, "--host-memory"),
        mode=mode.value,
        sampler=first.name,
        sampler_parameters=first.parameters,
        other_samplers=others,
        dialect=dialect.value,
        batching=batching.value,
        policy=policy,
        shared_host=shared_host,
        oversubscribe=oversubscribe,
    )
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
    from planner.pipeline import plan

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
    """The named machine, or this one: probed once and cached by its fingerprint.

    What a reader must know of its GPUs, and what a probe had no time for, is printed to stderr.

    Args:
        name: preset or machine file; None: this machine.
        graph: dataset whose every value is checked before this machine is probed.

    Raises:
        MachineError: it was probed here and its GPUs are no longer joined as they were.
        InputError: GNNPLAN_CACHE names a folder that cannot be written.
    """
    cache_folder()
    if name is not None:
        machine = find_machine(name)
    else:
        from planner.probe.probe import cached_machine, load_or_probe

        if graph is not None and cached_machine() is None:
            open_graph(graph)
        with progress_bar("probe") as progress:
            machine = load_or_probe(quick=False, progress=progress)
    if machine.gpus and machine.provenance == "measured":
        from planner.probe.gpu.nvml import inventory
        from planner.probe.topology import refuse_changed, with_free_memory

        found = inventory()
        refuse_changed(machine, found)
        machine = with_free_memory(machine, found)
    late = [note for note in machine.notes if note.startswith("time: ")]
    for note in [*late, *gpu_notes(machine.notes)]:
        print_text(f"note: {note}", as_json=True)
    return machine


def _devices(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.lstrip("-").isdigit():
        raise SettingsError(f"--devices: expected a number or auto, found {text!r}")
    return int(text)


def explain_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder (with --server also an id).")],
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Where the time goes, where rows live, and why the runner-up lost."""
    from planner.queries.explain import explain, render

    found = explain(load_plan(plan)) if server is None else remote.explain(server, plan)
    if as_json:
        emit_json(found)
        return
    print_text(render(found))


def print_explanation(folder: Path) -> None:
    """Print a plan's explanation."""
    from planner.queries.explain import explain, render

    print_text(render(explain(load_plan(folder))))
