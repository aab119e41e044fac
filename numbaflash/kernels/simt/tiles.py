"""A thread's share of the tiles, in registers: copies, the two products, the mask and the online softmax.

A warp holds ``lanes_m * rows`` queries. Lane (lane_m, lane_n) holds the scores of queries ``i * lanes_m + lane_m`` and keys
``j * lanes_n + lane_n``; of the output, the same queries and, in units of 16 bytes, columns ``j * lanes_n + lane_n``.

Shared memory holds q, k and p swizzled (see `config.Config`); v is read along its rows and lies plain.

Every function here is straight-line code (see `numbaflash.ptx.straight`): tuples of registers under constant indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba.cuda import types

from numbaflash.ptx.straight import straight_line

from .config import UNITS, Config

I32, VOID = types.int32, types.void


@dataclass(frozen=True)
class Types:
    """Numba types of a kernel: elements of the operands (16-bit ones as bits), and tuples of registers."""

    real: types.Type
    operand: types.Type
    lse: types.Type
    memory: types.Type
    scores: types.Type
    output: types.Type
    row: types.Type

    @classmethod
    def of(cls, config: Config) -> Types:
        real = getattr(types, config.compute)
        element = real if config.dtype == config.compute else types.uint16
        return cls(
            real=real,
            operand=types.Array(element, 4, "A"),
            lse=types.Array(real, 3, "A"),
            memory=types.Array(real, 1, "C"),
            scores=types.UniTuple(real, config.rows * config.columns),
            output=types.UniTuple(real, config.rows * config.dim_v // config.lanes_n),
            row=types.UniTuple(real, config.rows),
        )


def zeros(kind, config: Config):
    """``f() -> tuple`` of zeros."""
    return straight_line(kind, (), lambda ops: [ops.constant(config.compute, 0.0)] * len(kind))


def lowest(config: Config):
    """``f() -> row`` of -inf: the maximum of nothing."""
    return straight_line(Types.of(config).row, (), lambda ops: [ops.constant(config.compute, -math.inf)] * config.rows)


# ---- global to shared memory


def copy_q(config: Config):
    """``f(memory, q, batch, first_row, head, scale, thread_row, thread_column)``: a tile of q times scale, swizzled, zeros
    beyond the array.

    ``thread_row`` and ``thread_column`` are the thread's number divided by `q_copy_width`, and the remainder.
    """
    t, width = Types.of(config), q_copy_width(config)
    step = config.threads // width

    batch_size = 32  # loads in flight

    def body(ops, memory, q, batch, first_row, head, scale, thread_row, thread_column):
        _, length, _, dim = q.shape
        index = thread_row * config.dim
        places = list(_walk(ops, ops.place(q, (batch, first_row + thread_row, head, thread_column)), config.q_tile, step, config.dim, width))
        for start in range(0, len(places), batch_size):
            now, loaded = places[start : start + batch_size], []
            for row, chunk, place in now:
                inside = (thread_row < length - first_row - row) & (thread_column < dim - chunk)
                loaded += _to_compute(ops, config, ops.load_row(place, 1, inside))
            for (row, chunk, _), x in zip(now, loaded, strict=True):
                key = (thread_row + row & config.q_mask) * config.vector
                ops.store(memory, index + (thread_column ^ key), row * config.dim + chunk, [x * scale])

    return straight_line(VOID, (t.memory, t.operand, I32, I32, I32, t.real, I32, I32), body)


def copy_kv(config: Config, dim: int, swizzled: bool):
    """``f(memory, base, array, batch, first_row, head, thread_row, thread_column)``: a tile of k or v, zeros beyond the array.

    Asynchronous where the config says so: then the thread sees it after `cp_async.wait`, the block after a barrier.
    ``thread_row`` and ``thread_column`` are the thread's number divided by `kv_copy_width`, and the remainder.
    """
    t, count = Types.of(config), config.vector if config.vectors else 1
    width = kv_copy_width(config)
    step = config.threads // width

    def body(ops, memory, base, array, batch, first_row, head, thread_row, thread_column):
        _, length, _, columns = array.shape
        thread_column = thread_column * count
        corner = ops.place(array, (batch, first_row + thread_row, head, thread_column), contiguous=config.vectors)
        loaded = []
        for row, chunk, place in _walk(ops, corner, config.kv_tile, step, dim, width * count):
            key = (thread_row + row & config.k_mask) * config.vector if swizzled else 0
            index, to = base + thread_row * dim + (thread_column ^ key), row * dim + chunk
            inside = (thread_row < length - first_row - row) & (thread_column < columns - chunk)
            if config.asynchronous:
                ops.copy_row(memory, index, to, place, count, inside)
            else:
                loaded.append((index, to, ops.load_row(place, count, inside)))
        for index, to, values in loaded:
            ops.store(memory, index, to, _to_compute(ops, config, values))

    return straight_line(VOID, (t.memory, I32, t.operand, I32, I32, I32, I32, I32), body)


def _walk(ops, place, rows, row_step, columns, column_step):
    """(row, column, place) of what a thread copies. Each place is a step from the last: fewer registers than as many offsets."""
    for row in range(0, rows, row_step):
        at = place
        for column in range(0, columns, column_step):
            yield row, column, at
            at = ops.moved(at, 3, column_step)
        place = ops.moved(place, 1, row_step)


def q_copy_width(config: Config) -> int:
    """Threads that copy a row of q together, element by element: 128 bytes of shared memory."""
    return min(config.threads, 8 * config.vector)


def kv_copy_width(config: Config) -> int:
    """Threads that copy a row of k or v together."""
    return 8 if config.vectors else q_copy_width(config)


def _to_compute(ops, config, values):
    return values if config.dtype == config.compute else [ops.float32_of(config.dtype, bits) for bits in values]


# ---- products


def add_qk(config: Config):
    """``f(scores, memory, q_row, k_row, q_unit, k_unit) -> scores``: `UNITS` 16-byte units of the head dim of q k^T.

    Rows are indices of the thread's first rows, units the (swizzled) offsets of the first unit in them.
    """
    t, rows, columns, vector = Types.of(config), config.rows, config.columns, config.vector

    def body(ops, s, memory, q_row, k_row, q_unit, k_unit):
        for unit in range(UNITS):
            q_index, k_index = q_row + (q_unit ^ unit * vector), k_row + (k_unit ^ unit * vector)
            q = [ops.load(memory, q_index, i * config.lanes_m * config.dim, vector) for i in range(rows)]
            for j in range(columns):
                k = ops.load(memory, k_index, j * config.lanes_n * config.dim, vector)
                for x in range(vector):
                    for i in range(rows):
                        s[i * columns + j] = ops.fma(q[i][x], k[x], s[i * columns + j])
        return s

    return straight_line(t.scores, (t.scores, t.memory, I32, I32, I32, I32), body)


def add_pv(config: Config):
    """``f(output, memory, p_row, v_index, p_unit) -> output``: `UNITS` 16-byte units of keys of p v."""
    t = Types.of(config)

    def body(ops, o, memory, p_row, v_index, p_unit):
        return _add_pv(ops, config, UNITS, o, memory, p_row, v_index, p_unit, lambda i, key: None)

    return straight_line(t.output, (t.output, t.memory, I32, I32, I32), body)


def add_pv_seen(config: Config):
    """``f(output, memory, p_row, v_index, p_unit, first, last) -> output``: one unit of keys, the pairs of the band only.

    The thread's query i sees keys ``first + i * lanes_m`` to ``last + i * lanes_m`` of the unit. What it does not see takes
    no part, whatever v holds (p is 0 there, but 0 * nan is nan).
    """
    t = Types.of(config)

    def body(ops, o, memory, p_row, v_index, p_unit, first, last):
        return _add_pv(ops, config, 1, o, memory, p_row, v_index, p_unit, lambda i, key: _in_band(config, first, last, i, key))

    return straight_line(t.output, (t.output, t.memory, I32, I32, I32, I32, I32), body)


def _in_band(config, first, last, i, key):
    """Whether the thread's query i sees a key, which its query 0 does from first to last; None without a bound."""
    seen = None
    if config.bounded_left:
        seen = first <= key - i * config.lanes_m
    if config.bounded_right:
        right = last >= key - i * config.lanes_m
        seen = right if seen is None else seen & right
    return seen


def _add_pv(ops, config, key_units, o, memory, p_row, v_index, p_unit, visible):
    rows, vector = config.rows, config.vector
    units = config.dim_v // (config.lanes_n * vector)
    for unit in range(key_units):
        p = [ops.load(memory, p_row + (p_unit ^ unit * vector), i * config.lanes_m * config.kv_tile, vector) for i in range(rows)]
        for x in range(vector):
            key = unit * vector + x
            seen = [visible(i, key) for i in range(rows)]
            for j in range(units):
                v = ops.load(memory, v_index, key * config.dim_v + j * config.lanes_n * vector, vector)
                for y in range(vector):
                    for i in range(rows):
                        at = (i * units + j) * vector + y
                        o[at] = ops.fma(p[i][x], v[y] if seen[i] is None else ops.select(seen[i], v[y], 0.0), o[at])
    return o


def is_finite(config: Config):
    """``f(memory, index) -> int32``: 1 when a 16-byte unit holds neither NaN nor infinity, else 0."""
    t = Types.of(config)

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
                in_band = _in_band(config, first, last, i, key)
                seen = end > key if in_band is None else (end > key) & in_band
                s[i * columns + j] = ops.select(seen, s[i * columns + j], -math.inf)
        return s

    return straight_line(t.scores, (t.scores, I32, I32, I32), body)


def _exp(ops, config, x):
    """exp of a score: base 2 in float32, whose scores are in units of log 2; base e in float64."""
    return ops.exp2(x) if config.compute == "float32" else ops.exp(x)


def _reduce_row(ops, config, values, combine):
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
        top = _reduce_row(ops, config, top, ops.maximum)
        width = len(o) // config.rows
        for i in range(config.rows):
            origin = ops.select(top[i] > -math.inf, top[i], 0.0)  # -inf - -inf is nan
            alpha = _exp(ops, config, m[i] - origin)
            total = l[i] * alpha
            for j in range(columns):
                at = i * columns + j
                s[at] = _exp(ops, config, s[at] - origin)
                total = total + s[at]
            l[i] = total
            for at in range(i * width, (i + 1) * width):
                o[at] = o[at] * alpha
        return s, top, l, o

    return straight_line(types.Tuple((t.scores, t.row, t.row, t.output)), (t.scores, t.row, t.row, t.output), body)


def store_p(config: Config):
    """``f(memory, row_index, lane_n, key, p)``: the thread's probabilities to its rows, ``key`` in elements."""
    t, columns = Types.of(config), config.columns

    def body(ops, memory, row_index, lane_n, key, p):
        for j in range(columns):
            index = row_index + (lane_n + j * config.lanes_n ^ key)
            for i in range(config.rows):
                ops.store(memory, index, i * config.lanes_m * config.kv_tile, [p[i * columns + j]])

    return straight_line(VOID, (t.memory, I32, I32, I32, t.scores), body)


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
    return straight_line(t.row, (t.row,), lambda ops, l: _reduce_row(ops, config, l, lambda a, b: a + b))


def store_lse(config: Config):
    """``f(lse, batch, head, row, writes, m, l)``: log-sum-exp of the thread's queries, if ``writes`` is not 0."""
    t = Types.of(config)
    unit = math.log(2.0) if config.compute == "float32" else 1.0

    def body(ops, lse, batch, head, row, writes, m, l):
        _, _, length = lse.shape
        place = ops.place(lse, (batch, head, row))
        for i in range(config.rows):
            value = ops.select(l[i] == 0.0, ops.constant(config.compute, -math.inf), m[i] * unit + ops.log(l[i]))
            ops.store_row(place, [value], (row < length - i * config.lanes_m) & (writes > 0))
            place = ops.moved(place, 2, config.lanes_m)

    return straight_line(VOID, (t.lse, I32, I32, I32, I32, t.row, t.row), body)
