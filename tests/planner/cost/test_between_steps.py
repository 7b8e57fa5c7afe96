"""Rates as a step finds them: small batches, loaders beside training, memories between steps."""

from dataclasses import replace

import pytest

from gnnplan.planner.cost.model import predict
from gnnplan.planner.cost.request import Request
from gnnplan.planner.cost.stages.gather import exceed_swing
from gnnplan.planner.machine.model import Table
from gnnplan.planner.workload import Interference
from tests.planner.cost.by_hand import candidate, price, request, rows
from tests.planner.cost.terms import timed, with_tables
from tests.support.machines import GATHER_AXES, constant, machine


def test_ranks_side_by_side_scatter_as_they_were_measured_to() -> None:
    # kappa_2 = .564 of 10% of 10 ms compute and 3% of .9 ms loading, above 2 ms all-reduce [A1].
    model = with_tables(step_jitter=constant("ratio", ["ranks"], 0.1))
    found = price(candidate(ranks=2), rows(2, host=5_000.0), model=model)
    sigma = ((0.1 * 10e-3) ** 2 + (0.03 * 0.9e-3) ** 2) ** 0.5
    assert found.stages["all_reduce"] == pytest.approx(2e-3 + 0.5642 * sigma, rel=1e-3)
    alone = [
        price(candidate(), rows(host=5_000.0), model=each).step_seconds for each in (model, None)
    ]
    assert alone[0] == alone[1]


def test_rows_of_a_small_batch_cost_more_each() -> None:
    gather = Table(
        unit="seconds_per_row",
        axes=["rows", *GATHER_AXES],
        points=[[1_000.0, 100_000.0], [1.0], [1.0], [1.0]],
        values=[400e-9, 100e-9],
        spread=0.0,
    )
    model = with_tables(mapped_gather=gather)
    # Log-log between: a hundred times as many rows cost a quarter each, ten times as many a half.
    for number, each in ((1_000, 400e-9), (10_000, 200e-9), (100_000, 100e-9)):
        stages = price(candidate(), rows(host=float(number)), model=model).stages
        assert stages["gather"] == pytest.approx(number * each)


def beside_each_other(asked: Request, **kinds: tuple[float, float]) -> Request:
    """The request, its profile with (work, step) slowdowns by kind of a loader's work."""
    beside = {kind: Interference(work=work, step=step) for kind, (work, step) in kinds.items()}
    timing = {k: replace(t, beside=beside) for k, t in asked.profile.timing.items()}
    return replace(asked, profile=replace(asked.profile, timing=timing))


@pytest.mark.parametrize("timed", [0.0, 4e-3])
def test_a_loader_thread_samples_as_slowly_as_it_was_measured_beside_the_model(
    timed: float,
) -> None:
    # .7 ms by the rates, or 4 ms as timed on the graph; a quarter more beside the model's steps.
    asked = request(with_tables(beside_loader=constant("ratio", ["ranks"], 1.0)))
    timing = {k: replace(t, sample_seconds=timed) for k, t in asked.profile.timing.items()}
    asked = replace(asked, profile=replace(asked.profile, timing=timing), sampler="ladies")
    asked = beside_each_other(asked, sample=(1.25, 1.0))
    alone = timed or 0.7e-3
    placed = rows(host=1_000.0)
    inline = predict(asked, candidate(), placed).stages["sample"]
    assert inline == pytest.approx(alone)
    # Training hides loading and goes on all the while: nearly all of a batch is drawn beside it.
    ahead = predict(asked, candidate(loaders=1), placed).stages["sample"]
    assert ahead == pytest.approx(1.25 * alone, rel=0.02)


def test_the_model_is_slower_beside_each_kind_of_work_as_it_was_measured_to_be() -> None:
    tables = {
        name: constant("ratio", ["ranks"], value)
        for name, value in (("beside", 1.1), ("beside_loader", 1.0))
    }
    bare = request(with_tables(**tables))
    asked = beside_each_other(bare, gather=(1.0, 1.2), disk=(1.8, 1.5), sample=(1.0, 3.0))

    def stages(asked: Request, loaders: int, **by_source: float) -> dict[str, float]:
        return predict(asked, candidate(loaders=loaders), rows(1, **by_source)).stages

    model = "forward_backward"
    alone = stages(asked, 0, disk=500_000.0)
    # All the loader does is to read, for longer than a step lasts: sampling is .7 ms of seconds.
    reading = stages(asked, 1, disk=500_000.0)
    assert reading[model] == pytest.approx(1.5 * alone[model], rel=0.02)
    assert stages(asked, 1, host=5_000_000.0)[model] == pytest.approx(1.2 * alone[model], rel=0.02)
    assert stages(bare, 1, disk=500_000.0)[model] == pytest.approx(1.1 * alone[model], rel=0.02)
    # The loader has compute beside it for a small part of its time only, and is slower in that.
    assert alone["gather"] < reading["gather"] < 1.05 * alone["gather"]
    # Half of a short loader's time is sampling: the model is slower by the mean of the two.
    half = stages(asked, 1, host=0.7e-3 / 110e-9)
    inline = stages(asked, 0, host=0.7e-3 / 110e-9)
    assert inline["gather"] == pytest.approx(inline["sample"])
    share = (half["gather"] + half["sample"]) / sum(
        seconds for stage, seconds in half.items() if stage not in ("gather", "sample")
    )
    expected = 1 / (1 - share * (1 - 1 / 2.1))
    assert half[model] == pytest.approx(expected * inline[model], rel=0.01)


def test_reads_that_are_faster_by_a_loader_thread_are_so_whatever_training_does() -> None:
    tables = {name: constant("ratio", ["ranks"], 1.0) for name in ("beside", "beside_loader")}

    def by_a_thread(work: float) -> float:
        asked = beside_each_other(request(with_tables(**tables)), disk=(work, 1.0))
        alone, thread = (
            predict(asked, candidate(loaders=loaders), rows(1, disk=500_000.0)).stages["gather"]
            for loaders in (0, 1)
        )
        return thread / alone

    assert by_a_thread(0.5) == pytest.approx(exceed_swing(0.5), rel=1e-3)
    # So much a disk's speed may differ between two readings.
    assert by_a_thread(0.8) == pytest.approx(1.0, rel=1e-3)


def test_work_in_memory_is_not_faster_by_a_loader_thread() -> None:
    # Seen alone it was timed between steps, with cold caches; a thread of its own has as many.
    tables = {name: constant("ratio", ["ranks"], 1.0) for name in ("beside", "beside_loader")}
    asked = beside_each_other(
        request(with_tables(**tables)), gather=(0.75, 1.0), sample=(0.75, 1.0), disk=(0.75, 1.0)
    )
    for stage in ("sample", "gather"):
        inline, ahead = (
            predict(asked, candidate(loaders=loaders), rows(1, host=5_000.0)).stages[stage]
            for loaders in (0, 1)
        )
        assert ahead == pytest.approx(inline)


def test_what_all_ranks_were_measured_to_lose_at_once_is_not_lost_twice() -> None:
    tables = {
        "beside": Table(
            unit="ratio", axes=["ranks"], points=[[1.0, 2.0]], values=[1.1, 1.32], spread=0.0
        ),
        "beside_loader": constant("ratio", ["ranks"], 1.0),
    }
    crowded = machine(cores=8).with_tables(tables)
    bare = request(crowded)
    asked = beside_each_other(bare, gather=(1.0, 1.5), sample=(1.0, 1.5))
    for ranks, by_machine in ((1, 1.1), (2, 1.32)):
        for each, slower in ((asked, 1.5), (bare, by_machine)):
            inline, ahead = (
                predict(
                    each, candidate(ranks=ranks, loaders=loaders), rows(ranks, host=5_000_000.0)
                ).stages["forward_backward"]
                for loaders in (0, 1)
            )
            assert ahead == pytest.approx(slower * inline, rel=0.02)


def test_rows_are_gathered_from_memory_as_the_graphs_own_were() -> None:
    asked = request(with_tables())
    slow = timed(asked, gather_factors={"gather": 1.5, "mapped_gather": 2.0})
    for placed, factor in (
        (rows(1, host=5_000.0), 2.0),
        (rows(1, own=5_000.0), 1.5),
        (rows(2, own=4_000.0, peer=1_000.0), 1.5),
    ):
        ranks = len(placed.ranks)
        usual = predict(asked, candidate(ranks=ranks), placed)
        found = predict(slow, candidate(ranks=ranks), placed)
        assert found.stages["gather"] == pytest.approx(factor * usual.stages["gather"])
        assert f"x {factor:.2f}, measured with this graph's batches" in found.provenance["gather"]
    # A disk has a factor of its own.
    disk = rows(1, disk=5_000.0)
    usual = predict(asked, candidate(), disk)
    assert predict(slow, candidate(), disk).stages == usual.stages
    dense = timed(asked, gather_factors={"disk_read": 0.7})
    found = predict(dense, candidate(), disk)
    start = predict(asked, candidate(), rows(1, disk=1e-9)).stages["gather"]
    beyond = usual.stages["gather"] - start
    assert found.stages["gather"] - start == pytest.approx(0.7 * beyond)
    assert "x 0.70, measured with this graph's batches" in found.provenance["gather"]


def test_a_batch_from_disk_takes_what_one_row_took_besides() -> None:
    asked = request(with_tables())
    slow = timed(asked, disk_start_seconds=2e-3)

    def seconds(found: Request, **by_source: float) -> float:
        return predict(found, candidate(), rows(1, **by_source)).stages["gather"]

    one, many = seconds(asked, disk=1e-9), seconds(asked, disk=5_000.0)
    assert one > 0.0  # not measured: one read alone stands for it
    assert seconds(slow, disk=1e-9) == pytest.approx(2e-3)
    assert seconds(slow, disk=5_000.0) == pytest.approx(many - one + 2e-3)
    assert seconds(slow, host=5_000.0) == seconds(asked, host=5_000.0)


def test_who_has_its_rows_from_a_disk_first_waits_in_the_all_reduce() -> None:
    axes = ["read_bytes", "queue_depth", "readers"]
    model = with_tables(disk_apart=constant("share", axes, 0.1))
    placed = rows(2, disk=5_000.0)
    usual = price(candidate(ranks=2), placed)
    apart = price(candidate(ranks=2), placed, model=model)
    wait = 0.1 * usual.stages["gather"]
    assert wait > 0.0
    assert apart.stages["gather"] == pytest.approx(usual.stages["gather"] - wait)
    assert apart.stages["all_reduce"] == pytest.approx(usual.stages["all_reduce"] + wait)
    assert apart.step_seconds.value == pytest.approx(usual.step_seconds.value)
    # One rank has nobody to wait for; beside loader threads the wait is not seen.
    for ranks, loaders in ((1, 0), (2, 1)):
        who, placed = candidate(ranks=ranks, loaders=loaders), rows(ranks, disk=5_000.0)
        assert price(who, placed, model=model).stages == price(who, placed).stages


def test_rows_wider_than_any_measured_cost_as_much_per_byte() -> None:
    # 400 bytes are twice the widest row that was measured; one width alone stands for all.
    for widths, expected in (([50.0, 200.0], 2 * 200e-9), ([200.0], 200e-9)):
        table = Table(
            unit="seconds_per_row",
            axes=["row_bytes", "working_set_bytes", "readers"],
            points=[widths, [1.0], [1.0]],
            values=[50e-9, 200e-9][-len(widths) :],
            spread=0.0,
        )
        stages = price(candidate(), rows(host=1_000.0), model=with_tables(mapped_gather=table))
        assert stages.stages["gather"] == pytest.approx(1_000 * expected)


def test_ranks_do_not_wait_for_each_other_because_of_a_disk_they_share() -> None:
    # Batches vary by 20%; the last rank has its rows when the disk has served all requests.
    asked = request()
    batches = [
        replace(
            b, vertices=[*b.vertices[:-1], replace(b.vertices[-1], std=b.vertices[-1].mean / 5)]
        )
        for b in asked.profile.batches
    ]
    asked = replace(asked, profile=replace(asked.profile, batches=batches))

    def waited(**by_source: float) -> float:
        return predict(asked, candidate(ranks=2), rows(2, **by_source)).stages["all_reduce"]

    own = waited(own=1_000.0)
    assert waited(own=1_000.0, disk=500.0) == pytest.approx(own)
    assert waited(own=1_000.0, disk=5_000.0) == pytest.approx(own)
    # Of what each reads from its own memory, one may have more than the other.
    assert waited(own=500_000.0) > 2 * own
