"""Epochs: train, validate, keep a checkpoint, report; and going on after an interruption."""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import codec
from runtime.config import RunConfig
from runtime.device import machine_facts
from runtime.errors import GnnplanError, PlanError
from runtime.failure import attempt_line
from runtime.heartbeat import Heartbeat, Phase, attempt
from runtime.loader import PlannedLoader
from runtime.models.metrics import metric_of
from runtime.plan import Plan
from runtime.process import HostState, age_seconds, host_state, memory_bytes, noise_between
from runtime.report import (
    MAX_STEP_SAMPLES,
    WARMUP_STEPS,
    EpochReport,
    RankReport,
    RunReport,
    measured_steps,
    save_report,
)
from runtime.train.checkpoint import read_newest, save_checkpoint, set_aside, state_of
from runtime.train.evaluate import evaluate
from runtime.train.fullgraph import FullGraphEpochs
from runtime.train.links import evaluate_links
from runtime.train.locality import FactorControl, factor_control
from runtime.train.minibatch import STEP, TrainLoop
from runtime.train.progress import Events

CHECKPOINTS = "checkpoints"
_log = logging.getLogger(__name__)


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
    before: HostState = field(default_factory=host_state)
    epochs: list[EpochReport] = field(default_factory=list[EpochReport])
    losses: list[float] = field(default_factory=list[float])
    """Global loss of every step of this process."""
    epoch_losses: list[float] = field(default_factory=list[float])
    """Losses of the current epoch, also those before an interruption."""
    epoch_seconds: float = 0.0
    steps: int = 0
    """Optimiser steps taken since the model was made, also those before an interruption."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    factor: FactorControl | None = field(init=False)
    """The factor of locality-aware sampling; None for other samplers."""
    first_step: int = 0
    """Optimiser steps before this process's first."""
    test_score: float | None = None
    _disk_full: bool = False
    loop_started_seconds: float = 0.0
    private_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Take the plan's factor as it stands before the first epoch."""
        self.factor = factor_control(self.plan.strategy.sampler, self.loop.meter)

    def begin(self) -> None:
        """Go on from a checkpoint where that is asked for, or where the job was started again."""
        restarts = attempt()
        if restarts:
            why = attempt_line(self.config.run_path, restarts - 1)
            self.notes.append(f"restart {restarts}: {why}")
            self.events.emit("restart", line=self.notes[-1])
        if self.config.resume or restarts:
            self.resume()
        elif self.loop.comm.rank == 0:
            aside = set_aside(self.config.run_path / CHECKPOINTS)
            if aside is not None:
                self.notes.append(f"checkpoints of an earlier run are in {aside}")

    def train(self) -> None:
        """All epochs that are still missing, and the test."""
        self.loop_started_seconds = age_seconds()
        steps = len(self.loader)
        self.events.emit(
            "start", ranks=self.loop.comm.size, epochs=self.config.epochs, steps_per_epoch=steps
        )
        while self.loader.state()["epoch"] < self.config.epochs and self._allowed() > 0:
            if self._train_epoch():
                self._end_epoch()
        if self.config.eval_every:
            self.heartbeat.begin(Phase.EVALUATING)
            self.test_score, _ = self._score(self.loader.graph.test_idx)

    def _allowed(self) -> int:
        """Steps that may still be taken in this run."""
        if self.config.max_steps is None:
            return len(self.loader)
        return self.config.max_steps - len(self.losses)

    def _train_epoch(self) -> bool:
        """Take the epoch's remaining steps; False where the run's last step came before its end."""
        epoch = self.loader.state()["epoch"]
        self.heartbeat.begin(Phase.TRAINING)
        every = self.config.checkpoint_every_steps or len(self.loader)
        while self.loader.state()["epoch"] == epoch and self._allowed() > 0:
            done = self.loader.state()["step"]
            most = min(every - done % every, self._allowed())
            started = time.perf_counter()
            batches: Iterator[Any] = self.loader.batches(most)
            self.loop.run(batches, self.loader.handed_out, self._on_step)
            self.epoch_seconds += time.perf_counter() - started
            if self.loader.state()["epoch"] == epoch and self.config.checkpoint_every_steps:
                self._save_checkpoint()
                self.heartbeat.begin(Phase.TRAINING)
        return self.loader.state()["epoch"] > epoch

    def _on_step(self, loss: float) -> None:
        self.losses.append(loss)
        self.epoch_losses.append(loss)
        self.steps += 1
        done, total = len(self.epoch_losses), len(self.loader)
        self.events.step(len(self.epochs), done, total, loss)

    def _end_epoch(self) -> None:
        epoch = len(self.epochs)
        started = time.perf_counter()
        val = None
        self.heartbeat.begin(Phase.EVALUATING)
        if self.config.eval_every and (epoch + 1) % self.config.eval_every == 0:
            val, _ = self._score(self.loader.graph.val_idx)
        eval_seconds, started = time.perf_counter() - started, time.perf_counter()
        report = EpochReport(
            epoch=epoch,
            seconds=self.epoch_seconds,
            steps=len(self.epoch_losses),
            loss=float(np.mean(self.epoch_losses)),
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
        self._save_checkpoint()
        self.events.emit(
            "epoch",
            epoch=epoch,
            loss=report.loss,
            val=val,
            seconds=report.seconds,
            share=1.0,
        )

    def _score(self, ids: NDArray[np.int64]) -> tuple[float | None, int]:
        """Score of all ranks together on nodes or links, and how many of them it rests on."""
        if len(ids) == 0:
            return None, 0
        score = (evaluate_links if self.plan.graph.task == "link" else evaluate)(
            self.loop.model,
            self.loader.graph,
            self.loader.store,
            ids,
            workload=self.plan.workload,
            fanouts=self.config.eval_fanouts,
            comm=self.loop.comm,
        )
        return score.value, score.count

    def _save_checkpoint(self) -> None:
        """Write a checkpoint (rank 0); where the disk refuses it, warn once and train on.

        No generator's state is in it: every draw, dropout's too, comes from a stream that the seed,
        the epoch, the step and the rank give.
        """
        if self.config.keep_checkpoints == 0:
            return
        self.heartbeat.begin(Phase.SAVING)
        factor = None if self.factor is None else self.factor.state(self.loop.comm)
        if self.loop.comm.rank == 0:
            state = {
                "plan_id": self.plan.plan_id,
                "steps": self.steps,
                "loader": self.loader.state(),
                "factor": factor,
                "epochs": codec.dumps(self.epochs),
                "epoch_losses": self.epoch_losses,
                "epoch_seconds": self.epoch_seconds,
                "model": self.loop.model.state_dict(),
                "optimizer": self.loop.optimizer.state_dict(),
            }
            folder = self.config.run_path / CHECKPOINTS
            try:
                save_checkpoint(folder, self.steps, state, keep=self.config.keep_checkpoints)
                self._disk_full = False
            except OSError as error:
                self._warn_of_disk(folder, error)

    def _warn_of_disk(self, folder: Path, error: OSError) -> None:
        """One warning for each time the disk fills up; older checkpoints are whole."""
        if not self._disk_full:
            line = (
                f"{folder}: no checkpoint after step {self.steps} ({error}); training goes on and "
                "tries again at the next one, the older ones are untouched"
            )
            _log.warning("%s", line)
            self.notes.append(line)
            self.events.emit("warning", line=line)
        self._disk_full = True

    def resume(self) -> None:
        """Go on from the newest whole checkpoint; without one, start at the beginning.

        Rank 0 reads it for all, so that hosts without the run's folder resume as well.

        Raises:
            PlanError: it is of another plan.
        """
        comm = self.loop.comm
        found = read_newest(self.config.run_path / CHECKPOINTS) if comm.rank == 0 else (None, [])
        data, warnings = comm.broadcast_object(found)
        self.notes += warnings
        state = None if data is None else state_of(data, device=self._device())
        if state is not None and state["plan_id"] != self.plan.plan_id:
            raise PlanError(
                f"{self.config.run_folder}: expected checkpoints of plan {self.plan.plan_id[:12]}, "
                f"found {str(state['plan_id'])[:12]}; use another run folder"
            )
        if state is None:
            self.notes.append("no checkpoint to resume from; started at the beginning")
            return
        self.loop.model.load_state_dict(state["model"])
        self.loop.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state(state["loader"])
        if self.factor is not None:
            self.factor.load_state(state["factor"], rank=comm.rank)
            self.loader.set_factor(self.factor.factor)
        self.steps = self.first_step = int(state["steps"])
        self.epoch_losses = [float(loss) for loss in state["epoch_losses"]]
        self.epoch_seconds = float(state["epoch_seconds"])
        self.epochs = [codec.decode(EpochReport, each) for each in json.loads(state["epochs"])]
        self.notes.append(f"resumed after step {self.steps}")

    def _device(self) -> str:
        return str(self.loop.gradients.flat.device)

    def finish(self) -> RunReport:
        """Gather every rank's figures; each host writes report.json, rank 0 into the plan too."""
        ranks = self.loop.comm.all_gather_objects(self._rank_report())
        seconds = self.loop.meter.seconds(STEP)
        steps = measured_steps(seconds)
        report = RunReport(
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
        )
        hosts = [device.host for device in self.plan.strategy.devices]
        if self.loop.comm.rank == hosts.index(hosts[self.loop.comm.rank]):
            self._save_report(report)
        self.events.emit("end", test=self.test_score, step_seconds=steps.median)
        return report

    def _save_report(self, report: RunReport) -> None:
        """Write the report; the training behind it is in the last checkpoint, whatever happens."""
        plan_folder = [Path(self.config.plan_folder)] if self.loop.comm.rank == 0 else []
        for folder in (self.config.run_path, *plan_folder):
            try:
                save_report(report, folder)
            except OSError as error:
                raise GnnplanError(
                    f"{folder}: the report cannot be written ({error}); make room, then --resume "
                    "writes it from the last checkpoint"
                ) from None

    def _startup_seconds(self, seconds: list[float], median: float) -> float:
        """Until the first step, and what the first steps took beyond a usual one."""
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
        )
