"""What options do to a thread's scores: `changed` is the one place where a score is changed, `is_shown` the one where a mask hides.

The gradients share both; what they do with a block of scores, whose rows are keys, is in `backward.scores`.

A thread has columns ``2 * (lane % 4) + 8 * n + {0, 1}`` of two rows, 8 apart, of a block of scores (`numbaflash.ptx.fragment`). What it needs to
know of its rows in a tile it finds out once, as its *seat*; what it reads for a block, elements of the bias and, where the block's entry in the list
of its tile says that some pair is hidden, of the mask, are the block's *words*, which can be on their way while the products are. In the forward
rows are queries (with packed heads, the heads of one query after the other) and columns are keys.

From there on scores, and m, are multiples of a unit (`Options.unit`) that costs no instruction where it can be had: the scale, for bare products
and for those to which ALiBi adds; the cap, for a softcap; else one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llvmlite import ir
from numba.cuda import types

from ...problem import GRANULE, ITEMSIZE
from ...ptx.fragment import STATISTICS, fragment, packed
from ...ptx.inline import make_intrinsic
from ...ptx.straight import straight_line
from ..bands import BOUNDS
from ..blocks.layout import BITS, FULL, LIST_START, PARTIAL
from ..dropout import OF_NEIGHBOURS, counter, first_bits, float64_product, kept_of_two, philox, round_keys, second_words
from .options import KEYS_OF_A_DRAW, ROUND_KEYS, Access, Options

I32, I64, F32 = types.int32, types.int64, types.float32
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

_TYPES = {"pointer": types.uint64, "int64": I64, "int32": I32, "float32": F32}
_TANH = (62 / 2835, -17 / 315, 2 / 15, -1 / 3)
"""Taylor series of ``(tanh(x) / x - 1) / x**2`` in ``x**2``, from the highest power on: below 0.3 the next term is 5e-8 of the whole."""
_SERIES_UP_TO = 0.3


def option_types(options: Options) -> list:
    """Numba types of the options' parameters."""
    return [_TYPES[dtype] for _, dtype in options.parameters()]


@dataclass(frozen=True, slots=True)
class Scores:
    """Blocks of so many ``columns``, and the options that are built in. The methods return functions for kernels."""

    columns: int
    options: Options

    def _named(self, values):
        return {name: x for (name, _), x in zip(self.options.parameters(), values, strict=True)}

    @property
    def _given(self):
        return types.Tuple(option_types(self.options))

    # ---- what a thread knows of its rows

    def _seat(self) -> dict:
        """Names and types of a seat's members."""
        options, found = self.options, {}
        if options.bias:
            found |= {f"bias{r}": I64 for r in range(1 + options.bias.by_row)}
            found["columns"] = I32  # from the thread's first one of block 0 to the last there is
        if options.alibi:
            found |= {"fall0": F32, "fall1": F32, "place0": I32, "place1": I32}  # -slope / unit; the column beside which the row stands
        if options.dropout:
            found |= {"query": I32, "key": I32, "head": I32, "batch": I32}
        return found or {"row": I32}  # a tuple must have a member

    @property
    def seat(self):
        """Numba type."""
        return types.Tuple(list(self._seat().values()))

    def take_seat(self, pack: int):
        """``f(row, column, batch, head, seqlen_q, bounds, options) -> seat`` of packed rows ``row`` and ``row + 8`` of a tile's heads, from a
        column on.

        Rows past the last query read what the last one reads: nothing of it is kept.
        """

        def body(ops, row, column, batch, head, seqlen_q, bounds, options):
            named, seat = self._named(options), {"row": row}
            rows = [(ops.minimum(r // pack, seqlen_q - 1), head * pack + r % pack) for r in (row, row + 8)]
            access = self.options.bias
            for r, (query, query_head) in enumerate(rows[: 1 + access.by_row] if access else ()):
                seat[f"bias{r}"] = element(ops, named, "bias", batch=batch, head=query_head, query=query, key=column)
            seat["columns"] = bounds[1] - column
            for r, (query, query_head) in enumerate(rows):
                if self.options.alibi:
                    slope = ops.fetch("f32", element(ops, named, "alibi_slopes", batch=batch, head=query_head), 0)
                    seat |= {f"fall{r}": in_units(self.options, named, slope) * -1.0, f"place{r}": query + bounds[2] - column}
            if self.options.dropout:
                seat |= {"query": row, "key": column + named["first_key"], "head": head, "batch": batch}
            return [seat[name] for name in self._seat()]

        return straight_line(self.seat, (*(I32,) * 5, BOUNDS, self._given), body)

    # ---- what is read for a block

    def _words(self, access: Access | None) -> int:
        """Words of a block: two columns each, of float32 one, and one a row where all columns have the same."""
        if not access:
            return 0
        a_row = self.columns // (4 if ITEMSIZE[access.dtype] == 4 else 8) if access.by_column else 1
        return a_row * (1 + access.by_row)

    @property
    def words(self):
        """Numba type of those of the bias."""
        return types.UniTuple(I32, max(1, self._words(self.options.bias)))

    @property
    def mask_words(self):
        """Numba type of the bits of a block mask, 32 columns a word; elements of a mask of bool are read where they are used."""
        return types.UniTuple(I32, 2 * (self.columns // 32) if self.options.block_mask else 1)

    def fetch(self, guarded: bool):
        """``f(seat, block, options) -> words``. Only a block that is guarded may reach past the last column there is."""
        access = self.options.bias

        def body(ops, seat, number, options):
            if not access:
                return [ops.integer(0)]
            named, seat, words = self._named(options), dict(zip(self._seat(), seat, strict=True)), []
            origin = number * self.columns
            count = seat["columns"] - origin if guarded else None
            for r in range(1 + access.by_row):
                words += self._row(ops, access, seat[f"bias{r}"] + ops.wide(origin) * named["bias_key"], named["bias_key"], count)
            return words

        return straight_line(self.words, (self.seat, I32, self._given), body)

    def fetch_mask(self, pack: int):
        """``f(row, lane, block, batch, head, seqlen_q, options) -> mask_words`` of packed rows ``row`` and ``row + 8``.

        Few blocks need it, so no register is kept for it: where things lie is found anew.
        """

        def body(ops, row, lane, number, batch, head, seqlen_q, options):
            if not self.options.block_mask:
                return [ops.integer(0)]
            named, words = self._named(options), []
            column, places = self._places_anew(ops, pack, row, lane, batch, head, seqlen_q)
            granule = number * self.columns // GRANULE
            half = number * self.columns % GRANULE // 32 if self.columns < GRANULE else None
            for _, query_head, query in places:
                offset = block_offset(ops, named, places[0][0], query_head)
                for n in range(max(1, self.columns // GRANULE)):
                    words += block_bits(ops, named, offset, query, granule, n, half)
            return [word >> column for word in words]  # bits of the thread's columns stand at places that are known

        return straight_line(self.mask_words, (*(I32,) * 6, self._given), body)

    def _places_anew(self, ops, pack, row, lane, batch, head, seqlen_q):
        """(first column, (batch entry, head, query) of the two rows). Rows past the last query are the last one's."""
        row, lane, batch, head = (ops.opaque(x) for x in (row, lane, batch, head))
        return (lane & 3) * 2, [(batch, head * pack + r % pack, ops.minimum(r // pack, seqlen_q - 1)) for r in (row, row + 8)]

    def no_mask_words(self):
        """``f() -> mask_words`` that nobody looks at."""
        return make_intrinsic(self.mask_words, (), lambda builder, args, llvm_result: ir.Constant(llvm_result, ir.Undefined))

    def _row(self, ops, access, address, step, count):
        size = ITEMSIZE[access.dtype]
        kind, twice, bits = {1: ("u8", "u16", 8), 2: ("u16", "b32", 16), 4: ("b32", None, 0)}[size]
        if not access.by_column:
            word = ops.fetch(kind, address, 0, count, 0)
            return [word] if size == 4 else [word | (word << bits)]
        words = []
        for column in range(0, self.columns, 8):
            if access.pairs and twice:
                words.append(ops.fetch(twice, address, column * size, count, column))
                continue
            if access.pairs:
                two = [ops.fetch(kind, address, (column + e) * size, count, column + e) for e in (0, 1)]
            else:
                two = [ops.fetch(kind, address + step * e if e else address, 0, count, column + e) for e in (0, 1)]
                address = address + step * 8
            words += two if size == 4 else [two[0] | (two[1] << bits)]
        return words

    def _word(self, access, words, i):
        """The word of element i of a fragment, and which half of it is the element's."""
        row, column, e = (i >> 1) & 1, i >> 2, i & 1
        first = (self._words(access) // 2) * row if access.by_row else 0
        if not access.by_column:
            return words[first], e
        return (words[first + 2 * column + e], 0) if ITEMSIZE[access.dtype] == 4 else (words[first + column], e)

    # ---- what a score is

    def change(self):
        """``f(products, words, seat, block, options) -> scores``."""
        kind, options_of = fragment(self.columns), self.options

        def body(ops, s, words, seat, number, options):
            named, seat = self._named(options), dict(zip(self._seat(), seat, strict=True))
            if options_of.alibi:
                places = [ops.real("float32", seat[f"place{r}"] - number * self.columns) for r in (0, 1)]
            scores = []
            for i, x in enumerate(s):
                row, column = (i >> 1) & 1, 8 * (i >> 2) + (i & 1)
                if options_of.falls:  # the rest of it is the row's: `fall_to`
                    scores.append(ops.fma(seat[f"fall{row}"], ops.constant("float32", -float(column)), x) if column else x)
                    continue
                fall = (ops.absolute(places[row] - float(column)), seat[f"fall{row}"]) if options_of.alibi else None
                bias = self._bias(ops, words, i) if options_of.bias else None
                scores.append(changed(ops, options_of, named, x, fall, bias)[0])
            return scores

        return straight_line(kind, (kind, self.words, self.seat, I32, self._given), body)

    def fall_to(self):
        """``f(seat, block, options) -> (d0, d1)``: what ALiBi adds at the thread's first column of a block, where scores fall from there."""

        def body(ops, seat, number, options):
            seat = dict(zip(self._seat(), seat, strict=True))
            return [seat[f"fall{r}"] * ops.real("float32", seat[f"place{r}"] - number * self.columns) for r in (0, 1)]

        return straight_line(types.UniTuple(F32, 2), (self.seat, I32, self._given), body)

    def start(self):
        """``f(options) -> statistics`` of rows that have seen nothing, where scores are bounded."""

        def body(ops, options):
            base, zero, one = self._named(options)["base"], *(ops.constant("float32", x) for x in (0.0, 1.0))
            return [base, base, zero, zero, one, one]

        return straight_line(STATISTICS, (self._given,), body)

    def _bias(self, ops, words, i):
        access = self.options.bias
        word, half = self._word(access, words, i)
        return ops.as_float(word) if access.dtype == "float32" else ops.pair(access.dtype, word)[half]

    # ---- what is seen, and what is kept

    def hide(self, pack: int):
        """``f(scores, mask_words, row, lane, block, batch, head, seqlen_q, seqlen_k, options) -> scores``: -inf where the mask hides."""
        kind, access = fragment(self.columns), self.options.mask

        def body(ops, s, words, row, lane, number, batch, head, seqlen_q, seqlen_k, options):
            if not access:
                return [ops.select(has_bit(*self._bit(words, i)), x, -math.inf) for i, x in enumerate(s)]
            named, found = self._named(options), []
            column, places = self._places_anew(ops, pack, row, lane, batch, head, seqlen_q)
            first = number * self.columns + column
            addresses = [element(ops, named, "mask", batch=b, head=h, query=q, key=first) for b, h, q in places[: 1 + access.by_row]]
            few = Scores(min(self.columns, 32), self.options)  # columns whose words are held at a time
            for start in range(0, self.columns, few.columns):
                words = []
                for address in addresses:
                    words += few._row(ops, access, address, named["mask_key"], seqlen_k - first - start)
                for i, x in enumerate(s[start // 2 : (start + few.columns) // 2]):
                    found.append(ops.select(is_shown(*few._word(access, words, i)), x, -math.inf))
                addresses = [address + named["mask_key"] * few.columns for address in addresses]
            return found

        return straight_line(kind, (kind, self.mask_words, *(I32,) * 7, self._given), body)

    def _bit(self, words, i):
        """The word of element i of a fragment, and its bit."""
        row, column = (i >> 1) & 1, 8 * (i >> 2) + (i & 1)
        return words[self.columns // 32 * row + column // 32], column % 32

    @property
    def drawn(self):
        """Numba type of a block's random bits."""
        return types.UniTuple(I32, self.columns // 8)

    def draw(self):
        """``f(seat, block, options) -> drawn``, which can be while the products are. Rows start at multiples of 16, blocks at multiples of 32."""

        def body(ops, seat, number, options):
            named, seat = self._named(options), dict(zip(self._seat(), seat, strict=True))
            key, firsts = seat["key"] + number * self.columns, range(0, self.columns, KEYS_OF_A_DRAW)
            counters = [counter(seat["query"], key + first, seat["head"], seat["batch"]) for first in firsts]
            return [word for words in philox(ops, counters, round_keys_of(ops, named), float64_product) for word in words]

        return straight_line(self.drawn, (self.seat, I32, self._given), body)

    def drop(self):
        """``f(p16, drawn, options) -> p16``: 0 where dropout drops a weight."""
        kind = packed(self.columns)

        def body(ops, p, drawn, options):
            limit, found = self._named(options)["keep_limit"], []
            for first in range(0, len(drawn), 4):
                words = drawn[first : first + 4]
                for word, second in zip(words, second_words(ops, words), strict=True):
                    bits = first_bits(word)
                    found += [p[len(found) + row] & kept_of_two(ops, bits, second, of, limit) for row, of in enumerate(OF_NEIGHBOURS)]
            return found

        return straight_line(kind, (kind, self.drawn, self._given), body)

    # ---- the end of a softmax

    def finish(self, pack: int):
        """``f(statistics, row, head, length_q, scale_log2, options) -> statistics``: the LSE of the thread's two rows in the place of m, l summed
        over the quad, and as a what the output is to be multiplied by, 0 in a row that has seen nothing, as rows from ``length_q`` on have."""

        def body(ops, statistics, row, head, length_q, scale_log2, options):
            named = self._named(options)
            m, l = statistics[:2], statistics[2:4]
            for lanes in (1, 2):
                l = [x + y for x, y in zip(l, ops.exchange(l, lanes), strict=True)]
            ends, factors = [], []
            for r in (0, 1):
                there = (row + 8 * r) // pack < length_q
                top, total, factor = m[r], ops.select(there, l[r], 0.0), None
                if self.options.unit != "one":
                    top = top * (scale_log2 * LN2)
                if self.options.sinks:
                    sink = ops.fetch("f32", element(ops, named, "sinks", head=head * pack + (row + 8 * r) % pack), 0)
                    keys, top = top, ops.maximum(top, sink)
                    base = ops.select(top == -math.inf, ops.constant("float32", 0.0), top)
                    factor = ops.exp2((keys - base) * LOG2E)
                    total = ops.select(there, total * factor + ops.exp2((sink - base) * LOG2E), 0.0)
                nothing = total == 0.0
                weight = ops.reciprocal(total) if factor is None else factor * ops.reciprocal(total)
                if self.options.dropout:
                    weight = weight * named["keep_factor"]
                factors.append(ops.select(nothing, ops.constant("float32", 0.0), weight))
                ends.append(ops.select(nothing, ops.constant("float32", -math.inf), top + ops.log2(total) * LN2))
            return [*ends, *l, *factors]

        return straight_line(STATISTICS, (STATISTICS, I32, I32, I32, F32, self._given), body)

    # ---- the list of a tile

    def list_at(self):
        """``f(tile, batch, head, options) -> address`` of the first entry of the list of a tile of a batch entry and a head (or heads that share
        it)."""

        def body(ops, tile, batch, head, options):
            return self._list_at(ops, self._named(options), tile, batch, head)

        return straight_line(I64, (I32, I32, I32, self._given), body)

    @staticmethod
    def _list_at(ops, named, tile, batch, head):
        number = ops.wide(batch * named["lists_batch"] + head * named["lists_head"] + tile)
        return named["lists"] + (number * ops.wide(named["lists_words"]) + LIST_START) * 4

    def walk_of_list(self):
        """``f(tile, batch, head, onward, options) -> number``: of the words of all lists, the entry at which a walk begins, the first one or, where
        ``onward`` is -1, the last."""

        def body(ops, tile, batch, head, onward, options):
            named = self._named(options)
            first = (batch * named["lists_batch"] + head * named["lists_head"] + tile) * named["lists_words"] + LIST_START
            count = ops.fetch("b32", named["lists"] + ops.wide(first) * 4, -4 * LIST_START)
            return first + ops.select(onward > 0, ops.integer(0), count - 1)

        return straight_line(I32, (*(I32,) * 4, self._given), body)

    def entry(self):
        """``f(number, options)``: that word."""

        def body(ops, number, options):
            return ops.fetch("b32", self._named(options)["lists"] + ops.wide(number) * 4, 0)

        return straight_line(I32, (I32, self._given), body)

    def rank_of(self):
        """``f(tile, block, batch, head, blocks, options)``: a tile's turn at a block, of as many as a head has."""

        def body(ops, tile, number, batch, head, blocks, options):
            named = self._named(options)
            row = ops.wide(batch * named["lists_batch"] + head * named["lists_head"] + tile)
            return ops.fetch("b32", named["ranks"] + (row * ops.wide(blocks) + ops.wide(number)) * 4, 0)

        return straight_line(I32, (*(I32,) * 5, self._given), body)

    # ---- lengths, and what no query sees

    def bounds_of_entry(self, right: bool):
        """``f(batch, bounds, options) -> bounds`` of a batch entry: its own number of queries and offset, and as the number of keys that up to the
        last one that a query of it may see."""

        def body(ops, batch, bounds, options):
            return self.own_bounds(ops, batch, bounds, options, right)

        return straight_line(BOUNDS, (I32, BOUNDS, self._given), body)

    def own_bounds(self, ops, batch, bounds, options, right: bool):
        """Straight-line `bounds_of_entry`."""
        named = self._named(options)
        seqlen_q, seqlen_k, offset, *window = bounds
        length_q = length_of(ops, self.options, named, "seqlens_q", batch, seqlen_q)
        # No key is cut off before the first one where there are lengths.
        length_k = length_of(ops, self.options, named, "seqlens_k", batch, seqlen_k)
        if self.options.per_entry:
            offset = length_k - length_q
        end = length_k
        if right:
            end = ops.maximum(ops.minimum(end, length_q + offset + window[1]), ops.integer(0))
        return [length_q, end, offset, *window]

    def seen_keys(self, left: bool):
        """``f(block, bounds) -> (first, end)``: of a block, the keys that some query of a batch entry may see as far as lengths and band go."""

        def body(ops, number, bounds):
            _, end, offset, to_the_left, _ = bounds
            first = ops.maximum(offset - to_the_left, ops.integer(0)) if left else ops.integer(0)
            return [first - number * self.columns, end - number * self.columns]

        return straight_line(types.UniTuple(I32, 2), (I32, BOUNDS), body)

    def sees(self, pack: int, left: bool, right: bool):
        """``f(row, key, batch, head, bounds, options) -> int32``: 1 where a packed row of a tile's heads sees a key that is one of `seen_keys`,
        else 0."""

        def body(ops, row, key, batch, head, bounds, options):
            named = self._named(options)
            row, key, batch, head = (ops.opaque(x) for x in (row, key, batch, head))  # seldom needed: no registers for it before
            query = row // pack
            seen, place = query < bounds[0], query + bounds[2]
            if left:
                seen &= place - bounds[3] <= key
            if right:
                seen &= place + bounds[4] >= key
            if self.options.masked:
                seen &= shows(ops, self.options, named, batch, head * pack + row % pack, query, key, seen)
            return ops.truth(seen)

        return straight_line(I32, (*(I32,) * 4, BOUNDS, self._given), body)


def length_of(ops, options: Options, named, name, batch, most):
    """Straight-line length of a batch entry."""
    dtype = getattr(options, name)
    if not dtype:
        return most
    length = ops.fetch("s64" if dtype == "int64" else "b32", element(ops, named, name, batch=batch), 0)
    if dtype == "int64":
        length = ops.narrow(ops.maximum(ops.minimum(length, ops.wide(most)), ops.wide(ops.integer(0))))
    return ops.minimum(ops.maximum(length, ops.integer(0)), most)


def element(ops, named, name, **indices):
    """Address of an element of an option's array."""
    address = named[name]
    for axis, index in indices.items():
        address = address + ops.wide(index) * named[f"{name}_{axis}"]
    return address


def shows(ops, options: Options, named, batch, head, query, key, valid):
    """Straight-line condition: whether the mask shows a pair, which there is if valid."""
    if options.mask:
        return ops.fetch("u8", element(ops, named, "mask", batch=batch, head=head, query=query, key=key), 0, ops.truth(valid)) != 0
    offset, granule = block_offset(ops, named, batch, head), key // GRANULE
    word = block_word(ops, named, offset, query, granule, 0, ops.select(valid, named["block_columns"], 0))
    at = named["block_bits"] + offset + ops.wide(word - PARTIAL) * (4 * BITS) + ops.wide(query % GRANULE * 8 + key % GRANULE // 32 * 4)
    bits = ops.fetch("b32", at, 0, word, PARTIAL - 1)
    return (word == FULL) | (((bits >> (key % 32)) & 1) != 0)


def block_offset(ops, named, batch, head):
    """Bytes from the first mask of a block mask to that of a batch entry and a head."""
    return ops.wide(batch) * named["block_batch"] + ops.wide(head) * named["block_head"]


def block_word(ops, named, offset, query, granule, more: int, columns):
    """The word of the granule of a query and a granule of keys, ``more`` further; EMPTY from the last of ``columns`` on."""
    row = ops.minimum(query // GRANULE, named["block_last_row"])
    at = named["block_words"] + offset + ops.wide(row) * named["block_row"] + ops.wide(granule) * 4
    return ops.fetch("b32", at, 4 * more, columns - granule, more)


def block_bits(ops, named, offset, query, granule, more: int, half):
    """The two words of bits of a query in a granule of keys, ``more`` further; or the one of a ``half``."""
    word = block_word(ops, named, offset, query, granule, more, named["block_columns"])
    at = named["block_bits"] + offset + ops.wide(word - PARTIAL) * (4 * BITS) + ops.wide(query % GRANULE * 8)
    if half is None:
        bits = ops.halves(ops.fetch("s64", at, 0, word, PARTIAL - 1))
    else:
        bits = [ops.fetch("b32", at + ops.wide(half) * 4, 0, word, PARTIAL - 1)]
    return [ops.select(word == FULL, ops.integer(-1), each) for each in bits]


def has_bit(word, place: int):
    """Straight-line condition: whether a bit is set."""
    return (word & _signed(1 << place)) != 0


def in_units(options: Options, named, slope):
    """Straight-line slope of ALiBi in units of the scores."""
    return slope * named["inverse_scale"] if options.unit == "scale" else slope


def round_keys_of(ops, named) -> list:
    """Straight-line keys of Philox's rounds, as the kernel has them or computed from the first ones."""
    found = [[ops.halves(named[name])[i] for i, name in enumerate(pair)] for pair in ROUND_KEYS if pair[0] in named]
    return found if len(found) > 1 else round_keys(found[0])


def is_shown(word, byte: int):
    """Straight-line condition: whether that byte of a word, an element of a mask, shows its pair."""
    return (word & _signed(0xFF << 8 * byte)) != 0


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def changed(ops, options: Options, named, product, fall, bias):
    """Straight-line ``(score, slope)`` of a product. ALiBi's ``fall`` is (distance, what a score falls by over a distance of 1); it and the element
    of the bias are None where there is none. ``slope`` is the derivative of the score by the scaled product, None for 1.
    """
    slope, multiple, factor = None, product, "scale"
    if options.softcap:
        multiple, factor = tanh(ops, options.softcap, product, named), "cap"
        slope = 1.0 - multiple * multiple
    if options.unit != "one":
        return ops.fma(*fall, multiple) if fall else multiple, slope
    more = bias if fall is None else fall[0] * fall[1] if bias is None else ops.fma(*fall, bias)
    return multiple * named[factor] if more is None else ops.fma(multiple, named[factor], more), slope


def tanh(ops, cap: str, product, named):
    """Straight-line ``tanh(scale * product / cap)``.

    For a "low" cap it is the special-function unit's, with a relative error of 2**-11. A "high" one, from which small scores must come out as they
    are, has ``1 - 2 / (1 + exp(2 y))``, which errs by some 3e-7, and for small arguments a series; in all the relative error is 1e-6.
    """
    y = product * named["cap_slope"]
    if cap == "low":
        return ops.tanh_approx(y)
    e = ops.exp2(product * named["cap_exponent"])
    t = ops.fma(ops.reciprocal(e + 1.0), ops.constant("float32", -2.0), ops.constant("float32", 1.0))
    square = y * y
    series = ops.constant("float32", _TANH[0])
    for coefficient in _TANH[1:]:
        series = ops.fma(series, square, ops.constant("float32", coefficient))
    return ops.select(ops.absolute(y) < _SERIES_UP_TO, ops.fma(y * square, series, y), t)


entry_at = straight_line(I32, (I64,), lambda ops, at: ops.fetch("b32", at, 0))
"""``f(address)``: an entry of a list. Below 0 the list has ended."""

next_entry = straight_line(I64, (I64,), lambda ops, at: at + 4)
"""``f(address)`` of the next entry."""

block_of = straight_line(I32, (I32,), lambda ops, entry: entry >> 1)
"""``f(entry)``: the number of its block."""

is_partial = straight_line(I32, (I32,), lambda ops, entry: entry & 1)
"""``f(entry)``: 1 where some pair of the block is hidden."""


def _next_of_list(ops, entry, upcoming, number, member, group, onward):
    last = member + 1 == group
    return [ops.select(last, upcoming, entry), ops.select(last, number + onward, number), ops.select(last, ops.integer(0), member + 1)]


next_of_list = straight_line(types.UniTuple(I32, 3), (I32,) * 6, _next_of_list)
"""``f(entry, upcoming, number of that, member, group, onward) -> (entry, number, member)`` after a step: each entry for each head of the group."""
