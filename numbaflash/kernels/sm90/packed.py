"""Packed sequences: which one a tile belongs to, and the rows that a tile may write.

Tiles are numbered as `numbaflash.kernels.packing` says, so that the host knows how many there are without the boundaries; a tile finds its sequence
by bisection. A sequence is then a batch entry whose lengths are the differences of its boundaries, and whose rows begin at an offset that is
added to the coordinates of the loads. What follows it is another sequence's: loads may bring it, and the limits of the band and `unseen` keep
it out of the results, but a store must end where the sequence does. A tile of rows that the sequence has all of is stored as any other one; of
the rest, each row is, from shared memory.

Boundaries below 0 count as 0, those beyond the rows as their number. Where they descend then, the entry before the first sequence has all rows, and
sees nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba import cuda
from numba.cuda.types import Tuple, UniTuple, int32, int64, uint64, void

from ...ptx import shared
from ...ptx.fragment import STATISTICS
from ...ptx.index import following, plus, zero
from ...ptx.inline import I32, U32, VOID, emit, llvm_i32, make_intrinsic
from ...ptx.straight import straight_line
from ..bands import BOUNDS
from .options import Options
from .scores import Scores, element

inline = cuda.jit(device=True, inline="always")

PLACE = UniTuple(int32, 5)
"""(sequence, tile in it, its first row, how many of its rows are stored, its first row on the other side)."""

ALL_ASCEND = 3
"""Both sides ascend: a bit each, of q the lower one."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Straight-line bodies over the boundaries. ``tile`` rows of the side "q" or "k" are a tile."""

    options: Options
    side: str
    tile: int
    right: bool = False

    @property
    def _given(self):
        return Scores(16, self.options)._given

    @property
    def _other(self):
        return "k" if self.side == "q" else "q"

    def _bound(self, ops, named, side, entry):
        """First row of an entry; of the one past the last, as many rows as there are."""
        name, total = f"cu_seqlens_{side}", named[f"total_{side}"]
        wide, count = getattr(self.options, name) == "int64", named["sequences"] + 1
        there = ops.truth((entry > 0) & (entry <= count))
        x = ops.fetch("s64" if wide else "b32", element(ops, named, name, entry=entry - 1), 0, there, 0)
        if wide:
            x = ops.narrow(ops.minimum(ops.maximum(x, ops.wide(ops.integer(0))), ops.wide(total)))
        return ops.select(entry > count, total, ops.minimum(ops.maximum(x, ops.integer(0)), total))

    def _named(self, options):
        return {name: x for (name, _), x in zip(self.options.parameters(), options, strict=True)}

    def entries(self):
        """``f(options) -> int32``: sequences, and the two entries that are none."""
        return straight_line(int32, (self._given,), lambda ops, options: self._named(options)["sequences"] + 2)

    def ascend(self):
        """``f(entry, options) -> int32``: a bit for each side on which an entry ends no earlier than it begins; of q the lower one."""

        def body(ops, entry, options):
            named = self._named(options)
            q, k = (ops.truth(self._bound(ops, named, side, entry + 1) >= self._bound(ops, named, side, entry)) for side in "qk")
            return q | (k << 1)

        return straight_line(int32, (int32, self._given), body)

    def bisect(self):
        """``f(low, high, number, options) -> (low, high)``: half of the entries that a tile may belong to."""

        def body(ops, low, high, number, options):
            middle = (low + high) >> 1
            begun = self._bound(ops, self._named(options), self.side, middle) // self.tile + middle <= number
            return [ops.select(begun, middle, low), ops.select(begun, high, middle)]

        return straight_line(UniTuple(int32, 2), (int32, int32, int32, self._given), body)

    def place(self):
        """``f(entry, number, ascending, bounds, options) -> (PLACE, bounds)`` of the entry that bisection found.

        The bounds are as `Scores.bounds_of_entry` has them. Entries that are no sequence have no queries and no keys.
        """

        def body(ops, entry, number, ascending, bounds, options):
            named = self._named(options)
            mine, others = (1, 2) if self.side == "q" else (2, 1)
            ascends = (ascending & mine) != 0
            entry = ops.select(ascends, entry, ops.integer(0))
            first, end = (self._bound(ops, named, self.side, each) for each in (entry, entry + 1))
            end = ops.select(ascends, end, named[f"total_{self.side}"])
            other_first, other_end = (self._bound(ops, named, self._other, each) for each in (entry, entry + 1))
            tile = number - (first // self.tile + entry)
            is_sequence = (entry >= 1) & (entry <= named["sequences"])
            other = ops.select(is_sequence & ((ascending & others) != 0), other_end - other_first, ops.integer(0))
            rows, stored = ops.select(is_sequence, end - first, ops.integer(0)), end - first
            length_q, length_k = (rows, other) if self.side == "q" else (other, rows)
            _, _, offset, *window = bounds
            if self.options.per_entry:
                offset = length_k - length_q
            last = length_k
            if self.right:
                last = ops.maximum(ops.minimum(last, length_q + offset + window[1]), ops.integer(0))
            sequence = ops.maximum(ops.minimum(entry, named["sequences"]) - 1, ops.integer(0))
            return [[sequence, tile, first, stored, other_first], [length_q, last, offset, *window]]

        return straight_line(Tuple([PLACE, BOUNDS]), (int32, int32, int32, BOUNDS, self._given), body)


def seek(sequences: Sequences):
    """``f(number, ascending, bounds, options) -> (PLACE, bounds)`` of the tile of a number; ``ascending`` is what `vote_on_order` found."""
    entries, bisect, place = sequences.entries(), sequences.bisect(), sequences.place()

    @inline
    def find(number, ascending, bounds, options):
        low, high = zero(), entries(options)
        while following(low) < high:
            low, high = bisect(low, high, number, options)
        return place(low, number, ascending, bounds, options)

    return find


_put, _get = shared.put_words(8), shared.get_words(8)


@inline
def post(at, place, bounds):
    """Leave where a tile lies in shared memory, for all threads of the block to `read` when they need it, without registers that are kept for it."""
    _put(at, (*place, *bounds[:3]))


@inline
def read(at, bounds):
    """``(PLACE, bounds)``"""
    words = _get(at)
    return words[:5], (*words[5:], *bounds[3:])


def vote_on_order(sequences: Sequences, threads: int):
    """``f(thread, options) -> int32``: which sides ascend, a bit each as `ALL_ASCEND` has them; all threads of the block take part."""
    entries, ascend = sequences.entries(), sequences.ascend()
    everything = straight_line(int32, (), lambda ops: ops.integer(ALL_ASCEND))
    both = straight_line(int32, (int32, int32), lambda ops, a, b: a & b)
    bit = straight_line(int32, (int32, int32), lambda ops, found, mask: found & mask)
    joined = straight_line(int32, (int32, int32), lambda ops, q, k: ops.truth(q != 0) | (ops.truth(k != 0) << 1))

    @inline
    def vote(thread, options):
        found, entry = everything(), thread
        while entry < entries(options):
            found = both(found, ascend(entry, options))
            entry = plus(entry, threads)
        return joined(cuda.syncthreads_and(bit(found, 1)), cuda.syncthreads_and(bit(found, 2)))

    return vote


def address_of(options: Options, name: str, pack: int = 1):
    """``f(row, head, options) -> (address, bytes a row, bytes a head)`` of a result that is stored by rows, from a row of a tile's heads on."""

    def body(ops, row, head, options_given):
        named = {each: x for (each, _), x in zip(options.parameters(), options_given, strict=True)}
        return _address(ops, named[name], named[f"{name}_row"], named[f"{name}_head"], row, head * pack)

    given = Scores(16, options)._given
    return straight_line(UniTuple(int64, 3), (int32, int32, given), body)


def _address(ops, base, of_row, of_head, row, head):
    return [base + ops.wide(row) * of_row + ops.wide(head) * of_head, of_row, of_head]


address_from = straight_line(UniTuple(int64, 3), (uint64, int64, int64, int32, int32), _address)
"""``f(base, bytes a row, bytes a head, row, head)``: the same of an array that is no option."""


def is_whole(rows: int):
    """``f(first, count) -> int32``: whether so many rows from the first on are all there."""
    return straight_line(int32, (int32, int32), lambda ops, first, count: ops.truth(first + rows <= count))


def store_rows(columns: int, panel_bytes: int, first_panel: int, panels: int, pack: int = 1):
    """``f(base, thread, (address, of_row, of_head), count)``: the first rows of a tile's panels, 64 rows in the 128-byte swizzle, to global memory.

    Rows are ``count`` queries of ``pack`` heads each; of the columns, those below ``columns`` are there, a multiple of 8. The warpgroup's 128 threads
    take 16 bytes each.
    """
    shift = pack.bit_length() - 1

    def constant(n, kind=llvm_i32):
        return ir.Constant(kind, n)

    def generate(builder, args, _):
        base, thread, place, count = args
        # What follows from it, addresses for the most part, is not to be kept in registers from tile to tile.
        thread = emit(builder, llvm_i32, [thread], "mov.u32 $0, $1;", "=r,r")
        address, of_row, of_head = (builder.extract_value(place, i) for i in range(3))
        wide = address.type
        row, piece = builder.lshr(thread, constant(3)), builder.and_(thread, constant(7))
        swizzled = builder.shl(builder.xor(piece, builder.and_(row, constant(7))), constant(4))
        source = builder.add(builder.add(base, builder.shl(row, constant(7))), swizzled)
        target = builder.add(address, builder.zext(builder.shl(piece, constant(4)), wide))
        for rows in range(0, 64, 16):
            at = builder.add(row, constant(rows))
            query, head = builder.lshr(at, constant(shift)), builder.and_(at, constant(pack - 1))
            to = builder.add(target, builder.mul(builder.sext(query, wide), of_row))
            if pack > 1:
                to = builder.add(to, builder.mul(builder.sext(head, wide), of_head))
            there = builder.icmp_signed("<", query, count)
            for panel in range(panels):
                valid, column = there, 64 * (first_panel + panel)
                if columns - column < 64:
                    valid = builder.and_(valid, builder.icmp_signed("<", piece, constant((columns - column) // 8)))
                text = (
                    "{.reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $2, 0;\n"
                    f"ld.shared.v4.b32 {{a, b, c, d}}, [$1+{panel * panel_bytes + 128 * rows}];\n"
                    f"@p st.global.v4.b32 [$0+{2 * column}], {{a, b, c, d}};}}"
                )
                emit(builder, ir.VoidType(), [to, source, builder.zext(valid, llvm_i32)], text, "l,r,r,~{memory}")

    return make_intrinsic(VOID, (U32, I32, UniTuple(int64, 3), I32), generate)


def write_lse(options: Options, pack: int):
    """``f(lse, row, lane, first, stored, head, statistics, options)``: the LSE of a thread's two rows of a tile's heads, which `Scores.finish` has
    left in the place of m."""
    given = Scores(16, options)._given

    def body(ops, lse, row, lane, first, stored, head, statistics, options_given):
        named = {each: x for (each, _), x in zip(options.parameters(), options_given, strict=True)}
        for r, value in ((row, statistics[0]), (row + 8, statistics[1])):
            query, head_row = r // pack, ops.wide(head * pack + r % pack)
            at = lse + (head_row * ops.wide(named["total_q"]) + ops.wide(first + query)) * 4
            ops.store_at(at, value, (query < stored) & ((lane & 3) == 0))

    return straight_line(void, (uint64, *(int32,) * 5, STATISTICS, given), body)
