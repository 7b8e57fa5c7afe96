"""The price of a candidate, added up by hand from round rates (tests/support/machines.py)."""

import subprocess
import sys
from dataclasses import replace

import pytest

from planner.candidate import Candidate, PlacedRows, RankRows
from planner.cost.budget import Budgets
from planner.cost.memory import (
    activation_bytes,
    batch_bytes,
    location_bytes,
    model_bytes,
    require_fit,
    sampling_bytes,
    tail,
    use,
)
from planner.cost.model import Request, predict
from planner.errors import MachineError, PlanDoesNotFit, SettingsError
from planner.machine import MachineModel, Table
from planner.workload import Spread
from runtime.plan import GraphRef, Prediction, Threads, Workload
from tests.planner.cost.terms import timed
from tests.support.machines import constant, machine
from tests.support.profiles import profile

NODES = 100_000
BATCH = 1000
GRAPH = GraphRef(
    name="by-hand",
    path="/nowhere",
    fingerprint="0",
    num_nodes=NODES,
    num_edges=1_000_000,
    feature_dim=100,
    feature_dtype="float32",
    num_classes=5,
    task="multiclass",
    num_train=10_000,
)


def request(model: MachineModel | None = None, budgets: Budgets | None = None) -> Request:
    return Request(
        graph=GRAPH,
        workload=Workload(batch_size=BATCH),
        profile=profile(NODES, BATCH).numbers,
        machine=machine() if model is None else model,
        budgets=Budgets() if budgets is None else budgets,
    )


def candidate(ranks: int = 1, compute: int = 1, loaders: int = 0) -> Candidate:
    threads = Threads(compute=compute, sample=loaders, gather=1)
    return Candidate(num_ranks=ranks, threads=threads, prefetch_depth=2, policy="none")


def rows(ranks: int = 1, **by_source: float) -> PlacedRows:
    total = sum(by_source.values())
    each = RankRows(
        rows=by_source,
        working_rows=dict.fromkeys(by_source, 1e5),
        shares={k: v / total for k, v in by_source.items()},
    )
    return PlacedRows(policy="none", ranks=[each] * ranks, host_rows=NODES)


def price(found: Candidate, placed: PlacedRows, **options: object) -> Prediction:
    return predict(request(**options), found, placed)  # pyright: ignore[reportArgumentType]


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


def test_waits_for_larger_batches_are_expected_only_where_they_were_not_measured() -> None:
    own = Table(unit="seconds", axes=["ranks", "threads"], points=[[2.0], [1.0]], values=[5e-3],
                spread=0.01)  # fmt: skip
    known = timed(request(), all_reduce=own)
    batches = [
        replace(
            b, vertices=[*b.vertices[:-1], replace(b.vertices[-1], std=b.vertices[-1].mean / 10)]
        )
        for b in known.profile.batches
    ]
    known = replace(known, profile=replace(known.profile, batches=batches))

    def waited(*, own_batches: bool, host: float) -> float:
        asked = timed(known, own_batches=own_batches)
        return predict(asked, candidate(ranks=2), rows(2, host=host)).stages["all_reduce"] - 5e-3

    # Of seconds of the model, which grow with the batch, and of the loader's .9 ms.
    assert waited(own_batches=False, host=5_000.0) > 0.5e-3
    loader = 0.5642 * 0.9e-3 * (0.1**2 + 0.03**2) ** 0.5
    assert waited(own_batches=True, host=5_000.0) == pytest.approx(loader, rel=1e-3)


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


def test_memory_parts_add_up_by_hand() -> None:
    found = price(candidate(), rows(host=1e4)).memory_bytes
    parts = found["rank0"].parts
    assert parts == {
        "context": 200_000_000,
        "model and optimizer": 160_000,  # 10000 x 4 B x 4
        "activations": 1_000_000,
        "sampling": 8 * NODES + 16 * 10_000 + 8 * 20_000,
        "batches": 10_000 * 408 + 4 * 20_000,
        "location table": 4 * NODES,
        "own rows": 0,
    }
    host = found["host0"]
    assert host.parts["features"] == NODES * 400
    assert host.parts["topology"] == 8 * (NODES + 1) + 4 * 1_000_000
    assert host.parts["ranks"] == found["rank0"].total
    assert host.headroom == host.capacity - host.total


def test_what_starts_the_ranks_is_in_the_sum_of_the_host() -> None:
    without = price(candidate(), rows(host=1e4)).memory_bytes["host0"]
    asked = request()
    assert asked.profile.process is not None
    process = replace(asked.profile.process, launcher_bytes=70_000_000)
    asked = replace(asked, profile=replace(asked.profile, process=process))
    found = predict(asked, candidate(), rows(host=1e4)).memory_bytes["host0"]
    assert found.parts["launcher"] == 70_000_000
    assert found.total == without.total + 70_000_000


def test_rows_of_peers_pass_through_buffers_of_both_sides() -> None:
    without = price(candidate(ranks=2), rows(2, host=1e4)).memory_bytes["rank0"].parts
    assert "rows of peers" not in without
    asked = price(candidate(ranks=2), rows(2, own=5e3, peer=5e3)).memory_bytes["rank0"].parts
    # Of each batch's 5000 vertices half are read of the other rank, which reads as many of this.
    assert asked["rows of peers"] == 2 * 5_000 // 2 * 400
    assert {k: v for k, v in asked.items() if k != "rows of peers"} == without


def test_prefetched_batches_need_their_buffers() -> None:
    inline, ahead = (
        price(candidate(loaders=n), rows(host=1e4)).memory_bytes["rank0"].parts["batches"]
        for n in (0, 1)
    )
    assert ahead == 3 * inline  # the one in use, and two ahead of it


def test_no_more_batches_are_alive_than_an_epoch_has() -> None:
    def batches(num_train: int, loaders: int) -> int:
        short = replace(request(), graph=replace(GRAPH, num_train=num_train))
        found = predict(short, candidate(loaders=loaders), rows(host=1e4))
        return found.memory_bytes["rank0"].parts["batches"]

    alone = batches(10_000, 0)
    # Two ahead and the one in use; an epoch of two steps never has three, and one of one only one.
    alive = [batches(num_train, 1) for num_train in (10_000, 3 * BATCH, 2 * BATCH, BATCH)]
    assert alive == pytest.approx([3 * alone, 3 * alone, 2 * alone, alone], abs=2)


class TestMemory:
    """[A10] of formulas.md 8.10 and the sum that is shown."""

    def test_the_tail_of_a_thousand_batches(self) -> None:
        s = Spread(mean=100.0, std=10.0, p99=120.0, largest=121.0)
        assert tail(s, profiled=50, draws=1000) == pytest.approx(100 + 10 * 3.241, abs=0.05)
        assert tail(s, profiled=50, draws=8000) == pytest.approx(100 + 10 * 3.80, abs=0.2)

    def test_a_seen_batch_always_fits(self) -> None:
        s = Spread(mean=100.0, std=1.0, p99=150.0, largest=190.0)
        assert tail(s, profiled=50, draws=10) == 190.0

    def test_a_skewed_tail_reaches_farther_when_much_was_seen(self) -> None:
        s = Spread(mean=100.0, std=5.0, p99=150.0, largest=151.0)
        assert tail(s, profiled=500, draws=1000) > tail(s, profiled=50, draws=1000)

    def test_parts(self) -> None:
        assert model_bytes(1000) == 16_000
        assert activation_bytes(1000, 1.5) == 1500
        assert location_bytes(1000, 4) == 4000
        assert batch_bytes(100.0, 1000.0, 400, 3) == 3 * (100 * 408 + 4000)
        assert sampling_bytes(100.0, 1000.0, 10_000, 2) == 2 * 89_600

    def test_the_refusal_is_the_sum(self) -> None:
        over = use({"model": 3_000_000, "cache": 4_000_000}, 5_000_000)
        with pytest.raises(PlanDoesNotFit) as caught:
            require_fit("rank 0", over)
        assert str(caught.value) == ("rank 0: cache 4.0 MB + model 3.0 MB = 7.0 MB > 5.0 MB usable")

    def test_what_fits_is_not_refused(self) -> None:
        require_fit("rank 0", use({"model": 3}, 3))


def test_slowdowns_are_read_where_they_were_measured() -> None:
    calm = machine().with_tables({"beside": constant("ratio", ["ranks"], 1.0)})
    slow = machine().with_tables({"beside": constant("ratio", ["ranks"], 2.0)})
    steps = [
        price(candidate(loaders=1), rows(host=1e4), model=m).step_seconds.value
        for m in (calm, slow)
    ]
    assert steps[0] < steps[1]


@pytest.mark.parametrize("name", ["planner.cost.model", "planner.solver.search", "planner.explain"])
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


def test_the_last_smaller_step_counts_for_its_share() -> None:
    # 10000 training vertices in steps of 1000 are ten; 9500 are nine and a half.
    whole = price(candidate(), rows(host=1e4))
    fewer = replace(request(), graph=replace(GRAPH, num_train=9_500))
    found = predict(fewer, candidate(), rows(host=1e4))
    assert found.steps_per_epoch == whole.steps_per_epoch == 10
    assert found.epoch_seconds.value == pytest.approx(0.95 * whole.epoch_seconds.value)


def test_start_up_is_measured_where_the_probe_measured_it() -> None:
    assert price(candidate(), rows(host=1e4)).startup_seconds == pytest.approx(2.0, abs=0.01)
    probed = machine().with_tables({"process_start": constant("seconds", ["ranks"], 7.0)})
    found = price(candidate(), rows(host=1e4), model=probed)
    assert found.startup_seconds == pytest.approx(7.0, abs=0.01)
