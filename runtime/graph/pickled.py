"""Arrays and SciPy matrices out of pickled .npy members, without running anything they name.

A pickle is a programme that calls what it names. Here every name is answered by a recorder of ours
that keeps its arguments, and only names that arrays and matrices consist of are answered at all;
the arrays are then made from the recorded bytes. Object arrays inside stay unread.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Never

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.reading import one_line

PARTS = ("data", "indices", "indptr")
MOST_LINE = 1 << 16
_CODECS = ("latin1", "latin-1", "bytes")


@dataclass(frozen=True, slots=True)
class PickledArray:
    """A .npy member whose values are pickled objects, unread."""

    path: Path
    offset: int
    """Bytes before the pickle."""


def unpickle(
    source: Path, name: str, member: PickledArray
) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """The one array or compressed SciPy matrix that a member holds.

    Args:
        source: the archive, for messages.
        name: of the member.
        member: the member.

    Returns:
        The array, or `data`, `indices`, `indptr` and `shape` of a CSR matrix.

    Raises:
        DatasetError: it holds something else; the line says how to convert it.
    """
    try:
        with member.path.open("rb") as file:
            value = _Recorder(_Bounded(file, member.offset), encoding="latin1").load()
        return _converted(value)
    except Exception as error:
        raise DatasetError(
            f"{source}: expected member {name!r:.60} as plain arrays or a pickled SciPy CSR "
            f"matrix, found other pickled objects ({one_line(error)}), which are not run; "
            "where you trust the file, load it with numpy.load(..., allow_pickle=True) and save "
            "adj_data, adj_indices, adj_indptr, adj_shape, attr_matrix and labels with numpy.savez"
        ) from error


class _Recorded:
    """Stands for an object of a pickle: what it was made from, and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Recorded):
    """numpy.ndarray."""


class _Type(_Recorded):
    """numpy.dtype."""


class _Matrix(_Recorded):
    """A SciPy CSR matrix."""


def _new_array(*_arguments: Any) -> _Array:
    """Stands for NumPy's function that makes an empty array for its state."""
    return _Array()


def _encode(text: Any, codec: Any = "latin1") -> bytes:
    """Bytes as old pickles write them."""
    if not isinstance(text, str) or codec not in _CODECS:
        raise pickle.UnpicklingError("bytes in an unknown encoding")
    return text.encode("latin1")


def _reconstruct(kind: Any, *_arguments: Any) -> Any:
    """Stands for copyreg's function that makes an object of a class."""
    if kind is not _Matrix:
        raise pickle.UnpicklingError("an object of an unknown class")
    return _Matrix()


class _Object:
    """Stands for `object`, as an argument only."""


class _Bounded:
    """A file that refuses to read more than it has, as a damaged pickle may ask."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._file = file
        self._left = file.seek(0, io.SEEK_END) - offset
        file.seek(offset)

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes."""
        if not 0 <= size <= self._left:
            raise pickle.UnpicklingError("truncated")
        self._left -= size
        return self._file.read(size)

    def readline(self) -> bytes:
        """A short line."""
        line = self._file.readline(MOST_LINE)
        self._left -= len(line)
        return line


# The interpreter's pure implementation: the compiled one allocates what a pickle claims.
class _Recorder(pickle._Unpickler):
    """Answers the names of arrays and matrices with recorders, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """The recorder that stands for a name."""
        numpy_core = module in ("numpy.core.multiarray", "numpy._core.multiarray")
        if numpy_core and name == "_reconstruct":
            return _new_array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return {"ndarray": _Array, "dtype": _Type}[name]
        if module.startswith("scipy.sparse") and name in ("csr_matrix", "csr_array"):
            return _Matrix
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if module in ("copyreg", "copy_reg") and name == "_reconstructor":
            return _reconstruct
        if module in ("builtins", "__builtin__") and name == "object":
            return _Object
        raise pickle.UnpicklingError(f"{module}.{name}"[:80])

    def persistent_load(self, pid: Any) -> Never:
        """Refuse references to something outside."""
        raise pickle.UnpicklingError("a reference to something outside the file")


def _converted(value: Any) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Recorders as arrays."""
    if isinstance(value, _Array) and _is_object(value):
        _, shape, _, _, values = value.state
        if shape != () or not isinstance(values, list) or len(values) != 1:
            raise pickle.UnpicklingError("an array of objects")
        value = values[0]
    if isinstance(value, _Array):
        return _array(value)
    if isinstance(value, _Matrix) and isinstance(value.state, Mapping):
        state = value.state
        parts = {part: _array(state[part]) for part in PARTS}
        shape = state.get("_shape", state.get("shape"))
        rows, columns = (int(n) for n in shape)
        return {**parts, "shape": np.array([rows, columns], np.int64)}
    raise pickle.UnpicklingError(type(value).__name__)


def _is_object(value: _Array) -> bool:
    kind = value.state[2]
    return isinstance(kind, _Type) and str(kind.arguments[0]).startswith("O")


def _array(value: Any) -> NDArray[Any]:
    """An array from its recorded shape, type and bytes."""
    if not isinstance(value, _Array):
        raise pickle.UnpicklingError("an array was expected")
    _, shape, kind, fortran, raw = value.state
    text = kind.arguments[0]
    order = kind.state[1] if kind.state else "="
    dtype = np.dtype(str(text))
    if dtype.kind not in "fiubU" or order not in ("<", ">", "=", "|"):
        raise pickle.UnpicklingError(f"an array of {dtype}")
    data = raw if isinstance(raw, bytes) else _encode(raw)
    sizes = [int(n) for n in shape]
    flat = np.frombuffer(data, dtype.newbyteorder(order))
    return flat.reshape(sizes, order="F" if fortran else "C")
