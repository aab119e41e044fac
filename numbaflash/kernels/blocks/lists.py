"""The blocks that a tile steps through: those of which some pair is seen, by mask, band and lengths together.

A list is a count, `END`, the entries, and twice `END`. An entry is twice the number of a block, and one more where some pair of the tile and the
block is hidden: only there do kernels look at the mask, the band and the lengths. A tile is one of queries, which steps through blocks of keys, or
one of keys, which steps through blocks of queries. Heads that share a tile share its list: what one of them sees is in it.

`build_ranks` numbers, for each block of queries, the tiles of keys that have it in their lists: their turns, where they add in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda
from numba.cuda import types
from numba.cuda.types import int32, uint64, void

from ...problem import GRANULE
from ...ptx.straight import straight_line
from ...toolchain import KernelSource
from . import layout
from .layout import EMPTY, FULL, LIST_ENDS, LIST_START

END = -1
"""Before the first entry and after the last."""


@dataclass(frozen=True, slots=True)
class ListsConfig:
    """What is compiled in.

    Attributes
    ----------
    q_size, k_size : int
        Queries and keys of a tile and a block.
    of_keys : bool
        Tiles are of keys.
    descending : bool
        Entries are in descending order.
    left, right : bool
        Whether the band is bounded there.
    seqlens_q, seqlens_k : str or None
        Their dtypes.
    per_entry : bool
        The offset of a batch entry is its ``length_k - length_q``.
    threads : int
    """

    q_size: int
    k_size: int
    of_keys: bool
    descending: bool
    left: bool
    right: bool
    seqlens_q: str | None
    seqlens_k: str | None
    per_entry: bool
    threads: int


PARAMETERS = (
    *("words", "words_batch", "words_head", "words_row", "words_column"),
    *("seqlens_q", "seqlens_q_batch", "seqlens_k", "seqlens_k_batch", "out"),
    *("seqlen_q", "seqlen_k", "offset", "left", "right", "list_heads", "heads", "q_blocks", "k_blocks"),
)
"""Of both kernels: addresses and strides in bytes, the address of the results, and sizes: lists along heads, heads that share one, blocks of a
head."""

_SIGNATURE = types.void(uint64, *[types.int64] * 4, uint64, types.int64, uint64, types.int64, uint64, *[int32] * 9)


def _steps(config: ListsConfig):
    """Functions that both kernels are made of."""

    def length(dtype):
        def body(ops, address, of_batch, batch, most):
            at = address + ops.wide(batch) * of_batch
            found = ops.fetch("s64" if dtype == "int64" else "b32", at, 0)
            if dtype == "int64":
                found = ops.narrow(ops.minimum(ops.maximum(found, ops.wide(ops.integer(0))), ops.wide(most)))
            return ops.minimum(ops.maximum(found, ops.integer(0)), most)

        return straight_line(int32, (types.int64, types.int64, int32, int32), body)

    def word_of(ops, words, of_batch, of_head, of_row, of_column, batch, head, row, column):
        at = words + ops.wide(batch) * of_batch + ops.wide(head) * of_head + ops.wide(row) * of_row + ops.wide(column) * of_column
        return ops.fetch("b32", at, 0)

    return (
        length(config.seqlens_q),
        length(config.seqlens_k),
        straight_line(int32, (*[types.int64] * 5, *[int32] * 4), word_of),
        straight_line(void, (types.int64, types.int64, int32), lambda ops, base, at, value: ops.put(base + at * 4, value, at >= 0)),
    )


def _classifying(config: ListsConfig):
    """``flag_of(mask, batch, first_head, heads, q_block, k_block, bounds)``: 0 or 1 for a block that is in the list, as its entry has it, else -1.

    Two functions of kernels: ``bounds_of(...)`` of a batch entry, and ``flag_of(...)``.
    """
    length_q_of, length_k_of, word_of, put = _steps(config)
    with_q, with_k, per_entry = config.seqlens_q is not None, config.seqlens_k is not None, config.per_entry
    left_bound, right_bound, of_keys, q_size, k_size = config.left, config.right, config.of_keys, config.q_size, config.k_size
    inline = cuda.jit(device=True, inline="always")

    @inline
    def bounds_of(batch, seqlens_q, seqlens_q_batch, seqlens_k, seqlens_k_batch, seqlen_q, seqlen_k, offset):
        length_q, length_k = seqlen_q, seqlen_k
        if with_q:
            length_q = length_q_of(seqlens_q, seqlens_q_batch, batch, seqlen_q)
        if with_k:
            length_k = length_k_of(seqlens_k, seqlens_k_batch, batch, seqlen_k)
        if per_entry:
            offset = length_k - length_q
        return length_q, length_k, offset

    @inline
    def flag_of(mask, batch, first_head, heads, q_block, k_block, bounds):
        words, of_batch, of_head, of_row, of_column = mask
        length_q, length_k, offset, left, right = bounds
        first, last = q_block * q_size, min(q_block * q_size + q_size, length_q) - 1
        key, last_key = k_block * k_size, min(k_block * k_size + k_size, length_k) - 1
        seen, whole = last >= first and last_key >= key, last_key == key + k_size - 1
        if of_keys and with_q:  # padding of queries is looked for in partial blocks only
            whole &= last == first + q_size - 1
        if right_bound:
            seen &= key <= last + offset + right
            whole &= last_key <= first + offset + right
        if left_bound:
            seen &= last_key >= first + offset - left
            whole &= key >= last + offset - left
        if not seen:
            return -1
        some = False
        for head in range(first_head, first_head + heads):
            for row in range(first // GRANULE, last // GRANULE + 1):
                for column in range(key // GRANULE, last_key // GRANULE + 1):
                    word = word_of(words, of_batch, of_head, of_row, of_column, batch, head, row, column)
                    some |= word != EMPTY
                    whole &= word == FULL
        if not some:
            return -1
        return 0 if whole else 1

    return bounds_of, flag_of, put


def build_lists(config: ListsConfig) -> KernelSource:
    """The lists, `words_of_list` words each: one block of threads makes one."""
    bounds_of, flag_of, put = _classifying(config)
    threads, of_keys, descending = config.threads, config.of_keys, config.descending
    words_of_list = cuda.jit(device=True, inline="always")(layout.words_of_list)

    def make_lists(
        words, words_batch, words_head, words_row, words_column, seqlens_q, seqlens_q_batch, seqlens_k, seqlens_k_batch, lists,
        seqlen_q, seqlen_k, offset, left, right, list_heads, heads, q_blocks, k_blocks,
    ):  # fmt: skip
        number, thread = cuda.blockIdx.x, cuda.threadIdx.x
        tiles, blocks = (k_blocks, q_blocks) if of_keys else (q_blocks, k_blocks)
        tile, head, batch = number % tiles, number // tiles % list_heads, number // (tiles * list_heads)
        length_q, length_k, offset = bounds_of(batch, seqlens_q, seqlens_q_batch, seqlens_k, seqlens_k_batch, seqlen_q, seqlen_k, offset)
        mask, bounds = (words, words_batch, words_head, words_row, words_column), (length_q, length_k, offset, left, right)
        counts = cuda.shared.array(threads, int32)
        share = (blocks + threads - 1) // threads
        first, end = min(thread * share, blocks), min((thread + 1) * share, blocks)
        count = 0
        for block in range(first, end):
            q_block, k_block = (block, tile) if of_keys else (tile, block)
            flag = flag_of(mask, batch, head * heads, heads, q_block, k_block, bounds)
            count += 1 if flag >= 0 else 0
        counts[thread] = count
        cuda.syncthreads()
        before, total = 0, 0
        for other in range(threads):
            before += counts[other] if other < thread else 0
            total += counts[other]
        at = number * words_of_list(blocks)
        for block in range(first, end):
            q_block, k_block = (block, tile) if of_keys else (tile, block)
            flag = flag_of(mask, batch, head * heads, heads, q_block, k_block, bounds)
            if flag >= 0:
                place = total - 1 - before if descending else before
                put(lists, at + LIST_START + place, 2 * block + flag)
                before += 1
        if thread == 0:
            put(lists, at, total)
            put(lists, at + LIST_START - 1, END)
            for end in range(LIST_START + total, LIST_START + total + LIST_ENDS):
                put(lists, at + end, END)

    return KernelSource(make_lists, _SIGNATURE, threads=threads)


def build_ranks(config: ListsConfig) -> KernelSource:
    """For each tile of keys and block of queries, in how many lists of tiles before it the block is: tiles of smaller keys, or ``descending`` of
    larger ones. A thread numbers the tiles of one block; what is not in a tile's list has a number, too, that nobody reads."""
    bounds_of, flag_of, put = _classifying(config)
    threads, descending = config.threads, config.descending

    def number_tiles(
        words, words_batch, words_head, words_row, words_column, seqlens_q, seqlens_q_batch, seqlens_k, seqlens_k_batch, ranks,
        seqlen_q, seqlen_k, offset, left, right, list_heads, heads, q_blocks, k_blocks,
    ):  # fmt: skip
        columns = (q_blocks + threads - 1) // threads
        q_block = cuda.blockIdx.x % columns * threads + cuda.threadIdx.x
        number = cuda.blockIdx.x // columns
        head, batch = number % list_heads, number // list_heads
        if q_block < q_blocks:
            length_q, length_k, offset = bounds_of(batch, seqlens_q, seqlens_q_batch, seqlens_k, seqlens_k_batch, seqlen_q, seqlen_k, offset)
            mask, bounds = (words, words_batch, words_head, words_row, words_column), (length_q, length_k, offset, left, right)
            rank = 0
            for n in range(k_blocks):
                k_block = k_blocks - 1 - n if descending else n
                put(ranks, (number * k_blocks + k_block) * q_blocks + q_block, rank)
                flag = flag_of(mask, batch, head * heads, heads, q_block, k_block, bounds)
                rank += 1 if flag >= 0 else 0

    return KernelSource(number_tiles, _SIGNATURE, threads=threads)
