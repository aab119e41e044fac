"""The matrix products at the heart of both halves of attention, on register tiles.

`tile_product`: ``c[r, :] = sum over k of a[r, k] * b[k, :]`` for ``rows`` rows and ``vectors * lanes`` columns. The sums
stay in ``rows * vectors`` registers; a step of k loads one row of ``b`` as vectors and multiplies it by one broadcast
number of each row of ``a``. Scores (a = keys, b = queries transposed) and the weighted sum of values (a = values
transposed, b = probabilities) are the same product with other strides.

A tile of 8 x 2 asks for 10 loads in the 8 cycles that two FMA units need for its 16 multiply-adds; its 16 sums cover the
4 cycles of latency of both units twice.

`dot_products`: as many keys as a vector has lanes, each times one query, the head dim in the lanes.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .convert import COMPUTE, ITEMSIZE, elements, emit_widen, stored_type
from .vector import Simd, broadcast, element_type, emit_fma, fma, jit, llvm_type, pointer

INT32, INT64 = ir.IntType(32), ir.IntType(64)
BYTES = ir.IntType(8).as_pointer()


@functools.cache
def tile_product(dtype, rows, vectors, lanes):
    """Build the two forms of the register-tile product.

    Parameters
    ----------
    dtype : str
        Of ``b``; the others are of its compute type.
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
    element = element_type(COMPUTE[dtype])
    vector, stored = ir.VectorType(element, lanes), ir.VectorType(stored_type(dtype), lanes)
    itemsize = COMPUTE[dtype].bitwidth // 8
    columns = range(vectors)

    def multiply(builder, a, row_stride, k_stride, b, b_stride, n):
        """The loop over k; returns the sums as rows of vectors."""
        a, b = builder.inttoptr(a, BYTES), builder.inttoptr(b, BYTES)
        row_offsets = [builder.mul(row_stride, INT64(r)) for r in range(rows)]
        entry = builder.basic_block
        loop, done = builder.append_basic_block("k_loop"), builder.append_basic_block("k_done")
        zero = ir.Constant(vector, None)
        builder.cbranch(builder.icmp_signed(">", n, INT64(0)), loop, done)

        builder.position_at_end(loop)
        k = builder.phi(INT64, "k")
        k.add_incoming(INT64(0), entry)
        sums = [[builder.phi(vector) for _ in columns] for _ in range(rows)]
        a_offset, b_row = builder.mul(k, k_stride), builder.gep(b, [builder.mul(k, b_stride)])
        b_vectors = []
        for w in columns:
            place = pointer(builder, b_row, stored, w * lanes * ITEMSIZE[dtype])
            b_vectors.append(emit_widen(builder, builder.load(place, align=1), dtype))
        added = []
        for r in range(rows):
            place = pointer(builder, builder.gep(builder.gep(a, [row_offsets[r]]), [a_offset]), element)
            factor = broadcast(builder, builder.load(place, align=itemsize), lanes)
            added.append([emit_fma(builder, factor, b_vectors[w], sums[r][w]) for w in columns])
        following = builder.add(k, INT64(1))
        k.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, n), loop, done)

        builder.position_at_end(done)
        result = [[builder.phi(vector) for _ in columns] for _ in range(rows)]
        for r in range(rows):
            for w in columns:
                for phi in (sums[r][w], result[r][w]):
                    phi.add_incoming(zero, entry)
                    phi.add_incoming(added[r][w], loop)
        return result

    def row_pointers(builder, c, c_stride, r):
        c_row = builder.gep(builder.inttoptr(c, BYTES), [builder.mul(c_stride, INT64(r))])
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


@functools.cache
def dot_products(dtype, lanes):
    """Build the product of ``lanes`` keys with one query.

    Parameters
    ----------
    dtype : str
        Of the keys; the query is of its compute type.
    lanes : int
        A power of two.

    Returns
    -------
    function
        ``dots(keys, key_stride, first, last, query, n, scratch)``: the vector of the products of keys ``first``,
        ``first + 1``, ... with the query, over n vectors of the head dim; past key ``last``, of that key again. Keys are
        read one after the other, as they lie, which is what memory is fast at. ``scratch`` takes ``lanes`` vectors.
    """
    compute = COMPUTE[dtype]
    simd = Simd(compute, lanes)
    load, store, splat, vector_bytes = simd.load, simd.store, simd.splat, simd.bytes
    load_elements, _ = elements(dtype, lanes)
    stored_bytes = lanes * ITEMSIZE[dtype]
    zero = np.float64(0) if compute == types.float64 else np.float32(0)

    @intrinsic
    def sum_each(typingctx, scratch):
        def codegen(context, builder, sig, args):
            kind = llvm_type(simd.vector)
            places = [pointer(builder, args[0], kind, lane * vector_bytes) for lane in range(lanes)]
            return emit_sums(builder, [builder.load(place, align=simd.itemsize) for place in places])

        return simd.vector(types.int64), codegen

    @jit
    def dots(keys, key_stride, first, last, query, n, scratch):
        for lane in range(lanes):
            key = keys + min(first + lane, last) * key_stride
            total = splat(zero)
            for i in range(n):
                total = fma(load_elements(key + i * stored_bytes), load(query + i * vector_bytes), total)
            store(scratch + lane * vector_bytes, total)
        return sum_each(scratch)

    return dots


def emit_sums(builder, vectors):
    """The sum of each of as many vectors as a vector has lanes, as one vector: pairs are folded into halves."""
    lanes = len(vectors)
    step = 1
    while len(vectors) > 1:
        even = [j if not j & step else lanes + j - step for j in range(lanes)]
        odd = [j + step if not j & step else lanes + j for j in range(lanes)]
        folded = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=True):
            halves = [builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, lanes), [INT32(j) for j in half])) for half in (even, odd)]
            folded.append(builder.fadd(*halves))
        vectors = folded
        step *= 2
    return vectors[0]
