"""Packed sequences in the simt kernels: which sequence a block works on, found in the boundaries where they lie.

The rows of a head are cut into tiles sequence by sequence. Tile t of the sequence that begins at row r has the number ``r // tile + e + t``, e
counting the sequences: no two tiles have one number, no sum over the sequences is needed, and there are at most ``rows // tile`` numbers and one a
sequence. So a grid is known without the boundaries, and a block finds its sequence by bisection; those whose number is nobody's have nothing to do.

Rows before the first sequence and after the last are two more entries, 0 and ``batch + 1``, which see nothing. Where boundaries descend, entry 0 has
all rows.

The arrays come with a batch axis of stride 0. A block looks at those rows of them that its sequence has, and what follows is as without packing.
"""

from __future__ import annotations

from numba.cuda.types import UniTuple, int32

from numbaflash.ptx.straight import straight_line

from .config import Elements
from .scores import option_types


def entries(config: Elements):
    """``f(options) -> int32``: sequences, and the two entries that are none."""
    return straight_line(int32, (option_types(config),), lambda ops, options: options[-1].shape[0] + ops.integer(1))


def _bound(ops, config, options, name, entry, total):
    """First row of an entry, of as many rows as there are."""
    boundaries = dict(zip((each for each, _, _ in config.options.parameters(config.compute)), options, strict=True))[name]
    count = boundaries.shape[0]
    (x,) = ops.load_row(ops.place(boundaries, (entry - 1,)), 1, (entry > 0) & (entry <= count))
    if getattr(config.options, name) == "int64":
        x = ops.narrow(ops.minimum(ops.maximum(x, ops.wide(ops.integer(0))), ops.wide(total)))
    return ops.select(entry > count, total, ops.minimum(ops.maximum(x, ops.integer(0)), total))


def ascends(config: Elements, name: str):
    """``f(entry, total, options) -> int32``: whether an entry ends no earlier than it begins."""

    def body(ops, entry, total, options):
        return ops.truth(_bound(ops, config, options, name, entry + 1, total) >= _bound(ops, config, options, name, entry, total))

    return straight_line(int32, (int32, int32, option_types(config)), body)


def bisect(config: Elements, name: str, tile: int):
    """``f(low, high, number, total, options) -> (low, high)``: half of the entries that a tile may belong to."""

    def body(ops, low, high, number, total, options):
        middle = (low + high) // 2
        begun = _bound(ops, config, options, name, middle, total) // tile + middle <= number
        return [ops.select(begun, middle, low), ops.select(begun, high, middle)]

    return straight_line(UniTuple(int32, 2), (*(int32,) * 4, option_types(config)), body)


def entry_of_tile(config: Elements, name: str, other: str, tile: int, other_tile: int):
    """``f(entry, number, total, other_total, ascending, other_ascending, options)``, of the entry that bisection found.

    Returns (batch entry, block, first row, rows, first row and rows of ``other``, number of its first tile there, rows that are of a sequence).
    Without anything to see, the other rows are none.
    """

    def body(ops, entry, number, total, other_total, ascending, other_ascending, options):
        last = options[-1].shape[0] + ops.integer(0)
        entry = ops.select(ascending != 0, entry, ops.integer(0))
        first, end = (_bound(ops, config, options, name, each, total) for each in (entry, entry + 1))
        end = ops.select(ascending != 0, end, total)
        block = number - (first // tile + entry)
        nobody = (entry < 1) | (entry >= last)
        nothing = nobody | (other_ascending == 0) | (block * tile >= end - first)
        other_first, other_end = (_bound(ops, config, options, other, each, other_total) for each in (entry, entry + 1))
        batch = ops.maximum(ops.minimum(entry - 1, last - 2), ops.integer(0))
        other_rows = ops.select(nothing, ops.integer(0), other_end - other_first)
        rows = ops.select(nobody, ops.integer(0), end - first)
        return [batch, block, first, end - first, other_first, other_rows, other_first // other_tile + entry, rows]

    return straight_line(UniTuple(int32, 8), (*(int32,) * 6, option_types(config)), body)


def span(config: Elements, name: str):
    """``f(total, options) -> (first, end)``: the rows that sequences have."""

    def body(ops, total, options):
        last = options[-1].shape[0] + ops.integer(0)
        return [_bound(ops, config, options, name, ops.integer(1), total), _bound(ops, config, options, name, last, total)]

    return straight_line(UniTuple(int32, 2), (int32, option_types(config)), body)
