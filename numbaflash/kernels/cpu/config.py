"""Which kernel and tiles the CPU uses: a pure function of the problem, the threads and the processor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...problem import PACKED_FEATURE, Problem
from . import target
from .convert import COMPUTE, ITEMSIZE

REGISTER_TILE = {  # (registers, their bytes): (vectors, rows). 8 x 2, 4 x 4 and 8 x 3 are equally fast with AVX-512
    (32, 64): (2, 8),  # 98% of the peak; 12 x 2 95%
    (32, 16): (3, 8),  # not measured; four units with a latency of 4 want 16 sums in flight
    (16, 32): (3, 4),  # 97%; 6 x 2 95%, 4 x 2 and 12 x 1 90%
    (16, 16): (3, 4),
}
KV_TILE = 64  # 64 x 32 scores are 8 KiB and lie in L1 beside 32 packed queries of 128 numbers (16 KiB)
MAX_Q_TILE = 512
KV_TILES = (32, 64, 128)  # to measure; random bits of dropout are drawn for 32 keys
MOST_ITEMS = 4  # of a thread, that splits are measured up to
Q_TILE_BYTES = 512 * 1024  # packed queries and output of a tile: half of an L2 cache of 1 MiB
PACKING_ROWS = 10  # packing a number of K or V takes 0.3 cycles, a row of queries 1/32 cycle for each
PART_KEYS = 256
MOST_ROWS = 6  # of the form "rows"; at 8 rows, a panel of one vector is faster
PAGED_Q_TILE = 64  # rows that pages are brought together for
FLOPS, BYTES_PER_SECOND = 1.2e11, 2e10  # of a core, roughly
THREAD_WORK = 30e-6  # seconds; waking a thread takes 5 to 10 microseconds, on a busy machine much more


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is compiled in.

    Attributes
    ----------
    form : str
        "panels": a query a lane (`forward`); "rows": few queries, the head dim in the lanes (`rows`).
    dtype : str
        Of the arrays.
    lanes : int
        Numbers in a vector register.
    vectors : int
        Registers across the register tile: of queries in panels, at most of the head dim of the values in rows.
    rows : int
        Rows of the register tile: keys in the scores, head dim of the values in the weighted sum. A multiple of 4 in
        panels, 1 in rows.
    options : tuple of str
        What the problem has beyond a band, as `options_of` names it.
    bias_dtype : str or None
    """

    form: str
    dtype: str
    lanes: int
    vectors: int
    rows: int
    options: tuple[str, ...] = ()
    bias_dtype: str | None = None

    @property
    def panel(self) -> int:
        """Queries that are computed together."""
        return self.lanes * self.vectors if self.form == "panels" else 1

    @property
    def key_padding(self) -> int:
        """What the head dim of packed keys is a multiple of."""
        return 1 if self.form == "panels" else self.lanes

    @property
    def value_padding(self) -> int:
        """What the head dim of packed values is a multiple of."""
        return self.rows if self.form == "panels" else self.lanes

    @property
    def key_step(self) -> int:
        """What a key tile is a multiple of."""
        return self.rows if self.form == "panels" else self.lanes


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """Tiles of a launch.

    Attributes
    ----------
    kernel : Kernel
    q_tile : int
        Rows (queries of the heads of one key/value head) of a work item, a multiple of the panel.
    kv_tile : int
        Keys that are packed and computed at a time, a multiple of the kernel's key step.
    splits : int
        Parts into which the keys of a work item are split, each a work item of its own; they are merged after.
    threads : int
        Threads that the launch is worth.
    """

    kernel: Kernel
    q_tile: int
    kv_tile: int
    splits: int = 1
    threads: int = 1


def choose(problem: Problem, threads: int, num_splits: int | None = None) -> CpuConfig:
    """Kernel and tiles for a problem.

    Parameters
    ----------
    problem : Problem
    threads : int
        Threads that may be used.
    num_splits : int, optional
        Parts that the keys are to be split into.
    """
    rows = problem.seqlen_q * problem.group
    kernel = with_options(choose_kernel(problem.dtype, 1 if problem.paged else rows), problem)
    threads = useful_threads(problem, kernel, threads)
    heads = problem.batch * problem.kv_heads
    q_tile = choose_q_tile(problem, kernel, rows, heads, threads)
    items = max(1, heads * -(-rows // q_tile))
    splits = 1
    if num_splits is not None:
        splits = max(1, min(num_splits, -(-problem.seqlen_k // KV_TILE)))  # more would be empty
    elif items < threads:  # parts of at least PART_KEYS keys
        splits = max(1, min(-(-threads // items), problem.seqlen_k // PART_KEYS))
    return CpuConfig(kernel, q_tile, KV_TILE, splits, min(threads, items * splits))


TUNED = ("q_tile", "kv_tile", "splits")
"""Fields in which `candidates` differ. Threads are no matter of measuring: on a busy machine fewer would win."""


def candidates(problem: Problem, threads: int, num_splits: int | None = None) -> tuple[CpuConfig, ...]:
    """What is worth measuring beside `choose`, which comes first: all take the same kernel. With a number of parts given, there is no other: what is
    computed for a sequence must not depend on the rest of the batch."""
    default = choose(problem, threads, num_splits)
    if num_splits is not None:
        return (default,)
    found, rows = [default], problem.seqlen_q * problem.group
    heads, threads = max(1, problem.batch * problem.kv_heads), useful_threads(problem, default.kernel, threads)
    for q_tile in [default.q_tile] if default.kernel.form == "rows" else q_tiles(problem, default.kernel, rows):
        items = max(1, heads * -(-rows // q_tile))
        most = min(problem.seqlen_k // PART_KEYS, MOST_ITEMS * threads // items)
        for splits in sorted({1, default.splits, *(n for n in (2, 4, 8, 16, 32) if n <= most)}):
            for kv_tile in KV_TILES:
                found.append(CpuConfig(default.kernel, q_tile, kv_tile, splits, min(threads, items * splits)))
    return tuple(dict.fromkeys(found))


def q_tiles(problem: Problem, kernel: Kernel, rows: int) -> list[int]:
    """Tiles of panels from one panel on, up to all rows or what the cache holds."""
    columns = problem.head_dim + problem.head_dim_v
    most = max(kernel.panel, min(MAX_Q_TILE, Q_TILE_BYTES // (columns * COMPUTE[problem.dtype].bitwidth // 8)))
    tiles = [kernel.panel]
    while tiles[-1] < rows and 2 * tiles[-1] <= most:
        tiles.append(2 * tiles[-1])
    return tiles


def choose_q_tile(problem, kernel, rows, heads, threads) -> int:
    """The tile that finishes first when equal work items are dealt to the threads.

    A tile of t rows costs t + PACKING_ROWS: keys and values are packed once a tile. Few rows are not divided: their keys
    and values are read once.
    """
    if kernel.form == "rows":
        return min(rows, PAGED_Q_TILE) if problem.paged else rows
    costs = []
    for tile in q_tiles(problem, kernel, rows):
        rounds = -(-heads * -(-rows // tile) // threads)
        costs.append((rounds * (tile + PACKING_ROWS), -tile))
    return -min(costs)[1]


def useful_threads(problem: Problem, kernel: Kernel, threads: int) -> int:
    """Threads that a launch is worth: waking them takes some microseconds, so each must have `THREAD_WORK` to do."""
    keys = problem.seqlen_k
    if problem.left is not None and problem.right is not None:
        keys = min(keys, max(0, problem.left + problem.right + 1))
    columns = problem.head_dim + problem.head_dim_v
    if kernel.form == "panels":
        seconds = 2 * problem.batch * problem.heads * problem.seqlen_q * keys * columns / FLOPS
    else:
        seconds = problem.batch * problem.kv_heads * keys * columns * ITEMSIZE[problem.dtype] / BYTES_PER_SECOND
    return max(1, min(threads, int(seconds / THREAD_WORK)))


def options_of(problem: Problem) -> tuple[str, ...]:
    """`Problem.features`, the lengths of queries and of keys being one: "lengths"; "packed" for packed sequences."""
    shorter = {"seqlens_q": "lengths", "seqlens_k": "lengths", PACKED_FEATURE: "packed"}
    return tuple(dict.fromkeys(shorter.get(name, name) for name in problem.features))


def with_options(kernel: Kernel, problem: Problem) -> Kernel:
    """The kernel with the options of a problem compiled in."""
    return replace(kernel, options=options_of(problem), bias_dtype=problem.bias_dtype)


def choose_kernel(dtype: str, rows: int) -> Kernel:
    """Kernel for a number of rows of a key/value head, its options not compiled in yet."""
    lanes = target.vector_bytes() * 8 // COMPUTE[dtype].bitwidth
    if rows <= MOST_ROWS:
        return Kernel("rows", dtype, lanes, 8, 1)
    if rows <= lanes:
        return Kernel("panels", dtype, lanes, 1, 8)
    return Kernel("panels", dtype, lanes, *REGISTER_TILE[target.vector_registers(), target.vector_bytes()])


def work_items(problem: Problem, config: CpuConfig) -> int:
    """Work items of a launch: (query tile, batch, key/value head, part of the keys); of packed sequences, the most there may be."""
    if problem.packed:
        return packed_tiles(problem, config.q_tile) * problem.kv_heads * config.splits
    return -(-problem.seqlen_q * problem.group // config.q_tile) * problem.batch * problem.kv_heads * config.splits


def packed_tiles(problem: Problem, q_tile: int) -> int:
    """The most tiles of rows that packed sequences, and the rows before and after them, may have: each can end in a tile that is not full."""
    return problem.total_q * problem.group // q_tile + problem.batch + 2


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
