"""What launching takes of a host is measured in processes of its own, once."""

import pytest

from gnnplan.planner.profile import team
from gnnplan.planner.profile.team import launcher_bytes, private_bytes_of
from gnnplan.runtime.errors import WorkerFailed


def test_a_module_adds_what_it_imports() -> None:
    alone = private_bytes_of(["gnnplan.runtime.launch.launch"])
    assert 1e6 < alone < 1e9
    assert (
        private_bytes_of(["gnnplan.runtime.launch.launch", "torch.distributed.run"]) > alone + 20e6
    )


def test_it_is_measured_once_for_installed_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "private_bytes_of", lambda _modules: 7)
    found = launcher_bytes()
    monkeypatch.setattr(team, "private_bytes_of", lambda _modules: 8)
    assert launcher_bytes() == found


def test_what_cannot_be_started_is_said() -> None:
    with pytest.raises(WorkerFailed, match=r"no_such_module could not be started: .*No module"):
        private_bytes_of(["gnnplan.runtime.launch.launch", "no_such_module"])


def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "WAIT_SECONDS", 0.01)
    with pytest.raises(WorkerFailed, match=r"torch.distributed.run to be imported within"):
        private_bytes_of(["torch.distributed.run"])
