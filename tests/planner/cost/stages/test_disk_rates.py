"""Seconds per read from disk for the ranks of a host that read at once."""

import pytest

from gnnplan.planner.cost.stages.gather import disk_rate
from gnnplan.planner.machine.model import Table
from tests.support.machines import machine


def table(axes: dict[str, list[float]], values: list[float]) -> Table:
    return Table(unit="s", axes=list(axes), points=list(axes.values()), values=values, spread=0.1)


AXES = {"read_bytes": [4096.0], "queue_depth": [1.0, 16.0, 32.0]}
SHARED = table(AXES, [100e-6, 20e-6, 16e-6])
BY_READERS = table(AXES | {"readers": [1.0, 2.0]}, [100e-6, 120e-6, 20e-6, 28e-6, 16e-6, 27e-6])


def seconds(disk: Table, depth: int, ranks: int) -> float:
    return disk_rate(machine().with_tables({"disk_read": disk}), 4096.0, depth, ranks).seconds


def test_ranks_that_read_at_once_take_what_as_many_readers_took() -> None:
    assert seconds(BY_READERS, 16, 1) == pytest.approx(20e-6)
    assert seconds(BY_READERS, 16, 2) == pytest.approx(28e-6)
    assert seconds(BY_READERS, 1, 1) == pytest.approx(100e-6)


def test_more_ranks_than_readers_were_measured_share_their_rate() -> None:
    # Two readers had 2 / 28 us together; each of four has a quarter of it: 56 us, by hand.
    assert seconds(BY_READERS, 16, 4) == pytest.approx(56e-6)


def test_one_process_stands_for_all_ranks_where_no_more_were_measured() -> None:
    # 32 in flight by one process: 16 us a read, of which each of two ranks has every other one.
    assert seconds(SHARED, 16, 2) == pytest.approx(32e-6)
    assert seconds(SHARED, 16, 1) == pytest.approx(20e-6)
