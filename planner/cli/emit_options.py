"""Flags of a job file for a cluster's scheduler: `--emit` of `gnnplan train` and `launch`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from gnnplan.planner.cli.common import changed_flags
from gnnplan.planner.errors import SettingsError
from gnnplan.runtime.codec import write_text_atomically
from gnnplan.runtime.plan.schema import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class EmitOptions:
    """Flags of a job file that is written in place of running."""

    emit: Annotated[
        Literal["slurm", "kubernetes"] | None,
        typer.Option("--emit", help="Write a job file for this scheduler instead of running."),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for --emit; default: stdout.")
    ] = None
    image: Annotated[
        str, typer.Option(help="Container image with gnnplan, for --emit kubernetes.")
    ] = "gnnplan:latest"
    claim: Annotated[
        str, typer.Option(help="Volume claim that holds the job's folders, for --emit kubernetes.")
    ] = "gnnplan-data"

    def refuse_unused(self) -> None:
        """Refuse flags of which nothing is in the job file, or that no job file is written for."""
        used = {None: (), "slurm": ("--output",), "kubernetes": ("--output", "--image", "--claim")}
        known = ["--emit", *used[self.emit]]
        if flags := [flag for flag in changed_flags(self) if flag not in known]:
            wanted = "--emit" if flags == ["--output"] else "--emit kubernetes"
            found = f"--emit {self.emit}" if self.emit else "none"
            raise SettingsError(
                f"{', '.join(flags)}: expected {wanted} beside it, found {found}; leave it out (a "
                "run is written into its plan's folder)"
            )

    def write(
        self, plan: Plan, folder: Path, *, verb: str, before: list[str], script: list[str]
    ) -> None:
        """Write the job that runs `gnnplan VERB [before] PLAN [script]` on the plan's hosts."""
        from gnnplan.planner.emit import JobSpec, kubernetes_job, slurm_script

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
        if self.emit == "slurm":
            text = slurm_script(job)
        else:
            text = kubernetes_job(job, image=self.image, claim=self.claim)
        if self.output is None:
            sys.stdout.write(text)
        else:
            write_text_atomically(self.output, text)
