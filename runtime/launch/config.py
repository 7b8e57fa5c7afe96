"""Options of one run: the file that `launch` writes and each rank reads.

The plan says *how* to train; this holds only what may differ between two runs of one plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.faults.failure import TRIAL_MARK, place_plan, plan_on_trial
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.plan.setting import FANOUTS, Range, Setting, find_fault

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
            range=FANOUTS,
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
    steps_in_all: bool = False
    """Whether `max_steps` also counts the steps before the run was resumed."""
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
        if fault := find_fault(self):
            raise InputError(fault)
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


TRIALS_FILE = "trials.json"
"""File in a run's folder that says under which plans it trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """Plans of one run, and the turns in which they are tried."""

    plans: list[str]
    """Plan folders; training starts under the first."""
    turns: list[int]
    """Number of the plan of each turn, in order."""
    steps: int = 20
    """Steps of a turn that count."""
    warmup: int = 5
    """Steps of a turn before the counted ones."""

    def __post_init__(self) -> None:
        known = all(0 <= each < len(self.plans) for each in self.turns)
        if not known or self.turns[:1] != [0]:
            raise InputError(
                f"trials: expected turns of plans 0 to {len(self.plans) - 1} that begin with 0, "
                f"found {self.turns}"
            )
        if self.steps < 1 or self.warmup < 0:
            raise InputError(
                f"expected turns of at least 1 step after a warm-up, found {self.steps} after "
                f"{self.warmup}"
            )

    @property
    def num_steps(self) -> int:
        """Number of optimiser steps of all turns."""
        from gnnplan.runtime.report import WARMUP_STEPS

        return len(self.turns) * (self.warmup + self.steps) + max(0, WARMUP_STEPS - self.warmup)

    def steps_elsewhere(self, counted: int) -> int:
        """Return the steps of a turn on other ranks, of which so many count: it follows a start."""
        from gnnplan.runtime.report import WARMUP_STEPS

        return max(self.warmup, WARMUP_STEPS) + counted


def read_trials(run_folder: Path) -> Trials | None:
    """Read the trials of a run; None where it has one plan."""
    path = run_folder / TRIALS_FILE
    if not path.is_file():
        return None
    try:
        found = codec.decode(Trials, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a list of trials ({error}); remove it") from None
    return replace(found, plans=[place_plan(run_folder, each) for each in found.plans])


OFFER_FILE = "ranks.json"
"""File in a run's folder that offers it a plan on another number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksOffer:
    """A plan on another number of ranks, which a run tries from an epoch's end on."""

    folder: str
    """Folder of that plan."""
    folder_before: str = ""
    """Folder of the plan that the run leaves for it, or goes back to; empty until it is tried."""
    in_use: bool = False
    """Whether the run goes on under that plan."""
    least_steps: int = field(default=0, metadata=codec.UNLESS_SET)
    """Fewest steps to the run's end in which it is sure to save more than its starts take."""

    def folder_in_use(self, first: Path) -> Path:
        """Return the plan folder that a run goes on under; `first` where it never changed."""
        return Path(self.folder if self.in_use else self.folder_before or first)


def read_offer(run_folder: Path) -> RanksOffer | None:
    """Read the plan that a run is offered; None where there is no offer."""
    path = run_folder / OFFER_FILE
    if not path.is_file():
        return None
    try:
        found = codec.decode(RanksOffer, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not an offer of a plan ({error}); remove it") from None
    before = place_plan(run_folder, found.folder_before)
    return replace(found, folder=place_plan(run_folder, found.folder), folder_before=before)


def write_offer(run_folder: Path, offer: RanksOffer) -> None:
    """Write the plan that a run is offered, as a whole or not at all."""
    codec.write_text_atomically(run_folder / OFFER_FILE, codec.dumps(offer))


def end_trial(run_folder: Path) -> None:
    """Leave no plan on trial in a run's folder; one on other ranks is as it was when offered."""
    offer, tried = read_offer(run_folder), plan_on_trial(run_folder)
    if offer is not None and offer.in_use and tried == Path(offer.folder):
        write_offer(run_folder, replace(offer, folder_before="", in_use=False))
    (run_folder / TRIAL_MARK).unlink(missing_ok=True)


def check_alike(plans: Sequence[Plan], *, any_ranks: bool = False) -> None:
    """Refuse plans that would not train the same, on the same ranks unless `any_ranks`."""
    from gnnplan.runtime.sampling.registry import find_sampler

    first = plans[0]
    strategy = first.strategy
    if strategy.mode != "minibatch" or find_sampler(strategy.sampler.name).prefers_local:
        raise InputError(
            "trials: expected mini-batches whose draws do not depend on where rows are kept, found "
            f"mode {strategy.mode}, sampler {strategy.sampler.name}; train under one plan"
        )
    if len({device.host for device in strategy.devices}) > 1:
        raise InputError("trials: expected a plan of one host; train under one plan")
    if any(plan.strategy.step == "captured" for plan in plans):
        raise InputError(
            "trials: expected steps that are started kernel by kernel, found a captured one, whose "
            "shapes are not changed while training; train under one plan"
        )
    for other in plans[1:]:
        for name, ours in _trained(first).items():
            if any_ranks and name == "devices":
                continue
            if ours != _trained(other)[name]:
                raise InputError(
                    f"trials: expected plans that train the same, found another {name} in plan "
                    f"{other.plan_id[:12]}"
                )


def _trained(plan: Plan) -> dict[str, Any]:
    """Return the settings that decide which batches are drawn, and by which ranks."""
    strategy = plan.strategy
    parts = plan.arrays["partition"].sha256 if strategy.partition != "none" else ""
    return {
        "graph": plan.graph.fingerprint,
        "workload": plan.workload,
        "devices": strategy.devices,
        "sampler": strategy.sampler,
        "partition of seeds": parts,
    }
