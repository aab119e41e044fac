"""Elements in memory, as the user has them, to numbers to compute with and back.

16-bit elements are computed with in float32. Rounding is to nearest, ties to even; too large a number becomes an
infinity and NaN stays NaN.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import target
from .vector import Simd, Vector, broadcast, element_type, jit, pointer, words

COMPUTE = {"float16": types.float32, "bfloat16": types.float32, "float32": types.float32, "float64": types.float64}
"""Type that elements of a dtype are computed in."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1}


class _Bits:
    """Integer and float arithmetic on a scalar or a vector alike."""

    def __init__(self, builder, like):
        self.builder = builder
        self.lanes = getattr(like, "count", None)

    def type(self, element):
        return element if self.lanes is None else ir.VectorType(element, self.lanes)

    def constant(self, bits, value):
        constant = ir.Constant(ir.IntType(bits), value)
        return constant if self.lanes is None else broadcast(self.builder, constant, self.lanes)

    def as_float(self, value):
        return self.builder.bitcast(value, self.type(ir.FloatType()))

    def as_int(self, value):
        return self.builder.bitcast(value, self.type(ir.IntType(32)))


def emit_widen(builder, value, dtype, half_instructions=None):
    """Bits of float16 or bfloat16 elements (int16) to float32; other dtypes are what they are."""
    if dtype not in ("float16", "bfloat16"):
        return value
    bits = _Bits(builder, value.type)
    if dtype == "bfloat16":
        wide = builder.zext(value, bits.type(ir.IntType(32)))
        return bits.as_float(builder.shl(wide, bits.constant(32, 16)))
    if target.has_half() if half_instructions is None else half_instructions:
        return builder.fpext(builder.bitcast(value, bits.type(ir.HalfType())), bits.type(ir.FloatType()))
    wide = builder.zext(value, bits.type(ir.IntType(32)))
    magnitude = builder.and_(wide, bits.constant(32, 0x7FFF))
    # Exponent and mantissa in place, the exponent short by 127 - 15: a product with 2**112 is exact, for subnormals too.
    number = builder.fmul(bits.as_float(builder.shl(magnitude, bits.constant(32, 13))), bits.as_float(bits.constant(32, (127 + 112) << 23)))
    special = builder.icmp_unsigned(">=", magnitude, bits.constant(32, 0x7C00))
    number = builder.or_(bits.as_int(number), builder.select(special, bits.constant(32, 0x7F800000), bits.constant(32, 0)))
    sign = builder.shl(builder.and_(wide, bits.constant(32, 0x8000)), bits.constant(32, 16))
    return bits.as_float(builder.or_(number, sign))


def emit_narrow(builder, value, dtype, half_instructions=None):
    """float32 to the bits of float16 or bfloat16 elements (int16); other dtypes are what they are."""
    if dtype not in ("float16", "bfloat16"):
        return value
    bits = _Bits(builder, value.type)
    short = bits.type(ir.IntType(16))
    if dtype == "float16" and (target.has_half() if half_instructions is None else half_instructions):
        return builder.bitcast(builder.fptrunc(value, bits.type(ir.HalfType())), short)
    word = bits.as_int(value)
    is_nan = builder.fcmp_unordered("uno", value, value)
    if dtype == "bfloat16":
        odd = builder.and_(builder.lshr(word, bits.constant(32, 16)), bits.constant(32, 1))
        rounded = builder.lshr(builder.add(word, builder.add(odd, bits.constant(32, 0x7FFF))), bits.constant(32, 16))
        nan = builder.or_(builder.lshr(word, bits.constant(32, 16)), bits.constant(32, 0x40))
        return builder.trunc(builder.select(is_nan, nan, rounded), short)
    magnitude = builder.and_(word, bits.constant(32, 0x7FFFFFFF))
    sign = builder.and_(builder.lshr(word, bits.constant(32, 16)), bits.constant(32, 0x8000))
    # Normal results: the exponent's bias goes from 127 to 15, and half of the last place is added, ties going to even.
    odd = builder.and_(builder.lshr(magnitude, bits.constant(32, 13)), bits.constant(32, 1))
    normal = builder.add(magnitude, builder.add(odd, bits.constant(32, 0xFFF - ((127 - 15) << 23))))
    normal = builder.lshr(normal, bits.constant(32, 13))
    # Subnormal ones: added to 1/2, the sum's last place is the smallest float16, and the addition rounds.
    half = bits.constant(32, 0x3F000000)
    subnormal = builder.sub(bits.as_int(builder.fadd(bits.as_float(magnitude), bits.as_float(half))), half)
    result = builder.select(builder.icmp_unsigned("<", magnitude, bits.constant(32, (127 - 14) << 23)), subnormal, normal)
    result = builder.select(builder.icmp_unsigned(">=", magnitude, bits.constant(32, (127 + 16) << 23)), bits.constant(32, 0x7C00), result)
    result = builder.select(is_nan, bits.constant(32, 0x7E00), result)
    return builder.trunc(builder.or_(result, sign), short)


def emit_number(builder, value, dtype, compute):
    """Bits of elements to numbers of a type that holds them all; of bool, 0 and anything else."""
    lanes = getattr(value.type, "count", None)
    number = element_type(compute) if lanes is None else ir.VectorType(element_type(compute), lanes)
    if dtype == "bool":
        return builder.uitofp(value, number)
    value = emit_widen(builder, value, dtype)
    return value if value.type == number else builder.fpext(value, number)


def emit_element(builder, value, dtype):
    """Numbers, float64 ones too, to the bits of elements."""
    element = getattr(value.type, "element", value.type)
    if isinstance(element, ir.DoubleType) and dtype != "float64":
        value = builder.fptrunc(value, _Bits(builder, value.type).type(ir.FloatType()))
    return emit_narrow(builder, value, dtype)


def stored_type(dtype) -> ir.Type:
    """LLVM type of an element in memory."""
    if dtype == "bool":
        return ir.IntType(8)
    return ir.IntType(16) if ITEMSIZE[dtype] == 2 else element_type(COMPUTE[dtype])


@functools.cache
def elements(dtype, lanes=None, compute=None):
    """Loads and stores that convert.

    Parameters
    ----------
    dtype : str
        Name of the dtype in memory.
    lanes : int or None
        None for one element as a scalar, else that many neighbours as a vector.
    compute : numba type, optional
        Of the numbers, where it is not that of `COMPUTE`.

    Returns
    -------
    load : intrinsic
        ``load(address)`` gives the compute type.
    store : intrinsic
        ``store(address, value)``.
    """
    compute = compute or COMPUTE[dtype]
    stored, number = stored_type(dtype), compute
    if lanes is not None:
        stored, number = ir.VectorType(stored, lanes), Vector(compute, lanes)

    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, sig, args):
            return emit_number(builder, builder.load(pointer(builder, args[0], stored), align=1), dtype, compute)

        return number(types.int64), codegen

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, sig, args):
            builder.store(emit_element(builder, args[1], dtype), pointer(builder, args[0], stored), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, number), codegen

    return load, store


@functools.cache
def packing(dtype, lanes):
    """Build ``pack(source, row_stride, column_stride, n_rows, n_columns, target, target_rows, target_columns)``.

    It copies a matrix of ``dtype`` to contiguous rows of ``target_columns`` numbers of the compute type. What is added
    on the right of a row, and as rows below, is 0.
    """
    itemsize, stored_size = COMPUTE[dtype].bitwidth // 8, ITEMSIZE[dtype]
    store = Simd(COMPUTE[dtype], lanes).store
    load_element, _ = elements(dtype)
    load_elements, _ = elements(dtype, lanes)
    _, store_number = words(COMPUTE[dtype])
    zero = np.float64(0) if COMPUTE[dtype] == types.float64 else np.float32(0)

    @jit
    def pack(source, row_stride, column_stride, n_rows, n_columns, target, target_rows, target_columns):
        for row in range(n_rows):
            start, place = source + row * row_stride, target + row * target_columns * itemsize
            column = 0
            if column_stride == stored_size:
                while column + lanes <= n_columns:
                    store(place + column * itemsize, load_elements(start + column * stored_size))
                    column += lanes
            while column < n_columns:
                store_number(place + column * itemsize, load_element(start + column * column_stride))
                column += 1
            while column < target_columns:
                store_number(place + column * itemsize, zero)
                column += 1
        for i in range(n_rows * target_columns, target_rows * target_columns):
            store_number(target + i * itemsize, zero)

    return pack
