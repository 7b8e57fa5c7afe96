"""Trials: training goes on under several plans in turn, and then under the fastest.

  trials.json (plans, turns) -> a turn: switch, steps that warm up, steps that count -> ... -> keep

What is drawn depends on seed, epoch, step and ids alone, so a plan may change between two steps
without changing what is trained: model and optimiser stay, loader, store and threads are the next
plan's. One plan's memory is held at a time.

A mark in the run's folder names the plan on trial. Where ranks end meanwhile, they start again from
the last checkpoint, and that plan is not tried again. A run that its user stops leaves no mark.

A plan on another number of ranks may be offered once one is kept (`launch.config.RanksOffer`). At
an epoch's end the job leaves; the launcher starts it under that plan from the checkpoint. There it
takes as many steps that count, and trains on or leaves again, for the plan before (DEC-186).
"""

import contextlib
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gnnplan.runtime import codec
from gnnplan.runtime.errors import GnnplanError, PlanError
from gnnplan.runtime.faults.failure import TRIAL_MARK
from gnnplan.runtime.faults.heartbeat import Phase, attempt
from gnnplan.runtime.graph.format import one_line
from gnnplan.runtime.launch.config import (
    RanksOffer,
    Trials,
    check_alike,
    end_trial,
    read_offer,
    write_offer,
)
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.io import load_plan
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import WARMUP_STEPS, PlanUse, typical_stages, window_means
from gnnplan.runtime.train.gradients import overlap_of
from gnnplan.runtime.train.minibatch import STEP
from gnnplan.runtime.train.recovery import save

if TYPE_CHECKING:
    from gnnplan.runtime.train.job import Job


@dataclass(kw_only=True)
class TrialState:
    """How far the trials of a run have come; checkpoints hold it as plain values."""

    turn: int = 0
    """Number of turns that are over."""
    seconds: list[list[float]] = field(default_factory=list[list[float]])
    """Seconds of each plan's steps that count, as rank 0 measured them."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Reason for which a plan is not tried again, by the plan's number."""
    uses: list[list[Any]] = field(default_factory=list[list[Any]])
    """First step and id of each plan in use, in order."""
    kept: int | None = None


class TrialRun:
    """A rank's part in the trials; all ranks go through the same turns.

    Args:
        trials: plans and turns.
        open_loader: opens a plan folder's loader with a meter, for this rank.
        use_threads: takes a plan's threads and cores; returns these.
        offer: a plan on another number of ranks, if the run has been offered one.
    """

    def __init__(
        self,
        trials: Trials,
        *,
        open_loader: Callable[[Path, StageMeter], PlannedLoader],
        use_threads: Callable[[Plan], list[int]],
        offer: RanksOffer | None = None,
    ) -> None:
        self.trials = trials
        self.folders = [Path(each) for each in trials.plans]
        self.plans = [load_plan(folder) for folder in self.folders]
        check_alike(self.plans)
        self._open, self._use_threads = open_loader, use_threads
        self._meters: dict[int, StageMeter] = {}
        self._place: dict[str, Any] | None = None
        self._taken = 0
        self._warmup = max(trials.warmup, WARMUP_STEPS)  # the first turn follows the start
        self.current = 0
        """Number of the plan in use."""
        self.state = TrialState()
        self.other_number: int | None = None
        """Number of the plan on other ranks, where there is one."""
        if offer is not None:
            self._add_other(Path(offer.folder))
        self._make_room()

    @property
    def folder(self) -> Path:
        """Folder of the plan in use."""
        return self.folders[self.current]

    def uses(self) -> list[PlanUse]:
        """List the plans that the run was trained under."""
        return [PlanUse(step=int(step), plan_id=str(name)) for step, name in self.state.uses]

    def plain(self) -> dict[str, Any]:
        """Return the state as plain values for a checkpoint."""
        return asdict(self.state)

    def _add_other(self, folder: Path) -> None:
        self.other_number = len(self.plans)
        self.folders.append(folder)
        self.plans.append(load_plan(folder))
        check_alike([self.plans[0], self.plans[-1]], any_ranks=True)

    def _make_room(self) -> None:
        self.state.seconds += [list[float]() for _ in self.plans[len(self.state.seconds) :]]

    def begin(self, job: "Job") -> None:
        """Take over a job that has opened one of the plans."""
        self.current = self._number_of(job.plan.plan_id)
        self._meters[self.current] = job.loader.meter
        self.state.uses = [[0, job.plan.plan_id]]

    def resume(self, job: "Job", plan_id: str, state: dict[str, Any] | None) -> None:
        """Go on where a checkpoint under `plan_id` was, without a plan under which ranks ended.

        Collective. `state` is that of `plain`; None starts at the first turn.
        """
        self._number_of(plan_id)
        if state is not None:
            self.state = TrialState(**state)
            self._make_room()
        if self.current != self.other_number:
            self._drop_marked(job)
        kept = self.state.kept
        if self.current == self.other_number:
            self._go_on_elsewhere(job, kept)
        elif kept is None:
            self._next_turn(job)
        elif kept != self.current:
            self._go_on_under(job, kept)
        if kept is not None and attempt() == 0:  # the launcher that was told may have ended
            self._tell_kept(job, again=True)
        self._note_use(job)
        self._warmup = max(self.trials.warmup, WARMUP_STEPS)

    def _go_on_elsewhere(self, job: "Job", kept: int | None) -> None:
        """Go on under the plan on other ranks, unless it was slower or ranks ended under it."""
        if kept is None:
            raise PlanError(
                f"{job.config.run_folder}: expected a checkpoint from the end of an epoch under "
                "the plan before, found none; train without --resume"
            )
        slower = kept != self.current and bool(self.state.seconds[self.current])
        if slower or (attempt() > 0 and self._marked_plan(job)):
            self._leave(job, kept)  # a mark that is still there tells that ranks ended

    @property
    def _tries_other(self) -> bool:
        """Whether the plan on other ranks is in use and not kept yet."""
        return self.current == self.other_number != self.state.kept

    @property
    def _num_counted(self) -> int:
        """Number of steps of a turn that count: on other ranks as many as of the plan before."""
        kept = self.state.kept
        return self.trials.steps if kept is None else len(self.state.seconds[kept])

    def steps_left(self) -> int:
        """Return the number of steps to the end of the turn; large where all turns are over."""
        if self.state.kept is not None and not self._tries_other:
            return 1 << 62
        return self._warmup + self._num_counted - self._taken

    def count(self, steps: int) -> None:
        """Count steps that were taken."""
        self._taken += steps

    def end_turn(self, job: "Job", *, epoch_ended: bool = False) -> None:
        """Begin the next turn if all steps of this one were taken. Collective then.

        At an epoch's end, which all ranks reach together, a plan on other ranks may have its turn.
        """
        if self.steps_left() <= 0:
            counted = job.loop.meter.seconds(STEP)[-self._num_counted :]
            if self._tries_other:
                self.state.seconds[self.current] = counted
                self._judge_other(job)
            else:
                self.state.seconds[self.current] += counted
                self.state.turn += 1
                self._next_turn(job)
            job.heartbeat.begin(Phase.TRAINING)
        if epoch_ended and self.state.kept is not None and self.current != self.other_number:
            self._take_offer(job)

    def _take_offer(self, job: "Job") -> None:
        """Leave for a plan on other ranks that is offered and untried, if it can have its turn."""
        config, offer = job.config, None
        if job.loop.comm.rank == 0 and not job.disk_full:
            offer = read_offer(config.run_path)
        offer = job.loop.comm.broadcast_object(offer)
        if offer is None or offer.folder_before:
            return
        left = (config.epochs - job.loader.position.epoch) * len(job.loader)
        few = left <= max(self.trials.steps_elsewhere(self._num_counted), offer.least_steps)
        if few or config.max_steps is not None or config.keep_checkpoints == 0:
            return
        if self.other_number is None:
            self._add_other(Path(offer.folder))
            self._make_room()
        assert self.other_number is not None
        if str(self.other_number) not in self.state.failed:
            self._leave(job, self.other_number)

    def _judge_other(self, job: "Job") -> None:
        """Keep the plan on other ranks if it is faster by rank 0's seconds, else leave it."""
        kept, other = self.state.kept, self.current
        assert kept is not None
        before, now = self._median_steps([kept, other])
        faster = bool(job.loop.comm.broadcast_object(now < before))
        self._mark(job, 0)
        if faster:
            self.state.kept = other
        self._tell_kept(job)
        save(job)
        if not faster:
            self._leave(job, kept)

    def _leave(self, job: "Job", number: int) -> None:
        """Let the launcher go on under a plan on another number of ranks."""
        job.is_leaving = True
        plan, away = self.plans[number], number == self.other_number
        if job.loop.comm.rank == 0:
            before = self.folders[self.current if away else number]
            if away:
                self._mark(job, number)
            offer = read_offer(job.config.run_path)
            other = str(self.folders[self.other_number or 0])
            offer = replace(offer or RanksOffer(folder=other), folder_before=str(before))
            write_offer(job.config.run_path, replace(offer, in_use=away))
        what = "is tried" if away else "goes on"
        ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
        steps = f"{job.steps} step{'s' if job.steps > 1 else ''}"
        line = f"after {steps}: a plan on {ranks} {what}, from the checkpoint"
        job.notes.append(line)
        job.events.emit("ranks", step=job.steps, plan_id=plan.plan_id, line=line)

    def _next_turn(self, job: "Job") -> None:
        turns, state = self.trials.turns, self.state
        while state.turn < len(turns) and str(turns[state.turn]) in state.failed:
            state.turn += 1
        self._taken, self._warmup = 0, self.trials.warmup
        if state.turn == len(turns):
            self._keep(job)
        elif turns[state.turn] != self.current and not self._try(job, turns[state.turn]):
            self._next_turn(job)

    def _try(self, job: "Job", wanted: int) -> bool:
        """Switch to a plan on trial; where that fails return False, under the plan before."""
        before = self.current
        if wanted not in self._meters:
            save(job)  # what its opening may end is not lost
        self._mark(job, wanted)
        why = self._switch(job, wanted)
        if why:
            self._fail(job, wanted, why)
            self._mark(job, before)
            self._go_on_under(job, before)
        return not why

    def _keep(self, job: "Job") -> None:
        """Choose the fastest plan by rank 0's seconds, and go on under it. Collective."""
        best = int(job.loop.comm.broadcast_object(self._fastest()))
        self._mark(job, 0)
        self.state.kept = best
        if best != self.current and (why := self._switch(job, best)):
            self._fail(job, best, why)
            self.state.kept = 0
            self._go_on_under(job, 0)
        self._tell_kept(job)
        save(job)

    def _tell_kept(self, job: "Job", *, again: bool = False) -> None:
        """Emit what was measured of each plan, and the used plan's stages. Collective.

        Call it before a checkpoint says what is kept: a run that goes on from that would not.
        `again` tells it to a new launcher.
        """
        meter, counted = job.loop.meter, self._num_counted
        samples = {name: meter.seconds(name)[-counted:] for name in meter.stages()}
        stages = typical_stages(job.loop.comm.all_gather_objects(samples))
        told = {name: value for name, value in self.plain().items() if name != "uses"}
        ids = [plan.plan_id for plan in self.plans]
        job.events.emit("kept", step=job.steps, plans=ids, stages=stages, again=again, **told)

    def _fastest(self) -> int:
        """Return the number of the plan with the least median step, the first of equal ones."""
        return int(np.argmin(self._median_steps(range(len(self.plans)))))

    def _median_steps(self, numbers: Sequence[int]) -> list[float]:
        """Return the median step of each of some plans; infinite where it failed or took none.

        Steps are joined to windows as long as the largest stack of batches, for all plans alike.
        """
        stack = max(self.plans[number].strategy.bulk_batches for number in numbers)
        return [
            float(np.median(window_means(self.state.seconds[number], stack)))
            if self.state.seconds[number] and str(number) not in self.state.failed
            else float("inf")
            for number in numbers
        ]

    def _number_of(self, plan_id: str) -> int:
        for number, plan in enumerate(self.plans):
            if plan.plan_id == plan_id:
                return number
        known = ", ".join(plan.plan_id[:12] for plan in self.plans)
        raise PlanError(
            f"expected one of the run's plans {known}, found {plan_id[:12]}; train without --resume"
        )

    def _fail(self, job: "Job", number: int, why: str) -> None:
        self.state.failed[str(number)] = why
        line = f"plan {self.plans[number].plan_id[:12]} is not tried again: {why}"
        job.warn(line)

    def _go_on_under(self, job: "Job", number: int) -> None:
        """Switch to a plan that has worked before."""
        if why := self._switch(job, number):
            raise GnnplanError(f"plan {self.plans[number].plan_id[:12]} does not open again: {why}")

    def _switch(self, job: "Job", number: int) -> str:
        """Go on under another plan; return why some rank cannot, which leaves the job without one.

        Collective. Where ranks meet in the opening, a rank that fails raises: the others wait for
        it, and all start again.
        """
        plan, comm = self.plans[number], job.loop.comm
        self._drop_loader(job)
        job.heartbeat.begin(Phase.STARTING)
        comm.barrier()  # memory that other ranks had mapped is its owner's again
        cores, why = self._use_threads(plan), ""
        loader: PlannedLoader | None = None
        try:
            meter = self._meters.get(number) or StageMeter()
            loader = self._open(self.folders[number], meter)
        except Exception as error:  # whatever it is, the plan before can go on
            if comm.size > 1 and _meets(plan):
                raise
            why = f"rank {comm.rank}: {type(error).__name__}: {one_line(error)}"
        reasons = [each for each in comm.all_gather_objects(why) if each]
        if loader is not None and reasons:
            loader.close()
        elif loader is not None:
            self._adopt(job, number, loader)
            job.cores = cores
        return "" if not reasons else reasons[0]

    def _drop_loader(self, job: "Job") -> None:
        """Close the job's loader, and free what it holds: one plan's memory at a time."""
        if self._place is None:
            self._place = job.loader.position.state_dict()
            job.loader.close()
            job.loader = cast("PlannedLoader", None)
            gc.collect()

    def _adopt(self, job: "Job", number: int, loader: PlannedLoader) -> None:
        """Give a job the loader of a plan, at its place, and the loop what belongs to the plan."""
        plan, place = self.plans[number], self._place or {}
        loader.load_state_dict(place | {"plan_id": plan.plan_id})
        loader.handed_out, _ = loader.meter.total(STEP)
        loader.meter.on_enter = job.heartbeat.enter
        self._meters[number], self._place, self.current = loader.meter, None, number
        job.plan, job.loader = plan, loader
        job.loop.meter = loader.meter
        if job.loop.overlapped is not None:
            job.loop.overlapped.close()
        job.loop.overlapped = overlap_of(plan, job.loop.gradients, job.loop.comm)
        self._note_use(job)

    def _note_use(self, job: "Job") -> None:
        uses = [each for each in self.state.uses if each[0] < job.steps]
        if not uses or uses[-1][1] != job.plan.plan_id:
            uses.append([job.steps, job.plan.plan_id])
        self.state.uses = uses
        job.events.emit("plan", step=job.steps, plan_id=job.plan.plan_id)

    def _mark(self, job: "Job", number: int) -> None:
        """Name the plan on trial in the run's folder; the first one is never on trial."""
        if job.loop.comm.rank != 0:
            return
        path = job.config.run_path / TRIAL_MARK
        if number == 0:
            path.unlink(missing_ok=True)
            return
        known = {"folder": str(self.folders[number]), "plan_id": self.plans[number].plan_id}
        with contextlib.suppress(OSError):  # a full disk is told of by the checkpoints
            codec.write_text_atomically(path, json.dumps(known))

    def _marked_plan(self, job: "Job") -> str:
        """Return the id of the plan on trial; empty where there is none. Collective."""
        path, found = job.config.run_path / TRIAL_MARK, ""
        if job.loop.comm.rank == 0 and path.is_file():
            found = str(json.loads(path.read_text())["plan_id"])
        return str(job.loop.comm.broadcast_object(found))

    def _drop_marked(self, job: "Job") -> None:
        """Drop the plan under which ranks ended, or on the way to it."""
        found = self._marked_plan(job)
        if job.loop.comm.rank == 0:
            end_trial(job.config.run_path)
        for number, plan in enumerate(self.plans):
            if plan.plan_id == found and number > 0:
                self._fail(job, number, "the ranks ended under it")


def _meets(plan: Plan) -> bool:
    """Return whether ranks wait for each other while a plan's loader opens.

    GPUs of a host always do: they hold once what it keeps for them.
    """
    strategy = plan.strategy
    exchanges = any(source.kind in ("peer", "remote") for source in strategy.features.sources)
    lists = strategy.topology.policy in ("partitioned", "cached")
    shared = strategy.kind == "cuda" or strategy.batching == "cooperative"
    return exchanges or lists or shared
