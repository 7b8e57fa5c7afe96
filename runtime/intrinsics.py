"""Machine instructions that numba has no name for, as LLVM intrinsics or plain LLVM code.

Every backend lowers them to what its processor has: no compiler is needed at install time. With
plain addresses (`intp`) one compiled kernel serves every dtype, row width and mapping; callers
(`features.gather`) check bounds beforehand. Instructions on arrays stand in
`sampling.placed_indices`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE_POINTER = ir.IntType(8).as_pointer()
_INT32 = ir.IntType(32)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def emit_prefetch(builder: Any, pointer: Any, *, write: bool = False) -> None:
    """Emit llvm.prefetch of the line at a byte pointer, into every level of the data cache."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    keep_in_all_levels, data = 3, 1
    flags = (int(write), keep_in_all_levels, data)
    builder.call(function, [pointer, *(ir.Constant(_INT32, value) for value in flags)])


@intrinsic
def prefetch(_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address, for reading, into every level."""
    del address

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, _pointer(builder, arguments[0], ir.IntType(8)))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def pointer(_context: Any, address: Any) -> Any:
    """Return the pointer to an address, for `numba.carray`."""
    del address

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTE_POINTER)

    return types.voidptr(types.intp), codegen


@intrinsic
def mulhi(_context: Any, a: Any, b: Any) -> Any:
    """High 64 bits of the 128-bit product of two uint64."""
    del a, b
    wide, word = ir.IntType(128), ir.IntType(64)

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def copy_bytes(_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Copy `num_bytes` between two addresses that do not overlap, aligned or not."""
    del target, source, num_bytes

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        target, source = (_pointer(builder, a, ir.IntType(8)) for a in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def stream_16_bytes(_context: Any, target: Any, source: Any) -> Any:
    """Copy 16 bytes past the caches to a 16-byte aligned target."""
    del target, source

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        quad = ir.VectorType(_INT32, 4)
        value = builder.load(_pointer(builder, arguments[1], quad))
        value.align = 1
        store = builder.store(value, _pointer(builder, arguments[0], quad))
        store.align = 16
        flag = builder.module.add_metadata([ir.Constant(_INT32, 1)])
        store.set_metadata("nontemporal", flag)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def fence(_context: Any) -> Any:
    """Make streamed stores visible to the other threads before anything that follows."""

    def codegen(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _widen(lanes: int, *, brain: bool = False) -> Any:
    """Make an intrinsic that turns `lanes` float16 or bfloat16 at an address into float32."""

    def typing_of(_context: Any, target: Any, source: Any) -> Any:
        del target, source

        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            half = ir.VectorType(ir.IntType(16) if brain else ir.HalfType(), lanes)
            single = ir.VectorType(_INT32 if brain else ir.FloatType(), lanes)
            value = builder.load(_pointer(builder, arguments[1], half))
            value.align = 1
            if brain:  # the upper half of a float32
                wide = builder.shl(builder.zext(value, single), ir.Constant(single, [16] * lanes))
            else:
                wide = builder.fpext(value, single)
            store = builder.store(wide, _pointer(builder, arguments[0], single))
            store.align = 1
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return intrinsic(typing_of)


widen_8 = _widen(8)
"""widen_8(target, source): eight float16 become float32."""
widen_1 = _widen(1)
"""widen_1(target, source): one float16 becomes float32."""
widen_brain_8 = _widen(8, brain=True)
"""widen_brain_8(target, source): eight bfloat16 become float32."""
widen_brain_1 = _widen(1, brain=True)
"""widen_brain_1(target, source): one bfloat16 becomes float32."""
