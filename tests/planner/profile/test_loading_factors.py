"""What loading was timed at, held against a machine's tables; all values by hand."""

from dataclasses import replace

import pytest

from gnnplan.planner.cost.stages.gather import expected_factor
from gnnplan.planner.machine.model import Table
from gnnplan.planner.profile.model_seconds import loading_factors
from gnnplan.planner.profile.protocol import InLine, LoadingAnswer, TimedDisk, TimedGather
from tests.support.machines import machine

GATHER = Table(
    unit="seconds_per_row",
    axes=["row_bytes", "working_set_bytes", "readers"],
    points=[[100.0, 400.0], [1e4, 1e8], [1.0, 2.0]],
    values=[10e-9, 10e-9, 20e-9, 20e-9, 40e-9, 80e-9, 80e-9, 160e-9],
    spread=0.0,
)
DISK = Table(
    unit="seconds_per_read",
    axes=["read_bytes", "queue_depth", "readers"],
    points=[[4096.0, 8192.0], [1.0, 16.0], [1.0, 2.0]],
    values=[9e-5, 9e-5, 1e-5, 2e-5, 9e-5, 9e-5, 2e-5, 4e-5],
    spread=0.0,
)
BARE = LoadingAnswer(after_wait=None, beside={})


def in_line(**gathers: TimedGather) -> InLine:
    """Batches of a millisecond, whose rows were gathered so."""
    return InLine(sample_seconds=1e-3, sample_spread=0.0, gathers=gathers)


@pytest.mark.parametrize(
    ("table_bytes", "ranks", "each"),
    [(10_000, 1, 40e-9), (10**8, 1, 80e-9), (10**8, 2, 160e-9), (1, 1, 40e-9)],
)
def test_a_gather_is_held_against_what_the_table_says_of_as_many_rows(
    table_bytes: int, ranks: int, each: float
) -> None:
    gather = TimedGather(seconds=120e-6, rows=1_000.0, row_bytes=400, table_bytes=table_bytes)
    found = in_line(gather=gather, mapped_gather=gather)
    model = replace(machine(), tables={"gather": GATHER})
    assert loading_factors(model, found, BARE, ranks) == pytest.approx({"gather": 120e-9 / each})


@pytest.mark.parametrize(("ranks", "each"), [(1, 2e-5), (2, 4e-5), (4, 8e-5)])
def test_reads_from_disk_are_held_against_the_table_without_their_start(
    ranks: int, each: float
) -> None:
    timed = TimedDisk(seconds=0.0104, requests=40.0, request_bytes=8192.0)
    found = replace(BARE, disk=timed, disk_start_seconds=0.0004)
    model = replace(machine(), tables={"disk_read": DISK})
    # 12.5, 6.25 and 3.125 times as long as the table's: the graph's own disk, but for a swing.
    expected = {"disk_read": expected_factor(0.01 / 40 / each)}
    assert loading_factors(model, None, found, ranks) == pytest.approx(expected)


def test_nothing_is_held_against_what_was_not_measured() -> None:
    gather = TimedGather(seconds=120e-6, rows=1_000.0, row_bytes=400, table_bytes=1)
    timed = TimedDisk(seconds=0.0003, requests=1.0, request_bytes=8192.0)
    line, found = in_line(gather=gather), replace(BARE, disk=timed, disk_start_seconds=0.0004)
    assert loading_factors(replace(machine(), tables={}), line, found, 1) == {}
    # A start longer than the whole is noise, no rate.
    disk = replace(machine(), tables={"disk_read": DISK})
    assert loading_factors(disk, line, found, 1) == {}
    assert loading_factors(machine(), in_line(), BARE, 1) == {}
    assert loading_factors(machine(), None, BARE, 1) == {}
