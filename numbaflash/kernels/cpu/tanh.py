"""The hyperbolic tangent on vectors and its derivative, for the softcap.

Near 0 it is a polynomial: the quotient of exponentials would lose the small difference from 1. Further out the derivative comes from the
exponential, as 1 - tanh(x)**2 would lose its small difference from 1 in turn.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import types

from .exp2 import exp2
from .vector import Simd, fma, jit, maximum, select

# Interpolation of tanh(x) / x in x**2 at the Chebyshev nodes of [0, 1/4].
NEAR_0 = {
    types.float32: (  # 3.2e-10
        0.9999999996805498,
        -0.3333332412022052,
        0.13332900258320793,
        -0.053893224570864574,
        0.02127382207560088,
        -0.00661201413471437,
    ),
    types.float64: (  # 2.6e-18
        1.0,
        -0.3333333333333308,
        0.13333333333292816,
        -0.05396825394287032,
        0.021869487718845705,
        -0.008863220134250503,
        0.0035919465020130574,
        -0.0014544509176344551,
        0.0005831792400007558,
        -0.00021761442156422375,
        5.663500915911182e-05,
    ),
}


@functools.cache
def tanh_of(compute, lanes):
    """Build ``tanh(x) -> (tanh(x), 1 - tanh(x)**2)`` of a vector: a few units in the last place, NaN gives NaN."""
    number = np.float64 if compute == types.float64 else np.float32
    splat = Simd(compute, lanes).splat
    zero, one, two, half = number(0), number(1), number(2), number(0.5)
    doubled = number(-2 * np.log2(np.e))
    last, *others = (number(coefficient) for coefficient in reversed(NEAR_0[compute]))
    others = tuple(others)

    @jit
    def tanh(x):
        size = maximum(x, splat(zero) - x)
        square = x * x
        power = splat(last)
        for coefficient in others:
            power = fma(power, square, splat(coefficient))
        near = x * power
        decay = exp2(size * splat(doubled))
        rest = splat(two) * decay / (splat(one) + decay)  # 1 - tanh(size)
        far = splat(one) - rest
        far = select(x < splat(zero), splat(zero) - far, far)
        is_near = size < splat(half)
        return select(is_near, near, far), select(is_near, splat(one) - near * near, rest * (splat(two) - rest))

    return tanh
