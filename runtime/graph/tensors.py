"""Files written by torch.save, as NumPy arrays, without running code from the file.

torch is imported here on use: the other formats must import without it.
"""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.reading import reading


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
        with torch.serialization.safe_globals(safe or []), warnings.catch_warnings():
            # torch says once per process that sparse CSR tensors are in beta.
            warnings.filterwarnings("ignore", message="Sparse CSR")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


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
