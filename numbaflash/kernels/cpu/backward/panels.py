"""P and dS of a block of keys and a panel of rows: S = K Q^T, dP = V dO^T, P = exp(S - LSE), dS = P (dP - delta)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from ..config import Kernel
from ..convert import COMPUTE
from ..microkernel import tile_product
from ..scores import EVERYTHING, NOTHING
from ..vector import Simd, jit, select, words


def build(kernel: Kernel, options):
    """Functions of a panel; ``options`` are the kernel's (`scores.build`).

    Returns
    -------
    namespace
        ``differentiate_panel(args, at, batch, block, p, keys, values, n_keys, lse2, delta, work)``; and ``differentiate_bias_panel``, the same but
        that dS is by the scores as they are after the softcap, to which the bias is added.
    """
    lanes, rows, vectors, panel = kernel.lanes, kernel.rows, kernel.vectors, kernel.panel
    compute = COMPUTE[kernel.dtype]
    number = np.float64 if compute == types.float64 else np.float32
    simd, indices = Simd(compute, lanes), Simd(types.int32, lanes)
    itemsize, vector_bytes, panel_bytes = simd.itemsize, simd.bytes, panel * simd.itemsize
    load, store, splat, load_index, splat_index = simd.load, simd.store, simd.splat, indices.load, indices.splat
    load_int64, store_int64 = words(types.int64)
    product, _ = tile_product(str(compute), rows, vectors, lanes)
    zero = number(0)
    look_at_mask, fetch, draw, change_scores, visible, weight = (
        getattr(options, name) for name in ("look_at_mask", "fetch", "draw", "change_scores", "visible", "weight")
    )
    has_mask, has_tiles, has_dropout, changes_scores, can_be_dead, lists_bytes = (
        getattr(options, name) for name in ("has_mask", "has_tiles", "has_dropout", "changes_scores", "can_be_dead", "lists_bytes")
    )

    @jit
    def compute_scores(args, keys, stride, panels, n, scores, begin, end):
        """S = K Q^T (or dP = V dO^T) of one panel, for keys begin to end of the block."""
        for key in range(begin, end, rows):
            product(keys + key * stride, stride, itemsize, panels, panel_bytes, scores + key * args.score_stride, args.score_stride, n)

    @jit
    def gradients(exponent, dweight, keep):
        """(P, P as it weighs values, dP): dropout multiplies the last two by what lies at an address."""
        probability = weight(exponent)
        if has_dropout:
            factor = load(keep)
            return probability, probability * factor, dweight * factor
        return probability, probability, dweight

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
    def clear_panel(args, p, n_keys, work):
        """P = dS = 0 for a panel that sees no key of a block, as the products may touch it between others that do."""
        for key in range((n_keys + rows - 1) // rows * rows):
            for w in range(vectors):
                place = key * args.score_stride + p * panel_bytes + w * vector_bytes
                store(work + args.at_scores + place, splat(zero))
                store(work + args.at_dscores + place, splat(zero))

    def panel_step(has_slopes):
        """Build what computes P and dS of one block of keys and one panel of rows."""
        compute_gradients, compute_masked_gradients = gradient_steps(has_slopes)

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

    differentiate_panel = panel_step(options.has_slopes)
    differentiate_bias_panel = panel_step(False) if options.has_slopes else differentiate_panel

    return SimpleNamespace(differentiate_panel=differentiate_panel, differentiate_bias_panel=differentiate_bias_panel)
