"""Recorded machines of tests/golden/machines, as drivers answered and as a probe writes them."""

import json
from pathlib import Path
from typing import Any

from planner.machine import MachineModel, Memory
from planner.probe.links import gpu_links, gpu_parts, gpu_switches, nvlink_cliques
from planner.probe.nvml import Inventory, inventory
from planner.probe.recording import Replay

FOLDER = Path(__file__).parents[1] / "golden" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
Recording = dict[str, Any]


def recorded(name: str) -> Recording:
    """The recording of that name, to change."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def look(recording: Recording) -> Inventory:
    """What the probe sees of it."""
    replay = Replay(recording)
    found = inventory(replay, devices=replay.devices)
    assert found is not None
    return found


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
