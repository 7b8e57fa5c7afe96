"""Sixteen neighbours tested at once: their draws against one threshold, as a mask of bits.

Plain LLVM vector code: every backend lowers it to what its processor has, so no compiler is needed
at install time, and the bits are those of `rng.draw(stream, id, 0)` everywhere. With 512-bit
registers a test costs about 50 instructions, 3 per neighbour: less than a look-up in a table of
draws as large as the second-level cache.
"""

from typing import Any, no_type_check

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from runtime.sampling.placed_indices import PlacedType, load_lanes
from runtime.sampling.rng import GOLDEN, MIX_1, MIX_2, ODD

LANES = 16
"""Neighbours per test."""


def _splat(value: Any, builder: Any) -> Any:
    """A vector with the same 64-bit value in every lane."""
    vector = ir.VectorType(ir.IntType(64), LANES)
    if not isinstance(value, ir.Value):
        return ir.Constant(vector, [int(value)] * LANES)
    lane = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(lane, ir.Constant(vector, ir.Undefined), zeros)


def _mix(builder: Any, z: Any) -> Any:
    """`rng.mix` lane by lane."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = builder.xor(z, builder.lshr(z, _splat(shift, builder)))
        z = builder.mul(z, _splat(factor, builder))
    return builder.xor(z, builder.lshr(z, _splat(31, builder)))


@intrinsic
@no_type_check
def below_threshold(
    typing_context: Any, indices: Any, position: Any, stream: Any, threshold: Any
) -> Any:
    """Bit i is set where draw(stream, indices[position + i], 0) < threshold, i = 0 .. 15.

    The caller sees to it that position + 16 does not pass the end of the array.
    """
    del typing_context, position, stream, threshold

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        bits = array_type.dtype.bitwidth
        if isinstance(array_type, PlacedType):
            ids = load_lanes(context, builder, array_type, arguments[:2], LANES)
        else:
            array = context.make_array(array_type)(context, builder, arguments[0])
            vector = ir.VectorType(ir.IntType(bits), LANES)
            pointer = builder.gep(array.data, [arguments[1]])
            pointer = builder.bitcast(pointer, vector.as_pointer())
            ids = builder.load(pointer)
            ids.align = bits // 8
        if bits < 64:
            ids = builder.zext(ids, ir.VectorType(ir.IntType(64), LANES))
        z = builder.xor(_splat(arguments[2], builder), builder.mul(ids, _splat(ODD, builder)))
        z = builder.add(_mix(builder, z), _splat(GOLDEN, builder))
        less = builder.icmp_unsigned("<", _mix(builder, z), _splat(arguments[3], builder))
        mask = builder.bitcast(less, ir.IntType(LANES))
        return builder.zext(mask, ir.IntType(64))

    return types.uint64(indices, types.int64, types.uint64, types.uint64), codegen


@intrinsic
@no_type_check
def trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Position of the lowest set bit of a uint64 that is not zero."""
    del typing_context, word

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen
