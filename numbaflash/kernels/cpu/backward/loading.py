"""What a work item brings into its thread's memory: keys and values; and of a tile of rows queries, dO, the keys that each row sees and its options.

Keys and values are packed as rows. Queries and dO are packed twice: as rows, for sums over queries, and transposed into panels, for sums over the
head dim.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from ..arguments import query_band
from ..config import Kernel
from ..convert import COMPUTE, ITEMSIZE, packing
from ..finite import finite_test
from ..transpose import transposing
from ..vector import Simd, jit, words


def build(kernel: Kernel, options):
    """Functions that load; ``options`` are the kernel's (`scores.build`)."""
    dtype, lanes, vectors, panel = kernel.dtype, kernel.lanes, kernel.vectors, kernel.panel
    compute = COMPUTE[dtype]
    number = np.float64 if compute == types.float64 else np.float32
    simd, stored_size = Simd(compute, lanes), ITEMSIZE[dtype]
    itemsize, vector_bytes, panel_bytes, store, splat = simd.itemsize, simd.bytes, panel * simd.itemsize, simd.store, simd.splat
    _, store_int64 = words(types.int64)
    _, store_int32 = words(types.int32)
    load_number, store_number = words(compute)
    transpose, _ = transposing(str(compute), lanes)
    pack, all_finite = packing(dtype, lanes), finite_test(compute, lanes)
    zero, one, infinity = number(0), number(1), number(np.inf)
    list_panel, has_lists, lists_bytes = options.list_panel, options.has_lists, options.lists_bytes

    @jit
    def load_keys(args, at, entry, batch, kv_head, first, last, work):
        """Pack keys and values ``first`` to ``last`` of a batch entry, in whole blocks: zeros follow, and stand for what lies beyond the length."""
        n_held = max(0, min(last, entry[1]) - first)  # what lies beyond the length is never read
        in_blocks = (last - first + args.kv_block - 1) // args.kv_block * args.kv_block
        k = at.k + batch * args.k_batch + kv_head * args.k_head + (entry[6] + first) * args.k_row
        v = at.v + batch * args.v_batch + kv_head * args.v_head + (entry[6] + first) * args.v_row
        pack(k, args.k_row, args.k_dim, n_held, args.head_dim, work + args.at_keys, in_blocks, args.key_stride // itemsize)
        pack(v, args.v_row, args.v_dim, n_held, args.head_dim_v, work + args.at_values, in_blocks, args.value_stride // itemsize)

    @jit
    def load_rows(args, at, entry, batch, kv_head, first_row, n_panels, lse2, work):
        """All that belongs to a tile of rows. Returns whether its queries and dO are finite."""
        finite = pack_rows(args, at, entry, batch, kv_head * args.group, first_row, n_panels, lse2, work)
        list_bands(args, entry, first_row, n_panels, lse2, work)
        if has_lists:
            list_panels(args, at, entry, batch, kv_head, first_row, n_panels, work)
        return finite

    @jit
    def list_packed_rows(args, work):
        """Where packed queries and dO lie: always at the same place; and constants, that the products ask for."""
        for i in range(args.q_tile):
            store_int64(work + args.at_query_rows + i * 8, work + args.at_queries + i * args.key_stride)
            store_int64(work + args.at_dout_rows + i * 8, work + args.at_douts + i * args.value_stride)
        for w in range(vectors):
            store(work + args.at_ones + w * vector_bytes, splat(one))
            store(work + args.at_scales + w * vector_bytes, splat(number(args.scale)))
        for i in range(0, max(args.key_stride, args.value_stride), itemsize):
            store_number(work + args.at_zeros + i, zero)

    @jit
    def pack_rows(args, at, entry, batch, first_head, first_row, n_panels, lse2, work):
        """Pack queries and dO of a tile of rows, each as rows and as panels; what sees no key is 0.

        Returns whether all of it is finite.
        """
        q = at.q + batch * args.q_batch + entry[5] * args.q_row + first_head * args.q_head
        dout = at.dout + batch * args.dout_batch + entry[5] * args.dout_row + first_head * args.dout_head
        queries, douts, zeros = work + args.at_queries, work + args.at_douts, work + args.at_zeros
        query, head = first_row // args.group, first_row % args.group
        for i in range(n_panels * panel):
            query_row, dout_row, query_step, dout_step = zeros, zeros, stored_size, stored_size
            if load_number(lse2 + i * itemsize) != infinity:
                query_row, query_step = q + query * args.q_row + head * args.q_head, args.q_dim
                dout_row, dout_step = dout + query * args.dout_row + head * args.dout_head, args.dout_dim
            pack(query_row, 0, query_step, 1, args.head_dim, queries + i * args.key_stride, 1, args.key_columns)
            pack(dout_row, 0, dout_step, 1, args.head_dim_v, douts + i * args.value_stride, 1, args.value_columns)
            head += 1
            if head == args.group:
                query, head = query + 1, 0
        for p in range(n_panels):
            to_panel(work + args.at_query_rows, p, args.key_columns, number(args.score_scale), work + args.at_queries_t)
            if args.needs_q | args.needs_k | args.needs_bias:
                to_panel(work + args.at_dout_rows, p, args.value_columns, one, work + args.at_douts_t)
        n_rows = n_panels * panel
        return all_finite(queries, args.key_stride, 0, n_rows, args.key_columns) and all_finite(
            douts, args.value_stride, 0, n_rows, args.value_columns
        )

    @jit
    def to_panel(packed_rows, p, columns, factor, panels):
        """Transpose packed rows into panel p."""
        for d in range(0, columns, lanes):
            for w in range(vectors):
                place = panels + (p * columns + d) * panel_bytes + w * vector_bytes
                transpose(packed_rows + (p * panel + w * lanes) * 8, d * itemsize, factor, place, panel_bytes)

    @jit
    def list_bands(args, entry, first_row, n_panels, lse2, work):
        """Keys that each row sees, and for each panel those that some row sees and those that all rows see."""
        query, head = first_row // args.group, first_row % args.group
        for p in range(n_panels):
            some_first, some_last, all_first, all_last = args.seqlen_k, 0, 0, args.seqlen_k
            for i in range(p * panel, (p + 1) * panel):
                lo, hi = 0, 0
                if load_number(lse2 + i * itemsize) != infinity:
                    lo, hi = query_band(args, entry, query)
                store_int32(work + args.at_first + i * 4, lo)
                store_int32(work + args.at_last + i * 4, hi)
                if lo < hi:
                    some_first, some_last = min(some_first, lo), max(some_last, hi)
                all_first, all_last = max(all_first, lo), min(all_last, hi)
                head += 1
                if head == args.group:
                    query, head = query + 1, 0
            ranges = work + args.at_ranges + p * 48
            store_int64(ranges, some_first)
            store_int64(ranges + 8, some_last)
            store_int64(ranges + 16, all_first)
            store_int64(ranges + 24, all_last)

    @jit
    def list_panels(args, at, entry, batch, kv_head, first_row, n_panels, work):
        """What each row has of the options."""
        for p in range(n_panels):
            list_panel(args, at, entry, batch, kv_head, first_row + p * panel, work + args.at_lists + p * lists_bytes)

    return SimpleNamespace(list_packed_rows=list_packed_rows, load_keys=load_keys, load_rows=load_rows)
