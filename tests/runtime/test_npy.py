"""Reading .npy files: what a header claims is held against the file before anything is taken."""

import io
from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime import npy
from gnnplan.runtime.npy import map_npy, npy_of, release_pages


def saved(folder: Path, array: np.ndarray) -> Path:
    path = folder / "array.npy"
    np.save(path, array)
    return path


def with_header(folder: Path, header: str, body: bytes = b"\0" * 64) -> Path:
    text = header.ljust(117).encode() + b"\n"
    path = folder / "array.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body)
    return path


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.array(7),
        np.zeros((0, 5), np.float32),
        np.arange(3, dtype=">i8"),
    ],
    ids=["rows", "columns", "scalar", "empty", "swapped"],
)
def test_values_are_those_that_were_saved(tmp_path: Path, array: np.ndarray):
    path = saved(tmp_path, array)
    for found in (map_npy(path), npy_of(path.read_bytes())):
        assert found.shape == array.shape
        assert found.dtype == array.dtype
        assert (found == array).all()


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


def test_pages_that_are_released_leave_memory_and_are_read_again(tmp_path: Path):
    mapped = map_npy(saved(tmp_path, np.ones(4 << 20)))
    before = resident_file_bytes()
    assert mapped.sum() == 4 << 20
    assert resident_file_bytes() - before > 16 << 20
    release_pages(mapped[10:])  # a view is of the same mapping
    assert resident_file_bytes() - before < 4 << 20
    assert mapped.sum() == 4 << 20
    release_pages(np.ones(3))  # nothing is mapped


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904,), }", "bytes"),
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (3037000500, 3037000500), }", "bytes"),
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (9,), }", "expected 72 bytes"),
        ("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }", "expected a shape"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "plain values"),
        ("{'descr': '<i8', 'fortran_order': False, 'shape': ((((((((", "."),
        ("((((((((((((((((((((((((((((((((((((((((((((((((((((((((((", "."),
    ],
)
def test_headers_that_claim_what_is_not_there_are_refused(tmp_path: Path, header: str, words: str):
    path = with_header(tmp_path, header)
    with pytest.raises(ValueError, match=words):
        map_npy(path)
    with pytest.raises(ValueError, match=words):
        npy_of(path.read_bytes())


def test_files_that_are_no_arrays_are_refused(tmp_path: Path):
    whole = io.BytesIO()
    np.savez(whole, a=np.arange(3))
    path = tmp_path / "array.npy"
    for content in (b"", b"\x93NUMPY", b"PK\x03\x04", whole.getvalue(), b"\x93NUMPY\x03\x00"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"."):
            map_npy(path)
        with pytest.raises(ValueError, match=r"."):
            npy_of(content)


def interrupted(times: int):
    """NumPy's reader, failing so often as where another thread parses (python/cpython#106905)."""
    left = [times]

    def read(file: io.BufferedIOBase) -> object:
        found = np.lib.format.read_array_header_1_0(file)
        if left[0] > 0:
            left[0] -= 1
            raise SystemError("AST constructor recursion depth mismatch (before=21, after=15)")
        return found

    return read


def test_a_header_that_another_thread_disturbs_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    array = np.arange(12.0).reshape(3, 4)
    path = saved(tmp_path, array)
    for reading in (map_npy, lambda p: npy_of(p.read_bytes())):
        monkeypatch.setitem(npy._HEADERS, (1, 0), interrupted(npy.HEADER_TRIES - 1))
        assert np.array_equal(reading(path), array)
    monkeypatch.setitem(npy._HEADERS, (1, 0), interrupted(npy.HEADER_TRIES))
    with pytest.raises(ValueError, match=r"not a .npy header \(AST constructor"):
        map_npy(path)
