"""The runtime's own loop on a GPU: stages, lanes and threads as a rank has them, metered.

Parts of a step that are timed by themselves do not add up to it: one process starts all kernels,
and its threads share the interpreter's lock (DEC-86). So each way in which plans make batches (in
line or by a thread, kernel by kernel or by one CUDA graph) is run for some steps, in turns. Of its
rounds the last of the quickest third is kept (DEC-87).
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gnnplan.planner.profile.protocol import half_range, half_width
from gnnplan.planner.workload import GpuLoop
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.loader.device import DeviceBatchStage, DeviceGatherStage, DeviceSampleStage
from gnnplan.runtime.loader.stages import AbstractStage, CopyStage, SeedsStage, seed_batch
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.process import process_on, usable_core_ids
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.minibatch import STEP, TrainLoop
from gnnplan.runtime.train.overlap import (
    MadeBatch,
    Prefetcher,
    Turns,
    Workers,
    pass_through,
    take_made,
)
from gnnplan.runtime.train.streams import AbstractStreams, streams_of

LEAST_ROUNDS, ROUNDS = 3, 9
"""Least rounds of each way, and the most while time is left; ways take turns."""
STEPS, WARM_STEPS = 36, 8
"""Steps of a round, and those of them that are left out, as plans discard a run's first ones."""
DEPTH = 2
"""Batches that the thread may be ahead."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of making batches."""

    captured: bool
    ahead: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopParts:
    """What a loop is made of."""

    samplers: Mapping[bool, object]
    """Samplers on the device, by whether one CUDA graph draws a batch."""
    store: DeviceFeatureStore
    filling: DeviceBatchStage
    schedule: SeedSchedule
    dialect: Dialect
    training: TrainLoop
    """Training loop, whose meter is not used."""
    label_shape: tuple[int, ...]
    """Shape of one seed's label, for a graph that has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    steps: list[float]
    stages: dict[str, list[float]]

    @property
    def median(self) -> float:
        return float(np.median(self.steps))


def time_loops(parts: LoopParts, device: torch.device, seconds: float = math.inf) -> list[GpuLoop]:
    """Run every way in turns; beyond the least rounds only for so many seconds."""
    ways = [Way(captured, ahead) for captured in parts.samplers for ahead in (False, True)]
    rounds: dict[Way, list[_Round]] = {way: [] for way in ways}
    streams = streams_of(device)  # of all rounds: what a lane has freed only it takes again
    until = time.monotonic() + seconds
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.monotonic() >= until:
            break
        for way, found in rounds.items():
            found.append(_one_round(parts, way, streams, device, number))
    return [_loop_of(way, found) for way, found in rounds.items()]


def kept_place(count: int) -> int:
    """Return which of `count` rounds is kept, the quickest first.

    Were it always the second, more rounds would make it luckier (DEC-31).

    >>> [kept_place(count) for count in (1, 2, 3, 6, 9)]
    [0, 1, 1, 2, 3]
    """
    return min(count - 1, max(1, count // 3))


def _loop_of(way: Way, rounds: Sequence[_Round]) -> GpuLoop:
    ordered = sorted(rounds, key=lambda found: found.median)
    place = kept_place(len(ordered))
    kept, quick = ordered[place], ordered[: max(3, place + 1)]
    return GpuLoop(
        captured=way.captured,
        ahead=way.ahead,
        step_seconds=kept.median,
        stages={name: float(np.median(seconds)) for name, seconds in kept.stages.items()},
        spread=max(half_width(kept.steps), half_range([found.median for found in quick])),
    )


def _one_round(
    parts: LoopParts, way: Way, streams: AbstractStreams, device: torch.device, number: int
) -> _Round:
    meter = StageMeter()
    stages: list[AbstractStage] = [
        SeedsStage(parts.schedule, parts.dialect),
        DeviceSampleStage(parts.samplers[way.captured], device, meter, counted=False),
        DeviceGatherStage(parts.store, meter, streams, ordered=False),
        CopyStage(device, streams),
        parts.filling,
    ]
    per_epoch = parts.schedule.num_steps

    def make(index: int, turns: Turns) -> MadeBatch:
        epoch, step = divmod(number * STEPS + index, per_epoch)
        batch = seed_batch(epoch, step, parts.dialect)
        return pass_through(batch, stages, meter, streams, index, index, turns)

    def batches() -> Iterator[MiniBatch]:
        with Prefetcher(make, STEPS, workers=workers, depth=DEPTH) as ready:
            for made in ready:
                yield add_labels(take_made(made, streams), parts.label_shape, device)

    with process_on(usable_core_ids()[: 1 + way.ahead]):
        workers = Workers(int(way.ahead))
        try:
            replace(parts.training, meter=meter).run(batches(), 0, lambda _: None)
        finally:
            workers.close()
    names = [stage.name for stage in stages]
    names += [Stage.WAIT, Stage.FORWARD_BACKWARD, Stage.OPTIMIZER]
    return _Round(
        steps=meter.seconds(STEP, skip_steps=WARM_STEPS),
        stages={str(name): meter.seconds(name, skip_steps=WARM_STEPS) for name in names},
    )


def add_labels(batch: MiniBatch, shape: tuple[int, ...], device: torch.device) -> MiniBatch:
    """Add some labels to a batch that has none; one seed's label has shape `shape`."""
    if batch.y is None:
        batch.y = torch.zeros((batch.num_seeds, *shape), dtype=torch.int64, device=device)
    return batch
