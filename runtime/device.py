"""This machine's facts and fingerprint, which tie plans and calibrations to it; threads on it.

Facts are never measured rates: two calls on an unchanged machine give the same fingerprint. Ask
before pinning a process to cores, which are one of the facts. Neither torch nor NVML is imported
with this module.

NVML lists every GPU of the machine whatever the environment says; CUDA shows only those that
$CUDA_VISIBLE_DEVICES names, and slices of GPUs under MIG. Ranks are placed by CUDA's numbers, so a
machine is described by what CUDA shows.
"""

import hashlib
import importlib.util
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

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.limits import cpu_quota, memory_limit_bytes, read_small
from gnnplan.runtime.plan.schema import Device, Plan
from gnnplan.runtime.process import nodes_of, pin_to, usable_core_ids

VARIABLE = "CUDA_VISIBLE_DEVICES"
MOST_SLICES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """GPU as the driver lists it."""

    uuid: str
    slices: list[str] | None = None
    """UUIDs of a divided GPU's slices (MIG); None: it is whole, or they are unknown."""
    divided: bool = False
    """Whether it is under MIG; its slices may be unknown."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Device of CUDA: a whole GPU or one slice, by places in the driver's list."""

    gpu: int
    slice: int | None = None


def shown_gpus(
    listed: Sequence[Listed], environment: Mapping[str, str] | None = None
) -> list[Shown]:
    """Return the devices that CUDA shows, in its order, of the driver's by PCI address.

    Indices, and beginnings of UUIDs that fit one device alone, are read as CUDA reads them: the
    list ends before the first word that names none, and a device named twice leaves none. CUDA
    shows a process only the first slice, and no whole GPU beside it. A divided GPU whose slices are
    unknown stands for its first one, unless those of another are known.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE)
    found = _all_of(listed) if text is None else _named(text, listed)
    named = [each for each in found if each.slice is not None]
    unnamed = [each for each in found if listed[each.gpu].divided]
    return named[:1] or unnamed[:1] or found


def read_slices(nvml: Any, handle: Any) -> list[Any] | None:
    """Return handles of a divided GPU's slices; None where the driver does not tell.

    `nvml` is a module like pynvml.
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
    """Find a device by a leading number, as strtoul reads it."""
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


def bare_uuid(uuid: str) -> str:
    """Return a UUID without its kind: torch calls slices GPUs, and whole ones nothing."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def find_gpu(plan: Plan, rank: int, shown: Sequence[str]) -> int:
    """Return the number of a rank's GPU among those that CUDA shows, by their UUIDs (DEC-109).

    Where none of the plan's GPUs of this host is shown, the host is another one that is equal, and
    the plan's number holds.

    Raises:
        InputError: that GPU is not shown.
    """
    planned, devices = plan.strategy.devices[rank], plan.strategy.devices
    here = [bare_uuid(uuid) for uuid in shown]
    mine = [
        bare_uuid(uuid)
        for device, uuid in zip(devices, plan.gpu_uuids, strict=False)
        if device.host == planned.host
    ]
    shows = shown_text()
    if set(mine) & set(here):
        uuid = plan.gpu_uuids[rank]
        if bare_uuid(uuid) in here:
            return here.index(bare_uuid(uuid))
        what = f"GPU {planned.index} ({uuid}), found {', '.join(shown)}{shows}; show it"
    elif planned.index < len(shown):
        return planned.index
    else:
        what = f"GPU {planned.index}, found {len(shown)} on this host{shows}; show more"
    raise InputError(f"rank {rank}: expected {what}, or plan again on this machine")


def shown_text() -> str:
    """Say which variable decides what CUDA shows; empty where it is not set."""
    text = os.environ.get(VARIABLE)
    return "" if text is None else f" (those that {VARIABLE}={text} shows)"


def other_gpus(plan: Plan, facts: Mapping[str, Any]) -> str:
    """Say that an equal host's GPUs stand for the plan's; empty where they are the plan's own."""
    here = {bare_uuid(gpu["uuid"]) for gpu in facts["gpus"]}
    planned = {bare_uuid(uuid) for uuid in plan.gpu_uuids}
    if not planned or not here or planned & here:
        return ""
    return (
        "the GPUs here are others than those the plan was made on, on an equal machine: ranks take "
        "them by number"
    )


PROC = Path("/proc")
SYS = Path("/sys")
GIB = 2**30
FINGERPRINT_FACTS = (
    "cpu_model",
    "architecture",
    "cores",
    "ram_gib",
    "huge_pages",
    "box_gpus",
    "versions",
)
"""Facts that enter the fingerprint."""
HOST_DIGITS = 20
"""Digits of a fingerprint that tell hosts apart; the others are of its GPUs."""
FINGERPRINT_VERSIONS = ("torch", "numpy", "numba")


def machine_facts() -> dict[str, Any]:
    """Collect the facts of this machine.

    Returns:
        cpu_model (str), architecture (str), cores (int, those this process may use), ram_bytes
        (int, the control group's limit where lower), ram_gib (int, rounded), numa_nodes (int),
        huge_pages (str: always | madvise | never | unknown), gpus (list of {uuid, name,
        memory_bytes}, those that CUDA shows), box_gpus (list of names, whatever the environment
        hides), versions (name -> version, of what is installed).
    """
    ram_bytes = usable_ram_bytes()
    gpus, driver = _gpus()
    every = _gpus({})[0] if VARIABLE in os.environ else gpus
    return {
        "cpu_model": _cpu_model(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "ram_bytes": ram_bytes,
        "ram_gib": round(ram_bytes / GIB),
        "numa_nodes": max(1, len(list((SYS / "devices/system/node").glob("node[0-9]*")))),
        "huge_pages": _huge_pages(),
        "gpus": gpus,
        "box_gpus": [gpu["name"] for gpu in every],
        "versions": _versions() | driver,
    }


def machine_fingerprint(facts: dict[str, Any] | None = None) -> str:
    """Hash the machine's facts, 32 hex digits; None asks for them now.

    Entering facts: processor model, usable cores, memory in whole GiB, huge-page state and the
    versions of torch, numpy and numba in the first `HOST_DIGITS`, names of all GPUs (in any order,
    also of those that CUDA does not show) in the others. An equal host has the same (DEC-142).
    """
    facts = machine_facts() if facts is None else facts
    host = {name: facts[name] for name in FINGERPRINT_FACTS}
    versions = facts["versions"]
    host["versions"] = {name: versions.get(name, "") for name in FINGERPRINT_VERSIONS}
    gpus = sorted(host.pop("box_gpus"))
    return _digits(host)[:HOST_DIGITS] + _digits(gpus)[: 32 - HOST_DIGITS]


def _digits(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def usable_cores() -> int:
    """Count the cores of this process: its affinity, and its control groups' quota rounded up."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = cpu_quota(SYS, PROC)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def usable_ram_bytes() -> int:
    """Return the machine's bytes of memory, or its control groups' limit where that is lower."""
    total = meminfo().get("MemTotal", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit_bytes(SYS, PROC)
    return total if limit is None else min(total, limit)


def available_ram_bytes() -> int:
    """Return the bytes that can be taken now without swapping."""
    return min(meminfo().get("MemAvailable", usable_ram_bytes()), usable_ram_bytes())


def meminfo() -> dict[str, int]:
    """Read /proc/meminfo in bytes; empty where there is none."""
    out: dict[str, int] = {}
    for line in read_small(PROC / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            out[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return out


def set_threads(compute: int) -> None:
    """Set the threads of one operation of torch, and of numba up to the number it started with."""
    import numba
    import numba.core.config as numba_config
    import torch

    compute = max(1, compute)
    # numba first: starting its OpenMP layer sets the threads torch uses, and torch's call mends it.
    numba.set_num_threads(min(compute, numba_config.NUMBA_NUM_THREADS))  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_num_threads(compute)


def use_threads(
    plan: Plan, rank: int, *, pin: bool, usable: Sequence[int] | None = None
) -> list[int]:
    """Set the thread counts of torch and numba, and pin this rank; return its cores.

    Cores are those of `cores_of_ranks`; without any the operating system places the rank. A process
    that another plan has pinned gives the cores that were `usable` before. Under a quota no core is
    a rank's own: other containers of the machine, which number cores alike, would take the same.
    """
    threads, devices = plan.strategy.threads, plan.strategy.devices
    here = [device for device in devices if device.host == devices[rank].host]
    free = usable_core_ids() if usable is None else list(usable)
    quota = cpu_quota(SYS, PROC)
    own = quota is None or quota >= len(free)
    shares = cores_of_ranks(here, free, threads.compute + threads.sample if own else len(free) + 1)
    chosen = shares[rank] or list(usable or [])
    if pin and chosen:
        pin_to(chosen)
    set_threads(threads.compute)
    return usable_core_ids()


def cores_of_ranks(
    here: Sequence[Device], usable: Sequence[int], wanted: int
) -> dict[int, list[int]]:
    """Return the cores of each rank of a host, by rank.

    Each gets `wanted` cores of its own, next to its GPU as far as they reach. Where there are too
    few for all, a rank shares those next to its GPU, and has none where these are unknown.
    """
    near = {device.rank: [c for c in device.cores if c in set(usable)] for device in here}
    if len(here) * wanted > len(usable):
        return near
    free, shares = list(usable), {device.rank: list[int]() for device in here}
    # First what is near; then what is left, so that nobody loses near cores to a rank elsewhere.
    for reach in (near, {}):
        for rank, share in shares.items():
            share += [c for c in reach.get(rank, usable) if c in free][: wanted - len(share)]
            free = [core for core in free if core not in share]
    return {rank: sorted(share) for rank, share in shares.items()}


def memory_nodes(plan: Plan, rank: int) -> list[int]:
    """Return the NUMA nodes over which a rank's host spreads what all its ranks read.

    They are those next to the host's GPUs; empty where that is one node, or unknown.
    """
    devices = plan.strategy.devices
    here = [device.cores for device in devices if device.host == devices[rank].host]
    nodes = nodes_of(sorted({core for cores in here for core in cores}))
    return nodes if len(nodes) > 1 else []


def flush_denormals() -> bool:
    """Count numbers below 1e-38 as 0 in this thread and those that it starts; return if it can.

    Gradients get there as the loss falls, and cores are slow at such numbers (DEC-70). Call before
    torch or numba starts a thread. It affects the whole process, so the worker calls it, never the
    library by itself.
    """
    import torch

    return torch.set_flush_denormal(True)


def has_triton() -> bool:
    """Return whether the kernels' compiler is installed."""
    return importlib.util.find_spec("triton") is not None


def require_triton(what: str) -> None:
    """Raise InputError where the kernels' compiler, which `what` needs, is not installed."""
    if not has_triton():
        raise InputError(f"expected Triton for {what}, found none; pip install 'gnnplan[gpu]'")


def _cpu_model() -> str:
    for line in read_small(PROC / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or "unknown"


def _huge_pages() -> str:
    text = read_small(SYS / "kernel/mm/transparent_hugepage/enabled")
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


def _gpus(
    environment: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return CUDA's GPUs, by NVML, and the driver's version; ([], {}) without NVML or GPUs."""
    try:
        import pynvml
    except ImportError:
        return [], {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], {}
    try:
        numbers = range(pynvml.nvmlDeviceGetCount())
        opened = [_asked(pynvml, "nvmlDeviceGetHandleByIndex", number) for number in numbers]
        handles = [handle for handle in opened if handle is not None]
        gpus = [
            {
                "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": 0 if memory is None else int(memory.total),
            }
            for handle in _shown_handles(pynvml, handles, environment)
            for memory in [_asked(pynvml, "nvmlDeviceGetMemoryInfo", handle)]
        ]
        return gpus, {"nvidia_driver": _text(pynvml.nvmlSystemGetDriverVersion())}
    except pynvml.NVMLError:
        return [], {}
    finally:
        pynvml.nvmlShutdown()


def _asked(nvml: Any, name: str, argument: Any) -> Any:
    """Return the answer of a function of NVML; None where it is refused."""
    try:
        return getattr(nvml, name)(argument)
    except nvml.NVMLError:
        return None


def _shown_handles(
    nvml: Any, handles: list[Any], environment: Mapping[str, str] | None
) -> list[Any]:
    divided = [_is_divided(nvml, handle) for handle in handles]
    slices = [
        read_slices(nvml, handle) if is_divided else None
        for handle, is_divided in zip(handles, divided, strict=True)
    ]
    listed = [
        Listed(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            slices=None if parts is None else [_text(nvml.nvmlDeviceGetUUID(p)) for p in parts],
            divided=is_divided,
        )
        for handle, parts, is_divided in zip(handles, slices, divided, strict=True)
    ]
    devices = shown_gpus(listed, environment)
    shown = [(handles[each.gpu], slices[each.gpu], each.slice) for each in devices]
    return [
        gpu if parts is None or number is None else parts[number] for gpu, parts, number in shown
    ]


def _is_divided(nvml: Any, handle: Any) -> bool:
    mode = _asked(nvml, "nvmlDeviceGetMigMode", handle)
    return mode is not None and int(mode[0]) == 1


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
