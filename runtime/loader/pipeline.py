"""A batch's way through the loader's stages, and the position of the next batch."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gnnplan.runtime.errors import InputError, PlanError
from gnnplan.runtime.loader.device import tensors_of
from gnnplan.runtime.loader.factory import IN_READ
from gnnplan.runtime.loader.stages import AbstractStage
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.train.overlap import Turns
from gnnplan.runtime.train.streams import AbstractMark, AbstractStreams


def pass_through(
    batch: MiniBatch,
    stages: Sequence[AbstractStage],
    meter: StageMeter,
    streams: AbstractStreams,
    index: int,
    turn: int,
    turns: Turns,
) -> tuple[MiniBatch, AbstractMark | None]:
    """Pass a batch through all stages; return it with the mark at which it is whole, or None.

    `index` numbers this process's steps, for the meter; `turn` this iteration's, for `turns`.
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
    """Let the training lane's further work come after a batch is made; return the batch."""
    batch, mark = made
    if mark is not None:
        streams.wait(mark)
        streams.keep(tensors_of(batch))
    return batch


def _exchanged(batch: MiniBatch) -> float:
    """Return the batch's seconds in exchanges so far, which are metered apart."""
    if not batch.seconds:
        return 0.0
    return sum(batch.seconds.get(name, 0.0) for name in IN_READ)


class Position:
    """Epoch and step of the next batch."""

    def __init__(self, plan_id: str, num_steps: int, epoch: int = 0) -> None:
        self._plan_id, self._num_steps = plan_id, num_steps
        self.epoch: int = epoch
        self.step: int = 0
        self._taken = False

    def advance(self) -> None:
        """Count a batch as taken."""
        self._taken = True
        self.step += 1
        if self.step == self._num_steps:
            self.epoch, self.step = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch`, or stay at a place in it that was just loaded.

        A script may so call this before each epoch, like a DistributedSampler's, also before the
        one that it goes on in.
        """
        if self._taken or epoch != self.epoch:
            self.epoch, self.step, self._taken = epoch, 0, False

    def begin_epoch(self) -> None:
        """Start the next epoch where some, not all, batches of this one were taken."""
        if self._taken and self.step:
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"plan_id": self._plan_id, "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        InputError says that it is no such state, PlanError that it is another plan's.
        """
        try:
            plan_id, epoch, step = str(state["plan_id"]), int(state["epoch"]), int(state["step"])
        except (KeyError, TypeError, ValueError):
            epoch = step = -1
            plan_id = ""
        if epoch < 0 or not 0 <= step < self._num_steps:
            raise InputError(
                f"expected a loader's state_dict (plan_id, epoch, step below {self._num_steps}), "
                f"found {dict(state)!r:.200}"
            )
        if plan_id != self._plan_id:
            raise PlanError(
                f"expected the state of a loader of plan {self._plan_id[:12]}, found one of plan "
                f"{plan_id[:12]}; go on under that plan, or start at an epoch's beginning with "
                "set_epoch"
            )
        self.epoch, self.step, self._taken = epoch, step, False
