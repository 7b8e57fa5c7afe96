"""Options of commands whose job can also be written as a file for a cluster's scheduler."""

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.executors.job import JobSpec
from planner.executors.kubernetes import kubernetes_job
from planner.executors.slurm import slurm_script
from runtime.codec import write_text_atomically
from runtime.plan import Plan


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
