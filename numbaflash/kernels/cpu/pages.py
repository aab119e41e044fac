"""Paged caches: where the keys and values of a sequence lie."""

from __future__ import annotations

from numba import types

from .config import Kernel
from .convert import COMPUTE, packing
from .vector import jit, words


def paging(kernel: Kernel):
    """Build ``row_of(args, at, operand, page_stride, row_stride, batch, key)``, the address of a key's row, and ``gather``, which brings rows of
    several pages together as `packing` does."""
    itemsize = COMPUTE[kernel.dtype].bitwidth // 8
    load_int32, _ = words(types.int32)
    pack = packing(kernel.dtype, kernel.lanes)

    @jit
    def row_of(args, at, operand, page_stride, row_stride, batch, key):
        entry = key // args.page_size
        page = load_int32(at.page_table + batch * args.page_table_batch + entry * args.page_table_step)
        page = min(max(page, 0), args.pages - 1)  # a wrong number must not lead out of the cache
        return operand + page * page_stride + (key - entry * args.page_size) * row_stride

    @jit
    def gather(args, at, operand, page_stride, row_stride, column_stride, batch, key, n_keys, n_columns, target, target_columns):
        done = 0
        while done < n_keys:
            source = row_of(args, at, operand, page_stride, row_stride, batch, key + done)
            run = min(n_keys - done, args.page_size - (key + done) % args.page_size)
            pack(source, row_stride, column_stride, run, n_columns, target + done * target_columns * itemsize, run, target_columns)
            done += run

    return row_of, gather
