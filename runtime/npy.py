"""Read .npy files that others wrote: a wrong header never asks for memory.

`np.load` allocates what a header says before it looks at the file, and a header may say anything.
"""

import io
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class _Layout(NamedTuple):
    """What a header says, once it is known to be true."""

    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype[Any]
    offset: int
    """Bytes before the values."""
    values_bytes: int


def map_npy(path: Path) -> NDArray[Any]:
    """Map a .npy file of plain values read-only; scalars and empty arrays are read.

    Raises:
        OSError: it cannot be opened.
        ValueError: truncated, or not a .npy file of plain values.
    """
    with path.open("rb") as file:
        shape, order, dtype, offset, values_bytes = _layout(file)
    if not values_bytes:
        return np.empty(shape, dtype, order)
    if shape:
        return np.asarray(np.memmap(path, dtype, "r", offset, shape, order))
    return np.fromfile(path, dtype, 1, offset=offset).reshape(shape)


def npy_of(data: bytes) -> NDArray[Any]:
    """The array of a .npy file that is in memory: read-only, without a copy.

    Raises:
        ValueError: truncated, or not a .npy file of plain values.
    """
    shape, order, dtype, offset, values_bytes = _layout(io.BytesIO(data))
    if not values_bytes:
        return np.empty(shape, dtype, order)
    return np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape, order=order)


def _layout(file: io.BufferedIOBase) -> _Layout:
    """Read a header and hold it against the file's size.

    Raises:
        ValueError: it is none, or claims what is not there.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"expected .npy version 1 or 2, found {version[0]}.{version[1]}")
        shape, by_column, dtype = _HEADERS[version](file)
    except ValueError:
        raise
    except Exception as error:
        # The header is a Python literal; tokenizer and parser fail with errors of their own.
        raise ValueError(f"not a .npy header ({type(error).__name__})") from None
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
