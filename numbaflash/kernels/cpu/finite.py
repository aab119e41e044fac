"""Whether numbers are finite: where something not finite may lie behind a mask, products must select instead of multiplying by 0."""

from __future__ import annotations

import functools

import numpy as np
from numba import types

from .vector import Simd, any_lane, fma, jit, words


@functools.cache
def finite_test(compute, lanes):
    """Build ``all_finite(values, row_stride, begin, end, n_columns)``: none of those rows has NaN or infinity.

    The rows from ``begin`` until before ``end`` hold ``n_columns`` contiguous numbers of the type ``compute``.
    """
    simd = Simd(compute, lanes)
    load, splat = simd.load, simd.splat
    load_number, _ = words(compute)
    itemsize = simd.itemsize
    zero = np.float64(0) if compute == types.float64 else np.float32(0)

    @jit
    def all_finite(values, row_stride, begin, end, n_columns):
        bad, rest = splat(zero), zero  # 0 as long as all is finite: 0 times anything else is NaN
        for row in range(begin, end):
            place, column, row_bad = values + row * row_stride, 0, splat(zero)
            while column + lanes <= n_columns:
                row_bad = fma(load(place + column * itemsize), splat(zero), row_bad)
                column += lanes
            bad = bad + row_bad
            while column < n_columns:
                rest += load_number(place + column * itemsize) * zero
                column += 1
        return not any_lane(bad != bad) and rest == zero

    return all_finite
