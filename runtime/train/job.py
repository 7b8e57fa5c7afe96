"""A training job: epochs of steps, validation, checkpoints and the report.

Locality-aware sampling has a factor, which all ranks change together after each epoch, by the sums
of their seconds of data movement and of whole iterations (`FactorSchedule`, formulas 1.6). The
published code lets rank 0 decide, which is the same where ranks are alike.
"""

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.device import machine_facts
from gnnplan.runtime.errors import GnnplanError, InputError, SamplerError
from gnnplan.runtime.faults.heartbeat import Heartbeat, Phase
from gnnplan.runtime.graph.dataset import is_typed
from gnnplan.runtime.launch.config import RunConfig, end_trial
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import STEP, StageMeter
from gnnplan.runtime.models.metrics import metric_of, say_unscored
from gnnplan.runtime.plan.schema import Plan, Sampler
from gnnplan.runtime.process import HostState, age_seconds, host_state, memory_bytes, noise_between
from gnnplan.runtime.report import (
    MAX_STEP_SAMPLES,
    WARMUP_STEPS,
    EpochReport,
    RankReport,
    RunReport,
    load_report,
    measured_steps,
    save_report,
    typical_stages,
)
from gnnplan.runtime.sampling.locality import FactorSchedule
from gnnplan.runtime.sampling.registry import find_sampler, number, parameters_of
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.evaluate import evaluate, evaluate_links
from gnnplan.runtime.train.evaluation_room import choose_fanouts, evaluation_room
from gnnplan.runtime.train.fullgraph import FullGraphEpochs
from gnnplan.runtime.train.minibatch import TrainLoop, lend_buffers
from gnnplan.runtime.train.recovery import Mark, save
from gnnplan.runtime.train.trials import TrialRun

SECONDS_BETWEEN_STEPS = 0.1
"""Least time between two step events."""
_log = logging.getLogger(__name__)


class Events:
    """Writer of events to a file; without a file they are dropped."""

    def __init__(self, path: Path | None) -> None:
        # Unbuffered: a write that the disk refused is not tried again at the close.
        self._file = None if path is None else path.open("ab", buffering=0)
        self._last = 0.0
        self._torn = False
        self._warned = False

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event."""
        if self._file is None:
            return
        line = json.dumps({"event": event, **fields}) + "\n"
        data = (("\n" if self._torn else "") + line).encode()
        try:
            self._torn = self._file.write(data) != len(data)
        except OSError as error:
            if not self._warned:
                _log.warning("events are dropped: %s", error)
            self._warned = True

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        """Write the progress of the epoch, at most ten times a second."""
        now = time.perf_counter()
        if self._file is not None and now - self._last >= SECONDS_BETWEEN_STEPS:
            self._last = now
            self.emit("step", epoch=epoch, step=step, steps=steps, loss=loss, share=step / steps)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


MOVEMENT = (Stage.EXCHANGE_IDS, Stage.GATHER, Stage.EXCHANGE_ROWS, Stage.COPY)
"""Stages that move features to the device."""


@dataclass(kw_only=True)
class FactorControl:
    """One rank's part in the common factor; every rank makes the same calls in the same order."""

    schedule: FactorSchedule
    meter: StageMeter
    follows: bool
    """Whether the factor follows the measurements; False where the plan fixes it."""
    movement_seconds: float = 0.0
    """Seconds of this epoch before an interruption, of all ranks, held by rank 0."""
    iteration_seconds: float = 0.0
    _before: dict[str, float] = field(default_factory=dict[str, float])
    """The meter's seconds of earlier epochs, by stage."""

    @property
    def factor(self) -> float:
        """Factor now in use."""
        return self.schedule.factor

    def after_epoch(self, comm: Communicator) -> float:
        """Return the factor of the next epoch, the same on every rank; collective."""
        if not self.follows:
            return self.factor
        self.schedule = self.schedule.after_epoch(*self._sums(comm))
        self.movement_seconds = self.iteration_seconds = 0.0
        self._before = {name: self.meter.total(name)[1] for name in (*MOVEMENT, STEP)}
        return self.factor

    def state(self, comm: Communicator) -> dict[str, Any]:
        """Return the schedule and all ranks' seconds of an unfinished epoch, for a checkpoint.

        The call is collective where the factor follows its schedule.
        """
        movement, iteration = self._sums(comm) if self.follows else (0.0, 0.0)
        return {**asdict(self.schedule), "movement": movement, "iteration": iteration}

    def load_state(self, state: dict[str, Any], *, rank: int) -> None:
        """Go on where `state` was taken; rank 0 adds the kept seconds to the next sums."""
        self.schedule = replace(
            self.schedule,
            factor=float(state["factor"]),
            remembered=float(state["remembered"]),
            frozen=bool(state["frozen"]),
        )
        if rank == 0:
            self.movement_seconds = float(state["movement"])
            self.iteration_seconds = float(state["iteration"])

    def _sums(self, comm: Communicator) -> tuple[float, float]:
        movement = self.movement_seconds + sum((self._new(s) for s in MOVEMENT), 0.0)
        iteration = self.iteration_seconds + self._new(STEP)
        both = torch.tensor([movement, iteration], dtype=torch.float64)
        comm.host_lane.all_reduce_sum(both)
        return float(both[0]), float(both[1])

    def _new(self, stage: str) -> float:
        return self.meter.total(stage)[1] - self._before.get(stage, 0.0)


def make_factor_control(sampler: Sampler, meter: StageMeter) -> FactorControl | None:
    """Make the control of a plan's sampler; None where it has no factor."""
    if not find_sampler(sampler.name).prefers_local:
        return None
    values = parameters_of(sampler)
    factor = number(sampler.name, values, "factor")
    if values["schedule"] not in ("fixed", "measured"):
        raise SamplerError(
            f"sampler {sampler.name}: expected schedule to be fixed or measured, found "
            f"{values['schedule']!r}; choose one"
        )
    follows = values["schedule"] == "measured"
    schedule = FactorSchedule(factor=factor, remembered=factor)
    return FactorControl(schedule=schedule, meter=meter, follows=follows)


@dataclass(kw_only=True)
class Job:
    """A rank's whole run. All ranks go through the same steps; rank 0 writes the files."""

    config: RunConfig
    plan: Plan
    loader: PlannedLoader | FullGraphEpochs
    loop: TrainLoop
    events: Events
    cores: list[int]
    notes: list[str] = field(default_factory=list[str])
    forced: list[str] = field(default_factory=list[str])
    """How this host's graph and machine differ from the plan's."""
    before: HostState = field(default_factory=host_state)
    epochs: list[EpochReport] = field(default_factory=list[EpochReport])
    first_epoch: int = 0
    """Number of the first epoch in `epochs`; above 0 where earlier reports were lost."""
    epochs_mark: Mark = field(default_factory=Mark)
    """Part of `epochs` that lies beside the checkpoints."""
    losses: list[float] = field(default_factory=list[float])
    """Global loss of every step of this process."""
    epoch_losses: list[float] = field(default_factory=list[float])
    """Losses of the current epoch, with those before an interruption."""
    epoch_seconds: float = 0.0
    steps: int = 0
    """Optimiser steps since the model was made, with those before an interruption."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    factor: FactorControl | None = field(init=False)
    """Control of locality-aware sampling; None for other samplers."""
    first_step: int = 0
    """Optimiser steps before this process's first."""
    trials: TrialRun | None = None
    """Plans that the run tries in turn; None where it has one."""
    is_leaving: bool = False
    """Whether the run goes on under a plan on other ranks, which this process does not see."""
    test_score: float | None = None
    finished: RunReport | None = None
    """Report of a run that went on when nothing of it was left to do: it is kept."""
    disk_full: bool = False
    """Whether the last checkpoint found no room."""
    has_cut_pieces: bool = False
    """Whether an evaluation of some rank found less room than its plan leaves; said once."""
    loop_started_seconds: float = 0.0
    private_memory_bytes: int = 0

    def __post_init__(self) -> None:
        self.factor = make_factor_control(self.plan.strategy.sampler, self.loop.meter)

    def warn(self, line: str) -> None:
        """Tell the user at once, and in the report."""
        self.notes.append(line)
        self.events.emit("warning", line=line)

    def train(self) -> None:
        """Train all missing epochs, then test."""
        self.loop_started_seconds = age_seconds()
        steps = len(self.loader)
        self.events.emit(
            "start", ranks=self.loop.comm.size, epochs=self.config.epochs, steps_per_epoch=steps
        )
        if self.loader.position.epoch > self._open_epoch and not self.is_leaving:
            self._end_epoch()  # ranks ended while it was evaluated
        while self.loader.position.epoch < self.config.epochs and self._allowed() > 0:
            if self._train_epoch():
                if self._is_evaluated(self._open_epoch):
                    save(self)  # what the evaluation may end is not lost
                self._end_epoch()
        found = self.finished = self._find_finished()
        is_tested = found is not None and found.test_score is not None
        if self.config.eval_every and not self.is_leaving and not is_tested:
            if found is None:  # what the test may end is not lost
                with suppress(GnnplanError):
                    self._save_report(self._report())
            self.heartbeat.begin(Phase.EVALUATING)
            where = f"epoch {self._open_epoch - 1}, test"
            self.test_score, _ = self._score(where, self.loader.graph.test_idx)

    def _find_finished(self) -> RunReport | None:
        """Read the report of a run that had ended before, and say so. Collective.

        None where steps were taken, or the report there is of another run or of fewer epochs.
        """
        if self.losses or self.is_leaving:
            return None
        found = None
        if self.loop.comm.rank == 0:
            with suppress(InputError):
                found = load_report(self.config.run_path)
        found = self.loop.comm.broadcast_object(found)
        if found is None or found.plan_id != self.plan.plan_id:
            return None
        known, done = {each.epoch: each for each in found.epochs}, self._open_epoch
        if any(known.get(e.epoch) != e for e in self.epochs) or max(known, default=-1) != done - 1:
            return None
        epochs = "1 epoch is" if done == 1 else f"{done} epochs are"
        said = f"the run is finished: its {epochs} trained, and its report is kept"
        self.events.emit("warning", line=f"{said}; more --epochs train on")
        return found

    @property
    def _open_epoch(self) -> int:
        """Number of the first epoch without a report."""
        return self.first_epoch + len(self.epochs)

    def _is_evaluated(self, epoch: int) -> bool:
        every = self.config.eval_every
        return every > 0 and (epoch + 1) % every == 0

    def _allowed(self) -> int:
        """Return the number of steps that this run may still take."""
        if self.is_leaving:
            return 0
        if self.config.max_steps is None:
            return len(self.loader)
        # Ranks that start again go on with the run's steps; a run that resumes may have its own.
        own = self.config.resume and not self.config.steps_in_all
        return self.config.max_steps - (len(self.losses) if own else self.steps)

    def _train_epoch(self) -> bool:
        """Take the epoch's remaining steps; return whether the epoch was completed."""
        epoch = self.loader.position.epoch
        self.heartbeat.begin(Phase.TRAINING)
        every = self.config.checkpoint_every_steps or len(self.loader)
        while self.loader.position.epoch == epoch and self._allowed() > 0:
            done = self.loader.position.step
            most = min(every - done % every, self._allowed())
            if self.trials is not None:
                most = min(most, self.trials.steps_left())
            started = time.perf_counter()
            batches: Iterator[Any] = self.loader.batches(most)
            taken = self.loop.run(batches, self.loader.handed_out, self._on_step)
            self.epoch_seconds += time.perf_counter() - started
            if self.trials is not None:
                self.trials.count(len(taken))
            if self.loader.position.epoch == epoch:
                self._between_steps(every)
        return self.loader.position.epoch > epoch

    def _between_steps(self, every: int) -> None:
        """Save and change plans where it is time to, within an epoch."""
        due = self.loader.position.step % every == 0 or self._allowed() <= 0
        if due and self.config.checkpoint_every_steps:
            save(self)
            self.heartbeat.begin(Phase.TRAINING)
        if self.trials is not None:
            self.trials.end_turn(self)

    def _on_step(self, loss: float) -> None:
        self.losses.append(loss)
        self.epoch_losses.append(loss)
        self.steps += 1
        done, total = len(self.epoch_losses), len(self.loader)
        self.events.step(self._open_epoch, done, total, loss)

    def _end_epoch(self) -> None:
        epoch, started = self._open_epoch, time.perf_counter()
        val = None
        self.heartbeat.begin(Phase.EVALUATING)
        if self._is_evaluated(epoch):
            val, _ = self._score(f"epoch {epoch}, validation", self.loader.graph.val_idx)
        eval_seconds, started = time.perf_counter() - started, time.perf_counter()
        report = EpochReport(
            epoch=epoch,
            seconds=self.epoch_seconds,
            steps=len(self.epoch_losses),
            loss=self._mean_loss(),
            first_loss=self.epoch_losses[0],
            last_loss=self.epoch_losses[-1],
            val=val,
            eval_seconds=eval_seconds,
        )
        self.epochs.append(report)
        self.epoch_losses, self.epoch_seconds = [], 0.0
        self.private_memory_bytes = max(self.private_memory_bytes, memory_bytes()[1])
        if self.factor is not None:
            self.loader.set_factor(self.factor.after_epoch(self.loop.comm))
        save(self)
        if self.trials is not None:
            self.trials.end_turn(self, epoch_ended=True)
        self.events.emit(
            "epoch", epoch=epoch, loss=report.loss, val=val, seconds=report.seconds, share=1.0
        )

    def _mean_loss(self) -> float:
        """Return the mean over the epoch's seeds, of which its last step may have fewer."""
        most, steps = self.plan.workload.batch_size, np.arange(len(self.epoch_losses))
        seeds = np.minimum(most, len(self.loader.graph.train_idx) - most * steps)
        return float(np.average(self.epoch_losses, weights=seeds))

    def _score(self, where: str, ids: NDArray[np.int64]) -> tuple[float | None, int]:
        if len(ids) == 0:
            return None, 0
        fanouts = choose_fanouts(self.plan, self.config.eval_fanouts)
        room = evaluation_room(self.plan, self.loop.comm.rank, fanouts)
        run = evaluate_links if self.plan.graph.task == "link" else evaluate
        with lend_buffers(self.loop.model, self.loop.comm):
            score = run(
                self.loop.model,
                self.loader.graph,
                self.loader.store,
                ids,
                workload=self.plan.workload,
                fanouts=fanouts,
                comm=self.loop.comm,
                chunk_bytes=room.chunk_bytes,
                table_bytes=room.table_bytes,
                device_table_bytes=room.device_table_bytes,
                where=where,
                **self._sorted_lists(),
            )
        if not self.has_cut_pieces:
            self._say_cut_pieces(score.note)
        if not math.isnan(score.value):
            return score.value, score.count
        line = say_unscored(where.rpartition(", ")[2], score.metric, score.count, len(ids))
        if line not in self.notes:
            self.warn(line)
        return None, score.count

    def _sorted_lists(self) -> dict[str, Any]:
        """Return a typed graph's lists by type, as an argument of `evaluate`. Collective."""
        if not is_typed(self.plan.workload) or not isinstance(self.loader, PlannedLoader):
            return {}
        return {"lists": self.loader.sorted_lists()}

    def _say_cut_pieces(self, note: str) -> None:
        """Note what the first rank that found too little room in an evaluation says. Collective."""
        found = [each for each in self.loop.comm.all_gather_objects(note) if each]
        if found:
            self.has_cut_pieces = True
            self.warn(found[0])

    def finish(self) -> RunReport:
        """Gather every rank's figures; each host writes report.json, rank 0 also into the plan."""
        report, tested = self.finished, self.test_score
        if report is None:
            report = self._report()
        elif tested is not None:
            report = replace(report, test_score=tested)
        if self.loop.comm.rank == 0 and not self.is_leaving:
            with suppress(OSError):  # a full disk, which the report will tell of
                end_trial(self.config.run_path)  # no rank has ended under it
        self._save_report(report)
        if not self.is_leaving:
            steps = report.step_seconds.median
            self.events.emit("end", test=report.test_score, step_seconds=steps)
        return report

    def _report(self) -> RunReport:
        """Make the report of this process's steps. Collective."""
        ranks = self.loop.comm.all_gather_objects(self._rank_report())
        forced = self.loop.comm.all_gather_objects(self.forced)
        meter = self.loop.meter
        seconds = meter.seconds(STEP)
        steps = measured_steps(seconds, lambda skip: meter.whole_seconds(STEP, skip))
        samples = {
            str(name): meter.whole_seconds(name, steps.discarded)[:MAX_STEP_SAMPLES]
            for name in meter.stages(skip_steps=steps.discarded)
        }
        return RunReport(
            plan_id=self.plan.plan_id,
            versions={"gnnplan": self.plan.version, **machine_facts()["versions"]},
            num_ranks=self.loop.comm.size,
            metric=metric_of(str(self.plan.graph.task)).name,
            ranks=ranks,
            step_seconds=steps,
            step_samples=seconds[steps.discarded :][:MAX_STEP_SAMPLES],
            epochs=self.epochs,
            losses=self.losses[:MAX_STEP_SAMPLES],
            first_step=self.first_step,
            startup_seconds=self._startup_seconds(seconds, steps.median),
            test_score=self.test_score,
            noise=noise_between(self.before, host_state()),
            notes=self.notes,
            forced=list(dict.fromkeys(line for lines in forced for line in lines)),
            emulated=self.plan.strategy.emulated,
            stages=typical_stages(self.loop.comm.all_gather_objects(samples)),
            plans=[] if self.trials is None else self.trials.uses(),
            overflowed_steps=self.loop.overflowed,
        )

    def close(self) -> None:
        """Close the loop, and the loader unless a plan on trial has left none."""
        self.loop.close()  # its graphs read what is the loader's
        if self.loader is not None:
            self.loader.close()

    def _save_report(self, report: RunReport) -> None:
        """Write a report on the first rank of each host, on rank 0 also into the plan's folder."""
        hosts, rank = [each.host for each in self.plan.strategy.devices], self.loop.comm.rank
        if rank != hosts.index(hosts[rank]):
            return
        place = Path(self.config.plan_folder) if self.trials is None else self.trials.folder
        for folder in (self.config.run_path, *([place] if rank == 0 else [])):
            try:
                save_report(report, folder)
            except OSError as error:
                raise GnnplanError(
                    f"{folder}: the report cannot be written ({error}); make room, then --resume "
                    "writes it from the last checkpoint"
                ) from None

    def _startup_seconds(self, seconds: list[float], median: float) -> float:
        """Return the time until the first step, and the excess of the first steps."""
        excess = sum(max(0.0, s - median) for s in seconds[:WARMUP_STEPS])
        return self.loop_started_seconds + excess

    def _rank_report(self) -> RankReport:
        rows, num_bytes = self.loop.meter.totals()
        lists, list_bytes = self.loop.meter.list_totals()
        total = max(1, sum(rows.values()))
        skip = measured_steps(self.loop.meter.seconds(STEP)).discarded
        return RankReport(
            rank=self.loop.comm.rank,
            stages=self.loop.meter.stages(skip_steps=skip),
            rows_by_source=rows,
            bytes_by_source=num_bytes,
            hit_rates={name: count / total for name, count in rows.items()},
            peak_memory_bytes=memory_bytes()[0],
            private_memory_bytes=max(self.private_memory_bytes, memory_bytes()[1]),
            lists_by_source=lists,
            list_bytes_by_source=list_bytes,
            resident_topology_bytes=self.loader.topology.resident_bytes,
            resident_feature_bytes=self.loader.store.resident_bytes,
            cores=self.cores,
            spans=self.loop.meter.spans(skip_steps=skip),
        )
