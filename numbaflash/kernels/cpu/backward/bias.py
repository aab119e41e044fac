"""Phase 2: the gradient of a bias, dS summed over all that the bias is broadcast along.

A part of the bias has an owner, who walks all that goes into it and computes dS again, so that neither memory for a matrix of sums nor an order
among threads is needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from ..config import Kernel
from ..convert import COMPUTE, ITEMSIZE, elements
from ..transpose import transposing
from ..vector import Simd, add_lanes, jit, words


def build(kernel: Kernel, options, loading, differentiate_panel, clear):
    """Functions of the bias; ``options`` are the kernel's (`scores.build`), the others steps of the gradients."""
    lanes, vectors, panel = kernel.lanes, kernel.vectors, kernel.panel
    compute = COMPUTE[kernel.dtype]
    number = np.float64 if compute == types.float64 else np.float32
    simd = Simd(compute, lanes)
    itemsize, vector_bytes, panel_bytes = simd.itemsize, simd.bytes, panel * simd.itemsize
    load, store, splat = simd.load, simd.store, simd.splat
    load_int64, store_int64 = words(types.int64)
    load_int32, store_int32 = words(types.int32)
    load_number, store_number = words(compute)
    bias_dtype = kernel.bias_dtype or kernel.dtype
    _, store_bias = elements(bias_dtype, compute=compute)
    _, store_bias_rows = transposing(bias_dtype, lanes, compute)
    bias_size = ITEMSIZE[bias_dtype]
    zero, infinity = number(0), number(np.inf)
    entry_of = options.entry_of
    load_keys, load_rows = loading.load_keys, loading.load_rows

    @jit
    def bias_parts(args):
        """Parts of the bias that have an owner each."""
        if args.needs_bias == 0:
            return 0
        q_parts = (args.seqlen_q + args.part_queries - 1) // args.part_queries if args.by_row else 1
        parts = q_parts * (args.kv_tiles if args.by_key else 1)
        return parts * (args.batch if args.by_batch else 1) * (args.kv_heads if args.by_head else 1)

    @jit
    def differentiate_bias(args, at, part, work):
        """dbias = dS, summed over all that the bias is broadcast along: batch entries, heads, queries and keys in their order."""
        batches, batch = (1, 0) if args.by_batch else (args.batch, 0)
        kv_heads, kv_head = (1, 0) if args.by_head else (args.kv_heads, 0)
        kv_tiles, kv_tile = (1, 0) if args.by_key else (args.kv_tiles, 0)
        queries, query = args.seqlen_q, 0
        if args.by_batch:
            part, batch = part // args.batch, part % args.batch
        if args.by_head:
            part, kv_head = part // args.kv_heads, part % args.kv_heads
        if args.by_key:
            part, kv_tile = part // args.kv_tiles, part % args.kv_tiles
        if args.by_row:
            query = part * args.part_queries
            queries = min(args.part_queries, args.seqlen_q - query)
        clear(work + args.at_bias_sums, (args.kv_tile if args.by_key else 1) * args.sum_stride)
        for b in range(batch, batch + batches):
            entry = entry_of(args, at, b)
            for h in range(kv_head, kv_head + kv_heads):
                for row in range(query * args.group, (query + queries) * args.group, args.q_tile):
                    n_rows = min(args.q_tile, (query + queries) * args.group - row)
                    add_to_bias(args, at, entry, b, h, query, row, n_rows, kv_tile, kv_tile + kv_tiles, work)
        store_bias_part(args, at, batch, kv_head, query, queries if args.by_row else 1, kv_tile, work)

    @jit
    def add_to_bias(args, at, entry, batch, kv_head, first_query, first_row, n_rows, first_tile, last_tile, work):
        """Rows of a key/value head and tiles of keys: dS, added to the sums [key][row of the part]."""
        head_first = (batch * args.kv_heads + kv_head) * args.q_tiles * args.q_tile
        lse2, delta, slots = work + args.at_part_lse, work + args.at_part_delta, work + args.at_slots
        n_panels = (n_rows + panel - 1) // panel
        for i in range(n_panels * panel):
            row_lse2, row_delta, slot = infinity, zero, 0
            if i < n_rows:
                place = (head_first + first_row + i) * itemsize
                row_lse2 = load_number(at.workspace + args.at_lse2 + place)
                row_delta = load_number(at.workspace + args.at_delta + place)
                query, head = (first_row + i) // args.group - first_query, (first_row + i) % args.group
                slot = (query if args.by_row else 0) * (args.group if args.by_head else 1) + (head if args.by_head else 0)
            store_number(lse2 + i * itemsize, row_lse2)
            store_number(delta + i * itemsize, row_delta)
            store_int32(slots + i * 4, slot)
        load_rows(args, at, entry, batch, kv_head, first_row, n_panels, lse2, work)
        first, last = args.seqlen_k, 0
        for p in range(n_panels):
            ranges = work + args.at_ranges + p * 48
            first, last = min(first, load_int64(ranges)), max(last, load_int64(ranges + 8))
        tile_first = first_tile * args.kv_tile
        keys, values = work + args.at_keys, work + args.at_values
        for block in range(tile_first, min(args.seqlen_k, last_tile * args.kv_tile), args.kv_block):
            n_keys = min(args.kv_block, args.seqlen_k - block)
            if max(first, block) < min(last, block + n_keys):
                load_keys(args, at, entry, batch, kv_head, block, block + n_keys, work)
                for p in range(n_panels):
                    differentiate_panel(args, at, batch, block, p, keys, values, n_keys, lse2, delta, work)
                    ranges = work + args.at_ranges + p * 48
                    begin, end = load_int64(ranges + 32), min(n_keys, load_int64(ranges + 40))
                    if begin < end:
                        sums = work + args.at_bias_sums + (block - tile_first if args.by_key else 0) * args.sum_stride
                        n_here, dscores = min(panel, n_rows - p * panel), work + args.at_dscores + p * panel_bytes
                        sum_panel(args, dscores, begin, end, slots + p * panel * 4, n_here, sums, work + args.at_spare)

    @jit
    def sum_panel(args, dscores, begin, end, slots, n_rows, sums, spare):
        """Add dS of a panel to the sums; those over keys first, where the bias has one for all."""
        for w in range(vectors):
            if args.by_key:
                for key in range(begin, end):
                    dscore = load(dscores + key * args.score_stride + w * vector_bytes)
                    add_lanes_to_slots(args, dscore, slots + w * lanes * 4, n_rows - w * lanes, sums + key * args.sum_stride, spare)
            else:
                total = splat(zero)
                for key in range(begin, end):
                    total = total + load(dscores + key * args.score_stride + w * vector_bytes)
                add_lanes_to_slots(args, total, slots + w * lanes * 4, n_rows - w * lanes, sums, spare)

    @jit
    def add_lanes_to_slots(args, dscore, slots, n_rows, sums, spare):
        """Add the lanes to the numbers that their slots say."""
        if n_rows <= 0:
            return
        first = load_int32(slots)
        if args.by_row and (args.by_head or args.group == 1) and n_rows >= lanes:  # slots that follow each other
            store(sums + first * itemsize, load(sums + first * itemsize) + dscore)
        elif not args.by_row and (not args.by_head or args.group == 1):  # one slot; lanes past the last row are 0
            store_number(sums, load_number(sums) + add_lanes(dscore))
        else:
            add_each_lane(dscore, slots, min(n_rows, lanes), sums, spare)

    @jit
    def add_each_lane(dscore, slots, n, sums, lanes_of):
        """Lane by lane, by way of memory."""
        store(lanes_of, dscore)
        for lane in range(n):
            place = sums + load_int32(slots + lane * 4) * itemsize
            store_number(place, load_number(place) + load_number(lanes_of + lane * itemsize))

    @jit
    def store_bias_part(args, at, batch, kv_head, first_query, n_queries, kv_tile, work):
        """The sums of a part, to where its elements lie."""
        heads = args.group if args.by_head else 1
        first_key = kv_tile * args.kv_tile if args.by_key else 0
        n_keys = min(args.kv_tile, args.seqlen_k - first_key) if args.by_key else 1
        start = (
            at.dbias + batch * args.dbias_batch + kv_head * args.group * args.dbias_head + first_query * args.dbias_row + first_key * args.dbias_key
        )
        sums, addresses, n_slots = work + args.at_bias_sums, work + args.at_result_rows, n_queries * heads
        for slot in range(0, n_slots, lanes):
            for lane in range(lanes):
                query, head = (slot + lane) // heads, (slot + lane) % heads
                store_int64(addresses + lane * 8, start + query * args.dbias_row + head * args.dbias_head)
            key = 0
            if args.dbias_key == bias_size and slot + lanes <= n_slots:
                while key + lanes <= n_keys:
                    source = sums + key * args.sum_stride + slot * itemsize
                    store_bias_rows(source, args.sum_stride, work + args.at_ones, addresses, key * bias_size)
                    key += lanes
            while key < n_keys:
                for lane in range(min(lanes, n_slots - slot)):
                    value = load_number(sums + key * args.sum_stride + (slot + lane) * itemsize)
                    store_bias(load_int64(addresses + lane * 8) + key * args.dbias_key, value)
                key += 1

    return SimpleNamespace(
        bias_parts=bias_parts,
        differentiate_bias=differentiate_bias,
    )
