"""Files written by torch.save, as NumPy arrays, without running code from the file.

torch is imported here on use: the other formats must import without it.
"""

import pickle
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.memory import check_num_nodes
from runtime.graph.reading import reading
from runtime.graph.validate import check_range


def load_torch(path: Path, safe: list[Any] | None = None) -> Any:
    """torch.load with weights_only, mapped where the file's layout allows.

    Args:
        path: the file.
        safe: classes the file may hold besides tensors and plain containers.

    Raises:
        DatasetError: damaged, or it holds other classes.
    """
    import torch

    with reading(path, "a file written by torch.save with tensors and plain containers"):
        mapped = zipfile.is_zipfile(path)
        if mapped:
            _refuse_packed(path)
        with _allowed(safe or []), warnings.catch_warnings():
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
def _allowed(safe: list[Any]) -> Iterator[None]:
    """Let files name these classes, and those that torch_geometric allows for its own."""
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
    """Stands for defaultdict, which torch does not fill: PyG keeps what it looked up in one."""
    return {}


def _refuse_packed(path: Path) -> None:
    """Refuse compressed members: torch.save writes none, and a small one may hold endless bytes."""
    with zipfile.ZipFile(path) as archive:
        packed = [m.filename for m in archive.infolist() if m.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise DatasetError(
            f"{path}: expected a file written by torch.save, found compressed members "
            f"({packed[0]!r:.80}); save it again with torch.save"
        )


def to_numpy(path: Path, name: str, value: Any) -> NDArray[Any]:
    """A dense tensor (or an array) as an array; bfloat16 becomes float32.

    Raises:
        DatasetError: anything else.
    """
    import torch

    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise DatasetError(f"{path}: expected {name} as a dense tensor, found {_kind(value)}")
    with reading(path, f"{name} as a tensor of numbers"):
        plain = value.detach()
        if plain.dtype == torch.bfloat16:
            plain = plain.float()
        return plain.numpy()


def _kind(value: Any) -> str:
    layout = getattr(value, "layout", None)
    return type(value).__name__ if layout is None else f"a tensor of layout {layout}"


class TorchSparse:
    """Stands for torch_sparse's SparseTensor and its storage in a saved file, as their fields.

    The package need not be installed, and nothing of it is run.
    """

    storage: "TorchSparse"
    _row: Any
    _rowptr: Any
    _col: Any
    _value: Any
    _sparse_sizes: Any


def torch_sparse_names() -> list[tuple[Any, str]]:
    """What a file of `load_torch` may name besides classes: torch_sparse's, read as fields."""
    return [
        (TorchSparse, "torch_sparse.tensor.SparseTensor"),
        (TorchSparse, "torch_sparse.storage.SparseStorage"),
    ]


def compressed_columns(
    path: Path, name: str, value: Any, *, transposed: bool
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any] | None, tuple[int, int]]:
    """Pointers, indices, values and shape of a sparse matrix, row by row.

    Args:
        path: the file.
        name: of the matrix.
        value: a sparse tensor of torch, or a SparseTensor as `TorchSparse`.
        transposed: read it column by column instead.

    Raises:
        DatasetError: anything else, or damaged; the line says how to convert it.
    """
    import torch

    convert = "save Data.edge_index instead: torch.stack(adj_t.t().coo()[:2])"
    if isinstance(value, TorchSparse) and not transposed:
        with reading(path, f"{name} as torch_sparse's SparseTensor ({convert})"):
            return _torch_sparse(path, value.storage)
    if not isinstance(value, torch.Tensor) or value.layout == torch.strided or value.ndim != 2:
        raise DatasetError(
            f"{path}: expected {name} as a sparse matrix, found {_kind(value)}; {convert}"
        )
    with reading(path, f"{name} as a sparse matrix"), warnings.catch_warnings():
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


def _torch_sparse(
    path: Path, storage: TorchSparse
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any] | None, tuple[int, int]]:
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
