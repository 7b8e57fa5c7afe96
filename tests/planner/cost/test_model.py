"""The price of a candidate, added up by hand from round rates (tests/support/machines.py)."""

import subprocess
import sys
from dataclasses import replace

import pytest

from gnnplan.planner.cost.model import predict
from gnnplan.planner.cost.rank_times import DeviceTimes
from gnnplan.planner.cost.request import Request
from gnnplan.planner.cost.step import unsized_seconds
from gnnplan.planner.errors import MachineError, SettingsError
from gnnplan.planner.machine.model import Table
from tests.planner.cost.by_hand import GRAPH, candidate, price, request, rows, times
from tests.support.machines import constant, machine


def test_in_line_stages_add_up_to_the_step() -> None:
    # 1000 seeds: sample 20000 x 10 ns + 10000 x 50 ns = .7 ms, gather 10000 x 110 ns = 1.1 ms,
    # compute 20 ms, optimizer 1 ms: 22.8 ms, by hand.
    found = price(candidate(), rows(host=10_000.0))
    assert found.stages["sample"] == pytest.approx(0.7e-3)
    assert found.stages["gather"] == pytest.approx(1.1e-3)
    assert found.stages["wait"] == pytest.approx(1.8e-3)
    assert found.stages["forward_backward"] == pytest.approx(20e-3)
    assert found.stages["optimizer"] == pytest.approx(1e-3)
    assert found.stages["all_reduce"] == 0.0
    assert found.step_seconds.value == pytest.approx(22.8e-3)
    assert found.epoch_seconds.value == pytest.approx(0.228)
    assert found.steps_per_epoch == 10


def test_a_sampler_timed_on_the_graph_is_priced_by_that_and_slowed_by_its_ranks_others() -> None:
    # The table's sampling of two at once takes 1.5 times that of one; .7 ms would be its price.
    # Ranks were timed all at once, with one sampler each.
    plain = request()
    timed = {key: replace(each, sample_seconds=4e-3) for key, each in plain.profile.timing.items()}
    known = replace(plain, profile=replace(plain.profile, timing=timed), sampler="ladies")
    for slower in (1.0, 1.5):
        two = Table(
            unit="seconds",
            axes=["topology_bytes", "readers"],
            spread=0.0,
            points=[[1.0], [1.0, 2.0]],
            values=[10e-9, 10e-9 * slower],
        )
        vertex = replace(two, axes=["table_bytes", "readers"], values=[50e-9, 50e-9 * slower])
        tables = {"sample_edge": two, "sample_vertex": vertex}
        again = replace(known, machine=known.machine.with_tables(tables))
        found = predict(again, candidate(), rows(host=10_000.0))
        assert found.stages["sample"] == pytest.approx(4e-3)
        found = predict(again, candidate(ranks=2), rows(2, host=5_000.0))
        assert found.stages["sample"] == pytest.approx(4e-3)
        alone = {"beside_loader": constant("ratio", ["ranks"], 1.0)}
        wide = replace(again, machine=machine(cores=8).with_tables(tables | alone))
        found = predict(wide, candidate(loaders=2), rows(host=10_000.0))
        assert found.stages["sample"] == pytest.approx(4e-3 * slower, rel=0.01)
    assert found.provenance["sample"].startswith("measured: ladies sampling of this graph")


def test_sampling_is_as_sure_as_its_own_timing_and_as_the_rates_where_they_are_used() -> None:
    def asked(rates: float, timed: float | None) -> Request:
        """Rates and a timing of those spreads; two samplers at once take twice as long each."""
        edge = Table(
            unit="seconds",
            axes=["topology_bytes", "readers"],
            spread=rates,
            points=[[1.0], [1.0, 2.0]],
            values=[10e-9, 20e-9],
        )
        vertex = replace(edge, axes=["table_bytes", "readers"])
        tables = {"sample_edge": edge, "sample_vertex": vertex}
        plain = request()
        timing = {
            key: replace(each, sample_seconds=4e-3, sample_spread=timed)
            if timed is not None
            else each
            for key, each in plain.profile.timing.items()
        }
        return replace(
            plain,
            machine=plain.machine.with_tables(tables),
            profile=replace(plain.profile, timing=timing),
        )

    def of_sampling(rates: float, timed: float | None, loaders: int = 0) -> float:
        """Half-width of sampling alone: what the interval has more than with exact numbers."""
        shape, placed = candidate(loaders=loaders), rows(host=1_000.0)
        unsure = predict(asked(rates, timed), shape, placed)
        exact = predict(asked(0.0, None if timed is None else 0.0), shape, placed)
        step = unsure.step_seconds
        halves = [(p.step_seconds.high - p.step_seconds.value) for p in (unsure, exact)]
        return (
            (halves[0] ** 2 - halves[1] ** 2) ** 0.5
            / step.value
            / (unsure.stages["sample"] / step.value)
        )

    assert of_sampling(7.5, 0.05) == pytest.approx(0.05)
    assert of_sampling(7.5, 0.05, loaders=1) == pytest.approx(0.05)
    # By the rates alone.
    assert of_sampling(7.5, None) == pytest.approx(7.5)
    # Several samplers slow each other down by the rates: (.4^2 + .3^2)^.5; and three threads on two
    # cores are three times as unsure.
    assert of_sampling(0.4, 0.3, loaders=2) == pytest.approx(3.0 * 0.5)


def test_training_stages_are_the_step() -> None:
    for found in (candidate(), candidate(loaders=1), candidate(ranks=2)):
        stages = price(found, rows(found.num_ranks, host=10_000.0)).stages
        step = price(found, rows(found.num_ranks, host=10_000.0)).step_seconds.value
        training = ("wait", "forward_backward", "all_reduce", "optimizer")
        assert sum(stages[name] for name in training) == pytest.approx(step)


def test_two_ranks_halve_the_work_and_pay_the_all_reduce() -> None:
    # 500 seeds each: .35 + .55 + 10 ms, plus 2 ms all-reduce and 1 ms optimizer = 13.9 ms, and
    # the straggler: sigma = 3% of (10, .9) ms, kappa_2 = .564.
    found = price(candidate(ranks=2), rows(2, host=5_000.0))
    sigma = 0.03 * (10e-3**2 + 0.9e-3**2) ** 0.5
    assert found.step_seconds.value == pytest.approx(13.9e-3 + 0.5642 * sigma, rel=1e-3)
    assert found.stages["all_reduce"] == pytest.approx(2e-3 + 0.5642 * sigma, rel=1e-3)


def test_gradients_take_what_they_took_in_the_models_own_steps() -> None:
    # 5 ms in the profile's steps, the wait of equal batches included: of the 3% noise only the
    # loader's (.9 ms) is expected besides.
    known = request()
    timing = known.profile.timing["500"]
    own = Table(unit="seconds", axes=["ranks", "threads"], points=[[2.0], [1.0]], values=[5e-3],
                spread=0.01)  # fmt: skip
    timings = known.profile.timing | {"500": replace(timing, all_reduce=own)}
    known = replace(known, profile=replace(known.profile, timing=timings))
    found = predict(known, candidate(ranks=2), rows(2, host=5_000.0))
    assert found.stages["all_reduce"] == pytest.approx(5e-3 + 0.5642 * 0.03 * 0.9e-3, rel=1e-3)
    assert found.provenance["all_reduce"].startswith("measured: this model's gradients")


def test_a_loader_thread_hides_its_stages_but_slows_the_model() -> None:
    # Loader 1.8 ms against 21 ms: busy for under a tenth, slowdown of the model 1.25.
    found = price(candidate(loaders=1), rows(host=10_000.0))
    assert found.stages["forward_backward"] > 20e-3
    assert found.stages["sample"] == pytest.approx(0.7e-3 * 1.5, rel=1e-2)
    assert found.step_seconds.value < 22.8e-3
    assert found.stages["wait"] < 0.7e-3


def test_prefetch_on_a_full_machine_is_not_free() -> None:
    one_core = machine(cores=1)
    inline = price(candidate(), rows(host=10_000.0), model=one_core)
    ahead = price(candidate(loaders=1), rows(host=10_000.0), model=one_core)
    assert ahead.step_seconds.value >= inline.step_seconds.value
    width = ahead.step_seconds.high / ahead.step_seconds.value - 1
    assert width >= 3 * (inline.step_seconds.high / inline.step_seconds.value - 1) * 0.9


def test_a_slow_loader_is_the_bottleneck() -> None:
    slow = machine(mapped_row=10e-6)
    found = price(candidate(loaders=1), rows(host=10_000.0), model=slow)
    assert found.bottleneck == "gather"
    assert found.step_seconds.value >= 0.1
    assert found.stages["wait"] > 0.07


def test_peers_cost_three_messages_and_are_metered_apart() -> None:
    found = price(candidate(ranks=2), rows(2, own=4_000.0, peer=1_000.0))
    assert found.stages["exchange_ids"] == pytest.approx(2e-3)
    assert found.stages["exchange_rows"] == pytest.approx(1e-3)
    assert found.traffic_bytes["gloo0"] == pytest.approx(2 * 1000 * 400 + 2 * 40_000)


def test_disk_rows_cost_reads_shared_by_all_ranks() -> None:
    # 100 rows of 400 B: (400 - 16) / 4096 + 1 pages each, 10 us a read, two ranks on one disk.
    found = price(candidate(ranks=2), rows(2, host=4_900.0, disk=100.0))
    pages = (400 - 16) / 4096 + 1
    # 10 us: the last read, which nothing hides.
    expected = 4_900 * 110e-9 + 100 * pages * 20e-6 + 10e-6
    assert found.stages["gather"] == pytest.approx(expected)


def test_more_rows_are_never_faster_and_more_bandwidth_never_slower() -> None:
    steps = [price(candidate(), rows(host=n)).step_seconds.value for n in (1e3, 1e4, 1e5)]
    assert steps == sorted(steps)
    rates = (200e-9, 110e-9, 50e-9)
    steps = [
        price(candidate(), rows(host=1e4), model=machine(mapped_row=r)).step_seconds.value
        for r in rates
    ]
    assert steps == sorted(steps, reverse=True)


def test_the_interval_holds_the_value_and_at_least_the_noise() -> None:
    step = price(candidate(), rows(host=1e4)).step_seconds
    assert step.low < step.value < step.high
    assert step.high / step.value - 1 >= 0.03


def test_a_missing_measurement_is_an_error_not_a_guess() -> None:
    bare = replace(machine(), tables={})
    with pytest.raises(MachineError, match="sample_edge"):
        price(candidate(), rows(host=1e4), model=bare)


def test_an_unprofiled_batch_is_an_error() -> None:
    with pytest.raises(SettingsError, match="334 seeds"):
        price(candidate(ranks=3), rows(3, host=1e4))


def test_slowdowns_are_read_where_they_were_measured() -> None:
    calm = machine().with_tables({"beside": constant("ratio", ["ranks"], 1.0)})
    slow = machine().with_tables({"beside": constant("ratio", ["ranks"], 2.0)})
    steps = [
        price(candidate(loaders=1), rows(host=1e4), model=m).step_seconds.value
        for m in (calm, slow)
    ]
    assert steps[0] < steps[1]


@pytest.mark.parametrize(
    "name",
    [
        "gnnplan.planner.cost.model",
        "gnnplan.planner.search.search",
        "gnnplan.planner.queries.explain",
    ],
)
def test_pure_parts_do_not_import_torch(name: str) -> None:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_in_line_ranks_use_the_collective_measured_in_step() -> None:
    stepped = machine().with_tables(
        {"all_reduce_stepped": constant("seconds", ["bytes", "ranks"], 5e-3)}
    )
    inline = price(candidate(ranks=2), rows(2, host=1.0), model=stepped)
    ahead = price(candidate(ranks=2, loaders=1), rows(2, host=1.0), model=stepped)
    assert inline.stages["all_reduce"] > 5e-3
    assert ahead.stages["all_reduce"] < 3e-3


def test_the_last_smaller_step_costs_its_share_and_what_it_cannot_save() -> None:
    # 10000 training vertices in steps of 1000 are ten of 22.8 ms; of 9500 the tenth has half the
    # seeds. Its update is as long as any: 1 ms + 21.8 ms / 2, by hand.
    whole = price(candidate(), rows(host=1e4))
    fewer = replace(request(), graph=replace(GRAPH, num_train=9_500))
    found = predict(fewer, candidate(), rows(host=1e4))
    assert found.steps_per_epoch == whole.steps_per_epoch == 10
    assert found.epoch_seconds.value == pytest.approx(9 * 22.8e-3 + 11.9e-3)
    # Passes of which 8 of 20 ms are the same at any size: 9 ms + 13.8 ms / 2.
    values = [8e-3 + 12e-3 * scale for scale in (0.8, 1.0, 1.25)]
    points = [[0.8, 1.0, 1.25], [1.0], [1.0]]
    fixed = Table(
        unit="seconds", axes=["scale", "ranks", "threads"], points=points, values=values, spread=0.0
    )
    timing = replace(fewer.profile.timing["1000"], forward_backward=fixed)
    slower = replace(fewer, profile=replace(fewer.profile, timing={"1000": timing}))
    found = predict(slower, candidate(), rows(host=1e4))
    assert found.epoch_seconds.value == pytest.approx(9 * 22.8e-3 + 15.9e-3)


def test_the_last_step_is_as_large_as_what_was_drawn_of_it() -> None:
    # Half the seeds, but 9000 of 10000 vertices and 15000 of 20000 edges.
    plain = replace(request(), graph=replace(GRAPH, num_train=9_500))
    drawn = [
        replace(each, last_vertices=[500, 3_000, 9_000], last_edges=[5_000, 10_000])
        for each in plain.profile.batches
    ]
    known = replace(plain, profile=replace(plain.profile, batches=drawn))
    found = predict(known, candidate(), rows(host=1e4))
    assert found.epoch_seconds.value == pytest.approx(9 * 22.8e-3 + 1e-3 + 0.8 * 21.8e-3)


def test_what_a_step_cannot_save_is_its_training_thread_or_what_a_gpu_is_told() -> None:
    taken = {"seeds": 2.0, "sample": 9.0, "forward_backward": 5.0, "all_reduce": 1.0}
    rank = times({**taken, "optimizer": 1.0}, compute_slope=4.0, loop_overhead=0.5)
    assert unsized_seconds(candidate(), rank) == 1.0 + 1.0 + 1.0 + 0.5 + 2.0
    assert unsized_seconds(candidate(loaders=1), rank) == 3.5
    told = replace(rank, device=DeviceTimes(host=8.0))
    assert unsized_seconds(candidate(), told) == 8.0
    # A timed loop's host waited for the GPU in a part of its time.
    waited = replace(rank, device=DeviceTimes(host=8.0, host_shrinking=2.0))
    assert unsized_seconds(candidate(), waited) == 6.0


def test_start_up_is_measured_where_the_probe_measured_it() -> None:
    assert price(candidate(), rows(host=1e4)).startup_seconds == pytest.approx(2.0, abs=0.01)
    probed = machine().with_tables({"process_start": constant("seconds", ["ranks"], 7.0)})
    found = price(candidate(), rows(host=1e4), model=probed)
    assert found.startup_seconds == pytest.approx(7.0, abs=0.01)
