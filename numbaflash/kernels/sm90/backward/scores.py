"""What options do to a thread's scores in the gradients, where rows are keys and columns are queries.

What a score is, and what a mask shows, is that of the forward (`numbaflash.kernels.sm90.scores`). A thread has two keys, 8 apart, in which it keeps
its *seat* for a tile, and reads its *words* for each block of queries of each head: elements of the bias, and the head's slope of ALiBi. Elements of
the mask are read only for blocks in which it hides some pair.

Of a pair two numbers are kept: p, the weight that V had but for dropout, and w, what the gradient of the weight is multiplied by, p but for the slope
of the score. w is -0.0 where the pair is hidden, and nothing may be multiplied. What dropout keeps is drawn apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llvmlite import ir
from numba.cuda import types

from ....problem import GRANULE, ITEMSIZE
from ....ptx.fragment import fragment, is_by_fma, packed
from ....ptx.inline import make_intrinsic
from ....ptx.straight import straight_line
from ...bands import BOUNDS
from ...blocks.layout import BITS, FULL, PARTIAL
from ...dropout import OF_EIGHT_APART, counter, first_bits, kept_of_two, philox, second_words
from ..options import Access, Options
from ..scores import block_offset, block_word, changed, element, has_bit, in_units, is_shown, option_types, round_keys_of

I32, I64, F32 = types.int32, types.int64, types.float32
_SHARED_BITS = 16
"""Queries of a block start at multiples of it, which random bits of dropout are drawn for."""


@dataclass(frozen=True, slots=True)
class KeyScores:
    """Fragments of so many ``columns``, blocks of ``q_block`` queries, and the options and bounds of the band that are built in. ``of_bias`` is for
    the gradient of the bias: that of the scores, not of the products, and of no pair of a query whose shift is +inf. Of eight exponentials
    ``fma_exponentials`` are left to FMA units."""

    columns: int
    q_block: int
    options: Options
    left: bool
    of_bias: bool = False
    fma_exponentials: int = 0

    def _named(self, values):
        return {name: x for (name, _), x in zip(self.options.parameters(), values, strict=True)}

    @property
    def _given(self):
        return types.Tuple(option_types(self.options))

    @property
    def _arrays(self):
        return [("bias", self.options.bias)] if self.options.bias else []

    # ---- what a thread knows of its keys

    @property
    def _finds_places_anew(self) -> bool:
        """For each block, instead of keeping them: what is read and drawn takes the registers."""
        return self.options.reads and self.options.dropout

    def _seat(self) -> dict:
        options, found = self.options, {}
        if self._finds_places_anew:
            return dict.fromkeys(("key", "query", "batch", "seqlen_k", "queries", "offset"), I32)
        for name, access in self._arrays:
            found |= {f"{name}{r}": I64 for r in range(1 + access.by_row)}
        if options.bias:
            found["queries"] = I32  # from the thread's first one of block 0 to the last there is
        if options.alibi:
            found |= {"slopes": I64, "place0": I32, "place1": I32}  # of the batch entry; the query beside which the key stands
        if options.dropout:
            found |= {"query": I32, "key": I32, "batch": I32}
        return found or {"key": I32}  # a tuple must have a member

    @property
    def seat(self):
        """Numba type."""
        return types.Tuple(list(self._seat().values()))

    def take_seat(self):
        """``f(key, column, batch, seqlen_k, bounds, options) -> seat`` of keys ``key`` and ``key + 8``, from a column on; ``bounds`` are those of the
        batch entry.

        Keys past the last one read what the last one reads: nothing of it is kept.
        """

        def body(ops, key, column, batch, seqlen_k, bounds, options):
            seat = {"key": key, "query": column, "batch": batch, "seqlen_k": seqlen_k, "queries": bounds[0] - column, "offset": bounds[2]}
            if not self._finds_places_anew:
                seat |= self._places(ops, self._named(options), seat)
            return [seat[name] for name in self._seat()]

        return straight_line(self.seat, (*(I32,) * 4, BOUNDS, self._given), body)

    def _places(self, ops, named, seat):
        found, key = {}, seat["key"]
        for name, access in self._arrays:
            for r in range(1 + access.by_row):
                at = ops.minimum(key + 8 * r, seat["seqlen_k"] - 1)
                found[f"{name}{r}"] = element(ops, named, name, batch=seat["batch"], key=at, query=seat["query"])
        if self.options.alibi:
            found["slopes"] = element(ops, named, "alibi_slopes", batch=seat["batch"])
            found |= {f"place{r}": key + 8 * r - seat["offset"] - seat["query"] for r in (0, 1)}
        return found

    def _open(self, ops, named, seat):
        seat = dict(zip(self._seat(), seat, strict=True))
        if self._finds_places_anew:
            seat |= {name: ops.opaque(seat[name]) for name in ("key", "query", "batch")}
            seat |= self._places(ops, named, seat)
        return seat

    # ---- what is read for a block

    def _elements(self, access: Access) -> list:
        """(row, column) of what is read of an array, in order."""
        columns = [8 * n + e for n in range(self.columns // 8) for e in (0, 1)] if access.by_column else [0]
        return [(r, column) for column in columns for r in range(1 + access.by_row)]

    def _counts(self) -> list:
        return [-(-len(self._elements(access)) * ITEMSIZE[access.dtype] // 4) for _, access in self._arrays]

    @property
    def fetched(self):
        """Numba type of what is read."""
        return types.UniTuple(I32, max(1, sum(self._counts()) + self.options.alibi))

    def fetch(self):
        """``f(seat, block, head, options) -> words``; nothing beyond the last query there is."""

        def body(ops, seat, number, head, options):
            named, words = self._named(options), []
            seat = self._open(ops, named, seat)
            first = number * self.q_block
            count = seat["queries"] - first if self.options.bias else None
            for name, access in self._arrays:
                words += self._packed(ops, name, access, named, seat, first, head, count)
            if self.options.alibi:
                words.append(ops.fetch("b32", seat["slopes"] + ops.wide(head) * named["alibi_slopes_head"], 0))
            return words or [ops.integer(0)]

        return straight_line(self.fetched, (self.seat, I32, I32, self._given), body)

    # ---- what dropout keeps

    @property
    def kept(self):
        """Numba type of what says which pairs of a block dropout keeps: for two columns of a row a word, whose halves are all ones or 0."""
        return types.UniTuple(I32, self.columns // 4)

    def draw(self):
        """``f(seat, block, head, options) -> kept``. All lanes of a warp take part.

        Random bits are shared by four keys 8 apart, of which a thread has two, and their neighbours. A lane 4 further has the neighbouring keys and
        the same queries, so each of the two draws for one query of two neighbours, and tells the other one what becomes of its keys.
        """

        def body(ops, seat, number, head, options):
            named, seat = self._named(options), dict(zip(self._seat(), seat, strict=True))
            keys, limit, odd = round_keys_of(ops, named), named["keep_limit"], seat["key"] & 1
            second_half, query, found = (seat["key"] & _SHARED_BITS) != 0, seat["query"] + number * self.q_block + odd, []
            own, others = OF_EIGHT_APART + odd * 0x1111, OF_EIGHT_APART + 0x1111 - odd * 0x1111
            interleave = [ops.select(odd != 0, ops.integer(a), b) for a, b in ((0x1054, 0x5410), (0x3276, 0x7632))]
            counters = [counter(query + first, seat["key"], head, seat["batch"]) for first in range(0, self.columns, _SHARED_BITS)]
            for words in philox(ops, counters, keys):
                words = [ops.select(second_half, *halves) for halves in ((words[n ^ 2], words[n]) for n in range(4))]  # the thread's two first
                bits, seconds = [first_bits(word) for word in words[:2]], second_words(ops, words)[:2]
                mine, told = ([kept_of_two(ops, *of, which, limit) for of in zip(bits, seconds, strict=True)] for which in (own, others))
                told = ops.exchange(told, 4)
                found += [ops.permute(*both, of_half) for of_half in interleave for both in zip(mine, told, strict=True)]
            return found

        return straight_line(self.kept, (self.seat, I32, I32, self._given), body)

    def no_kept(self):
        """``f() -> kept`` where there is no dropout."""
        return straight_line(self.kept, (), lambda ops: [ops.integer(0)] * len(self.kept))

    def drop(self, element: str):
        """``f(p16, kept) -> p16``: times 0 where dropout drops a weight."""
        kind, one = packed(self.columns), {"f16": 0x3C003C00, "bf16": 0x3F803F80}[element]

        def body(ops, p, kept):
            return [ops.product_of_halves(element, x, word & one) for x, word in zip(p, kept, strict=True)]

        return straight_line(kind, (kind, self.kept), body)

    @property
    def mask_words(self):
        """Numba type of what is read of a mask; of a block mask, 32 queries a word."""
        access, count = self.options.mask, 2 * (self.columns // 32)
        if access:
            count = -(-len(self._elements(access)) // 4)
        return types.UniTuple(I32, max(1, count if self.options.masked else 1))

    def fetch_mask(self):
        """``f(key, query, block, batch, head, seqlen_q, seqlen_k, options) -> mask_words`` of keys ``key`` and ``key + 8`` and queries from
        ``query`` of the block on; nothing beyond the last query there is. Few blocks need it, so no register is kept for it: where things lie is
        found anew."""
        access = self.options.mask

        def body(ops, key, query, number, batch, head, seqlen_q, seqlen_k, options):
            # No key has bit 30: that keeps addresses out of the uniform registers, in which ptxas would hold parameters from before the loop.
            named, batch, head = self._named(options), batch + (key >> 30), head + (key >> 30)
            first, keys = number * self.q_block, (key, key + 8)
            if access:
                rows = [ops.minimum(each + 1, seqlen_k) - 1 for each in keys[: 1 + access.by_row]]
                seat = {f"mask{r}": element(ops, named, "mask", batch=batch, key=at, query=query) for r, at in enumerate(rows)}
                return self._packed(ops, "mask", access, named, seat, first, head, seqlen_q - query - first)
            offset = block_offset(ops, named, batch, head)
            word = block_word(ops, named, offset, first + query, key // GRANULE, 0, named["block_columns"])
            at = named["block_bits"] + offset + ops.wide(word - PARTIAL) * (4 * BITS) + 2 * BITS
            words = []
            for key in keys:
                place = at + ops.wide(key % GRANULE * 8)
                if self.columns < GRANULE:
                    half = (first + query) % GRANULE // 32
                    bits = [ops.fetch("b32", place + ops.wide(half * 4), 0, word, PARTIAL - 1)]
                else:
                    bits = ops.halves(ops.fetch("s64", place, 0, word, PARTIAL - 1))
                words += [ops.select(word == FULL, ops.integer(-1), each) for each in bits]
            return [each >> (query & 7) for each in words]  # bits of the thread's columns stand at places that are known

        return straight_line(self.mask_words, (*(I32,) * 7, self._given), body)

    def no_mask_words(self):
        """``f() -> mask_words`` that nobody looks at."""
        return make_intrinsic(self.mask_words, (), lambda builder, args, llvm_result: ir.Constant(llvm_result, ir.Undefined))

    def _is_shown(self, words, i):
        if self.options.mask:
            return is_shown(*self._word(self.options.mask, words, i))
        row, column = (i >> 1) & 1, 8 * (i >> 2) + (i & 1)
        return has_bit(words[self.columns // 32 * row + column // 32], column % 32)

    def _packed(self, ops, name, access, named, seat, first, head, count):
        size, step = ITEMSIZE[access.dtype], named[f"{name}_query"]
        kind, words = {1: "u8", 2: "u16", 4: "b32"}[size], []
        origin = ops.wide(head) * named[f"{name}_head"] + ops.wide(first) * step
        rows = [seat[f"{name}{r}"] + origin for r in range(1 + access.by_row)]
        at = 0
        for i, (r, column) in enumerate(self._elements(access)):
            if column != at:
                rows = [address + step * (column - at) for address in rows]
                at = column
            x = ops.fetch(kind, rows[r], 0, count if access.by_column else None, column)
            part = i * size % 4
            if part:
                words[-1] = words[-1] | (x << 8 * part)
            else:
                words.append(x)
        return words

    def _word(self, access, words, i):
        """The word of element i of a fragment, and the byte of it where the element begins."""
        row, column, e = (i >> 1) & 1, i >> 2, i & 1
        n = (2 * column + e if access.by_column else 0) * (1 + access.by_row) + (row if access.by_row else 0)
        at = n * ITEMSIZE[access.dtype]
        return words[at // 4], at % 4

    def _bias(self, ops, words, i):
        access = self.options.bias
        word, byte = self._word(access, words, i)
        return ops.as_float(word) if access.dtype == "float32" else ops.pair(access.dtype, word)[byte // 2]

    # ---- weights, and gradients of the scores

    def weigh(self, masked: bool):
        """``f(products, shifts, words, mask_words, seat, block, head, limits, scale_log2, options) -> (p, w)``. Where ``masked``, pairs beyond the
        ``limits`` of the keys (`KeyBand.limits`), and those that the mask hides, are hidden."""
        kind, options_of = fragment(self.columns), self.options
        shifts = types.UniTuple(F32, self.columns // 4)

        def body(ops, s, shifts, words, mask_words, seat, number, head, limits, scale_log2, options):
            named, origin = self._named(options), number * self.q_block
            seat = self._open(ops, named, seat)
            limits = [limit - origin for limit in limits]
            of_arrays, at = {}, 0
            for (name, _), n in zip(self._arrays, self._counts(), strict=True):
                of_arrays[name] = words[at : at + n]
                at += n
            if options_of.alibi:
                falling = in_units(options_of, named, ops.as_float(words[at])) * -1.0
                places = [ops.real("float32", seat[f"place{r}"] - origin) for r in (0, 1)]
            p, w = [], []
            for i, x in enumerate(s):
                row, column = (i >> 1) & 1, 8 * (i >> 2) + (i & 1)
                slope, shift = None, shifts[2 * (i >> 2) + (i & 1)]
                if options_of.changes:
                    fall = (ops.absolute(places[row] - float(column)), falling) if options_of.alibi else None
                    bias = self._bias(ops, of_arrays["bias"], i) if options_of.bias else None
                    x, slope = changed(ops, options_of, named, x, fall, bias)
                x = (x - shift) * scale_log2 if options_of.lowest_scores else ops.fma(x, scale_log2, shift * -1.0)
                x = ops.exp2_by_fma(x) if is_by_fma(i, self.fma_exponentials) else ops.exp2(x)
                shown = []
                if masked:
                    shown.append(limits[row] <= column)
                    shown += [limits[2 + row] >= column] if self.left else []
                if masked and options_of.masked:
                    shown.append(self._is_shown(mask_words, i))
                if self.of_bias:
                    shown.append(shift != math.inf)  # true of NaN
                y = x if slope is None or self.of_bias else x * slope
                for condition in shown:
                    x, y = ops.select(condition, x, -0.0), ops.select(condition, y, -0.0)
                p.append(x)
                w.append(y)
            return p, w

        arguments = (kind, shifts, self.fetched, self.mask_words, self.seat, I32, I32, types.UniTuple(I32, 4), F32, self._given)
        return straight_line(types.UniTuple(kind, 2), arguments, body)

    @property
    def splits(self) -> bool:
        """p is not w."""
        return self.options.softcap is not None

    def differentiate(self, masked: bool):
        """``f(w, dp, kept, deltas, options) -> ds``, the gradients of the products."""
        kind, options_of = fragment(self.columns), self.options

        def body(ops, w, dp, kept, deltas, options):
            found = []
            if options_of.dropout:
                factor = ops.as_integer(self._named(options)["keep_factor"])
            for i, (weight, x) in enumerate(zip(w, dp, strict=True)):
                delta = deltas[2 * (i >> 2) + (i & 1)]
                if options_of.dropout:
                    word = kept[i >> 1]
                    keeps = ops.permute(word, word, 0x3232 if i & 1 else 0x1010)  # all ones or 0
                    x = ops.fma(x, ops.as_float(keeps & factor), delta * -1.0)
                else:
                    x = x - delta
                ds = weight * x
                if masked:
                    ds = ops.select(ops.is_negative_zero(weight), ops.constant("float32", 0.0), ds)
                found.append(ds)
            return found

        return straight_line(kind, (kind, kind, self.kept, types.UniTuple(F32, self.columns // 4), self._given), body)

    def keep_factor(self):
        """``f(options) -> float32``: what the sum of dV is multiplied by."""
        return straight_line(F32, (self._given,), lambda ops, options: self._named(options)["keep_factor"])

    @property
    def fetches(self) -> bool:
        """There is something to read for a block."""
        return bool(self.options.bias) or self.options.alibi

    def no_words(self):
        """``f() -> fetched`` where there is nothing to read."""
        return straight_line(self.fetched, (), lambda ops: [ops.integer(0)] * len(self.fetched))
