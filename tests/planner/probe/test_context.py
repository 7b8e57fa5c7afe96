"""How much is measured, how a point settles, and how points become a table."""

from pathlib import Path

import pytest

from gnnplan.planner.probe.collectives import asked_sizes
from gnnplan.planner.probe.context import FULL, QUICK, ProbeContext, fit_to, powers_up_to
from gnnplan.planner.probe.grid import Budget
from gnnplan.planner.probe.quiet import LoadSample, load_notes
from gnnplan.planner.probe.team import Team
from gnnplan.planner.probe.timing import summarize

GIB = 2**30


def context(*, cores: int, team: int) -> ProbeContext:
    return ProbeContext(team=Team(team), sizes=QUICK, cores=cores, scratch=Path("/nonexistent"))


@pytest.mark.parametrize(
    ("cores", "team", "readers", "ranks"),
    [
        (1, 2, [1], [1, 2]),
        (2, 2, [1, 2], [1, 2]),
        (2, 4, [1, 2], [1, 2, 4]),
        (6, 6, [1, 2, 4, 6], [1, 2, 4, 6]),
        (64, 16, [1, 2, 4, 8, 16], [1, 2, 4, 8, 16]),
    ],
)
def test_readers_stay_within_cores_and_ranks_within_the_team(
    cores: int, team: int, readers: list[int], ranks: list[int]
):
    here = context(cores=cores, team=team)
    assert here.readers() == readers
    assert here.ranks() == ranks
    assert here.ranks(least=2) == ranks[1:]


def test_powers_end_at_the_most_and_never_below_the_least():
    assert powers_up_to(1, 1) == [1]
    assert powers_up_to(2, 1) == [2]
    assert powers_up_to(1, 12) == [1, 2, 4, 8, 12]


def test_a_noisy_point_makes_its_table_uncertain_and_is_noted():
    here = context(cores=2, team=2)
    quiet = summarize([1.0, 1.0, 1.0], limit=0.1)
    noisy = summarize([1.0, 2.0, 3.0], limit=0.1)
    axes = {"bytes": [1, 2]}
    assert not here.table("calm", "s", axes, {(1,): quiet, (2,): quiet})["calm"].uncertain
    assert here.notes == []
    assert here.table("rough", "s", axes, {(1,): quiet, (2,): noisy})["rough"].uncertain
    assert here.notes[0].startswith("rough: 1 of 2 points uncertain")


def test_points_that_were_not_reached_are_named_with_how_to_get_them():
    here = context(cores=2, team=2)
    axes = {"bytes": [1, 4, 16, 64], "ranks": [2]}
    points = {(1, 2): summarize([1.0] * 3), (64, 2): summarize([8.0] * 3)}
    table = here.table("t", "s", axes, points)["t"]
    assert table.values == pytest.approx([1.0, 2.0, 4.0, 8.0])
    assert table.uncertain
    (note,) = here.notes
    assert note == (
        "time: t: not reached in time, so taken from neighbours: bytes x ranks 4 x 2, 16 x 2; run "
        "gnnplan probe again when nothing else runs here, or with more --seconds"
    )


@pytest.mark.parametrize(
    ("levels", "readings", "expected"),
    [
        ([0.0], [[1.0] * 3, [2.0] * 3], (1.0, False)),
        ([2.0, 0.0], [[1.0] * 3, [2.0] * 3], (2.0, False)),
        ([2.0], [[1.0] * 3, [2.0] * 3], (1.0, True)),
        ([0.0], [[1.0, 2.0, 9.0], [2.0] * 3], (2.0, False)),
        ([0.0], [[1.0, 2.0, 9.0], [1.0, 3.0, 99.0]], (2.0, True)),
    ],
    ids=["quiet", "calm-again", "disturbed", "steady-again", "noisy"],
)
def test_a_point_has_one_second_try_and_is_uncertain_else(
    levels: list[float], readings: list[list[float]], expected: tuple[float, bool]
):
    here = ProbeContext(
        team=Team(1), sizes=QUICK, cores=1, scratch=Path("/nonexistent"),
        level=lambda: levels.pop(0) if len(levels) > 1 else levels[0],
    )  # fmt: skip
    samples = iter(readings)
    found = here.settle(lambda: next(samples), limit=0.1)
    assert (found.value, found.uncertain) == expected


def test_rounds_end_where_another_one_would_not_fit():
    clock = [0.0]
    budget = Budget(10.0, lambda: clock[0])
    here = ProbeContext(
        team=Team(1), sizes=QUICK, cores=1, scratch=Path("/nonexistent"), budget=budget
    )

    def work(_: int) -> None:
        clock[0] += 3.0

    assert here.rounds(8, work) == 3
    assert here.rounds(8, work) == 1


def test_what_making_a_table_monotone_moved_is_in_its_spread():
    here = context(cores=2, team=2)
    points = {(1,): summarize([2.0] * 3), (2,): summarize([1.0] * 3)}
    table = here.table("t", "s", {"bytes": [1, 2]}, points, rising=["bytes"])["t"]
    assert table.values == pytest.approx([2**0.5] * 2)
    # Relative moves of -29% and +41%: root mean square 36%, by hand.
    assert table.spread == pytest.approx(0.3587, abs=1e-3)


def test_sizes_are_cut_to_the_memory_there_is():
    small = fit_to(FULL, cores=2, available_ram_bytes=2 * GIB)
    # 2 GiB / 8 / 4 processes = 64 MiB each.
    assert small.working_set_bytes == (4 * 2**20, 32 * 2**20)
    assert small.copy_bytes == 64 * 2**20
    large = fit_to(FULL, cores=2, available_ram_bytes=64 * GIB)
    assert large.working_set_bytes == FULL.working_set_bytes


def test_one_core_measures_one_compute_thread():
    assert fit_to(FULL, cores=1, available_ram_bytes=GIB).threads == (1,)


@pytest.mark.parametrize("sizes", [QUICK, FULL], ids=lambda s: s.name)
def test_grids_rise_and_calls_are_as_large_as_real_batches(sizes):
    for grid in (
        sizes.row_bytes,
        sizes.working_set_bytes,
        sizes.disk_read_bytes,
        sizes.disk_queue_depths,
        sizes.message_bytes,
        sizes.exchange_bytes,
        asked_sizes(sizes.exchange_bytes),
        sizes.gather_rows,
        sizes.graph_nodes,
        sizes.threads,
    ):
        assert list(grid) == sorted(set(grid))
    assert sizes.gather_rows[0] <= 2_000
    assert 30_000 <= sizes.gather_rows[-1] <= 60_000
    assert all(size % 4096 == 0 for size in sizes.disk_read_bytes)


def test_load_and_stolen_time_are_noted():
    idle = LoadSample(busy_ticks=0, steal_ticks=0, all_ticks=0, load=0.1)
    later = LoadSample(busy_ticks=900, steal_ticks=50, all_ticks=1000, load=2.0)
    assert load_notes(idle, idle, 2) == []
    assert ["5.0%" in note for note in load_notes(idle, later, 2)] == [True]
    assert any("2.0 before" in note for note in load_notes(later, later, 2))
