"""Whether numbers are finite: where something not finite may lie behind a mask, products must select instead of multiplying by 0."""

from __future__ import annotations

import functools

import numpy as np
from numba import types

from .vector import Simd, any_lane, jit, maximum, words


@functools.cache
def finite_test(compute, lanes):
    """Build ``all_finite(values, row_stride, begin, end, n_columns)``: none of those rows has NaN or infinity.

    The rows from ``begin`` until before ``end`` hold ``n_columns`` contiguous numbers of the type ``compute``.
    """
    simd = Simd(compute, lanes)
    load, splat = simd.load, simd.splat
    load_number, _ = words(compute)
    itemsize = simd.itemsize
    number = np.float64 if compute == types.float64 else np.float32
    zero, largest = number(0), number(np.finfo(number).max)

    @jit
    def all_finite(values, row_stride, begin, end, n_columns):
        for row in range(begin, end):
            place, column = values + row * row_stride, 0
            while column + lanes <= n_columns:
                x = load(place + column * itemsize)
                if any_lane(splat(largest) < maximum(x, splat(zero) - x)) or any_lane(x != x):
                    return False
                column += lanes
            while column < n_columns:
                if not abs(load_number(place + column * itemsize)) <= largest:
                    return False
                column += 1
        return True

    return all_finite
