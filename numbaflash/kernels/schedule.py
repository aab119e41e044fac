"""Which block computes which tile, and when: the order of tiles in a launch.

A launch has ``rows`` (q blocks of one head) times ``columns`` (heads over the batch) tiles. Tiles of causal attention
differ in cost: the longest ones, at the end of the sequence, go first. Heads are taken in sections, whose keys and
values fit in the L2 cache together.
"""

from __future__ import annotations

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
