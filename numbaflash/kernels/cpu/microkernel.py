"""The matrix product at the heart of both halves of attention, on one register tile.

``c[r, :] = sum over k of a[r, k] * b[k, :]`` for ``rows`` rows and ``vectors * lanes`` columns. The sums stay in
``rows * vectors`` registers; a step of k loads one row of ``b`` as vectors and multiplies it by one broadcast number of
each row of ``a``. Scores (a = keys, b = queries transposed) and the weighted sum of values (a = values transposed, b =
probabilities) are the same product with other strides.

With 32 vector registers a tile of 8 x 3 takes 24 for the sums, 3 for ``b`` and 1 for ``a``, and asks for 11 loads in
the 12 cycles that two FMA units need for its 24 multiply-adds, half of what two load units can do.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector import broadcast, element_type, emit_fma, pointer

INT64 = ir.IntType(64)


@functools.cache
def tile_product(dtype, rows, vectors, lanes):
    """Build the two forms of the register-tile product.

    Parameters
    ----------
    dtype : numba type
        float32 or float64.
    rows, vectors, lanes : int
        Shape of the tile: ``rows`` by ``vectors * lanes``.

    Returns
    -------
    overwrite : intrinsic
        ``overwrite(a, row_stride, k_stride, b, b_stride, c, c_stride, n)``: ``c = a @ b`` over n steps of k.
    accumulate : intrinsic
        ``accumulate(..., n, factor)``: ``c = c * factor + a @ b``, where the columns of ``factor`` lie at an address.

    Addresses and strides are int64, in bytes. Nothing need be aligned beyond an element. With n = 0 the product is 0.
    """
    element = element_type(dtype)
    vector = ir.VectorType(element, lanes)
    itemsize = dtype.bitwidth // 8
    columns = range(vectors)

    def multiply(builder, a, row_stride, k_stride, b, b_stride, n):
        """The loop over k; returns the sums as rows of vectors."""
        a, b = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in (a, b))
        row_offsets = [builder.mul(row_stride, INT64(r)) for r in range(rows)]
        entry = builder.basic_block
        loop, done = builder.append_basic_block("k_loop"), builder.append_basic_block("k_done")
        zero = ir.Constant(vector, None)
        builder.cbranch(builder.icmp_signed(">", n, INT64(0)), loop, done)

        builder.position_at_end(loop)
        k = builder.phi(INT64, "k")
        k.add_incoming(INT64(0), entry)
        sums = [[builder.phi(vector) for _ in columns] for _ in range(rows)]
        b_offset, a_offset = builder.mul(k, b_stride), builder.mul(k, k_stride)
        b_row = builder.gep(b, [b_offset])
        b_vectors = [builder.load(pointer(builder, b_row, vector, w * lanes * itemsize), align=itemsize) for w in columns]
        added = []
        for r in range(rows):
            a_k = builder.gep(builder.gep(a, [row_offsets[r]]), [a_offset])
            factor = broadcast(builder, builder.load(pointer(builder, a_k, element), align=itemsize), lanes)
            added.append([emit_fma(builder, factor, b_vectors[w], sums[r][w]) for w in columns])
        following = builder.add(k, INT64(1))
        k.add_incoming(following, loop)
        for r in range(rows):
            for w in columns:
                sums[r][w].add_incoming(zero, entry)
                sums[r][w].add_incoming(added[r][w], loop)
        builder.cbranch(builder.icmp_signed("<", following, n), loop, done)

        builder.position_at_end(done)
        result = [[builder.phi(vector) for _ in columns] for _ in range(rows)]
        for r in range(rows):
            for w in columns:
                result[r][w].add_incoming(zero, entry)
                result[r][w].add_incoming(added[r][w], loop)
        return result

    def row_pointers(builder, c, c_stride, r):
        c_row = builder.gep(builder.inttoptr(c, ir.IntType(8).as_pointer()), [builder.mul(c_stride, INT64(r))])
        return [pointer(builder, c_row, vector, w * lanes * itemsize) for w in columns]

    @intrinsic
    def overwrite(typingctx, a, row_stride, k_stride, b, b_stride, c, c_stride, n):
        def codegen(context, builder, sig, args):
            *operands, c, c_stride, n = args
            sums = multiply(builder, *operands, n)
            for r in range(rows):
                for w, place in enumerate(row_pointers(builder, c, c_stride, r)):
                    builder.store(sums[r][w], place, align=itemsize)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    @intrinsic
    def accumulate(typingctx, a, row_stride, k_stride, b, b_stride, c, c_stride, n, factor):
        def codegen(context, builder, sig, args):
            *operands, c, c_stride, n, factor = args
            sums = multiply(builder, *operands, n)
            factors = [builder.load(pointer(builder, factor, vector, w * lanes * itemsize), align=itemsize) for w in columns]
            for r in range(rows):
                for w, place in enumerate(row_pointers(builder, c, c_stride, r)):
                    old = builder.load(place, align=itemsize)
                    builder.store(emit_fma(builder, old, factors[w], sums[r][w]), place, align=itemsize)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return overwrite, accumulate
