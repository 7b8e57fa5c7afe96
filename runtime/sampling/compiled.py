"""Compile kernels with numba, without the GIL, cached on disk and never stale.

Numba notices a change in the file of the function it cached, but not in the files of functions
that are inlined into it. Here a cached kernel is valid only while no file of its package has
changed, nor `runtime.intrinsics`.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numba
from numba.extending import overload

from gnnplan.runtime import intrinsics


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function on its first call, without the GIL, and keep it on disk."""
    return _compiled(function, inline="never")


def inlined_kernel(function: Callable[..., Any]) -> Any:
    """Compile a small helper as `kernel` does; its statements are put in place of each call."""
    return _compiled(function, inline="always")


def form_for(generic: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
    """Make the decorated function what kernels call as `generic` with a first argument of `kinds`.

    The kinds are named tuples of arrays. A loop that calls `generic` is compiled for each kind;
    unlike with a compiled function as an argument, the result can be cached on disk (DEC-103).
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def choose(first: Any, *rest: Any) -> Callable[..., Any] | None:
            del rest
            return function if getattr(first, "instance_class", None) in kinds else None

        overload(generic, strict=False)(choose)
        return function

    return register


def _compiled(function: Callable[..., Any], *, inline: Literal["never", "always"]) -> Any:
    dispatcher: Any = numba.njit(nogil=True, cache=True, inline=inline)(function)
    index: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if not hasattr(index, "_source_stamp"):
        # A numba that keeps its cache otherwise: better compiled anew than stale.
        return numba.njit(nogil=True, inline=inline)(function)
    index._source_stamp = (
        *folder_stamp(_package_folder(function)),
        _file_stamp(Path(intrinsics.__file__)),
    )
    index._load_index = functools.partial(_load_or_forget, index._load_index)
    return dispatcher


def _load_or_forget(load: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """Return what is cached; nothing where it names a type that is gone from the sources."""
    try:
        return load()
    except (AttributeError, ImportError):
        return {}


def _package_folder(function: Callable[..., Any]) -> Path:
    file, depth = Path(inspect.getfile(function)), function.__module__.count(".")
    return file.parents[max(depth - 3, 0)]


def _file_stamp(file: Path) -> tuple[str, int, int]:
    return file.name, file.stat().st_mtime_ns, file.stat().st_size


@functools.cache
def folder_stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, time of change in ns and size of every Python file in and below a folder."""
    return tuple(_file_stamp(file) for file in sorted(folder.rglob("*.py")))
