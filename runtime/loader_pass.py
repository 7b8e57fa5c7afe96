"""A batch's way through the loader: stages entered, metered and, where ranks meet, in turn."""

import time
from collections.abc import Sequence

from runtime.loader_build import IN_READ
from runtime.loader_device_batch import tensors_of
from runtime.loader_stages import AbstractStage
from runtime.meter import StageMeter
from runtime.sampling.minibatch import MiniBatch
from runtime.train.overlap import Turns
from runtime.train.streams import AbstractMark, AbstractStreams


def pass_through(
    batch: MiniBatch,
    stages: Sequence[AbstractStage],
    meter: StageMeter,
    streams: AbstractStreams,
    index: int,
    turn: int,
    turns: Turns,
) -> tuple[MiniBatch, AbstractMark | None]:
    """The batch after all stages, and the point in a device's work at which it is whole.

    Args:
        batch: knows its epoch and step.
        stages: in order.
        meter: records each stage's seconds.
        streams: of the device.
        index: numbers this process's steps, for the meter.
        turn: numbers this iteration's steps, for `turns`.
        turns: lets ordered stages of other batches go first.

    Returns:
        None in place of the point where nothing is under way.
    """
    seconds: dict[str, float] = {}
    mark, lane = None, ""
    for number, stage in enumerate(stages):
        if stage.ordered:
            turns.take(number, turn)
        meter.enter(stage.name, index, meets=stage.ordered)
        core, start, before = time.thread_time(), time.perf_counter(), _exchanged(batch)
        with streams.on(stage.lane):
            if mark is not None and stage.lane != lane:
                streams.wait(mark)
                streams.keep(tensors_of(batch))
            batch = stage.wait(stage.submit(batch, index))
            if stage.lane:  # the others work on the host, and are done
                mark, lane = streams.mark(), stage.lane
        elapsed = time.perf_counter() - start
        if stage.ordered:
            turns.done(number, turn)
        elapsed -= _exchanged(batch) - before
        seconds[stage.name] = elapsed
        meter.add(stage.name, index, elapsed, time.thread_time() - core)
    batch.seconds |= seconds
    return batch, mark


def taken(made: tuple[MiniBatch, AbstractMark | None], streams: AbstractStreams) -> MiniBatch:
    """A batch as training takes it: what its lane does from here on comes after the batch is made.

    Args:
        made: as `pass_through` returns it.
        streams: of the device.
    """
    batch, mark = made
    if mark is not None:
        streams.wait(mark)
        streams.keep(tensors_of(batch))
    return batch


def _exchanged(batch: MiniBatch) -> float:
    """Seconds that the batch spent in exchanges so far: they are metered apart from the stages."""
    if not batch.seconds:
        return 0.0
    return sum(batch.seconds.get(name, 0.0) for name in IN_READ)
