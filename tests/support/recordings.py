"""Recorded machines of tests/golden/machines, as drivers answered and as a probe writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gnnplan.planner.machine.model import MachineModel, Memory
from gnnplan.planner.probe.gpu.nvml import Inventory, inventory
from gnnplan.planner.probe.links import gpu_links, gpu_parts, gpu_switches, nvlink_cliques
from tests.support.nvml_recording import Replay

FOLDER = Path(__file__).parents[1] / "golden" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
Recording = dict[str, Any]


def recorded(name: str) -> Recording:
    """The recording of that name, to change."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def look(recording: Recording, environment: Mapping[str, str] | None = None) -> Inventory:
    """What the probe sees of it, under the given variables instead of this process's."""
    replay = Replay(recording)
    found = inventory(replay, devices=replay.devices, environment=environment)
    assert found is not None
    return found


def divide(recording: Recording, gpu: int, slices: Sequence[int]) -> Recording:
    """Put a GPU under MIG, with slices of so many GiB, as NVML answers for them.

    After the reference of nvmlDeviceGetMaxMigDeviceCount and nvmlDeviceGetMigDeviceHandleByIndex:
    a number that no slice has is answered by NVML_ERROR_NOT_FOUND.
    """
    calls, most = recording["calls"], 7
    calls[f"nvmlDeviceGetMigMode(device:{gpu})"] = [1, 1]
    calls[f"nvmlDeviceGetMaxMigDeviceCount(device:{gpu})"] = most
    name = calls[f"nvmlDeviceGetName(device:{gpu})"]
    for number in range(most):
        key = f"nvmlDeviceGetMigDeviceHandleByIndex(device:{gpu}, {number})"
        calls[key] = {"error": 6}
        if number < len(slices):
            handle, size = f"device:{gpu}/{number}", slices[number] * 2**30
            calls[key] = handle
            calls[f"nvmlDeviceGetUUID({handle})"] = slice_uuid(gpu, number)
            calls[f"nvmlDeviceGetName({handle})"] = f"{name} MIG 1g.{slices[number]}gb"
            calls[f"nvmlDeviceGetMemoryInfo({handle})"] = {"total": size, "free": size, "used": 0}
    return recording


def slice_uuid(gpu: int, number: int) -> str:
    """UUID of a slice that `divide` made."""
    return f"MIG-{gpu:08d}-0000-0000-0000-{number:012d}"


def rename(recording: Recording, gpu: int, name: str, memory_gib: int) -> Recording:
    """Make a GPU one of another kind."""
    recording["calls"][f"nvmlDeviceGetName(device:{gpu})"] = name
    recording["calls"][f"nvmlDeviceGetMemoryInfo(device:{gpu})"] = {"total": memory_gib * 2**30}
    return recording


def other_uuids(recording: Recording, digit: str) -> Recording:
    """Make it an equal box whose GPUs have other UUIDs, with one digit more in front."""
    for key, uuid in recording["calls"].items():
        if key.startswith("nvmlDeviceGetUUID("):
            recording["calls"][key] = uuid.replace("GPU-", f"GPU-{digit}")
    return recording


def machine_of(found: Inventory) -> MachineModel:
    """The machine file that a probe would write of it."""
    processors, memories, _ = gpu_parts(found)
    return MachineModel(
        name="probed",
        fingerprint="f",
        provenance="measured",
        processors=processors,
        memories=[Memory(name="host0", kind="host", capacity_bytes=2**40), *memories],
        links=gpu_links(found),
        switches=gpu_switches(found),
        cliques=nvlink_cliques(found),
    )
