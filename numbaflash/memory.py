"""Which bytes a strided array covers, and whether two of them meet."""

from __future__ import annotations

import numpy as np

MAX_WORK = 100_000
"""Steps of the exact search, about a millisecond; undecided by then counts as an overlap."""


def extent(address: int, shape, strides, itemsize: int) -> tuple[int, int]:
    """First byte, and one past the last; an empty range for an array without elements."""
    if 0 in shape:
        return address, address
    below = above = 0
    for n, step in zip(shape, strides, strict=True):
        reach = (n - 1) * step
        if reach < 0:
            below += reach
        else:
            above += reach
    return address + below, address + above + itemsize


def overlaps(one, other) -> bool:
    """Whether two arrays, each an (address, shape, strides, itemsize), have a byte in common.

    Their extents may cross without that: the interleaved parts of one buffer.
    """
    low, high = extent(*one)
    other_low, other_high = extent(*other)
    if not (low < other_high and other_low < high):
        return False
    try:
        return np.shares_memory(_ghost(*one), _ghost(*other), max_work=MAX_WORK)
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(shape, strides, itemsize: int) -> bool:
    """Whether two elements share a byte, decided by nesting: each axis must step over all that the smaller steps cover.

    True for the few layouts that interleave without nesting, which slices and transposes of an array never do.
    """
    if 0 in shape:
        return False
    covered = itemsize
    for step, n in sorted((abs(step), n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step < covered:
            return True
        covered += (n - 1) * step
    return False


def _ghost(address, shape, strides, itemsize):
    """A NumPy array over an address that is never read, host memory or not."""

    class Memory:
        __array_interface__ = {"version": 3, "data": (address, True), "shape": shape, "strides": strides, "typestr": f"|V{itemsize}"}

    return np.asarray(Memory())
