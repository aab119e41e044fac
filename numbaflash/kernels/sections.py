"""How many heads the schedule takes together, chosen on the host (nothing here imports numba.cuda, which loads the driver)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_FEW_HEADS = 8  # blocks a head, from which on all heads are about one section
MOST_SIMULATED = 1 << 22  # tile turns that the search below may look at: some 50 ms


@lru_cache(maxsize=512)
def choose_section(
    costs: tuple[float, ...],
    columns: int,
    blocks: int,
    column_bytes: int,
    l2_bytes: int,
    slower_past_l2: float,
    enough_sharers: float,
    in_step: bool = False,
) -> int:
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
        What is read of a head again and again, and what the L2 cache holds of it.
    slower_past_l2 : float
        Factor of the cost of a section that exceeds the cache.
    enough_sharers : float
        Blocks at work on one head, from which on exceeding the cache costs nothing: what one of them has read, the others find there.
    in_step : bool
        Where heads are many, only sections whose heads have the same, even number of blocks in each turn. Measured on an H200: up to 1.35 times as
        fast as neighbouring sections (docs/performance.md).
    """
    q_blocks = len(costs)
    if columns == 0 or len(set(costs)) == 1 or q_blocks * columns <= blocks:
        return 1 if len(set(costs)) == 1 else max(1, columns)
    widest = min(columns, max(blocks, 1))
    tries = max(1, min(widest, MOST_SIMULATED // (q_blocks * columns)))
    candidates = {round(1 + i * (widest - 1) / max(1, tries - 1)) for i in range(tries)} | {columns}
    if in_step and columns > blocks // _FEW_HEADS:
        alike = {section for section in range(1, widest + 1) if blocks % (2 * section) == 0}
        candidates = alike | {columns} if alike else candidates
    if q_blocks * columns > MOST_SIMULATED:  # so many tiles balance anyway
        return fitting_section(columns, column_bytes, l2_bytes)

    def duration(section):
        slower = slower_past_l2 if section * column_bytes > l2_bytes and blocks < enough_sharers * section else 1.0
        return slower * _longest_block(np.array(costs), columns, blocks, section)

    return min(sorted(candidates), key=duration)


def fitting_section(columns: int, column_bytes: int, l2_bytes: int) -> int:
    """Heads of a section when all are to be of about one size, and what they read is to fit in the L2 cache together if that can be."""
    most = max(1, min(columns, l2_bytes // max(1, column_bytes)))
    return max(1, -(-columns // -(-columns // most)))


def _longest_block(costs, columns, blocks, section):
    """Summed cost of the block that has most to do, in the order of `schedule.order` and `schedule.snake`."""
    whole, rest = divmod(columns, section)
    last_to_first = costs[::-1]
    sequence = np.concatenate([np.tile(np.repeat(last_to_first, section), whole), np.repeat(last_to_first, rest)])
    turns = -(-len(sequence) // blocks)
    table = np.zeros(turns * blocks)
    table[: len(sequence)] = sequence
    table = table.reshape(turns, blocks)
    return (table[0::2].sum(axis=0) + table[1::2, ::-1].sum(axis=0)).max()
