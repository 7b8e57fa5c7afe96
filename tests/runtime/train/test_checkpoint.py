"""A checkpoint is whole, or is not used."""

import logging
from pathlib import Path

import pytest
import torch

from gnnplan.runtime.train.recovery import (
    list_checkpoints,
    load_newest,
    newest_name,
    save_checkpoint,
)


def state_of(step: int) -> dict[str, object]:
    return {"step": step, "model": {"weight": torch.full((4, 3), float(step))}}


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "new", 7, state_of(7), keep=2)
    loaded = load_newest(tmp_path / "new")
    assert loaded is not None
    assert loaded["step"] == 7
    assert torch.equal(loaded["model"]["weight"], torch.full((4, 3), 7.0))


def test_a_folder_without_checkpoints_loads_nothing(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "missing") is None
    (tmp_path / "checkpoint-latest.pt").write_bytes(b"not ours")
    assert load_newest(tmp_path) is None


def test_the_last_k_are_kept_and_nothing_else_is_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for step in (1, 2, 10, 9):
        save_checkpoint(tmp_path, step, state_of(step), keep=2)
    steps = [int(path.name[11:21]) for path in list_checkpoints(tmp_path)]
    assert steps == [9, 10]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".pt", ".pt", ".txt"]


@pytest.mark.parametrize("keep", [1, 3])
def test_training_that_goes_on_keeps_as_many_as_were_asked_for(tmp_path: Path, keep: int) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, state_of(step), keep=keep)
        steps = [int(path.name[11:21]) for path in list_checkpoints(tmp_path)]
        assert steps == list(range(max(1, step - keep + 1), step + 1))


def test_a_checkpoint_that_is_removed_while_another_rank_lists_them_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that fails lists them for its record, while rank 0 may be saving the next."""
    saved = save_checkpoint(tmp_path, 9, state_of(9), keep=2)
    gone = tmp_path / "checkpoint-0000000007-0123456789ab.pt"
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([saved, gone]))
    assert newest_name(tmp_path) == saved.name


def test_a_step_has_one_checkpoint(tmp_path: Path) -> None:
    for step, value in ((5, 5), (10, 9), (10, 10)):
        save_checkpoint(tmp_path, step, state_of(value), keep=2)
    assert [int(path.name[11:21]) for path in list_checkpoints(tmp_path)] == [5, 10]
    loaded = load_newest(tmp_path)
    assert loaded is not None
    assert loaded["step"] == 10


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, 1, state_of(1), keep=3)
    newest = save_checkpoint(tmp_path, 2, state_of(2), keep=3)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    cut = {"truncated": data[: len(data) // 2], "flipped": data, "empty": b""}
    newest.write_bytes(bytes(cut[damage]))
    with caplog.at_level(logging.WARNING):
        loaded = load_newest(tmp_path)
    assert loaded is not None
    assert loaded["step"] == 1
    assert newest.name in caplog.text


def test_a_failed_write_leaves_the_older_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, state_of(1), keep=1)

    def full(path: Path, target: Path) -> None:
        del path, target
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, state_of(2), keep=1)
    loaded = load_newest(tmp_path)
    assert loaded is not None
    assert loaded["step"] == 1
    assert len(list(tmp_path.iterdir())) == 1
