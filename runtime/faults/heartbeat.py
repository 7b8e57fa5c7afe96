"""Signs of life of a host's ranks, in memory that they share with the process that watches them.

Each rank has a row of 64-bit numbers in a table without a file name (memfd): nothing is left behind
whoever is killed, and no full disk stops it. A thread of the rank counts `BEATS`: the process runs.
Entering a stage counts `MOVES`: the training gets on. Both are counters, not times, so no clock of
one process is compared with another's.
"""

import mmap
import os
import threading
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.stages import LOADER_STAGES, Stage

VARIABLE = "GNNPLAN_HEARTBEAT"
"""Environment variable that names the table to a rank."""
BEAT_SECONDS = 0.5


class Field(IntEnum):
    """Columns of the table, in the order of `Beat`'s fields."""

    PID = 0
    RANK = 1
    ATTEMPT = 2
    PHASE = 3
    BEATS = 4
    MOVES = 5
    STEP = 6
    """Step of the training thread, within this process."""
    STAGE = 7
    LOADER_STEP = 8
    LOADER_STAGE = 9
    LOADER_MEETS = 10
    """1 where the loader's stage waits for other ranks."""


NUM_FIELDS = 16
STAGES = list(Stage)
MEETINGS = (Stage.ALL_REDUCE, Stage.HALO_EXCHANGE)
"""Stages of the training thread in which a rank may have to wait for others."""


class Phase(IntEnum):
    """Phases of a rank; in `TRAINING` alone stages follow each other without end."""

    STARTING = 0
    TRAINING = 1
    EVALUATING = 2
    SAVING = 3
    FINISHED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A rank's row, read at one moment."""

    pid: int
    rank: int
    attempt: int
    phase: Phase
    beats: int
    moves: int
    step: int
    stage: str
    loader_step: int
    loader_stage: str
    loader_meets: bool

    @property
    def place(self) -> tuple[int, int]:
        """Progress of the training thread: its step, and the stage's position in a step."""
        return self.step, STAGES.index(Stage(self.stage)) if self.stage else -1

    @property
    def meeting(self) -> bool:
        """Whether the training thread waits for other ranks, itself or through the loader."""
        return self.stage in MEETINGS or (self.stage == Stage.WAIT and self.loader_meets)

    @property
    def where(self) -> str:
        """Stage and step, or phase, in words."""
        if self.phase is not Phase.TRAINING or not self.stage:
            return self.phase.name.lower()
        if self.stage == Stage.WAIT and self.loader_stage:
            return f"{self.loader_stage} of step {self.loader_step}"
        return f"{self.stage} of step {self.step}"


class HeartbeatTable:
    """The rows of one host's ranks, as their watcher holds them."""

    def __init__(self, num_rows: int) -> None:
        self._descriptor = os.memfd_create("gnnplan-heartbeat")
        size = num_rows * NUM_FIELDS * 8
        os.ftruncate(self._descriptor, size)
        self.name = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._rows = _rows(mmap.mmap(self._descriptor, size))

    def read(self, row: int) -> Beat | None:
        """Read a row; None where no rank has written into it."""
        numbers = self._rows[row].tolist()
        if numbers[Field.PID] == 0:
            return None
        values: dict[str, Any] = {field.name.lower(): numbers[field] for field in Field}
        values["phase"] = Phase(values["phase"])
        values["stage"] = _stage(values["stage"])
        values["loader_stage"] = _stage(values["loader_stage"])
        values["loader_meets"] = values["loader_meets"] == 1
        return Beat(**values)


class Heartbeat:
    """A rank's own row; without a watcher it lies in private memory."""

    def __init__(self, row: NDArray[np.int64] | None = None) -> None:
        self._row = np.zeros(NUM_FIELDS, np.int64) if row is None else row
        self._ended = threading.Event()
        self.saved = ""
        """What the job's newest checkpoint holds, for ranks whose host has none of its files."""

    @classmethod
    def join(cls) -> "Heartbeat":
        """Take this rank's row of the table that the environment names, and start to beat.

        Raises OSError where the table is gone, and with it the process that watches.
        """
        name = os.environ.get(VARIABLE, "")
        if not name:
            return cls()
        with Path(name).open("r+b") as file:
            rows = _rows(mmap.mmap(file.fileno(), 0))
        heartbeat = cls(rows[int(os.environ.get("LOCAL_RANK", "0"))])
        row = heartbeat._row
        row[:] = 0
        row[Field.STAGE] = row[Field.LOADER_STAGE] = -1
        row[Field.RANK] = int(os.environ.get("RANK", "0"))
        row[Field.ATTEMPT] = attempt()
        row[Field.PID] = os.getpid()  # last: it makes the row valid
        threading.Thread(target=heartbeat._beat, name="heartbeat", daemon=True).start()
        return heartbeat

    @property
    def moves(self) -> int:
        """Number of stages entered and phases begun so far."""
        return int(self._row[Field.MOVES])

    def enter(self, stage: str, step: int, meets: bool = False) -> None:
        """Record that a thread of this rank enters a stage of a step of this process.

        Of several loader threads, the one where ranks meet is shown until its batch goes on: others
        cannot get far without it.
        """
        row, loader = self._row, stage in LOADER_STAGES
        row[Field.MOVES] += 1
        if loader and not meets and row[Field.LOADER_MEETS] and step > row[Field.LOADER_STEP]:
            return
        row[Field.LOADER_STEP if loader else Field.STEP] = step
        row[Field.LOADER_STAGE if loader else Field.STAGE] = _NUMBERS.get(stage, -1)
        if loader:
            row[Field.LOADER_MEETS] = meets

    def begin(self, phase: Phase) -> None:
        """Record that this rank begins a phase."""
        self._row[Field.PHASE] = int(phase)
        self._row[Field.MOVES] += 1

    def close(self) -> None:
        """Record that the rank has finished, and stop beating."""
        self.begin(Phase.FINISHED)
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._row[Field.BEATS] += 1


def attempt() -> int:
    """Return how often torchrun has restarted the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


_NUMBERS = {str(stage): number for number, stage in enumerate(STAGES)}


def _stage(number: int) -> str:
    return str(STAGES[number]) if 0 <= number < len(STAGES) else ""


def _rows(memory: mmap.mmap) -> NDArray[np.int64]:
    return np.frombuffer(memory, np.int64).reshape(-1, NUM_FIELDS)
