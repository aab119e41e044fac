"""A `numbaflash.BlockMask` made on the GPU, of a rule or of an array of bool: nothing of size seqlen_q x seqlen_k is there at any time but that
array.

Two launches, between which the host learns how many granules are partial: `build_states` looks at all pairs and keeps a word a granule, `build_bits`
at those of the partial granules once more and keeps their bits. One block of threads has one granule, a thread 16 pairs of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda
from numba.cuda import types
from numba.cuda.types import int32, int64, uint64

from ...problem import GRANULE
from ...ptx.index import zero
from ...ptx.straight import straight_line
from ...toolchain import KernelSource
from .layout import BITS, EMPTY, FULL, PARTIAL
from .rules import Rule

PIECE = 16
"""Pairs of a thread."""

THREADS = GRANULE * GRANULE // PIECE

COUNTERS = 2
"""Of each mask: partial granules, and full ones."""

_DTYPES = {"bool": "u8", "int32": "b32", "int64": "s64"}


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """A rule, and whether its array of queries has an axis of keys, too."""

    rule: Rule
    pairs: bool


ARRAYS = ("of_queries", "of_keys")
"""Each with strides in bytes along batch, heads, queries and keys."""

_SIGNATURE = (*[uint64, *[int64] * 4] * 2, *[int32] * 6, *[int32] * 3)


def _looking(config: BuildConfig):
    """``f(batch, head, row, column, arrays, sizes, numbers) -> bits``: what a thread's pairs show, from a query and a key on; and which there are."""
    rule = config.rule

    def read(ops, array, batch, head, row, column, valid):
        base, of_batch, of_head, of_row, of_column = array
        at = base + ops.wide(batch) * of_batch + ops.wide(head) * of_head + ops.wide(row) * of_row + ops.wide(column) * of_column
        x = ops.fetch(_DTYPES[rule.arrays], at, 0, ops.truth(valid), 0)
        if rule.narrow and rule.arrays == "int64":
            most = ops.wide(ops.integer(2**30))
            x = ops.narrow(ops.maximum(ops.minimum(x, most), ops.wide(ops.integer(0)) - most))
        return x

    def body(ops, batch, head, row, column, queries, keys, sizes, numbers):
        seqlen_q, seqlen_k, offset = sizes
        named, inside = dict(zip(rule.numbers, numbers, strict=False)), row < seqlen_q
        of_query = read(ops, queries, batch, head, row, ops.integer(0), inside) if rule.by_query and not config.pairs else None
        shown, there = ops.integer(0), ops.integer(0)
        for n in range(PIECE):
            key = column + n
            valid = inside & (key < seqlen_k)
            if config.pairs:
                of_query = read(ops, queries, batch, head, row, key, valid)
            of_key = read(ops, keys, batch, head, ops.integer(0), key, valid) if rule.by_key else None
            seen = rule.shows(row + offset, key, named, of_query, of_key)
            shown = shown | (ops.truth(seen & valid) << n)
            there = there | (ops.truth(valid) << n)
        return [shown, there]

    array = types.Tuple([int64] * 5)
    kind = (int32, int32, int32, int32, array, array, types.UniTuple(int32, 3), types.UniTuple(int32, 3))
    return straight_line(types.UniTuple(int32, 2), kind, body)


def _putting():
    return straight_line(types.void, (int64, int64, int32), lambda ops, base, at, value: ops.put(base + at * 4, value, at >= 0))


def _word():
    return straight_line(int32, (int64, int64), lambda ops, base, at: ops.fetch("b32", base + at * 4, 0))


def build_states(config: BuildConfig) -> KernelSource:
    """The kernel of the words. Its parameters: the arrays, each with its strides; heads, rows and columns of granules, lengths, offset; numbers of
    the rule; the words, as `layout` has them but for room for bits, words of a mask, and the counters, which are 0 before."""
    look, put = _looking(config), _putting()

    def write_states(
        of_queries, q_batch, q_head, q_row, q_column, of_keys, k_batch, k_head, k_row, k_column,
        heads, rows, columns, seqlen_q, seqlen_k, offset, first, second, third, words, words_of_mask, counters,
    ):  # fmt: skip
        granule, thread = cuda.blockIdx.x, cuda.threadIdx.x
        column, row, mask = granule % columns, granule // columns % rows, granule // (columns * rows)
        shown, there = look(
            mask // heads, mask % heads, row * GRANULE + thread // (GRANULE // PIECE), column * GRANULE + thread % (GRANULE // PIECE) * PIECE,
            (of_queries, q_batch, q_head, q_row, q_column), (of_keys, k_batch, k_head, k_row, k_column),
            (seqlen_q, seqlen_k, offset), (first, second, third),
        )  # fmt: skip
        some, every = cuda.syncthreads_or(shown), cuda.syncthreads_and(1 if shown == there else 0)
        if thread == 0:
            word = EMPTY
            if every:
                word = FULL
                cuda.atomic.add(counters, COUNTERS * mask + 1, 1)
            if some and not every:
                word = PARTIAL + cuda.atomic.add(counters, COUNTERS * mask, 1)
            put(words, mask * words_of_mask + row * columns + column, word)

    signature = types.void(*_SIGNATURE, uint64, int32, types.Array(int32, 1, "A"))
    return KernelSource(write_states, signature, threads=THREADS)


def build_bits(config: BuildConfig) -> KernelSource:
    """The kernel of the bits, which also copies the words. Its parameters: as of `build_states`, the words that it has written, and in place of the
    counters: the words of the mask, how many one has, and where its bits begin."""
    look, put, word_at = _looking(config), _putting(), _word()
    joined = straight_line(int32, (int32, int32), lambda ops, low, high: low | (high << PIECE))
    with_bit = straight_line(int32, (int32,) * 4, lambda ops, bits, piece, at, n: bits | (((piece >> at) & 1) << n))

    def write_bits(
        of_queries, q_batch, q_head, q_row, q_column, of_keys, k_batch, k_head, k_row, k_column,
        heads, rows, columns, seqlen_q, seqlen_k, offset, first, second, third, states, states_of_mask, words, words_of_mask, bits_at,
    ):  # fmt: skip
        granule, thread = cuda.blockIdx.x, cuda.threadIdx.x
        column, row, mask = granule % columns, granule // columns % rows, granule // (columns * rows)
        word = word_at(states, mask * states_of_mask + row * columns + column)
        if thread == 0:
            put(words, mask * words_of_mask + row * columns + column, word)
        if word >= PARTIAL:
            pieces = cuda.shared.array(THREADS, int32)
            shown, _ = look(
                mask // heads, mask % heads, row * GRANULE + thread // (GRANULE // PIECE), column * GRANULE + thread % (GRANULE // PIECE) * PIECE,
                (of_queries, q_batch, q_head, q_row, q_column), (of_keys, k_batch, k_head, k_row, k_column),
                (seqlen_q, seqlen_k, offset), (first, second, third),
            )  # fmt: skip
            pieces[thread] = shown
            cuda.syncthreads()
            at = mask * words_of_mask + bits_at + (word - PARTIAL) * BITS
            if thread < BITS // 2:  # 32 keys of a query
                put(words, at + thread, joined(pieces[2 * thread], pieces[2 * thread + 1]))
            else:  # 32 queries of a key
                key, half, found = (thread - BITS // 2) // 2, thread % 2, zero()
                for n in range(32):
                    found = with_bit(found, pieces[(32 * half + n) * (GRANULE // PIECE) + key // PIECE], key % PIECE, n)
                put(words, at + thread, found)

    signature = types.void(*_SIGNATURE, uint64, int32, uint64, int32, int32)
    return KernelSource(write_bits, signature, threads=THREADS)
