"""A thread's share of the tiles, in registers: copies, the two products, the mask and the online softmax.

A warp holds ``lanes_m * rows`` queries. Lane (lane_m, lane_n) holds the scores of queries ``i * lanes_m + lane_m`` and keys
``j * lanes_n + lane_n``; of the output, the same queries and, in units of 16 bytes, columns ``j * lanes_n + lane_n``.

Shared memory holds q, k and p swizzled (see `config.Config`); v is read along its rows and lies plain.

Every function here is straight-line code (see `numbaflash.ptx.straight`): tuples of registers under constant indices.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from numba.cuda import types

from numbaflash.ptx.straight import straight_line

from .config import UNITS, Config, Elements
from .scores import exponential

I32, VOID = types.int32, types.void


@dataclass(frozen=True)
class ArrayTypes:
    """Numba types of elements and arrays; 16-bit elements are bits."""

    real: types.Type
    operand: types.Type
    lse: types.Type
    memory: types.Type

    @classmethod
    def of(cls, config: Elements) -> ArrayTypes:
        real = getattr(types, config.compute)
        element = real if config.dtype == config.compute else types.uint16
        return cls(real, types.Array(element, 4, "A"), types.Array(real, 3, "A"), types.Array(real, 1, "C"))


@dataclass(frozen=True)
class Types(ArrayTypes):
    """Beside them, the tuples of registers of the forward kernel."""

    scores: types.Type
    output: types.Type
    row: types.Type

    @classmethod
    def of(cls, config: Config) -> Types:
        arrays = ArrayTypes.of(config)
        real = arrays.real
        return cls(
            **vars(arrays),
            scores=types.UniTuple(real, config.rows * config.columns),
            output=types.UniTuple(real, config.rows * config.dim_v // config.lanes_n),
            row=types.UniTuple(real, config.rows),
        )


def zeros(kind, config: Elements):
    """``f() -> tuple`` of zeros."""
    return straight_line(kind, (), lambda ops: [ops.constant(config.compute, 0.0)] * len(kind))


def lowest(config: Config):
    """``f() -> row`` of -inf: the maximum of nothing."""
    return straight_line(Types.of(config).row, (), lambda ops: [ops.constant(config.compute, -math.inf)] * config.rows)


# ---- global to shared memory


def copy_scaled(config: Elements, rows: int, dim: int, mask: int):
    """``f(memory, base, array, batch, first_row, head, scale, thread_row, thread_column)``: a tile times scale, swizzled by
    ``row & mask``, zeros beyond the array. Element by element, for what is copied once.

    ``thread_row`` and ``thread_column`` are the thread's number divided by `element_copy_width`, and the remainder.
    """
    t, width = ArrayTypes.of(config), element_copy_width(config, rows)
    step = config.threads // width

    batch_size = 32  # loads in flight

    def body(ops, memory, base, array, batch, first_row, head, scale, thread_row, thread_column):
        _, length, _, columns = array.shape
        index = base + thread_row * dim
        places = list(walk_tile(ops, ops.place(array, (batch, first_row + thread_row, head, thread_column)), rows, step, dim, width))
        for start in range(0, len(places), batch_size):
            now, loaded = places[start : start + batch_size], []
            for row, chunk, place in now:
                inside = (thread_row < length - first_row - row) & (thread_column < columns - chunk)
                loaded += to_compute(ops, config, ops.load_row(place, 1, inside))
            for (row, chunk, _), x in zip(now, loaded, strict=True):
                key = (thread_row + row & mask) * config.vector
                ops.store(memory, index + (thread_column ^ key), row * dim + chunk, [x * scale])

    return straight_line(VOID, (t.memory, I32, t.operand, I32, I32, I32, t.real, I32, I32), body)


def copy_tile(config: Elements, rows: int, dim: int, mask: int = 0):
    """``f(memory, base, array, batch, first_row, head, thread_row, thread_column)``: a tile, swizzled by ``row & mask``, zeros
    beyond the array.

    Asynchronous where the config says so: then the thread sees it after `cp_async.wait`, the block after a barrier.
    ``thread_row`` and ``thread_column`` are the thread's number divided by `copy_width`, and the remainder.
    """
    t, count = ArrayTypes.of(config), config.vector if config.vectors else 1
    width = copy_width(config, rows)
    step = config.threads // width

    def body(ops, memory, base, array, batch, first_row, head, thread_row, thread_column):
        _, length, _, columns = array.shape
        thread_column = thread_column * count
        corner = ops.place(array, (batch, first_row + thread_row, head, thread_column), contiguous=config.vectors)
        places = walk_tile(ops, corner, rows, step, dim, width * count)
        copy_places(
            ops, config, memory, base, places, dim, mask, thread_row, thread_column, columns, lambda row: thread_row < length - first_row - row
        )

    return straight_line(VOID, (t.memory, I32, t.operand, I32, I32, I32, I32, I32), body)


def copy_places(ops, config: Elements, memory, base, places, dim, mask, thread_row, thread_column, columns, there):
    """Straight-line copy of (row, column, place): what a thread copies of a tile of rows of ``dim`` elements, from `columns` of an array.

    ``there(row)`` says whether the array has a row; of others, nothing is read.
    """
    count, loaded = config.vector if config.vectors else 1, []
    for row, chunk, place in places:
        key = (thread_row + row & mask) * config.vector if mask else 0
        index, to = base + thread_row * dim + (thread_column ^ key), row * dim + chunk
        inside = there(row) & (thread_column < columns - chunk)
        if config.asynchronous:
            ops.copy_row(memory, index, to, place, count, inside)
        else:
            loaded.append((index, to, ops.load_row(place, count, inside)))
    for index, to, values in loaded:
        ops.store(memory, index, to, to_compute(ops, config, values))


def walk_tile(ops, place, rows, row_step, columns, column_step):
    """(row, column, place) of what a thread copies. Each place is a step from the last: fewer registers than as many offsets."""
    if rows % row_step or columns % column_step:
        raise ValueError(f"threads that copy {row_step} x {column_step} elements at once would write past a tile of {rows} x {columns}")
    for row in range(0, rows, row_step):
        at = place
        for column in range(0, columns, column_step):
            yield row, column, at
            at = ops.moved(at, 3, column_step)
        place = ops.moved(place, 1, row_step)


def element_copy_width(config: Elements, rows: int) -> int:
    """Threads that copy a row together element by element: 128 bytes of shared memory, more where the tile has fewer rows than threads would
    take at once."""
    return min(config.threads, max(8 * config.vector, config.threads // rows))


def copy_width(config: Elements, rows: int) -> int:
    """Threads that copy a row of a tile together; as `element_copy_width`, in units."""
    return max(8, config.threads // rows) if config.vectors else element_copy_width(config, rows)


def to_compute(ops, config, values):
    return values if config.dtype == config.compute else [ops.float32_of(config.dtype, bits) for bits in values]


# ---- products


def add_dots(config: Elements, share, dim: int):
    """``f(scores, memory, q_row, k_row, q_unit, k_unit) -> scores``: `UNITS` 16-byte units of the head dim of q k^T.

    ``share`` says what a thread holds: ``rows`` of q, ``lanes_m`` apart, times ``columns`` rows of k, ``lanes_n`` apart; rows are
    ``dim`` elements. ``q_row`` and ``k_row`` are indices of the thread's first rows, units the (swizzled) offsets of the first
    unit in them.
    """
    t, rows, columns, vector = ArrayTypes.of(config), share.rows, share.columns, config.vector
    scores = types.UniTuple(t.real, rows * columns)

    def body(ops, s, memory, q_row, k_row, q_unit, k_unit):
        for unit in range(UNITS):
            q_index, k_index = q_row + (q_unit ^ unit * vector), k_row + (k_unit ^ unit * vector)
            q = [ops.load(memory, q_index, i * share.lanes_m * dim, vector) for i in range(rows)]
            for j in range(columns):
                k = ops.load(memory, k_index, j * share.lanes_n * dim, vector)
                for x in range(vector):
                    for i in range(rows):
                        s[i * columns + j] = ops.fma(q[i][x], k[x], s[i * columns + j])
        return s

    return straight_line(scores, (scores, t.memory, I32, I32, I32, I32), body)


def add_pv(config: Config):
    """``f(output, memory, p_row, v_index, p_unit) -> output``: `UNITS` 16-byte units of keys of p v."""
    t = Types.of(config)

    def body(ops, o, memory, p_row, v_index, p_unit):
        return add_weighted(ops, config, config, UNITS, o, memory, p_row, p_unit, _plain_v(ops, config, memory, v_index), always)

    return straight_line(t.output, (t.output, t.memory, I32, I32, I32), body)


def add_pv_seen(config: Config):
    """``f(output, memory, p_row, v_index, p_unit, first, last) -> output``: one unit of keys, the pairs of the band only.

    The thread's query i sees keys ``first + i * lanes_m`` to ``last + i * lanes_m`` of the unit. What it does not see takes
    no part, whatever v holds (p is 0 there, but 0 * nan is nan).
    """
    t = Types.of(config)

    def body(ops, o, memory, p_row, v_index, p_unit, first, last):
        seen = functools.partial(in_band, config, first, last)
        return add_weighted(ops, config, config, 1, o, memory, p_row, p_unit, _plain_v(ops, config, memory, v_index), lambda i, key, p: seen(i, key))

    return straight_line(t.output, (t.output, t.memory, I32, I32, I32, I32, I32), body)


def add_pv_marked(config: Config):
    """As `add_pv`, one unit of keys, without the pairs that `scores.mark` has marked, whatever v holds."""
    t = Types.of(config)

    def body(ops, o, memory, p_row, v_index, p_unit):
        return add_weighted(ops, config, config, 1, o, memory, p_row, p_unit, _plain_v(ops, config, memory, v_index), unmarked(ops))

    return straight_line(t.output, (t.output, t.memory, I32, I32, I32), body)


def always(i, key, p):
    """Visibility for `add_weighted`: every pair."""


def unmarked(ops):
    """The same: pairs that are not marked."""
    return lambda i, key, p: ops.truth(ops.is_negative_zero(p)) == 0


def in_band(config, first, last, i, key):
    """Whether the thread's query i sees a key, which its query 0 does from first to last; None without a bound."""
    at = key - i * config.lanes_m
    return between(first if config.bounded_left else None, last if config.bounded_right else None, at)


def between(first, last, at):
    """Whether a number lies from first to last, of which one or both may be None; None if both are."""
    seen = None if first is None else first <= at
    if last is None:
        return seen
    return last >= at if seen is None else seen & (last >= at)


def _plain_v(ops, config, memory, v_index):
    return lambda key, j: ops.load(memory, v_index, key * config.dim_v + j * config.lanes_n * config.vector, config.vector)


def add_weighted(ops, config, share, key_units, o, memory, p_row, p_unit, values, visible):
    """Straight-line p v over ``key_units`` 16-byte units of keys.

    The thread has ``share.rows`` rows of p, and of the output what ``len(o)`` says; ``values(key, j)`` loads its j-th unit of a
    row of v, ``visible(i, key, p)`` says whether row i, whose weight is p, takes it in (None: always).
    """
    rows, vector = share.rows, config.vector
    units = len(o) // (rows * vector)
    for unit in range(key_units):
        p = [ops.load(memory, p_row + (p_unit ^ unit * vector), i * config.lanes_m * config.kv_tile, vector) for i in range(rows)]
        for x in range(vector):
            key = unit * vector + x
            seen = [visible(i, key, p[i][x]) for i in range(rows)]
            for j in range(units):
                v = values(key, j)
                for y in range(vector):
                    for i in range(rows):
                        at = (i * units + j) * vector + y
                        o[at] = ops.fma(p[i][x], v[y] if seen[i] is None else ops.select(seen[i], v[y], 0.0), o[at])
    return o


def is_finite(config: Elements):
    """``f(memory, index) -> int32``: 1 when a 16-byte unit holds neither NaN nor infinity, else 0."""
    t = ArrayTypes.of(config)

    def body(ops, memory, index):
        total = ops.constant(config.compute, 0.0)
        for x in ops.load(memory, index, 0, config.vector):
            total = ops.fma(x, ops.constant(config.compute, 0.0), total)
        return ops.truth(total == 0.0)

    return straight_line(I32, (t.memory, I32), body)


# ---- softmax


def mask(config: Config):
    """``f(scores, first, last, end) -> scores``: -inf where the key is not visible.

    Keys are counted from the thread's first; its query i sees ``first + i * lanes_m`` to ``last + i * lanes_m``, of those
    before ``end``. A bound that the config does not have is ignored.
    """
    t, columns = Types.of(config), config.columns

    def body(ops, s, first, last, end):
        for j in range(columns):
            key = j * config.lanes_n
            for i in range(config.rows):
                banded = in_band(config, first, last, i, key)
                seen = end > key if banded is None else (end > key) & banded
                s[i * columns + j] = ops.select(seen, s[i * columns + j], -math.inf)
        return s

    return straight_line(t.scores, (t.scores, I32, I32, I32), body)


def reduce_row(ops, config, values, combine):
    """Combine a value a row over the lanes that share the row."""
    for bit in range(config.lanes_n.bit_length() - 1):
        values = [combine(mine, other) for mine, other in zip(values, ops.exchange(values, 2 << bit), strict=True)]
    return values


def online_softmax(config: Config):
    """``f(scores, m, l, output) -> (p, m, l, output)``: a step of the online softmax.

    m is the maximum of each query so far; l (of the thread's own keys) and the output are sums relative to exp(m).
    """
    t, columns = Types.of(config), config.columns

    def body(ops, s, m, l, o):
        top = []
        for i in range(config.rows):
            largest = s[i * columns]
            for j in range(1, columns):
                largest = ops.maximum(largest, s[i * columns + j])
            top.append(ops.maximum(m[i], largest))
        top = reduce_row(ops, config, top, ops.maximum)
        width = len(o) // config.rows
        for i in range(config.rows):
            origin = ops.select(top[i] > -math.inf, top[i], 0.0)  # -inf - -inf is nan
            alpha = exponential(ops, config, m[i] - origin)
            total = l[i] * alpha
            for j in range(columns):
                at = i * columns + j
                s[at] = exponential(ops, config, s[at] - origin)
                total = total + s[at]
            l[i] = total
            for at in range(i * width, (i + 1) * width):
                o[at] = o[at] * alpha
        return s, top, l, o

    return straight_line(types.Tuple((t.scores, t.row, t.row, t.output)), (t.scores, t.row, t.row, t.output), body)


def store_p(config: Elements, share):
    """``f(memory, row_index, column, key, p)``: the thread's probabilities to its rows, from its first column on; ``key`` in
    elements."""
    t, columns = ArrayTypes.of(config), share.columns

    def body(ops, memory, row_index, column, key, p):
        for j in range(columns):
            index = row_index + (column + j * config.lanes_n ^ key)
            for i in range(share.rows):
                ops.store(memory, index, i * config.lanes_m * config.kv_tile, [p[i * columns + j]])

    return straight_line(VOID, (t.memory, I32, I32, I32, types.UniTuple(t.real, share.rows * columns)), body)


# ---- results


def store_output(config: Config):
    """``f(out, batch, row, head, column, output, l)``: the thread's share of the output, divided by l (already reduced)."""
    t, vector = Types.of(config), config.vector
    units = config.dim_v // (config.lanes_n * vector)

    def body(ops, out, batch, row, head, column, o, l):
        _, length, _, columns = out.shape
        row_place = ops.place(out, (batch, row, head, column))
        for i in range(config.rows):
            factor = 1.0 / ops.select(l[i] == 0.0, ops.constant(config.compute, 1.0), l[i])  # no key: 0 / 1
            unit_place = row_place
            for j in range(units):
                place = unit_place
                for y in range(vector):
                    x = o[(i * units + j) * vector + y] * factor
                    x = x if config.dtype == config.compute else ops.bits_of(config.dtype, x)
                    inside = (row < length - i * config.lanes_m) & (column < columns - (j * config.lanes_n * vector + y))
                    ops.store_row(place, [x], inside)
                    place = ops.moved(place, 3, 1)
                unit_place = ops.moved(unit_place, 3, config.lanes_n * vector)
            row_place = ops.moved(row_place, 1, config.lanes_m)

    return straight_line(VOID, (t.operand, I32, I32, I32, I32, t.output, t.row), body)


def reduce_sum(config: Config):
    """``f(l) -> l``, summed over the lanes that share a row."""
    t = Types.of(config)
    return straight_line(t.row, (t.row,), lambda ops, l: reduce_row(ops, config, l, lambda a, b: a + b))


def store_lse(config: Config):
    """``f(lse, batch, head, row, writes, m, l)``: log-sum-exp of the thread's queries, if ``writes`` is not 0."""
    t = Types.of(config)
    unit = 1.0 / config.unit

    def body(ops, lse, batch, head, row, writes, m, l):
        _, _, length = lse.shape
        place = ops.place(lse, (batch, head, row))
        for i in range(config.rows):
            value = ops.select(l[i] == 0.0, ops.constant(config.compute, -math.inf), m[i] * unit + ops.log(l[i]))
            ops.store_row(place, [value], (row < length - i * config.lanes_m) & (writes > 0))
            place = ops.moved(place, 2, config.lanes_m)

    return straight_line(VOID, (t.lse, I32, I32, I32, I32, t.row, t.row), body)
