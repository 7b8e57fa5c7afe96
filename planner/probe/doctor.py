"""`gnnplan doctor`: what this machine can do, what is missing, and what to change.

Looks, never changes anything. Each finding is one line; a problem names its remedy. What a GPU's
data path lacks names the slower way that a plan takes then (`SlowerPathWarning` says the same).
"""

import os
import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from gnnplan.planner.array_cache import cache_path
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.gpu.nvml import Inventory, inventory
from gnnplan.planner.probe.quiet import SLOW, Disturbance, seen_before
from gnnplan.planner.probe.topology import Fault, changes, faults
from gnnplan.runtime.device import available_ram_bytes, meminfo, usable_cores, usable_ram_bytes

LEAST_SHARED_MEMORY_BYTES = 1 << 30
LEAST_OPEN_FILES = 1024
LEAST_DISK_BYTES = 5 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    level: Literal["ok", "note", "problem"]
    found: str
    advice: str = ""


def examine(machine: MachineModel | None = None) -> list[Finding]:
    """List everything worth knowing before planning here, and changes since a machine file."""
    return [
        _python(),
        _torch(),
        _cores(),
        _quiet(),
        _memory(),
        *_gpus(),
        *topology_findings(inventory(), machine),
        _shared_memory(),
        _open_files(),
        _locked_memory(),
        _direct_io(),
        _disk(),
        _pynvml(),
        _cache_folder(),
    ]


def _finding(
    check: str,
    found: str,
    advice: str,
    *,
    good: bool,
    otherwise: Literal["note", "problem"] = "note",
) -> Finding:
    """Make a finding whose advice is given only where it is not good."""
    level = "ok" if good else otherwise
    return Finding(check=check, level=level, found=found, advice="" if good else advice)


def _python() -> Finding:
    version, good = ".".join(map(str, sys.version_info[:3])), sys.version_info >= (3, 11)
    return _finding("python", version, "use Python 3.11 or newer", good=good, otherwise="problem")


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        advice = "install torch: pip install torch"
        return _finding("torch", str(error), advice, good=False, otherwise="problem")
    # NCCL is only of use with GPUs; without them gloo carries the ranks.
    backends = ["gloo"] if torch.distributed.is_gloo_available() else []
    backends += ["nccl"] if torch.distributed.is_nccl_available() else []
    found = f"{torch.__version__}, {'+'.join(backends) or 'no backend'}"
    advice = "this build has no gloo: several ranks cannot run"
    return _finding("torch", found, advice, good=bool(backends), otherwise="problem")


def _cores() -> Finding:
    usable, present = usable_cores(), os.cpu_count() or 1
    advice = "plans use the usable cores only"
    return _finding("cores", f"{usable} usable of {present}", advice, good=usable == present)


def _quiet() -> Finding:
    """Look once, against what earlier looks found; nothing is written down."""
    seen = seen_before(cache_path())
    slower = Disturbance(seen).slowdown()
    found = "as at its best" if seen else "looked at for the first time"
    if slower >= SLOW:
        found = f"a small training step takes {slower:.1f} times what it takes in good moments"
    return _finding(
        "quiet",
        found,
        "other work runs here, or somebody outside this machine uses the same chip: steps "
        "take longer meanwhile; plan and measure in a quieter hour",
        good=slower < SLOW,
    )


def _memory() -> Finding:
    total, available = usable_ram_bytes(), available_ram_bytes()
    present = meminfo().get("MemTotal", total)
    found = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB available"
    advice = f"a control group's limit; the machine has {present / 1e9:.1f} GB"
    return _finding("memory", found, advice, good=total >= present)


def _gpus() -> list[Finding]:
    from gnnplan.runtime.device import machine_facts

    gpus = machine_facts().get("gpus")
    if not gpus:
        advice = "ranks run on the CPU; plan for a preset with --machine NAME"
        return [_finding("gpu", "none", advice, good=False)]
    found = [f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.1f} GB" for gpu in gpus]
    return [Finding(check="gpu", level="ok", found=each) for each in found]


def topology_findings(
    found: Inventory | None, machine: MachineModel | None = None
) -> list[Finding]:
    """Return faults and notes of an inventory, and its differences from a machine file."""
    if found is None:
        gone = machine is not None and machine.provenance == "measured" and machine.gpus
        lost = Fault(
            check="gpu",
            found="the machine file has GPUs, none is here",
            advice="load the driver, or name this machine's own file",
        )
        wrong = [lost] if gone else []
    else:
        wrong = faults(found) + (changes(machine, found) if machine else [])
    good = Finding(check="gpu links", level="ok", found="all up, at full width")
    told = {f.found for f in wrong}
    return [
        *([good] if found is not None and found.gpus and not wrong else []),
        *(
            Finding(check=f"gpu {f.check}", level="problem", found=f.found, advice=f.advice)
            for f in wrong
        ),
        *(
            Finding(check="gpu", level="note", found=note)
            for note in ([] if found is None else found.notes)
            if note not in told
        ),
    ]


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    advice, good = (
        "a container: start it with a larger --shm-size",
        free >= LEAST_SHARED_MEMORY_BYTES,
    )
    return _finding("/dev/shm", f"{free / 1e9:.1f} GB free", advice, good=good)


def _open_files() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"ulimit -n {LEAST_OPEN_FILES * 4}"
    return _finding("open files", f"limit {soft}", advice, good=soft >= LEAST_OPEN_FILES)


def _locked_memory() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"limit {soft / 1e6:.1f} MB"
    advice = "matters with GPUs only: ulimit -l unlimited to pin features"
    return _finding("locked memory", found, advice, good=unlimited)


def _direct_io() -> Finding:
    refused = ""
    with tempfile.NamedTemporaryFile(dir=Path.cwd() if os.access(".", os.W_OK) else None) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            refused = f"refused here ({error.strerror})"
    advice = "the disk tier falls back to the page cache; keep data on ext4 or xfs"
    return _finding("direct disk reads", refused or "work here", advice, good=not refused)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    advice, good = "datasets and plans need room", free >= LEAST_DISK_BYTES
    return _finding("disk", f"{free / 1e9:.1f} GB free here", advice, good=good)


def _pynvml() -> Finding:
    deprecated = "pynvml" in {d.metadata["Name"].lower() for d in metadata.distributions()}
    found = "the deprecated package pynvml is installed" if deprecated else "nvidia-ml-py"
    advice = "pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py"
    return _finding("NVML", found, advice, good=not deprecated, otherwise="problem")


def _cache_folder() -> Finding:
    folder = cache_path()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    good = nearest.is_dir() and os.access(nearest, os.W_OK)
    advice = "not writable: set GNNPLAN_CACHE to a folder that is"
    return _finding("cache", str(folder), advice, good=good, otherwise="problem")


TRIED_BYTES = 64 << 20
"""Bytes that are page-locked to see whether they can be."""


def data_path() -> list[Finding]:
    """Return findings about what plans on GPUs need."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [_kernels(count), *([_locking(), _peers(count), _shared(count)] if count else [])]


def _kernels(gpus: int) -> Finding:
    level: Literal["note", "problem"] = "problem" if gpus else "note"
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        advice = (
            "pip install 'gnnplan[gpu]': until then the processor draws and gathers for GPUs"
            if gpus
            else "matters with GPUs only: pip install 'gnnplan[gpu]'"
        )
        found = "Triton is not installed"
        return _finding("GPU kernels", found, advice, good=False, otherwise=level)
    found = f"Triton {version}" + ("" if gpus else ", no GPU to run them on")
    return _finding("GPU kernels", found, "", good=gpus > 0)


def _locking() -> Finding:
    import torch

    from gnnplan.runtime.features.device_rows import PinError, lock_pages, unlock_pages

    memory = torch.empty(TRIED_BYTES, dtype=torch.uint8)
    found, good = f"{TRIED_BYTES >> 20} MiB can be locked", True
    try:
        lock_pages(memory, torch.device("cuda"))
        unlock_pages(memory, torch.device("cuda"))
    except PinError as error:
        found, good = str(error), False
    advice = "until then the processor gathers rows and copies them: several times slower"
    return _finding("page-locked memory", found, advice, good=good, otherwise="problem")


def _peers(gpus: int) -> Finding:
    import torch

    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    found = "all GPUs read each other's memory" if pairs else "one GPU has no peers"
    if apart:
        listed = ", ".join(f"{a}-{b}" for a, b in apart[:8])
        found = f"{len(apart)} of {len(pairs)} pairs cannot ({listed})"
    advice = "rows of those peers are exchanged; ACS in the BIOS and IOMMU settings prevent it"
    return _finding("peer memory", found, advice, good=not apart)


def _shared(gpus: int) -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 0
    return Finding(
        check="host rows of several GPUs",
        level="ok" if gpus == 1 or free else "note",
        found=f"{free / 1e9:.1f} GB of /dev/shm",
        advice="" if gpus == 1 else "NCCL needs some; rows that find no room are shared without it",
    )
