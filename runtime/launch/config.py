"""Options of one run: the file that `launch` writes and each rank reads.

The plan says *how* to train; this holds only what may differ between two runs of one plan.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.setting import Range, Setting

_EPOCHS, _STEPS = Range(least=0, most=1_000_000), Range(least=0, most=10**12)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """A user's options of a run: flags of `gnnplan train`, bodies of the service's runs."""

    epochs: Annotated[
        int, Setting(help="Epochs to train.", range=Range(least=1, most=1_000_000))
    ] = 10
    resume: Annotated[bool, Setting(help="Go on from the last checkpoint.", surface="flag")] = False
    verify: Annotated[bool, Setting(help="Re-hash the plan's arrays and check gathered rows.")] = (
        False
    )
    force: Annotated[bool, Setting(help="Run although graph or machine changed.")] = False
    eval_fanouts: Annotated[
        list[int] | None,
        Setting(
            help="Evaluate by sampling with these fan-outs; -1 takes all neighbours.",
            unset="all neighbours, or the training's above 500,000,000 edges",
        ),
    ] = None
    eval_every: Annotated[
        int, Setting(help="Epochs between evaluations; 0: none.", range=_EPOCHS)
    ] = 1
    checkpoint_every_steps: Annotated[
        int,
        Setting(
            help="Steps between checkpoints; 0: at the ends of epochs only.",
            range=_STEPS,
            flag="checkpoint-every",
        ),
    ] = 0
    max_steps: Annotated[
        int | None,
        Setting(
            help="Most steps of the run.",
            unset="no limit",
            range=Range(least=1, most=10**12),
            surface="service",
        ),
    ] = None
    max_restarts: Annotated[
        int,
        Setting(
            help="Times that failed or hung ranks are started again.",
            range=Range(least=0, most=100),
        ),
    ] = 3
    hang_seconds: Annotated[
        float,
        Setting(
            help="A rank without a sign of life for this long is ended and named.",
            range=Range(least=0, most=86400, whole=False, above_least=True),
        ),
    ] = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Configuration of one run of one plan."""

    plan_folder: str
    run_folder: str
    """Folder of this run's events, logs, checkpoints and report.json."""
    epochs: int = 1
    """Epochs in all; a resumed run does those that are missing."""
    eval_every: int = 1
    """Epochs between validations, with a test after the last one; 0 does neither."""
    eval_fanouts: list[int] | None = None
    """Fan-outs of sampled evaluation; None: all neighbours, or those of `choose_fanouts`."""
    resume: bool = False
    """Whether to continue from the newest whole checkpoint of the run folder."""
    verify: bool = False
    """Whether to hash the plan's arrays again before use."""
    force: bool = False
    """Whether to train although the graph or the machine is not the plan's."""
    max_steps: int | None = None
    """Most optimiser steps of this run; None: no limit."""
    keep_checkpoints: int = 2
    """Number of checkpoints to keep; 0 writes none."""
    checkpoint_every_steps: int = 0
    """Steps between checkpoints; 0: at the ends of epochs only."""
    hang_seconds: float = 20.0
    """Seconds without a sign of life after which a rank is ended and named.

    A rank that lives but gets no further is ended after a quarter more, or ten times its longest
    stage so far.
    """
    collective_seconds: float = 600.0
    """Longest wait in one collective, in phases that the watch leaves alone (start, evaluation)."""
    pin: bool = True
    """Whether to pin ranks to disjoint cores when the thread budget fits into them."""
    launched: bool = False
    """Whether `launch` started the rank, which must then not outlive its parent."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise InputError(f"expected at least 1 epoch, found {self.epochs}")
        if self.max_steps is not None and self.max_steps < 1:
            raise InputError(f"expected at least 1 step, found {self.max_steps}")
        for name in ("hang_seconds", "collective_seconds"):
            if not getattr(self, name) > 0:
                raise InputError(f"expected {name} above 0, found {getattr(self, name)}")
        for name in ("eval_every", "keep_checkpoints", "checkpoint_every_steps"):
            if getattr(self, name) < 0:
                raise InputError(f"expected {name} of at least 0, found {getattr(self, name)}")

    @property
    def run_path(self) -> Path:
        """Run folder as a path."""
        return Path(self.run_folder)
