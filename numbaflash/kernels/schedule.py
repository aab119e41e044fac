"""Which block computes which tile, and when: the order of tiles in a launch.

A launch has ``rows`` (q blocks of one head) times ``columns`` (heads over the batch) tiles. Tiles of causal attention
differ in cost: the longest ones, at the end of the sequence, go first. Heads are taken in sections, whose keys and
values fit in the L2 cache together.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import cuda, int32, uint32


def order(tile, q_blocks, heads, section):
    """(q block, head) of a tile number: sections of heads; in a section, q blocks from last to first, heads fastest."""
    tile = uint32(tile)
    per_section = uint32(section) * uint32(q_blocks)
    first_head = tile // per_section * uint32(section)
    within = tile % per_section
    width = min(uint32(section), uint32(heads) - first_head)
    q_block = uint32(q_blocks) - uint32(1) - within // width
    return int32(q_block), int32(first_head + within % width)


tile_order = cuda.jit(order, device=True, inline="always")


def snake(turn, block, blocks):
    """Tile number of a persistent block's n-th turn: odd turns run backwards, so that long and short tiles even out."""
    first = turn * blocks
    return first + (blocks - int32(1) - block) if turn & int32(1) else first + block


tile_of_turn = cuda.jit(snake, device=True, inline="always")


MOST_SIMULATED = 1 << 22  # tile turns that the search below may look at: some 50 ms
SLOWER_PAST_L2 = 1.08  # measured on an H200 for causal attention whose section's keys and values exceed the L2 cache


@lru_cache(maxsize=512)
def choose_section(costs: tuple[float, ...], columns: int, blocks: int, column_bytes: int, l2_bytes: int) -> int:
    """How many heads a section has: the split whose longest block ends first, by simulation.

    Parameters
    ----------
    costs : tuple of float
        Cost of each q block of a head, first to last; equal costs need no sections.
    columns : int
        Heads over the batch.
    blocks : int
        Persistent blocks.
    column_bytes, l2_bytes : int
        Keys and values of a head, and what the L2 cache holds of them. A section that exceeds it costs more.
    """
    q_blocks = len(costs)
    if columns == 0 or len(set(costs)) == 1 or q_blocks * columns <= blocks:
        return 1 if len(set(costs)) == 1 else max(1, columns)
    widest = min(columns, max(blocks, 1))
    tries = max(1, min(widest, MOST_SIMULATED // (q_blocks * columns)))
    candidates = {round(1 + i * (widest - 1) / max(1, tries - 1)) for i in range(tries)} | {columns}
    if q_blocks * columns > MOST_SIMULATED:  # so many tiles balance anyway
        return max(1, min(columns, l2_bytes // max(1, column_bytes)))

    def duration(section):
        slower = SLOWER_PAST_L2 if section * column_bytes > l2_bytes else 1.0
        return slower * _longest_block(np.array(costs), columns, blocks, section)

    return min(sorted(candidates), key=duration)


def _longest_block(costs, columns, blocks, section):
    """Summed cost of the block that has most to do, in the order of `order` and `snake`."""
    whole, rest = divmod(columns, section)
    last_to_first = costs[::-1]
    sequence = np.concatenate([np.tile(np.repeat(last_to_first, section), whole), np.repeat(last_to_first, rest)])
    turns = -(-len(sequence) // blocks)
    table = np.zeros(turns * blocks)
    table[: len(sequence)] = sequence
    table = table.reshape(turns, blocks)
    return (table[0::2].sum(axis=0) + table[1::2, ::-1].sum(axis=0)).max()
