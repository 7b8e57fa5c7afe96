"""Model factories that tests name in a plan (`tests.support.models:NAME`)."""

import errno
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gnnplan.runtime import codec
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.stages import Stage
from gnnplan.runtime.train.job import Job


class Faulty(nn.Module):
    """SAGE that does what $GNNPLAN_TEST_FAULT says on one rank at one step: "rank:step:how".

    Rank "*" is every rank; "rank:step:how:once" spares the attempts after a restart. "rank:8:room"
    has room for 8 seeds at once in evaluations.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.num_calls = 0
        rank, step, self.how, *once = os.environ.get("GNNPLAN_TEST_FAULT", "-1:0:none").split(":")
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        self.here = rank in ("*", os.environ.get("RANK", "0")) and not (once and again)
        self.step = int(step)

    def forward(self, x: Tensor, blocks: Sequence[TorchBlock]) -> Tensor:
        """Logits, unless the fault is due."""
        self.num_calls += 1
        if self.here and self.how == "room" and not self.training:
            self.refuse(blocks[-1].num_dst)
        if self.here and self.num_calls == self.step:
            self.fail()
        logits: Tensor = self.model(x, blocks)
        return logits * float("nan") if self.here and self.how == "nan" else logits

    def refuse(self, num_seeds: int) -> None:
        """Find no room for more seeds than the step's number, as a GPU that is full."""
        if num_seeds > self.step:
            raise torch.OutOfMemoryError(f"no room for {num_seeds} seeds")

    def fail(self) -> None:
        """Raise, die now or later, stop, hang, move the clock, or take all memory."""
        if self.how == "raise":
            raise RuntimeError("the model gave up")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "hang":
            time.sleep(600)
        if self.how == "memory":
            raise MemoryError("cannot allocate 12 GiB")
        if self.how == "full":
            fill_disk()
        if self.how == "leave":
            die_at_end()
        if self.how in ("past", "future"):
            day = -86400.0 if self.how == "past" else 86400.0
            clock = time.time
            time.time = lambda: clock() + day
        if self.how == "eat":
            eaten: list[bytes] = []
            while True:
                eaten.append(os.urandom(1 << 24))


def fill_disk() -> None:
    """From now on no checkpoint of this process finds room."""
    write = codec.write_bytes_atomically

    def refuse(path: Path, data: bytes) -> None:
        if path.suffix == ".pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    codec.write_bytes_atomically = refuse


def die_at_end() -> None:
    """From now on this process is killed when it has taken its steps."""

    def finish(self: Job) -> RunReport:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    Job.finish = finish


def faulty(workload: Workload, in_dim: int, num_classes: int, task: str) -> nn.Module:
    """A `Faulty` SAGE of the workload's shape."""
    return Faulty(build_model(replace(workload, model="sage"), in_dim, num_classes, task))


class Uncounted(nn.Module):
    """A model that takes as many blocks as it is given."""

    def __init__(self, in_dim: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, num_classes)

    def forward(self, x: Tensor, blocks: Sequence[TorchBlock]) -> Tensor:
        """Logits of the seeds from their own features."""
        logits: Tensor = self.linear(x[: blocks[-1].num_dst])
        return logits


def uncounted(workload: Workload, in_dim: int, num_classes: int, task: str) -> nn.Module:
    """An `Uncounted` model."""
    del workload, task
    return Uncounted(in_dim, num_classes)


def metered(workload: Workload, in_dim: int, num_classes: int, task: str) -> nn.Module:
    """A `Faulty` SAGE in a process whose meter shows chosen seconds.

    A step takes one second, of which the gather takes this rank's number in $GNNPLAN_TEST_SHARES
    ("0.9,0.0"); locality factors that are set are appended to $GNNPLAN_TEST_FACTORS.<rank>.
    """
    rank = int(os.environ.get("RANK", "0"))
    share = float(os.environ["GNNPLAN_TEST_SHARES"].split(",")[rank])
    chosen = {"step": 1.0, str(Stage.GATHER): share}
    add, set_factor = StageMeter.add, PlannedLoader.set_factor

    def add_chosen(
        self: StageMeter, stage: str, step: int, seconds: float, core_seconds: float = 0.0
    ) -> None:
        del seconds
        add(self, stage, step, chosen.get(str(stage), 0.0), core_seconds)

    def set_and_note(self: PlannedLoader, factor: float) -> None:
        with Path(f"{os.environ['GNNPLAN_TEST_FACTORS']}.{rank}").open("a") as file:
            file.write(f"{factor} ")
        set_factor(self, factor)

    StageMeter.add = add_chosen
    PlannedLoader.set_factor = set_and_note
    return faulty(workload, in_dim, num_classes, task)


class Noting(nn.Module):
    """A model that notes its rank in a buffer while it trains, and then answers with that class."""

    def __init__(self, in_dim: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, num_classes)
        self.noted: Tensor
        self.register_buffer("noted", torch.tensor(0))

    def forward(self, x: Tensor, blocks: Sequence[TorchBlock]) -> Tensor:
        """Logits of the seeds."""
        logits: Tensor = self.linear(x[: blocks[-1].num_dst])
        if self.training:
            self.noted.fill_(int(os.environ.get("RANK", "0")))
            return logits
        return nn.functional.one_hot(self.noted, logits.shape[1]).float().expand_as(logits)


def noting(workload: Workload, in_dim: int, num_classes: int, task: str) -> nn.Module:
    """A `Noting` model."""
    del workload, task
    return Noting(in_dim, num_classes)
