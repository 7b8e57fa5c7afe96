"""The inventory of the GPUs that CUDA shows: slices in the place of divided GPUs, and what to say.

A divided GPU (MIG) is planned with its slice's own memory. Where the driver does not name the
slices, the smallest one that there is stands for it: an eighth of the memory.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.probe.gpu_inventory import Asker, Gpu
from runtime.visible_gpus import VARIABLE, Listed, Shown, read_slices, shown_gpus

SMALLEST_SLICE = 8
"""Slices of the smallest kind that a GPU can be divided into (NVIDIA MIG user guide)."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A part of a divided GPU; None is unknown."""

    uuid: str
    name: str
    memory_bytes: int | None
    used_bytes: int | None


def slices_of(asker: Asker, handle: Any) -> list[Slice] | None:
    """The slices of a GPU under MIG; None where the driver does not tell.

    Args:
        asker: asks NVML.
        handle: of the GPU.
    """
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
    """Bytes of a device's memory that are taken, of NVML's answer; None where it does not say."""
    used = getattr(memory, "used", None)
    free = getattr(memory, "free", None)
    if used is None and free is not None:
        return int(memory.total) - int(free)
    return None if used is None else int(used)


@dataclass(frozen=True, kw_only=True, slots=True)
class Visible:
    """The GPUs that CUDA shows, in its order, and what a reader must know of it."""

    places: list[int]
    """Of each, its place among the driver's GPUs."""
    gpus: list[Gpu]
    notes: list[str]


def visible_gpus(
    gpus: list[Gpu],
    slices: list[list[Slice] | None],
    environment: Mapping[str, str] | None = None,
) -> Visible:
    """Pick the GPUs that CUDA shows out of those that the driver lists.

    Args:
        gpus: all of the machine.
        slices: of each GPU under MIG; None: it is whole, or the driver does not name them.
        environment: variables; None: those of this process.
    """
    variables = os.environ if environment is None else environment
    listed = [
        Listed(uuid=gpu.uuid, slices=None if parts is None else [part.uuid for part in parts])
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


def _hidden_notes(gpus: list[Gpu], found: list[Gpu], variables: Mapping[str, str]) -> list[str]:
    text = variables.get(VARIABLE)
    if text is None or [gpu.uuid for gpu in gpus] == [gpu.uuid for gpu in found]:
        return []
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
            notes += [] if chosen is None else [unknown_slice_text(gpu)]
        elif not parts:
            notes.append(
                f"gpu{gpu.index}: MIG is on and it has no slice: CUDA shows nothing of it; make "
                "slices with nvidia-smi mig -cgi, or turn MIG off with nvidia-smi -mig 0"
            )
        elif chosen is not None and chosen.slice is not None:
            part = parts[chosen.slice]
            size = "unknown" if part.memory_bytes is None else _gib(part.memory_bytes)
            whole = "" if gpu.memory_bytes is None else f" of {_gib(gpu.memory_bytes)}"
            notes.append(
                f"gpu{gpu.index}: MIG is on: planned with slice {part.uuid}, {size}{whole}; CUDA "
                f"shows a process one slice and no whole GPU beside it, so {len(gpus) - 1} other "
                f"GPUs and {len(parts) - 1} slices are left out; choose by {VARIABLE}, or turn MIG "
                "off with nvidia-smi -mig 0"
            )
    return notes


def unknown_slice_text(gpu: Gpu) -> str:
    """What is known of a GPU under MIG whose slices the driver does not name."""
    return (
        f"gpu{gpu.index}: MIG is on and the driver names no slice of it: planned with an eighth of "
        "its memory, the smallest slice there is"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
