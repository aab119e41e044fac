"""Which layouts TMA can read and write in place, and the tensor maps of operands. Head dims are read in panels of 64 columns."""

from __future__ import annotations

from dataclasses import replace

from ... import toolchain
from ...dispatch import Layout, contiguous_strides


def packed_rows_map(name, dtype, layout: Layout, pack: int) -> toolchain.TensorMap:
    """Map of q or out over (head dim, heads of a tile, queries, tile heads, batch); a box is one consumer's 64 rows."""
    _, seqlen, heads, dim = layout.shape
    of_batch, of_query, of_head, _ = _strides(layout)
    return toolchain.TensorMap(
        name,
        dtype,
        (dim, pack, seqlen, heads // pack, layout.shape[0]),
        (of_head, of_query, of_head * pack, of_batch),
        (64, pack, 64 // pack, 1, 1),
    )


def rows_map(name, dtype, layout: Layout, box: int, first: int = 0, rows: int | None = None) -> toolchain.TensorMap:
    """Map over (head dim, rows, heads, batch) with boxes of so many rows; optionally only of ``rows`` from ``first`` on."""
    batch, seqlen, heads, dim = layout.shape
    of_batch, of_row, of_head, _ = _strides(layout)
    rows = seqlen if rows is None else rows
    return toolchain.TensorMap(name, dtype, (dim, rows, heads, batch), (of_row, of_head, of_batch), (64, box, 1, 1), offset=first * of_row)


def with_batch(layout: Layout) -> Layout:
    """A layout of packed sequences with a batch axis of one element; others as they are."""
    return layout if len(layout.shape) == 4 else replace(layout, shape=(1, *layout.shape), strides=(0, *layout.strides))


def _strides(layout: Layout):
    """Strides where an axis of one element, which may have any, has a stride that TMA takes."""
    return tuple(stride if n > 1 else 16 for n, stride in zip(layout.shape, layout.strides, strict=True))


def refusal(layout: Layout, itemsize: int) -> str:
    """Why TMA cannot read or write an operand in place; empty when it can."""
    *outer, inner = _strides(layout)
    if inner != itemsize and layout.shape[-1] > 1:
        return "TMA needs a contiguous head dim"
    if layout.alignment < 16:
        return "TMA needs an address that is a multiple of 16 bytes"
    if any(stride % 16 or not 0 <= stride < 2**40 for stride in outer):
        return "TMA needs strides that are multiples of 16 bytes and not negative"
    return ""


def row_major(layout: Layout, itemsize: int) -> Layout:
    return replace(layout, strides=contiguous_strides(layout.shape, itemsize), alignment=16)
