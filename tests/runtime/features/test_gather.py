"""Gathering is indexing, bit for bit, whatever the width, dtype, order and thread count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.features import gather
from gnnplan.runtime.features.gather import copy_from_addresses, gather_rows
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows

WIDTHS = (1, 3, 4, 7, 16, 33, 100, 128, 1433)


def _table(num_rows: int, dim: int, dtype: Any) -> Any:
    return convert_rows(
        np.random.default_rng(dim).standard_normal((num_rows, dim)), np.dtype(dtype)
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_gather_equals_indexing(dim: int, dtype: Any, threads: int) -> None:
    table = _table(300, dim, dtype)
    ids = np.random.default_rng(1).integers(0, 300, 5000)
    ids[:2], ids[-2:] = (0, 299), (299, 0)
    out = np.full((5000, dim), np.nan, np.float32)
    gather_rows(table, ids, out, threads=threads)
    assert np.array_equal(out.view(np.uint32), convert_rows(table[ids], out.dtype).view(np.uint32))


def test_streamed_stores_equal_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table(300, 100, np.float32)
    ids = np.random.default_rng(2).integers(0, 300, 4096)
    plain, streamed = (np.empty((4096, 100), np.float32) for _ in range(2))
    monkeypatch.setattr(gather, "STREAM_BYTES", 1 << 60)
    gather_rows(table, ids, plain)
    monkeypatch.setattr(gather, "STREAM_BYTES", 0)
    gather_rows(table, ids, streamed, threads=2)
    assert np.array_equal(plain, table[ids])
    assert np.array_equal(streamed, table[ids])


def test_an_output_that_is_not_aligned_is_still_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "STREAM_BYTES", 0)
    table = _table(50, 8, np.float32)
    ids = np.arange(50)[::-1].copy()
    out = np.empty(401, np.float32)[1:].reshape(50, 8)
    assert np.array_equal(gather_rows(table, ids, out), table[ids])


@pytest.mark.parametrize("dim", [1, 127, 128, 131, 602, 767])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_rows_of_any_size_are_streamed_and_nothing_beside_them_is_written(
    dim: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "STREAM_BYTES", 0)
    monkeypatch.setattr(gather, "STREAM_ROW_BYTES", 0)
    table = _table(60, dim, np.float32)
    ids = np.random.default_rng(dim).integers(0, 60, 2100)
    room = np.full(ids.size * dim + 32, -7.0, np.float32)
    out = room[shift : shift + ids.size * dim].reshape(ids.size, dim)
    assert np.array_equal(gather_rows(table, ids, out, threads=2), table[ids])
    assert np.all(room[:shift] == -7.0)
    assert np.all(room[shift + ids.size * dim :] == -7.0)


def test_float16_specials_widen_exactly() -> None:
    # Every float16 there is: subnormals, infinities and NaN payloads included.
    table = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 16)
    ids = np.arange(table.shape[0])
    out = gather_rows(table, ids, np.empty(table.shape, np.float32))
    expected = table.astype(np.float32)
    same = (out == expected) | (np.isnan(out) & np.isnan(expected))
    assert same.all()


def test_rows_are_rounded_to_bfloat16_as_torch_rounds_them_and_widen_exactly() -> None:
    """Ties, subnormals, infinities and NaN included; every bfloat16 comes back."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 4000, dtype=np.uint32)
    bits = np.concatenate([bits, bits & 0xFFFF0000 | 0x8000, [0x7F800000, 0xFF800000, 0x7F7FFFFF]])
    values = bits.astype(np.uint32).view(np.float32).reshape(-1, 1)
    found = torch.from_numpy(convert_rows(values, BFLOAT16).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.nan_to_num(), torch.from_numpy(values).bfloat16().nan_to_num())
    assert torch.equal(found.isnan(), torch.from_numpy(values).isnan())
    every = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16).reshape(-1, 16)
    wide = gather_rows(every, np.arange(len(every)), np.empty(every.shape, np.float32))
    assert np.array_equal(wide.view(np.uint32) >> 16, every.view(np.uint16))


def test_no_ids_leave_nothing_to_do() -> None:
    out = gather_rows(_table(5, 4, np.float32), np.empty(0, np.int64), np.empty((0, 4), np.float32))
    assert out.shape == (0, 4)


def test_a_mapped_file_is_a_table(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", _table(64, 12, np.float32))
    table = np.load(tmp_path / "x.npy", mmap_mode="r")
    ids = np.array([63, 0, 5, 5])
    assert np.array_equal(gather_rows(table, ids, np.empty((4, 12), np.float32)), table[ids])


def test_address_zero_leaves_its_row_alone_and_positions_scatter() -> None:
    table = _table(10, 5, np.float32)
    out = np.zeros((4, 5), np.float32)
    row = table.ctypes.data + 3 * table.strides[0]
    addresses, positions = np.array([row, 0]), np.array([2, 1])
    copy_from_addresses(addresses, table.dtype, out, positions=positions)
    assert np.array_equal(out[2], table[3])
    assert not out[[0, 1, 3]].any()


@pytest.mark.parametrize("bad", [-1, 10, 1 << 40])
def test_an_id_outside_the_table_is_refused(bad: int) -> None:
    with pytest.raises(IndexError, match=rf"\[0, 10\), found {bad}"):
        gather_rows(_table(10, 4, np.float32), np.array([1, bad]), np.empty((2, 4), np.float32))


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    table, ids = _table(10, 4, np.float32), np.array([1])
    with pytest.raises(ValueError, match="expected an output"):
        gather_rows(table, ids, np.empty((1, 5), np.float32))
    with pytest.raises(ValueError, match="C-contiguous output"):
        gather_rows(table, ids, np.empty((1, 8), np.float32)[:, ::2])
    with pytest.raises(ValueError, match="C-contiguous table"):
        gather_rows(table[:, ::2], ids, np.empty((1, 2), np.float32))
    with pytest.raises(DatasetError, match="found int32"):
        gather.check_storage(np.dtype(np.int32))
