"""nvbandwidth's JSON (`nvbandwidth -j`) -> measured rates on the links of a machine.

    host_to_device_memcpy_ce   device_to_host_memcpy_ce     a slot's copies, one GPU at a time
    host_to_device_memcpy_sm   device_to_host_memcpy_sm     the same by a kernel, as gathers read
    host_to_all_memcpy_ce                                   all at once: a switch's port
    device_to_device_memcpy_read_ce, ..._read_sm            peers: the row's GPU reads the column's

Copy engines and kernels are told apart because a gather is a kernel. Tests that were waived or
failed, and links the machine does not have, are left out with a note.
"""

import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from planner.errors import MachineError
from planner.machine.model import Link, MachineModel
from runtime import codec

GB = 1e9
MOST_BYTES = 64 << 20
Rows = list[list[float | None]]
Rates = dict[str, tuple[float | None, float | None]]
"""By link: bytes per second of copies and of kernels' reads; None where not measured."""
SLOTS = {
    "host_to_device_memcpy_ce": ("h2d", 0),
    "device_to_host_memcpy_ce": ("d2h", 0),
    "host_to_device_memcpy_sm": ("h2d", 1),
    "device_to_host_memcpy_sm": ("d2h", 1),
}
PEERS = {"device_to_device_memcpy_read_ce": 0, "device_to_device_memcpy_read_sm": 1}
TOGETHER = "host_to_all_memcpy_ce"


def read_nvbandwidth(path: Path) -> tuple[dict[str, Rows], list[str]]:
    """Passed tests by name, bytes per second by row and column, and notes.

    Raises:
        MachineError: not such a file.
    """
    if path.stat().st_size > MOST_BYTES:
        raise MachineError(
            f"{path}: expected nvbandwidth's JSON, found {path.stat().st_size} bytes"
        )
    try:
        document: Any = codec.parse(path.read_bytes())
        cases: Any = document["nvbandwidth"]["testcases"]
        found: dict[str, Rows] = {}
        notes: list[str] = []
        for case in cases:
            name, status = _word(case["name"]), _word(case.get("status", "Passed"))
            if status != "Passed":
                notes.append(f"nvbandwidth: {name} was {status.lower()[:40]}, left out")
                continue
            found[name] = _rows(path, name, case["bandwidth_matrix"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise MachineError(
            f"{path}: expected nvbandwidth's JSON (nvbandwidth -j), found {type(error).__name__}: "
            f"{reason}"
        ) from None
    if not found:
        raise MachineError(f"{path}: expected a passed test of nvbandwidth, found none")
    return found, notes


def _word(value: Any) -> str:
    """A name for one line."""
    if not isinstance(value, str):
        raise TypeError(f"expected a name, found {type(value).__name__}")
    return " ".join(value.split())[:80]


def _rows(path: Path, name: str, matrix: Any) -> Rows:
    rows = [[_rate(path, name, cell) for cell in row] for row in cast("list[list[Any]]", matrix)]
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise MachineError(f"{path}: {name}: expected a matrix of bandwidths")
    return rows


def _rate(path: Path, name: str, cell: Any) -> float | None:
    """GB/s as bytes per second; None for N/A."""
    if cell is None or cell == "N/A":
        return None
    value = float(cell)
    if not (math.isfinite(value) and 0 <= value < 1e6):
        raise MachineError(f"{path}: {name}: expected GB/s, found {value!r}")
    return value * GB or None


def with_nvbandwidth(
    machine: MachineModel, tests: dict[str, Rows], notes: list[str]
) -> MachineModel:
    """The machine with measured rates on the links that the tests crossed.

    Args:
        machine: whose links are replaced, by GPU index.
        tests: from `read_nvbandwidth`.
        notes: kept in the machine's notes.

    Raises:
        MachineError: the tests are of another number of GPUs.
    """
    gpus = len([g for g in machine.gpus if g.host == 0])
    for name, rows in tests.items():
        if name in {*SLOTS, *PEERS, TOGETHER} and len(rows[0]) != gpus:
            raise MachineError(
                f"nvbandwidth: {name}: expected {gpus} GPUs (those of {machine.name}), found "
                f"{len(rows[0])}"
            )
    known = {link.name: link for link in machine.links}
    rates: Rates = {}
    for name, (way, kind) in SLOTS.items():
        for g, value in enumerate(tests.get(name, [[]])[0]):
            _note(rates, f"pcie{g}.{way}", kind, value)
    for name, kind in PEERS.items():
        for reader, row in enumerate(tests.get(name, [])):
            for owner, value in enumerate(row):
                _note(rates, f"nvlink.gpu{owner}.gpu{reader}", kind, value)
            ports = [v for v in row if v is not None]
            for port in (f"nvlink.nvswitch0.gpu{reader}", f"nvlink.gpu{reader}.nvswitch0"):
                _note(rates, port, kind, median(ports) if ports else None)
    for name, rate in _together(machine, tests.get(TOGETHER)).items():
        _note(rates, name, 0, rate)
    links = [
        _measured(link, rates[n]) if (n := link.name) in rates else link for link in known.values()
    ]
    used = sorted(set(rates) & set(known))
    words = f"nvbandwidth: measured {', '.join(used) if used else 'no link of this machine'}"
    return replace(
        machine,
        links=links,
        sources={**machine.sources, **dict.fromkeys(used, "nvbandwidth on the machine")},
        notes=[*machine.notes, *notes, words],
    )


def _note(rates: Rates, link: str, kind: int, value: float | None) -> None:
    if value is None:
        return
    copies, reads = rates.get(link, (None, None))
    rates[link] = (value, reads) if kind == 0 else (copies, value)


def _together(machine: MachineModel, rows: Rows | None) -> dict[str, float]:
    """What each switch's port carried while all its GPUs copied, where that was the limit."""
    if rows is None:
        return {}
    found: dict[str, float] = {}
    for switch in [s for s in machine.switches if s.kind == "pcie"]:
        below = [x.name for x in machine.links if x.source == switch.name and "pcie" in x.name]
        values = [
            rows[0][int(name.removeprefix("pcie").split(".")[0])]
            for name in below
            if name.startswith("pcie")
        ]
        if values and None not in values:
            found[f"{switch.name}.h2d"] = sum(v for v in values if v is not None)
    return found


def _measured(link: Link, rates: tuple[float | None, float | None]) -> Link:
    copies, reads = rates
    share = link.gather_bytes_per_second / link.bandwidth_bytes_per_second
    bandwidth = link.bandwidth_bytes_per_second if copies is None else copies
    return replace(
        link,
        bandwidth_bytes_per_second=bandwidth,
        # Where kernels' reads were not measured they keep their share of the copies.
        gather_bytes_per_second=bandwidth * share if reads is None else reads,
        provenance="measured" if copies is not None else link.provenance,
    )
