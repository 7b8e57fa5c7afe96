"""Draw a machine: its parts, its links, how fast they are and how busy in the plan.

Hosts stand side by side. Rows of a host from the top: disks, memory, cores and network cards; NUMA
nodes; PCIe switches by their distance from the host; GPUs, each with its memory; NVLink switches.
"""

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from gnnplan.planner.cost.link_use import LinkRow, load_level
from gnnplan.planner.cost.memory import size_text
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.report.svg import element, figure
from gnnplan.planner.report.words import rate_text, share_text

PITCH = 104
LEVEL = 92
BOX = (92, 44)
"""Width and height of a box; all lengths are in pixels."""
MARGIN = 64
GAP = 40
LOOSE_PITCH = 150
LARGE = 1.3
"""Scale of the picture where there is room for it."""
TIP_LINE, TIP_LINES, TIP_WIDTH = 17, 4, 120
"""Height of a line under the picture, how many there are, and characters in each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One box, and where its middle is."""

    name: str
    kind: str
    """disk, host, cpu, numa, pcie, nvlink, network or gpu."""
    host: int
    x: float
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The boxes, and which box stands for each part of the machine."""

    nodes: dict[str, Node]
    drawn_as: dict[str, str]
    """Name of the box of each part; a GPU stands for its memory."""
    width: float
    height: float
    gpu_row: float
    """y of the devices; 0 where there are none."""


def host_of(name: str) -> int:
    """Return the number of the host that a part's name begins with.

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
            x_of |= _place_row(row, parents, x_of, left, width)
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
    """Return how many pixels a peer link hangs below two devices that are `span` pixels apart."""
    return min(30 + 0.16 * span, 150)


def _below(machine: MachineModel, nodes: dict[str, Node], drawn_as: dict[str, str]) -> float:
    spans = [0.0]
    for link in machine.links:
        ends = [nodes.get(drawn_as.get(name, name)) for name in (link.source, link.target)]
        if all(end is not None and end.kind == "gpu" for end in ends):
            spans.append(abs(ends[0].x - ends[1].x) if ends[0] and ends[1] else 0.0)
    return bend(max(spans)) if max(spans) > 0 else 0.0


def _kinds(machine: MachineModel) -> dict[str, str]:
    kinds = {m.name: m.kind for m in machine.memories if m.kind != "device"}
    kinds |= {p.name: "gpu" if p.kind == "cuda" else "cpu" for p in machine.processors}
    kinds |= {s.name: s.kind for s in machine.switches}
    known = {*kinds, *(p.memory for p in machine.gpus)}
    ends = {end for link in machine.links for end in (link.source, link.target)}
    # Records of earlier versions name cards by their links alone.
    kinds |= dict.fromkeys(sorted(ends - known), "network")
    order = ("disk", "host", "cpu", "card", "network")  # so that no line crosses a box
    rank = {kind: i for i, kind in enumerate(order)}
    return dict(sorted(kinds.items(), key=lambda item: rank.get(item[1], len(order))))


def _level(name: str, kind: str, depth: dict[str, int]) -> int:
    if kind == "pcie":
        return 10 + depth.get(name, 0)
    return {"numa": 1, "gpu": 100, "nvlink": 101}.get(kind, 0)


def _pcie_depth(machine: MachineModel, kinds: dict[str, str]) -> dict[str, int]:
    """Return how many PCIe switches stand between each one and the host."""
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
    joined: dict[str, set[str]] = {name: set() for name in kinds}
    for link in machine.links:
        a, b = drawn_as.get(link.source, link.source), drawn_as.get(link.target, link.target)
        if a != b:
            joined[a].add(b)
            joined[b].add(a)
    return joined


def _place_row(
    row: list[str], joined: dict[str, set[str]], x_of: dict[str, float], left: float, width: float
) -> dict[str, float]:
    """Place each part of a row above its links below; all evenly where that is too tight."""
    wanted: dict[str, float] = {}
    for i, name in enumerate(row):
        below = [x_of[other] for other in joined[name] if other in x_of]
        even = left + (i + 0.5) * width / len(row)
        wanted[name] = sum(below) / len(below) if below else even
    order = sorted(row, key=lambda name: (wanted[name], row.index(name)))
    if all(wanted[b] - wanted[a] >= PITCH for a, b in pairwise(order)):
        return wanted
    return {name: left + (i + 0.5) * width / len(row) for i, name in enumerate(row)}


WORDS = {
    "disk": "disk",
    "host": "memory",
    "cpu": "cores",
    "numa": "NUMA node",
    "pcie": "PCIe switch",
    "nvlink": "NVLink switch",
    "card": "network card",
    "network": "network",
    "gpu": "GPU",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """The links between two boxes, drawn as one line."""

    a: str
    b: str
    rows: list[LinkRow]

    @property
    def bytes_per_second(self) -> float:
        """Return the rate of the faster direction."""
        return max(row.bytes_per_second for row in self.rows)

    @property
    def load(self) -> float:
        """Return the load of the busier direction."""
        return max(row.load for row in self.rows)


def draw_topology(
    machine: MachineModel, rows: Sequence[LinkRow], *, used: set[str] | None = None
) -> Markup:
    """Draw a machine.

    Args:
        machine: what is drawn.
        rows: its links with their load, from `link_rows`.
        used: GPUs that the plan uses; None: there is no plan, and no GPU is drawn as idle.
    """
    where = layout(machine)
    edges, inner = _edges(where, rows)
    parts = [_clique(machine, where, i) for i in range(len(machine.cliques))]
    lines, labels = list[Markup](), list[Markup]()
    for edge in edges:
        line, label = _line(where, edge)
        lines.append(line)
        labels.append(label)
    boxes = [
        _box(machine, where, node, inner.get(node.name, []), used) for node in where.nodes.values()
    ]
    hint = "Point at a part or a link: what it is, its rate, its load."
    return figure(
        "topology",
        f"Topology of {machine.name}",
        describe(machine, edges),
        *parts,
        *lines,
        *boxes,
        *labels,
        element("text", hint, class_="size hint", x=MARGIN / 4, y=where.height),
        height=where.height + TIP_LINE * TIP_LINES,
        width=where.width,
        scale=LARGE,
    )


def _tip(where: Layout, words: Sequence[str]) -> Markup:
    """Write lines under the picture, to be seen while their part is pointed at."""
    most = max(20, round(where.width / 7))
    cut = [line for text in words for line in textwrap.wrap(text, most)]
    if len(cut) > TIP_LINES:
        cut = [*cut[: TIP_LINES - 1], f"and {len(cut) - TIP_LINES + 1} lines more in the table"]
    lines = [
        element("tspan", line, x=MARGIN / 4, y=where.height + i * TIP_LINE)
        for i, line in enumerate(cut)
    ]
    return element("text", *lines, class_="tip")


def _edges(where: Layout, rows: Sequence[LinkRow]) -> tuple[list[Edge], dict[str, list[LinkRow]]]:
    between: dict[tuple[str, str], list[LinkRow]] = {}
    inner: dict[str, list[LinkRow]] = {}
    for row in rows:
        if not row.source:
            continue
        a, b = where.drawn_as.get(row.source, ""), where.drawn_as.get(row.target, "")
        if a not in where.nodes or b not in where.nodes:
            continue
        if a == b:
            inner.setdefault(a, []).append(row)
        else:
            first, second = sorted((a, b))
            between.setdefault((first, second), []).append(row)
    return [Edge(a=a, b=b, rows=found) for (a, b), found in between.items()], inner


def _line(where: Layout, edge: Edge) -> tuple[Markup, Markup]:
    """Draw links as one line, wide if fast and dark if busy; and their rate."""
    a, b = sorted((where.nodes[edge.a], where.nodes[edge.b]), key=lambda n: (n.y, n.x))
    middle_x, middle_y = (a.x + b.x) / 2, (a.y + b.y) / 2
    if a.kind == b.kind == "gpu":
        low = where.gpu_row + BOX[1] / 2
        deep = low + bend(b.x - a.x) * 2
        way = f"M {a.x:.1f} {low:.1f} Q {middle_x:.1f} {deep:.1f} {b.x:.1f} {low:.1f}"
        middle_y = (low + deep) / 2
    else:
        way = f"M {a.x:.1f} {a.y:.1f} L {b.x:.1f} {b.y:.1f}"
    stroke = _stroke(edge.bytes_per_second)
    line = element(
        "g",
        element("path", class_="reach", d=way, stroke_width=max(14.0, stroke)),
        element("path", class_=f"link load{load_level(edge.load)}", d=way, stroke_width=stroke),
        _tip(where, [f"{row.source} to {row.target}: {row_words(row)}" for row in edge.rows]),
        class_="hover",
    )
    lift = -6 if a.y == b.y and a.kind != "gpu" else 4
    shown = edge.load >= LEAST_SHOWN
    place = {"x": middle_x, "text_anchor": "middle"}
    rate = f"{edge.bytes_per_second / 1e9:.3g}"
    label = element("text", rate, class_="rate", y=middle_y + lift - 5 * shown, **place)
    if shown:
        busy = f"{edge.load:.0%} busy"
        label += element("text", busy, class_="rate busy", y=middle_y + lift + 8, **place)
    return line, label


def _stroke(bytes_per_second: float) -> float:
    """Return the pixels of a line by the logarithm of the rate: 1 GB/s is 2, 1 TB/s is 8.

    >>> _stroke(1e9), _stroke(1e12)
    (2.0, 8.0)
    """
    return min(9.0, max(1.5, 2.0 + 2.0 * math.log10(max(bytes_per_second, 1.0) / 1e9)))


LEAST_SHOWN = 0.01
"""Load from which a link's load is written beside its rate."""


def row_words(row: LinkRow) -> str:
    """Describe a link's rate and load."""
    load = f", load {share_text(row.load)}" if row.load > 0 else ", no rows"
    return f"{rate_text(row.bytes_per_second)} {row.provenance}{load}"


def _box(
    machine: MachineModel,
    where: Layout,
    node: Node,
    inner: Sequence[LinkRow],
    used: set[str] | None,
) -> Markup:
    idle = used is not None and node.kind == "gpu" and node.name not in used
    level = load_level(max((row.load for row in inner), default=0.0))
    size = _size_words(machine, node)
    words = [f"{node.name}, {WORDS.get(node.kind, node.kind)} {size}".strip()]
    words += [f"{row.name} {row_words(row)}" for row in inner]
    if idle:
        words.append("not used by the plan")
    classes = f"part {node.kind} load{level}" + (" idle" if idle else "")
    name = _short(node.name)
    return element(
        "g",
        element(
            "rect",
            class_=classes,
            x=node.x - BOX[0] / 2,
            y=node.y - BOX[1] / 2,
            width=BOX[0],
            height=BOX[1],
            rx=5,
        ),
        element(
            "text",
            name,
            class_="name" if len(name) <= SHORT_NAME else "name long",
            x=node.x,
            y=node.y - 3,
            text_anchor="middle",
        ),
        element(
            "text",
            size or WORDS.get(node.kind, node.kind),
            class_="size",
            x=node.x,
            y=node.y + 13,
            text_anchor="middle",
        ),
        _tip(where, words),
        class_="hover",
    )


SHORT_NAME = 7
"""Characters of a name that is drawn larger where the picture is small."""


def _short(name: str) -> str:
    """Shorten a name to its box; title and table have the whole name."""
    return name if len(name) <= 13 else f"{name[:12]}\N{HORIZONTAL ELLIPSIS}"


def _size_words(machine: MachineModel, node: Node) -> str:
    if node.kind == "cpu":
        cores = next(p.cores for p in machine.processors if p.name == node.name)
        return f"{cores} core{'s' if cores > 1 else ''}"
    name = node.name
    if node.kind == "gpu":
        name = next(p.memory for p in machine.processors if p.name == node.name)
    found = [m for m in machine.memories if m.name == name]
    return size_text(found[0].capacity_bytes) if found else ""


def _clique(machine: MachineModel, where: Layout, index: int) -> Markup:
    names = [n for n in machine.cliques[index] if n in where.nodes]
    members = sorted((where.nodes[n] for n in names), key=lambda n: n.x)
    if len(members) < 2:
        return Markup("")
    row = sorted({n.x for n in where.nodes.values() if n.y == members[0].y})
    runs: list[list[Node]] = []
    for node in members:
        after = runs and row.index(node.x) == row.index(runs[-1][-1].x) + 1
        if after:
            runs[-1].append(node)
        else:
            runs.append([node])
    frames = list[Markup]()
    for run in runs:
        x, y = run[0].x - BOX[0] / 2 - 5, run[0].y - BOX[1] / 2 - 20
        wide = run[-1].x - run[0].x + BOX[0] + 10
        frames.append(
            element(
                "g",
                element("title", f"clique {index}: {', '.join(machine.cliques[index])}"),
                element("rect", class_="clique", x=x, y=y, width=wide, height=BOX[1] + 26, rx=8),
                element("text", f"clique {index}", class_="size", x=x + 6, y=y + 14),
            )
        )
    return element("g", *frames)


def describe(machine: MachineModel, edges: Sequence[Edge]) -> str:
    """Describe the picture: the parts, the cliques and the busiest link."""
    gpus = len(machine.gpus)
    counts = [f"{machine.num_cores} cores"]
    if gpus:
        counts.append(f"{gpus} GPU{'s' if gpus > 1 else ''}")
    counts += [f"{WORDS.get(s.kind, s.kind)} {s.name}" for s in machine.switches]
    said = f"{machine.name} has {', '.join(counts)}."
    if machine.cliques:
        groups = "; ".join(", ".join(c) for c in machine.cliques)
        said += f" Cliques of processors joined by fast links: {groups}."
    busy = max(edges, key=lambda e: e.load, default=None)
    if busy is not None and busy.load > 0:
        said += f" The busiest link joins {busy.a} and {busy.b}: {share_text(busy.load)} of a step."
    return said + " Every link is a row of the table beside the picture."
