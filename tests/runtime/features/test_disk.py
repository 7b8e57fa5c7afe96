"""Direct reads return the rows of the file, within the budget and past the page cache."""

import ctypes
import errno
import itertools
import mmap
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.errors import BudgetExceeded, DatasetError
from gnnplan.runtime.features import direct
from gnnplan.runtime.features.disk import INDEX_BYTES_PER_ID, LEAST_IDS, Disk
from gnnplan.runtime.features.tier import Counters


def _save(folder: Path, num_rows: int, dim: int, dtype: Any = np.float32) -> tuple[Path, Any]:
    x = np.random.default_rng(dim).standard_normal((num_rows, dim)).astype(dtype)
    np.save(folder / "x.npy", x)
    return folder / "x.npy", x


def _read(tier: Disk, ids: Any, dim: int) -> tuple[Any, Counters]:
    """Read ids into scattered rows of a larger buffer, and undo the scattering."""
    positions = np.random.default_rng(0).permutation(ids.size + 5)[: ids.size]
    out, counters = np.full((ids.size + 5, dim), -1.0, np.float32), Counters()
    tier.read(ids, positions, np.array([ids.size]), out, counters)
    untouched = np.setdiff1d(np.arange(ids.size + 5), positions)
    assert (out[untouched] == -1).all()
    return out[positions], counters


# Row lengths: 4 B, not a divisor of a block, one block, a bit more, several blocks.
@pytest.mark.parametrize(
    ("dim", "budget_bytes"),
    [(1, 1 << 20), (100, 80_000), (333, 1 << 20), (1024, 1 << 20), (1025, 80_000), (5000, 1 << 20)],
)
def test_any_row_length_comes_back_exactly(tmp_path: Path, dim: int, budget_bytes: int) -> None:
    path, x = _save(tmp_path, 700, dim)
    tier = Disk(path, budget_bytes=budget_bytes)
    rng = np.random.default_rng(dim)
    for ids in (
        rng.integers(0, 700, 300),
        np.array([0, 699, 699, 0]),
        np.arange(500, 700),
        np.empty(0, np.int64),
    ):
        rows, counters = _read(tier, ids, dim)
        assert np.array_equal(rows, x[ids])
        assert counters.rows == {"disk": ids.size}
        assert counters.bytes == {"disk": ids.size * dim * 4}
        assert counters.disk_read_bytes % direct.BLOCK_BYTES == 0
        assert tier.budget.peak_bytes <= budget_bytes
    tier.close()


def test_a_header_of_any_length_is_allowed(tmp_path: Path) -> None:
    # Version 2.0 headers and padding move the data to offsets that no block divides.
    _, x = _save(tmp_path, 300, 10, np.float16)
    path = tmp_path / "odd.npy"
    text = f"{{'descr': '<f2', 'fortran_order': False, 'shape': {x.shape}, }}" + " " * 5001 + "\n"
    with path.open("wb") as file:
        file.write(b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text.encode())
        file.write(x.tobytes())
    tier = Disk(path, budget_bytes=1 << 18)
    assert tier.rows.data_offset % 512
    rows, _ = _read(tier, np.arange(300)[::-1].copy(), 10)
    assert np.array_equal(rows, x[::-1].astype(np.float32))
    tier.close()


def test_requests_cover_every_row_once_and_stay_within_their_length() -> None:
    rng = np.random.default_rng(5)
    for _ in range(100):
        dim, offset = int(rng.integers(1, 3000)), int(rng.integers(0, 9000))
        rows = direct.RowFile(5000, dim, np.dtype(np.float32), offset)
        least_bytes = direct.round_up(rows.row_bytes) + direct.BLOCK_BYTES
        request_bytes = least_bytes * int(rng.integers(1, 9))
        slots = np.sort(rng.integers(0, 5000, int(rng.integers(1, 400))))
        firsts = np.empty(slots.size + 1, np.int64)
        count = rows.cut_requests(slots, request_bytes, firsts)
        assert firsts[0] == 0
        assert firsts[count] == slots.size
        assert (np.diff(firsts[: count + 1]) > 0).all()
        for first, after in itertools.pairwise(firsts[: count + 1]):
            begin, end = rows.block_range(int(slots[first]), int(slots[after - 1]))
            assert end - begin <= request_bytes
            assert begin <= offset + slots[first] * rows.row_bytes
            assert offset + (slots[after - 1] + 1) * rows.row_bytes <= end


def test_neighbours_share_requests(tmp_path: Path) -> None:
    path, x = _save(tmp_path, 2000, 64)
    tier = Disk(path, budget_bytes=4 << 20, queue_depth=4)
    rows, counters = _read(tier, np.repeat(np.arange(2000), 3), 64)
    assert np.array_equal(rows, np.repeat(x, 3, axis=0))
    # 512,000 B of rows, each read once: five requests of 128 KiB where a row alone would be 2000.
    assert counters.disk_reads <= 5
    assert counters.disk_read_bytes <= 512_000 + counters.disk_reads * 2 * direct.BLOCK_BYTES
    tier.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _cached_fraction(path: Path) -> float:
    """Share of a file's pages in the page cache, by mincore(2) on a mapping that is not touched."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        num_pages = -(-len(mapped) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * num_pages)()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(address, ctypes.c_size_t(len(mapped)), flags) == 0
        del start
        return sum(flag & 1 for flag in flags) / num_pages


def test_the_budget_is_kept_in_accounting_in_memory_and_in_the_page_cache(tmp_path: Path) -> None:
    budget_bytes = 512 << 10
    path, x = _save(tmp_path, 40_000, 256)  # 41 MB
    rng = np.random.default_rng(9)
    out, positions = np.empty((1000, 256), np.float32), np.arange(1000)
    tier = Disk(path, budget_bytes=budget_bytes)
    if not tier.is_direct:
        pytest.skip("the temporary folder's file system refuses direct reads")
    batches = [rng.integers(0, 40_000, 1000) for _ in range(3)]
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert _cached_fraction(path) < 0.05
    tier.read(batches[0], positions, np.array([1000]), out, Counters())
    before_bytes = _resident_bytes()
    for ids in batches:
        tier.read(ids, positions, np.array([1000]), out, Counters())
        assert np.array_equal(out, x[ids])
        assert tier.budget.peak_bytes <= budget_bytes
    # x[ids] in the line above comes and goes (1 MB), and threads touch their stacks.
    assert _resident_bytes() - before_bytes < 4 << 20
    assert _cached_fraction(path) < 0.05
    assert tier.resident_bytes == tier.queue_depth * tier.request_bytes
    tier.close()
    assert tier.resident_bytes == 0
    tier.close()


def test_a_batch_larger_than_the_index_is_read_in_pieces(tmp_path: Path) -> None:
    path, x = _save(tmp_path, 1000, 16)
    least = 8192 + LEAST_IDS * INDEX_BYTES_PER_ID
    tier = Disk(path, budget_bytes=least, queue_depth=1)
    ids = np.random.default_rng(1).integers(0, 1000, 10 * LEAST_IDS + 1)
    rows, counters = _read(tier, ids, 16)
    assert np.array_equal(rows, x[ids])
    assert counters.disk_reads >= 11
    assert tier.budget.peak_bytes == least
    tier.close()
    with pytest.raises(BudgetExceeded, match=rf"buffers 8192 \+ index 12288 = {least} > "):
        Disk(path, budget_bytes=least - 1, queue_depth=1)


def test_where_direct_reads_are_refused_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, x = _save(tmp_path, 500, 100)
    real = os.open

    def refuse(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(RuntimeWarning, match="refuses direct reads") as caught:
        tier = Disk(path, budget_bytes=1 << 18)
    assert len(caught) == 1
    assert not tier.is_direct
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, _ = _read(tier, np.arange(500), 100)
    assert np.array_equal(rows, x)
    tier.close()


def test_files_that_are_not_rows_are_refused(tmp_path: Path) -> None:
    path, _ = _save(tmp_path, 500, 100)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(DatasetError, match=f"expected {len(whole)} bytes, found {len(whole) - 4}"):
        Disk(path, budget_bytes=1 << 18)
    path.write_bytes(b"not numpy")
    with pytest.raises(DatasetError, match=r"expected a \.npy file"):
        Disk(path, budget_bytes=1 << 18)
    np.save(path, np.zeros(4, np.float32))
    with pytest.raises(DatasetError, match="two axes in C order"):
        Disk(path, budget_bytes=1 << 18)
    np.save(path, np.zeros((4, 4)))
    with pytest.raises(DatasetError, match="float64"):
        Disk(path, budget_bytes=1 << 18)


def test_a_file_cut_short_while_open_is_an_error_not_zeros(tmp_path: Path) -> None:
    path, _ = _save(tmp_path, 500, 100)
    tier = Disk(path, budget_bytes=1 << 18)
    os.truncate(path, 100_000)
    with pytest.raises(
        DatasetError, match="cut short while in use: expected 200128 bytes, found 100000"
    ):
        _read(tier, np.arange(500), 100)
    with pytest.raises(IndexError, match="found 500"):
        _read(tier, np.array([500]), 100)
    tier.close()
