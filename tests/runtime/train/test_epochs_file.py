"""Reports of epochs beside the checkpoints: each is written once, a mark says how many count."""

from pathlib import Path

import pytest

from gnnplan.runtime.report import EpochReport
from gnnplan.runtime.train.recovery import EPOCHS_FILE, Mark, append_epochs, read_epochs


def reports(count: int, loss: float = 1.0) -> list[EpochReport]:
    return [
        EpochReport(epoch=i, seconds=0.5, steps=3, loss=loss, first_loss=2.0, last_loss=0.5)
        for i in range(count)
    ]


def test_an_epoch_is_written_once(tmp_path: Path) -> None:
    mark, sizes = Mark(), list[int]()
    for count in range(1, 6):
        before = mark.size_bytes
        mark = append_epochs(tmp_path, reports(count), mark)
        assert mark.epochs == count
        assert (tmp_path / EPOCHS_FILE).stat().st_size == mark.size_bytes
        sizes.append(mark.size_bytes - before)
    assert len(set(sizes)) == 1
    assert read_epochs(tmp_path, mark) == reports(5)
    assert append_epochs(tmp_path, reports(5), mark) == mark


def test_what_an_older_checkpoint_does_not_know_is_overwritten(tmp_path: Path) -> None:
    old = append_epochs(tmp_path, reports(2), Mark())
    append_epochs(tmp_path, reports(4, loss=7.0), old)
    assert read_epochs(tmp_path, old) == reports(2)
    new = append_epochs(tmp_path, reports(3), old)
    assert read_epochs(tmp_path, new) == reports(3)
    assert (tmp_path / EPOCHS_FILE).stat().st_size == new.size_bytes


@pytest.mark.parametrize("damage", ["short", "altered"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    mark = append_epochs(tmp_path, reports(3), Mark())
    path = tmp_path / EPOCHS_FILE
    data = path.read_bytes()
    path.write_bytes(data[:-5] if damage == "short" else data.replace(b"2.0", b"2.5", 1))
    with pytest.raises(ValueError, match="does not match the checkpoint's checksum"):
        read_epochs(tmp_path, mark)
    assert read_epochs(tmp_path, Mark()) == []
