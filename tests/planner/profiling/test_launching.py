"""What launching takes of a host is measured in processes of its own."""

from collections.abc import Iterator

import pytest

from planner.profiling import launching


@pytest.fixture(autouse=True)
def _measured_anew() -> Iterator[None]:
    launching.launcher_bytes.cache_clear()
    yield
    launching.launcher_bytes.cache_clear()


def test_a_module_adds_what_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MODULES", ("runtime.launch",))
    alone = launching.launcher_bytes()
    assert 1e6 < alone < 1e9
    launching.launcher_bytes.cache_clear()
    monkeypatch.setattr(launching, "MODULES", ("runtime.launch", "torch.distributed.run"))
    assert launching.launcher_bytes() > alone + 20e6


def test_what_cannot_be_started_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MODULES", ("runtime.launch", "no_such_module"))
    assert launching.launcher_bytes() == 0
