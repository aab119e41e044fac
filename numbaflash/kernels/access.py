"""Neighbouring elements of a row, of any dtype, as many in one access of global memory as the rows allow: 16 bytes at most."""

from __future__ import annotations

from dataclasses import dataclass

from ..dispatch import Layout
from ..problem import ITEMSIZE

_WIDEST = 16


@dataclass(frozen=True, slots=True)
class Access:
    """How a thread reads and writes elements.

    Attributes
    ----------
    dtype : str
    size : int
        Bytes of an access: those of an element, or more of a row without gaps.
    """

    dtype: str
    size: int

    @property
    def elements(self) -> int:
        return self.size // ITEMSIZE[self.dtype]

    @property
    def word(self) -> str:
        """dtype of the arrays that the kernel sees: two 16-bit elements are a word wherever they are read at once."""
        return self.dtype if ITEMSIZE[self.dtype] > 2 else "uint16" if self.size == 2 else "int32"

    @property
    def words(self) -> int:
        return self.elements // self._of_word

    @property
    def _of_word(self) -> int:
        return 2 if self.word == "int32" else 1

    def layout(self, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape, strides in bytes) of an array in words."""
        if self._of_word == 1:
            return layout.shape, layout.strides
        return (*layout.shape[:-1], layout.shape[-1] // 2), (*layout.strides[:-1], 4)

    def load(self, ops, place, valid):
        """Words from a place on; zeros, and no access, unless valid."""
        return ops.load_row(place, self.words, valid)

    def numbers(self, ops, words):
        """The elements in words as float32, or float64 for float64."""
        if self.word == "int32":
            return [x for word in words for x in ops.pair(self.dtype, word)]
        return [ops.float32_of(self.dtype, word) for word in words] if self.word == "uint16" else words

    def rounded(self, ops, numbers):
        """The opposite: to nearest even."""
        if self.word == "int32":
            return [ops.word_of(self.dtype, *numbers[i : i + 2]) for i in range(0, len(numbers), 2)]
        return [ops.bits_of(self.dtype, x) for x in numbers] if self.word == "uint16" else numbers


def widest(dtype: str, lengths, layouts) -> Access:
    """The widest access to rows of these arrays, at multiples of its size within rows, that divides these numbers of elements."""
    size, itemsize = _WIDEST, ITEMSIZE[dtype]
    while size > itemsize and not (all(n * itemsize % size == 0 for n in lengths) and all(_allows(size, itemsize, each) for each in layouts)):
        size //= 2
    return Access(dtype, size)


def _allows(size, itemsize, layout):
    outer = [step for n, step in zip(layout.shape[:-1], layout.strides, strict=False) if n > 1]
    return layout.alignment % size == 0 and layout.strides[-1] == itemsize and not any(step % size for step in outer)
