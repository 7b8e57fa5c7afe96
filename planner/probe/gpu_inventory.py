"""What the driver says of the GPUs that CUDA shows, and what a reader must know of them.

Read by `nvml.py`; facts, no measured rate. None is unknown throughout.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.probe.nvlinks import NvLink
from runtime.visible_gpus import VARIABLE

IDLE_BYTES = 1 << 30
"""The driver itself takes less of a GPU's memory: what is more belongs to other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU; None is unknown."""

    index: int
    uuid: str
    name: str
    bus_id: str
    """domain:bus:device.function, lower case, domain of 4 hex digits."""
    compute_capability: tuple[int, int] | None
    memory_bytes: int | None
    mig: bool | None
    numa_node: int | None
    numa_conflict: tuple[int, int] | None
    """What NVML and the system say of the NUMA node, where they disagree."""
    pci_bridges: list[str] | None
    """PCI addresses above it, the one next to the root first."""
    cpus: list[int] | None
    """Cores next to it."""
    pcie_generation: int | None
    """Now: the link trains down when idle."""
    pcie_width: int | None
    pcie_max_generation: int | None
    pcie_max_width: int | None
    nvlinks: list[NvLink] | None
    """None where not one link could be asked for (MIG, old driver)."""
    compute_processes: int | None
    """Processes that use it now: it is measured alone or not at all."""
    used_bytes: int | None = None
    """Of its memory, taken now."""
    slice_of: str = ""
    """UUID of the divided GPU (MIG) that this is a slice of; empty: it is a whole one."""

    @property
    def others_bytes(self) -> int:
        """Bytes of its memory that other processes hold, as far as the driver tells."""
        used = self.used_bytes or 0
        return used if self.compute_processes or used > IDLE_BYTES else 0

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that are there for a plan; None where its memory is unknown."""
        return None if self.memory_bytes is None else max(0, self.memory_bytes - self.others_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPair:
    """How two GPUs are joined; None is unknown."""

    first: int
    second: int
    common_ancestor: str | None
    p2p: dict[str, bool | None]
    num_nvlinks: int | None
    via_switch: bool | None
    """None where there is no NVLink between them or it is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The GPUs that CUDA shows, in its order, and their pairs."""

    driver_version: str
    cuda_driver_version: int | None
    gpus: list[Gpu]
    pairs: list[GpuPair]
    notes: list[str] = field(default_factory=list[str])


class Asker:
    """Calls NVML functions and turns every refusal into None."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.refused: set[str] = set()

    def ask(self, name: str, *arguments: Any) -> Any:
        """The function's answer, or None where it is refused or unknown to this module."""
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)
        if function is None:
            self.refused.add(name)
            return None
        try:
            return function(*arguments)
        except self.nvml.NVMLError:
            self.refused.add(name)
            return None

    def number(self, name: str, *arguments: Any) -> int | None:
        """An integer answer, or None."""
        answer = self.ask(name, *arguments)
        return None if answer is None else int(answer)

    def text(self, name: str, *arguments: Any) -> str:
        """A text answer, empty where unknown."""
        answer = self.ask(name, *arguments)
        if answer is None:
            return ""
        return answer.decode() if isinstance(answer, bytes) else str(answer)


def differences(gpus: list[Gpu]) -> list[str]:
    """What to say of GPUs that are not all of one kind: which there are, and how plans take it."""
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.memory_bytes), []).append(gpu.index)
    if len(kinds) < 2:
        return []
    words = [
        f"{', '.join(f'gpu{i}' for i in numbers)} {name}"
        + ("" if size is None else f" of {size / 2**30:.1f} GiB")
        for (name, size), numbers in kinds.items()
    ]
    return [
        f"GPUs differ: {'; '.join(words)}: plans go by the slowest one's rates and each one's own "
        f"memory; name equal ones in {VARIABLE} to plan for them alone"
    ]


def busy_text(gpu: Gpu) -> str:
    """What to say of a GPU that others use; empty where nobody does."""
    whose = f"{gpu.compute_processes} other processes use it"
    if gpu.memory_bytes is not None and gpu.others_bytes:
        held, free = gpu.others_bytes / 2**30, (gpu.capacity_bytes or 0) / 2**30
        by = whose if gpu.compute_processes else "others use it"
        return f"gpu{gpu.index}: {by} and hold {held:.1f} GiB: planned with the {free:.1f} GiB free"
    if gpu.compute_processes:
        return (
            f"gpu{gpu.index}: {whose}, how much of its memory is unknown: planned with all of it; "
            "end them, or give --device-memory"
        )
    return ""


def gpu_notes(notes: Sequence[str]) -> list[str]:
    """Of a machine's notes those on which GPUs there are and what is free of them."""
    return [note for note in notes if _OF_GPUS.match(note) and " refused: spread " not in note]


_OF_GPUS = re.compile(rf"gpu\d+: |GPUs |torch shows |{VARIABLE}=")
