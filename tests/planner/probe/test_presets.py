"""Tests for planner/probe/presets.py."""

from dataclasses import replace

import pytest

from planner.errors import MachineError
from planner.probe.presets import dump_preset, list_presets, load_preset, parse_preset

COST_MODEL_TABLES = {
    "copy": {"readers"},
    "gather": {"row_bytes", "working_set_bytes", "readers"},
    "mapped_gather": {"row_bytes", "working_set_bytes", "readers"},
    "disk_read": {"read_bytes", "queue_depth"},
    "all_reduce": {"bytes", "ranks"},
    "all_to_all": {"bytes", "ranks"},
    "sample_edge": {"topology_bytes", "readers"},
    "sample_vertex": {"table_bytes", "readers"},
}


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_can_be_planned_for(name: str):
    machine = load_preset(name)
    assert {k: set(machine.table(k).axes) for k in COST_MODEL_TABLES} == COST_MODEL_TABLES
    assert machine.name == name
    assert machine.num_cores >= 1
    assert machine.notes


@pytest.mark.parametrize("name", list_presets())
def test_no_number_of_a_preset_claims_to_be_measured_here(name: str):
    machine = load_preset(name)
    parts = [*machine.memories, *machine.links, *machine.tables.values(), machine]
    assert {part.provenance for part in parts} == {"preset"}
    assert machine.fingerprint == f"preset:{name}"


def test_cpu_2core_costs_rise_with_size():
    machine = load_preset("cpu-2core")
    gather = machine.table("gather")
    seconds = [gather.at(row_bytes=b, working_set_bytes=2**28, readers=1) for b in (64, 400, 2048)]
    assert seconds == sorted(seconds)
    reduce = machine.table("all_reduce")
    assert reduce.at(bytes=2**24, ranks=2) > reduce.at(bytes=1024, ranks=2)


def test_unknown_preset_names_those_there_are():
    with pytest.raises(MachineError, match="cpu-2core"):
        load_preset("cpu-3core")


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "name: x"])
def test_damaged_preset_is_one_line(text: str):
    with pytest.raises(MachineError, match="preset bad") as caught:
        parse_preset(text, "bad")
    assert "\n" not in str(caught.value)


def test_a_machine_dumped_as_a_preset_loads_with_its_numbers_rounded():
    machine = load_preset("cpu-2core")
    table = machine.table("copy")
    precise = replace(table, values=[v * 1.00001 for v in table.values], provenance="measured")
    probed = replace(machine, provenance="measured", extent="full").with_tables({"copy": precise})
    text = dump_preset(probed, name="again", notes=["from a test"])
    found = parse_preset(text, "again")
    assert found.table("copy") == table
    assert (found.name, found.notes, found.extent) == ("again", ["from a test"], "")
