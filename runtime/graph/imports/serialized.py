"""Arrays out of files of torch.save and out of pickled .npy members, running no code from them.

A pickle is a program that calls what it names. For .npy members every name is answered by a
recorder that keeps its arguments, and only names of arrays and SciPy matrices are answered at all.
Arrays are then made from the recorded bytes. torch is imported on use.
"""

import io
import pickle
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Never

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.format import check_range, one_line, refuse_unreadable
from gnnplan.runtime.graph.imports.source import check_num_nodes

BFLOAT16_DIGITS = 8
"""Binary digits of a value."""
Columns = tuple[NDArray[np.int64], NDArray[Any], NDArray[Any] | None, tuple[int, int]]
"""Pointers, indices, values (None: all are 1) and shape of a sparse matrix."""


def load_torch(path: Path, safe: list[Any] | None = None) -> Any:
    """Load a file of torch.save with weights_only, mapped where its layout allows.

    `safe` are classes that it may hold beside tensors and plain containers.
    """
    import torch

    with refuse_unreadable(path, "a file written by torch.save with tensors and plain containers"):
        mapped = zipfile.is_zipfile(path)
        if mapped:
            _refuse_packed(path)
        with _allow_classes(safe or []), warnings.catch_warnings():
            # torch says once per process that sparse CSR tensors are in beta.
            warnings.filterwarnings("ignore", message="Sparse CSR")
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
            except pickle.UnpicklingError as error:
                named = re.search(r"GLOBAL (\S{1,80})", str(error))
                if named is None:
                    raise
                raise DatasetError(
                    f"{path}: expected tensors and plain containers, found an object of class "
                    f"{named[1]}, which is not made from a file; save data.to_dict() of tensors"
                ) from None


@contextmanager
def _allow_classes(safe: list[Any]) -> Iterator[None]:
    """Let files name these classes, beside those that torch_geometric allows."""
    import torch.serialization as serialization

    earlier = serialization.get_safe_globals()
    others = [entry for entry in earlier if entry is not defaultdict]
    serialization.clear_safe_globals()
    serialization.add_safe_globals([*others, *safe, (_plain_dict, "collections.defaultdict")])
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(earlier)


def _plain_dict(*_factory: Any) -> dict[Any, Any]:
    """Stand for defaultdict, in which PyG keeps look-ups, and which torch does not fill."""
    return {}


def _refuse_packed(path: Path) -> None:
    """Refuse compressed members: torch.save writes none, and a small one may unpack endlessly."""
    with zipfile.ZipFile(path) as archive:
        packed = [m.filename for m in archive.infolist() if m.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise DatasetError(
            f"{path}: expected a file written by torch.save, found compressed members "
            f"({packed[0]!r:.80}); save it again with torch.save"
        )


def to_numpy(path: Path, name: str, value: Any, *, whole: bool = False) -> NDArray[Any]:
    """Return a dense tensor or an array as an array, bfloat16 as float32.

    `whole` refuses bfloat16 so large that one value stands for several whole numbers.
    """
    import torch

    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise DatasetError(f"{path}: expected {name} as a dense tensor, found {_describe(value)}")
    with refuse_unreadable(path, f"{name} as a tensor of numbers"):
        plain = value.detach()
        if plain.dtype == torch.bfloat16:
            plain = plain.float()
            if whole and bool((plain.abs() >= 2**BFLOAT16_DIGITS).any()):
                raise DatasetError(
                    f"{path}: expected {name} of which no digit is lost, found bfloat16 of "
                    f"{2**BFLOAT16_DIGITS} and more; save it as integers"
                )
        return plain.numpy()


def _describe(value: Any) -> str:
    layout = getattr(value, "layout", None)
    return type(value).__name__ if layout is None else f"a tensor of layout {layout}"


class TorchSparse:
    """Stands for torch_sparse's SparseTensor and its storage, which need not be installed."""

    storage: "TorchSparse"
    _row: Any
    _rowptr: Any
    _col: Any
    _value: Any
    _sparse_sizes: Any


def torch_sparse_names() -> list[tuple[Any, str]]:
    """Return the names of torch_sparse's classes with what stands for them, for `load_torch`."""
    return [
        (TorchSparse, "torch_sparse.tensor.SparseTensor"),
        (TorchSparse, "torch_sparse.storage.SparseStorage"),
    ]


def compressed_columns(path: Path, name: str, value: Any, *, transposed: bool) -> Columns:
    """Return a torch tensor or `TorchSparse` matrix row by row, or by column if `transposed`."""
    import torch

    convert = "save Data.edge_index instead: torch.stack(adj_t.t().coo()[:2])"
    if isinstance(value, TorchSparse) and not transposed:
        with refuse_unreadable(path, f"{name} as torch_sparse's SparseTensor ({convert})"):
            return _torch_sparse(path, value.storage)
    if not isinstance(value, torch.Tensor) or value.layout == torch.strided or value.ndim != 2:
        raise DatasetError(
            f"{path}: expected {name} as a sparse matrix, found {_describe(value)}; {convert}"
        )
    with refuse_unreadable(path, f"{name} as a sparse matrix"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CS")
        rows, columns = (int(n) for n in value.shape)
        check_num_nodes(max(rows, columns))
        if value.layout == torch.sparse_coo:
            value = value.coalesce()
            check_range(path / name, value.indices().numpy(), 0, max(rows, columns), "positions")
        table = value.to_sparse_csc() if transposed else value.to_sparse_csr()
        pointers = table.ccol_indices() if transposed else table.crow_indices()
        indices = table.row_indices() if transposed else table.col_indices()
        shape = (columns, rows) if transposed else (rows, columns)
        return pointers.numpy().astype(np.int64), indices.numpy(), table.values().numpy(), shape


def keeps_order(value: Any, *, transposed: bool) -> bool:
    """Tell whether `compressed_columns` returns a matrix's entries in the order of the matrix."""
    import torch

    if isinstance(value, TorchSparse):
        return True
    if value.layout != torch.sparse_coo:
        return value.layout == (torch.sparse_csc if transposed else torch.sparse_csr)
    place = value._indices().flip(0) if transposed else value._indices()
    key = place[0] * int(value.shape[1 - transposed]) + place[1]
    return bool((key[1:] > key[:-1]).all())


def _torch_sparse(path: Path, storage: TorchSparse) -> Columns:
    rows, columns = (int(n) for n in storage._sparse_sizes)
    check_num_nodes(max(rows, columns))
    indices = to_numpy(path, "col", storage._col)
    if getattr(storage, "_rowptr", None) is not None:
        pointers = to_numpy(path, "rowptr", storage._rowptr)
    else:
        row = to_numpy(path, "row", storage._row)
        check_range(path / "row", row, 0, rows, "rows")
        if (np.diff(row) < 0).any():
            raise ValueError("rows that rise")
        pointers = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
    value = getattr(storage, "_value", None)
    values = None if value is None else to_numpy(path, "value", value)
    if values is not None and values.shape != indices.shape:
        raise ValueError("one value per edge")
    return pointers.astype(np.int64), indices, values, (rows, columns)


PARTS = ("data", "indices", "indptr")
MOST_LINE = 1 << 16
_CODECS = ("latin1", "latin-1", "bytes")


@dataclass(frozen=True, slots=True)
class PickledArray:
    """A .npy member whose values are pickled objects, not read yet."""

    path: Path
    offset: int
    """Bytes before the pickle."""


def unpickle(
    source: Path, name: str, member: PickledArray
) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """Return the one array of a member, or the four arrays of its SciPy CSR matrix by name."""
    try:
        with member.path.open("rb") as file:
            value = _Recorder(_Bounded(file, member.offset), encoding="latin1").load()
        return _convert(value)
    except Exception as error:
        raise DatasetError(
            f"{source}: expected member {name!r:.60} as plain arrays or a pickled SciPy CSR "
            f"matrix, found other pickled objects ({one_line(error)}), which are not run; "
            "where you trust the file, load it with numpy.load(..., allow_pickle=True) and save "
            "adj_data, adj_indices, adj_indptr, adj_shape, attr_matrix and labels with numpy.savez"
        ) from error


class _Recorded:
    """Stands for an object of a pickle, with its arguments and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Recorded):
    """Stands for numpy.ndarray."""


class _Type(_Recorded):
    """Stands for numpy.dtype."""


class _Matrix(_Recorded):
    """Stands for a SciPy CSR matrix."""


def _new_array(*_arguments: Any) -> _Array:
    """Stand for NumPy's function that makes an empty array."""
    return _Array()


def _encode(text: Any, codec: Any = "latin1") -> bytes:
    """Stand for the function by which old pickles write bytes."""
    if not isinstance(text, str) or codec not in _CODECS:
        raise pickle.UnpicklingError("bytes in an unknown encoding")
    return text.encode("latin1")


def _reconstruct(kind: Any, *_arguments: Any) -> Any:
    """Stand for copyreg's function that makes an object of a class."""
    if kind is not _Matrix:
        raise pickle.UnpicklingError("an object of an unknown class")
    return _Matrix()


class _Object:
    """Stands for `object`, as an argument only."""


class _Bounded:
    """A file that refuses to read more than it has, for a damaged pickle may ask for it."""

    def __init__(self, file: BinaryIO, offset: int) -> None:
        self._file = file
        self._left = file.seek(0, io.SEEK_END) - offset
        file.seek(offset)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._left:
            raise pickle.UnpicklingError("truncated")
        self._left -= size
        return self._file.read(size)

    def readline(self) -> bytes:
        line = self._file.readline(MOST_LINE)
        self._left -= len(line)
        return line


# The unpickler in Python: the compiled one allocates as much as a pickle claims to hold.
class _Recorder(pickle._Unpickler):
    """Answers the names of arrays and matrices with recorders, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the recorder that stands for a name."""
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
        """Refuse references to something outside the file."""
        raise pickle.UnpicklingError("a reference to something outside the file")


def _convert(value: Any) -> NDArray[Any] | dict[str, NDArray[Any]]:
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
