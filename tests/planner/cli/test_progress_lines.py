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


def left_in(capsys: pytest.CaptureFixture[str]) -> list[tuple[int, int]]:
    """Seconds so far and seconds left of the lines that say both."""
    lines = [re.findall(r"(\d+) s", line) for line in capsys.readouterr().err.splitlines()]
    return [(int(found[0]), int(found[1])) for found in lines if len(found) == 2]


def test_what_is_left_counts_neither_the_ranks_start_nor_slow_first_steps(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
):
    """30 s until the first step, of 10 s, and 99 of a second."""
    with training_events(as_json=False, epochs=1) as on_event:
        clock.sleep(30.0)
        for step in range(100):
            clock.sleep(1.0 if step else 10.0)
            on_event({"event": "step", "epoch": 0, "share": (step + 1) / 100})
    said = left_in(capsys)
    assert len(said) > 10
    assert all(abs(done + left - 139) <= 1 for done, left in said)


def test_what_is_left_of_a_resumed_training_is_not_told_by_what_was_done_before(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
):
    with training_events(as_json=False, epochs=10) as on_event:
        clock.sleep(8.0)
        for step in range(50):
            clock.sleep(1.0)
            on_event({"event": "step", "epoch": 5 + step // 10, "share": (step % 10 + 1) / 10})
    said = left_in(capsys)
    assert said
    assert all(abs(done + left - 58) <= 1 for done, left in said)


def test_what_is_left_follows_a_job_that_becomes_slower_and_one_that_stands(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
):
    with progress_bar("plan") as progress:
        for done in range(30):  # a quick part, then a second for each hundredth
            progress("drawing", done / 100)
            clock.sleep(0.1)
        for done in range(30, 90):
            progress("timing", done / 100)
            clock.sleep(1.0)
        for _ in range(200):
            progress("waiting", 0.9)
            clock.sleep(1.0)
    said = left_in(capsys)
    assert all(abs(done + left - 73) <= 4 for done, left in said if 10 < done < 63)
    assert said[-1][1] < 60


def test_a_short_job_prints_nothing(clock: FakeClock, capsys: pytest.CaptureFixture[str]):
    with progress_bar("plan") as progress:
        progress("pricing", 0.5)
        clock.sleep(0.9 * FIRST_LINE_SECONDS)
        progress("done", 1.0)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "")


@pytest.mark.parametrize(
    ("events", "here", "said"),
    [(["step", "epoch"], True, True), (["step"], True, False), (["epoch"], False, False)],
)
def test_a_run_here_that_is_stopped_behind_an_epoch_says_how_to_go_on(
    events: list[str], here: bool, said: bool, capsys: pytest.CaptureFixture[str]
):
    def run() -> None:
        with training_events(as_json=False, epochs=2, here=here) as on_event:
            for name in events:
                on_event({"event": name, "epoch": 0, "share": 1.0, "loss": 1.0, "seconds": 1.0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert ("--resume to go on" in capsys.readouterr().out) == said
