"""Where the parts of a machine are drawn: inside the picture, apart, in their rows."""

from itertools import combinations, pairwise

import pytest

from gnnplan.planner.probe.presets import list_presets, load_preset
from gnnplan.planner.report.topology import BOX, LEVEL, MARGIN, bend, host_of, layout


@pytest.mark.parametrize("name", list_presets())
def test_boxes_lie_inside_the_picture_and_apart_from_each_other(name: str):
    machine = load_preset(name)
    found = layout(machine)
    assert set(found.drawn_as) >= {p.name for p in machine.processors}
    assert {p.name for p in machine.processors} <= set(found.nodes)
    for node in found.nodes.values():
        assert MARGIN <= node.y <= found.height - MARGIN
        assert MARGIN <= node.x <= found.width - MARGIN
    for one, other in combinations(found.nodes.values(), 2):
        assert abs(one.x - other.x) >= BOX[0] or abs(one.y - other.y) >= BOX[1]
    # The lowest row, or the links that hang below the devices, end a margin above the edge.
    lowest = max(node.y for node in found.nodes.values())
    gpus = {node.name: node for node in found.nodes.values() if node.kind == "gpu"}
    assert {node.y for node in gpus.values()} <= {found.gpu_row}
    spans = [
        abs(gpus[a].x - gpus[b].x)
        for link in machine.links
        if {a := found.drawn_as.get(link.source, ""), b := found.drawn_as.get(link.target, "")}
        <= set(gpus)
    ]
    hanging = found.gpu_row + bend(max(spans)) if max(spans, default=0) > 0 else 0.0
    assert found.height == pytest.approx(max(lowest, hanging) + MARGIN)


@pytest.mark.parametrize("name", list_presets())
def test_rows_go_from_memory_over_switches_to_devices(name: str):
    rows: dict[str, set[float]] = {}
    hosts: dict[int, list[float]] = {}
    for node in layout(load_preset(name)).nodes.values():
        rows.setdefault(node.kind, set()).add(node.y)
        hosts.setdefault(host_of(node.name), []).append(node.x)
    order = [kind for kind in ("host", "numa", "pcie", "gpu", "nvlink") if kind in rows]
    for above, below in pairwise(order):
        assert max(rows[above]) <= min(rows[below]) - LEVEL
    assert rows["host"] == {MARGIN}
    for one, other in pairwise(sorted(hosts)):
        assert max(hosts[one]) + BOX[0] <= min(hosts[other])
