"""Write a dataset folder as a whole or not at all, array by array, without holding one in memory.

Arrays are appended with plain writes, never through a memory map: on a full disk a write fails with
an error that can be told, where a mapped page would kill the process.
"""

import errno
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from runtime.errors import DatasetError
from runtime.folders import take_name
from runtime.graph.format import META_FILE


class ArrayWriter:
    """A .npy file that grows by appended chunks along its first axis."""

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.row_shape = row_shape
        self.rows = 0
        self._file = path.open("wb")
        self._header_bytes = self._file.write(self._header())

    def append(self, chunk: NDArray[Any]) -> None:
        """Append rows; the chunk is cast to the file's dtype."""
        if tuple(chunk.shape[1:]) != self.row_shape:
            raise ValueError(f"expected rows of shape {self.row_shape}, found {chunk.shape[1:]}")
        data = np.ascontiguousarray(chunk, dtype=self.dtype)
        self._file.write(data.reshape(-1).view(np.uint8).data)
        self.rows += len(chunk)

    def close(self) -> None:
        """Write the final length into the header and close; safe to call twice."""
        if self._file.closed:
            return
        with self._file:
            header = self._header()
            if len(header) != self._header_bytes:  # NumPy pads the header for a growing axis 0
                raise RuntimeError("the .npy header changed its length")
            self._file.seek(0)
            self._file.write(header)

    def abandon(self) -> None:
        """Close the file descriptor of a file that is to be deleted."""
        try:
            self._file.close()
        except OSError:
            # The buffered rest did not fit on the disk; the file is deleted next.
            self._file.raw.close()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def _header(self) -> bytes:
        buffer = io.BytesIO()
        fields = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.rows, *self.row_shape),
        }
        np.lib.format.write_array_header_1_0(buffer, fields)
        return buffer.getvalue()


class Staging:
    """A hidden folder beside the target that becomes the target on `commit`.

    Used as a context manager: leaving it without a commit removes everything written.
    """

    def __init__(self, target: Path) -> None:
        self.target = Path(target)
        refuse_foreign_folder(self.target)
        with writing(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{self.target.name}."
            self.folder = Path(tempfile.mkdtemp(dir=self.target.parent, prefix=prefix))
        self._arrays: list[ArrayWriter] = []

    def create(self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Open `<name>.npy` for appending; closed by `close` or at the latest by `commit`."""
        writer = ArrayWriter(self.folder / f"{name}.npy", dtype, row_shape)
        self._arrays.append(writer)
        return writer

    def save(self, name: str, array: NDArray[Any], dtype: DTypeLike | None = None) -> None:
        """Write a whole array."""
        writer = self.create(name, array.dtype if dtype is None else dtype, array.shape[1:])
        rows = max(1, (1 << 24) // max(1, writer.dtype.itemsize * int(np.prod(array.shape[1:]))))
        for start in range(0, len(array), rows):
            writer.append(array[start : start + rows])
        writer.close()

    def finish_arrays(self) -> None:
        """Close all array files, so that they can be read back."""
        for writer in self._arrays:
            writer.close()

    def commit(self) -> None:
        """Put the folder in its place, replacing an earlier dataset there.

        All of it is on the disk before, so that no name stands for half of it, and what is timed
        next on this disk does not meet its writing.
        """
        self.finish_arrays()
        self.folder.chmod(0o755)
        refuse_foreign_folder(self.target)
        earlier = take_name(self.folder, self.target)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for writer in self._arrays:
            writer.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise DatasetError(_full_text(self.target)) from error


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Say in one line that a folder cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DatasetError(_full_text(target)) from error
        reason = error.strerror or type(error).__name__
        raise DatasetError(
            f"{target}: cannot be written ({reason}); choose another folder"
        ) from error


def _full_text(target: Path) -> str:
    return (
        f"{target}: the disk is full (or a file size limit or quota is reached); nothing was "
        "written, free some space or choose another folder"
    )


def refuse_foreign_folder(folder: Path) -> None:
    """Raise DatasetError where the output exists and holds something other than a dataset."""
    if folder.exists() and not folder.is_dir():
        raise DatasetError(f"{folder}: expected a folder to write the dataset to, found a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / META_FILE).is_file():
        raise DatasetError(
            f"{folder}: expected an empty folder or an earlier dataset, found other files; "
            "choose another output folder"
        )
