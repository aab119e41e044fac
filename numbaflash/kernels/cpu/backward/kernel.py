"""The gradients: FlashAttention's Algorithm 4 on tiles that stay in cache.

First, every row (a query of one head) gets what it needs of the forward pass: its LSE and delta = dO . O - dLSE. Then a
work item is one tile of keys of one key/value head and its way through the rows of the query heads that share it. Keys
stay, with the sums of dK and dV; queries come by, and dQ is summed in the workspace. Items add to a tile of dQ in the order of
their keys, each waiting for its turn, so the sums do not depend on who runs when.

As in the forward pass, scores are held transposed, [key][row]: LSE and delta of a row stay in one lane. All five products
are then the forward's register tile, with what is broadcast on the left and what fills the lanes on the right:

    S  = K Q^T        dP = V dO^T        a key by a panel of rows
    dV += P dO        dK += dS Q         a key by a panel of the head dim
    dQ^T += K^T dS                       a number of the head dim by a panel of rows

Scores are in units of log2(e): P = 2**(S - lse2). dK and dQ get the scale when they are done.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from ..arguments import band, query_band, row_address
from ..config import Kernel
from ..convert import COMPUTE, ITEMSIZE, elements, packing
from ..driver import next_item, store_release, wait_until
from ..exp2 import exp2
from ..finite import finite_test
from ..microkernel import tile_product
from ..transpose import transposing
from ..vector import Simd, add_lanes, fma, jit, select, words
from .arguments import addresses_at, arguments_at, keys_of_tile


def build(kernel: Kernel):
    """Numba functions of the gradients for one kernel; nothing is compiled yet.

    Returns
    -------
    namespace
        ``thread(args, addresses, work, counter, phase)`` is the entry, called on each thread in phase 0 and, when all are
        done with it, in phase 1; all but the phase are addresses. The others are its steps.
    """
    dtype, lanes, rows, vectors, panel = kernel.dtype, kernel.lanes, kernel.rows, kernel.vectors, kernel.panel
    compute = COMPUTE[dtype]
    number = np.float64 if compute == types.float64 else np.float32
    itemsize, stored_size = compute.bitwidth // 8, ITEMSIZE[dtype]
    vector_bytes, panel_bytes = lanes * itemsize, panel * itemsize
    simd, indices = Simd(compute, lanes), Simd(types.int32, lanes)
    load, store, splat = simd.load, simd.store, simd.splat
    load_index, splat_index = indices.load, indices.splat
    load_int64, store_int64 = words(types.int64)
    load_int32, store_int32 = words(types.int32)
    load_number, store_number = words(compute)
    load_element, store_element = elements(dtype)
    load_elements, store_elements = elements(dtype, lanes)
    transpose, _ = transposing(str(compute), lanes)
    _, store_rows = transposing(dtype, lanes)
    product, accumulate = tile_product(str(compute), rows, vectors, lanes)
    _, accumulate_narrow = tile_product(str(compute), rows, 1, lanes)
    pack, all_finite = packing(dtype, lanes), finite_test(compute, lanes)
    zero, one, infinity = number(0), number(1), number(np.inf)
    log2e = float(np.log2(np.e))

    # Phase 0: a tile of rows

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
        """LSE and delta of a tile of rows, and its place in the queue; a row without keys has an LSE of infinity: P = 0."""
        head, q_tile = item // args.q_tiles, item % args.q_tiles
        batch, kv_head = head // args.kv_heads, head % args.kv_heads
        first_head = kv_head * args.group
        lse2 = at.workspace + args.at_lse2 + item * args.q_tile * itemsize
        delta = at.workspace + args.at_delta + item * args.q_tile * itemsize
        dout = at.dout + batch * args.dout_batch + first_head * args.dout_head
        out = at.out + batch * args.out_batch + first_head * args.out_head
        lse = at.lse + batch * args.lse_batch + first_head * args.lse_head
        dlse = at.dlse + batch * args.dlse_batch + first_head * args.dlse_head
        for i in range(args.q_tile):
            row = q_tile * args.q_tile + i
            row_lse2, row_delta = infinity, zero
            if row < args.seqlen_q * args.group:
                lo, hi = band(args, row)
                row_lse = load_number(row_address(args, lse, args.lse_row, args.lse_head, row))
                if lo < hi and row_lse != -infinity:
                    row_lse2 = number(row_lse * log2e)
                    if args.needs_q | args.needs_k:
                        dout_row = row_address(args, dout, args.dout_row, args.dout_head, row)
                        out_row = row_address(args, out, args.out_row, args.out_head, row)
                        row_delta = dot(dout_row, args.dout_dim, out_row, args.out_dim, args.head_dim_v)
                        if at.dlse != 0:
                            row_delta -= load_number(row_address(args, dlse, args.dlse_row, args.dlse_head, row))
            store_number(lse2 + i * itemsize, row_lse2)
            store_number(delta + i * itemsize, row_delta)
        if args.needs_q:
            first, last = keys_of_tile(args, q_tile)
            store_int64(at.workspace + args.at_turns + item * 8, first // args.kv_tile)
            if first == last:
                clear_query_gradients(args, at, batch, first_head, q_tile)

    @jit
    def clear_query_gradients(args, at, batch, first_head, q_tile):
        """dQ = 0 for a tile of rows that sees no key."""
        dq = at.dq + batch * args.dq_batch + first_head * args.dq_head
        for row in range(q_tile * args.q_tile, min((q_tile + 1) * args.q_tile, args.seqlen_q * args.group)):
            target = row_address(args, dq, args.dq_row, args.dq_head, row)
            for d in range(args.head_dim):
                store_element(target + d * args.dq_dim, zero)

    # Phase 1: what a tile of rows needs

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
    def load_rows(args, at, batch, first_head, first_row, n_panels, lse2, work):
        """Pack queries and dO of a tile of rows, each as rows and as panels; what sees no key is 0.

        Returns whether all of it is finite.
        """
        q = at.q + batch * args.q_batch + first_head * args.q_head
        dout = at.dout + batch * args.dout_batch + first_head * args.dout_head
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
            if args.needs_q | args.needs_k:
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
    def list_bands(args, first_row, n_panels, lse2, work):
        """Keys that each row sees, and for each panel those that some row sees and those that all rows see."""
        query, head = first_row // args.group, first_row % args.group
        for p in range(n_panels):
            some_first, some_last, all_first, all_last = args.seqlen_k, 0, 0, args.seqlen_k
            for i in range(p * panel, (p + 1) * panel):
                lo, hi = 0, 0
                if load_number(lse2 + i * itemsize) != infinity:
                    lo, hi = query_band(args, query)
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

    # The steps of one block of keys and one tile of rows

    @jit
    def compute_scores(args, keys, stride, panels, n, scores, begin, end):
        """S = K Q^T (or dP = V dO^T) of one panel, for keys begin to end of the block."""
        for key in range(begin, end, rows):
            product(keys + key * stride, stride, itemsize, panels, panel_bytes, scores + key * args.score_stride, args.score_stride, n)

    @jit
    def compute_gradients(args, scores, dscores, begin, end, lse2, delta):
        """P = 2**(S - lse2) and dS = P (dP - delta), where every row sees every key."""
        for w in range(vectors):
            row_lse2, row_delta = load(lse2 + w * vector_bytes), load(delta + w * vector_bytes)
            for key in range(begin, end):
                place = key * args.score_stride + w * vector_bytes
                probability = exp2(load(scores + place) - row_lse2)
                store(scores + place, probability)
                store(dscores + place, probability * (load(dscores + place) - row_delta))

    @jit
    def compute_masked_gradients(args, scores, dscores, begin, end, lse2, delta, block, first, last):
        """The same where rows see only some keys: P and dS of the others are 0, whatever their scores are."""
        for w in range(vectors):
            row_lse2, row_delta = load(lse2 + w * vector_bytes), load(delta + w * vector_bytes)
            lo, hi = load_index(first + w * lanes * 4), load_index(last + w * lanes * 4)
            for key in range(begin, end):
                place = key * args.score_stride + w * vector_bytes
                at = splat_index(np.int32(block + key))
                seen = (lo <= at) & (at < hi)
                probability = exp2(load(scores + place) - row_lse2)
                store(scores + place, select(seen, probability, splat(zero)))
                store(dscores + place, select(seen, probability * (load(dscores + place) - row_delta), splat(zero)))

    @jit
    def list_spans(args, n_panels, work):
        """For each group of keys of the block, the panels that have something to do with it: they lie side by side."""
        for group in range(args.kv_block // rows):
            key, lo, hi = group * rows, n_panels, 0
            for p in range(n_panels):
                ranges = work + args.at_ranges + p * 48
                if load_int64(ranges + 32) <= key and key < load_int64(ranges + 40):
                    lo, hi = min(lo, p), p + 1
            store_int64(work + args.at_spans + group * 16, lo)
            store_int64(work + args.at_spans + group * 16 + 8, hi)

    @jit
    def add_products(args, weights, inputs, stride, columns, target, work):
        """dV += P dO (or dK += dS Q)."""
        ones, column = work + args.at_ones, 0
        while column < columns:
            wide = column + panel <= columns
            for group in range(args.kv_block // rows):
                lo, hi = load_int64(work + args.at_spans + group * 16), load_int64(work + args.at_spans + group * 16 + 8)
                if lo < hi:
                    a = weights + group * rows * args.score_stride + lo * panel_bytes
                    b, c = inputs + lo * panel * stride + column * itemsize, target + group * rows * stride + column * itemsize
                    if wide:
                        accumulate(a, args.score_stride, itemsize, b, stride, c, stride, (hi - lo) * panel, ones)
                    else:
                        accumulate_narrow(a, args.score_stride, itemsize, b, stride, c, stride, (hi - lo) * panel, ones)
            column += panel if wide else lanes

    @jit
    def add_seen_products(args, weights, inputs, stride, columns, target, block, n_keys, n_rows, work):
        """`add_products` where a row that only some of the keys see has NaN or infinity: the other keys keep out of it."""
        for key in range(n_keys):
            for i in range(n_rows):
                if load_int32(work + args.at_first + i * 4) <= block + key < load_int32(work + args.at_last + i * 4):
                    weight = splat(load_number(weights + key * args.score_stride + i * itemsize))
                    for column in range(0, columns, lanes):
                        place = target + key * stride + column * itemsize
                        store(place, fma(weight, load(inputs + i * stride + column * itemsize), load(place)))

    @jit
    def add_query_gradients(args, keys, dscores, dq_sum, n_keys, work):
        """dQ^T += K^T dS for one panel."""
        for d in range(0, args.key_columns, rows):
            target = dq_sum + d * panel_bytes
            accumulate(keys + d * itemsize, itemsize, args.key_stride, dscores, args.score_stride, target, panel_bytes, n_keys, work + args.at_ones)

    @jit
    def add_seen_query_gradients(args, keys, dscores, dq_sum, block, n_keys, first, last):
        """`add_query_gradients` where a key that only some rows see has NaN or infinity: the other rows keep out of it."""
        for w in range(vectors):
            lo, hi = load_index(first + w * lanes * 4), load_index(last + w * lanes * 4)
            for d in range(args.head_dim):
                place = dq_sum + d * panel_bytes + w * vector_bytes
                total = load(place)
                for key in range(n_keys):
                    at = splat_index(np.int32(block + key))
                    value = splat(load_number(keys + key * args.key_stride + d * itemsize))
                    total = select((lo <= at) & (at < hi), fma(value, load(dscores + key * args.score_stride + w * vector_bytes), total), total)
                store(place, total)

    @jit
    def differentiate_block(args, block, n_keys, in_tile, n_panels, lse2, delta, dq_sum, rows_finite, keys_finite, work):
        """One block of keys, at ``in_tile`` of the packed tile, and one tile of rows: all that they add to the gradients."""
        keys, values = work + args.at_keys + in_tile * args.key_stride, work + args.at_values + in_tile * args.value_stride
        scores, dscores = work + args.at_scores, work + args.at_dscores
        masked = False
        for p in range(n_panels):
            ranges = work + args.at_ranges + p * 48
            begin = max(0, load_int64(ranges) - block) // rows * rows
            n_seen = min(n_keys, load_int64(ranges + 8) - block)
            if begin >= n_seen:
                begin, n_seen = 0, 0
            end = (n_seen + rows - 1) // rows * rows
            store_int64(ranges + 32, begin)
            store_int64(ranges + 40, end)
            full_begin = max(begin, min(n_seen, load_int64(ranges + 16) - block))
            full_end = max(full_begin, min(n_seen, load_int64(ranges + 24) - block))
            masked |= begin < full_begin or full_end < min(end, n_keys)  # the products touch keys in whole register tiles
            panel_scores, panel_dscores = scores + p * panel_bytes, dscores + p * panel_bytes
            compute_scores(
                args, keys, args.key_stride, work + args.at_queries_t + p * args.key_columns * panel_bytes, args.head_dim, panel_scores, begin, end
            )
            if args.needs_q | args.needs_k:
                panel_douts = work + args.at_douts_t + p * args.value_columns * panel_bytes
                compute_scores(args, values, args.value_stride, panel_douts, args.head_dim_v, panel_dscores, begin, end)
            at_lse2, at_delta = lse2 + p * panel_bytes, delta + p * panel_bytes
            first, last = work + args.at_first + p * panel * 4, work + args.at_last + p * panel * 4
            compute_masked_gradients(args, panel_scores, panel_dscores, begin, full_begin, at_lse2, at_delta, block, first, last)
            compute_gradients(args, panel_scores, panel_dscores, full_begin, full_end, at_lse2, at_delta)
            compute_masked_gradients(args, panel_scores, panel_dscores, full_end, end, at_lse2, at_delta, block, first, last)

        queries, douts = work + args.at_queries, work + args.at_douts
        dkeys, dvalues = work + args.at_dkeys + in_tile * args.key_stride, work + args.at_dvalues + in_tile * args.value_stride
        if masked and not rows_finite:
            n_rows = n_panels * panel
            if args.needs_v:
                add_seen_products(args, scores, douts, args.value_stride, args.value_columns, dvalues, block, n_keys, n_rows, work)
            if args.needs_k:
                add_seen_products(args, dscores, queries, args.key_stride, args.key_columns, dkeys, block, n_keys, n_rows, work)
        else:
            list_spans(args, n_panels, work)
            if args.needs_v:
                add_products(args, scores, douts, args.value_stride, args.value_columns, dvalues, work)
            if args.needs_k:
                add_products(args, dscores, queries, args.key_stride, args.key_columns, dkeys, work)
        if args.needs_q:
            for p in range(n_panels):
                begin, end = load_int64(work + args.at_ranges + p * 48 + 32), load_int64(work + args.at_ranges + p * 48 + 40)
                seen_keys, n_seen = keys + begin * args.key_stride, min(n_keys, end) - begin
                panel_dscores = dscores + begin * args.score_stride + p * panel_bytes
                panel_sum = dq_sum + p * args.key_columns * panel_bytes
                if n_seen > 0 and masked and not keys_finite:
                    first, last = work + args.at_first + p * panel * 4, work + args.at_last + p * panel * 4
                    add_seen_query_gradients(args, seen_keys, panel_dscores, panel_sum, block + begin, n_seen, first, last)
                elif n_seen > 0:
                    add_query_gradients(args, seen_keys, panel_dscores, panel_sum, n_seen, work)

    # A work item

    @jit
    def differentiate(args, at, item, work):
        """A tile of keys: dK and dV from all rows that see it, and what it adds to their dQ."""
        heads = args.batch * args.kv_heads
        kv_tile, head = item // heads, item % heads
        batch, kv_head = head // args.kv_heads, head % args.kv_heads
        first_head = kv_head * args.group
        tile_first = kv_tile * args.kv_tile
        tile_last = min(args.seqlen_k, tile_first + args.kv_tile)
        n_keys = tile_last - tile_first
        in_blocks = (n_keys + args.kv_block - 1) // args.kv_block * args.kv_block
        keys, values = work + args.at_keys, work + args.at_values
        k = at.k + batch * args.k_batch + kv_head * args.k_head + tile_first * args.k_row
        v = at.v + batch * args.v_batch + kv_head * args.v_head + tile_first * args.v_row
        pack_rows(k, args.k_row, args.k_dim, n_keys, args.head_dim, keys, in_blocks, args.key_stride)
        pack_rows(v, args.v_row, args.v_dim, n_keys, args.head_dim_v, values, in_blocks, args.value_stride)
        clear(work + args.at_dkeys, in_blocks * args.key_stride)
        clear(work + args.at_dvalues, in_blocks * args.value_stride)
        keys_finite = all_finite(keys, args.key_stride, 0, n_keys, args.head_dim)
        for q_tile in range(args.q_tiles):
            first, last = keys_of_tile(args, q_tile)
            if max(first, tile_first) < min(last, tile_last):
                tile = head * args.q_tiles + q_tile
                first_row = q_tile * args.q_tile
                n_panels = (min(args.q_tile, args.seqlen_q * args.group - first_row) + panel - 1) // panel
                lse2 = at.workspace + args.at_lse2 + tile * args.q_tile * itemsize
                delta = at.workspace + args.at_delta + tile * args.q_tile * itemsize
                dq_sum = at.workspace + args.at_dq_sum + tile * args.q_tile * args.key_columns * itemsize
                turn = at.workspace + args.at_turns + tile * 8
                rows_finite = load_rows(args, at, batch, first_head, first_row, n_panels, lse2, work)
                list_bands(args, first_row, n_panels, lse2, work)
                if args.needs_q:
                    wait_until(turn, kv_tile)
                    if kv_tile == first // args.kv_tile:
                        clear(dq_sum, n_panels * args.key_columns * panel_bytes)
                for block in range(tile_first, tile_last, args.kv_block):
                    if max(first, block) < min(last, block + args.kv_block):
                        n_block = min(args.kv_block, tile_last - block)
                        in_tile = block - tile_first
                        differentiate_block(args, block, n_block, in_tile, n_panels, lse2, delta, dq_sum, rows_finite, keys_finite, work)
                if args.needs_q:
                    if kv_tile == (last - 1) // args.kv_tile:
                        store_query_gradients(args, at, batch, first_head, first_row, n_panels, dq_sum, work)
                    store_release(turn, kv_tile + 1)
        if args.needs_k:
            dk = at.dk + batch * args.dk_batch + kv_head * args.dk_head + tile_first * args.dk_row
            store_matrix(work + args.at_dkeys, args.key_stride, number(args.scale), dk, args.dk_row, args.dk_dim, n_keys, args.head_dim)
        if args.needs_v:
            dv = at.dv + batch * args.dv_batch + kv_head * args.dv_head + tile_first * args.dv_row
            store_matrix(work + args.at_dvalues, args.value_stride, one, dv, args.dv_row, args.dv_dim, n_keys, args.head_dim_v)

    @jit
    def pack_rows(source, row_stride, dim_stride, n_rows, n_columns, target, target_rows, target_stride):
        """Pack a matrix into rows of ``target_stride`` bytes, zeros around it."""
        pack(source, row_stride, dim_stride, n_rows, n_columns, target, target_rows, target_stride // itemsize)

    @jit
    def clear(target, n_bytes):
        for i in range(0, n_bytes, vector_bytes):
            store(target + i, splat(zero))

    @jit
    def store_query_gradients(args, at, batch, first_head, first_row, n_panels, dq_sum, work):
        """dQ = scale * sum, transposed back to rows; lanes past the last row go nowhere."""
        dq = at.dq + batch * args.dq_batch + first_head * args.dq_head
        addresses, n_rows = work + args.at_result_rows, args.seqlen_q * args.group
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

    def thread(args_address, addresses_address, work, counter, phase):
        """Take work items until there are none."""
        args, at = arguments_at(args_address), addresses_at(addresses_address)
        heads = args.batch * args.kv_heads
        item = next_item(counter)
        if phase == 0:
            while item < heads * args.q_tiles:
                prepare_rows(args, at, item)
                item = next_item(counter)
        else:
            list_packed_rows(args, work)
            while item < heads * args.kv_tiles:
                differentiate(args, at, item, work)
                item = next_item(counter)

    return SimpleNamespace(
        thread=thread,
        pack=pack,
        to_panel=to_panel,
        compute_scores=compute_scores,
        compute_gradients=compute_gradients,
        add_products=add_products,
        add_query_gradients=add_query_gradients,
    )
