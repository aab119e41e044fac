"""Phase 0: what each row (a query of one head) takes from the forward pass, its LSE and delta = dO . O - dLSE. And dsinks, which is made of that."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from .. import scores as score_options
from ..arguments import band, row_address
from ..config import Kernel
from ..convert import COMPUTE, ITEMSIZE, elements
from ..packed import word_of
from ..vector import Simd, add_lanes, fma, jit, words
from .arguments import keys_of_tile


def build(kernel: Kernel, options):
    """Functions of the rows; ``options`` are the kernel's (`scores.build`)."""
    dtype, lanes = kernel.dtype, kernel.lanes
    compute = COMPUTE[dtype]
    number = np.float64 if compute == types.float64 else np.float32
    simd, stored_size = Simd(compute, lanes), ITEMSIZE[dtype]
    itemsize, splat = simd.itemsize, simd.splat
    _, store_int64 = words(types.int64)
    load_number, store_number = words(compute)
    load_element, store_element = elements(dtype)
    load_elements, _ = elements(dtype, lanes)
    zero, infinity = number(0), number(np.inf)
    entry_of, sink_of, has_sinks = options.entry_of, options.sink_of, options.has_sinks
    unit = score_options.score_unit(kernel)
    packed = "packed" in kernel.options

    @jit
    def tile_of(args, entry, batch, kv_head, q_tile):
        """Number of a tile of rows in the workspace."""
        if packed:
            return kv_head * args.q_tiles + entry[7] + q_tile
        return (batch * args.kv_heads + kv_head) * args.q_tiles + q_tile

    @jit
    def dot(a, a_step, b, b_step, n):
        """Product of two rows of elements, ``a_step`` and ``b_step`` bytes apart."""
        total, d = zero, 0
        if a_step == stored_size and b_step == stored_size:
            sums = splat(zero)
            while d + lanes <= n:
                sums = fma(load_elements(a + d * stored_size), load_elements(b + d * stored_size), sums)
                d += lanes
            total = add_lanes(sums)
        while d < n:
            total += load_element(a + d * a_step) * load_element(b + d * b_step)
            d += 1
        return total

    @jit
    def prepare_rows(args, at, item):
        """LSE and delta of a tile of rows, and its place in the queue; a row without keys has an LSE of infinity: P = 0.

        The LSE is in the units of the scores.
        """
        if packed:
            row, kv_head = item // args.kv_heads, item % args.kv_heads
            batch, q_tile = word_of(at.cu_seqlens_k, row, 2, 0), word_of(at.cu_seqlens_k, row, 2, 1)
        else:
            head, q_tile = item // args.q_tiles, item % args.q_tiles
            batch, kv_head = head // args.kv_heads, head % args.kv_heads
        first_head = kv_head * args.group
        entry = entry_of(args, at, batch)
        first_q, tile = entry[5], tile_of(args, entry, batch, kv_head, q_tile)
        lse2 = at.workspace + args.at_lse2 + tile * args.q_tile * itemsize
        delta = at.workspace + args.at_delta + tile * args.q_tile * itemsize
        dout = at.dout + batch * args.dout_batch + first_q * args.dout_row + first_head * args.dout_head
        out = at.out + batch * args.out_batch + first_q * args.out_row + first_head * args.out_head
        lse = at.lse + batch * args.lse_batch + first_q * args.lse_row + first_head * args.lse_head
        dlse = at.dlse + batch * args.dlse_batch + first_q * args.dlse_row + first_head * args.dlse_head
        for i in range(args.q_tile):
            row = q_tile * args.q_tile + i
            row_lse2, row_delta, sink_term = infinity, zero, zero
            if row < entry[3] * args.group:
                lo, hi = band(args, entry, row)
                row_lse = load_number(row_address(args, lse, args.lse_row, args.lse_head, row))
                sees_sink = has_sinks and row // args.group < entry[0]
                if (lo < hi or sees_sink) and row_lse != -infinity:
                    if lo < hi:
                        row_lse2 = number(row_lse * unit)
                    if args.needs_q | args.needs_k | args.needs_bias | args.needs_sinks:
                        dout_row = row_address(args, dout, args.dout_row, args.dout_head, row)
                        out_row = row_address(args, out, args.out_row, args.out_head, row)
                        row_delta = dot(dout_row, args.dout_dim, out_row, args.out_dim, args.head_dim_v)
                        if at.dlse != 0:
                            row_delta -= load_number(row_address(args, dlse, args.dlse_row, args.dlse_head, row))
                    if has_sinks:
                        sink = sink_of(args, at, first_head + row % args.group)
                        sink_term = number(np.exp(np.float64(sink) - np.float64(row_lse)) * row_delta)
            store_number(lse2 + i * itemsize, row_lse2)
            store_number(delta + i * itemsize, row_delta)
            if has_sinks:
                store_number(at.workspace + args.at_sink_terms + (tile * args.q_tile + i) * itemsize, sink_term)
        if args.needs_q:
            first, last = keys_of_tile(args, entry, q_tile)
            store_int64(at.workspace + args.at_turns + tile * 8, first // args.kv_tile)
            if first == last:
                clear_query_gradients(args, at, entry, batch, first_head, q_tile)

    @jit
    def clear_query_gradients(args, at, entry, batch, first_head, q_tile):
        """dQ = 0 for a tile of rows that sees no key."""
        dq = at.dq + batch * args.dq_batch + entry[5] * args.dq_row + first_head * args.dq_head
        for row in range(q_tile * args.q_tile, min((q_tile + 1) * args.q_tile, entry[3] * args.group)):
            target = row_address(args, dq, args.dq_row, args.dq_head, row)
            for d in range(args.head_dim):
                store_element(target + d * args.dq_dim, zero)

    @jit
    def add_sink_terms(args, at, head):
        """dsink = -sum of P delta over the rows of a head."""
        kv_head, in_group = head // args.group, head % args.group
        total = 0.0
        for batch in range(args.batch):
            entry = entry_of(args, at, batch)
            first = tile_of(args, entry, batch, kv_head, 0) * args.q_tile + in_group
            for query in range(entry[3]):
                total -= np.float64(load_number(at.workspace + args.at_sink_terms + (first + query * args.group) * itemsize))
        store_number(at.dsinks + head * args.dsinks_head, number(total))

    return SimpleNamespace(
        tile_of=tile_of,
        prepare_rows=prepare_rows,
        add_sink_terms=add_sink_terms,
    )
