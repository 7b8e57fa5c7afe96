"""A test that hangs fails with its stack, and nothing that it started is left."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import watchdog

HOOKS = "from tests.support.time_limit import *\n"
SETTINGS = "[pytest]\ntimeout = 3\ntimeout_patience = {patience}\n"
"""Seconds in which a busy machine starts the processes below."""
STARTS = """
import ctypes, os, subprocess, sys
from pathlib import Path

CODE = "import subprocess, sys, time; subprocess.Popen(['sleep', '600'], start_new_session=True)"

def started():
    # One that waits and one whose parent is gone.
    subprocess.run([sys.executable, "-S", "-c", CODE], check=True)
    return subprocess.Popen(["sleep", "600"])
"""


def run(
    folder: Path, tests: str, *, patience: int
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """One run of these tests; what it said and which of its processes were left."""
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "pytest.ini").write_text(SETTINGS.format(patience=patience))
    (folder / "test_hangs.py").write_text(STARTS + tests)
    began = watchdog.seconds_since_boot()
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "pytest_timeout", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        said, _ = process.communicate()
    left = watchdog.end_processes(process.pid, began)
    return subprocess.CompletedProcess(process.args, process.returncode, said), left


def test_a_test_that_waits_for_its_process_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    found, left = run(
        tmp_path,
        "def test_hangs():\n    started().wait()\n\ndef test_goes_on():\n    pass\n",
        patience=60,
    )
    assert found.returncode == 1
    assert "1 failed, 1 passed" in found.stdout
    assert "started().wait()" in found.stdout
    assert "Timeout (>3.0s)" in found.stdout
    assert found.stdout.count(" sleep 600\n") == 2  # said which processes were killed
    assert left == []


def test_native_code_that_holds_the_interpreters_lock_is_aborted(tmp_path: Path) -> None:
    lock = "ctypes.PyDLL(None).pthread_mutex_lock(mutex)"  # twice by one thread: for ever
    found, left = run(
        tmp_path,
        f"def test_holds():\n    started()\n    mutex = bytes(64)\n    {lock}\n    {lock}\n",
        patience=1,
    )
    assert found.returncode < 0
    assert "Fatal Python error: Aborted" in found.stdout
    assert "in test_holds" in found.stdout
    assert left == []


def test_processes_of_before_are_left_alone() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        later = watchdog.seconds_since_boot() + 0.1
        assert watchdog.end_processes(os.getpid(), later) == []
        assert watchdog.end_processes(os.getpid(), later - 0.2, spared=process.pid) == []
        assert process.poll() is None
        assert watchdog.end_processes(os.getpid(), later - 0.2) == [f"{process.pid} sleep 600"]
        assert process.wait() < 0
