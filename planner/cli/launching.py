"""`gnnplan launch`: a user's own training script under a plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from planner.cli.common import NodeRank, RendezvousEndpoint, RendezvousTimeout
from planner.cli.training import (
    DEFAULT_CLAIM,
    DEFAULT_IMAGE,
    Claim,
    EmitOption,
    EmitOutput,
    EmitTo,
    Image,
    emit_job,
)
from runtime.plan.io import load_plan


class _ScriptCommand(TyperCommand):
    """Leaves every word after the script's name to the script, options too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = self._script_at(args)
        return super().parse_args(ctx, [*args[:place], "--", *args[place:]])

    def _script_at(self, args: Sequence[str]) -> int:
        """Position of the second word that is neither an option nor an option's value."""
        flags = {name for p in self.params if getattr(p, "is_flag", False) for name in p.opts}
        words, takes_value = 0, False
        for place, word in enumerate(args):
            if takes_value:
                takes_value = False
            elif word.startswith("-") and word != "-":
                takes_value = word not in flags and "=" not in word and word != "--help"
            elif words:
                return place
            else:
                words += 1
        return len(args)


def register(parent: typer.Typer) -> None:
    """Add the verb to the top level."""
    parent.command("launch", cls=_ScriptCommand)(launch_command)


def launch_command(
    plan: Annotated[Path, typer.Argument(help="Plan folder.")],
    script: Annotated[Path, typer.Argument(help="Training script, Python.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Passed on to the script as they are.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run although graph or machine changed.")
    ] = False,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Start more ranks than there are cores.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(help="Times that all ranks are started again after one failed.")
    ] = 0,
    hang_seconds: Annotated[
        float, typer.Option(help="End a rank without a sign of life for this long; 0: never.")
    ] = 60.0,
    node_rank: NodeRank = 0,
    rdzv_endpoint: RendezvousEndpoint = "",
    rdzv_timeout: RendezvousTimeout = 300.0,
    emit: EmitOption = None,
    output: EmitOutput = None,
    image: Image = DEFAULT_IMAGE,
    claim: Claim = DEFAULT_CLAIM,
) -> int:
    """Run a training script on the plan's ranks; options come before the script's name.

    In the script, PlannedLoader() reads the plan. The exit code is that of the rank that failed
    first.
    """
    found, words = load_plan(plan), arguments or []
    if emit is not None:
        before = [f"--max-restarts={max_restarts}", f"--hang-seconds={hang_seconds:g}"]
        before += [f"--rdzv-timeout={rdzv_timeout:g}"]
        before += ["--force"] * force + ["--oversubscribe"] * oversubscribe
        to = EmitTo(scheduler=emit, output=output, image=image, claim=claim)
        script_words = [str(script), *words]
        emit_job(to, found, plan, verb="launch", before=before, script=script_words)
        return 0
    from runtime.launch.hosts import Place
    from runtime.launch.script import launch_script

    return launch_script(
        plan,
        script,
        words,
        force=force,
        oversubscribe=oversubscribe,
        max_restarts=max_restarts,
        hang_seconds=hang_seconds,
        place=Place(node_rank=node_rank, endpoint=rdzv_endpoint, wait_seconds=rdzv_timeout),
    )
