"""The factor of locality-aware sampling while training: measured, agreed upon, kept.

After each epoch every rank adds its seconds of data movement and of whole iterations to those of
the others; from the two sums all ranks take the same next factor (`FactorSchedule`, formulas 1.6).
The published code lets rank 0 decide; the sums over ranks say the same of ranks that are alike.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.locality import FactorSchedule
from gnnplan.runtime.sampling.registry import find_sampler, number, parameters_of
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.minibatch import STEP

MOVEMENT = (Stage.EXCHANGE_IDS, Stage.GATHER, Stage.EXCHANGE_ROWS, Stage.COPY)
"""Stages that move features to the device."""


@dataclass(kw_only=True)
class FactorControl:
    """One rank's part in the common factor; every rank makes the same calls in the same order."""

    schedule: FactorSchedule
    meter: StageMeter
    follows: bool
    """False where the plan fixes the factor."""
    movement_seconds: float = 0.0
    """Of this epoch's steps before an interruption, all ranks together, held by rank 0."""
    iteration_seconds: float = 0.0
    _counted: dict[str, int] = field(default_factory=dict[str, int])
    """Records of the meter that belong to earlier epochs, by stage."""

    @property
    def factor(self) -> float:
        """The factor now in use."""
        return self.schedule.factor

    def after_epoch(self, comm: Communicator) -> float:
        """The factor of the next epoch, the same on every rank; a collective call."""
        if not self.follows:
            return self.factor
        self.schedule = self.schedule.after_epoch(*self._sums(comm))
        self.movement_seconds = self.iteration_seconds = 0.0
        self._counted = {name: len(self.meter.seconds(name)) for name in (*MOVEMENT, STEP)}
        return self.factor

    def state(self, comm: Communicator) -> dict[str, Any]:
        """For a checkpoint: the schedule, and all ranks' seconds of an epoch not yet ended.

        A collective call where the factor follows its schedule.
        """
        movement, iteration = self._sums(comm) if self.follows else (0.0, 0.0)
        return {**asdict(self.schedule), "movement": movement, "iteration": iteration}

    def load_state(self, state: dict[str, Any], *, rank: int) -> None:
        """Go on where `state` was taken; rank 0 brings the seconds kept into the next sums."""
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
        """Seconds of movement and of iterations in this epoch, over all ranks."""
        movement = self.movement_seconds + sum((self._new(s) for s in MOVEMENT), 0.0)
        iteration = self.iteration_seconds + self._new(STEP)
        both = torch.tensor([movement, iteration], dtype=torch.float64, device=comm.device)
        comm.all_reduce_sum(both)
        return float(both[0]), float(both[1])

    def _new(self, stage: str) -> float:
        return sum(self.meter.seconds(stage)[self._counted.get(stage, 0) :], 0.0)


def factor_control(sampler: Sampler, meter: StageMeter) -> FactorControl | None:
    """The control of a plan's sampler; None where it has no factor.

    Raises:
        SamplerError: the plan names no schedule there is.
    """
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
