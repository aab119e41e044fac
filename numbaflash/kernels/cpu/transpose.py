"""Square tiles between rows in memory, as the user has them, and the transposed panels that the kernel computes with."""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .convert import COMPUTE, emit_element, emit_number, stored_type
from .vector import broadcast, element_type, pointer

INT32, INT64 = ir.IntType(32), ir.IntType(64)


def emit_transpose(builder, rows):
    """Transpose as many vectors as a vector has lanes (a power of two): one exchange for each bit of the lane number."""
    lanes = len(rows)
    rows = list(rows)
    step = 1
    while step < lanes:
        upper = [j if not j & step else lanes + j - step for j in range(lanes)]
        lower = [j + step if not j & step else lanes + j for j in range(lanes)]
        for i in range(lanes):
            if not i & step:
                pair = rows[i], rows[i + step]
                for place, lane_numbers in ((i, upper), (i + step, lower)):
                    mask = ir.Constant(ir.VectorType(INT32, lanes), [INT32(number) for number in lane_numbers])
                    rows[place] = builder.shuffle_vector(*pair, mask)
        step *= 2
    return rows


@functools.cache
def transposing(dtype, lanes, compute=None):
    """Build the two directions.

    Parameters
    ----------
    dtype : str
        Of the rows in memory.
    lanes : int
        Rows, and neighbouring elements of each, that are moved at once.
    compute : numba type, optional
        Of the numbers in a panel, where it is not that of `COMPUTE`.

    Returns
    -------
    load_rows : intrinsic
        ``load_rows(addresses, offset, factor, panel, panel_stride)``: elements at ``offset`` bytes of the ``lanes`` rows
        whose addresses are listed at ``addresses`` go to ``panel``, times ``factor``.
    store_rows : intrinsic
        ``store_rows(panel, panel_stride, factors, addresses, offset)``: the way back; the factors of the rows lie at an
        address.
    """
    compute = compute or COMPUTE[dtype]
    itemsize = compute.bitwidth // 8
    vector = ir.VectorType(element_type(compute), lanes)
    stored = ir.VectorType(stored_type(dtype), lanes)

    def places(builder, addresses, offset):
        for lane in range(lanes):
            address = builder.load(pointer(builder, addresses, INT64, lane * 8))
            yield pointer(builder, builder.add(address, offset), stored)

    @intrinsic
    def load_rows(typingctx, addresses, offset, factor, panel, panel_stride):
        def codegen(context, builder, sig, args):
            addresses, offset, factor, panel, panel_stride = args
            factor = broadcast(builder, factor, lanes)
            rows = [emit_number(builder, builder.load(place, align=1), dtype, compute) for place in places(builder, addresses, offset)]
            for i, column in enumerate(emit_transpose(builder, rows)):
                place = pointer(builder, builder.add(panel, builder.mul(panel_stride, INT64(i))), vector)
                builder.store(builder.fmul(column, factor), place, align=itemsize)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, compute, types.int64, types.int64), codegen

    @intrinsic
    def store_rows(typingctx, panel, panel_stride, factors, addresses, offset):
        def codegen(context, builder, sig, args):
            panel, panel_stride, factors, addresses, offset = args
            factors = builder.load(pointer(builder, factors, vector), align=itemsize)
            columns = []
            for i in range(lanes):
                place = pointer(builder, builder.add(panel, builder.mul(panel_stride, INT64(i))), vector)
                columns.append(builder.fmul(builder.load(place, align=itemsize), factors))
            for row, place in zip(emit_transpose(builder, columns), places(builder, addresses, offset), strict=True):
                builder.store(emit_element(builder, row, dtype), place, align=1)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return load_rows, store_rows
