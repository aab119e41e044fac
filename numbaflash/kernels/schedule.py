"""Which block computes which tile, and when: the order of tiles in a launch.

A launch has ``rows`` (q blocks of one head) times ``columns`` (heads over the batch) tiles. Tiles of causal attention
differ in cost: the longest ones, at the end of the sequence, go first. Heads are taken in sections, whose keys and
values fit in the L2 cache together.
"""

from __future__ import annotations

from numba.cuda.types import UniTuple, int32

from ..ptx.straight import straight_line


def order(ops, tile, q_blocks, heads, section):
    """(q block, head) of a tile number: sections of heads; in a section, q blocks from last to first, heads fastest."""
    per_section = section * q_blocks
    first_head = tile // per_section * section
    within = tile % per_section
    width = ops.minimum(section, heads - first_head)
    return [q_blocks - 1 - within // width, first_head + within % width]


tile_order = straight_line(UniTuple(int32, 2), (int32,) * 4, order)


def snake(ops, turn, block, blocks):
    """Tile number of a persistent block's n-th turn: odd turns run backwards, so that long and short tiles even out."""
    return turn * blocks + ops.select((turn & 1) == 1, blocks - 1 - block, block)


tile_of_turn = straight_line(int32, (int32,) * 3, snake)


def split_head(ops, column, heads, group):
    """(batch, head, kv head) of a head counted over the batch."""
    head = column % heads
    return [column // heads, head, head // group]


heads_of = straight_line(UniTuple(int32, 3), (int32,) * 3, split_head)


def member_after(ops, block, member, group, step):
    """(block, member of the group) after one of a walk: each block for each head that shares the keys, ``step`` blocks on."""
    last = member + 1 == group
    return [ops.select(last, block + step, block), ops.select(last, ops.integer(0), member + 1)]


next_of_walk = straight_line(UniTuple(int32, 2), (int32,) * 4, member_after)


def walk_step(ops, turn):
    """Direction of a persistent block's walk: down through the blocks of queries in even turns, up in odd ones.

    Tiles of a head that run at the same time then read the same blocks at the same time, although a causal mask makes them unlike: all begin
    at the last block, and where one is longer in an even turn, it is as much shorter in the odd one (`snake`), which ends at the last block.
    """
    return 2 * (turn & 1) - 1


walk_step_of_turn = straight_line(int32, (int32,), walk_step)
