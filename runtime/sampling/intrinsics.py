"""Cache prefetch of an array's entry, also of placed indices; see `runtime.intrinsics`."""

from typing import Any, no_type_check

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from runtime.intrinsics import emit_prefetch
from runtime.sampling.placed_indices import PlacedType, directory_pointer


def _prefetch(builder: Any, context: Any, array_type: Any, arguments: Any, *, write: bool) -> Any:
    """Prefetch `array[index]`.

    Of placed indices the word of the directory is asked for: it says where the entry lies.
    """
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
