"""Who computes which keys of which sequence, where only the device knows the lengths.

An *item* is a tile of queries of a key/value head of a batch entry, with the tiles of keys that these queries see. Items lie one after the other,
entry by entry, on a line as long as all their tiles; an item without keys still takes one tile, for its result has to be written. Each block takes an
equal piece of the line, and so ends with the others whatever the lengths are: it computes the end of an item, whole items, and the beginning of one.
What is no whole item is a partial result; who begins an item tells the kernel that merges how many of those it has. A block finds the place of its
piece by two walks of each warp over the lengths, 128 at a time.

With a fixed number of parts, each item is cut into as many pieces of equal length instead, of which blocks take one after the other: then what is
computed for a sequence does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda
from numba.cuda.types import Tuple, UniTuple, int32

from ....ptx import warp
from ....ptx.index import minus, plus, zero
from ....ptx.straight import straight_line
from ...bands import BOUNDS
from ..scores import Scores
from .config import LANES, DecodeConfig

inline = cuda.jit(device=True, inline="always")

ENTRIES = 4  # that a lane looks at together
SIZES = UniTuple(int32, 4)
"""(batch entries, key/value heads, tiles of queries of one, blocks or parts)."""

PART = UniTuple(int32, 7)
"""(head, tile of queries, first tile of keys, one past the last, slot of the partial result or -1, where on the line it and its item end)."""


WORDS = UniTuple(int32, 4)


@dataclass(frozen=True, slots=True)
class Shares:
    """Straight-line bodies over the lengths."""

    config: DecodeConfig

    @property
    def _scores(self):
        return Scores(self.config.keys, self.config.options)

    @property
    def _given(self):
        return self._scores._given

    def _range(self, ops, bounds):
        """First tile of keys that an entry's queries see, and one past the last."""
        _, end, offset, left, _ = bounds
        first = ops.maximum(offset - left, ops.integer(0)) // self.config.tile if self.config.left else ops.integer(0)
        return first, ops.maximum((end + (self.config.tile - 1)) // self.config.tile, first)

    def _own(self, ops, entry, bounds, options):
        return self._scores.own_bounds(ops, entry, bounds, options, self.config.right)

    def costs(self):
        """``f(lane, base, bounds, sizes, options) -> 4 numbers``: tiles of all items of the lane's entries from ``base`` on, 0 past the last one."""

        def body(ops, lane, base, bounds, sizes, options):
            batch, heads, row_tiles, _ = sizes
            found = []
            for n in range(ENTRIES):
                entry = base + lane * ENTRIES + n
                first, end = self._range(ops, self._own(ops, ops.minimum(entry, batch - 1), bounds, options))
                found.append(ops.select(entry < batch, ops.maximum(end - first, ops.integer(1)) * heads * row_tiles, 0))
            return found

        return straight_line(UniTuple(int32, ENTRIES), (int32, int32, BOUNDS, SIZES, self._given), body)

    def place_in(self):
        """``f(place, before, costs) -> (number of the entry among a lane's, where it begins)``, the lane's beginning at ``before``."""

        def body(ops, place, before, costs):
            number, start = ops.integer(0), before
            for cost in costs[:-1]:
                before = before + cost
                further = before <= place
                number, start = number + ops.truth(further), ops.select(further, before, start)
            return [number, start]

        return straight_line(UniTuple(int32, 2), (int32, int32, UniTuple(int32, ENTRIES)), body)

    def entry(self):
        """``f(entry, bounds, sizes, options) -> (bounds of the entry, (tiles of an item, of all of them))``."""

        def body(ops, entry, bounds, sizes, options):
            own = self._own(ops, entry, bounds, options)
            first, end = self._range(ops, own)
            cost = ops.maximum(end - first, ops.integer(1))
            return [own, [cost, cost * sizes[1] * sizes[2]]]

        return straight_line(Tuple([BOUNDS, UniTuple(int32, 2)]), (int32, BOUNDS, SIZES, self._given), body)

    def part(self):
        """``f(place, stop, start, cost, block, bounds, sizes) -> PART`` of the block whose piece has come to a place of an entry that begins at
        ``start``."""

        def body(ops, place, stop, start, cost, block, bounds, sizes):
            item, at = (place - start) // cost, (place - start) % cost
            item_end = start + (item + 1) * cost
            end = ops.minimum(item_end, stop)
            slot = ops.select(at > 0, block * 2, ops.select(end < item_end, block * 2 + 1, ops.integer(-1)))
            first, last = self._range(ops, bounds)
            return [item // sizes[2], item % sizes[2], first + at, ops.minimum(first + at + (end - place), last), slot, end, item_end]

        return straight_line(PART, (*(int32,) * 5, BOUNDS, SIZES), body)

    def found(self):
        """``f(part, entry, block, blocks, total, sizes) -> (begins, words)``: whether a part begins an item; how many partial results the item has
        where others end it, else 0; the block; the number of the item."""

        def body(ops, part, entry, block, blocks, total, sizes):
            head, row_tile, _, _, slot, _, item_end = part
            last = ops.narrow((ops.wide(item_end) * ops.wide(blocks) - 1) // ops.wide(total))  # the block that ends it
            goes_on = slot == block * 2 + 1
            count = ops.select(goes_on, last - block + 1, ops.integer(0))
            return [ops.truth(goes_on | (slot < 0)), [count, block, (entry * sizes[1] + head) * sizes[2] + row_tile, ops.integer(0)]]

        return straight_line(Tuple([int32, WORDS]), (PART, *(int32,) * 4, SIZES), body)

    def parts(self):
        """``f(part, entry, block, blocks, total, cost, sizes) -> (origin, count, item)`` for `merging.Partials.add`, of the item of a part."""

        def body(ops, part, entry, block, blocks, total, cost, sizes):
            head, row_tile, _, _, _, _, item_end = part
            item = (entry * sizes[1] + head) * sizes[2] + row_tile
            if not self.config.balanced:
                return [item, sizes[3], item]
            last, first = (ops.narrow((ops.wide(place) * ops.wide(blocks) - 1) // ops.wide(total)) for place in (item_end, item_end - cost + 1))
            return [first, last - first + 1, item]

        return straight_line(UniTuple(int32, 3), (PART, *(int32,) * 5, SIZES), body)

    def fixed_part(self):
        """``f(unit, bounds, sizes) -> PART`` of a unit of an entry where the number of parts is fixed."""

        def body(ops, unit, bounds, sizes):
            _, heads, row_tiles, parts = sizes
            item, number = unit // parts, unit % parts
            first, last = self._range(ops, bounds)
            each = (last - first + parts - 1) // parts
            begin = ops.minimum(first + number * each, last)
            slot = ops.select(parts > 1, unit, ops.integer(-1))
            return [item % (heads * row_tiles) // row_tiles, item % row_tiles, begin, ops.minimum(begin + each, last), slot, unit, unit]

        return straight_line(PART, (int32, BOUNDS, SIZES), body)


share_of = straight_line(
    UniTuple(int32, 2),
    (int32,) * 3,
    lambda ops, total, block, blocks: [ops.narrow(ops.wide(total) * ops.wide(n) // ops.wide(blocks)) for n in (block, block + 1)],
)
"""``f(total, block, blocks) -> (first, end)``: a block's piece of a line; blocks past the last one have none."""

entry_of_unit = straight_line(int32, (int32, UniTuple(int32, 4)), lambda ops, unit, sizes: unit // (sizes[1] * sizes[2] * sizes[3]))
"""``f(unit, sizes)`` where the number of parts is fixed."""


def seek(shares: Shares):
    """``total(lane, bounds, sizes, options)``, how long the line is, and ``find(place, lane, bounds, sizes, options)``, the entry at a place of it
    and where that begins; each by a warp."""
    costs, place_in = shares.costs(), shares.place_in()
    add_up = straight_line(int32, (UniTuple(int32, ENTRIES),), lambda ops, costs: costs[0] + costs[1] + (costs[2] + costs[3]))
    next_base = straight_line(int32, (int32,), lambda ops, base: base + ENTRIES * LANES)
    begun_by = straight_line(int32, (int32, int32), lambda ops, upto, place: ops.truth(upto > place))
    entry_of = straight_line(int32, (int32,) * 3, lambda ops, base, lane, number: base + lane * ENTRIES + number)

    @inline
    def total(lane, bounds, sizes, options):
        found, base = zero(), zero()
        while base < sizes[0]:
            found = plus(found, warp.total(add_up(costs(lane, base, bounds, sizes, options))))
            base = next_base(base)
        return found

    @inline
    def find(place, lane, bounds, sizes, options):
        before, base = zero(), zero()
        mine = costs(lane, base, bounds, sizes, options)
        upto = warp.running_total(add_up(mine))
        lanes = warp.ballot(begun_by(upto, place))
        while lanes == 0:
            before = warp.shuffle_index(upto, LANES - 1)
            base = next_base(base)
            mine = costs(lane, base, bounds, sizes, options)
            upto = plus(before, warp.running_total(add_up(mine)))
            lanes = warp.ballot(begun_by(upto, place))
        number, start = place_in(place, minus(upto, add_up(mine)), mine)
        first = warp.first_lane(lanes)
        return warp.shuffle_index(entry_of(base, lane, number), first), warp.shuffle_index(start, first)

    return total, find
