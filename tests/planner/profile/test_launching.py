"""What launching takes of a host is measured in processes of its own."""

import pytest

from planner.profile import team as launching
from planner.workload import ProcessCost
from runtime.errors import WorkerFailed

RANK = ProcessCost(start_seconds=1.5, resident_bytes=70_000_000)


def test_a_module_adds_what_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MODULES", ("runtime.launch.launch",))
    alone = launching.with_launcher(RANK)
    assert 1e6 < alone.launcher_bytes < 1e9
    monkeypatch.setattr(launching, "MODULES", ("runtime.launch.launch", "torch.distributed.run"))
    both = launching.with_launcher(RANK)
    assert both.launcher_bytes > alone.launcher_bytes + 20e6
    assert (both.start_seconds, both.resident_bytes) == (RANK.start_seconds, RANK.resident_bytes)


def test_what_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MODULES", ("runtime.launch.launch", "no_such_module"))
    with pytest.raises(WorkerFailed, match=r"no_such_module could not be started: .*No module"):
        launching.with_launcher(RANK)


def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MODULES", ("torch.distributed.run",))
    monkeypatch.setattr(launching, "WAIT_SECONDS", 0.01)
    launching._private_bytes_of.cache_clear()
    with pytest.raises(WorkerFailed, match=r"torch.distributed.run to be imported within"):
        launching.with_launcher(RANK)
