"""What the GPU probe asks of a device: seconds of pieces of work, alone or beside others.

The measuring code (`gpu_measure`) knows nothing but this; on CUDA `gpu_torch` answers, in tests a
law of seconds with noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

MIB = 2**20

Kind = Literal["copy", "copy_back", "gather", "compute", "launch", "all_reduce"]
"""copy: by the copy engine into the GPU; copy_back: out of it to the host; gather: random rows by
the runtime's kernel; compute: a matrix product; launch: empty kernels; all_reduce: a sum over the
first GPUs, seconds of `gpu`."""
Place = Literal["own", "host", "peer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One piece of work, on one GPU."""

    kind: Kind
    gpu: int
    place: Place = "own"
    """Where the bytes come from (`copy_back`: go to)."""
    owner: int = -1
    """The peer that holds them."""
    num_bytes: int = 0
    """Moved in all, each byte once; of `compute` flops, of `launch` kernels, of `all_reduce` each
    GPU's part of the sum."""
    row_bytes: int = 0
    """Of a gather; 4 reads entries like those of adjacency lists."""
    programs: int = 0
    """Most programs of a gather's grid; 0: what the product takes."""
    ranks: int = 0
    """GPUs of an all-reduce, from the first on."""


@runtime_checkable
class GpuDevice(Protocol):
    """Runs work on GPUs."""

    num_gpus: int
    processors: int
    """Multiprocessors of a GPU: grids are multiples of it."""

    def seconds(self, work: Work, repeats: int, beside: Sequence[Work] = ()) -> list[float]:
        """Seconds of the work, so many times, while the works `beside` it run all along."""
        ...

    def spoiled(self, gpu: int) -> list[str]:
        """Why a measurement of this GPU cannot count now (throttled, shared); empty if it can."""
        ...

    def uuid(self, gpu: int) -> str:
        """What joins this GPU with the driver's list."""
        ...

    def peers(self) -> list[tuple[int, int]]:
        """(reader, owner) of every pair where the first can read the second's memory.

        Others copy from each other by way of the host.
        """
        ...

    def context_bytes(self, gpu: int) -> int:
        """Device memory that this process takes beside its tensors."""
        ...

    def process_bytes(self) -> int:
        """Host memory of a process that has a CUDA context and no data yet."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSizes:
    """How much is measured."""

    copy_bytes: int
    """Of a large copy."""
    message_bytes: tuple[int, ...]
    """Copies from small to large, for latency and bandwidth."""
    gather_bytes: int
    """That one gather writes."""
    row_bytes: tuple[int, ...]
    grids: tuple[float, ...]
    """Programs of a gather's grid, per multiprocessor."""
    flops: int
    launches: int
    repeats: int
    attempts: int
    limit: float
    """Largest spread that is believed."""
    budget_seconds: float
    """Noisy points are not repeated once so much has passed."""


FULL = GpuSizes(
    copy_bytes=512 * MIB,
    message_bytes=(4096, 65536, MIB, 16 * MIB, 256 * MIB),
    gather_bytes=256 * MIB,
    row_bytes=(4, 16, 64, 128, 256, 400, 512, 1024, 4096),
    grids=(0.25, 0.5, 1.0, 2.0, 4.0),
    flops=2 * 8192**3,
    launches=200,
    repeats=7,
    attempts=3,
    limit=0.1,
    budget_seconds=60.0,
)
QUICK = GpuSizes(
    copy_bytes=128 * MIB,
    message_bytes=(4096, MIB, 64 * MIB),
    gather_bytes=64 * MIB,
    row_bytes=(4, 64, 512, 4096),
    grids=(0.5, 4.0),
    flops=2 * 4096**3,
    launches=100,
    repeats=5,
    attempts=2,
    limit=0.1,
    budget_seconds=10.0,
)
