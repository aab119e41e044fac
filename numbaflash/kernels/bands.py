"""Which blocks of keys the queries of a tile see, and which of them only in part.

``bounds`` is (seqlen_q, seqlen_k, offset, left, right) of a `Problem`. Rows are queries, or with packed heads the heads of
a query one after the other: row r is query ``r // pack``.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.cuda.types import UniTuple, int32

from ..ptx.straight import straight_line

BOUNDS = UniTuple(int32, 5)
NEVER = 2**30
"""A column that no sequence has."""


@dataclass(frozen=True, slots=True)
class Band:
    """What is compiled in: tile sizes, heads that share a tile, whether the band is bounded on a side, and whether tiles may lie past the last
    query."""

    q_tile: int
    kv_block: int
    pack: int
    left: bool
    right: bool
    padded: bool = False

    def _blocks(self, ops, row, last_row, bounds):
        """First block that the rows see, and one past the last."""
        _, seqlen_k, offset, left, right = bounds
        first, end = ops.integer(0), (seqlen_k + (self.kv_block - 1)) // self.kv_block
        if self.right:
            end = ops.maximum(ops.minimum(end, (last_row // self.pack + offset + right) // self.kv_block + 1), 0)
        if self.padded:
            end = ops.select(row <= last_row, end, 0)
        if self.left:
            first = ops.maximum(ops.minimum((row // self.pack + offset - left) // self.kv_block, end), 0)
        return [first, end]

    def _last_row(self, ops, row, rows, bounds):
        return ops.minimum(row + (rows - 1), bounds[0] * self.pack - 1)

    def of_tile(self):
        """``f(q_block, bounds) -> (first, end)``: the blocks that a tile steps through."""

        def body(ops, q_block, bounds):
            row = q_block * self.q_tile
            return self._blocks(ops, row, self._last_row(ops, row, self.q_tile, bounds), bounds)

        return straight_line(UniTuple(int32, 2), (int32, BOUNDS), body)

    def of_warpgroup(self):
        """``f(q_block, warpgroup, bounds) -> (first, end, my_first, my_end, left_border, right_border, query)`` of 64 rows of a tile.

        The rows see blocks ``my_first`` to ``my_end``, those before ``left_border`` and from ``right_border`` on only in part. ``query`` is
        their first.
        """

        def body(ops, q_block, warpgroup, bounds):
            _, _, offset, left, right = bounds
            tile_row = q_block * self.q_tile
            first, end = self._blocks(ops, tile_row, self._last_row(ops, tile_row, self.q_tile, bounds), bounds)
            row = tile_row + warpgroup * 64
            last_row = self._last_row(ops, row, 64, bounds)
            query, last_query = row // self.pack, last_row // self.pack
            my_first, my_end = first, end
            if self.right:
                my_end = ops.maximum(ops.minimum(end, (last_query + offset + right) // self.kv_block + 1), first)
            if self.left:
                my_first = ops.maximum((query + offset - left) // self.kv_block, first)
            nothing = (last_row < row) | (my_first >= my_end)
            my_first, my_end = ops.select(nothing, first, my_first), ops.select(nothing, first, my_end)
            left_border, right_border = my_first, my_end
            if self.right:
                right_border = ops.maximum((query + offset + right + 1) // self.kv_block, my_first)
            if self.left:
                left_border = ops.maximum((last_query + offset - left + (self.kv_block - 1)) // self.kv_block, my_first)
            return [first, end, my_first, my_end, left_border, right_border, query]

        return straight_line(UniTuple(int32, 7), (int32, int32, BOUNDS), body)

    def limits(self):
        """``f(row, column, bounds) -> (first0, first1, last0, last1)``: keys that rows ``row`` and ``row + 8`` see, counted from ``column``.

        ``last`` heeds the number of keys too; ``first`` is 0 without a left bound.
        """

        return straight_line(UniTuple(int32, 4), (int32, int32, BOUNDS), self._limits)

    def _limits(self, ops, row, column, bounds):
        _, seqlen_k, offset, left, right = bounds
        end = seqlen_k - 1 - column
        firsts, lasts = [], []
        for r in (row, row + 8):
            key = r // self.pack + offset - column
            firsts.append(key - left if self.left else ops.integer(0))
            lasts.append(ops.minimum(key + right, end) if self.right else end)
        return [*firsts, *lasts]

    def limits_of_thread(self):
        """``f(row, lane, bounds)``: the same from a thread's lane, without registers that are kept for it."""

        def body(ops, row, lane, bounds):
            return limits(ops, ops.opaque(row), (ops.opaque(lane) & 3) * 2, bounds)

        limits = self._limits
        return straight_line(UniTuple(int32, 4), (int32, int32, BOUNDS), body)


@dataclass(frozen=True, slots=True)
class KeyBand:
    """The same seen from the keys: which blocks of queries see a tile of keys. Sizes and bounds that are compiled in, and whether tiles may lie past
    the last key."""

    kv_tile: int
    q_block: int
    left: bool
    right: bool
    padded: bool = False

    def _blocks(self, ops, tile, bounds):
        """(first, plain_first, plain_end, end): blocks that see a key of the tile; from the plain ones every query sees every key.

        A tile that reaches past the last key has no plain blocks. Of ``padded`` ones, plain blocks hold no padding of queries either.
        """
        seqlen_q, seqlen_k, offset, left, right = bounds
        key = tile * self.kv_tile
        last_key = key + (self.kv_tile - 1)
        first, end = ops.integer(0), (seqlen_q + (self.q_block - 1)) // self.q_block
        if self.padded:
            end = ops.select(key < seqlen_k, end, 0)
        if self.right:
            first = ops.maximum(ops.minimum((key - offset - right) // self.q_block, end), 0)
        if self.left:
            end = ops.maximum(ops.minimum((ops.minimum(last_key, seqlen_k - 1) - offset + left) // self.q_block + 1, end), first)
        plain_first, plain_end = first, end
        if self.right:
            plain_first = ops.maximum(ops.minimum((last_key - offset - right + (self.q_block - 1)) // self.q_block, end), first)
        if self.left:
            plain_end = ops.maximum(ops.minimum((key - offset + left + 1) // self.q_block, end), plain_first)
        if self.padded:
            plain_end = ops.maximum(ops.minimum(plain_end, seqlen_q // self.q_block), plain_first)
        whole = last_key < seqlen_k
        return first, ops.select(whole, plain_first, end), ops.select(whole, plain_end, end), end

    def walk(self):
        """``f(tile, group, step, bounds) -> (block, plain, border, end)``: how a tile steps through the blocks that see it.

        From the first block to the last where ``step`` is 1, from the last to the first where it is -1. Each block is ``group`` steps, one a
        query head. ``block`` is that of the first step; steps from ``plain`` to ``border`` are plain, ``end`` is their number.
        """

        def body(ops, tile, group, step, bounds):
            first, plain_first, plain_end, end = self._blocks(ops, tile, bounds)
            up = step > 0
            plain, border = ops.select(up, plain_first - first, end - plain_end), ops.select(up, plain_end - first, end - plain_first)
            return [ops.select(up, first, end - 1), plain * group, border * group, (end - first) * group]

        return straight_line(UniTuple(int32, 4), (int32, int32, int32, BOUNDS), body)

    def turn(self, last_first):
        """``f(tile, block, bounds, tiles)``: tiles that see the block before this one does, in the order of keys or the last ones first."""

        def body(ops, tile, block, bounds, tiles):
            _, seqlen_k, offset, left, right = bounds
            query = block * self.q_block + offset
            if self.padded:
                tiles = (seqlen_k + (self.kv_tile - 1)) // self.kv_tile
            if last_first:
                last = (query + (self.q_block - 1) + right) // self.kv_tile if self.right else tiles - 1
                return ops.minimum(last, tiles - 1) - tile
            return tile - (ops.maximum((query - left) // self.kv_tile, ops.integer(0)) if self.left else ops.integer(0))

        return straight_line(int32, (int32, int32, BOUNDS, int32), body)

    def seen(self):
        """``f(key, bounds) -> (seen0, seen1)``: 1 where some query sees ``key`` or ``key + 8``, else 0."""

        def body(ops, key, bounds):
            seqlen_q, seqlen_k, offset, left, right = bounds
            numbers = []
            for j in (key, key + 8):
                seen = j < seqlen_k
                if self.right:
                    seen &= j - offset - right < seqlen_q
                if self.left:
                    seen &= j - offset + left >= 0
                numbers.append(ops.truth(seen))
            return numbers

        return straight_line(UniTuple(int32, 2), (int32, BOUNDS), body)

    def limits(self):
        """``f(key, column, bounds) -> (first0, first1, last0, last1)``: queries that see keys ``key`` and ``key + 8``, counted from ``column``.

        Nobody sees a key past the last one. ``last`` is 0 without a left bound.
        """

        return straight_line(UniTuple(int32, 4), (int32, int32, BOUNDS), self.limits_of)

    def limits_of(self, ops, key, column, bounds):
        """Straight-line `limits`."""
        _, seqlen_k, offset, left, right = bounds
        firsts, lasts = [], []
        for j in (key, key + 8):
            query = j - offset - column
            firsts.append(ops.select(j < seqlen_k, query - right if self.right else ops.integer(-NEVER), NEVER))
            lasts.append(query + left if self.left else ops.integer(0))
        return [*firsts, *lasts]
