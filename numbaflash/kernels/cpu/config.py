"""Which kernel and tiles the CPU uses: a pure function of the problem, the threads and the processor."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Problem
from . import target
from .convert import COMPUTE


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is compiled in.

    Attributes
    ----------
    form : str
        "panels": a query a lane (`forward`); "rows": few queries, the head dim in the lanes (`decode`).
    dtype : str
        Of the arrays.
    lanes : int
        Numbers in a vector register.
    vectors : int
        Registers across the register tile: of queries in panels, of the head dim of the values in rows.
    rows : int
        Rows of the register tile: keys in the scores, head dim of the values in the weighted sum. A multiple of 4 in
        panels, 1 in rows.
    """

    form: str
    dtype: str
    lanes: int
    vectors: int
    rows: int

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
    """

    kernel: Kernel
    q_tile: int
    kv_tile: int
    splits: int = 1


def choose(problem: Problem, threads: int) -> CpuConfig:
    """Kernel and tiles for a problem.

    Parameters
    ----------
    problem : Problem
    threads : int
        Threads that may be used.
    """
    rows = problem.seqlen_q * problem.group
    kernel = choose_kernel(problem.dtype, rows)
    heads = problem.batch * problem.kv_heads
    kv_tile = round_up(64, kernel.key_step)
    q_tile = min(round_up(rows, kernel.panel), max(1, 512 // kernel.panel) * kernel.panel)
    while q_tile > kernel.panel and heads * -(-rows // q_tile) < 4 * threads:
        q_tile = round_up(q_tile // 2, kernel.panel)
    items = heads * -(-rows // q_tile)
    splits = 1
    if items < threads:
        splits = max(1, min(-(-threads // items), problem.seqlen_k // (4 * kv_tile)))
    return CpuConfig(kernel, q_tile, kv_tile, splits)


def choose_kernel(dtype: str, rows: int) -> Kernel:
    """Kernel for a number of rows of a key/value head."""
    lanes = target.vector_bytes() * 8 // COMPUTE[dtype].bitwidth
    if rows <= 4:
        return Kernel("rows", dtype, lanes, 4, 1)
    if rows <= lanes:
        return Kernel("panels", dtype, lanes, 1, 8)
    return Kernel("panels", dtype, lanes, 2, 8 if target.vector_registers() == 32 else 4)


def work_items(problem: Problem, config: CpuConfig) -> int:
    """Work items of a launch: (query tile, batch, key/value head, part of the keys)."""
    return -(-problem.seqlen_q * problem.group // config.q_tile) * problem.batch * problem.kv_heads * config.splits


def useful_threads(problem: Problem, items: int, threads: int) -> int:
    """Threads that a launch is worth."""
    return max(1, min(items, threads))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
