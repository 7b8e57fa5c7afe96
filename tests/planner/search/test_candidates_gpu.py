"""Tests for planner/search/dimensions/ranks.py: how many GPUs, which ones, in which cliques."""

from collections import Counter
from dataclasses import replace

import pytest

from gnnplan.planner.errors import MachineError, SettingsError
from gnnplan.planner.pipeline import joined_candidates
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.search.dimensions.ranks import (
    gpu_counts,
    machine_candidates,
    machine_of_ranks,
    plans_gpus,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.plan.schema import Workload
from tests.support.machines import machine as by_hand

SETTINGS = PlanSettings(workload=Workload(batch_size=1024))


def test_counts_are_powers_of_two_on_a_host_and_then_whole_hosts():
    assert gpu_counts(load_preset("siton"), None, 1024) == [1, 2, 4, 8]
    assert gpu_counts(load_preset("rtx-2080ti-x10"), None, 1024) == [1, 2, 4, 8, 10]
    assert gpu_counts(load_preset("perlmutter:3"), None, 1024) == [1, 2, 4, 8, 12]
    assert gpu_counts(load_preset("siton"), 3, 1024) == [3]
    assert gpu_counts(load_preset("siton"), None, 2) == [1, 2]


@pytest.mark.parametrize(
    ("devices", "batch", "words"),
    [(9, 1024, "at most 8 devices .the GPUs of siton"), (3, 2, "at most 2 devices .the seeds")],
)
def test_more_devices_than_there_are_is_refused(devices: int, batch: int, words: str):
    with pytest.raises(SettingsError, match=words):
        gpu_counts(load_preset("siton"), devices, batch)


def choices(name: str, devices: int) -> list[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    tried = machine_candidates(replace(SETTINGS, devices=devices), load_preset(name), ("none",))
    return list(dict.fromkeys((c.gpus, c.cliques) for c in tried))


def test_four_gpus_of_siton_are_two_bridged_pairs_or_four_unshared_ports():
    assert choices("siton", 4) == [
        (("gpu0", "gpu1", "gpu2", "gpu3"), ((0, 1), (2, 3))),
        (("gpu0", "gpu2", "gpu4", "gpu6"), ((0,), (1,), (2,), (3,))),
    ]


def test_all_gpus_are_one_choice():
    assert choices("siton", 8) == [
        (tuple(f"gpu{g}" for g in range(8)), ((0, 1), (2, 3), (4, 5), (6, 7)))
    ]


def test_another_cover_by_as_few_cliques_is_a_candidate_too():
    machine = load_preset("siton")
    other = [["gpu0", "gpu2"], ["gpu1", "gpu3"], ["gpu4", "gpu5"], ["gpu6", "gpu7"]]
    tried = machine_candidates(
        replace(SETTINGS, devices=8), replace(machine, other_covers=[other]), ("none",)
    )
    assert {c.cliques for c in tried} == {
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 2), (1, 3), (4, 5), (6, 7)),
    }


def test_ranks_of_a_host_are_next_to_each_other():
    machine = load_preset("perlmutter:2")
    hosts = {g.name: g.host for g in machine.gpus}
    for chosen in machine_candidates(SETTINGS, machine, ("none",)):
        order = [hosts[name] for name in chosen.gpus]
        assert order == sorted(order)
        assert sorted(r for c in chosen.cliques for r in c) == list(range(chosen.num_ranks))


def test_gpus_between_which_no_message_was_measured_are_planned_on_one_by_one():
    machine = load_preset("siton")
    tables = {k: v for k, v in machine.tables.items() if k != "gpu_message"}
    apart = replace(machine, tables=tables)
    assert plans_gpus(apart)
    assert gpu_counts(apart, None, 1024) == gpu_counts(apart, 1, 1024) == [1]
    with pytest.raises(SettingsError, match=r"messages between its GPUs .*`gnnplan probe`"):
        gpu_counts(apart, 2, 1024)


LOST = "GPUs: not measured: probe process 0: measure_gpu: no answer in 90 s"


@pytest.mark.parametrize(
    ("notes", "reason"),
    [
        ([LOST], r"8 GPUs that plans can use, found GPUs: not measured: .* in 90 s; mend"),
        (["cpu: fine", "gpu0: refused, nothing of it counts: power cap"], "found gpu0: refused"),
        ([], "found no measurement of gpu_flops; mend"),
    ],
)
def test_gpus_of_which_too_little_is_known_stop_a_plan_and_cores_can_be_asked_for(
    notes: list[str], reason: str
):
    machine = load_preset("siton")
    tables = {k: v for k, v in machine.tables.items() if k != "gpu_flops"}
    lost = replace(machine, tables=tables, notes=notes)
    assert plans_gpus(machine)
    assert not plans_gpus(lost)
    with pytest.raises(MachineError, match=reason) as refused:
        machine_of_ranks(lost, SETTINGS)
    assert "--cores" in str(refused.value)
    assert "\n" not in str(refused.value)
    for known in (machine, lost):
        cores = machine_of_ranks(known, replace(SETTINGS, cores=True))
        assert (cores.gpus, [m.kind for m in cores.memories if m.kind == "device"]) == ([], [])
        settings = replace(SETTINGS, devices=2)
        assert {c.kind for c in machine_candidates(settings, cores, ("none",))} == {"cpu"}
    assert machine_of_ranks(machine, SETTINGS) == machine


def test_a_driver_that_tells_nothing_of_its_gpus_stops_a_plan_and_none_does_not():
    silent = replace(
        by_hand(), notes=["GPUs: the driver is there and tells nothing of its GPUs (none)"]
    )
    with pytest.raises(MachineError, match="expected GPUs that plans can use, found GPUs: the dr"):
        machine_of_ranks(silent, SETTINGS)
    hidden = replace(by_hand(), notes=["CUDA_VISIBLE_DEVICES=: 0 of 8 GPUs are visible"])
    assert machine_of_ranks(hidden, SETTINGS) == hidden


def test_hosts_that_are_asked_for_have_equally_many_gpus():
    machine = load_preset("perlmutter:4")
    assert gpu_counts(machine, None, 1024, hosts=2) == [2, 4, 8]
    assert gpu_counts(machine, 6, 1024, hosts=2) == [6]
    hosts = {g.name: g.host for g in machine.gpus}
    for devices in (4, 6, 8, None):
        settings = replace(SETTINGS, devices=devices, hosts=2)
        for chosen in machine_candidates(settings, machine, ("none",)):
            found = Counter(hosts[name] for name in chosen.gpus)
            assert found == {0: chosen.num_ranks // 2, 1: chosen.num_ranks // 2}
            # A clique never leaves its host.
            assert all(len({hosts[chosen.gpus[r]] for r in c}) == 1 for c in chosen.cliques)


@pytest.mark.parametrize(
    ("devices", "hosts", "words"),
    [
        (None, 3, "at most 2 hosts .those of perlmutter:2., found 3"),
        (5, 2, "2 hosts share evenly, found 5; ask for 4"),
        (1, 2, "2 hosts share evenly, found 1; ask for 2"),
        (10, 2, "at most 8 devices .the GPUs of perlmutter:2"),
    ],
)
def test_hosts_that_cannot_be_are_refused(devices: int | None, hosts: int, words: str):
    with pytest.raises(SettingsError, match=words):
        gpu_counts(load_preset("perlmutter:2"), devices, 1024, hosts=hosts)


@pytest.mark.parametrize("hosts", [17, 18])
def test_all_trays_of_a_rack_are_planned(hosts: int) -> None:
    machine, asked = load_preset(f"gb200-nvl72:{hosts}"), replace(SETTINGS, hosts=hosts)
    found = joined_candidates(asked, machine, ("none",), task="multiclass")
    assert {each.num_ranks for each in found} == {hosts, 2 * hosts, 4 * hosts}


def test_more_ranks_than_a_table_of_rows_tells_apart_are_left_out_or_refused() -> None:
    machine, asked = load_preset("perlmutter:64"), replace(SETTINGS, hosts=64)

    def ranks(settings: PlanSettings) -> set[int]:
        found = joined_candidates(settings, machine, ("none",), task="multiclass")
        return {each.num_ranks for each in found}

    assert ranks(asked) == {64, 128}
    with pytest.raises(SettingsError, match=r"at most 253 devices, .* found 256; ask for fewer"):
        ranks(replace(asked, devices=256))
    few = replace(asked, workload=Workload(batch_size=32))
    with pytest.raises(SettingsError, match=r"at most 32 hosts \(the seeds of a batch\), found 64"):
        ranks(few)


def test_a_gpu_that_was_not_measured_is_left_out_and_the_others_keep_their_numbers():
    machine = load_preset("hgx-h100")
    links = [link for link in machine.links if link.name != "gpu1.hbm"]
    found = machine_of_ranks(replace(machine, links=links), SETTINGS)
    names = [gpu.name for gpu in found.gpus]
    assert names == [f"gpu{g}" for g in (0, 2, 3, 4, 5, 6, 7)]
    assert found.cliques == [names]
    made = machine_candidates(replace(SETTINGS, devices=7), found, ("none",))[0]
    assert [device.index for device in made.devices] == [0, 2, 3, 4, 5, 6, 7]
    with pytest.raises(SettingsError, match="at most 7 devices"):
        gpu_counts(found, 8, 1024)
