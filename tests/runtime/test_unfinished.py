"""Folders of dead writers are removed, and nobody else's."""

import json
import os
from pathlib import Path

import pytest

from gnnplan.runtime import folders as unfinished
from gnnplan.runtime.folders import OWNER, Unfinished, sweep_unfinished


def leave(parent: Path, **changes: object) -> Path:
    """A folder as a killed process leaves it: with its mark, and no lock on it."""
    folder = parent / ".g.abcdefgh"
    folder.mkdir()
    living = Unfinished(parent / "other")
    said = json.loads((living.folder / OWNER).read_text())
    living.remove()
    (folder / OWNER).write_text(json.dumps(said | changes))
    (folder / "x.npy").write_bytes(b"much")
    return folder


def age(folder: Path, seconds: float) -> None:
    then = (folder / OWNER).stat().st_mtime - seconds
    os.utime(folder / OWNER, (then, then))


def test_a_folder_without_a_writer_is_removed_and_one_with_is_not(tmp_path: Path):
    mine = Unfinished(tmp_path / "g")
    left = leave(tmp_path)
    assert sweep_unfinished(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == [mine.folder]
    mine.finish()
    assert sweep_unfinished(tmp_path) == []
    assert list(mine.folder.iterdir()) == []


def test_another_hosts_folder_is_left_alone(tmp_path: Path):
    folder = leave(tmp_path, host="elsewhere", boot="another")
    age(folder, 10 * unfinished.STALE_SECONDS)
    assert sweep_unfinished(tmp_path) == []


def test_this_hosts_folder_of_before_its_last_start_is_removed_after_a_day(tmp_path: Path):
    folder = leave(tmp_path, boot="another")
    assert sweep_unfinished(tmp_path) == []
    age(folder, unfinished.STALE_SECONDS + 60)
    assert sweep_unfinished(tmp_path) == [folder]


@pytest.mark.parametrize("mark", ["", "[]", "{", '{"host": 1}'])
def test_a_mark_that_nobody_can_read_is_left_alone(tmp_path: Path, mark: str):
    (leave(tmp_path) / OWNER).write_text(mark)
    assert sweep_unfinished(tmp_path) == []


def test_without_locks_on_the_file_system_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_locks(handle: int, kind: int) -> None:
        del handle, kind
        raise OSError(95, "not supported")

    leave(tmp_path)
    monkeypatch.setattr("fcntl.flock", no_locks)
    made = Unfinished(tmp_path / "g")
    assert sweep_unfinished(tmp_path) == []
    made.remove()
    assert not made.folder.exists()


def test_what_changed_places_with_the_folder_is_not_removed(tmp_path: Path):
    made = Unfinished(tmp_path / "g")
    made.folder.rename(tmp_path / "g")
    made.folder.mkdir()
    (made.folder / "earlier").write_text("kept")
    assert not made.is_ours
    made.remove()
    assert (made.folder / "earlier").exists()
