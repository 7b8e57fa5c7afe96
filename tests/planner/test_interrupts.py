"""Commands that a signal ends: one line, its exit code, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gnnplan.planner.cli import main as cli, planning

STOPS = [
    (signal.SIGINT, 130, "gnnplan: interrupted"),
    (signal.SIGTERM, 143, "gnnplan: ended by SIGTERM"),
]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell that starts the tests in the background has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code", "line"), STOPS)
@pytest.mark.parametrize("becomes", ["nothing", "an error of a library", "swallowed"])
def test_a_signal_ends_a_command_in_one_line_with_its_code(
    number: signal.Signals,
    code: int,
    line: str,
    becomes: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def work(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10.0)
        except KeyboardInterrupt:
            if becomes == "an error of a library":
                raise RuntimeError("operation cancelled") from None
            if becomes == "nothing":
                raise

    monkeypatch.setattr(planning, "plan_here", work)
    handlers = [signal.getsignal(each) for each, _, _ in STOPS]
    assert cli.main(["plan", "G", "-o", "P"]) == code
    said = capsys.readouterr().err
    assert [each for each in said.splitlines() if each] == [line]
    assert [signal.getsignal(each) for each, _, _ in STOPS] == handlers


def test_a_signal_that_was_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch):
    seen: list[object] = []
    monkeypatch.setattr(
        planning, "plan_here", lambda *_, **__: seen.append(signal.getsignal(signal.SIGTERM))
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert cli.main(["plan", "G", "-o", "P"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_IGN]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "line"), STOPS)
def test_a_dataset_in_the_making_is_not_left_behind(
    number: signal.Signals, code: int, line: str, tmp_path: Path
):
    words = ["graph", "generate", "rmat", "big", "--nodes", "500000", "--degree", "20"]
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", *words],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    try:
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, said.strip()) == (code, line)
    assert list(tmp_path.iterdir()) == []
