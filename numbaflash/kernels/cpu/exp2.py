"""2**x on vectors: the exponential of the softmax, whose scores carry a factor of log2(e).

x is split into n + r with n an integer (Cody and Waite; in base 2 the split is exact), 2**r is a polynomial, and 2**n is
an exponent. AVX-512 has an instruction for each end.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import target
from .vector import Vector, element_type, emit_fma

# Minimax polynomials of 2**r in relative error (Remez), with the constant term held at 1 so that 2**0 is 1: the largest
# probability of a row is exact.
AROUND_0 = {  # r in [-1/2, 1/2]
    types.float32: (  # 9.1e-8
        1.0,
        0.6931469776025206,
        0.2402224208549541,
        0.05550733737246338,
        0.00967151263983802,
        0.001326472909586127,
    ),
    types.float64: (  # 3.4e-18
        1.0,
        0.6931471805599453,
        0.2402265069591013,
        0.055504108664820084,
        0.00961812910759412,
        0.0013333558146774649,
        0.00015403530457111362,
        1.525273349309594e-05,
        1.3215435282680663e-06,
        1.0178199586447909e-07,
        7.073783184458317e-09,
        4.4347689286262757e-10,
    ),
}
ABOVE_0 = {  # r in [0, 1]
    types.float32: (  # 8.2e-8
        1.0,
        0.6931513117866643,
        0.2401644501988381,
        0.055799913183840394,
        0.009017030048165935,
        0.0018671302399968692,
    ),
    types.float64: (  # 3.2e-18
        1.0,
        0.693147180559946,
        0.2402265069590633,
        0.055504108665602236,
        0.009618129099550928,
        0.0013333558629561105,
        0.00015403512309781895,
        1.525317505287072e-05,
        1.320836731952627e-06,
        1.0253212219093686e-07,
        6.559530193150301e-09,
        6.263464628088627e-10,
    ),
}
MANTISSA_BITS = {types.float32: 23, types.float64: 52}
EXPONENT_BIAS = {types.float32: 127, types.float64: 1023}


def _constant(value, dtype, vector):
    return ir.Constant(vector, [ir.Constant(element_type(dtype), value)] * vector.count)


def _polynomial(builder, r, coefficients, dtype):
    *first, last = coefficients
    power = _constant(last, dtype, r.type)
    for coefficient in reversed(first):
        power = emit_fma(builder, power, r, _constant(coefficient, dtype, r.type))
    return power


def emit_exp2(builder, x, dtype):
    """`exp2` in integer and float arithmetic, on every processor."""
    vector = x.type
    bits, bias = MANTISSA_BITS[dtype], EXPONENT_BIAS[dtype]
    lowest = _constant(float(-bias), dtype, vector)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    # Adding 1.5 * 2**bits rounds x to an integer, which then stands in the low bits of the sum, the bias already added.
    magic = _constant(1.5 * 2**bits + bias, dtype, vector)
    shifted = builder.fadd(x, magic)
    r = builder.fsub(x, builder.fsub(shifted, magic))
    integers = ir.VectorType(ir.IntType(dtype.bitwidth), vector.count)
    scale = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [bits] * vector.count))
    # A product, not a sum of exponents: NaN stays NaN, and the lowest scale is 0.
    return builder.fmul(_polynomial(builder, r, AROUND_0[dtype], dtype), builder.bitcast(scale, vector))


def emit_exp2_avx512(builder, x, dtype):
    """`exp2` with vreduce (x - floor(x)) and vscalef (times 2**floor(x)): 9 instructions instead of 12."""
    vector = x.type
    suffix = f"{'ps' if dtype == types.float32 else 'pd'}.512"
    mask = ir.IntType(vector.count)
    current_rounding, floor = ir.Constant(ir.IntType(32), 4), ir.Constant(ir.IntType(32), 1)

    def instruction(name, *args):
        signature = ir.FunctionType(vector, [arg.type for arg in args])
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.avx512.mask.{name}.{suffix}"), args)

    r = instruction("reduce", x, floor, x, ir.Constant(mask, -1), current_rounding)
    power = _polynomial(builder, r, ABOVE_0[dtype], dtype)
    # Subnormal results are flushed: arithmetic on them can be a hundred times slower.
    normal = builder.fcmp_unordered(">=", x, _constant(float(1 - EXPONENT_BIAS[dtype]), dtype, vector))
    return instruction("scalef", power, x, ir.Constant(vector, None), builder.bitcast(normal, mask), current_rounding)


def has_avx512(vector: Vector) -> bool:
    return vector.lanes * vector.dtype.bitwidth == 512 and {"avx512f", "avx512dq"} <= target.features()


@intrinsic
def exp2(typingctx, x):
    """2**x of a float vector, for x up to 127 (float32) or 1023 (float64).

    Relative error at most 2e-7 in float32 and 5e-16 in float64; 2**0 is 1, 2**-inf is 0, NaN gives NaN. A result below
    the smallest normal number is 0 or wrong by less than that number.
    """
    if isinstance(x, Vector) and x.dtype in AROUND_0:
        emit = emit_exp2_avx512 if has_avx512(x) else emit_exp2
        return x(x), lambda context, builder, sig, args: emit(builder, args[0], x.dtype)
