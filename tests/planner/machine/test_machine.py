"""Tests for planner/machine/model.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import (
    Link,
    MachineModel,
    Memory,
    Processor,
    Table,
    load_machine,
    save_machine,
)
from gnnplan.runtime.plan.schema import HostSize


def grid(values: list[float]) -> Table:
    """A table over row_bytes (64, 256, 1024) and readers (1, 2)."""
    return Table(
        unit="seconds_per_row",
        axes=["row_bytes", "readers"],
        points=[[64.0, 256.0, 1024.0], [1.0, 2.0]],
        values=values,
        spread=0.1,
    )


def gathers(values: list[float]) -> Table:
    """The same over tables of one size, as a machine has it."""
    table = grid(values)
    rows, readers = table.points
    axes = ["row_bytes", "working_set_bytes", "readers"]
    return replace(table, axes=axes, points=[rows, [1e9], readers])


VALUES = [1e-8, 2e-8, 3e-8, 6e-8, 9e-8, 2e-7]


def machine() -> MachineModel:
    return MachineModel(
        name="test",
        fingerprint="f" * 32,
        provenance="measured",
        processors=[Processor(name="cpu0", kind="cpu", memory="host0", cores=2)],
        memories=[Memory(name="host0", kind="host", capacity_bytes=10**9)],
        links=[
            Link(
                name="memory0.read",
                source="host0",
                target="cpu0",
                latency_seconds=1e-7,
                bandwidth_bytes_per_second=1e10,
            )
        ],
        tables={"gather": gathers(VALUES)},
        extent="quick",
        notes=["a note"],
    )


def test_a_plan_is_told_how_large_each_measured_host_is():
    one = machine()
    gpu = Processor(name="h1.gpu0", kind="cuda", memory="h1.gpu0.memory", model="A", host=1)
    cores = Processor(name="h1.cpu0", kind="cpu", memory="h1.host0", cores=32, host=1)
    two = replace(
        one,
        processors=[*one.processors, cores, gpu],
        memories=[
            *one.memories,
            Memory(name="h1.host0", kind="host", capacity_bytes=64 * 2**30 - 5),
            Memory(name="h1.gpu0.memory", kind="device", capacity_bytes=10**9),
        ],
    )
    assert two.reference().hosts == [
        HostSize(cores=2, memory_gib=1),
        HostSize(cores=32, memory_gib=64, gpu="A"),
    ]
    assert replace(two, provenance="preset").reference().hosts == []


def test_table_is_exact_on_its_grid_points():
    table = grid(VALUES)
    found = [table.at(row_bytes=b, readers=r) for b in (64, 256, 1024) for r in (1, 2)]
    assert found == pytest.approx(VALUES, rel=1e-12)


def test_table_interpolates_a_power_law_exactly():
    # T = 3 b^0.5 r^2 is linear in log space, so every point between is exact.
    points = [[1.0, 10.0, 1000.0], [1.0, 8.0]]
    values = [3 * b**0.5 * r**2 for b in points[0] for r in points[1]]
    table = Table(unit="s", axes=["b", "r"], points=points, values=values, spread=0.0)
    assert table.at(b=50.0, r=3.0) == pytest.approx(3 * 50**0.5 * 9)


def test_table_rises_between_rising_grid_points():
    table = grid(VALUES)
    sizes = np.geomspace(64, 1024, 50)
    found = [table.at(row_bytes=float(b), readers=1.3) for b in sizes]
    assert np.all(np.diff(found) > 0)


def test_table_holds_its_edge_outside_the_grid():
    table = grid(VALUES)
    assert table.at(row_bytes=1, readers=1) == pytest.approx(1e-8)
    assert table.at(row_bytes=0, readers=0.1) == pytest.approx(1e-8)
    assert table.at(row_bytes=10**9, readers=64) == pytest.approx(2e-7)


def test_table_with_one_point_is_constant():
    table = Table(unit="s", axes=["ranks"], points=[[2.0]], values=[5.0], spread=0.0)
    assert [table.at(ranks=r) for r in (1, 2, 100)] == pytest.approx([5.0] * 3)


@pytest.mark.parametrize(
    "wrong", [{"row_bytes": 64}, {"row_bytes": 64, "readers": 1, "threads": 2}, {}]
)
def test_table_refuses_coordinates_that_are_not_its_axes(wrong: dict[str, float]):
    with pytest.raises(KeyError, match="expected coordinates"):
        grid(VALUES).at(**wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"values": VALUES[:-1]},
        {"values": [0.0, *VALUES[1:]]},
        {"values": [-1.0, *VALUES[1:]]},
        {"points": [[64.0, 64.0, 1024.0], [1.0, 2.0]]},
        {"points": [[0.0, 256.0, 1024.0], [1.0, 2.0]]},
        {"points": [[64.0, 256.0, 1024.0]]},
        {"points": [[], [1.0, 2.0]], "values": []},
        {"axes": [], "points": [], "values": [1.0]},
    ],
)
def test_table_refuses_a_grid_that_cannot_be_looked_up(change: dict[str, Any]):
    with pytest.raises(ValueError, match=r"expected|must rise"):
        replace(grid(VALUES), **change)


def test_machine_file_round_trips_byte_for_byte(tmp_path: Path):
    path = tmp_path / "machine.json"
    save_machine(machine(), path)
    loaded = load_machine(path)
    assert loaded == machine()
    text = path.read_text()
    save_machine(loaded, path)
    assert path.read_text() == text


def damaged() -> dict[str, str]:
    """Machine files with one fault each."""
    good = json.loads(json.dumps(_plain()))
    unknown, missing, typed, cells, unit = (json.loads(json.dumps(good)) for _ in range(5))
    unknown["surprise"] = 1
    del missing["memories"]
    typed["noise"] = "low"
    cells["tables"]["gather"]["values"].pop()
    unit["tables"]["gather"]["unit"] = "milliseconds_per_row"
    schema = good | {"schema_version": 99}
    found = {"unknown": unknown, "missing": missing, "typed": typed, "cells": cells, "unit": unit}
    texts = {name: json.dumps(value) for name, value in (found | {"schema": schema}).items()}
    return texts | {"cut": json.dumps(good)[:100], "empty": "", "list": "[]", "nan": "NaN"}


def _plain() -> Any:
    from gnnplan.runtime import codec

    return codec.to_plain(machine())


@pytest.mark.parametrize("fault", sorted(damaged()))
def test_damaged_machine_file_is_refused_in_one_line(tmp_path: Path, fault: str):
    path = tmp_path / "machine.json"
    path.write_text(damaged()[fault])
    with pytest.raises(MachineError) as caught:
        load_machine(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_machine_file_of_random_bytes_is_refused(tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(MachineError):
        load_machine(path)


def test_missing_machine_file_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(MachineError, match="gnnplan probe"):
        load_machine(tmp_path / "none.json")


def test_a_table_that_was_not_measured_is_never_invented():
    with pytest.raises(MachineError, match="no measurement 'disk_read'"):
        machine().table("disk_read")
    with pytest.raises(MachineError, match="no memory named"):
        machine().memory("gpu0")


def test_calibration_changes_with_a_measured_number_and_not_with_notes():
    first = machine()
    other = first.with_tables({"gather": gathers([*VALUES[:-1], 3e-7])})
    assert other.calibration != first.calibration
    assert replace(first, notes=[]).calibration == first.calibration


def test_graph_joins_memories_and_processors_by_links():
    graph = machine().graph()
    assert set(graph.nodes) == {"cpu0", "host0"}
    assert graph.edges["host0", "cpu0"]["bandwidth_bytes_per_second"] == 1e10
    assert machine().num_cores == 2
