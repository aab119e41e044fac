"""Where an operand lies in memory, and that memory, with a guard around it that tells stray writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .plain import short_repr
from .values import BITS, decode

GUARD = 64  # elements before and after every operand, watched for stray writes


@dataclass(frozen=True, slots=True)
class Placement:
    """How an operand lies in memory. An empty tuple means the plain contiguous choice.

    Attributes
    ----------
    order : tuple of int
        Axes in memory, the slowest first: ``(0, 2, 1, 3)`` is a (B, H, S, D) array passed as a transposed view.
    step : tuple of int
        Every step-th element of an axis is used. Negative runs backwards, 0 repeats one element (inputs only).
    pad : tuple of int
        Unused elements at the end of each axis.
    offset : int
        Elements between an address aligned to 64 bytes and the operand.
    """

    order: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    pad: tuple[int, ...] = ()
    offset: int = 0

    def resolve(self, shape):
        """(elements of memory, first element, strides in elements) of an operand of this shape, guards not counted."""
        rank = len(shape)
        order = self.order or tuple(range(rank))
        step = self.step or (1,) * rank
        pad = self.pad or (0,) * rank
        if sorted(order) != list(range(rank)) or len(step) != rank or len(pad) != rank or min(pad, default=0) < 0 or self.offset < 0:
            raise ValueError(f"{self} does not fit an operand of {rank} axes")
        if 0 in shape:  # no element to lay out; NumPy accepts few strides here
            return self.offset, self.offset, (1,) * rank
        size, first, strides = 1, self.offset, [0] * rank
        for axis in reversed(order):
            n = shape[axis]
            strides[axis] = step[axis] * size
            if step[axis] < 0:
                first += (n - 1) * -step[axis] * size
            size *= (1 if step[axis] == 0 else n * abs(step[axis])) + pad[axis]
        return size + self.offset, first, tuple(strides)

    def without_negative(self) -> Placement:
        """The same memory walked forwards, for libraries that have no negative strides."""
        return replace(self, step=tuple(abs(s) for s in self.step))

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one operand: a flat array of bits, and the view of it that is the operand."""

    dtype: str
    bits: np.ndarray
    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...]

    @classmethod
    def filled(cls, dtype, shape, placement, pattern) -> Memory:
        size, first, strides = placement.resolve(shape)
        itemsize = BITS[dtype].itemsize
        room = np.empty((size + 2 * GUARD) * itemsize + 64, np.uint8)
        skip = -room.ctypes.data % 64
        bits = room[skip : skip + (size + 2 * GUARD) * itemsize].view(BITS[dtype])
        bits[:] = pattern
        return cls(dtype, bits, tuple(shape), GUARD + first, strides)

    def view(self, bits=None, dtype=None) -> np.ndarray:
        """The operand as a strided view of its bits (or of another flat array of the same size)."""
        bits = self.bits if bits is None else bits
        itemsize = bits.itemsize
        return np.ndarray(
            self.shape, dtype or bits.dtype, buffer=bits, offset=self.first * itemsize, strides=tuple(s * itemsize for s in self.strides)
        )

    def outside(self) -> np.ndarray:
        """Boolean, flat: elements that do not belong to the operand."""
        mask = np.ones(self.bits.size, bool)
        self.view(mask)[...] = False
        return mask

    def decoded(self) -> np.ndarray:
        """The operand's values in float64."""
        return decode(self.view(), self.dtype)
