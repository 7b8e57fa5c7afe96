"""Two machine instructions numba has no name for: 64-bit multiply-high and cache prefetch.

Both are LLVM intrinsics or plain LLVM IR, so no compiler is needed at install time.
"""

from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from runtime.sampling.placed_indices import PlacedType, directory_pointer


@intrinsic
@no_type_check
def mulhi(typing_context: Any, a: Any, b: Any) -> Any:
    """High 64 bits of the 128-bit product of two uint64."""
    del typing_context, a, b
    wide = ir.IntType(128)
    word = ir.IntType(64)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)

    return types.uint64(types.uint64, types.uint64), codegen


def _prefetch(builder: Any, context: Any, array_type: Any, arguments: Any, *, write: int) -> Any:
    """Emit llvm.prefetch(&array[index], write, locality 3, data cache).

    Of placed indices the word of the directory is asked for: it says where the entry lies.
    """
    if isinstance(array_type, PlacedType):
        pointer = directory_pointer(context, builder, array_type, *arguments)
    else:
        array = context.make_array(array_type)(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), cgutils.voidptr_t)
    flag = ir.IntType(32)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch",
        [cgutils.voidptr_t],
        ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag]),
    )
    builder.call(function, [pointer, flag(write), flag(3), flag(1)])
    return context.get_dummy_value()


@intrinsic
@no_type_check
def prefetch_read(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`; never faults, whatever the index."""
    del typing_context, index

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _prefetch(builder, context, signature.args[0], arguments, write=0)

    return types.void(array, types.int64), codegen


@intrinsic
@no_type_check
def prefetch_write(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]` in order to write it; never faults."""
    del typing_context, index

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _prefetch(builder, context, signature.args[0], arguments, write=1)

    return types.void(array, types.int64), codegen
