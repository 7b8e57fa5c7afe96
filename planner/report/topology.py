"""The machine as a picture: what is joined to what, how fast, and how busy in the plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from planner.cost.memory import capacity_text
from planner.machine import MachineModel
from planner.report.layout import BOX, Layout, Node, bend, layout
from planner.report.links import LinkRow, load_level
from planner.report.svg import element, figure
from planner.report.words import rate_text, share_text

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
    """The links between two boxes, both directions drawn as one line."""

    a: str
    b: str
    rows: list[LinkRow]

    @property
    def bytes_per_second(self) -> float:
        """Of the faster direction."""
        return max(row.bytes_per_second for row in self.rows)

    @property
    def load(self) -> float:
        """Of the busier direction."""
        return max(row.load for row in self.rows)


def draw_topology(
    machine: MachineModel,
    rows: Sequence[LinkRow],
    *,
    used: set[str] | None = None,
    name: str = "topology",
) -> Markup:
    """Draw a machine.

    Args:
        machine: what is drawn.
        rows: its links with their load, from `link_rows`.
        used: GPUs that the plan uses; None: no plan, so none is drawn as idle.
        name: of the picture's ids.
    """
    where = layout(machine)
    edges, inner = _edges(where, rows)
    parts = [_clique(machine, where, i) for i in range(len(machine.cliques))]
    lines, labels = list[Markup](), list[Markup]()
    for edge in edges:
        line, label = _line(where, edge)
        lines.append(line)
        labels.append(label)
    boxes = [_box(machine, node, inner.get(node.name, []), used) for node in where.nodes.values()]
    return figure(
        name,
        f"Topology of {machine.name}",
        describe(machine, edges),
        *parts,
        *lines,
        *boxes,
        *labels,
        height=where.height,
        width=where.width,
    )


def _edges(where: Layout, rows: Sequence[LinkRow]) -> tuple[list[Edge], dict[str, list[LinkRow]]]:
    """Links between boxes, and those inside one."""
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
    """A link, as wide as it is fast and as dark as it is busy; and its rate."""
    a, b = sorted((where.nodes[edge.a], where.nodes[edge.b]), key=lambda n: (n.y, n.x))
    middle_x, middle_y = (a.x + b.x) / 2, (a.y + b.y) / 2
    if a.kind == b.kind == "gpu":
        low = where.gpu_row + BOX[1] / 2
        deep = low + bend(b.x - a.x) * 2
        way = f"M {a.x:.1f} {low:.1f} Q {middle_x:.1f} {deep:.1f} {b.x:.1f} {low:.1f}"
        middle_y = (low + deep) / 2
    else:
        way = f"M {a.x:.1f} {a.y:.1f} L {b.x:.1f} {b.y:.1f}"
    line = element(
        "path",
        element("title", _link_words(edge)),
        class_=f"link load{load_level(edge.load)}",
        d=way,
        stroke_width=_stroke(edge.bytes_per_second),
    )
    lift = -6 if a.y == b.y and a.kind != "gpu" else 4
    label = element(
        "text",
        f"{edge.bytes_per_second / 1e9:.3g}",
        class_="rate",
        x=middle_x,
        y=middle_y + lift,
        text_anchor="middle",
    )
    return line, label


def _stroke(bytes_per_second: float) -> float:
    """Pixels by the logarithm of the rate: 1 GB/s is 2, 1 TB/s is 8.

    >>> _stroke(1e9), _stroke(1e12)
    (2.0, 8.0)
    """
    return min(9.0, max(1.5, 2.0 + 2.0 * math.log10(max(bytes_per_second, 1.0) / 1e9)))


def _link_words(edge: Edge) -> str:
    words = [f"{row.source} to {row.target}: {row_words(row)}" for row in edge.rows]
    return "; ".join(words)


def row_words(row: LinkRow) -> str:
    """A link's rate and load in words."""
    load = f", load {share_text(row.load)}" if row.load > 0 else ", no rows"
    return f"{rate_text(row.bytes_per_second)} {row.provenance}{load}"


def _box(
    machine: MachineModel, node: Node, inner: Sequence[LinkRow], used: set[str] | None
) -> Markup:
    """A part: its name, what it is, how large."""
    idle = used is not None and node.kind == "gpu" and node.name not in used
    level = load_level(max((row.load for row in inner), default=0.0))
    size = _size_words(machine, node)
    words = [f"{node.name}, {WORDS.get(node.kind, node.kind)} {size}".strip()]
    words += [f"{row.name} {row_words(row)}" for row in inner]
    if idle:
        words.append("not used by the plan")
    classes = f"part {node.kind} load{level}" + (" idle" if idle else "")
    return element(
        "g",
        element("title", "; ".join(words)),
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
            "text", _short(node.name), class_="name", x=node.x, y=node.y - 3, text_anchor="middle"
        ),
        element(
            "text",
            size or WORDS.get(node.kind, node.kind),
            class_="size",
            x=node.x,
            y=node.y + 13,
            text_anchor="middle",
        ),
    )


def _short(name: str) -> str:
    """A name that fits its box; the whole one stands in the title and the table."""
    return name if len(name) <= 13 else f"{name[:12]}\N{HORIZONTAL ELLIPSIS}"


def _size_words(machine: MachineModel, node: Node) -> str:
    """Capacity of a memory, cores of a host."""
    if node.kind == "cpu":
        cores = next(p.cores for p in machine.processors if p.name == node.name)
        return f"{cores} core{'s' if cores > 1 else ''}"
    name = node.name
    if node.kind == "gpu":
        name = next(p.memory for p in machine.processors if p.name == node.name)
    found = [m for m in machine.memories if m.name == name]
    return capacity_text(found[0].capacity_bytes) if found else ""


def _clique(machine: MachineModel, where: Layout, index: int) -> Markup:
    """A frame around each run of neighbours of one clique, with the clique's number."""
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
    """The picture in words: what there is, and the fastest and busiest of its links."""
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
