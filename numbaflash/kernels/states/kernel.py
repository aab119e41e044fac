"""The block merge of the online softmax on GPUs: all parts in one kernel, any strides.

A block has a row of a head. With m the largest LSE of its parts, a part weighs exp(lse - m); a part whose LSE is -inf has seen no key and weighs
nothing, whatever its output holds. Computed in float32, or float64 for float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import cuda, types

from numbaflash.ptx.straight import straight_line
from numbaflash.toolchain import KernelSource

THREADS = 64


@dataclass(frozen=True)
class MergeConfig:
    """dtypes of the parts' outputs and of the merged one, and how many parts there are."""

    dtype: str
    result: str
    parts: int
    threads: int = THREADS

    @property
    def compute(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


def _element(dtype):
    return types.uint16 if dtype in ("float16", "bfloat16") else getattr(types, dtype)


def build(config: MergeConfig) -> KernelSource:
    """A kernel of the merged output (batch, rows, heads, columns) and LSE (batch, heads, rows), and those of all parts: outputs, then LSE."""
    compute, threads = config.compute, config.threads
    real = getattr(types, compute)
    states = types.Tuple([types.Array(_element(config.dtype), 4, "A")] * config.parts + [types.Array(real, 3, "A")] * config.parts)
    merged, merged_lse = types.Array(_element(config.result), 4, "A"), types.Array(real, 3, "A")
    place = (types.int32,) * 4

    def number(ops, x):
        return x if config.dtype == compute else ops.float32_of(config.dtype, x)

    def body(ops, out, lse, states, entry, row, head, column):
        outs, lses = states[: config.parts], states[config.parts :]
        there = column >= 0
        found = [ops.load_row(ops.place(x, (entry, head, row)), 1, there)[0] for x in lses]
        top = found[0]
        for x in found[1:]:  # NaN stays
            top = ops.select(top != top, top, ops.select(top >= x, top, x))
        zero = ops.constant(compute, 0.0)
        base = ops.select(top == -math.inf, zero, top)
        weights = [ops.exp(x - base) for x in found]
        total = weights[0]
        for x in weights[1:]:
            total = total + x
        nothing = total == 0.0
        inside = column < out.shape[3]
        acc = zero
        for x, weight, own in zip(outs, weights, found, strict=True):
            value = number(ops, ops.load_row(ops.place(x, (entry, row, head, column)), 1, inside)[0])
            acc = acc + ops.select(own == -math.inf, zero, value * weight)
        value = ops.select(nothing, zero, acc / ops.select(nothing, total + 1.0, total))
        bits = value if config.result == compute else ops.bits_of(config.result, value)
        ops.store_row(ops.place(out, (entry, row, head, column)), [bits], inside)
        ops.store_row(ops.place(lse, (entry, head, row)), [ops.select(nothing, ops.constant(compute, -math.inf), top + ops.log(total))], column == 0)

    merge = straight_line(types.void, (merged, merged_lse, states, *place), body)

    def kernel(out, lse, *given):
        rows, heads = out.shape[1], out.shape[2]
        block = cuda.blockIdx.x
        head = block % heads
        row = block // heads % rows
        entry = block // heads // rows
        column = cuda.threadIdx.x
        while column < max(out.shape[3], 1):
            merge(out, lse, given, entry, row, head, column)
            column += threads

    return KernelSource(kernel, types.void(merged, merged_lse, states), threads=threads)
