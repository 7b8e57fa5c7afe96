"""`gnnplan tune`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as Grid

from planner.cli.common import JsonFlag, console, emit_json, print_text, progress_bar, seconds_text
from planner.queries.tune_measure import Asked, Tuned
from planner.request import check_output
from runtime.plan.io import load_plan


def register(parent: typer.Typer) -> None:
    """Add the verb to the top level."""
    parent.command("tune")(tune_command)


def tune_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder.")],
    top: Annotated[int, typer.Option(help="Candidates to measure.")] = 3,
    to_accuracy: Annotated[
        float | None,
        typer.Option(
            help="Instead of seconds per step: seconds of training until this validation score, "
            "for candidates whose statistics differ."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run after its warm-up.")] = 40,
    rounds: Annotated[int, typer.Option(help="Runs of each candidate, taken in turn.")] = 2,
    epochs: Annotated[int, typer.Option(help="Most epochs of a run with --to-accuracy.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the order in which candidates run.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Plan folder to write; default: replace PLAN."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the best candidates briefly, in turn, and keep the fastest."""
    asked = Asked(top=top, steps=steps, rounds=rounds, seed=seed, target=to_accuracy, epochs=epochs)
    load_plan(plan)
    check_output(plan if output is None else output)
    from planner.queries.tune import tune

    with progress_bar("tune") as progress:
        found = tune(plan, asked, output=output, progress=progress)
    if as_json:
        emit_json(found)
        return
    print_tuned(found, plan if output is None else output)


def print_tuned(found: Tuned, folder: Path) -> None:
    """Print predicted and measured seconds per candidate, and which one is kept."""
    grid = Grid("", "predicted", "measured", "off by", "to score", box=None)
    for row in found.candidates:
        way = row.to_accuracy
        reached = "" if way is None else "never" if way.seconds is None else f"{way.seconds:.1f} s"
        kept = "* " if row.plan_id == found.plan_id else "  "
        grid.add_row(
            kept + row.name,
            seconds_text(row.predicted.value),
            seconds_text(row.measured.median),
            f"{row.ape:.0%}",
            reached,
        )
    screen = console()
    screen.print(grid)
    print_text(f"kept, in {folder}: {found.kept}")
    regret = found.model_regret
    words = "never got to the score" if regret is None else f"measured {regret:.1%} longer"
    if found.model_choice == found.kept:
        words = "is the one that is kept"
    print_text(f"the model's choice {words}: {found.model_choice}")
    for note in found.notes:
        sys.stderr.write(f"note: {note}\n")
