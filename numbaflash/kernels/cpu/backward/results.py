"""Where finished sums go: dK and dV as they lie, dQ transposed back to rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from ..arguments import row_address
from ..config import Kernel
from ..convert import COMPUTE, ITEMSIZE, elements
from ..transpose import transposing
from ..vector import Simd, jit, words


def build(kernel: Kernel):
    """Functions that clear and store sums."""
    dtype, lanes, vectors, panel = kernel.dtype, kernel.lanes, kernel.vectors, kernel.panel
    compute = COMPUTE[dtype]
    number = np.float64 if compute == types.float64 else np.float32
    simd, stored_size = Simd(compute, lanes), ITEMSIZE[dtype]
    itemsize, vector_bytes, panel_bytes = simd.itemsize, simd.bytes, panel * simd.itemsize
    load, store, splat = simd.load, simd.store, simd.splat
    load_int64, store_int64 = words(types.int64)
    load_number, _ = words(compute)
    _, store_element = elements(dtype)
    _, store_elements = elements(dtype, lanes)
    _, store_rows = transposing(dtype, lanes)
    zero, one = number(0), number(1)

    @jit
    def clear(target, n_bytes):
        """Sums of 0."""
        for i in range(0, n_bytes, vector_bytes):
            store(target + i, splat(zero))

    @jit
    def store_query_gradients(args, at, entry, batch, kv_head, first_row, n_panels, dq_sum, work):
        """dQ = scale * sum, transposed back to rows; lanes past the last row go nowhere."""
        dq = at.dq + batch * args.dq_batch + entry[5] * args.dq_row + kv_head * args.group * args.dq_head
        addresses, n_rows = work + args.at_result_rows, entry[3] * args.group
        for p in range(n_panels):
            row, panel_sum = first_row + p * panel, dq_sum + p * args.key_columns * panel_bytes
            for lane in range(panel):
                target = work + args.at_spare
                if row + lane < n_rows:
                    target = row_address(args, dq, args.dq_row, args.dq_head, row + lane)
                store_int64(addresses + lane * 8, target)
            d = 0
            if args.dq_dim == stored_size:
                while d + lanes <= args.head_dim:
                    for w in range(vectors):
                        source = panel_sum + d * panel_bytes + w * vector_bytes
                        store_rows(source, panel_bytes, work + args.at_scales, addresses + w * lanes * 8, d * stored_size)
                    d += lanes
            while d < args.head_dim:
                for lane in range(min(panel, n_rows - row)):
                    value = load_number(panel_sum + d * panel_bytes + lane * itemsize) * number(args.scale)
                    store_element(load_int64(addresses + lane * 8) + d * args.dq_dim, value)
                d += 1

    @jit
    def store_matrix(source, source_stride, factor, target, row_stride, dim_stride, n_rows, n_columns):
        """Rows of numbers, times a factor, to elements."""
        for row in range(n_rows):
            start, place, d = source + row * source_stride, target + row * row_stride, 0
            if dim_stride == stored_size:
                while d + lanes <= n_columns:
                    store_elements(place + d * stored_size, load(start + d * itemsize) * splat(factor))
                    d += lanes
            while d < n_columns:
                store_element(place + d * dim_stride, load_number(start + d * itemsize) * factor)
                d += 1

    @jit
    def store_key_gradients(args, at, entry, batch, kv_head, first, last, work):
        """dK = scale * sum and dV of keys ``first`` to ``last`` of a batch entry."""
        if args.needs_k:
            dk = at.dk + batch * args.dk_batch + kv_head * args.dk_head + (entry[6] + first) * args.dk_row
            store_matrix(work + args.at_dkeys, args.key_stride, number(args.scale), dk, args.dk_row, args.dk_dim, last - first, args.head_dim)
        if args.needs_v:
            dv = at.dv + batch * args.dv_batch + kv_head * args.dv_head + (entry[6] + first) * args.dv_row
            store_matrix(work + args.at_dvalues, args.value_stride, one, dv, args.dv_row, args.dv_dim, last - first, args.head_dim_v)

    return SimpleNamespace(clear=clear, store_key_gradients=store_key_gradients, store_query_gradients=store_query_gradients)
