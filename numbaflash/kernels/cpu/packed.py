"""Packed sequences: where they lie, and the work items that they make, listed when a launch begins.

The boundaries lie in the memory of the host, so they are read there. An entry is a sequence, or the rows before the first or after the last one,
which have no keys: their results are written like those of any row that sees nothing.
"""

from __future__ import annotations

import numpy as np
from numba import types

from ...problem import Problem
from .vector import jit, words

ENTRY = ("length_q", "length_k", "queries", "keys", "first_q", "first_k", "first_tile")
"""What an entry is, in words of 64 bits: its lengths, the rows it covers, the first of them, and its first tile of rows of a head."""

WORD = 8


def boundaries(address: int, layout, dtype: str, total: int) -> np.ndarray:
    """Where sequences begin and end, as `numbaflash.reference.boundaries` has it, of numbers that lie in memory."""

    class Memory:
        __array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": np.dtype(dtype).str,
        }

    bounds = np.clip(np.asarray(Memory()).astype(np.int64), 0, total)
    return bounds if (np.diff(bounds) >= 0).all() else np.zeros_like(bounds)


def entries(problem: Problem, bounds_q, bounds_k, q_tile: int) -> np.ndarray:
    """(entries, `ENTRY`): the sequences in their order, then the rows after the last one and those before the first."""
    table = np.zeros((problem.batch + 2, len(ENTRY)), np.int64)
    length_q, length_k, queries, keys, first_q, first_k, first_tile = table.T
    for bounds, total, first, covered, length in (
        (bounds_q, problem.total_q, first_q, queries, length_q),
        (bounds_k, problem.total_k, first_k, keys, length_k),
    ):
        first[:-2] = bounds[:-1]
        covered[:-2] = length[:-2] = np.diff(bounds)
        first[-2], covered[-2], covered[-1] = bounds[-1], total - bounds[-1], bounds[0]
    first_tile[1:] = np.cumsum(-(-queries * problem.group // q_tile))[:-1]
    return table


def list_tiles(covered, tile: int) -> np.ndarray:
    """(tiles, 2): entry and number of each tile of so many rows, entry by entry."""
    counts = -(-covered // tile)
    entry = np.repeat(np.arange(len(covered)), counts)
    return np.stack([entry, np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)], axis=1)


def longest_first(problem: Problem, table, tiles, q_tile: int) -> np.ndarray:
    """Tiles of rows, those that see most keys first."""
    entry, first = table[tiles[:, 0]], tiles[:, 1] * q_tile // problem.group
    length_q, length_k = entry[:, 0], entry[:, 1]
    last = np.minimum(-(-(tiles[:, 1] + 1) * q_tile // problem.group), length_q) - 1
    offset = length_k - length_q if problem.offset_per_entry else 0
    low, high = np.zeros_like(length_k), length_k
    if problem.left is not None:
        low = np.maximum(low, first + offset - problem.left)
    if problem.right is not None:
        high = np.minimum(high, last + offset + problem.right + 1)
    return tiles[np.argsort(low - high, kind="stable")]


load_word, _ = words(types.int64)


@jit
def word_of(table, row, width, column):
    """A number of a table of words."""
    return load_word(table + (row * width + column) * WORD)
