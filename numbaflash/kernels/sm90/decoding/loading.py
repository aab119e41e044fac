"""Loads: the page of a key, keys and values of a warp's step to shared memory, queries to registers.

Each lane copies 16 bytes at a time by cp.async, eight lanes a row, so that any page size and any strides are read in place. What lies outside of the
keys that the batch entry's queries see is not read; it is 0 in shared memory, so that nothing it may hold reaches a product.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba.cuda.types import Tuple, UniTuple, int32, int64, uint64, void

from ....ptx import mma
from ....ptx.straight import straight_line
from .config import DecodeConfig, SharedMemory

ROWS = 4
"""Rows that a warp copies at once, eight lanes a row."""

STRIDES = UniTuple(int64, 3)
"""(batch or page, row or slot of a page, head), in bytes."""

SOURCE = Tuple([uint64, STRIDES])
"""Of k or v: address of the head of a batch entry or, where there are pages, of the first page; strides."""

TABLE = Tuple([uint64, int64, int32])
"""Address of the row of the page table that belongs to a batch entry, bytes from page to page, number of pages."""

SEEN = UniTuple(int32, 2)
"""First key that a batch entry's queries see, and one past the last."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Straight-line bodies. ``lane`` counts the threads that load a step together: a warp's, or a block's."""

    config: DecodeConfig

    @property
    def threads(self) -> int:
        return 32 if self.config.division == "keys" else self.config.threads

    @property
    def turns(self) -> int:
        """Rows that a thread copies."""
        return -(-self.config.keys * 8 // self.threads)

    @property
    def _one_page(self) -> bool:
        """All keys of a step lie in one page."""
        return self.config.page_size % self.config.keys == 0

    @property
    def pages(self):
        """Numba type of the pages of a thread's rows in a step."""
        return UniTuple(int32, 1 if self._one_page else self.turns)

    def _row(self, lane, turn):
        return (lane >> 3) + turn * (self.threads // 8)

    def find_pages(self):
        """``f(step, lane, seen, table) -> pages``. Entries of the table that no key needs are not read; numbers of pages that there are not count as
        the nearest one."""
        page_size = self.config.page_size

        def body(ops, step, lane, seen, table):
            if not page_size:
                return [ops.integer(0)]
            address, of_page, count = table
            found = []
            for turn in range(1 if self._one_page else self.turns):
                first = step * self.config.keys
                if self._one_page:
                    last = ops.minimum(first + (self.config.keys - 1), seen[1] - 1)
                    key, there = last, (first < seen[1]) & (last >= seen[0])
                else:
                    key = first + self._row(lane, turn)
                    there = (key >= seen[0]) & (key < seen[1])
                key = ops.select(there, key, 0)
                page = ops.fetch("b32", address + ops.wide(key // page_size) * of_page, 0, ops.truth(there), 0)
                found.append(ops.maximum(ops.minimum(page, count - 1), ops.integer(0)))
            return found

        return straight_line(self.pages, (int32, int32, SEEN, TABLE), body)

    def load(self):
        """``f(stage, step, lane, pages, seen, k, v)``: a step's keys and values."""
        config, memory = self.config, SharedMemory.of(self.config)

        def body(ops, stage, step, lane, pages, seen, *sources):
            piece = lane & 7
            for turn in range(self.turns):
                row = self._row(lane, turn)
                key = step * config.keys + row
                there = (key >= seen[0]) & (key < seen[1])
                within = None if config.keys * 8 % self.threads == 0 else row < config.keys
                for (address, strides), dim, first, pitch in (
                    (sources[0], config.head_dim, 0, memory.k_pitch),
                    (sources[1], config.head_dim_v, memory.v, memory.v_pitch),
                ):
                    of_batch, of_row, _ = strides
                    if config.page_size:
                        page = pages[0 if self._one_page else turn]
                        at = address + ops.wide(page) * of_batch + ops.wide(key % config.page_size) * of_row
                    else:
                        at = address + ops.wide(key) * of_row
                    at, to = at + ops.wide(piece * 16), stage + (row * pitch + piece * 16 + first)
                    pieces, padded = dim // 8, -(-dim // 16) * 2
                    for n in range(0, padded, 8):
                        valid = there if n + 8 <= pieces else there & (piece < pieces - n)
                        writes = within
                        if n + 8 > padded:
                            writes = piece < padded - n if within is None else within & (piece < padded - n)
                        ops.copy_16(to + 16 * n, at + 16 * n, valid, writes)

        return straight_line(void, (int32, int32, int32, self.pages, SEEN, SOURCE, SOURCE), body)

    def load_q(self):
        """``f(q, strides, row, lane, seqlen_q) -> row_operand`` of rows ``row`` and ``row + 8`` of a head's tile; zeros past the last query."""
        config = self.config

        def body(ops, q, strides, row, lane, seqlen_q):
            _, of_query, of_head = strides
            rows = []
            for r in (row, row + 8)[: 2 if config.rows > 8 else 1]:
                query = r // config.group
                there = ops.truth(query < seqlen_q)
                at = q + ops.wide(ops.select(query < seqlen_q, query, 0)) * of_query + ops.wide(r % config.group) * of_head
                rows.append((at + ops.wide((lane & 3) * 4), there))
            words = []
            for column in range(0, config.depth, 8):
                for r in (0, 1):
                    if column >= config.head_dim or r >= len(rows):
                        words.append(ops.integer(0))
                    else:
                        words.append(ops.fetch("b32", rows[r][0], 2 * column, rows[r][1], 0))
            return words

        return straight_line(mma.row_operand(config.depth), (uint64, STRIDES, int32, int32, int32), body)

    def copy_q(self):
        """``f(target, q, strides, first_row, thread, seqlen_q)``: all rows of a tile to shared memory, by the threads of the block."""
        config, memory = self.config, SharedMemory.of(self.config)

        def body(ops, target, q, strides, first_row, thread, seqlen_q):
            _, of_query, of_head = strides
            piece, each = thread & 7, config.threads // 8
            for start in range(0, 16 * config.row_warps, each):
                row = (thread >> 3) + start
                at_row = first_row + row
                query = at_row // config.group
                there = query < seqlen_q
                at = q + ops.wide(ops.select(there, query, 0)) * of_query + ops.wide(at_row % config.group) * of_head + ops.wide(piece * 16)
                to = target + (row * memory.k_pitch + piece * 16)
                pieces, padded = config.head_dim // 8, config.depth // 8
                for n in range(0, padded, 8):
                    valid = there if n + 8 <= pieces else there & (piece < pieces - n)
                    ops.copy_16(to + 16 * n, at + 16 * n, valid, None if n + 8 <= padded else piece < padded - n)

        return straight_line(void, (int32, uint64, STRIDES, int32, int32, int32), body)


def head_of(paged: bool):
    """``f(address, strides, entry, head) -> SOURCE``."""

    def body(ops, address, strides, entry, head):
        of_batch, _, of_head = strides
        at = address + ops.wide(head) * of_head
        return [at if paged else at + ops.wide(entry) * of_batch, strides]

    return straight_line(SOURCE, (uint64, STRIDES, int32, int32), body)


table_of = straight_line(
    TABLE,
    (uint64, int64, int64, int32, int32),
    lambda ops, table, of_batch, of_page, count, entry: [table + ops.wide(entry) * of_batch, of_page, count],
)
"""``f(table, of_batch, of_page, count, entry) -> TABLE``."""
