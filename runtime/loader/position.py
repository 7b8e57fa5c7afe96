"""Place of a loader in its epochs, as its state for a checkpoint."""

from collections.abc import Mapping
from typing import Any

from gnnplan.runtime.errors import InputError, PlanError


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
        """Go on where `state_dict` was called, under the same plan."""
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
