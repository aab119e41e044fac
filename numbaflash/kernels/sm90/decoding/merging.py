"""Partial results: merged among the warps of a block, and among blocks, by the block merge of the online softmax; and what is written in the end.

A partial result is (O, m, l) of a tile of queries: of O, tiles of 8 columns in the order of lanes, so that a thread finds the elements that it would
have computed itself. The warps that merge share the columns among them: ``share`` numbers those tiles of columns that one warp merges.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.cuda.types import Tuple, UniTuple, float32, int32, uint64, void

from ....ptx.fragment import STATISTICS, fragment
from ....ptx.straight import straight_line
from .config import LANES, DecodeConfig, SharedMemory, Workspace
from .loading import STRIDES

MERGED = UniTuple(float32, 4)
"""(m0, m1, l0, l1) of a thread's two rows, l over the thread's own columns of scores."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Straight-line bodies, for warps with so many ``tiles`` of columns each."""

    config: DecodeConfig
    tiles: int

    @property
    def share(self):
        """Numba type of what a thread holds of a warp's share of columns."""
        return UniTuple(float32, self.tiles * self.config.kept)

    @property
    def partial(self):
        """Numba type of a share, and its statistics."""
        return Tuple([self.share, MERGED])

    def _row(self, i):
        return i % self.config.kept // 2

    def put(self):
        """``f(results, statistics_at, lane, accumulator, statistics)``: a warp's result to its place in shared memory."""
        config, memory = self.config, SharedMemory.of(self.config)

        def body(ops, results, statistics_at, lane, acc, statistics):
            at = results + lane * (4 * config.kept)
            for tile in range(config.columns // 8):
                ops.put_floats("shared", at, tile * memory.tile_bytes, acc[4 * tile : 4 * tile + config.kept])
            ops.put_floats("shared", statistics_at + lane * 16, 0, statistics[:4])

        return straight_line(void, (int32, int32, int32, fragment(config.columns), STATISTICS), body)

    def merge_warps(self):
        """``f(results, statistics_at, share, lane, scale_log2) -> partial``: of all warps, from shared memory."""
        config, memory = self.config, SharedMemory.of(self.config)

        def body(ops, results, statistics_at, share, lane, scale_log2):
            at = results + (share * (self.tiles * memory.tile_bytes) + lane * (4 * config.kept))
            parts = []
            for n in range(config.warps):
                statistics = ops.floats_at("shared", statistics_at + lane * 16, n * LANES * 16, 4)
                values = []
                for tile in range(self.tiles):
                    values += ops.floats_at("shared", at, n * memory.results_bytes + tile * memory.tile_bytes, config.kept)
                parts.append((values, statistics))
            values, statistics = self._merge(ops, parts, scale_log2)
            return [values, statistics]

        return straight_line(self.partial, (int32, int32, int32, int32, float32), body)

    def own(self):
        """``f(accumulator, statistics) -> partial`` of a warp that has its share of the columns of all keys."""
        config = self.config

        def body(ops, acc, statistics):
            return [[x for i, x in enumerate(acc) if i % 4 < config.kept], statistics[:4]]

        return straight_line(self.partial, (fragment(config.warp_columns), STATISTICS), body)

    def _merge(self, ops, parts, scale_log2):
        top = []
        for r in (0, 1):
            m = parts[0][1][r]
            for _, statistics in parts[1:]:
                m = ops.maximum(m, statistics[r])
            top.append(m)
        base = [ops.select(m == -float("inf"), ops.constant("float32", 0.0), m) for m in top]
        total, l = None, [None, None]
        for values, statistics in parts:
            weights = [ops.exp2((statistics[r] - base[r]) * scale_log2) for r in (0, 1)]
            weighted = [statistics[2 + r] * weights[r] for r in (0, 1)]
            l = weighted if total is None else [x + y for x, y in zip(l, weighted, strict=True)]
            if total is None:
                total = [x * weights[self._row(i)] for i, x in enumerate(values)]
            else:
                total = [ops.fma(x, weights[self._row(i)], y) for i, (x, y) in enumerate(zip(values, total, strict=True))]
        return total, [*top, *l]

    def nothing(self):
        """``f() -> partial`` of no key."""

        def body(ops):
            zero, lowest = ops.constant("float32", 0.0), ops.constant("float32", -float("inf"))
            return [[zero] * len(self.share), [lowest, lowest, zero, zero]]

        return straight_line(self.partial, (), body)

    def store(self):
        """``f(slots, slot, row_warp, share, lane, partial)``: to the workspace; share 0 brings the statistics."""
        config = self.config
        slot_bytes, statistics_at = (getattr(Workspace.of(config), name) for name in ("slot_bytes", "statistics"))
        tile_bytes = LANES * 4 * config.kept

        def body(ops, slots, slot, row_warp, share, lane, partial):
            values, statistics = partial
            slot = slots + ops.wide(slot * config.row_warps + row_warp) * slot_bytes
            at = slot + ops.wide(share * (self.tiles * tile_bytes) + lane * (4 * config.kept))
            for tile in range(self.tiles):
                ops.put_floats("global", at, tile * tile_bytes, values[tile * config.kept : (tile + 1) * config.kept])
            ops.put_floats("global", slot + ops.wide(lane * 16), statistics_at, statistics, share == 0)

        return straight_line(void, (uint64, *(int32,) * 4, self.partial), body)

    def add(self):
        """``f(partial, slots, origin, row_warp, part, count, share, lane, scale_log2) -> partial``: together with some of an item's partial
        results in the workspace, numbered ``part``, ``part + merge_warps``, ... of ``count``.

        Where blocks have equal shares, ``origin`` is the block that has begun it, and the others' partial results are the first of their blocks;
        otherwise it is the number of the item.
        """
        config = self.config
        slot_bytes, statistics_at = (getattr(Workspace.of(config), name) for name in ("slot_bytes", "statistics"))
        tile_bytes = LANES * 4 * config.kept

        def body(ops, partial, slots, origin, row_warp, part, count, share, lane, scale_log2):
            parts = [partial]
            for n in range(config.merged_at_once):
                number = part + config.merge_warps * n
                there = number < count
                number = ops.select(there, number, 0)
                slot = (origin + number) * 2 + ops.truth(number == 0) if config.balanced else origin * count + number
                slot = slots + ops.wide(slot * config.row_warps + row_warp) * slot_bytes
                m = ops.floats_at("global.cg", slot + ops.wide(lane * 16), statistics_at, 4)
                at = slot + ops.wide(share * (self.tiles * tile_bytes) + lane * (4 * config.kept))
                values = []
                for tile in range(self.tiles):
                    values += ops.floats_at("global.cg", at, tile * tile_bytes, config.kept, there)
                parts.append((values, [*(ops.select(there, x, -float("inf")) for x in m[:2]), *(ops.select(there, x, 0.0) for x in m[2:])]))
            values, statistics = self._merge(ops, parts, scale_log2)
            return [values, statistics]

        return straight_line(self.partial, (self.partial, uint64, *(int32,) * 6, float32), body)

    def put_share(self):
        """``f(results, statistics_at, lane, partial)``: a warp's partial result of one share to shared memory."""
        config = self.config
        tile_bytes = LANES * 4 * config.kept

        def body(ops, results, statistics_at, lane, partial):
            values, statistics = partial
            for tile in range(self.tiles):
                ops.put_floats("shared", results + lane * (4 * config.kept), tile * tile_bytes, values[tile * config.kept : (tile + 1) * config.kept])
            ops.put_floats("shared", statistics_at + lane * 16, 0, statistics)

        return straight_line(void, (int32, int32, int32, self.partial), body)

    def merge_shares(self, warps: int):
        """``f(results, statistics_at, lane, scale_log2) -> partial``: what so many warps have put, one after the other."""
        config = self.config
        tile_bytes = LANES * 4 * config.kept

        def body(ops, results, statistics_at, lane, scale_log2):
            parts = []
            for n in range(warps):
                values = []
                for tile in range(self.tiles):
                    values += ops.floats_at("shared", results + lane * (4 * config.kept), (n * self.tiles + tile) * tile_bytes, config.kept)
                parts.append((values, ops.floats_at("shared", statistics_at + lane * 16, n * LANES * 16, 4)))
            values, statistics = self._merge(ops, parts, scale_log2)
            return [values, statistics]

        return straight_line(self.partial, (int32, int32, int32, float32), body)

    def write(self):
        """``f(out, strides, entry, head, row, share, lane, seqlen_q, share_values, statistics)``: the thread's elements of the output, of finished
        statistics."""
        config = self.config

        def body(ops, out, strides, entry, head, row, share, lane, seqlen_q, values, statistics):
            of_batch, of_query, of_head = strides
            factors = statistics[4:]
            for r in range(config.kept // 2):
                query, member = (row + 8 * r) // config.group, (row + 8 * r) % config.group
                at = out + ops.wide(entry) * of_batch + ops.wide(query) * of_query + ops.wide(head * config.group + member) * of_head
                for tile in range(self.tiles):
                    column = (share * self.tiles + tile) * 8 + (lane & 3) * 2
                    pair = values[tile * config.kept + 2 * r : tile * config.kept + 2 * r + 2]
                    pair = [ops.select(factors[r] == 0.0, ops.constant("float32", 0.0), x * factors[r]) for x in pair]
                    word = ops.two_16bit(config.element, *pair)
                    ops.put(at + ops.wide(column * 2), word, (query < seqlen_q) & (column < config.head_dim_v))

        return straight_line(void, (uint64, STRIDES, *(int32,) * 6, self.share, STATISTICS), body)

    def write_lse(self):
        """``f(lse, entry, head, row, share, lane, heads, seqlen_q, statistics)``: (batch, heads, seqlen_q), row-major, if there is an address."""
        config = self.config

        def body(ops, lse, entry, head, row, share, lane, heads, seqlen_q, statistics):
            for r in range(config.kept // 2):
                query, member = (row + 8 * r) // config.group, (row + 8 * r) % config.group
                of_head = ops.wide(entry) * ops.wide(heads * config.group) + ops.wide(head * config.group + member)
                at = lse + (of_head * ops.wide(seqlen_q) + ops.wide(query)) * 4
                ops.store_at(at, statistics[r], (query < seqlen_q) & ((lane & 3) == 0) & (share == 0) & (lse != 0))

        return straight_line(void, (uint64, *(int32,) * 7, STATISTICS), body)

    def as_statistics(self):
        """``f(partial) -> (share, statistics)`` as the end of a softmax takes them."""

        def body(ops, partial):
            one = ops.constant("float32", 1.0)
            return [partial[0], [*partial[1], one, one]]

        return straight_line(Tuple([self.share, STATISTICS]), (self.partial,), body)
