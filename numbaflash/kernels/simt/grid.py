"""How many tiles a launch has, chosen on the host (nothing here imports numba.cuda, which loads the driver)."""

from __future__ import annotations

from numbaflash.kernels.packing import most_tiles
from numbaflash.problem import Problem


def q_tiles(problem: Problem, tile: int) -> int:
    """Tiles of queries of a head; where nothing is packed, in one batch entry."""
    return most_tiles(problem.total_q, problem.batch, tile) if problem.packed else -(-problem.seqlen_q // tile)


def kv_tiles(problem: Problem, tile: int) -> int:
    """The same of keys."""
    return most_tiles(problem.total_k, problem.batch, tile) if problem.packed else -(-problem.seqlen_k // tile)


def columns(problem: Problem, heads: int) -> int:
    """Heads over the batch, each with so many tiles."""
    return heads if problem.packed else problem.batch * heads
