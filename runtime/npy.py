"""Reading .npy files of others, without asking for the memory that a wrong header claims."""

import io
import math
import mmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


HEADER_TRIES = 5
"""Number of tries to read a header that fails because another thread reads one."""


class _DisturbedError(ValueError):
    """A header could not be read, perhaps because of another thread."""


class _Layout(NamedTuple):
    """Layout of a file whose header was found to be true."""

    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype[Any]
    offset: int
    """Bytes before the values."""
    values_bytes: int


def map_npy(path: Path) -> NDArray[Any]:
    """Map a .npy file of plain values read-only; read scalars and empty arrays.

    It raises OSError, or ValueError for a truncated file or one that holds no plain values.
    """
    with path.open("rb") as file:
        shape, order, dtype, offset, values_bytes = _layout(file)
    if not values_bytes:
        return np.empty(shape, dtype, order)
    if shape:
        return np.asarray(np.memmap(path, dtype, "r", offset, shape, order))
    return np.fromfile(path, dtype, 1, offset=offset).reshape(shape)


def release_pages(array: NDArray[Any]) -> None:
    """Give back the memory of a mapped array's pages, which are read again where needed."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


def npy_of(data: bytes) -> NDArray[Any]:
    """Return the array of a .npy file in memory, read-only, without a copy; else ValueError."""
    shape, order, dtype, offset, values_bytes = _layout(io.BytesIO(data))
    if not values_bytes:
        return np.empty(shape, dtype, order)
    return np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape, order=order)


def read_header(file: io.BufferedIOBase) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, Fortran order and dtype, and leave the file before the values.

    Python 3.11 counts the depth of syntax trees over all threads (python/cpython#106905), and NumPy
    reads a header by one. A whole header may therefore fail with a SystemError while another thread
    makes a tree: it is read again.
    """
    begin = file.tell()
    for _ in range(HEADER_TRIES - 1):
        try:
            return _header(file)
        except _DisturbedError:
            file.seek(begin)
    return _header(file)


def _header(file: io.BufferedIOBase) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"expected .npy version 1 or 2, found {version[0]}.{version[1]}")
        return _HEADERS[version](file)
    except ValueError:
        raise
    except SystemError as error:
        raise _DisturbedError(f"not a .npy header ({error})") from None
    except Exception as error:
        # The header is a Python literal; tokenizer and parser fail with errors of their own.
        raise ValueError(f"not a .npy header ({type(error).__name__})") from None


def _layout(file: io.BufferedIOBase) -> _Layout:
    shape, by_column, dtype = read_header(file)
    offset = file.tell()
    size = file.seek(0, io.SEEK_END)
    if dtype.hasobject:
        raise ValueError("expected plain values, found Python objects")
    if min(shape, default=0) < 0:
        raise ValueError(f"expected a shape, found {shape}")
    needed = math.prod(shape) * dtype.itemsize
    if needed > size - offset:
        raise ValueError(f"expected {needed} bytes of values, found {size - offset}")
    return _Layout(shape, "F" if by_column else "C", dtype, offset, needed)
