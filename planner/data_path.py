"""What `gnnplan doctor` says of the GPU's data path: its kernels, page-locked and shared memory.

Each lack names the slower way that a plan takes then (`runtime.fallback` warns of the same).
"""

import shutil
from importlib import metadata

from planner.probe.doctor import Finding

TRIED_BYTES = 64 << 20
"""Page-locked to see whether it can be."""


def data_path() -> list[Finding]:
    """Findings about what plans on GPUs want; without a GPU, only that its kernels are not used."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [_kernels(count), *([_locking(), _peers(count), _shared(count)] if count else [])]


def _kernels(gpus: int) -> Finding:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return Finding(
            check="GPU kernels",
            level="problem" if gpus else "note",
            found="Triton is not installed",
            advice="pip install 'gnnplan[gpu]': until then the processor draws and gathers for GPUs"
            if gpus
            else "matters with GPUs only: pip install 'gnnplan[gpu]'",
        )
    found = f"Triton {version}" + ("" if gpus else ", no GPU to run them on")
    return Finding(check="GPU kernels", level="ok" if gpus else "note", found=found)


def _locking() -> Finding:
    import torch

    from runtime.features.host_memory import PinError, lock, unlock

    memory = torch.empty(TRIED_BYTES, dtype=torch.uint8)
    try:
        lock(memory, torch.device("cuda"))
    except PinError as error:
        return Finding(
            check="page-locked memory",
            level="problem",
            found=str(error),
            advice="until then the processor gathers rows and copies them: several times slower",
        )
    unlock(memory)
    found = f"{TRIED_BYTES >> 20} MiB can be locked"
    return Finding(check="page-locked memory", level="ok", found=found)


def _peers(gpus: int) -> Finding:
    import torch

    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not apart:
        found = "all GPUs read each other's memory" if pairs else "one GPU has no peers"
        return Finding(check="peer memory", level="ok", found=found)
    listed = ", ".join(f"{a}-{b}" for a, b in apart[:8])
    return Finding(
        check="peer memory",
        level="note",
        found=f"{len(apart)} of {len(pairs)} pairs cannot ({listed})",
        advice="rows of those peers are exchanged; ACS in the BIOS and IOMMU settings prevent it",
    )


def _shared(gpus: int) -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 0
    return Finding(
        check="host rows of several GPUs",
        level="ok" if gpus == 1 or free else "note",
        found=f"{free / 1e9:.1f} GB of /dev/shm",
        advice="" if gpus == 1 else "must hold the features once, or each rank locks its own copy",
    )
