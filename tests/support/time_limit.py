"""A time limit for every test: what hangs fails with its stack and leaves no process behind.

At the limit pytest-timeout raises in the main thread, and the processes that the test started are
killed. Where that thread is in native code and never comes back to raise, `watchdog` kills them a
while later, which frees what waits for one of them; after as long again it aborts the interpreter,
whose fault handler writes the stacks of all threads.
"""

import os
import subprocess
import sys
from collections.abc import Generator, Iterable
from typing import Any

import pytest

from tests.support import watchdog

SLOW_SECONDS = 1800
DISTRIBUTED_SECONDS = 900
"""Limits by marker, that no healthy test meets on two busy cores; of all others: pyproject.toml."""
PATIENCE_SECONDS = 60
_began = pytest.StashKey[float]()
_watchdog = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("timeout_patience", "seconds beyond a test's limit", default=PATIENCE_SECONDS)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        for name, limit in (("slow", SLOW_SECONDS), ("distributed", DISTRIBUTED_SECONDS)):
            if item.get_closest_marker(name) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(limit))


def pytest_sessionstart(session: pytest.Session) -> None:
    os.environ[watchdog.OWNER] = str(os.getpid())
    session.config.stash[_watchdog] = subprocess.Popen(
        [
            *(sys.executable, "-S", watchdog.__file__),
            *(str(os.getpid()), str(session.config.getini("timeout_patience"))),
        ],
        stdin=subprocess.PIPE,
        bufsize=0,
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    beside = session.config.stash[_watchdog]
    assert beside.stdin is not None
    beside.stdin.close()
    beside.wait()


def _tell(item: pytest.Item, limit: str) -> None:
    pipe = item.config.stash[_watchdog].stdin
    assert pipe is not None
    pipe.write(f"{limit}\n".encode())


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    item.stash[_began] = watchdog.seconds_since_boot()
    if not item.config.getoption("usepdb"):
        _tell(item, str(settings.timeout))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        _tell(item, "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and str(call.excinfo.value).startswith("Timeout (>"):
        beside = item.config.stash[_watchdog].pid
        ended = watchdog.end_processes(os.getpid(), item.stash[_began], spared=beside)
        report.sections.append(("Processes killed at the time limit", "\n".join(ended)))
    return report
