"""Write a dataset folder as a whole or not at all, array by array, without holding one in memory.

Arrays are appended with plain writes, not through a memory map: on a full disk a write fails with
an error, where a mapped page would kill the process.
"""

import errno
import io
import logging
import signal
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.folders import (
    UNNAMED,
    Unfinished,
    free_name,
    is_named,
    real_folder,
    sweep_unfinished,
    take_name,
)
from gnnplan.runtime.graph.format import META_FILE, check_whole, read_meta

_log = logging.getLogger(__name__)


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
        """Append rows, cast to the file's dtype, which must hold whole numbers as they are."""
        if tuple(chunk.shape[1:]) != self.row_shape:
            raise ValueError(f"expected rows of shape {self.row_shape}, found {chunk.shape[1:]}")
        if self.dtype.kind in "iu" and not np.can_cast(chunk.dtype, self.dtype):
            check_whole(self.path, chunk, self.dtype)
        data = np.ascontiguousarray(chunk, dtype=self.dtype)
        self._file.write(data.reshape(-1).view(np.uint8).data)
        self.rows += len(chunk)

    def close(self) -> None:
        """Write the final length into the header and close the file; may be called twice."""
        if self._file.closed:
            return
        with self._file:
            header = self._header()
            if len(header) != self._header_bytes:  # NumPy pads the header for a growing axis 0
                raise RuntimeError("the .npy header changed its length")
            self._file.seek(0)
            self._file.write(header)

    def abandon(self) -> None:
        """Close the file, which is to be deleted."""
        try:
            self._file.close()
        except OSError:
            self._file.raw.close()  # the buffered rest does not fit on the disk

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
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

    As a context manager it removes everything written without a commit, also on SIGTERM. The
    leavings of a killed process are removed by the next one. A DatasetError that names a file in it
    comes out with the target's name. With `overwrite` an earlier dataset is
    kept as `<target>.previous`. Raises DatasetError where the target is occupied
    (`refuse_occupied`), or cannot be written.
    """

    def __init__(self, target: Path, *, overwrite: bool = False) -> None:
        self.target = real_folder(Path(target))
        self._overwrite = overwrite
        refuse_occupied(self.target, overwrite=overwrite)
        with refuse_unwritable(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            sweep_unfinished(self.target.parent)
            self._unfinished = Unfinished(self.target)
        self.folder = self._unfinished.folder
        self._arrays: list[ArrayWriter] = []
        self._ends: AbstractContextManager[None] = ending_on_sigterm()

    def create(self, name: str, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> ArrayWriter:
        """Open `<name>.npy` for appending; `commit` closes it at the latest."""
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
        """Put the folder in its place, once all of it is on the disk; keep an earlier dataset."""
        self.finish_arrays()
        refuse_occupied(self.target, overwrite=self._overwrite)
        self._unfinished.finish()
        earlier = take_name(self.folder, self.target)
        if earlier is not None:
            self._keep(earlier)

    def _keep(self, earlier: Path) -> None:
        kept = earlier.rename(free_name(self.target))
        _log.warning("the earlier dataset of %s is kept in %s", self.target, kept)

    def __enter__(self) -> "Staging":
        self._ends.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for writer in self._arrays:
            writer.abandon()
        if self.folder.exists() and not self._unfinished.is_ours:
            self._keep(self.folder)  # interrupted just when the two had changed places
        self._unfinished.remove()
        self._ends.__exit__(None, None, None)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise DatasetError(_full_text(self.target)) from error
        hidden = str(self.folder)
        if isinstance(error, DatasetError) and hidden in (text := str(error)):
            raise DatasetError(text.replace(hidden, str(self.target))) from None


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def refuse_unwritable(target: Path) -> Generator[None]:
    """Turn any OSError into a DatasetError that the folder cannot be written."""
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


def refuse_occupied(folder: Path, *, overwrite: bool) -> None:
    """Raise DatasetError where a dataset cannot be written to the folder without loss."""
    if not is_named(folder):
        raise DatasetError(f"{folder}: {UNNAMED}")
    if folder.exists() and not folder.is_dir():
        raise DatasetError(f"{folder}: expected a folder to write the dataset to, found a file")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / META_FILE).is_file():
        raise DatasetError(
            f"{folder}: expected an empty folder or an earlier dataset, found other files; "
            "choose another output folder"
        )
    if not overwrite:
        raise DatasetError(
            f"{folder}: expected no dataset there yet, found {_describe(folder)}; choose another "
            f"folder, or overwrite (--overwrite), which keeps that one as {free_name(folder).name}"
        )


def _describe(folder: Path) -> str:
    try:
        meta = read_meta(folder)
    except DatasetError:
        return "a damaged one"
    return f"{meta.name} ({meta.num_nodes:,} nodes, {meta.num_edges:,} edges)"


@contextmanager
def ending_on_sigterm() -> Generator[None]:
    """Let SIGTERM unwind the block in the main thread, unless it has a handler; exit with 143."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + number)
