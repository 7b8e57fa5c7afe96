"""Which GPUs CUDA shows a process: what $CUDA_VISIBLE_DEVICES names, and slices of GPUs under MIG.

The driver's library (NVML) lists every GPU of the machine whatever the environment says; CUDA, and
torch with it, does not. Ranks are placed by CUDA's numbers, so that a machine is described, planned
for and recognised by what CUDA shows. Neither torch nor NVML is imported here.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VARIABLE = "CUDA_VISIBLE_DEVICES"
MOST_SLICES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A GPU as the driver lists it."""

    uuid: str
    slices: list[str] | None = None
    """UUIDs of its slices where it is divided (MIG); None: it is whole, or they are unknown."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A device of CUDA's: a whole GPU, or one slice of it, by their places in the driver's list."""

    gpu: int
    slice: int | None = None


def shown_gpus(
    listed: Sequence[Listed], environment: Mapping[str, str] | None = None
) -> list[Shown]:
    """The devices that CUDA shows, in its order.

    Indices, and beginnings of UUIDs that fit one device alone, are taken as CUDA takes them: the
    list ends before the first word that names none, and a device named twice leaves none. Of slices
    CUDA shows a process the first one alone, and no whole GPU beside it.

    Args:
        listed: the driver's GPUs, by PCI address as NVML lists them.
        environment: variables; None: those of this process.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE)
    found = _all_of(listed) if text is None else _named(text, listed)
    return next(([each] for each in found if each.slice is not None), found)


def read_slices(nvml: Any, handle: Any) -> list[Any] | None:
    """Handles of a divided GPU's slices; None where the driver does not tell.

    Args:
        nvml: a module like pynvml.
        handle: of the GPU.
    """
    count = getattr(nvml, "nvmlDeviceGetMaxMigDeviceCount", None)
    get = getattr(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", None)
    if count is None or get is None:
        return None
    try:
        most = int(count(handle))
    except nvml.NVMLError:
        return None
    found: list[Any] = []
    refused = False
    for number in range(min(most, MOST_SLICES)):
        try:
            found.append(get(handle, number))
        except nvml.NVMLError as error:
            refused = refused or getattr(error, "value", _ABSENT[0]) not in _ABSENT
    return None if refused and not found else found


_ABSENT = (6, 2)
"""NVML_ERROR_NOT_FOUND, NVML_ERROR_INVALID_ARGUMENT: there is no slice of that number."""


def _all_of(listed: Sequence[Listed]) -> list[Shown]:
    found = [_device_of(number, listed) for number in range(len(listed))]
    return [each for each in found if each is not None]


def _device_of(number: int, listed: Sequence[Listed]) -> Shown | None:
    """The GPU, or its first slice; None where there is none."""
    if not 0 <= number < len(listed):
        return None
    slices = listed[number].slices
    if slices is None:
        return Shown(number)
    return Shown(number, 0) if slices else None


def _named(text: str, listed: Sequence[Listed]) -> list[Shown]:
    words = [word.strip() for word in text.split(",")]
    by_uuid = words[0].startswith(("GPU-", "MIG-"))
    found: list[Shown] = []
    for word in words:
        device = _by_uuid(word, listed) if by_uuid else _by_number(word, listed)
        if device is None:
            break
        if device in found:
            return []
        found.append(device)
    return found


def _by_number(word: str, listed: Sequence[Listed]) -> Shown | None:
    """By a leading number, as strtoul reads it."""
    number = re.match(r"[+-]?\d+", word)
    return None if number is None else _device_of(int(number[0]), listed)


def _by_uuid(word: str, listed: Sequence[Listed]) -> Shown | None:
    if word.startswith("GPU-"):
        fits = [_device_of(g, listed) for g, gpu in enumerate(listed) if gpu.uuid.startswith(word)]
    elif word.startswith("MIG-"):
        fits = [
            Shown(g, s)
            for g, gpu in enumerate(listed)
            for s, uuid in enumerate(gpu.slices or [])
            if uuid.startswith(word)
        ]
    else:
        return None
    return fits[0] if len(fits) == 1 else None
