"""2**x on vectors: the exponential of the softmax, whose scores carry a factor of log2(e).

x is split into n + r with n an integer and r in [-1/2, 1/2] (Cody and Waite; in base 2 the split is exact), 2**r is a
polynomial and 2**n is written into an exponent field.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector import Vector, broadcast, element_type, emit_fma

# Minimax polynomials of 2**r on [-1/2, 1/2] in relative error (Remez), with the constant term held at 1 so that
# 2**0 is 1: the largest probability of a row is exact.
POLYNOMIAL = {
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
MANTISSA_BITS = {types.float32: 23, types.float64: 52}
EXPONENT_BIAS = {types.float32: 127, types.float64: 1023}


def emit_exp2(builder, x, dtype):
    """2**x of a vector of ``dtype``; see `exp2`."""
    vector = x.type
    constant = lambda value: broadcast(builder, ir.Constant(element_type(dtype), value), vector.count)  # noqa: E731
    bits, bias = MANTISSA_BITS[dtype], EXPONENT_BIAS[dtype]
    # Adding 1.5 * 2**bits rounds x to an integer, which then stands in the low bits of the sum, the bias already added.
    magic = constant(1.5 * 2**bits + bias)
    lowest = constant(float(-bias))
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    shifted = builder.fadd(x, magic)
    r = builder.fsub(x, builder.fsub(shifted, magic))
    *first, power = POLYNOMIAL[dtype]
    power = constant(power)
    for coefficient in reversed(first):
        power = emit_fma(builder, power, r, constant(coefficient))
    integers = ir.VectorType(ir.IntType(dtype.bitwidth), vector.count)
    amount = ir.Constant(integers, [bits] * vector.count)
    scale = builder.bitcast(builder.shl(builder.bitcast(shifted, integers), amount), vector)
    return builder.fmul(power, scale)  # a product, not a sum of exponents: NaN stays NaN, and the lowest scale is 0


@intrinsic
def exp2(typingctx, x):
    """2**x of a float vector, for x up to 127 (float32) or 1023 (float64).

    Relative error at most 1.7e-7 in float32 and 4e-16 in float64; 2**0 is 1, 2**-inf is 0, NaN gives NaN. Results below
    the smallest normal number are flushed to 0 or correct to half of that number.
    """
    if isinstance(x, Vector) and x.dtype in POLYNOMIAL:
        return x(x), lambda context, builder, sig, args: emit_exp2(builder, args[0], x.dtype)
