"""Which tiles the CPU kernel uses: a pure function of the problem, the threads and the processor."""

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
    dtype : str
        Of the arrays.
    lanes : int
        Numbers in a vector register.
    vectors : int
        Vector registers across a panel of queries.
    rows : int
        Rows of the register tile: keys in the scores, head dim of the values in the weighted sum. A multiple of 4.
    """

    dtype: str
    lanes: int
    vectors: int
    rows: int

    @property
    def panel(self) -> int:
        """Queries that are computed together, a lane each."""
        return self.lanes * self.vectors


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """Tiles of a launch.

    Attributes
    ----------
    kernel : Kernel
    q_tile : int
        Rows (queries of one key/value head) of a work item, a multiple of the panel.
    kv_tile : int
        Keys that are packed and computed at a time, a multiple of the kernel's rows.
    splits : int
        Parts into which the keys of a work item are split, each a work item of its own; the parts are merged after.
    """

    kernel: Kernel
    q_tile: int
    kv_tile: int
    splits: int = 1


def choose(problem: Problem, threads: int) -> CpuConfig:
    """Tiles for a problem.

    Parameters
    ----------
    problem : Problem
    threads : int
        Threads that may be used.
    """
    rows = problem.seqlen_q * problem.group
    kernel = choose_kernel(problem, rows)
    kv_tile = round_up(64, kernel.rows)
    q_tile = min(max(1, 512 // kernel.panel), -(-rows // kernel.panel)) * kernel.panel
    heads = max(1, problem.batch * problem.kv_heads)
    while q_tile > kernel.panel and heads * -(-rows // q_tile) < 2 * threads:
        q_tile = round_up(q_tile // 2, kernel.panel)
    items = heads * -(-rows // q_tile)
    splits = 1
    if items < threads:
        splits = max(1, min(-(-threads // items), problem.seqlen_k // (4 * kv_tile)))
    return CpuConfig(kernel, q_tile, kv_tile, splits)


def work_items(problem: Problem, config: CpuConfig) -> int:
    """Work items of a launch: (query tile, batch, key/value head, part of the keys)."""
    return -(-problem.seqlen_q * problem.group // config.q_tile) * problem.batch * problem.kv_heads * config.splits


def useful_threads(problem: Problem, items: int, threads: int) -> int:
    """Threads that a launch is worth."""
    return max(1, min(items, threads))


def choose_kernel(problem: Problem, rows: int) -> Kernel:
    lanes = target.vector_bytes() * 8 // COMPUTE[problem.dtype].bitwidth
    if rows <= lanes:
        return Kernel(problem.dtype, lanes, 1, 8)
    if target.vector_registers() == 32:
        return Kernel(problem.dtype, lanes, 2, 8)
    return Kernel(problem.dtype, lanes, 2, 4)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
