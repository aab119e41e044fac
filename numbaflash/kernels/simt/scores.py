"""What options do to a thread's scores: `changes` is the one place where a score is changed, `see` the one where visibility is decided.

Forward and gradients share both. A thread has ``share.rows`` x ``share.columns`` pairs: query ``query + i * lanes_m`` and key ``key + j * lanes_n``
from its first ones on, which are absolute numbers here. Bodies get the options of a kernel as one tuple of what `options.Options.parameters` lists.

Which pairs are seen is kept as bits, 32 to a register. A weight, or the gradient of a score, of a pair that is not seen is stored as -0.0, which no
pair that is seen has: the products go by it where a tile holds NaN or infinity.

Mask and bias are read where they lie, an element a score: one load and, for any strides, one 64-bit addition beside the 2 * (D + Dv)
operations of a score's products in the forward; lanes that share a row read 8 neighbours. Softcap takes some 25 operations a score,
dropout some 15 (a Philox block serves eight pairs).
"""

from __future__ import annotations

import math

from numba.cuda import types

from numbaflash.problem import GRANULE
from numbaflash.ptx.straight import straight_line

from ..blocks.layout import BITS, FULL, PARTIAL
from ..dropout import block, byte_of, first_bits, is_kept, round_keys, second_words
from .config import Elements
from .options import as_bits

I32 = types.int32


def option_types(config: Elements) -> types.Tuple:
    """Numba type of the options' parameters."""
    listed = config.options.parameters(config.compute)
    return types.Tuple([array_type(dtype, axes) if axes else getattr(types, dtype) for _, dtype, axes in listed])


def array_type(dtype: str, axes: int) -> types.Array:
    """Numba type of an array of any strides; elements of 16 bits are bits."""
    return types.Array(getattr(types, as_bits(dtype)), axes, "A")


def by_name(config: Elements, options) -> dict:
    """The parameters of the options by their names."""
    return {name: x for (name, _, _), x in zip(config.options.parameters(config.compute), options, strict=True)}


def exponential(ops, config: Elements, x):
    """The weight of a score in the unit of the config."""
    if config.compute == "float64":
        return ops.exp(x)
    return ops.exp2(x) if config.unit != 1.0 else ops.exp2(x * math.log2(math.e))


# ---- lengths


def lengths(config: Elements):
    """``f(seqlen_q, seqlen_k, batch, options) -> (length_q, length_k)`` of a batch entry."""

    def body(ops, seqlen_q, seqlen_k, batch, options):
        named, found = by_name(config, options), []
        for name, most in (("seqlens_q", seqlen_q), ("seqlens_k", seqlen_k)):
            if name in named:
                (length,) = ops.load_row(ops.place(named[name], (batch,)), 1, batch >= 0)
                if getattr(config.options, name) == "int64":
                    length = ops.narrow(ops.minimum(ops.maximum(length, ops.wide(ops.integer(0))), ops.wide(most)))
                most = ops.minimum(ops.maximum(length, ops.integer(0)), most)
            found.append(most)
        return found

    return straight_line(types.UniTuple(I32, 2), (I32, I32, I32, option_types(config)), body)


# ---- which pairs are seen


def seen_type(share) -> types.UniTuple:
    """Bits of a thread's pairs."""
    return types.UniTuple(I32, -(-share.rows * share.columns // 32))


def bit(at: int) -> int:
    """The bit of a pair in its register."""
    return 1 << at % 32 if at % 32 < 31 else -(2**31)


def _is_seen(seen, at):
    return (seen[at // 32] & bit(at)) != 0


def everything(share):
    """``f() -> seen``: every pair."""
    kind = seen_type(share)
    return straight_line(kind, (), lambda ops: [ops.integer(-1)] * len(kind))


def see(config: Elements, share):
    """``f(query, key, length_q, length_k, band_first, band_last, batch, head, options) -> seen``.

    Query i sees the keys from ``i + band_first`` to ``i + band_last``, bounds that the config does not have left aside, of those that lie
    within the lengths and that the mask shows.
    """
    kind = seen_type(share)

    def body(ops, query, key, length_q, length_k, band_first, band_last, batch, head, options):
        named, words = by_name(config, options), [ops.integer(0)] * len(kind)
        if config.options.masked:
            batch, head, query = (ops.opaque(x) for x in (batch, head, query))
        has = _bits(ops, config, named, query, key, queries=length_q, batch=batch, head=head) if config.options.block_mask else None
        queries, keys = length_q - query, length_k - key
        place, rows_apart = (ops.integer(0), 0) if config.options.stacked else (query, config.lanes_m)
        first, last = place + band_first - key, place + band_last - key
        row = ops.place(named["mask"], (batch, head, query, key)) if config.options.mask else None
        for i in range(share.rows):
            place = row
            for j in range(share.columns):
                at, step = i * share.columns + j, j * config.lanes_n - i * rows_apart
                seen = (queries > i * config.lanes_m) & (keys > j * config.lanes_n)
                if config.bounded_left:
                    seen &= first <= step
                if config.bounded_right:
                    seen &= last >= step
                if config.options.mask:
                    seen = ops.load_byte(place, seen) != 0
                    place = ops.moved(place, 3, config.lanes_n)
                if config.options.block_mask:
                    seen &= has(i, j)
                words[at // 32] = words[at // 32] | (ops.truth(seen) << at % 32)
            row = ops.moved(row, 2, config.lanes_m) if config.options.mask else None
        return words

    return straight_line(kind, (I32,) * 8 + (option_types(config),), body)


def _bits(ops, config, named, query, key, queries, batch, head):
    """Straight-line ``f(i, j)``: whether a block mask shows a thread's pair. Its keys, a multiple of their span from the first one on, are read once
    for each of its queries."""
    rows, array = {}, named["block_mask"]

    def row(i, group):
        at, granule = query + i * config.lanes_m, key // GRANULE + group
        there = (queries > at) & (granule < named["block_columns"])
        (word,) = ops.load_row(ops.place(array, (batch, head, at // GRANULE * named["block_columns"] + granule)), 1, there)
        first = named["block_bits"] + (word - PARTIAL) * BITS + at % GRANULE * 2
        found = []
        for half in (0, 1):
            (bits,) = ops.load_row(ops.place(array, (batch, head, first + half)), 1, word >= PARTIAL)
            found.append(ops.select(word == FULL, ops.integer(-1), bits))
        return found

    def has(i, j):
        group = j * config.lanes_n // GRANULE
        if (i, group) not in rows:
            rows[i, group] = row(i, group)
        bit = (key + j * config.lanes_n) % GRANULE
        low, high = rows[i, group]
        return ((ops.select(bit >= 32, high, low) >> (bit % 32)) & 1) != 0

    return has


# ---- the list of a tile


def list_of(config: Elements):
    """``f(tile, batch, head, options) -> number`` of the list of a tile of a batch entry and a head, or heads that share it."""

    def body(ops, tile, batch, head, options):
        named = by_name(config, options)
        return batch * named["lists_batch"] + head * named["lists_head"] + tile

    return straight_line(I32, (I32, I32, I32, option_types(config)), body)


def list_word(config: Elements):
    """``f(number, place, options)``: a word of a list: its count, or an entry; see `numbaflash.kernels.blocks.lists`."""
    return _word_of(config, "lists")


def rank_of(config: Elements):
    """``f(number, block, options)``: the turn of the tile of a list at a block."""
    return _word_of(config, "ranks")


def _word_of(config, name):
    def body(ops, row, column, options):
        return ops.load_row(ops.place(by_name(config, options)[name], (row, column)), 1, row >= 0)[0]

    return straight_line(I32, (I32, I32, option_types(config)), body)


def any_seen(share):
    """``f(seen) -> int32``: not 0 when the thread has a pair that is seen."""
    kind = seen_type(share)

    def body(ops, seen):
        total = seen[0]
        for word in seen[1:]:
            total = total | word
        return total

    return straight_line(I32, (kind,), body)


def hide(config: Elements, share):
    """``f(scores, seen) -> scores``: -inf where a pair is not seen."""
    return _of_seen(config, share, lambda x: x, -math.inf)


def mark(config: Elements, share):
    """``f(values, seen) -> values``: -0.0 where a pair is not seen, and nowhere else."""
    return _of_seen(config, share, lambda x: x + 0.0, -0.0)


def _of_seen(config, share, value, other):
    scores = types.UniTuple(getattr(types, config.compute), share.rows * share.columns)

    def body(ops, s, seen):
        return [ops.select(_is_seen(seen, at), value(x), other) for at, x in enumerate(s)]

    return straight_line(scores, (scores, seen_type(share)), body)


# ---- what a score is


def changes(ops, config: Elements, share, options, query, key, length_q, length_k, batch, head):
    """Straight-line ``f(i, j, product) -> (score, slope)``: the score of a pair in the unit of the config, and its derivative by the product, None
    for 1. ``options`` are by name."""
    stacked = config.options.stacked
    if config.options.alibi:
        rows = [(batch, head, query + i * config.lanes_m) for i in range(share.rows)] if stacked else [(batch, head)]
        slopes = [ops.load_row(ops.place(options["alibi_slopes"], row), 1, _exists(row, length_q))[0] for row in rows]
        falling = [ops.real(config.compute, slope) * -config.unit for slope in slopes]
        place = length_k - (1 if stacked else length_q) if config.options.per_entry else options["offset"]
        offset = ops.real(config.compute, (place if stacked else query + place) - key)
    bias = _bias(ops, config, share, options, query, key, length_q, length_k, batch, head) if config.options.bias else None

    def change(i, j, x):
        slope = None
        if config.options.softcap:
            t = ops.tanh(x * options["inverse_cap"])
            x, slope = t * options["cap"], 1.0 - t * t
        if config.options.alibi:
            apart = float((0 if stacked else i * config.lanes_m) - j * config.lanes_n)
            x = ops.fma(ops.absolute(offset + apart), falling[i if stacked else 0], x)
        if bias is not None:
            x = x + bias[i * share.columns + j]
        return x, slope

    return change


def _exists(row, length_q):
    """Whether there is a head, or a row of stacked ones."""
    return row[2] < length_q if len(row) > 2 else row[0] >= 0


def _bias(ops, config, share, options, query, key, length_q, length_k, batch, head):
    """A thread's elements of the bias in natural units, 0 beyond the lengths."""
    row, found = ops.place(options["bias"], (batch, head, query, key)), []
    for i in range(share.rows):
        place = row
        for j in range(share.columns):
            inside = (length_q - query > i * config.lanes_m) & (length_k - key > j * config.lanes_n)
            found.append(to_real(ops, config, config.options.bias, *ops.load_row(place, 1, inside)))
            place = ops.moved(place, 3, config.lanes_n)
        row = ops.moved(row, 2, config.lanes_m)
    return found


def to_real(ops, config: Elements, dtype: str, x):
    """An element of an array, bits where it has 16 of them, in the dtype of the scores."""
    return ops.real(config.compute, ops.float32_of(dtype, x) if dtype in ("float16", "bfloat16") else x)


def from_real(ops, dtype: str, x):
    """The opposite."""
    return ops.bits_of(dtype, ops.real("float32", x)) if dtype in ("float16", "bfloat16") else ops.real(dtype, x)


def change(config: Elements, share):
    """``f(products, query, key, length_q, length_k, batch, head, options) -> scores``."""
    scores = types.UniTuple(getattr(types, config.compute), share.rows * share.columns)

    def body(ops, s, query, key, length_q, length_k, batch, head, options):
        query, batch, head = (ops.opaque(x) for x in (query, batch, head))
        score = changes(ops, config, share, by_name(config, options), query, key, length_q, length_k, batch, head)
        return [score(at // share.columns, at % share.columns, x)[0] for at, x in enumerate(s)]

    return straight_line(scores, (scores, *(I32,) * 6, option_types(config)), body)


def weigh(config: Elements, share, with_ds: bool):
    """``f(products, dp, lse, delta, query, key, length_q, length_k, batch, head, options) -> (p, ds, dproducts)`` for the gradients.

    p are the weights that v has, ds the gradients of the scores and dproducts those of the products, which are ds where there is no cap. ``dp`` is
    dout v^T. Without ``with_ds`` the last two are meaningless and cost nothing.
    """
    real = getattr(types, config.compute)
    scores, row = types.UniTuple(real, share.rows * share.columns), types.UniTuple(real, share.rows)

    def body(ops, s, dp, lse, delta, query, key, length_q, length_k, batch, head, options):
        named = by_name(config, options)
        score = changes(ops, config, share, named, query, key, length_q, length_k, batch, head)
        kept = _kept(ops, config, share, named, query, key, batch, head) if config.options.dropout else None
        p, ds, dproducts = [], [], []
        for at, x in enumerate(s):
            i, j = at // share.columns, at % share.columns
            x, slope = score(i, j, x)
            weight, factor = exponential(ops, config, x - lse[i]), dp[at]
            p.append(weight)
            if kept is not None:
                keep = ops.select(kept(i, j), named["keep_factor"], 0.0)
                p[at], factor = weight * keep, factor * keep
            ds.append(weight * (factor - delta[i]) if with_ds else factor)
            dproducts.append(ds[at] if slope is None else ds[at] * slope)
        return p, ds, dproducts

    return straight_line(types.UniTuple(scores, 3), (scores, scores, row, row, *(I32,) * 6, option_types(config)), body)


# ---- dropout


def _kept(ops, config, share, options, query, key, batch, head):
    """Straight-line ``f(i, j)``: whether dropout keeps a pair.

    A tile, and what a warp has of it, begins at a multiple of its size, and sizes are powers of two, as those of a block of random bits are: which
    pairs share a block is known when the kernel is built, and which words of it are whose where the share is not smaller than the block.
    """
    keys, rows, columns = round_keys(ops.halves(options["seed"])), share.rows * config.lanes_m, share.columns * config.lanes_n
    words, limit = {}, options["keep_limit"]

    def kept(i, j):
        row, column = i * config.lanes_m, j * config.lanes_n
        numbers = row // 16, row % 8, column // 32, column % 8 // 2
        if numbers not in words:
            found = block(ops, query + row, key + column, head, batch, keys)
            words[numbers] = list(zip(map(first_bits, found), second_words(ops, found), strict=True))
        found = words[numbers]
        if config.lanes_n <= 8 and columns % 32 == 0:
            chosen = found[column // 8 % 4]
        else:
            number, chosen = ((key + column) >> 3) & 3, found[3]
            for n in (2, 1, 0):
                chosen = [ops.select(number == n, x, y) for x, y in zip(found[n], chosen, strict=True)]
        of_query = row if config.lanes_m <= 8 and rows % 16 == 0 else query + row
        return is_kept(ops, *chosen, byte_of(of_query, key if config.lanes_n > 1 else key + column), limit)

    return kept


def drop(config: Elements, share):
    """``f(p, query, key, batch, head, options) -> p``: 0 where dropout drops a weight."""
    scores = types.UniTuple(getattr(types, config.compute), share.rows * share.columns)

    def body(ops, p, query, key, batch, head, options):
        query, batch, head = (ops.opaque(x) for x in (query, batch, head))
        kept = _kept(ops, config, share, by_name(config, options), query, key, batch, head)
        return [ops.select(kept(at // share.columns, at % share.columns), x, 0.0) for at, x in enumerate(p)]

    return straight_line(scores, (scores, *(I32,) * 4, option_types(config)), body)


# ---- the beginning and the end of a softmax


def begin(config: Elements, rows: int):
    """``f(query, length_q, head, lane_n, options) -> (m, l)`` of the thread's queries before any key: of the sink, where there is one."""
    real = getattr(types, config.compute)
    row = types.UniTuple(real, rows)

    def body(ops, query, length_q, head, lane_n, options):
        named, lowest, zero = by_name(config, options), ops.constant(config.compute, -math.inf), ops.constant(config.compute, 0.0)
        if not config.options.sinks:
            return [lowest] * rows, [zero] * rows
        if config.options.stacked:
            heads = [(head, query + i * config.lanes_m) for i in range(rows)]
            sinks = [ops.load_row(ops.place(named["sinks"], each), 1, each[1] < length_q)[0] * config.unit for each in heads]
        else:
            sinks = [_sink(ops, named, head) * config.unit]
        weights = [exponential(ops, config, sink - ops.select(sink > -math.inf, sink, 0.0)) for sink in sinks]  # 1, or 0 for -inf
        sinks, weights = (x if config.options.stacked else x * rows for x in (sinks, weights))
        exists = [length_q - query > i * config.lanes_m for i in range(rows)]
        m = [ops.select(x, sink, lowest) for x, sink in zip(exists, sinks, strict=True)]
        return m, [ops.select(x & (lane_n == 0), weight, zero) for x, weight in zip(exists, weights, strict=True)]

    return straight_line(types.UniTuple(row, 2), (*(I32,) * 4, option_types(config)), body)


def _sink(ops, named, head):
    return ops.load_row(ops.place(named["sinks"], (head,)), 1, head >= 0)[0]


def finish(config: Elements, output: types.UniTuple):
    """``f(output, l, options) -> output``: what dropout kept in place of all; 0 in rows whose scores are all -inf, whatever v holds."""
    real = getattr(types, config.compute)
    row = types.UniTuple(real, config.rows)

    def body(ops, o, l, options):
        named, width, found = by_name(config, options), len(o) // config.rows, []
        for at, x in enumerate(o):
            x = x * named["keep_factor"] if config.options.dropout else x
            found.append(ops.select(l[at // width] == 0.0, ops.constant(config.compute, 0.0), x) if config.options.bias else x)
        return found

    return straight_line(output, (output, row, option_types(config)), body)


def of_sink(config: Elements):
    """``f(delta, lse, head, options) -> real``: what a query gives to the gradient of its head's sink, but for the sign."""
    real = getattr(types, config.compute)

    def body(ops, delta, lse, head, options):
        difference = _sink(ops, by_name(config, options), head) - lse
        weight = ops.exp(difference) if config.compute == "float64" else ops.exp2(difference * math.log2(math.e))
        return ops.select(lse != -math.inf, weight * delta, 0.0)

    return straight_line(real, (real, real, I32, option_types(config)), body)
