"""`gnnplan train` and `gnnplan compare`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Grid

from planner.commands.common import (
    JsonFlag,
    NodeRank,
    RendezvousEndpoint,
    RendezvousTimeout,
    console,
    emit_json,
    parse_integers,
    progress_bar,
    seconds_text,
)
from planner.compare import Comparison, compare
from runtime.plan import load_plan
from runtime.report import load_report


def register(parent: typer.Typer) -> None:
    """Add the verbs to the top level."""
    parent.command("train")(train_command)
    parent.command("compare")(compare_command)


def train_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder.")],
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
    as_json: JsonFlag = False,
) -> None:
    """Train under a plan on its ranks; writes report.json into the plan folder.

    For a plan of several hosts, run the same command on each with its own --node-rank.
    """
    from runtime.launch import train
    from runtime.launch_hosts import Place

    load_plan(plan)
    screen = console(as_json)
    with progress_bar("train") as progress:

        def on_event(event: dict[str, object]) -> None:
            line = event_line(event)
            if line:
                screen.print(line, markup=False)
            share = event.get("share")
            if isinstance(share, float):
                progress(f"epoch {event.get('epoch')}", share)

        report = train(
            plan,
            epochs=epochs,
            resume=resume,
            verify=verify,
            force=force,
            eval_every=eval_every,
            eval_fanouts=None
            if eval_fanouts is None
            else parse_integers(eval_fanouts, "--eval-fanouts"),
            place=Place(node_rank=node_rank, endpoint=rdzv_endpoint, wait_seconds=rdzv_timeout),
            checkpoint_every_steps=checkpoint_every,
            max_restarts=max_restarts,
            hang_seconds=hang_seconds,
            progress=on_event,
        )
    if as_json:
        emit_json(report)
        return
    screen.print(f"measured step {seconds_text(report.step_seconds.median)}; report in {plan}")


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
    plan: Annotated[Path, typer.Argument(help="Plan folder that was trained.")],
    as_json: JsonFlag = False,
) -> None:
    """Predicted against measured, per stage."""
    result = compare(load_plan(plan), load_report(plan))
    if as_json:
        emit_json(result)
        return
    print_comparison(result)


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
        console().print("below 2% of the step: " + ", ".join(rows), markup=False, soft_wrap=True)
    for note in result.notes:
        sys.stderr.write(f"note: {note}\n")
