"""Estimates of frameworks as they are: physics orders them, overheads are arguments."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from gnnplan.planner.cost.systems import (
    EpochWork,
    System,
    SystemOverhead,
    SystemTimes,
    class_overhead,
    epoch_times,
    find_system,
    list_systems,
    system_rates,
)
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset

WORK = EpochWork(
    batches=100, input_rows=2e5, edges=1e6, expanded=1e5, row_bytes=400, compute_seconds=5e-3,
    gradient_bytes=1e6, exchange_bytes=1e9, exchanges=4,
)  # fmt: skip
SYSTEMS = list(list_systems().values())
BOX = load_preset("dgx-v100")


def epoch(system: System, machine: MachineModel = BOX, gpus: int = 4, **options: float) -> float:
    rates = system_rates(machine, gpus, WORK.row_bytes)
    return epoch_times(system, WORK, rates, **options).epoch_seconds  # type: ignore[arg-type]


def faster(machine: MachineModel, times: float) -> MachineModel:
    """The machine with links so many times as fast."""
    links = [
        replace(
            link,
            bandwidth_bytes_per_second=times * link.bandwidth_bytes_per_second,
            gather_bytes_per_second=times * link.gather_bytes_per_second,
        )
        for link in machine.links
    ]
    return replace(machine, name=f"{machine.name} x{times}", links=links)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.name)
def test_an_estimate_never_rises_with_what_makes_it_faster(system: System) -> None:
    ways: list[Callable[[float], float]] = [
        lambda x: epoch(system, faster(BOX, 1 + x), host_hit_rate=0.5),
        lambda x: epoch(system, workers=round(16 * x)),
        lambda x: epoch(system, hit_rate=x),
        lambda x: epoch(system, host_hit_rate=x),
    ]
    for way in ways:
        found = [way(x) for x in (0.0, 0.1, 0.25, 0.5, 1.0)]
        assert found == sorted(found, reverse=True)
    assert epoch(system, faster(BOX, 4.0)) < epoch(system) < epoch(system, faster(BOX, 0.25))


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.name)
def test_every_part_of_an_overhead_is_an_argument_and_costs(system: System) -> None:
    rates = system_rates(BOX, 4, WORK.row_bytes)

    def seconds(overhead: SystemOverhead) -> SystemTimes:
        return epoch_times(system, WORK, rates, overhead=overhead)

    none = seconds(SystemOverhead())
    more = seconds(SystemOverhead(batch_seconds=1e-2, compute_factor=2.0, epoch_seconds=3.0))
    assert more.epoch_seconds > none.epoch_seconds + 3 + 100 * 1e-2 - 1e-9
    assert more.compute == 2 * none.compute
    assert seconds(SystemOverhead(edge_seconds=1e-6)).sample > none.sample
    if system.kind != "full_graph":
        assert seconds(SystemOverhead(row_share=0.5)).features == pytest.approx(2 * none.features)
    assert epoch_times(system, WORK, rates) == seconds(system.overhead)


def test_stages_of_a_loader_without_workers_come_one_after_another() -> None:
    loader, rates = find_system("pyg-loader"), system_rates(BOX, 1, WORK.row_bytes)
    one = epoch_times(loader, WORK, rates)
    parts = one.sample + one.features + one.compute + one.exchange + one.other
    assert one.epoch_seconds == pytest.approx(100 * parts)
    # 1e6 edges at .2 us on one core; many workers hide it all but for the training process.
    assert one.sample == pytest.approx(0.2)
    assert epoch_times(loader, WORK, rates, workers=4).epoch_seconds == pytest.approx(
        100 * max(0.05, one.training)
    )
    assert epoch_times(loader, WORK, rates, workers=40).epoch_seconds == pytest.approx(
        100 * one.training
    )


def test_workers_beyond_the_cores_change_nothing() -> None:
    loader = find_system("pyg-loader")
    few = load_preset("g5.xlarge")  # two cores
    assert epoch(loader, few, 1, workers=2) == epoch(loader, few, 1, workers=64)


def test_gpus_that_sample_alone_are_as_many_as_pay() -> None:
    gnnlab, rates = find_system("gnnlab"), system_rates(BOX, 8, WORK.row_bytes)

    def seconds(samplers: int) -> float:
        return epoch_times(gnnlab, WORK, rates, samplers=samplers, hit_rate=0.9).epoch_seconds

    assert seconds(0) == min(seconds(s) for s in range(1, 8))
    assert seconds(7) > seconds(0)


def test_a_cache_of_a_clique_reads_peers_and_one_of_a_gpu_does_not() -> None:
    rates = system_rates(BOX, 4, WORK.row_bytes)
    quiver = find_system("quiver")
    alone = replace(quiver, cache="own")
    one, dealt = (epoch_times(s, WORK, rates, hit_rate=1.0).features for s in (alone, quiver))
    assert one == pytest.approx(WORK.input_rows * rates.own_row)
    assert dealt > one


def test_boundary_rows_go_at_the_rate_of_the_backend() -> None:
    # BNS-GCN on two parts of Reddit: 208 MB of BES over .5 GB/s a part are .21 s of its .48.
    machine, own = load_preset("rtx-2080ti-x10"), find_system("bns-gcn")
    bns = replace(own, backend=None)
    work = replace(WORK, batches=1, edges=0.0, exchange_bytes=208e6 / 2, exchanges=6)
    assert machine.backend is not None
    gloo = epoch_times(bns, work, system_rates(machine, 2, 400)).exchange
    assert gloo == pytest.approx(104e6 / 5e8 + 6e-4 + 1e6 / 5e8 + 1e-4, rel=1e-6)
    for name in ("rtx-2080ti-x10", "dgx-v100"):  # it brings gloo along, whatever the machine
        rates = system_rates(load_preset(name), 2, 400)
        assert epoch_times(own, work, rates).exchange == pytest.approx(gloo)
    links = epoch_times(bns, work, system_rates(replace(machine, backend=None), 2, 400)).exchange
    assert links < gloo / 5


def test_one_process_on_cores_neither_copies_nor_sums() -> None:
    rates = system_rates(load_preset("cpu-2core"), 0, 400)
    found = epoch_times(find_system("pyg-loader"), WORK, rates, workers=1)
    assert found.exchange == 0
    each = max(rates.core_row / 2, rates.all_core_row)  # two cores
    assert found.features == pytest.approx(WORK.input_rows * each / 0.7)


def test_a_class_without_some_of_its_systems_has_the_median_of_the_others() -> None:
    every = sorted(s.overhead.edge_seconds for s in SYSTEMS if s.kind == "cpu_loader")
    assert class_overhead("cpu_loader").edge_seconds == pytest.approx((every[1] + every[2]) / 2)
    left = class_overhead("cpu_loader", without=["salient"])
    assert left.edge_seconds == every[2]
    assert class_overhead("full_graph", ["bns-gcn", "dgl-full-graph"]) == SystemOverhead()


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: s.name)
def test_each_overhead_says_where_it_is_from(system: System) -> None:
    assert len(system.source) > 20
    assert system.provenance == "derived"
    assert system.rows_used or "assumed" in system.source or "README" in system.source
    assert class_overhead(system.kind) != SystemOverhead()


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(SettingsError, match=r"--today: expected a system .*did you mean quiver"):
        find_system("quivr")
    with pytest.raises(SettingsError, match="expected 9 GPUs, found 8"):
        system_rates(BOX, 9, 400)
    with pytest.raises(ValueError, match="share of rows"):
        SystemOverhead(row_share=0.0)
