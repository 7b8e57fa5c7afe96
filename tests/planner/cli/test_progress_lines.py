"""Progress where no terminal is: lines now and then, with what is left."""

import re
import sys

import pytest

from gnnplan.planner.cli import common
from gnnplan.planner.cli.common import FIRST_LINE_SECONDS, LINE_SECONDS, progress_bar
from gnnplan.planner.cli.training import training_events
from tests.support.clock import FakeClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Time that passes by call alone."""
    found = FakeClock()
    monkeypatch.setattr(common, "time", found)
    return found


def test_a_long_job_prints_lines_with_what_is_left(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
):
    assert not sys.stderr.isatty()
    with progress_bar("plan") as progress:
        for second in range(21):
            progress("timing neighbor", second / 20)
            clock.sleep(1.0)
    lines = capsys.readouterr().err.splitlines()
    due = [FIRST_LINE_SECONDS + n * LINE_SECONDS for n in range(4)]
    assert lines == [
        f"plan: timing neighbor; {at:.0f} s so far, about {20 - at:.0f} s left" for at in due
    ]


def test_what_is_left_of_a_training_counts_all_its_epochs(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
):
    with training_events(as_json=False, epochs=4) as on_event:
        for step in range(20):
            clock.sleep(1.0)
            on_event({"event": "step", "epoch": step // 5, "share": (step % 5 + 1) / 5})
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train: ")]
    assert len(lines) >= 3
    for line in lines:
        done, left = map(int, re.findall(r"(\d+) s", line))
        assert done + left == 20


def test_a_short_job_prints_nothing(clock: FakeClock, capsys: pytest.CaptureFixture[str]):
    with progress_bar("plan") as progress:
        progress("pricing", 0.5)
        clock.sleep(0.9 * FIRST_LINE_SECONDS)
        progress("done", 1.0)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "")
