"""The words of granules of a mask of bool, found anew in each call: one block of threads looks at one granule.

A granule's elements are read once, four at a time where they lie so, and nothing is written but its word. Axes that are broadcast have one row, or
one column, of granules.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda
from numba.cuda import types
from numba.cuda.types import int32, uint64, void

from ...problem import GRANULE
from ...ptx.straight import straight_line
from ...toolchain import KernelSource
from .layout import EMPTY, FULL, PARTIAL


@dataclass(frozen=True, slots=True)
class SummaryConfig:
    """``fours``: four neighbours along a row are one load."""

    fours: bool
    threads: int


def build(config: SummaryConfig) -> KernelSource:
    """The kernel. Its parameters: the mask and its strides along batch, heads, queries and keys; the words; heads, rows and columns of granules,
    queries and keys that there are along axes that are not broadcast, and 1 along others."""
    threads, fours = config.threads, config.fours

    def look(ops, mask, batch, head, row, column, of_batch, of_head, of_row, of_column):
        at = mask + ops.wide(batch) * of_batch + ops.wide(head) * of_head + ops.wide(row) * of_row + ops.wide(column) * of_column
        if not fours:
            shown = ops.truth(ops.fetch("u8", at, 0) != 0)
            return [shown, shown]
        word = ops.fetch("b32", at, 0)
        low = 0x7F7F7F7F
        highest = (((word & low) + low) | word) & ~low  # of each byte that is not 0
        return [ops.truth(word != 0), ops.truth(highest == ~low)]

    look = straight_line(types.UniTuple(int32, 2), (types.int64, *(int32,) * 4, *(types.int64,) * 4), look)
    put = straight_line(
        void, (types.int64, int32, int32, int32), lambda ops, words, at, value, writes: ops.put(words + ops.wide(at) * 4, value, writes > 0)
    )

    def summarise(mask, of_batch, of_head, of_row, of_column, words, heads, rows, columns, queries, keys):
        granule, thread = cuda.blockIdx.x, cuda.threadIdx.x
        column, row = granule % columns, granule // columns % rows
        head, batch = granule // (columns * rows) % heads, granule // (columns * rows * heads)
        first_row, first_column = row * GRANULE, column * GRANULE
        width, height = min(GRANULE, keys - first_column), min(GRANULE, queries - first_row)
        step = 4 if fours else 1
        width = width // step
        some, every = 0, 1
        for n in range(thread, width * height, threads):
            found, whole = look(mask, batch, head, first_row + n // width, first_column + n % width * step, of_batch, of_head, of_row, of_column)
            some |= found
            every &= whole
        some, every = cuda.syncthreads_or(some), cuda.syncthreads_and(every)
        word = EMPTY
        if some:
            word = FULL if every else PARTIAL
        put(words, granule, word, 1 if thread == 0 else 0)

    signature = types.void(uint64, *[types.int64] * 4, uint64, *[int32] * 5)
    return KernelSource(summarise, signature, threads=threads)
