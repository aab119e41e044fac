"""New keys and values to the cache, on GPUs: one kernel, an element a thread at a time, any strides.

A block has a row of a token: a key and a value of one head, or a query that is rotated. Rotary positions turn pairs of columns, (x, y) to
(x cos - y sin, y cos + x sin), in float32, or float64 for float64.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda, types

from numbaflash.ptx.straight import straight_line
from numbaflash.toolchain import KernelSource

THREADS = 64


@dataclass(frozen=True)
class AppendConfig:
    """What is compiled in; see `numbaflash.problem.caches.Append`."""

    dtype: str
    lengths: str
    page_size: int
    rotary: bool
    interleaved: bool
    angles: str | None
    queries: bool
    threads: int = THREADS


def _element(dtype):
    return types.uint16 if dtype in ("float16", "bfloat16") else getattr(types, dtype)


def build(config: AppendConfig) -> KernelSource:
    """A kernel of k_new, v_new, k_cache, v_cache, seqlens_k, page_table, cos, sin, q and what it becomes rotated (absent ones have no element); of
    tokens, key/value heads, query heads, capacity, pages, rotary columns and positions."""
    element, angle = _element(config.dtype), _element(config.angles or "float32")
    compute = "float64" if config.dtype == "float64" else "float32"
    page_size, rotary, interleaved, queries, threads = config.page_size, config.rotary, config.interleaved, config.queries, config.threads

    def number(ops, dtype, x):
        return x if dtype == compute else ops.float32_of(dtype, x)

    def turned(ops, x, other, cos, sin, is_first):
        x, other = number(ops, config.dtype, x), number(ops, config.dtype, other)
        cos, sin = number(ops, config.angles, cos), number(ops, config.angles, sin)
        y = x * cos + other * ops.select(is_first != 0, sin * -1.0, sin)
        return y if config.dtype == compute else ops.bits_of(config.dtype, y)

    turned = straight_line(element, (element, element, angle, angle, types.int32), turned) if rotary else None

    def kernel(k_new, v_new, k_cache, v_cache, lengths, table, cos, sin, q, rotated, tokens, kv_heads, heads, capacity, pages, rotary_dim, positions):
        rows = kv_heads + heads
        row = cuda.blockIdx.x % rows
        token = cuda.blockIdx.x // rows
        entry, token = token // tokens, token % tokens
        position = lengths[entry] + token
        column = cuda.threadIdx.x
        there = position >= 0 and position < capacity
        if rotary:
            there = there and position < positions
        if queries and row >= kv_heads:
            head = row - kv_heads
            there = position >= 0 and position < positions
            while column < q.shape[3]:
                if not there:
                    rotated[entry, token, head, column] = 0
                elif column < rotary_dim:
                    half = rotary_dim // 2
                    if interleaved:
                        pair, other, is_first = column // 2, column ^ 1, 1 - column % 2
                    elif column < half:
                        pair, other, is_first = column, column + half, 1
                    else:
                        pair, other, is_first = column - half, column - half, 0
                    rotated[entry, token, head, column] = turned(
                        q[entry, token, head, column], q[entry, token, head, other], cos[position, pair], sin[position, pair], is_first
                    )
                else:
                    rotated[entry, token, head, column] = q[entry, token, head, column]
                column += threads
            return
        place, slot = entry, position
        if page_size and there:
            place, slot = int(table[entry, position // page_size]), position % page_size
            there = place >= 0 and place < pages
        if not there:
            return
        while column < k_new.shape[3] or column < v_new.shape[3]:
            if column < k_new.shape[3]:
                x = k_new[entry, token, row, column]
                if rotary and column < rotary_dim:
                    half = rotary_dim // 2
                    if interleaved:
                        pair, other, is_first = column // 2, column ^ 1, 1 - column % 2
                    elif column < half:
                        pair, other, is_first = column, column + half, 1
                    else:
                        pair, other, is_first = column - half, column - half, 0
                    x = turned(x, k_new[entry, token, row, other], cos[position, pair], sin[position, pair], is_first)
                k_cache[place, slot, row, column] = x
            if column < v_new.shape[3]:
                v_cache[place, slot, row, column] = v_new[entry, token, row, column]
            column += threads

    four, two = types.Array(element, 4, "A"), types.Array(angle, 2, "A")
    given = [four] * 4 + [types.Array(getattr(types, config.lengths), 1, "A"), types.Array(types.int32, 2, "A"), two, two, four, four]
    return KernelSource(kernel, types.void(*given, *[types.int64] * 7), threads=threads)
