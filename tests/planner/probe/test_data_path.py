"""The doctor says what a GPU's data path lacks, and which slower way is taken."""

from importlib import metadata

import pytest
import torch

from gnnplan.planner.probe import doctor as data_path


def test_without_a_gpu_only_the_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (only,) = data_path.data_path()
    assert (only.check, only.level) == ("GPU kernels", "note")


def test_a_missing_compiler_is_a_problem_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(data_path.metadata, "version", missing)
    assert data_path._kernels(0).level == "note"
    found = data_path._kernels(2)
    assert found.level == "problem"
    assert "pip install 'gnnplan[gpu]'" in found.advice


def test_memory_that_cannot_be_locked_names_limit_and_slower_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gnnplan.runtime.features import device_rows

    def refuse(memory: torch.Tensor, device: torch.device) -> None:
        raise device_rows.PinError(f"{memory.nbytes} bytes cannot be page-locked; ulimit -l")

    monkeypatch.setattr(device_rows, "lock_pages", refuse)
    found = data_path._locking()
    assert found.level == "problem"
    assert "ulimit -l" in found.found
    assert "slower" in found.advice


def test_gpus_that_cannot_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    found = data_path._peers(3)
    assert (found.level, found.found) == ("note", "2 of 6 pairs cannot (0-2, 2-0)")
    assert data_path._peers(2).level == "ok"
    assert data_path._peers(1).found == "one GPU has no peers"
