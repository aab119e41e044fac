"""The keys of a tile of queries in parts, each computed by a block of its own, and the kernel that merges what these have found.

A part leaves sums of values relative to exp(m), m and l (of `tiles.online_softmax`), in the dtype of the scores. The merge adds them up in the order
of the parts, so the same number of parts gives the same bits. Sinks join the denominator there, once.
"""

from __future__ import annotations

import math

from numba import cuda
from numba.cuda import types

from numbaflash.ptx.straight import straight_line
from numbaflash.toolchain import KernelSource

from ..config import Config
from ..scores import array_type, by_name, option_types
from ..tiles import I32, VOID, Types
from .config import MergeConfig

AT_ONCE = 16
"""Parts that a thread of the merge has on their way."""


# ---- a part


def tile_of_block(config: Config):
    """``f(block, options) -> (tile, part)``: the parts of a tile are neighbours."""

    def body(ops, block, options):
        parts = by_name(config, options)["parts"]
        return [block // parts, block % parts]

    return straight_line(types.UniTuple(I32, 2), (I32, option_types(config)), body)


def tiles_of_part(config: Config):
    """``f(first, stop, part, options) -> (first, stop)``: a part of these tiles of keys, as long as the others but for the last ones."""

    def body(ops, first, stop, part, options):
        parts = by_name(config, options)["parts"]
        each = (ops.maximum(stop - first, ops.integer(0)) + parts - 1) // parts
        begin = ops.minimum(first + part * each, stop)
        return [begin, ops.minimum(begin + each, stop)]

    return straight_line(types.UniTuple(I32, 2), (I32, I32, I32, option_types(config)), body)


def store_sums(config: Config):
    """``f(sums, entry, row, head, column, output)``: the thread's share of the output to rows of ``config.dim_v`` elements."""
    t, vector = Types.of(config), config.vector
    units = config.dim_v // (config.lanes_n * vector)

    def body(ops, sums, entry, row, head, column, o):
        length = sums.shape[1]
        row_place = ops.place(sums, (entry, row, head, column), contiguous=True)
        for i in range(config.rows):
            place = row_place
            for j in range(units):
                at = (i * units + j) * vector
                ops.store_row(place, o[at : at + vector], row < length - i * config.lanes_m)
                place = ops.moved(place, 3, config.lanes_n * vector)
            row_place = ops.moved(row_place, 1, config.lanes_m)

    return straight_line(VOID, (array_type(config.compute, 4), *(I32,) * 4, t.output), body)


def store_statistics(config: Config):
    """``f(statistics, entry, head, row, writes, m, l)``: m and l, side by side, of the thread's queries, if ``writes`` is not 0."""
    t = Types.of(config)

    def body(ops, statistics, entry, head, row, writes, m, l):
        length = statistics.shape[2] // 2
        place = ops.place(statistics, (entry, head, 2 * row), contiguous=True)
        for i in range(config.rows):
            ops.store_row(place, [m[i], l[i]], (row < length - i * config.lanes_m) & (writes > 0))
            place = ops.moved(place, 2, 2 * config.lanes_m)

    return straight_line(VOID, (t.lse, *(I32,) * 4, t.row, t.row), body)


# ---- the merge


def build_merge(config: MergeConfig) -> KernelSource:
    """The kernel that merges. A block has a row of a head.

    Its parameters: out (batch, rows, heads, columns), lse (batch, heads, rows), the parts' sums and statistics, sinks (heads, rows), parts.
    """
    compute, threads = config.compute, config.threads
    real = getattr(types, compute)
    element = real if config.dtype == compute else types.uint16
    out_type, lse_type, sums_type, sinks_type = types.Array(element, 4, "A"), array_type(compute, 3), array_type(compute, 4), array_type(compute, 2)
    state = types.UniTuple(real, 3)  # m, l and the sum of a column

    def begin(ops, sinks, head, row):
        zero, lowest = ops.constant(compute, 0.0), ops.constant(compute, -math.inf)
        if not config.sinks:
            return [lowest, zero, zero]
        (sink,) = ops.load_row(ops.place(sinks, (head, row)), 1, head >= 0)
        sink = sink * config.unit
        return [sink, exponential_of(ops, sink - _origin(ops, sink)), zero]

    def exponential_of(ops, x):
        return ops.exp(x) if compute == "float64" else ops.exp2(x)

    def add(ops, state, sums, statistics, part, parts, batches, batch, row, head, column):
        found = []
        for n in range(AT_ONCE):
            there, entry = part < parts - n, (part + n) * batches + batch
            m, l = ops.load_row(ops.place(statistics, (entry, head, 2 * row), contiguous=True), 2, there)
            (x,) = ops.load_row(ops.place(sums, (entry, row, head, column), contiguous=True), 1, there & (column < sums.shape[3]))
            found.append((ops.select(there & (l != 0.0), m, -math.inf), l, x))
        m, l, o = state
        top = m
        for each, _, _ in found:
            top = ops.maximum(top, each)
        origin = _origin(ops, top)
        weight = exponential_of(ops, m - origin)
        l, o = l * weight, o * weight
        for each, own, x in found:
            weight = exponential_of(ops, each - origin)
            l, o = ops.fma(own, weight, l), ops.fma(x, weight, o)
        return [top, l, o]

    def store(ops, out, lse, batch, row, head, column, state):
        m, l, o = state
        x = o * (1.0 / ops.select(l == 0.0, ops.constant(compute, 1.0), l))
        x = x if config.dtype == compute else ops.bits_of(config.dtype, x)
        ops.store_row(ops.place(out, (batch, row, head, column)), [x], column < out.shape[3])
        if config.write_lse:
            value = ops.select(l == 0.0, ops.constant(compute, -math.inf), m * (1.0 / config.unit) + ops.log(l))
            ops.store_row(ops.place(lse, (batch, head, row)), [value], column == 0)

    begin = straight_line(state, (sinks_type, I32, I32), begin)
    add = straight_line(state, (state, sums_type, lse_type, *(I32,) * 7), add)
    store = straight_line(VOID, (out_type, lse_type, *(I32,) * 4, state), store)

    def merge(out, lse, sums, statistics, sinks, parts):
        batches, rows, heads = out.shape[0], out.shape[1], out.shape[2]
        block = cuda.blockIdx.x
        head, row, batch = block % heads, block // heads % rows, block // heads // rows
        column = cuda.threadIdx.x
        while column < out.shape[3]:
            state, part = begin(sinks, head, row), 0
            while part < parts:
                state = add(state, sums, statistics, part, parts, batches, batch, row, head, column)
                part += AT_ONCE
            store(out, lse, batch, row, head, column, state)
            column += threads

    return KernelSource(merge, types.void(out_type, lse_type, sums_type, lse_type, sinks_type, types.int32), threads=threads)


def _origin(ops, m):
    return ops.select(m > -math.inf, m, 0.0)  # -inf - -inf is nan
