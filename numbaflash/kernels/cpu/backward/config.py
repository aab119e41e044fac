"""Tiles of the gradients: a pure function of the problem, the threads and the processor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....problem import Problem
from ..config import FLOPS, REGISTER_TILE, THREAD_WORK, Kernel, round_up, with_options
from ..convert import COMPUTE
from ..target import vector_bytes, vector_registers

Q_TILE = 128
KV_BLOCK = 64
KV_TILE_BYTES = 512 * 1024  # packed keys and values and their gradients: half of an L2 cache of 1 MiB
MAX_KV_TILE = 512
PACKING_KEYS = 12  # packing a row of queries costs as much as computing with so many keys


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tiles of a launch.

    The result depends on ``kernel``, ``q_tile`` and ``kv_block``, which the problem alone decides; neither on ``kv_tile``
    nor on ``threads``.

    Attributes
    ----------
    kernel : Kernel
        Its register tile: rows of keys (or of the head dim, for dQ) by a panel of queries (or of the head dim, for dK and dV).
    q_tile : int
        Rows (queries of the heads of one key/value head) that are packed and computed at a time, a multiple of the panel.
    kv_block : int
        Keys whose scores are held at a time, a multiple of the kernel's rows.
    kv_tile : int
        Keys of a work item, a multiple of ``kv_block``.
    threads : int
        Threads that the launch is worth.
    """

    kernel: Kernel
    q_tile: int
    kv_block: int
    kv_tile: int
    threads: int = 1


def choose(problem: Problem, threads: int) -> BackwardConfig:
    """Kernel and tiles for a problem when ``threads`` threads may be used."""
    rows = problem.seqlen_q * problem.group
    kernel = with_options(choose_kernel(problem.dtype, rows), problem)
    q_tile = min(Q_TILE // kernel.panel * kernel.panel, round_up(rows, kernel.panel))
    threads = useful_threads(problem, threads)
    heads = problem.batch * problem.kv_heads
    kv_tile = choose_kv_tile(problem, heads, threads)
    return BackwardConfig(kernel, q_tile, KV_BLOCK, kv_tile, max(1, min(threads, heads * -(-problem.seqlen_k // kv_tile))))


TUNED = ("kv_tile",)
"""Fields in which `candidates` differ: those that decide no bit of the result."""


def candidates(problem: Problem, threads: int) -> tuple[BackwardConfig, ...]:
    """What is worth measuring beside `choose`, which comes first."""
    default = choose(problem, threads)
    found, heads, threads = [default], problem.batch * problem.kv_heads, useful_threads(problem, threads)
    for kv_tile in kv_tiles(problem):
        items = max(1, heads * -(-problem.seqlen_k // kv_tile))
        found.append(replace(default, kv_tile=kv_tile, threads=min(threads, items)))
    return tuple(dict.fromkeys(found))


def kv_tiles(problem: Problem) -> list[int]:
    """Tiles of blocks from one block on, up to all keys or what the cache holds."""
    number_bytes = COMPUTE[problem.dtype].bitwidth // 8
    most = min(MAX_KV_TILE, KV_TILE_BYTES // (2 * (problem.head_dim + problem.head_dim_v) * number_bytes))
    tiles = [KV_BLOCK]
    while tiles[-1] < problem.seqlen_k and 2 * tiles[-1] <= most:
        tiles.append(2 * tiles[-1])
    return tiles


def choose_kernel(dtype: str, rows: int) -> Kernel:
    """The forward's register tile, or a panel of one vector where it holds all rows of a key/value head."""
    lanes = vector_bytes() * 8 // COMPUTE[dtype].bitwidth
    if rows <= lanes:
        return Kernel("panels", dtype, lanes, 1, 8)
    return Kernel("panels", dtype, lanes, *REGISTER_TILE[vector_registers(), vector_bytes()])


def choose_kv_tile(problem: Problem, heads: int, threads: int) -> int:
    """The tile that finishes first when equal work items are dealt to the threads; queries are packed once a tile."""
    costs = []
    for tile in kv_tiles(problem):
        rounds = -(-heads * -(-problem.seqlen_k // tile) // threads)
        costs.append((rounds * (tile + PACKING_KEYS), -tile))
    return -min(costs)[1]


def useful_threads(problem: Problem, threads: int) -> int:
    """Threads that a launch is worth: each must have `THREAD_WORK` to do."""
    keys = problem.seqlen_k
    if problem.left is not None and problem.right is not None:
        keys = min(keys, max(0, problem.left + problem.right + 1))
    columns = 3 * problem.head_dim + 2 * problem.head_dim_v
    seconds = 2 * problem.batch * problem.heads * problem.seqlen_q * keys * columns / FLOPS
    return max(1, min(threads, int(seconds / THREAD_WORK)))
