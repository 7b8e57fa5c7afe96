"""Epochs: train, validate, keep a checkpoint, report."""

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.device import machine_facts
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.faults.heartbeat import Heartbeat, Phase
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.models.metrics import metric_of
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.process import HostState, age_seconds, host_state, memory_bytes, noise_between
from gnnplan.runtime.report import (
    MAX_STEP_SAMPLES,
    WARMUP_STEPS,
    EpochReport,
    RankReport,
    RunReport,
    measured_steps,
    save_report,
    typical_stages,
)
from gnnplan.runtime.train.evaluate import evaluate, evaluation_room
from gnnplan.runtime.train.fullgraph import FullGraphEpochs
from gnnplan.runtime.train.links import evaluate_links
from gnnplan.runtime.train.locality import FactorControl, factor_control
from gnnplan.runtime.train.minibatch import STEP, TrainLoop
from gnnplan.runtime.train.recovery import Mark, save

SECONDS_BETWEEN_STEPS = 0.1
"""Least time between two step events."""
_log = logging.getLogger(__name__)


class Events:
    """Appends events to a file; without a file they go nowhere."""

    def __init__(self, path: Path | None) -> None:
        # Without a buffer: what the disk refused is not tried again when the file is closed.
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
        """Write how far the epoch is, at most ten times a second."""
        now = time.perf_counter()
        if self._file is not None and now - self._last >= SECONDS_BETWEEN_STEPS:
            self._last = now
            self.emit("step", epoch=epoch, step=step, steps=steps, loss=loss, share=step / steps)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


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
    first_epoch: int = 0
    """Epoch of the first of them: above 0 where the reports before it were lost."""
    epochs_mark: Mark = field(default_factory=Mark)
    """How many of them lie beside the checkpoints."""
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
    disk_full: bool = False
    """True from a checkpoint that found no room to one that did."""
    loop_started_seconds: float = 0.0
    private_memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Take the plan's factor as it stands before the first epoch."""
        self.factor = factor_control(self.plan.strategy.sampler, self.loop.meter)

    def train(self) -> None:
        """All epochs that are still missing, and the test."""
        self.loop_started_seconds = age_seconds()
        steps = len(self.loader)
        self.events.emit(
            "start", ranks=self.loop.comm.size, epochs=self.config.epochs, steps_per_epoch=steps
        )
        while self.loader.position.epoch < self.config.epochs and self._allowed() > 0:
            if self._train_epoch():
                self._end_epoch()
        if self.config.eval_every:
            self.heartbeat.begin(Phase.EVALUATING)
            last = self.first_epoch + len(self.epochs) - 1
            self.test_score, _ = self._score(f"epoch {last}, test", self.loader.graph.test_idx)

    def _allowed(self) -> int:
        """Steps that may still be taken in this run."""
        if self.config.max_steps is None:
            return len(self.loader)
        return self.config.max_steps - len(self.losses)

    def _train_epoch(self) -> bool:
        """Take the epoch's remaining steps; False where the run's last step came before its end."""
        epoch = self.loader.position.epoch
        self.heartbeat.begin(Phase.TRAINING)
        every = self.config.checkpoint_every_steps or len(self.loader)
        while self.loader.position.epoch == epoch and self._allowed() > 0:
            done = self.loader.position.step
            most = min(every - done % every, self._allowed())
            started = time.perf_counter()
            batches: Iterator[Any] = self.loader.batches(most)
            self.loop.run(batches, self.loader.handed_out, self._on_step)
            self.epoch_seconds += time.perf_counter() - started
            if self.loader.position.epoch == epoch and self.config.checkpoint_every_steps:
                save(self)
                self.heartbeat.begin(Phase.TRAINING)
        return self.loader.position.epoch > epoch

    def _on_step(self, loss: float) -> None:
        self.losses.append(loss)
        self.epoch_losses.append(loss)
        self.steps += 1
        done, total = len(self.epoch_losses), len(self.loader)
        self.events.step(self.first_epoch + len(self.epochs), done, total, loss)

    def _end_epoch(self) -> None:
        epoch = self.first_epoch + len(self.epochs)
        started = time.perf_counter()
        val = None
        self.heartbeat.begin(Phase.EVALUATING)
        if self.config.eval_every and (epoch + 1) % self.config.eval_every == 0:
            val, _ = self._score(f"epoch {epoch}, validation", self.loader.graph.val_idx)
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
        save(self)
        self.events.emit(
            "epoch",
            epoch=epoch,
            loss=report.loss,
            val=val,
            seconds=report.seconds,
            share=1.0,
        )

    def _score(self, where: str, ids: NDArray[np.int64]) -> tuple[float | None, int]:
        """Score of all ranks together on nodes or links, and how many of them it rests on."""
        if len(ids) == 0:
            return None, 0
        room = evaluation_room(self.plan, self.loop.comm.rank)
        score = (evaluate_links if self.plan.graph.task == "link" else evaluate)(
            self.loop.model,
            self.loader.graph,
            self.loader.store,
            ids,
            workload=self.plan.workload,
            fanouts=self.config.eval_fanouts,
            comm=self.loop.comm,
            chunk_bytes=room.chunk_bytes,
            table_bytes=room.table_bytes,
            where=where,
        )
        return score.value, score.count

    def finish(self) -> RunReport:
        """Gather every rank's figures; each host writes report.json, rank 0 into the plan too."""
        ranks = self.loop.comm.all_gather_objects(self._rank_report())
        meter = self.loop.meter
        seconds = meter.seconds(STEP)
        steps = measured_steps(seconds)
        samples = {
            str(name): meter.seconds(name, skip_steps=steps.discarded)[:MAX_STEP_SAMPLES]
            for name in meter.stages(skip_steps=steps.discarded)
        }
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
            emulated=self.plan.strategy.emulated,
            stages=typical_stages(self.loop.comm.all_gather_objects(samples)),
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
