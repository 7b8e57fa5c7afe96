"""`indices` of which some adjacency lists lie in an array of this rank's own, for every kernel.

A `PlacedIndices` takes the place of the graph's `indices`; positions stay those of the dataset, so
batches are the same to the byte. `indices[p]` is read in `own`, the chosen lists in order of node
id, or in the dataset's mapping. Bit p of a bit set says which; the place in `own` is the number of
set bits before p, counted before each word of 64 (a rank directory: Jacobson, FOCS 1989).

For Python it is the dataset's mapping itself, an ndarray; compiled kernels see a type of its own,
with `indices[p]`, `shape`, `size`, `dtype`, `prefetch_read` and `below_threshold`, and no more.
"""

import operator
from typing import Any, no_type_check

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import (
    NativeValue,
    intrinsic,
    make_attribute_wrapper,
    models,
    overload,
    overload_attribute,
    register_model,
    typeof_impl,
    unbox,
)
from numpy.typing import NDArray

from gnnplan.runtime.intrinsics import emit_prefetch
from gnnplan.runtime.sampling.compiled import kernel

WORD = 64
_FIELDS = ("rest_address", "own_address", "words_address", "num_edges")


class PlacedIndices(np.ndarray):
    """The dataset's `indices`, of which kernels read some lists from `own`."""

    __numba_array_subtype_dispatch__ = True
    own: NDArray[np.integer]
    """Lists held, in order of node id; of the dataset's dtype."""
    words: NDArray[np.uint64]
    """64 bits of the set, and how many bits are set before them. Shape (words, 2)."""

    def __new__(
        cls, indptr: NDArray[np.integer], indices: NDArray[np.integer], nodes: NDArray[np.integer]
    ) -> "PlacedIndices":
        """Copy the lists of `nodes` (distinct, in any order) out of the graph."""
        nodes = np.sort(np.asarray(nodes, np.int64))
        placed = np.asarray(_Writable(np.ascontiguousarray(indices))).view(cls)
        degree = np.asarray(indptr[nodes + 1]) - np.asarray(indptr[nodes])
        placed.own = np.empty(int(degree.sum()), indices.dtype)
        placed.words = np.zeros((indices.shape[0] // WORD + 1, 2), np.uint64)
        plain = np.asarray(indices).view(np.ndarray)
        _copy_lists(np.asarray(indptr).view(np.ndarray), plain, nodes, placed.own, placed.words)
        return placed

    @property
    def rest_address(self) -> int:
        """Address of the dataset's mapping."""
        return self.ctypes.data

    @property
    def own_address(self) -> int:
        """Address of the lists held."""
        return self.own.ctypes.data

    @property
    def words_address(self) -> int:
        """Address of the bit set."""
        return self.words.ctypes.data

    @property
    def num_edges(self) -> int:
        """Length of the dataset's `indices`."""
        return self.shape[0]

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of the lists held and of the bit set."""
        return self.own.nbytes + self.words.nbytes


class _Writable:
    """View of an array's memory that says it may be written, also where the array is read-only.

    Numba finds a compiled kernel by a fingerprint that tells arrays apart by their flags, not by
    their class. Plain lists are read-only to kernels (`check_graph`): these must be told from them.
    """

    def __init__(self, array: NDArray[np.integer]) -> None:
        self.array = array  # keeps the memory
        address = array.ctypes.data
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


@kernel
@no_type_check
def _copy_lists(indptr, indices, nodes, own, words):
    place = 0
    for v in nodes:
        for e in range(indptr[v], indptr[v + 1]):
            own[place] = indices[e]
            place += 1
            words[e // WORD, 0] |= np.uint64(1) << np.uint64(e % WORD)
    before = np.uint64(0)
    for w in range(words.shape[0]):
        words[w, 1] = before
        before += _count_bits(words[w, 0])


class PlacedType(types.Type):
    """What kernels see: three addresses and a length. The object outlives the call."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"PlacedIndices({dtype})")


@typeof_impl.register(PlacedIndices)
def _type_of(value: Any, _context: Any) -> PlacedType:
    return PlacedType(numba.from_dtype(value.dtype))


@register_model(PlacedType)
class _Model(models.StructModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, [(field, types.intp) for field in _FIELDS])


for _field in _FIELDS:
    make_attribute_wrapper(PlacedType, _field, _field)


@unbox(PlacedType)
@no_type_check
def _unbox(kind, value, c):
    struct = cgutils.create_struct_proxy(kind)(c.context, c.builder)
    for field in _FIELDS:
        attribute = c.pyapi.object_getattr_string(value, field)
        setattr(struct, field, c.unbox(types.intp, attribute).value)
        c.pyapi.decref(attribute)
    failed = cgutils.is_not_null(c.builder, c.pyapi.err_occurred())
    return NativeValue(struct._getvalue(), is_error=failed)


def _loader(kind: Any) -> Any:
    """Make an intrinsic that reads a number of one type at an address."""

    @no_type_check
    def typing_of(typing_context, address):
        del typing_context, address

        def codegen(context, builder, signature, arguments):
            word = context.get_value_type(signature.return_type)
            return builder.load(builder.inttoptr(arguments[0], word.as_pointer()))

        return kind(types.intp), codegen

    return intrinsic(typing_of)


_load_word = _loader(types.uint64)
_LOADS = {types.int32: _loader(types.int32), types.int64: _loader(types.int64)}


@no_type_check
def _count_bits_typing(typing_context, word):
    del typing_context, word

    def codegen(context, builder, signature, arguments):
        del context, signature
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), codegen


_count_bits: Any = intrinsic(_count_bits_typing)


@overload(operator.getitem)
@no_type_check
def _get(placed, position):
    if not isinstance(placed, PlacedType) or not isinstance(position, types.Integer):
        return None
    load, item_bytes = _LOADS[placed.dtype], placed.dtype.bitwidth // 8

    def get(placed, position):
        place = np.uint64(position)
        word = placed.words_address + np.int64(place >> np.uint64(6)) * 16
        bits, bit = _load_word(word), place & np.uint64(63)
        if (bits >> bit) & np.uint64(1):
            below = _count_bits(bits & ((np.uint64(1) << bit) - np.uint64(1)))
            at = placed.own_address + np.int64(_load_word(word + 8) + below) * item_bytes
        else:
            at = placed.rest_address + np.int64(place) * item_bytes
        return load(at)

    return get


@overload_attribute(PlacedType, "shape")
@no_type_check
def _shape(placed):
    del placed
    return lambda placed: (placed.num_edges,)


@overload_attribute(PlacedType, "size")
@no_type_check
def _size(placed):
    del placed
    return lambda placed: placed.num_edges


@overload_attribute(PlacedType, "dtype")
@no_type_check
def _dtype(placed):
    dtype = numba.np.numpy_support.as_dtype(placed.dtype)
    return lambda placed: dtype


@no_type_check
def directory_pointer(context: Any, builder: Any, kind: Any, value: Any, position: Any) -> Any:
    """Return an LLVM pointer to the word of the bit set that a position is looked up in."""
    struct = cgutils.create_struct_proxy(kind)(context, builder, value=value)
    word = builder.lshr(position, ir.Constant(position.type, 6))
    offset = builder.shl(word, ir.Constant(position.type, 4))
    return builder.inttoptr(builder.add(struct.words_address, offset), cgutils.voidptr_t)


@no_type_check
def load_lanes(context: Any, builder: Any, kind: Any, at: Any, lanes: int) -> Any:
    """Load an LLVM vector of `lanes` entries from a position on, each from where it lies.

    `at` are the LLVM values of the placed indices and of the position.
    """
    value, position = at
    vector = ir.Constant(ir.VectorType(ir.IntType(kind.dtype.bitwidth), lanes), ir.Undefined)
    signature = kind.dtype(kind, types.int64)
    for lane in range(lanes):
        place = builder.add(position, ir.Constant(position.type, lane))
        entry = context.compile_internal(builder, _read, signature, [value, place])
        vector = builder.insert_element(vector, entry, ir.IntType(32)(lane))
    return vector


@no_type_check
def _read(placed, position):
    return placed[position]


def _prefetch(builder: Any, context: Any, array_type: Any, arguments: Any, *, write: bool) -> Any:
    """Prefetch `array[index]`; of placed indices the word that says where the entry lies."""
    if isinstance(array_type, PlacedType):
        pointer = directory_pointer(context, builder, array_type, *arguments)
    else:
        array = context.make_array(array_type)(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), cgutils.voidptr_t)
    emit_prefetch(builder, pointer, write=write)
    return context.get_dummy_value()


@intrinsic
@no_type_check
def prefetch_read(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`; never faults, whatever the index."""
    del typing_context, index

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _prefetch(builder, context, signature.args[0], arguments, write=False)

    return types.void(array, types.int64), codegen


@intrinsic
@no_type_check
def prefetch_write(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]` in order to write it; never faults."""
    del typing_context, index

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _prefetch(builder, context, signature.args[0], arguments, write=True)

    return types.void(array, types.int64), codegen
