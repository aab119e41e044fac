"""Attention over several parts of the keys, merged into attention over all of them: one kernel, in which a thread has some columns of a row.

Every thread of a row computes the weights of the parts for itself, from their LSE. A part that has seen no key is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda
from numba.cuda import types
from numba.cuda.types import int32, int64

from ...ptx.straight import straight_line
from ...toolchain import KernelSource
from ..access import Access

LOWEST = -float("inf")


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """What is compiled in.

    Attributes
    ----------
    access : Access
        Of the parts, and of the result.
    parts : int
        Parts at most; a launch says how many there are.
    carried : bool
        Before them there is one that is not rounded: what a launch before this one has merged.
    carries : bool
        The result is not rounded.
    wide : bool
        There are more threads than 32 bits can count.
    threads : int
    """

    access: Access
    parts: int
    carried: bool
    carries: bool
    wide: bool
    threads: int

    @property
    def compute(self) -> str:
        return "float64" if self.access.dtype == "float64" else "float32"

    @property
    def unrounded(self) -> Access:
        """Of results that are carried on: rows without gaps, in the dtype of the arithmetic."""
        size = 8 if self.compute == "float64" else 4
        return Access(self.compute, min(16, size * self.access.elements))

    @property
    def accesses(self) -> tuple[Access, ...]:
        """Of the arrays of each part."""
        return (self.unrounded,) * self.carried + (self.access,) * self.parts

    @property
    def result(self) -> Access:
        return self.unrounded if self.carries else self.access


def _runs(config, access):
    """Accesses of a thread to a row."""
    return range(config.access.elements // access.elements)


def _merging(config: MergeConfig):
    """``f(block, thread, sizes, out, lse, outs, lses)``, sizes being queries, heads, columns, vectors of a row, rows, and parts that there are."""
    compute, accesses, result = config.compute, config.accesses, config.result

    def body(ops, block, thread, sizes, out, lse, outs, lses):
        seqlen_q, heads, columns, vectors, rows, given = sizes
        unit = block * config.threads + thread
        row, vector = unit // vectors, unit % vectors
        rest, head = row // heads, row % heads
        entry, query = rest // seqlen_q, rest % seqlen_q
        valid = row < rows
        inside = valid & (vector * config.access.elements < columns)

        def place(array, access):
            column = vector * (config.access.elements // access.elements * access.words)
            return ops.place(array, (entry, query, head, column), contiguous=access.words > 1)

        statistics = []
        for i, array in enumerate(lses):
            (found,) = ops.load_row(ops.place(array, (entry, head, query)), 1, valid & (given > i))
            statistics.append(ops.select(given > i, found, LOWEST))
        top = statistics[0]
        for each in statistics[1:]:
            top = ops.maximum(top, each)
        base = ops.select(top == LOWEST, ops.constant(compute, 0.0), top)
        weights = [ops.exp(each - base) for each in statistics]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        acc = [ops.constant(compute, 0.0)] * config.access.elements
        for array, access, each, weight in zip(outs, accesses, statistics, weights, strict=True):
            at, numbers = place(array, access), []
            for n in _runs(config, access):
                numbers += access.numbers(ops, access.load(ops, ops.moved(at, -1, n * access.words), inside & (each != LOWEST)))
            acc = [ops.fma(x, weight, sum_) for x, sum_ in zip(numbers, acc, strict=True)]
        empty = total == 0.0
        scale = 1.0 / ops.select(empty, ops.constant(compute, 1.0), total)
        at, words = place(out, result), result.rounded(ops, [x * scale for x in acc])
        for n in _runs(config, result):
            ops.store_row(ops.moved(at, -1, n * result.words), words[n * result.words : (n + 1) * result.words], inside)
        merged = ops.select(empty, ops.constant(compute, LOWEST), base + ops.log(total))
        ops.store_row(ops.place(lse, (entry, head, query)), [merged], valid & (vector == 0))

    index = int64 if config.wide else int32
    states = [types.Array(getattr(types, access.word), 4, "A") for access in (result, *accesses)]
    of_lse = types.Array(getattr(types, compute), 3, "A")
    kind = (index, index, types.UniTuple(index, 6), states[0], of_lse, types.Tuple(states[1:]), types.UniTuple(of_lse, len(accesses)))
    return straight_line(types.void, kind, body), (states[0], of_lse, *[index] * 6, *states[1:], *[of_lse] * len(accesses))


def build(config: MergeConfig) -> KernelSource:
    """The kernel. Its parameters: the results, the sizes of `_merging`, and of each part first the results, then the LSE."""
    merge, signature = _merging(config)
    outs, lses = (", ".join(f"{name}_{i}" for i in range(len(config.accesses))) for name in ("out", "lse"))
    sizes = "seqlen_q, heads, columns, vectors, rows, given"
    scope = {"cuda": cuda, "merge": merge}
    exec(  # a kernel has as many parameters as it names
        f"def merge_states(out, lse, {sizes}, {outs}, {lses}):\n"
        f"    merge(cuda.blockIdx.x, cuda.threadIdx.x, ({sizes}), out, lse, ({outs},), ({lses},))\n",
        scope,
    )
    return KernelSource(scope["merge_states"], types.void(*signature), threads=config.threads)
