"""An archive is listed before it is unpacked, and unpacked no further than asked for."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.imports.importing import import_graph
from gnnplan.runtime.graph.imports.npz import NpzArchive

N = 6
RING: dict[str, Any] = {"indptr": np.arange(N + 1), "indices": np.arange(N)}


def written(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.iterdir())


def test_a_member_is_unpacked_when_it_is_asked_for_and_once(tmp_path: Path):
    np.savez_compressed(tmp_path / "p.npz", **RING, huge=np.zeros(1 << 20))
    (tmp_path / "scratch").mkdir()
    archive = NpzArchive(tmp_path / "p.npz", tmp_path / "scratch")
    assert list(archive) == ["indptr", "indices", "huge"]
    assert len(archive) == 3
    assert "huge" in archive
    assert "x" not in archive
    assert archive.get("x") is None
    assert written(tmp_path / "scratch") == 0
    np.testing.assert_array_equal(archive["indptr"], RING["indptr"])
    assert archive["indptr"] is archive["indptr"]
    assert 0 < written(tmp_path / "scratch") < 1000


@pytest.mark.parametrize("missing", ["indptr", "indices"])
def test_a_missing_member_is_refused_before_a_byte_is_unpacked(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arrays = {name: array for name, array in RING.items() if name != missing}
    np.savez_compressed(tmp_path / "p.npz", **arrays, huge=np.zeros(1 << 20))

    def unpack(*_: object) -> None:
        raise AssertionError("unpacked")

    monkeypatch.setattr("gnnplan.runtime.graph.imports.npz._unpack", unpack)
    with pytest.raises(DatasetError, match=missing):
        import_graph(tmp_path / "p.npz", tmp_path / "g")
    assert [p.name for p in tmp_path.iterdir()] == ["p.npz"]


def test_a_member_larger_than_the_free_disk_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    np.savez_compressed(tmp_path / "p.npz", **RING, x=np.zeros((N, 10_000)))

    class Usage:
        free = 100_000

    monkeypatch.setattr("gnnplan.runtime.graph.imports.npz.shutil.disk_usage", lambda _: Usage)
    with pytest.raises(DatasetError, match=r"found 'x' of 0\.000 GB for 0\.000 GB free") as caught:
        import_graph(tmp_path / "p.npz", tmp_path / "g")
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["p.npz"]


def lie(source: Path, claimed: int) -> None:
    """Change the size that the archive's directory claims for its first member."""
    data = bytearray(source.read_bytes())
    for mark, place in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        struct.pack_into("<I", data, data.index(mark) + place, claimed)
    source.write_bytes(data)


@pytest.mark.parametrize("claimed", [1, 100, 1000])
def test_a_member_is_not_read_beyond_the_size_it_claims(claimed: int, tmp_path: Path):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(1 << 20))
    with zipfile.ZipFile(tmp_path / "p.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("indptr.npy", buffer.getvalue())
    lie(tmp_path / "p.npz", claimed)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(DatasetError, match=r"p\.npz"):
        NpzArchive(tmp_path / "p.npz", tmp_path / "scratch")["indptr"]
    assert written(tmp_path / "scratch") <= claimed


def test_other_members_and_names_twice_are_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("../evil.sh", b"")
    with pytest.raises(DatasetError, match=r"members named \*\.npy"):
        NpzArchive(tmp_path / "a.npz", tmp_path)
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("y.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("y.npy", b"")
    with pytest.raises(DatasetError, match="'y' twice"):
        NpzArchive(tmp_path / "b.npz", tmp_path)


def test_a_torch_file_with_compressed_members_is_refused_unread(tmp_path: Path):
    import torch

    torch.save({"edge_index": torch.zeros((2, 1 << 20), dtype=torch.int64)}, tmp_path / "d.pt")
    with (
        zipfile.ZipFile(tmp_path / "d.pt") as old,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for info in old.infolist():
            bomb.writestr(info.filename, old.read(info))
    assert (tmp_path / "bomb.pt").stat().st_size < 100_000
    with pytest.raises(DatasetError, match=r"bomb\.pt: .* found compressed members"):
        import_graph(tmp_path / "bomb.pt", tmp_path / "g")
