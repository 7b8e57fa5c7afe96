"""A crew of reading threads serves every request once, whatever signals come, and ends."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.features.direct import Requests, Stored, read_buffers
from gnnplan.runtime.features.disk import MOST_THREADS, Crew

NUM_ROWS, DIM = 1000, 128
"""Rows of a block each, so that any number of requests can be cut."""


def _buffers(count: int) -> list[Any]:
    return read_buffers(count, 4096)


def _requests(ids: Any) -> Requests:
    """One request per row, to the row of the output in its place."""
    return Requests(
        slots=ids,
        positions=np.arange(ids.size),
        firsts=np.arange(ids.size + 1),
        addresses=np.empty(ids.size, np.int64),
    )


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[tuple[Stored, Any]]:
    """A file of rows through the page cache, and what is in it."""
    x = np.random.default_rng(0).standard_normal((NUM_ROWS, DIM)).astype(np.float32)
    (tmp_path / "rows").write_bytes(x.tobytes())
    file = os.open(tmp_path / "rows", os.O_RDONLY)
    yield Stored(file, DIM * 4, 0, x.nbytes, widening=0, drop_pages=False), x
    os.close(file)


@pytest.mark.parametrize("members", [1, 2, 16])
def test_every_request_is_served_once(rows: tuple[Stored, Any], members: int) -> None:
    stored, x = rows
    crew = Crew(_buffers(members))
    rng = np.random.default_rng(members)
    for count in (1, members - 1, members, members + 1, 500, 3):
        ids = np.sort(rng.integers(0, NUM_ROWS, count))
        out = np.full((count, DIM), np.nan, np.float32)
        if count:
            failed, done = crew.serve(stored, _requests(ids), out)
            assert failed == []
            assert done >= count * DIM * 4
        np.testing.assert_array_equal(out, x[ids])
    crew.close()


def test_requests_that_fail_are_named_and_all_others_are_served(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((NUM_ROWS, DIM)).astype(np.float32)
    (tmp_path / "rows").write_bytes(x.tobytes())
    os.truncate(tmp_path / "rows", 900 * DIM * 4)
    file = os.open(tmp_path / "rows", os.O_RDONLY)
    crew = Crew(_buffers(4))
    ids, out = np.arange(0, NUM_ROWS, 3), np.zeros((334, DIM), np.float32)
    stored = Stored(file, DIM * 4, 0, x.nbytes, widening=0, drop_pages=False)
    failed, _ = crew.serve(stored, _requests(ids), out)
    whole = ids < 896  # the blocks that are all there
    assert set(np.flatnonzero(ids >= 900)) <= set(failed) <= set(np.flatnonzero(~whole))
    assert len(failed) == len(set(failed))
    np.testing.assert_array_equal(out[whole], x[ids[whole]])
    crew.close()
    os.close(file)


@pytest.mark.timeout(300, method="thread")  # the other method's signal is the test's own
def test_signals_break_no_batch(rows: tuple[Stored, Any]) -> None:
    stored, x = rows
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    crew = Crew(_buffers(8))
    rng = np.random.default_rng(2)
    try:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            ids = np.sort(rng.integers(0, NUM_ROWS, 300))
            out = np.full((300, DIM), np.nan, np.float32)
            assert crew.serve(stored, _requests(ids), out)[0] == []
            np.testing.assert_array_equal(out, x[ids])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        crew.close()
    assert heard


def _crew_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("disk-")]


def test_threads_and_pipes_end_when_it_is_closed_and_when_it_is_forgotten() -> None:
    folder = Path("/proc/self/fd")
    gc.collect()  # of tests before
    files = len(list(folder.iterdir())) if folder.exists() else 0
    crew = Crew(_buffers(5))
    assert len(_crew_threads()) == 4
    crew.close()
    crew.close()
    assert _crew_threads() == []
    crew = Crew(_buffers(5))
    del crew
    gc.collect()
    assert _crew_threads() == []
    if folder.exists():
        assert len(list(folder.iterdir())) == files


def test_a_number_of_buffers_that_a_byte_cannot_name_is_refused() -> None:
    for count in (0, MOST_THREADS + 1):
        with pytest.raises(ValueError, match="expected 1 to 255 buffers"):
            Crew(_buffers(1) * count)
