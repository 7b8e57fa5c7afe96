"""`gnnplan train` and `gnnplan compare`."""

import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table as Grid

from planner.cli import remote
from planner.cli.common import (
    JsonFlag,
    NodeRank,
    RendezvousEndpoint,
    RendezvousTimeout,
    console,
    emit_json,
    print_text,
    progress_bar,
    seconds_text,
)
from planner.cli.remote import ServerOption
from planner.emit import JobSpec, kubernetes_job, slurm_script
from planner.options import parse_integers
from planner.queries.compare import Comparison, compare
from runtime.codec import write_text_atomically
from runtime.plan.io import load_plan
from runtime.plan.schema import Plan
from runtime.report import REPORT_FILE, RunReport, load_report


class Scheduler(StrEnum):
    """Schedulers that a job can be written for."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"


EmitOption = Annotated[
    Scheduler | None,
    typer.Option("--emit", help="Write a job file for this scheduler instead of running."),
]
EmitOutput = Annotated[
    Path | None, typer.Option("--output", "-o", help="File for --emit; default: stdout.")
]
Image = Annotated[str, typer.Option(help="Container image with gnnplan, for --emit kubernetes.")]
Claim = Annotated[
    str,
    typer.Option(help="Volume claim that holds the job's folders, for --emit kubernetes."),
]
DEFAULT_IMAGE = "gnnplan:latest"
DEFAULT_CLAIM = "gnnplan-data"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmitTo:
    """Which file to write, and where."""

    scheduler: Scheduler
    output: Path | None
    image: str
    claim: str


def emit_job(
    to: EmitTo, plan: Plan, folder: Path, *, verb: str, before: list[str], script: list[str]
) -> None:
    """Write the job that runs `gnnplan VERB [before] PLAN [script]` on the plan's hosts.

    Args:
        to: which file.
        plan: what stands in `folder`.
        folder: of the plan.
        verb: train or launch.
        before: options of the command.
        script: a user's script and its arguments; empty for `train`.
    """
    folder = folder.resolve()
    folders = [folder, Path(plan.graph.path)]
    if script:
        path = Path(script[0]).resolve()
        folders.append(path.parent)
        script = [str(path), *script[1:]]
    job = JobSpec(
        plan=plan,
        name=folder.name,
        verb=verb,
        arguments=[*before, str(folder), *script],
        resumes=verb == "train",
        folders=sorted(set(folders)),
    )
    if to.scheduler is Scheduler.SLURM:
        text = slurm_script(job)
    else:
        text = kubernetes_job(job, image=to.image, claim=to.claim)
    if to.output is None:
        sys.stdout.write(text)
    else:
        write_text_atomically(to.output, text)


class Executor(StrEnum):
    """What starts the ranks."""

    TORCHRUN = "torchrun"
    RAY = "ray"


def register(parent: typer.Typer) -> None:
    """Add the verbs to the top level."""
    parent.command("train")(train_command)
    parent.command("compare")(compare_command)


def train_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder (with --server also an id).")],
    epochs: Annotated[int, typer.Option(help="Epochs to train.")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = (
        False
    ),
    verify: Annotated[
        bool, typer.Option("--verify", help="Re-hash the plan's arrays and check gathered rows.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Run although graph or machine changed.")
    ] = False,
    eval_fanouts: Annotated[
        str | None,
        typer.Option(help="Evaluate by sampling with these fan-outs instead of all neighbours."),
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Epochs between evaluations.")] = 1,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: at the ends of epochs only.")
    ] = 0,
    max_restarts: Annotated[
        int, typer.Option(help="Times that failed or hung ranks are started again.")
    ] = 3,
    hang_seconds: Annotated[
        float, typer.Option(help="A rank without a sign of life for this long is ended and named.")
    ] = 20.0,
    node_rank: NodeRank = 0,
    rdzv_endpoint: RendezvousEndpoint = "",
    rdzv_timeout: RendezvousTimeout = 300.0,
    executor: Annotated[
        Executor, typer.Option(help="What starts the ranks; ray needs the extra gnnplan[ray].")
    ] = Executor.TORCHRUN,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster for --executor ray; default: a local one.")
    ] = None,
    emit: EmitOption = None,
    output: EmitOutput = None,
    image: Image = DEFAULT_IMAGE,
    claim: Claim = DEFAULT_CLAIM,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train under a plan on its ranks; writes report.json and the run into the plan folder.

    For a plan of several hosts, run the same command on each with its own --node-rank.
    """
    options: dict[str, Any] = {
        "epochs": epochs,
        "resume": resume,
        "verify": verify,
        "force": force,
        "eval_every": eval_every,
        "eval_fanouts": None
        if eval_fanouts is None
        else parse_integers(eval_fanouts, "--eval-fanouts"),
        "checkpoint_every_steps": checkpoint_every,
        "max_restarts": max_restarts,
        "hang_seconds": hang_seconds,
    }
    if server is not None:
        of_this_machine = {
            "--resume": resume,
            "--emit": emit is not None,
            "--executor": executor is not Executor.TORCHRUN,
            "--address": address is not None,
            "--node-rank": node_rank != 0,
            "--rdzv-endpoint": bool(rdzv_endpoint),
        }
        remote.refuse_local(server, of_this_machine)
    elif emit is not None:
        found = load_plan(plan)
        to = EmitTo(scheduler=emit, output=output, image=image, claim=claim)
        before = [*train_words(options), f"--rdzv-timeout={rdzv_timeout:g}"]
        emit_job(to, found, plan, verb="train", before=before, script=[])
        return
    else:
        load_plan(plan)  # what is none is refused before anything heavy is imported
    screen = console(as_json)
    with progress_bar("train") as progress:

        def on_event(event: dict[str, object]) -> None:
            line = event_line(event)
            if line:
                screen.print(line, markup=False)
            share = event.get("share")
            if isinstance(share, float):
                progress(f"epoch {event.get('epoch')}", share)

        if server is not None:
            report = remote.train(server, plan, options, on_event)
        elif executor is Executor.RAY:
            from runtime.launch.ray import train_on_ray

            report = train_on_ray(plan, address=address, progress=on_event, **options)
        else:
            from runtime.launch.hosts import Place
            from runtime.launch.launch import train

            place = Place(node_rank=node_rank, endpoint=rdzv_endpoint, wait_seconds=rdzv_timeout)
            report = train(plan, place=place, progress=on_event, **options)
    if as_json:
        emit_json(report)
        return
    place = f"report in {plan}" if (plan / REPORT_FILE).is_file() else f"run of plan {plan}"
    screen.print(f"measured step {seconds_text(report.step_seconds.median)}; {place}")


def train_words(options: dict[str, Any]) -> list[str]:
    """The flags that mean these options; what is left at its default needs none.

    >>> train_words({"epochs": 3, "resume": True, "verify": False, "eval_fanouts": [5, 3]})
    ['--epochs=3', '--resume', '--eval-fanouts=5,3']
    """
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.removesuffix("_steps").replace("_", "-")
        if isinstance(value, bool):
            words += [flag] * value
        elif isinstance(value, list):
            words.append(f"{flag}={','.join(map(str, cast(list[int], value)))}")
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def event_line(event: dict[str, object]) -> str:
    """One line per finished epoch, restart or warning; nothing for other events."""
    if event.get("event") in ("restart", "warning"):
        return str(event["line"])
    if event.get("event") != "epoch":
        return ""
    parts = [f"epoch {event['epoch']}"]
    for name in ("loss", "val", "test", "seconds"):
        value = event.get(name)
        if isinstance(value, float):
            parts.append(f"{name} {value:.4f}" if name != "seconds" else seconds_text(value))
    return "  ".join(parts)


def compare_command(
    plan: Annotated[
        Path, typer.Argument(help="Plan folder that was trained (with --server also an id).")
    ],
    run: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a run's report.json (with --server: a run's id); default: the "
            "plan's own (with --server: its newest that has succeeded)."
        ),
    ] = None,
    server: ServerOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Predicted against measured, per stage."""
    if server is not None:  # that machine's factors are learnt there, not here
        result = remote.comparison(server, plan, run)
    else:
        found, report = load_plan(plan), load_report(plan if run is None else run)
        result = _learnt(found, report, compare(found, report))
    if as_json:
        emit_json(result)
        return
    print_comparison(result)


def _learnt(plan: Plan, report: RunReport, result: Comparison) -> Comparison:
    """The comparison with the machine's factors after this run, and alarms among its notes."""
    if plan.strategy.mode == "full-graph":
        return result  # factors are those of mini-batches: other work under the same stages
    from planner.profile.cache import load_record, record_path
    from planner.queries.calibrate import refit

    used = load_record(plan).factors if record_path(plan.plan_id).is_file() else {}
    try:
        factors, alarms = refit(result, report, plan, used)
    except OSError as error:
        return replace(result, notes=[*result.notes, f"factors were not kept: {error}"])
    return replace(result, factors=factors, notes=[*result.notes, *alarms])


def print_comparison(result: Comparison) -> None:
    """Print predicted and measured seconds per stage, step and epoch."""
    grid = Grid("", "predicted", "measured", "off by", box=None)
    for name, row in result.stages.items():
        grid.add_row(
            name, seconds_text(row.predicted), seconds_text(row.measured), f"{row.ape:.0%}"
        )
    for name, total in (("step", result.step_seconds), ("epoch", result.epoch_seconds)):
        interval = f" ({seconds_text(total.low)} - {seconds_text(total.high)})"
        grid.add_row(
            name,
            seconds_text(total.predicted) + interval,
            seconds_text(total.measured),
            f"{total.ape:.0%}",
        )
    console().print(grid)
    if result.minor_stages:
        rows = [
            f"{name} {seconds_text(row.predicted)} / {seconds_text(row.measured)}"
            for name, row in result.minor_stages.items()
        ]
        print_text("below 2% of the step: " + ", ".join(rows))
    for note in result.notes:
        sys.stderr.write(f"note: {note}\n")
