"""Tests for planner/probe/probe.py: a small probe with real processes, and its cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel, load_machine, save_machine
from gnnplan.planner.probe import probe as probe_module
from gnnplan.planner.probe.context import QUICK
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.probe import (
    cache_folder,
    cached_machine,
    keep_for_plans,
    load_or_probe,
    probe,
    probe_with,
    with_disk_again,
)
from gnnplan.runtime.device import machine_fingerprint

TINY = replace(
    QUICK,
    name="tiny",
    noise_kernel_seconds=0.01,
    noise_repeats=3,
    point_seconds=0.005,
    max_team=2,
    copy_bytes=2**20,
    row_bytes=(64, 4096),
    working_set_bytes=(2**20, 2**24),
    gather_rows=(1000, 4000),
    exchange_bytes=(256, 2**20),
    exchange_steps=3,
    exchange_burst_rows=64,
    disk_file_bytes=2**22,
    disk_rounds=2,
    message_bytes=(256, 2**20),
    graph_nodes=(2**11,),
    sample_cases=((64, (10, 5)), (128, (5,))),
    sample_seconds=0.005,
    burst_rows=256,
    overlap_repeats=2,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def check_tables(machine: MachineModel) -> None:
    """Values that any machine keeps to."""
    expected = {"copy", "gather", "mapped_gather", "sample_edge", "sample_vertex", "overlap_eta"}
    for operation in ("all_reduce", "all_to_all"):
        suffixes = ("", "_p90", "_idle", "_stepped", "_core_seconds")
        expected |= {operation + suffix for suffix in suffixes}
    expected |= {"all_to_all_asked", "all_to_all_early", "all_to_all_after", "step_jitter"}
    expected |= {"all_to_all_around_ids", "all_to_all_around_rows", "all_to_all_hidden"}
    assert expected | {"compute_slowdown", "process_start"} <= set(machine.tables)
    for name, table in machine.tables.items():
        assert np.all(np.isfinite(table.values)), name
        assert table.provenance == "measured", name
    assert 1e8 < machine.table("copy").at(readers=1) < 1e12
    for name in ("gather", "mapped_gather"):
        gather = machine.table(name)
        num_rows, row_bytes, working_sets, _ = gather.points
        small = {"rows": num_rows[-1], "working_set_bytes": working_sets[0], "readers": 1}
        grid = [gather.at(row_bytes=b, **small) for b in row_bytes]
        assert np.all(np.diff(grid) >= 0)
        assert grid[-1] > grid[0]
        assert 1e-10 < grid[0] < 1e-4
    for name in ("compute_slowdown", "beside", "beside_loader"):
        if name in machine.tables:
            assert min(machine.table(name).values) >= 1.0
    assert max(machine.table("overlap_eta").values) <= 1.0
    assert all(link.bandwidth_bytes_per_second > 0 for link in machine.links)
    assert all(link.provenance == "derived" for link in machine.links)


@pytest.mark.distributed
def test_a_small_probe_fills_every_table_and_round_trips(tmp_path: Path, own_cache: Path):
    seen: list[tuple[str, float]] = []
    machine = probe_with(TINY, progress=lambda what, share: seen.append((what, share)))
    check_tables(machine)
    assert machine.fingerprint == machine_fingerprint()
    assert (machine.extent, machine.provenance) == ("tiny", "measured")
    assert machine.noise >= 0.005
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    # Nothing temporary stays; how quiet the machine has been does.
    assert [path.name.partition("-")[0] for path in own_cache.iterdir()] in ([], ["cores"])
    save_machine(machine, tmp_path / "machine.json")
    assert load_machine(tmp_path / "machine.json") == machine


@pytest.mark.distributed
@pytest.mark.slow
def test_the_quick_probe_has_sane_values():
    machine = probe(quick=True)
    check_tables(machine)
    assert machine.extent == "quick"


def here(extent: str) -> MachineModel:
    return replace(
        load_preset("cpu-2core"),
        fingerprint=machine_fingerprint(),
        extent=extent,
        versions={"probe": probe_module.VERSION},
    )


def cached_file() -> Path:
    return cache_folder() / f"machine-{machine_fingerprint()}.json"


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records every probe asked for, by its `quick`."""
    asked: list[bool] = []

    def instead(*, quick: bool = False, **_: object) -> MachineModel:
        asked.append(quick)
        return here("quick" if quick else "full")

    monkeypatch.setattr(probe_module, "probe", instead)
    return asked


def test_a_probe_is_kept_and_used_again(probed: list[bool]):
    first = load_or_probe()
    assert load_or_probe() == first
    assert load_or_probe(quick=True) == first
    assert probed == [False]


def test_a_quick_probe_does_not_stand_in_for_a_full_one(probed: list[bool]):
    load_or_probe(quick=True)
    load_or_probe(quick=True)
    load_or_probe()
    assert probed == [True, False]


def test_what_was_probed_by_hand_serves_plans(probed: list[bool], tmp_path: Path):
    assert main(["probe", "-o", str(tmp_path / "machine.json")]) == 0
    assert load_or_probe() == load_machine(tmp_path / "machine.json")
    assert probed == [False]


def test_a_quick_probe_is_kept_until_a_full_one_is():
    assert keep_for_plans(here("quick"))
    assert cached_machine(quick=True) == here("quick")
    assert cached_machine() is None
    assert keep_for_plans(here("full"))
    assert not keep_for_plans(here("quick"))
    assert cached_machine(quick=True) == here("full")


def test_only_probes_of_this_machine_by_this_release_are_kept():
    assert not keep_for_plans(replace(here("full"), fingerprint="0" * 32))
    assert not keep_for_plans(replace(here("full"), versions={"probe": "1"}))
    assert cached_machine() is None


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_damaged_cache_is_measured_again(probed: list[bool], content: str):
    cached_file().write_text(content)
    assert load_or_probe().extent == "full"
    assert probed == [False]
    assert load_machine(cached_file()).extent == "full"


def test_what_an_older_probe_measured_is_measured_again(probed: list[bool]):
    save_machine(replace(here("full"), versions={"probe": "1"}), cached_file())
    assert cached_machine() is None
    load_or_probe()
    assert probed == [False]
    assert cached_machine() == here("full")


def test_a_cached_file_of_another_machine_is_not_used(probed: list[bool]):
    save_machine(replace(here("full"), fingerprint="0" * 32), cached_file())
    load_or_probe()
    assert probed == [False]


def test_a_named_file_must_exist(tmp_path: Path, probed: list[bool]):
    with pytest.raises(MachineError, match="found none"):
        load_or_probe(tmp_path / "none.json")
    save_machine(here("quick"), tmp_path / "machine.json")
    assert load_or_probe(tmp_path / "machine.json") == here("quick")
    assert probed == []


@pytest.mark.usefixtures("own_cache")
def test_the_disk_alone_is_measured_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gnnplan.planner.probe.probe.QUICK", TINY)
    old = here("quick")
    found = with_disk_again(old)
    if "disk_read" not in found.tables:
        pytest.skip("this file system refuses direct reads")
    table = found.tables["disk_read"]
    assert table.provenance == "measured"
    assert table.points[:2] == [list(TINY.disk_read_bytes), list(TINY.disk_queue_depths)]
    assert table.points[2] == [1.0, 2.0][: old.num_cores]
    # A busy machine's disk may be noted as uncertain, before as well as now.
    assert _without_disk(found.notes) == _without_disk(old.notes)
    changed = {link.name for link in found.links if link not in old.links}
    assert changed == {"disk0.read"}
    assert [link.name for link in found.links] == [link.name for link in old.links]
    again = {name: t for name, t in found.tables.items() if name.startswith("disk")}
    assert set(again) == {"disk_read", *(["disk_apart"] if old.num_cores > 1 else [])}
    assert found == replace(old, tables=old.tables | again, links=found.links, notes=found.notes)


def _without_disk(notes: list[str]) -> list[str]:
    return [note for note in notes if not note.startswith("disk")]


@pytest.mark.usefixtures("own_cache")
def test_the_command_measures_the_disk_alone_in_a_file_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("gnnplan.planner.probe.probe.QUICK", TINY)
    path = tmp_path / "machine.json"
    save_machine(here("quick"), path)
    assert main(["probe", "--disk", "-o", str(path)]) == 0
    assert load_machine(path).tables["gather"] == here("quick").tables["gather"]
    save_machine(replace(here("quick"), fingerprint="another"), path)
    kept = path.read_bytes()
    for words, why in (
        (["-o", str(path)], "expected the model of this machine"),
        (["-o", str(tmp_path / "none.json")], "found none"),
        (["-o", str(path), "--hosts", "2"], "expected one host"),
    ):
        capsys.readouterr()
        assert main(["probe", "--disk", *words]) == 2
        assert why in capsys.readouterr().err
    assert path.read_bytes() == kept
