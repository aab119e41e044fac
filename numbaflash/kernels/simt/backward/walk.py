"""In which order a block steps through the tiles of queries that see its keys, and when it may add to their dq.

A step is a tile of queries of one query head; its number counts the tiles of all heads over the batch. Where blocks may add
in any order, they go up through the tiles of one head, then of the next one.

Where they add in turn, those of smaller keys first, that is slow under a band: the first tile that a block comes to is one
that the blocks before it reach last. There they go down from the last tile, and take each for all heads of the group. The
larger a block's keys, the later its last tile, so a block that starts with those before it, or after them, comes to no tile
sooner than they do.
"""

from __future__ import annotations

from numba.cuda.types import UniTuple, int32

from numbaflash.ptx.straight import straight_line

from .config import Config


def step_up(config: Config):
    """``f(head, q_block, first, stop) -> (head, q_block)``: what follows a step, in tiles from ``first`` to before ``stop``.

    After the last step that is a head beyond the group.
    """

    def body(ops, head, q_block, first, stop):
        q_block = q_block + 1
        ended = q_block == stop
        q_block = ops.select(ended, first, q_block)
        return [ops.select(ended, head + 1, head), q_block]

    return straight_line(UniTuple(int32, 2), (int32,) * 4, body)


def step_down(config: Config):
    """``f(number, first_q, q_tiles, heads_before, stop_head, group, first_k, band_last) -> (head, q_block)``: what follows a step downwards.

    After the last step that is head ``stop_head``, the one beyond the group. A head has ``q_tiles`` tiles, the batch entries before have
    ``heads_before`` heads; ``first_q`` and ``first_k`` are the first query of the tile and the first key of the block, ``band_last`` is the
    last key that query 0 sees. Where the step was and where the walk ends is found anew each time, not kept in registers.
    """

    def body(ops, number, first_q, q_tiles, heads_before, stop_head, group, first_k, band_last):
        first_q = ops.opaque(first_q)
        first_seeing = ops.maximum(first_k - band_last, ops.integer(0)) if config.bounded_right else 0
        head, q_block = ops.opaque(number) // q_tiles - heads_before + 1, first_q // config.q_tile
        down = (head == stop_head) & (first_q > first_seeing)
        return [ops.select(down, head - group, head), ops.select(down, q_block - 1, q_block)]

    return straight_line(UniTuple(int32, 2), (int32,) * 8, body)


def turn(config: Config):
    """``f(kv_block, first_q, band_first) -> turn``: how many blocks of the head add to a tile of queries that this one sees before it does.

    ``first_q`` is the tile's first query, ``band_first`` the first key that query 0 sees.
    """

    def body(ops, kv_block, first_q, band_first):
        if config.bounded_left:
            return kv_block - ops.maximum(first_q + band_first, ops.integer(0)) // config.kv_tile
        return kv_block

    return straight_line(int32, (int32,) * 3, body)
