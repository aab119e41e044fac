"""A thread's share of the backward's tiles, in registers; what the forward has, too, is in `simt.tiles`.

Scores and their gradients are shared out like the forward's. Lane (lane_m, lane_n) adds to dq in its queries ``i * lanes_m +
lane_m``, to dk and dv in the keys of its `chunk`; everywhere to 16-byte units ``j * lanes_n + lane_n`` of the columns.

Shared memory holds every tile swizzled (see `config.Config`); p and ds lie as queries x keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba.cuda import types

from numbaflash.ptx.straight import straight_line

from ..config import UNITS
from ..scores import bit, exponential, from_real, seen_type
from ..tiles import ArrayTypes, add_weighted, always, between, in_band, reduce_row, to_compute, unmarked
from .config import Config, Share

I32, VOID = types.int32, types.void


@dataclass(frozen=True)
class Types(ArrayTypes):
    """Numba types of the backward kernels."""

    delta: types.Type
    sums: types.Type
    turns: types.Type
    scores: types.Type
    row: types.Type
    dq: types.Type
    dk: types.Type
    dv: types.Type

    @classmethod
    def of(cls, config: Config) -> Types:
        arrays = ArrayTypes.of(config)
        real = arrays.real
        shares = {
            name: types.UniTuple(real, share.rows * share.columns)
            for name, share in (("scores", config.scores), ("dq", config.dq), ("dk", config.dk), ("dv", config.dv))
        }
        return cls(
            **vars(arrays),
            delta=types.Array(real, 2, "A"),
            sums=types.Array(real, 2, "A"),
            turns=types.Array(I32, 1, "A"),
            row=types.UniTuple(real, config.scores.rows),
            **shares,
        )


def chunk(config: Config, share: Share) -> int:
    """Neighbouring rows that a lane has of dk and dv."""
    return math.gcd(share.rows, config.vector)


def place(config: Config, share: Share, near: int = 1, unit: int = 1):
    """``f(thread) -> (row, column, q_swizzle, k_swizzle)``: the thread's first row and column of a product, of ``near`` rows and
    ``unit`` columns side by side; and the swizzle of its rows, and its columns, where they are rows of q and k."""

    def body(ops, thread):
        warp, lane = thread // config.warp_size, thread % config.warp_size
        lane_m, lane_n = lane_place(config, lane)
        row = warp % share.warps_m * (share.lanes_m * share.rows) + lane_m * near
        column = warp // share.warps_m % share.warps_n * (share.lanes_n * share.columns) + lane_n * unit
        return [row, column, (lane_m & config.q_mask) * config.vector, (lane_n & config.k_mask) * config.vector]

    return straight_line(types.UniTuple(I32, 4), (I32,), body)


afresh = straight_line(I32, (I32,), lambda ops, thread: ops.opaque(thread))
"""``f(thread) -> thread``, after which places are computed anew: some instructions, where registers would be kept through the
products."""


def lane_place(config: Config, lane):
    """Row and column of a lane in the grid of its warp: bit 0 counts rows, as in the forward."""
    lanes_n = config.lanes_n
    return lane & 1 | lane // (2 * lanes_n) * 2, lane // 2 % lanes_n


# ---- softmax, and its gradient


def load_lse(config: Config):
    """``f(lse, batch, head, row) -> row``: the LSE of the thread's queries, in units of its exponential's base.

    +inf for a query that sees nothing, so that its weights are 0.
    """
    t = Types.of(config)
    unit = config.unit

    def body(ops, lse, batch, head, row):
        _, _, length = lse.shape
        place = ops.place(lse, (batch, head, row))
        values = []
        for i in range(config.scores.rows):
            (x,) = ops.load_row(place, 1, row < length - i * config.lanes_m)
            values.append(ops.select(x == -math.inf, ops.constant(config.compute, math.inf), x * unit))
            place = ops.moved(place, 2, config.lanes_m)
        return values

    return straight_line(t.row, (t.lse, I32, I32, I32), body)


def only_alive(config: Config):
    """``f(seen, lse) -> seen`` without the pairs of queries that see nothing, or scores of -inf alone; lse as `load_lse` has it."""
    share, kind = config.scores, seen_type(config.scores)

    def body(ops, seen, lse):
        alive = [ops.truth(x != math.inf) for x in lse]
        for word in range(len(kind)):
            for i in range(share.rows):
                bits = sum(bit(at) for at in range(i * share.columns, (i + 1) * share.columns) if at // 32 == word)
                if bits:
                    seen[word] = seen[word] & (alive[i] * bits | ~bits)
        return seen

    return straight_line(kind, (kind, Types.of(config).row), body)


def load_delta(config: Config):
    """``f(delta, batch_head, row) -> row``: delta of the thread's queries."""
    t = Types.of(config)

    def body(ops, delta, batch_head, row):
        _, length = delta.shape
        place = ops.place(delta, (batch_head, row), contiguous=True)
        return [ops.load_row(ops.moved(place, 1, i * config.lanes_m), 1, row < length - i * config.lanes_m)[0] for i in range(config.scores.rows)]

    return straight_line(t.row, (t.delta, I32, I32), body)


def softmax(config: Config):
    """``f(scores, lse) -> p``."""
    t, columns = Types.of(config), config.scores.columns

    def body(ops, s, lse):
        return [exponential(ops, config, x - lse[at // columns]) for at, x in enumerate(s)]

    return straight_line(t.scores, (t.scores, t.row), body)


def softmax_gradient(config: Config):
    """``f(p, dp, delta) -> ds``."""
    t, columns = Types.of(config), config.scores.columns

    def body(ops, p, dp, delta):
        return [weight * (x - delta[at // columns]) for at, (weight, x) in enumerate(zip(p, dp, strict=True))]

    return straight_line(t.scores, (t.scores, t.scores, t.row), body)


def add_scores(config: Config):
    """``f(a, b) -> a + b``, element by element."""
    t = Types.of(config)
    return straight_line(t.scores, (t.scores, t.scores), lambda ops, a, b: [x + y for x, y in zip(a, b, strict=True)])


def load_scores(config: Config):
    """``f(memory, row_index, column, swizzle) -> scores``: what `simt.tiles.store_p` has stored."""
    t, share = Types.of(config), config.scores

    def body(ops, memory, row_index, column, swizzle):
        scores = []
        for i in range(share.rows):
            for j in range(share.columns):
                index = row_index + (column + j * config.lanes_n ^ swizzle)
                scores += ops.load(memory, index, i * config.lanes_m * config.kv_tile, 1)
        return scores

    return straight_line(t.scores, (t.memory, I32, I32, I32), body)


def hide(config: Config):
    """``f(scores, first, last, end, queries) -> scores``: 0 where the query does not see the key.

    Keys are counted from the thread's first, which its query i sees as `simt.tiles.mask` says; ``queries`` of the thread's exist, counted
    from its first.
    """
    t, share = Types.of(config), config.scores

    def body(ops, s, first, last, end, queries):
        for i in range(share.rows):
            exists = queries > i * config.lanes_m
            for j in range(share.columns):
                key, at = j * config.lanes_n, i * share.columns + j
                banded = in_band(config, first, last, i, key)
                seen = exists & (end > key)
                s[at] = ops.select(seen if banded is None else seen & banded, s[at], 0.0)
        return s

    return straight_line(t.scores, (t.scores, I32, I32, I32, I32), body)


# ---- products


PLAIN, BANDED, MARKED = range(3)
"""What a product leaves out, where a tile holds NaN or infinity: nothing, pairs beyond the band, or those that `simt.scores.mark` has marked."""


def add_dq(config: Config, guard: int = PLAIN):
    """``f(dq, memory, ds_row, k_row, column, ds_unit) -> dq``: `UNITS` 16-byte units of keys of ds k.

    ``k_row`` is the index of the first key's row, ``column`` the thread's first column, swizzled for that key. With a guard
    one unit; with that of the band ``first`` and ``last`` at the end: keys of the unit that the thread's first query sees, as
    `simt.tiles.mask` counts them; what a query does not see takes no part, whatever k holds.
    """
    t, share, vector = Types.of(config), config.dq, config.vector

    def body(ops, dq, memory, ds_row, k_row, column, ds_unit, *bounds):
        def k(key, j):
            return ops.load(memory, k_row + (column ^ (key & config.k_mask) * vector), key * config.dim + j * config.lanes_n * vector, vector)

        seen = {PLAIN: always, BANDED: lambda i, key, _: in_band(config, *bounds, i, key), MARKED: unmarked(ops)}[guard]
        return add_weighted(ops, config, share, 1 if guard else UNITS, dq, memory, ds_row, ds_unit, k, seen)

    return straight_line(t.dq, (t.dq, t.memory, *(I32,) * (6 if guard == BANDED else 4)), body)


def add_transposed(config: Config, share: Share, dim: int, guard: int = PLAIN):
    """``f(sums, memory, weights, key, rows, column) -> sums``: weights^T rows of some queries, p^T dout or ds^T q.

    ``weights`` and ``rows`` are the indices of the first query's rows, ``key`` and ``column`` the thread's first. With a guard
    fewer queries, and with that of the band ``first`` and ``last`` at the end: queries that see the thread's first key, counted
    from the first query; a query that does not see a key takes no part in it, whatever its row holds.
    """
    t, vector, near = ArrayTypes.of(config), config.vector, chunk(config, share)
    units = share.columns // vector
    queries = config.lanes_m if guard else config.step
    sums = types.UniTuple(t.real, share.rows * share.columns)

    def body(ops, o, memory, weights, key, rows, column, *bounds):
        def visible(i, query, weight):
            if guard != BANDED:
                return unmarked(ops)(i, query, weight) if guard == MARKED else None
            first, last = bounds
            at = query - (i // near * share.lanes_m * near + i % near)
            return between(first if config.bounded_right else None, last if config.bounded_left else None, at)

        for query in range(queries):
            swizzle = (query & config.q_mask) * vector
            w = []
            for i in range(0, share.rows, near):
                w += ops.load(memory, weights + (key ^ swizzle), query * config.kv_tile + i * share.lanes_m, near)
            seen = [visible(i, query, w[i]) for i in range(share.rows)]
            for j in range(units):
                x = ops.load(memory, rows + (column ^ swizzle), query * dim + j * share.lanes_n * vector, vector)
                for y in range(vector):
                    for i in range(share.rows):
                        at = (i * units + j) * vector + y
                        o[at] = ops.fma(w[i], x[y] if seen[i] is None else ops.select(seen[i], x[y], 0.0), o[at])
        return o

    return straight_line(sums, (sums, t.memory, *(I32,) * (6 if guard == BANDED else 4)), body)


# ---- results


def add_sums(config: Config):
    """``f(sums, tile, thread, dq)``: add the thread's part of dq to the workspace, where threads are neighbours."""
    t = Types.of(config)

    def body(ops, sums, tile, thread, dq):
        place = ops.place(sums, (tile, thread), contiguous=True)
        for i, x in enumerate(dq):
            ops.add_to(ops.moved(place, 1, i * config.threads), x)

    return straight_line(VOID, (t.sums, I32, I32, t.dq), body)


def load_sums(config: Config):
    """``f(sums, tile, thread) -> dq``: the thread's part of dq in the workspace."""
    t = Types.of(config)

    def body(ops, sums, tile, thread):
        place = ops.place(sums, (tile, thread), contiguous=True)
        return [ops.load_row(ops.moved(place, 1, i * config.threads), 1, thread >= 0)[0] for i in range(config.sums)]

    return straight_line(t.dq, (t.sums, I32, I32), body)


def store_rows(config: Config, share: Share, near: int):
    """``f(array, batch, row, head, column, values, factor)``: the thread's part of a gradient, times factor.

    Its rows are ``near`` neighbours, then those of the other lanes, and so on.
    """
    t, vector = Types.of(config), config.vector
    count = vector if config.result_vectors else 1

    def body(ops, array, batch, row, head, column, values, factor):
        _, length, _, columns = array.shape
        corner = ops.place(array, (batch, row, head, column), contiguous=config.result_vectors)
        at = 0
        for i in range(share.rows):
            step = i // near * share.lanes_m * near + i % near
            row_place = ops.moved(corner, 1, step)
            for j in range(share.columns // vector):
                for y in range(0, vector, count):
                    chunk_at = j * share.lanes_n * vector + y
                    results = [x * factor for x in values[at : at + count]]
                    if config.dtype != config.compute:
                        results = [ops.bits_of(config.dtype, x) for x in results]
                    ops.store_row(ops.moved(row_place, 3, chunk_at), results, (row < length - step) & (column < columns - chunk_at))
                    at += count

    return straight_line(VOID, (t.operand, I32, I32, I32, I32, types.UniTuple(t.real, share.rows * share.columns), t.real), body)


def store_dbias(config: Config, array: types.Array):
    """``f(dbias, batch, head, query, key, x)``: an element of the bias's gradient, if there is one, in its dtype."""

    def body(ops, dbias, batch, head, query, key, x):
        inside = (query < dbias.shape[2]) & (key < dbias.shape[3])
        ops.store_row(ops.place(dbias, (batch, head, query, key)), [from_real(ops, config.options.bias, x)], inside)

    return straight_line(VOID, (array, I32, I32, I32, I32, getattr(types, config.compute)), body)


def dot_rows(config: Config):
    """``f(a, b, batch, row, head, lane_n) -> real``: the sum of the products of two rows, over the lanes that share the row."""
    t, step = ArrayTypes.of(config), config.lanes_n

    def body(ops, a, b, batch, row, head, lane_n):
        _, length, _, columns = a.shape
        places = [ops.place(array, (batch, row, head, lane_n)) for array in (a, b)]
        total, in_flight = ops.constant(config.compute, 0.0), 8
        for start in range(0, config.dim_v, in_flight * step):
            loaded = []
            for column in range(start, min(start + in_flight * step, config.dim_v), step):
                inside = (row < length) & (lane_n < columns - column)
                loaded.append([ops.load_row(place, 1, inside) for place in places])
                places = [ops.moved(place, 3, step) for place in places]
            for pair in loaded:
                (x,), (y,) = (to_compute(ops, config, values) for values in pair)
                total = ops.fma(x, y, total)
        return reduce_row(ops, config, [total], lambda x, y: x + y)[0]

    return straight_line(t.real, (t.operand, t.operand, I32, I32, I32, I32), body)
