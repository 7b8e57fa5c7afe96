"""What prices read of a machine stands in one enumeration, as probes and presets make it."""

import re
from dataclasses import replace

import pytest

from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import check_machine, make_table
from gnnplan.planner.machine.table import TableName
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.search.dimensions.ranks import machine_of_ranks
from gnnplan.planner.settings import PlanSettings
from tests.support.joined import hosts_machine
from tests.support.machines import machine
from tests.support.product import ROOT

COST = ROOT / "planner" / "cost"
PAGE = COST.parent / "probe" / "README.md"
MADE_WITH_THE_PROFILE = {MachineTable.BULK_SAMPLE, MachineTable.DEPENDENT_SAMPLE}
MACHINES = {
    **{name: load_preset(name) for name in ("cpu-2core", "siton", "hgx-h100", "perlmutter:2")},
    "by hand": machine(),
    "two hosts": hosts_machine(2),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machines_tables_have_the_unit_that_prices_take(name: str) -> None:
    tables = MACHINES[name].tables
    known = [member for member in MachineTable if member in tables]
    assert len(known) >= 4
    assert {member: tables[member].unit for member in known} == {m: m.unit for m in known}


def test_a_rate_that_a_term_declares_has_one_unit_and_its_axes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TableName, "declared", dict(TableName.declared))
    pace = TableName("label_clerk", "ranks threads?", "seconds_per_seed")
    assert (pace, pace.unit, pace.processor) == ("label_clerk", "seconds_per_seed", "cpu")
    assert TableName("label_clerk", "ranks threads?", "seconds_per_seed") == pace
    for other in (("ranks threads?", "ms_per_seed"), ("ranks", "seconds_per_seed")):
        with pytest.raises(ValueError, match="label_clerk: expected one declaration"):
            TableName("label_clerk", *other)
    wrong = machine().with_tables({pace: make_table("ms_per_seed", {"ranks": [1]}, [1.0], 0.1)})
    line = "label_clerk: expected the unit seconds_per_seed, found 'ms_per_seed'"
    with pytest.raises(MachineError, match=line):
        check_machine(wrong)
    with pytest.raises(MachineError, match=line):
        machine_of_ranks(wrong, PlanSettings())
    for axes in (["readers"], ["threads"], ["ranks", "readers"], ["ranks", "ranks"]):
        off = make_table("seconds_per_seed", {"ranks": [1]}, [1e-3], 0.1)
        off = replace(off, axes=axes, points=[[1.0]] * len(axes))
        with pytest.raises(MachineError, match=r"label_clerk: expected the axes ranks, threads\?,"):
            machine_of_ranks(machine().with_tables({pace: off}), PlanSettings())
    for axes in (["ranks"], ["threads", "ranks"]):
        right = make_table("seconds_per_seed", {axis: [1] for axis in axes}, [1e-3], 0.1)
        check_machine(machine().with_tables({pace: right}))


@pytest.mark.parametrize("name", MACHINES)
def test_a_table_over_other_axes_is_refused_as_its_machine_is_read(name: str) -> None:
    found = MACHINES[name]
    for member in MachineTable:
        if member in found.tables:
            table = found.tables[member]
            off = replace(table, axes=[f"{axis}s" for axis in table.axes])
            with pytest.raises(
                MachineError, match=f"table {member}: expected the axes .*; correct"
            ):
                check_machine(found.with_tables({member: off}))


def test_every_table_that_is_read_by_its_name_is_declared() -> None:
    read = re.compile(r"""machine\.(?:table\(|tables\.get\(|tables\[)"(\w+)\"""")
    files = [p for p in (ROOT / "planner").rglob("*.py") if "probe" not in p.parts]
    names = {name for path in files for name in read.findall(path.read_text())}
    assert len(names) > 3
    assert names - set(MachineTable) == set()


def test_numbers_that_no_machine_has_are_refused() -> None:
    for values, spread in (([1e200], 0.1), ([1e-3], -0.1), ([1e-3], 1e200)):
        with pytest.raises(ValueError, match=r"up to 1e\+30|from 0 to 1e\+30"):
            make_table("seconds", {"ranks": [1]}, values, spread)
    found = machine()
    for name in ("bandwidth_bytes_per_second", "latency_seconds", "gather_bytes_per_second"):
        links = [replace(found.links[0], **{name: 1e200}), *found.links[1:]]
        with pytest.raises(MachineError, match="expected"):
            check_machine(replace(found, links=links))


def test_tables_of_gpus_are_those_that_machines_without_one_lack() -> None:
    assert {m for m in MachineTable if m.processor == "cuda"} & set(machine().tables) == set()
    of_gpus = {m for m in MachineTable if m in MACHINES["hgx-h100"].tables}
    assert {MachineTable.GPU_KERNEL, MachineTable.GPU_MESSAGE} <= of_gpus
    assert all(m.processor == "cuda" for m in of_gpus - {MachineTable.PROCESS_START})


def test_each_table_has_a_row_of_the_probes_page() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    missing = {
        member
        for member in set(MachineTable) - MADE_WITH_THE_PROFILE
        if member not in named and member.removeprefix("hosts_") not in named
    }
    assert missing == set()


def test_no_price_spells_a_tables_name() -> None:
    spelt = re.compile(r"""(?:\.table\(|tables\.get\(|lookup\(\w+, )"|" (?:not )?in \w+\.tables""")
    files = COST.rglob("*.py")
    assert [file.name for file in files if spelt.search(file.read_text())] == []
