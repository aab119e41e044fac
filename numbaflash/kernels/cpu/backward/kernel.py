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

Scores are in units of log2(e), P = 2**(S - lse2), but for kernels whose options want natural units (`scores`). dK and dQ get the scale when they
are done.

The gradients of a bias and of sinks come last. A part of the bias has an owner, who walks all that the bias is broadcast along and computes dS
again, so that neither memory for a matrix of sums nor an order among threads is needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from .. import scores as score_options
from ..arguments import band, query_band, row_address
from ..config import Kernel
from ..convert import COMPUTE, ITEMSIZE, elements, packing
from ..driver import next_item, store_release, wait_until
from ..finite import finite_test
from ..microkernel import tile_product
from ..packed import word_of
from ..scores import EVERYTHING, NOTHING
from ..transpose import transposing
from ..vector import Simd, add_lanes, fma, jit, select, words
from .arguments import addresses_at, arguments_at, keys_of_tile


def build(kernel: Kernel):
    """Numba functions of the gradients for one kernel; nothing is compiled yet.

    Returns
    -------
    namespace
        ``thread(args, addresses, work, counter, phase)`` is the entry, called on each thread in phase 0, when all are done
        with it in phase 1, and then in phase 2 where there is one; all but the phase are addresses. The others are its
        steps.
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
    options = score_options.build(kernel, with_slopes=True)
    entry_of, list_panel, look_at_mask, fetch, draw, change_scores, visible, sees, weight, sink_of = (
        getattr(options, name)
        for name in ("entry_of", "list_panel", "look_at_mask", "fetch", "draw", "change_scores", "visible", "sees", "weight", "sink_of")
    )
    has_lists, has_mask, has_tiles, has_sinks, has_dropout = (
        getattr(options, name) for name in ("has_lists", "has_mask", "has_tiles", "has_sinks", "has_dropout")
    )
    changes_scores, can_be_dead, lists_bytes, has_bias = options.changes_scores, options.can_be_dead, options.lists_bytes, options.has_bias
    unit = score_options.score_unit(kernel)
    packed = "packed" in kernel.options

    @jit
    def tile_of(args, entry, batch, kv_head, q_tile):
        """Number of a tile of rows in the workspace."""
        if packed:
            return kv_head * args.q_tiles + entry[7] + q_tile
        return (batch * args.kv_heads + kv_head) * args.q_tiles + q_tile

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
    def load_rows(args, at, entry, batch, first_head, first_row, n_panels, lse2, work):
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

    # The steps of one block of keys and one tile of rows

    @jit
    def compute_scores(args, keys, stride, panels, n, scores, begin, end):
        """S = K Q^T (or dP = V dO^T) of one panel, for keys begin to end of the block."""
        for key in range(begin, end, rows):
            product(keys + key * stride, stride, itemsize, panels, panel_bytes, scores + key * args.score_stride, args.score_stride, n)

    def gradient_steps(has_slopes):
        """Build P and dS of scores and dP; with slopes, dS is by the scores before the softcap."""

        @jit
        def compute_gradients(args, scores, dscores, begin, end, lse2, delta, keep_tile, slope_tile):
            """P = exp(S - lse) and dS = P (dP - delta), where every row sees every key; P is dropped after that, dP before."""
            for w in range(vectors):
                row_lse2, row_delta = load(lse2 + w * vector_bytes), load(delta + w * vector_bytes)
                for key in range(begin, end):
                    place, in_tile = key * args.score_stride + w * vector_bytes, key * panel_bytes + w * vector_bytes
                    probability, kept, dweight = gradients(load(scores + place) - row_lse2, load(dscores + place), keep_tile + in_tile)
                    dscore = probability * (dweight - row_delta)
                    if has_slopes:
                        dscore = dscore * load(slope_tile + in_tile)
                    store(scores + place, kept)
                    store(dscores + place, dscore)

        @jit
        def compute_masked_gradients(args, scores, dscores, begin, end, lse2, delta, block, first, last, mask_tile, keep_tile, slope_tile):
            """The same where rows see only some keys: P and dS of the others are 0, whatever their scores are."""
            for w in range(vectors):
                row_lse2, row_delta = load(lse2 + w * vector_bytes), load(delta + w * vector_bytes)
                lo, hi = load_index(first + w * lanes * 4), load_index(last + w * lanes * 4)
                for key in range(begin, end):
                    place, in_tile = key * args.score_stride + w * vector_bytes, key * panel_bytes + w * vector_bytes
                    seen = visible(lo, hi, splat_index(np.int32(block + key)), mask_tile + in_tile)
                    probability, kept, dweight = gradients(load(scores + place) - row_lse2, load(dscores + place), keep_tile + in_tile)
                    dscore = probability * (dweight - row_delta)
                    if has_slopes:
                        dscore = dscore * load(slope_tile + in_tile)
                    store(scores + place, select(seen, kept, splat(zero)))
                    store(dscores + place, select(seen, dscore, splat(zero)))

        return compute_gradients, compute_masked_gradients

    @jit
    def gradients(exponent, dweight, keep):
        """(P, P as it weighs values, dP): dropout multiplies the last two by what lies at an address."""
        probability = weight(exponent)
        if has_dropout:
            factor = load(keep)
            return probability, probability * factor, dweight * factor
        return probability, probability, dweight

    compute_gradients, compute_masked_gradients = gradient_steps(options.has_slopes)

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
                lists, first, last = work + args.at_lists + i // panel * lists_bytes, work + args.at_first + i * 4, work + args.at_last + i * 4
                if sees(args, lists, i % panel, load_int32(first), load_int32(last), block + key):
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
    def add_seen_query_gradients(args, keys, dscores, dq_sum, block, n_keys, first, last, mask_tile):
        """`add_query_gradients` where a key that only some rows see has NaN or infinity: the other rows keep out of it."""
        for w in range(vectors):
            lo, hi = load_index(first + w * lanes * 4), load_index(last + w * lanes * 4)
            for d in range(args.head_dim):
                place = dq_sum + d * panel_bytes + w * vector_bytes
                total = load(place)
                for key in range(n_keys):
                    at = splat_index(np.int32(block + key))
                    value = splat(load_number(keys + key * args.key_stride + d * itemsize))
                    seen = visible(lo, hi, at, mask_tile + key * panel_bytes + w * vector_bytes)
                    total = select(seen, fma(value, load(dscores + key * args.score_stride + w * vector_bytes), total), total)
                store(place, total)

    def panel_step(compute_gradients, compute_masked_gradients):
        """Build what computes P and dS of one block of keys and one panel of rows."""

        @jit
        def differentiate_panel(args, at, batch, block, p, keys, values, n_keys, lse2, delta, work):
            """Returns whether some row does not see some key that the products touch."""
            ranges = work + args.at_ranges + p * 48
            begin = max(0, load_int64(ranges) - block) // rows * rows
            n_seen = min(n_keys, load_int64(ranges + 8) - block)
            lists = work + args.at_lists + p * lists_bytes
            mask_tile, bias_tile, keep_tile, slope_tile = (
                work + args.at_mask_tile,
                work + args.at_bias_tile,
                work + args.at_keep_tile,
                work + args.at_slope_tile,
            )
            state = EVERYTHING
            if has_mask and begin < n_seen:
                state = look_at_mask(args, lists, block, begin, n_seen)
            if begin >= n_seen or state == NOTHING:
                begin, n_seen = 0, 0
                if can_be_dead:
                    clear_panel(args, p, n_keys, work)
            end = (n_seen + rows - 1) // rows * rows
            store_int64(ranges + 32, begin)
            store_int64(ranges + 40, end)
            if can_be_dead and begin == end:
                return False
            full_begin = max(begin, min(n_seen, load_int64(ranges + 16) - block))
            full_end = max(full_begin, min(n_seen, load_int64(ranges + 24) - block))
            if has_mask and state != EVERYTHING:
                full_begin, full_end = begin, begin
            if has_tiles:
                fetch(args, lists, block, begin, n_seen, mask_tile, bias_tile)
            scores, dscores = work + args.at_scores + p * panel_bytes, work + args.at_dscores + p * panel_bytes
            panel_queries = work + args.at_queries_t + p * args.key_columns * panel_bytes
            compute_scores(args, keys, args.key_stride, panel_queries, args.head_dim, scores, begin, end)
            if args.needs_q | args.needs_k | args.needs_bias:
                panel_douts = work + args.at_douts_t + p * args.value_columns * panel_bytes
                compute_scores(args, values, args.value_stride, panel_douts, args.head_dim_v, dscores, begin, end)
            if changes_scores:
                change_scores(args, lists, scores, args.score_stride, block, begin, end, bias_tile, slope_tile)
            if has_dropout:
                keep_tile = draw(args, at, lists, batch, block, begin, end, keep_tile)
            at_lse2, at_delta = lse2 + p * panel_bytes, delta + p * panel_bytes
            first, last = work + args.at_first + p * panel * 4, work + args.at_last + p * panel * 4
            tiles = mask_tile, keep_tile, slope_tile
            compute_masked_gradients(args, scores, dscores, begin, full_begin, at_lse2, at_delta, block, first, last, *tiles)
            compute_gradients(args, scores, dscores, full_begin, full_end, at_lse2, at_delta, keep_tile, slope_tile)
            compute_masked_gradients(args, scores, dscores, full_end, end, at_lse2, at_delta, block, first, last, *tiles)
            return begin < full_begin or full_end < min(end, n_keys)

        return differentiate_panel

    differentiate_panel = panel_step(compute_gradients, compute_masked_gradients)

    @jit
    def clear_panel(args, p, n_keys, work):
        """P = dS = 0 for a panel that sees no key of a block, as the products may touch it between others that do."""
        for key in range((n_keys + rows - 1) // rows * rows):
            for w in range(vectors):
                place = key * args.score_stride + p * panel_bytes + w * vector_bytes
                store(work + args.at_scores + place, splat(zero))
                store(work + args.at_dscores + place, splat(zero))

    @jit
    def differentiate_block(args, at, batch, block, n_keys, in_tile, n_panels, lse2, delta, dq_sum, rows_finite, keys_finite, work):
        """One block of keys, at ``in_tile`` of the packed tile, and one tile of rows: all that they add to the gradients."""
        keys, values = work + args.at_keys + in_tile * args.key_stride, work + args.at_values + in_tile * args.value_stride
        scores, dscores = work + args.at_scores, work + args.at_dscores
        masked = False
        for p in range(n_panels):
            masked |= differentiate_panel(args, at, batch, block, p, keys, values, n_keys, lse2, delta, work)

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
                    mask_tile, lists = work + args.at_mask_tile, work + args.at_lists + p * lists_bytes
                    if has_mask:
                        fetch(args, lists, block, begin, begin + n_seen, mask_tile, work + args.at_bias_tile)
                        mask_tile += begin * panel_bytes
                    add_seen_query_gradients(args, seen_keys, panel_dscores, panel_sum, block + begin, n_seen, first, last, mask_tile)
                elif n_seen > 0:
                    add_query_gradients(args, seen_keys, panel_dscores, panel_sum, n_seen, work)

    @jit
    def list_panels(args, at, entry, batch, kv_head, first_row, n_panels, work):
        for p in range(n_panels):
            list_panel(args, at, entry, batch, kv_head, first_row + p * panel, work + args.at_lists + p * lists_bytes)

    # A work item

    @jit
    def differentiate(args, at, item, work):
        """A tile of keys: dK and dV from all rows that see it, and what it adds to their dQ."""
        if packed:
            row, kv_head = args.row_tiles + item // args.kv_heads, item % args.kv_heads
            batch, kv_tile = word_of(at.cu_seqlens_k, row, 2, 0), word_of(at.cu_seqlens_k, row, 2, 1)
        else:
            heads = args.batch * args.kv_heads
            kv_tile, head = item // heads, item % heads
            batch, kv_head = head // args.kv_heads, head % args.kv_heads
        first_head = kv_head * args.group
        entry = entry_of(args, at, batch)
        keys_here, first_k = entry[4], entry[6]
        tile_first = kv_tile * args.kv_tile
        tile_last = min(keys_here, tile_first + args.kv_tile)
        n_keys = tile_last - tile_first
        n_held = max(0, min(n_keys, entry[1] - tile_first))  # what lies beyond the length is never read
        in_blocks = (n_keys + args.kv_block - 1) // args.kv_block * args.kv_block
        keys, values = work + args.at_keys, work + args.at_values
        k = at.k + batch * args.k_batch + kv_head * args.k_head + (first_k + tile_first) * args.k_row
        v = at.v + batch * args.v_batch + kv_head * args.v_head + (first_k + tile_first) * args.v_row
        pack_rows(k, args.k_row, args.k_dim, n_held, args.head_dim, keys, in_blocks, args.key_stride)
        pack_rows(v, args.v_row, args.v_dim, n_held, args.head_dim_v, values, in_blocks, args.value_stride)
        clear(work + args.at_dkeys, in_blocks * args.key_stride)
        clear(work + args.at_dvalues, in_blocks * args.value_stride)
        keys_finite = all_finite(keys, args.key_stride, 0, n_keys, args.head_dim)
        n_rows = entry[3] * args.group
        for q_tile in range((n_rows + args.q_tile - 1) // args.q_tile):
            first, last = keys_of_tile(args, entry, q_tile)
            if max(first, tile_first) < min(last, tile_last):
                tile = tile_of(args, entry, batch, kv_head, q_tile)
                first_row = q_tile * args.q_tile
                n_panels = (min(args.q_tile, n_rows - first_row) + panel - 1) // panel
                lse2 = at.workspace + args.at_lse2 + tile * args.q_tile * itemsize
                delta = at.workspace + args.at_delta + tile * args.q_tile * itemsize
                dq_sum = at.workspace + args.at_dq_sum + tile * args.q_tile * args.key_columns * itemsize
                turn = at.workspace + args.at_turns + tile * 8
                rows_finite = load_rows(args, at, entry, batch, first_head, first_row, n_panels, lse2, work)
                list_bands(args, entry, first_row, n_panels, lse2, work)
                if has_lists:
                    list_panels(args, at, entry, batch, kv_head, first_row, n_panels, work)
                if args.needs_q:
                    wait_until(turn, kv_tile)
                    if kv_tile == first // args.kv_tile:
                        clear(dq_sum, n_panels * args.key_columns * panel_bytes)
                for block in range(tile_first, tile_last, args.kv_block):
                    if max(first, block) < min(last, block + args.kv_block):
                        n_block = min(args.kv_block, tile_last - block)
                        in_tile = block - tile_first
                        differentiate_block(args, at, batch, block, n_block, in_tile, n_panels, lse2, delta, dq_sum, rows_finite, keys_finite, work)
                if args.needs_q:
                    if kv_tile == (last - 1) // args.kv_tile:
                        store_query_gradients(args, at, entry, batch, first_head, first_row, n_panels, dq_sum, work)
                    store_release(turn, kv_tile + 1)
        if args.needs_k:
            dk = at.dk + batch * args.dk_batch + kv_head * args.dk_head + (first_k + tile_first) * args.dk_row
            store_matrix(work + args.at_dkeys, args.key_stride, number(args.scale), dk, args.dk_row, args.dk_dim, n_keys, args.head_dim)
        if args.needs_v:
            dv = at.dv + batch * args.dv_batch + kv_head * args.dv_head + (first_k + tile_first) * args.dv_row
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
    def store_query_gradients(args, at, entry, batch, first_head, first_row, n_panels, dq_sum, work):
        """dQ = scale * sum, transposed back to rows; lanes past the last row go nowhere."""
        dq = at.dq + batch * args.dq_batch + entry[5] * args.dq_row + first_head * args.dq_head
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

    # Phase 2: gradients of options

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

    bias_panel = differentiate_panel
    if options.has_slopes:
        bias_panel = panel_step(*gradient_steps(False))
    _, store_bias = elements(kernel.bias_dtype or dtype, compute=compute)
    _, store_bias_rows = transposing(kernel.bias_dtype or dtype, lanes, compute)
    bias_size = ITEMSIZE[kernel.bias_dtype or dtype]

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
        load_rows(args, at, entry, batch, kv_head * args.group, first_row, n_panels, lse2, work)
        list_bands(args, entry, first_row, n_panels, lse2, work)
        list_panels(args, at, entry, batch, kv_head, first_row, n_panels, work)
        first, last = args.seqlen_k, 0
        for p in range(n_panels):
            ranges = work + args.at_ranges + p * 48
            first, last = min(first, load_int64(ranges)), max(last, load_int64(ranges + 8))
        tile_first = first_tile * args.kv_tile
        k = at.k + batch * args.k_batch + kv_head * args.k_head
        v = at.v + batch * args.v_batch + kv_head * args.v_head
        keys, values = work + args.at_keys, work + args.at_values
        for block in range(tile_first, min(args.seqlen_k, last_tile * args.kv_tile), args.kv_block):
            n_keys = min(args.kv_block, args.seqlen_k - block)
            if max(first, block) < min(last, block + n_keys):
                n_held = min(n_keys, entry[1] - block)
                pack_rows(k + block * args.k_row, args.k_row, args.k_dim, n_held, args.head_dim, keys, args.kv_block, args.key_stride)
                pack_rows(v + block * args.v_row, args.v_row, args.v_dim, n_held, args.head_dim_v, values, args.kv_block, args.value_stride)
                for p in range(n_panels):
                    bias_panel(args, at, batch, block, p, keys, values, n_keys, lse2, delta, work)
                    ranges = work + args.at_ranges + p * 48
                    begin, end = load_int64(ranges + 32), min(n_keys, load_int64(ranges + 40))
                    if begin < end:
                        sums = work + args.at_bias_sums + (block - tile_first if args.by_key else 0) * args.sum_stride
                        n_here, dscores = min(panel, n_rows - p * panel), work + args.at_dscores + p * panel_bytes
                        sum_panel(args, dscores, begin, end, slots + p * panel * 4, n_here, sums, work + args.at_spare)

    @jit
    def add_each_lane(dscore, slots, n, sums, lanes_of):
        """Lane by lane, by way of memory."""
        store(lanes_of, dscore)
        for lane in range(n):
            place = sums + load_int32(slots + lane * 4) * itemsize
            store_number(place, load_number(place) + load_number(lanes_of + lane * itemsize))

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

    def thread(args_address, addresses_address, work, counter, phase):
        """Take work items until there are none."""
        args, at = arguments_at(args_address), addresses_at(addresses_address)
        heads = args.batch * args.kv_heads
        row_items, key_items = heads * args.q_tiles, heads * args.kv_tiles
        if packed:
            row_items, key_items = args.kv_heads * args.row_tiles, args.kv_heads * args.key_tiles
        item = next_item(counter)
        if phase == 0:
            while item < row_items:
                prepare_rows(args, at, item)
                item = next_item(counter)
        elif phase == 1:
            list_packed_rows(args, work)
            items = key_items if args.needs_q | args.needs_k | args.needs_v else 0
            while item < items:
                differentiate(args, at, item, work)
                item = next_item(counter)
        else:
            n_sinks = args.kv_heads * args.group if args.needs_sinks else 0
            if has_sinks:
                while item < n_sinks:
                    add_sink_terms(args, at, item)
                    item = next_item(counter)
            if has_bias:
                list_packed_rows(args, work)
                while item - n_sinks < bias_parts(args):
                    differentiate_bias(args, at, item - n_sinks, work)
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
