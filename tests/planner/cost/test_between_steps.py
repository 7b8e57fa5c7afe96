"""Rates as a step finds them: small batches, loaders beside training, exchanges between compute."""

from dataclasses import replace

import pytest

from planner.cost.model import predict
from planner.machine import MachineModel, Table
from tests.planner.cost.test_model import candidate, price, request, rows
from tests.support.machines import GATHER_AXES, constant, machine

ROW_BYTES = 400
"""100 columns of float32."""


def per_byte(seconds: float, *, ranks: int = 2) -> Table:
    """A collective that takes so long per byte, from 16 B to 16 MB."""
    sizes = [16.0, 1.6e7]
    return Table(
        unit="seconds",
        axes=["bytes", "ranks"],
        points=[sizes, [float(ranks)]],
        values=[size * seconds for size in sizes],
        spread=0.0,
    )


def with_tables(**tables: Table) -> MachineModel:
    return machine().with_tables(tables)


def test_rows_of_peers_are_looked_up_with_the_share_that_a_rank_keeps() -> None:
    # The tables' bytes count a rank's own share: of 2 ranks, 1,000 rows sent are 2,000 exchanged.
    model = with_tables(all_to_all=per_byte(1e-8))
    stages = price(candidate(ranks=2), rows(2, own=4_000.0, peer=1_000.0), model=model).stages
    assert stages["exchange_rows"] == pytest.approx(2 * 1_000 * ROW_BYTES * 1e-8)
    # Two counts of 8 bytes, then 8 bytes for each of 2,000.
    assert stages["exchange_ids"] == pytest.approx((2 * 8 + 2 * 1_000 * 8) * 1e-8)


def test_counts_and_ids_are_one_call_after_compute_where_that_was_measured() -> None:
    model = with_tables(all_to_all_stepped=per_byte(1e-8), all_to_all_asked=per_byte(3e-8))
    placed = rows(2, own=4_000.0, peer=1_000.0)
    found = price(candidate(ranks=2), placed, model=model)
    assert found.stages["exchange_ids"] == pytest.approx(2 * 1_000 * 8 * 3e-8)


def test_who_leaves_an_exchange_early_waits_in_the_all_reduce() -> None:
    placed = rows(2, own=4_000.0, peer=1_000.0)
    together = price(candidate(ranks=2), placed)
    early = with_tables(all_to_all_early=constant("seconds", ["bytes", "ranks"], 0.4e-3))
    apart = price(candidate(ranks=2), placed, model=early)
    assert apart.stages["exchange_rows"] == pytest.approx(1e-3 - 0.4e-3)
    moved = apart.stages["all_reduce"] - together.stages["all_reduce"]
    assert moved == pytest.approx(0.4e-3)
    assert apart.step_seconds.value == pytest.approx(together.step_seconds.value)


def test_nobody_leaves_earlier_than_an_exchange_lasts() -> None:
    model = with_tables(all_to_all_early=constant("seconds", ["bytes", "ranks"], 1.0))
    found = price(candidate(ranks=2), rows(2, own=4_000.0, peer=1_000.0), model=model)
    assert "exchange_rows" not in found.stages
    assert found.step_seconds.value < 0.1


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


@pytest.mark.parametrize("timed", [0.0, 4e-3])
def test_a_loader_thread_samples_as_slowly_as_it_was_measured_beside_the_model(
    timed: float,
) -> None:
    # .7 ms by the rates, or 4 ms as timed on the graph; .9 ms more beside the model's steps.
    model = with_tables(beside_loader=constant("ratio", ["ranks"], 1.0))
    asked = request(model)
    timing = {
        k: replace(t, sample_seconds=timed, sample_beside_seconds=0.9e-3)
        for k, t in asked.profile.timing.items()
    }
    asked = replace(asked, profile=replace(asked.profile, timing=timing), sampler="ladies")
    alone = timed or 0.7e-3
    placed = rows(host=1_000.0)
    inline = predict(asked, candidate(), placed).stages["sample"]
    assert inline == pytest.approx(alone)
    # Training hides loading and goes on all the while: nearly all of a batch is drawn beside it.
    ahead = predict(asked, candidate(loaders=1), placed).stages["sample"]
    assert ahead == pytest.approx(alone + 0.9e-3, rel=0.02)


def test_the_model_is_slower_beside_reads_of_a_disk_as_it_was_measured_to_be() -> None:
    beside = {
        name: constant("ratio", ["ranks"], value)
        for name, value in (("beside", 1.1), ("beside_loader", 1.0))
    }
    model = with_tables(**beside, disk_beside=constant("ratio", ["read_bytes"], 1.5))

    def model_seconds(machine: MachineModel, loaders: int, **by_source: float) -> float:
        found = price(candidate(loaders=loaders), rows(1, **by_source), model=machine)
        return found.stages["forward_backward"]

    alone = model_seconds(model, 0, disk=50_000.0)
    # All the loader does is to read, for longer than a step lasts.
    assert model_seconds(model, 1, disk=500_000.0) == pytest.approx(1.5 * alone, rel=0.02)
    assert model_seconds(with_tables(**beside), 1, disk=500_000.0) == pytest.approx(1.1 * alone)
    assert model_seconds(model, 1, host=5_000_000.0) == pytest.approx(1.1 * alone, rel=0.02)
    assert model_seconds(model, 0, disk=500_000.0) == pytest.approx(alone)


def test_the_model_is_slower_after_an_exchange_as_it_was_measured_to_be() -> None:
    model = with_tables(all_to_all_after=constant("seconds", ["bytes", "ranks"], 2e-3))
    apart = price(candidate(ranks=2), rows(2, own=5_000.0), model=model).stages
    exchanging = price(candidate(ranks=2), rows(2, own=4_000.0, peer=1_000.0), model=model).stages
    longer = exchanging["forward_backward"] - apart["forward_backward"]
    assert longer == pytest.approx(2e-3)
    ahead = candidate(ranks=2, loaders=1)
    placed = rows(2, own=4_000.0, peer=1_000.0)
    assert price(ahead, placed, model=model).stages == price(ahead, placed).stages


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
