"""What this machine is: facts, and the fingerprint that ties a plan and a calibration to it.

Facts only, no measured rates: two calls on an unchanged machine give the same fingerprint. Ask
before pinning a process to cores, since the cores it may use are one of the facts. Neither torch
nor NVML is imported with this module.

Which GPUs CUDA shows a process: what $CUDA_VISIBLE_DEVICES names, and slices of GPUs under MIG.

The driver's library (NVML) lists every GPU of the machine whatever the environment says; CUDA, and
torch with it, does not. Ranks are placed by CUDA's numbers, so that a machine is described, planned
for and recognised by what CUDA shows. Neither torch nor NVML is imported here.
"""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gnnplan.runtime.cgroup import cpu_quota, memory_limit_bytes

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


PROC = Path("/proc")
SYS = Path("/sys")
GIB = 2**30
FINGERPRINT_FACTS = (
    "cpu_model",
    "architecture",
    "cores",
    "ram_gib",
    "huge_pages",
    "gpus",
    "versions",
)
"""The facts that enter the fingerprint."""
FINGERPRINT_VERSIONS = ("torch", "numpy", "numba")


def machine_facts() -> dict[str, Any]:
    """What this machine is.

    Returns:
        cpu_model (str), architecture (str), cores (int, those this process may use), ram_bytes
        (int, the control group's limit where lower), ram_gib (int, rounded), numa_nodes (int),
        huge_pages (str: always | madvise | never | unknown), gpus (list of {uuid, name,
        memory_bytes}), versions (name -> version; those not installed are absent).
    """
    ram_bytes = usable_ram_bytes()
    gpus, driver = _gpus()
    return {
        "cpu_model": _cpu_model(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "ram_bytes": ram_bytes,
        "ram_gib": round(ram_bytes / GIB),
        "numa_nodes": max(1, len(list((SYS / "devices/system/node").glob("node[0-9]*")))),
        "huge_pages": _huge_pages(),
        "gpus": gpus,
        "versions": _versions() | driver,
    }


def machine_fingerprint(facts: dict[str, Any] | None = None) -> str:
    """Hash of what the machine is, 32 hex digits.

    Enter: processor model, usable cores, memory in whole GiB, huge-page state, GPU names and
    UUIDs (in any order) and the versions of torch, numpy and numba. Nothing measured enters.

    Args:
        facts: what `machine_facts()` returned; None asks now.
    """
    facts = machine_facts() if facts is None else facts
    kept = {name: facts[name] for name in FINGERPRINT_FACTS}
    kept["gpus"] = sorted([gpu["uuid"], gpu["name"]] for gpu in facts["gpus"])
    versions = facts["versions"]
    kept["versions"] = {name: versions.get(name, "") for name in FINGERPRINT_VERSIONS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32]


def usable_cores() -> int:
    """Cores this process may use: its affinity, and its control groups' quota rounded up."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = cpu_quota(SYS, PROC)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def usable_ram_bytes() -> int:
    """Bytes of memory: the machine's, or its control groups' limit where that is lower."""
    total = meminfo().get("MemTotal", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit_bytes(SYS, PROC)
    return total if limit is None else min(total, limit)


def available_ram_bytes() -> int:
    """Bytes that can be taken now without swapping."""
    return min(meminfo().get("MemAvailable", usable_ram_bytes()), usable_ram_bytes())


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    out: dict[str, int] = {}
    for line in _read(PROC / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            out[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return out


def set_threads(compute: int) -> None:
    """Set the threads torch and numba use for one operation in this process.

    Args:
        compute: threads of torch's operators; numba's parallel loops get as many, up to the
            number numba was started with.
    """
    import numba
    import numba.core.config as numba_config
    import torch

    compute = max(1, compute)
    # numba first: starting its OpenMP layer sets the threads torch uses, and torch's call mends it.
    numba.set_num_threads(min(compute, numba_config.NUMBA_NUM_THREADS))  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_num_threads(compute)


def flush_denormals() -> bool:
    """Let numbers below 1e-38 count as 0 in this thread and in those that it starts.

    As the loss falls, gradients get there, and cores are slow at such numbers (DEC-70). To be
    called before torch or numba starts a thread; affects what else the process computes, so the
    worker calls it and the library never does by itself.

    Returns:
        Whether this processor can.
    """
    import torch

    return torch.set_flush_denormal(True)


def _cpu_model() -> str:
    for line in _read(PROC / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or "unknown"


def _huge_pages() -> str:
    text = _read(SYS / "kernel/mm/transparent_hugepage/enabled")
    _, opened, rest = text.partition("[")
    return rest.partition("]")[0] if opened else "unknown"


def _versions() -> dict[str, str]:
    out = {"python": platform.python_version(), "kernel": platform.release()}
    for name in (*FINGERPRINT_VERSIONS, "scipy", "torch_geometric", "triton"):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def _gpus() -> tuple[list[dict[str, Any]], dict[str, str]]:
    """GPUs that CUDA shows, by NVML, and the driver's version; ([], {}) without NVML or GPUs."""
    try:
        import pynvml
    except ImportError:
        return [], {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], {}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [
            {
                "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            }
            for handle in _shown_handles(pynvml, handles)
        ]
        return gpus, {"nvidia_driver": _text(pynvml.nvmlSystemGetDriverVersion())}
    except pynvml.NVMLError:
        return [], {}
    finally:
        pynvml.nvmlShutdown()


def _shown_handles(nvml: Any, handles: list[Any]) -> list[Any]:
    """Of the driver's GPUs those that CUDA shows, and slices in the place of divided ones."""
    slices = [read_slices(nvml, each) if _is_divided(nvml, each) else None for each in handles]
    listed = [
        Listed(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            slices=None if parts is None else [_text(nvml.nvmlDeviceGetUUID(p)) for p in parts],
        )
        for handle, parts in zip(handles, slices, strict=True)
    ]
    shown = [(handles[each.gpu], slices[each.gpu], each.slice) for each in shown_gpus(listed)]
    return [
        gpu if parts is None or number is None else parts[number] for gpu, parts, number in shown
    ]


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return int(nvml.nvmlDeviceGetMigMode(handle)[0]) == 1
    except nvml.NVMLError:
        return False


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _read(path: Path) -> str:
    """A small file's text; empty where it is missing or may not be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
