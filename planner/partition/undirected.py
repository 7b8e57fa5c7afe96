"""A stored graph as the undirected simple graph that multilevel partitioners need.

Each edge in both directions, once, without self-loops, neighbours ascending. A graph that is like
this already is handed through without a copy.
"""

import typing
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Undirected:
    """Neighbours of v are `indices[indptr[v]:indptr[v + 1]]`."""

    indptr: NDArray[np.int64]
    """[N + 1]."""
    indices: NDArray[Any]
    """[2 * edges]."""
    copied: bool
    """False: the arrays are the caller's."""


def undirected_bytes(num_nodes: int, num_edges: int, id_bytes: int = 4) -> int:
    """Most memory `to_undirected` holds at once: the transpose, sorted rows and the union."""
    pointers = 3 * 8 * (num_nodes + 1)
    return pointers + id_bytes * num_edges * (1 + 1 + 2)


def to_undirected(indptr: NDArray[np.int64], indices: NDArray[Any]) -> Undirected:
    """Union of a graph and its transpose.

    Args:
        indptr: [N + 1].
        indices: [E]; rows need not be sorted, and may repeat a neighbour.
    """
    num_nodes = len(indptr) - 1
    back_ptr, back = _transpose(indptr, indices, num_nodes)
    if _same(indptr, indices, back_ptr, back):
        return Undirected(indptr=indptr, indices=indices, copied=False)
    if not _ascending(indptr, indices):
        # The transpose of the transpose is the graph with sorted rows.
        indptr, indices = _transpose(back_ptr, back, num_nodes)
    union_ptr = _count_union(indptr, indices, back_ptr, back)
    union = np.empty(int(union_ptr[-1]), indices.dtype)
    _fill_union(indptr, indices, back_ptr, back, union_ptr, union)
    return Undirected(indptr=union_ptr, indices=union, copied=True)


def sort_rows(
    indptr: NDArray[np.int64], indices: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The same lists, each ascending; the arrays themselves where they are so already."""
    if _ascending(indptr, indices):
        return indptr, indices
    back_ptr, back = _transpose(indptr, indices, len(indptr) - 1)
    return _transpose(back_ptr, back, len(indptr) - 1)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _transpose(
    indptr: np.ndarray, indices: np.ndarray, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lists of the opposite direction, ascending because sources are visited in order."""
    pointers = np.zeros(num_nodes + 1, np.int64)
    for e in range(indices.size):
        pointers[indices[e] + 1] += 1
    for v in range(num_nodes):
        pointers[v + 1] += pointers[v]
    back = np.empty(indices.size, indices.dtype)
    for u in range(num_nodes):
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            back[pointers[v]] = u
            pointers[v] += 1
    for v in range(num_nodes, 0, -1):  # every pointer has moved on to its list's end
        pointers[v] = pointers[v - 1]
    pointers[0] = 0
    return pointers, back


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _same(indptr: np.ndarray, indices: np.ndarray, back_ptr: np.ndarray, back: np.ndarray) -> bool:
    """Whether the graph is its own transpose, without loops and repeated edges."""
    for v in range(indptr.size - 1):
        if indptr[v + 1] != back_ptr[v + 1]:
            return False
        for e in range(indptr[v], indptr[v + 1]):
            if indices[e] != back[e] or indices[e] == v:
                return False
            if e > indptr[v] and indices[e] == indices[e - 1]:
                return False
    return True


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _ascending(indptr: np.ndarray, indices: np.ndarray) -> bool:
    for v in range(indptr.size - 1):
        for e in range(indptr[v] + 1, indptr[v + 1]):
            if indices[e] < indices[e - 1]:
                return False
    return True


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _merge(a: np.ndarray, b: np.ndarray, v: int, out: np.ndarray, write: bool) -> int:
    """Length of the union of two ascending lists without v; written to `out` if asked."""
    i = j = count = 0
    last = -1
    while i < a.size or j < b.size:
        if j >= b.size or (i < a.size and a[i] <= b[j]):
            u = a[i]
            i += 1
        else:
            u = b[j]
            j += 1
        if u != v and u != last:
            if write:
                out[count] = u
            count += 1
        last = u
    return count


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count_union(
    indptr: np.ndarray, indices: np.ndarray, back_ptr: np.ndarray, back: np.ndarray
) -> np.ndarray:
    pointers = np.zeros(indptr.size, np.int64)
    nothing = np.empty(0, back.dtype)
    for v in range(indptr.size - 1):
        a = indices[indptr[v] : indptr[v + 1]]
        b = back[back_ptr[v] : back_ptr[v + 1]]
        pointers[v + 1] = pointers[v] + _merge(a, b, v, nothing, False)
    return pointers


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _fill_union(
    indptr: np.ndarray,
    indices: np.ndarray,
    back_ptr: np.ndarray,
    back: np.ndarray,
    union_ptr: np.ndarray,
    union: np.ndarray,
) -> None:
    for v in range(indptr.size - 1):
        a = indices[indptr[v] : indptr[v + 1]]
        b = back[back_ptr[v] : back_ptr[v + 1]]
        _merge(a, b, v, union[union_ptr[v] : union_ptr[v + 1]], True)
