"""Where a machine's parts stand in its picture: hosts side by side, memory above, devices below.

A host's rows from the top: disks, memory, cores and cards of the network; NUMA nodes; PCIe
switches by their distance from the host; GPUs, each with its memory; NVLink switches.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from planner.machine import MachineModel

PITCH = 104
"""Pixels from one device to the next."""
LEVEL = 92
"""Pixels from one row to the next."""
BOX = (92, 44)
"""Width and height of a part's box."""
MARGIN = 64
GAP = 40
"""Between hosts."""
LOOSE_PITCH = 150
"""Between the parts of the top row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One box."""

    name: str
    kind: str
    """disk, host, cpu, numa, pcie, nvlink, network or gpu."""
    host: int
    x: float
    """Of its middle."""
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Boxes by name, and which box each of the machine's parts is drawn as."""

    nodes: dict[str, Node]
    drawn_as: dict[str, str]
    """A GPU's memory is drawn as the GPU."""
    width: float
    height: float
    gpu_row: float
    """y of the devices; 0 where there are none."""


def host_of(name: str) -> int:
    """Host by the prefix of its parts' names.

    >>> host_of("h2.memory0"), host_of("host0")
    (2, 0)
    """
    found = re.match(r"h(\d+)\.", name)
    return int(found[1]) if found else 0


def layout(machine: MachineModel) -> Layout:
    """Place every processor, memory and switch."""
    kinds = _kinds(machine)
    hosts = sorted({host_of(name) for name in kinds})
    drawn_as = {name: name for name in kinds}
    drawn_as |= {p.memory: p.name for p in machine.gpus}
    depth = _pcie_depth(machine, kinds)
    levels = sorted({_level(name, kind, depth) for name, kind in kinds.items()})
    y_of = {level: MARGIN + i * LEVEL for i, level in enumerate(levels)}
    parents = _parents(machine, kinds, drawn_as)
    nodes: dict[str, Node] = {}
    left = float(MARGIN)
    for host in hosts:
        mine = {name: kind for name, kind in kinds.items() if host_of(name) == host}
        gpus = [p.name for p in machine.gpus if p.name in mine]
        top = [name for name in mine if _level(name, mine[name], depth) == 0]
        width = max(len(gpus) * PITCH, len(top) * LOOSE_PITCH, PITCH)
        x_of = {name: left + (i + 0.5) * width / len(gpus) for i, name in enumerate(gpus)}
        for level in sorted({_level(n, k, depth) for n, k in mine.items()}, reverse=True):
            row = [n for n in mine if n not in x_of and _level(n, mine[n], depth) == level]
            x_of |= _spread(row, parents, x_of, left, width)
        for name, kind in mine.items():
            y = y_of[_level(name, kind, depth)]
            nodes[name] = Node(name=name, kind=kind, host=host, x=x_of[name], y=y)
        left += width + GAP
    gpu_row = max((n.y for n in nodes.values() if n.kind == "gpu"), default=0.0)
    below = _below(machine, nodes, drawn_as) if gpu_row else 0.0
    bottom = max([n.y for n in nodes.values()] + [gpu_row + below])
    return Layout(
        nodes=nodes,
        drawn_as=drawn_as,
        width=left - GAP + MARGIN,
        height=bottom + MARGIN,
        gpu_row=gpu_row,
    )


def bend(span: float) -> float:
    """How deep a peer link hangs below two devices that stand so far apart."""
    return min(30 + 0.16 * span, 150)


def _below(machine: MachineModel, nodes: dict[str, Node], drawn_as: dict[str, str]) -> float:
    """Room that peer links take below the devices."""
    spans = [0.0]
    for link in machine.links:
        ends = [nodes.get(drawn_as.get(name, name)) for name in (link.source, link.target)]
        if all(end is not None and end.kind == "gpu" for end in ends):
            spans.append(abs(ends[0].x - ends[1].x) if ends[0] and ends[1] else 0.0)
    return bend(max(spans)) if max(spans) > 0 else 0.0


def _kinds(machine: MachineModel) -> dict[str, str]:
    """Every part that has a box."""
    kinds = {m.name: m.kind for m in machine.memories if m.kind != "device"}
    kinds |= {p.name: "gpu" if p.kind == "cuda" else "cpu" for p in machine.processors}
    kinds |= {s.name: s.kind for s in machine.switches}
    known = {*kinds, *(p.memory for p in machine.gpus)}
    ends = {end for link in machine.links for end in (link.source, link.target)}
    # Records of earlier versions name cards by their links alone.
    kinds |= dict.fromkeys(sorted(ends - known), "network")
    order = (
        "disk",
        "host",
        "cpu",
        "card",
        "network",
    )  # of the top row, so that no line crosses a box
    rank = {kind: i for i, kind in enumerate(order)}
    return dict(sorted(kinds.items(), key=lambda item: rank.get(item[1], len(order))))


def _level(name: str, kind: str, depth: dict[str, int]) -> int:
    if kind == "pcie":
        return 10 + depth.get(name, 0)
    return {"numa": 1, "gpu": 100, "nvlink": 101}.get(kind, 0)


def _pcie_depth(machine: MachineModel, kinds: dict[str, str]) -> dict[str, int]:
    """PCIe switches behind other PCIe switches stand lower."""
    depth = {name: 0 for name, kind in kinds.items() if kind == "pcie"}
    rooted = {x.target for x in machine.links if kinds.get(x.source) in ("host", "numa")}
    seen, edge = set(rooted), [name for name in rooted if name in depth]
    while edge:
        above = edge.pop(0)
        for link in machine.links:
            if link.source == above and link.target in depth and link.target not in seen:
                depth[link.target] = depth[above] + 1
                seen.add(link.target)
                edge.append(link.target)
    return depth


def _parents(
    machine: MachineModel, kinds: dict[str, str], drawn_as: dict[str, str]
) -> dict[str, set[str]]:
    """What each part is linked with."""
    joined: dict[str, set[str]] = {name: set() for name in kinds}
    for link in machine.links:
        a, b = drawn_as.get(link.source, link.source), drawn_as.get(link.target, link.target)
        if a != b:
            joined[a].add(b)
            joined[b].add(a)
    return joined


def _spread(
    row: list[str],
    joined: dict[str, set[str]],
    x_of: dict[str, float],
    left: float,
    width: float,
) -> dict[str, float]:
    """Each above the middle of what it is linked with below; never two on one place."""
    wanted: dict[str, float] = {}
    for i, name in enumerate(row):
        below = [x_of[other] for other in joined[name] if other in x_of]
        even = left + (i + 0.5) * width / len(row)
        wanted[name] = sum(below) / len(below) if below else even
    order = sorted(row, key=lambda name: (wanted[name], row.index(name)))
    if all(wanted[b] - wanted[a] >= PITCH for a, b in pairwise(order)) and len(order) > 1:
        return wanted
    if len(order) == 1:
        return wanted
    return _evenly(row, left, width)


def _evenly(row: Iterable[str], left: float, width: float) -> dict[str, float]:
    names = list(row)
    return {name: left + (i + 0.5) * width / len(names) for i, name in enumerate(names)}
