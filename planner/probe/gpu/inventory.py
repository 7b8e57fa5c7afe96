"""Facts of the GPUs that CUDA shows, as the driver states them (`nvml.py` asks).

None is unknown throughout. Of divided GPUs (MIG) CUDA shows a process one slice, which is planned
with its own memory. Where the driver does not name the slices, the smallest one that there is
stands for it: an eighth of the memory.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gnnplan.planner.machine.model import GPUS_LOST
from gnnplan.planner.units import counted
from gnnplan.runtime.device import VARIABLE, Listed, Shown, read_slices, shown_gpus

IDLE_BYTES = 1 << 30
"""Most bytes of a GPU's memory that the driver itself takes; more are other processes'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvLink:
    """One link of one GPU."""

    index: int
    up: bool | None
    peer_access: bool | None
    remote_kind: str
    """gpu | npu | switch | unknown."""
    remote_bus_id: str
    """PCI address of the other end; empty where unknown."""
    bytes_per_second: float | None
    """Rate in one direction, as the driver states it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU; None is unknown."""

    index: int
    uuid: str
    name: str
    bus_id: str
    """PCI address domain:bus:device.function, lower case, domain of 4 hex digits."""
    compute_capability: tuple[int, int] | None
    memory_bytes: int | None
    mig: bool | None
    numa_node: int | None
    numa_conflict: tuple[int, int] | None
    """NUMA nodes by NVML and the system, where they disagree."""
    pci_bridges: list[str] | None
    """PCI addresses above it, the one next to the root first."""
    cpus: list[int] | None
    """Numbers of the cores next to it."""
    pcie_generation: int | None
    """Present generation: the link trains down when idle."""
    pcie_width: int | None
    pcie_max_generation: int | None
    pcie_max_width: int | None
    nvlinks: list[NvLink] | None
    """Links; None where not one could be asked for (MIG, old driver)."""
    compute_processes: int | None
    """Number of processes that use it now: it is measured alone or not at all."""
    used_bytes: int | None = None
    """Bytes of its memory that are taken now."""
    slice_of: str = ""
    """UUID of the divided GPU (MIG) that this is a slice of; empty: it is a whole one."""

    @property
    def others_bytes(self) -> int:
        """Bytes of its memory that other processes hold, as far as the driver tells."""
        used = self.used_bytes or 0
        return used if self.compute_processes or used > IDLE_BYTES else 0

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that a plan may use; None where its memory is unknown."""
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
    """Whether the links pass a switch; None: no NVLink, or unknown."""


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
        """Return the function's answer, or None where it is refused or unknown to this module."""
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
        """Return an integer answer, or None."""
        answer = self.ask(name, *arguments)
        return None if answer is None else int(answer)

    def text(self, name: str, *arguments: Any) -> str:
        """Return a text answer, empty where unknown."""
        answer = self.ask(name, *arguments)
        if answer is None:
            return ""
        return answer.decode() if isinstance(answer, bytes) else str(answer)


def differences(gpus: list[Gpu]) -> list[str]:
    """Say which kinds of GPUs there are, where they differ, and how plans take it."""
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
        f"GPUs differ: {'; '.join(words)}: plans take those of one model, which read most in all, "
        f"by their own rates; name others in {VARIABLE} and probe to plan for them"
    ]


def is_denied(p2p: Mapping[str, bool | None]) -> bool:
    """Tell whether the driver denies two GPUs to read each other's memory, over NVLink too."""
    return p2p["read"] is False and p2p["nvlink"] is not True


def denied_notes(gpus: list[Gpu], pairs: list[GpuPair]) -> list[str]:
    """Say which GPUs with NVLinks the driver does not let read each other's memory."""
    joined = {gpu.index for gpu in gpus if any(link.up for link in gpu.nvlinks or [])}
    found = [
        f"gpu{pair.first} and gpu{pair.second}"
        for pair in pairs
        if {pair.first, pair.second} <= joined and is_denied(pair.p2p)
    ]
    return [peers_text(found, "the driver denies peer access")] if found else []


CUDA_DENIES = "CUDA denies peer access"


def peers_text(pairs: Sequence[str], whose: str) -> str:
    """Say that pairs of GPUs cannot read each other's memory, and how plans take it."""
    return (
        f"GPUs {', '.join(pairs)}: {whose}: planned without, their rows go over "
        "the host; see nvidia-smi topo -p2p r, and turn off ACS or the IOMMU, which forbid it"
    )


def busy_text(gpu: Gpu) -> str:
    """Say that others use a GPU; empty where nobody does."""
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
    """Return a machine's notes on its GPUs and their free memory."""
    return [note for note in notes if _OF_GPUS.match(note) and " refused: spread " not in note]


_OF_GPUS = re.compile(rf"gpu\d+: |{GPUS_LOST}|GPUs[ ']|GPU pairs |torch shows |{VARIABLE}=")


SMALLEST_SLICE = 8
"""Parts that a GPU can be divided into at most (NVIDIA MIG user guide)."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A part of a divided GPU; None is unknown."""

    uuid: str
    name: str
    memory_bytes: int | None
    used_bytes: int | None


def slices_of(asker: Asker, handle: Any) -> list[Slice] | None:
    """Return the slices of a GPU under MIG; None where the driver does not tell."""
    handles = read_slices(asker.nvml, handle)
    if handles is None:
        return None
    found: list[Slice] = []
    for each in handles:
        memory = asker.ask("nvmlDeviceGetMemoryInfo", each)
        found.append(
            Slice(
                uuid=asker.text("nvmlDeviceGetUUID", each),
                name=asker.text("nvmlDeviceGetName", each),
                memory_bytes=None if memory is None else int(memory.total),
                used_bytes=None if memory is None else used_bytes(memory),
            )
        )
    return found


def used_bytes(memory: Any) -> int | None:
    """Return the bytes taken by NVML's answer on a device's memory; None if it does not say."""
    used = getattr(memory, "used", None)
    free = getattr(memory, "free", None)
    if used is None and free is not None:
        return int(memory.total) - int(free)
    return None if used is None else int(used)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visible:
    """The GPUs that CUDA shows, in its order, and what a reader must know of it."""

    places: list[int]
    """Place of each among the driver's GPUs."""
    gpus: list[Gpu]
    notes: list[str]


def visible_gpus(
    gpus: list[Gpu],
    slices: list[list[Slice] | None],
    environment: Mapping[str, str] | None = None,
) -> Visible:
    """Pick the GPUs that CUDA shows out of those that the driver lists.

    Args:
        gpus: all GPUs of the machine.
        slices: slices of each GPU under MIG; None: it is whole, or the driver does not name them.
        environment: variables; None: those of this process.
    """
    variables = os.environ if environment is None else environment
    listed = [
        Listed(
            uuid=gpu.uuid,
            slices=None if parts is None else [part.uuid for part in parts],
            divided=bool(gpu.mig),
        )
        for gpu, parts in zip(gpus, slices, strict=True)
    ]
    shown = shown_gpus(listed, variables)
    found = [_shown_gpu(gpus[each.gpu], slices[each.gpu], each) for each in shown]
    notes = _hidden_notes(gpus, found, variables) + _slice_notes(gpus, slices, shown)
    return Visible(places=[each.gpu for each in shown], gpus=found, notes=notes)


def _shown_gpu(gpu: Gpu, slices: list[Slice] | None, shown: Shown) -> Gpu:
    if shown.slice is not None and slices is not None:
        part = slices[shown.slice]
        return replace(
            gpu,
            uuid=part.uuid,
            name=part.name or f"{gpu.name} MIG",
            memory_bytes=part.memory_bytes,
            used_bytes=part.used_bytes,
            slice_of=gpu.uuid,
            compute_processes=None,
            nvlinks=None,
        )
    if gpu.mig and gpu.memory_bytes is not None:
        smallest = gpu.memory_bytes // SMALLEST_SLICE
        return replace(gpu, name=f"{gpu.name} MIG", memory_bytes=smallest, used_bytes=None)
    return gpu


_NONE = ("", "-1", "NoDevFiles")
"""Values of the variable by which users hide all GPUs."""


def _hidden_notes(gpus: list[Gpu], found: list[Gpu], variables: Mapping[str, str]) -> list[str]:
    text = variables.get(VARIABLE)
    if text is None or [gpu.uuid for gpu in gpus] == [gpu.uuid for gpu in found]:
        return []
    if not found and text.strip() not in _NONE:
        return [
            f"{GPUS_LOST}{VARIABLE}={text}: 0 of {len(gpus)} GPUs are visible, it names none of "
            "them (nvidia-smi -L lists their numbers and UUIDs)"
        ]
    names = ", ".join(f"gpu{gpu.index} {gpu.uuid}" for gpu in found) or "none"
    note = (
        f"{VARIABLE}={text}: {len(found)} of {len(gpus)} GPUs are visible, in this order, and "
        f"planned with: {names}"
    )
    by_number = not text.startswith(("GPU-", "MIG-"))
    if by_number and len({gpu.name for gpu in gpus}) > 1 and not _in_pci_order(variables):
        note += (
            "; the GPUs differ, and CUDA numbers the fastest first: set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"
        )
    return [note]


def _in_pci_order(variables: Mapping[str, str]) -> bool:
    return variables.get("CUDA_DEVICE_ORDER", "").upper() == "PCI_BUS_ID"


def _slice_notes(
    gpus: list[Gpu], slices: list[list[Slice] | None], shown: list[Shown]
) -> list[str]:
    notes: list[str] = []
    for place, (gpu, parts) in enumerate(zip(gpus, slices, strict=True)):
        chosen = next((each for each in shown if each.gpu == place), None)
        if not gpu.mig:
            continue
        if parts is None:
            rest = _left_out_text(f"{counted(len(gpus) - 1, 'other GPU')} and its other slices")
            notes += [] if chosen is None else [f"{unknown_slice_text(gpu)}; {rest}"]
        elif not parts:
            notes.append(
                f"gpu{gpu.index}: MIG is on and it has no slice: CUDA shows nothing of it; make "
                "slices with nvidia-smi mig -cgi, or turn MIG off with nvidia-smi -mig 0"
            )
        elif chosen is not None and chosen.slice is not None:
            part = parts[chosen.slice]
            size = "unknown" if part.memory_bytes is None else _gib(part.memory_bytes)
            whole = "" if gpu.memory_bytes is None else f" of {_gib(gpu.memory_bytes)}"
            others = f"{len(gpus) - 1} other GPUs and {counted(len(parts) - 1, 'slice')}"
            notes.append(
                f"gpu{gpu.index}: MIG is on: planned with slice {part.uuid}, {size}{whole}; "
                f"{_left_out_text(others)}"
            )
    return notes


def _left_out_text(others: str) -> str:
    return (
        f"CUDA shows a process one slice and no whole GPU beside it, so {others} are left out; "
        f"choose by {VARIABLE}, or turn MIG off with nvidia-smi -mig 0"
    )


def unknown_slice_text(gpu: Gpu) -> str:
    """Say what is known of a GPU under MIG whose slices the driver does not name."""
    return (
        f"gpu{gpu.index}: MIG is on and the driver names no slice of it: planned with an eighth of "
        "its memory, the smallest slice there is"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
