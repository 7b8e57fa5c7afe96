"""Model factories that tests name in a plan (`tests.support.models:NAME`)."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from runtime.models.adjacency import TorchBlock
from runtime.models.build import build_model
from runtime.plan import Workload


class Faulty(nn.Module):
    """SAGE that does what $GNNPLAN_TEST_FAULT says on one rank at one step: "rank:step:how"."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.num_calls = 0
        rank, step, self.how = os.environ.get("GNNPLAN_TEST_FAULT", "-1:0:none").split(":")
        self.here = rank == os.environ.get("RANK", "0")
        self.step = int(step)

    def forward(self, x: Tensor, blocks: Sequence[TorchBlock]) -> Tensor:
        """Logits, unless the fault is due."""
        self.num_calls += 1
        if self.here and self.num_calls == self.step:
            self.fail()
        logits: Tensor = self.model(x, blocks)
        return logits * float("nan") if self.here and self.how == "nan" else logits

    def fail(self) -> None:
        """Raise, die, or hang."""
        if self.how == "raise":
            raise RuntimeError("the model gave up")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            time.sleep(600)


def faulty(workload: Workload, in_dim: int, num_classes: int, task: str) -> nn.Module:
    """A `Faulty` SAGE of the workload's shape."""
    return Faulty(build_model(replace(workload, model="sage"), in_dim, num_classes, task))
