"""A test's machine of emulated GPUs: its ranks run a GPU's own path on cores, and are never timed.

    python -m tests.support.emulated FILE [HOSTS]

writes it, and `gnnplan plan GRAPH --machine FILE` plans for it. Its rates are made up.
"""

import sys
from dataclasses import replace
from pathlib import Path

from gnnplan.planner.machine.model import MachineModel, Memory, Processor, Table, save_machine
from gnnplan.planner.probe.box import box_machine, read_box

MADE_UP = "made up: a machine of tests"
NAME = "emulated-4gpu"
MIB = 1 << 20
DEVICE_BYTES = 64 * MIB
TABLES = {"gpu_context": 1.0 * MIB, "gpu_process": 256.0 * MIB}
"""What a rank takes before any data, of the GPU and of the host."""


def emulated_machine(hosts: int = 1, *, device_bytes: int = DEVICE_BYTES) -> MachineModel:
    """Four GPUs a host, two cliques of two; with several hosts two a host, one clique each.

    The box is built as presets are, of a V100's numbers; what they are called then is made up.
    """
    gpus = 4 if hosts == 1 else 2
    pairs = [(0, 1, 2), (2, 3, 2)] if hosts == 1 else [(0, 1, 2)]
    groups = [[g, g + 1] for g in range(0, gpus, 2)]
    plain = {
        "kind": "box", "gpu": "v100-sxm2-16gb", "host": "xeon-e5-2698v4-x2", "num_gpus": gpus,
        "nvlinks": {"source": MADE_UP, "provenance": "derived", "pairs": [list(p) for p in pairs]},
        "pcie_switches": {"source": MADE_UP, "provenance": "derived", "groups": groups},
        "numa": {"source": MADE_UP, "provenance": "derived", "nodes": [0, 0, 1, 1][:gpus]},
        "network": {
            "cards": 1,
            "bytes_per_second": [1e9, "derived", MADE_UP],
            "share": [0.8, "derived", MADE_UP],
            "latency_seconds": [1e-5, "derived", MADE_UP],
        },
    }  # fmt: skip
    name = NAME if hosts == 1 else f"emulated-{hosts}x2gpu"
    made = box_machine(read_box(plain, name), name, hosts)
    tables = {key: _made_up(table, TABLES.get(key)) for key, table in made.tables.items()}
    return replace(
        made,
        fingerprint=f"emulated:{name}",
        processors=[_emulated(each) for each in made.processors],
        memories=[_small(each, device_bytes) for each in made.memories],
        links=[replace(link, provenance="derived") for link in made.links],
        tables=tables,
        sources=dict.fromkeys(made.sources, MADE_UP),
        notes=["A machine of tests: GPUs are emulated on cores, every rate is made up."],
    )


def _emulated(each: Processor) -> Processor:
    return replace(each, emulated=True, model="emulated GPU") if each.kind == "cuda" else each


def _small(each: Memory, device_bytes: int) -> Memory:
    size = device_bytes if each.kind == "device" else each.capacity_bytes
    return replace(each, capacity_bytes=size, provenance="derived")


def _made_up(table: Table, value: float | None) -> Table:
    values = table.values if value is None else [value] * len(table.values)
    return replace(table, values=values, provenance="derived")


if __name__ == "__main__":
    save_machine(emulated_machine(*map(int, sys.argv[2:3])), Path(sys.argv[1]))
