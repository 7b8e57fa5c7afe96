"""Keep arrays made from final arrays while those live, and find the folder of what was measured.

A plan asks for the same order of the same frequencies for every candidate. Nothing is kept of an
array that nobody has declared final, nor a result that takes a good part of the limit. numpy's own
flag is not used: numba would compile kernels anew for it.
"""

import atexit
import functools
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import InputError

LIMIT_BYTES = 1 << 29
"""Bytes of all that a process keeps."""
LARGEST_BYTES = LIMIT_BYTES // 8
"""Bytes of one kept result."""

Arrays = tuple[NDArray[Any], ...]
_Key = tuple[object, ...]


def make_once(sources: Arrays, name: str, make: Callable[[], Arrays]) -> Arrays:
    """Return what `make` makes of the sources; made once where all of them are declared final.

    Args:
        sources: all arrays that the result depends on.
        name: of what is made of them.
        make: returns new arrays, which become final where they are kept.

    Example:
        >>> p = declare_final(np.array([3.0, 1.0]))
        >>> first, again = (make_once((p,), "double", lambda: (p * 2,))[0] for _ in range(2))
        >>> first is again, first.tolist()
        (True, [6.0, 2.0])
    """
    owners = [_owner(source) for source in sources]
    if not all(map(_STORE.is_final, owners)):
        return make()
    key = (name, *(_memory(s, o) for s, o in zip(sources, owners, strict=True)))
    found = _STORE.find(key)
    if found is None:
        found = make()
        if sum(array.nbytes for array in found) > LARGEST_BYTES:
            return found
        _STORE.put(key, found, owners)
        for array in found:
            declare_final(array)
    return found


def declare_final(array: NDArray[Any]) -> NDArray[Any]:
    """Declare that nobody writes to an array's memory any more, and return the array."""
    _STORE.add(_owner(array))
    return array


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array whose memory a view shows."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _memory(array: NDArray[Any], owner: NDArray[Any]) -> _Key:
    """Return a key of a view; ids are unique while their arrays live."""
    return id(owner), array.ctypes.data, array.shape, array.strides, array.dtype.str


class _Store:
    """Drops least recently used results, and results of arrays that are gone."""

    def __init__(self) -> None:
        self._found: OrderedDict[_Key, Arrays] = OrderedDict()
        self._keys_of: dict[int, set[_Key]] = {}
        """Of final arrays, by their numbers."""
        self._bytes = 0
        # An array may be collected, and its results forgotten, while one is being kept.
        self._lock = threading.RLock()

    def add(self, owner: NDArray[Any]) -> None:
        with self._lock:
            if id(owner) not in self._keys_of:
                self._keys_of[id(owner)] = set()
                weakref.finalize(owner, self._forget, id(owner)).atexit = False

    def is_final(self, owner: NDArray[Any]) -> bool:
        return id(owner) in self._keys_of

    def find(self, key: _Key) -> Arrays | None:
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, key: _Key, made: Arrays, owners: list[NDArray[Any]]) -> None:
        with self._lock:
            self._drop(key)
            self._found[key] = made
            self._bytes += sum(array.nbytes for array in made)
            for owner in owners:
                self._keys_of[id(owner)].add(key)
            while self._bytes > LIMIT_BYTES:
                self._drop(next(iter(self._found)))

    def _forget(self, owner: int) -> None:
        with self._lock:
            for key in self._keys_of.pop(owner, set()):
                self._drop(key)

    def _drop(self, key: _Key) -> None:
        made = self._found.pop(key, None)
        if made is not None:
            self._bytes -= sum(array.nbytes for array in made)


_STORE = _Store()


VARIABLE = "GNNPLAN_CACHE"


def cache_path() -> Path:
    """Return $GNNPLAN_CACHE, or gnnplan in the user's cache folder, whether it exists or not."""
    given = os.environ.get(VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "gnnplan"


def cache_folder() -> Path:
    """Return the folder of `cache_path`, made if it does not exist.

    Where the user's own cache folder cannot be written, a temporary folder takes its place until
    the process ends, and one line says so.

    Raises:
        InputError: GNNPLAN_CACHE names a folder that cannot be written.
    """
    folder = cache_path()
    why = _why_unusable(folder)
    if not why:
        return folder
    if os.environ.get(VARIABLE):
        raise InputError(
            f"{VARIABLE}: expected a folder that can be written, found {folder} ({why}); name "
            "another one, or unset it"
        )
    return _passing_folder(folder, why)


def _why_unusable(folder: Path) -> str:
    """Return why a folder cannot be made or written; empty where it can."""
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"


@functools.cache
def _passing_folder(folder: Path, why: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix="gnnplan-cache-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    sys.stderr.write(
        f"gnnplan: {folder} cannot be used ({why}): planning without a cache, nothing measured is "
        f"kept; set {VARIABLE} to a folder that can be written\n"
    )
    return made
