"""What P and dS of a block of keys and a tile of rows add to the gradients: dV += P dO, dK += dS Q, dQ^T += K^T dS."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from ..config import Kernel
from ..convert import COMPUTE
from ..microkernel import tile_product
from ..vector import Simd, fma, jit, select, words


def build(kernel: Kernel, options):
    """Functions of the products; ``options`` are the kernel's (`scores.build`)."""
    lanes, rows, vectors, panel = kernel.lanes, kernel.rows, kernel.vectors, kernel.panel
    compute = COMPUTE[kernel.dtype]
    simd, indices = Simd(compute, lanes), Simd(types.int32, lanes)
    itemsize, vector_bytes, panel_bytes = simd.itemsize, simd.bytes, panel * simd.itemsize
    load, store, splat, load_index, splat_index = simd.load, simd.store, simd.splat, indices.load, indices.splat
    load_int64, store_int64 = words(types.int64)
    load_int32, _ = words(types.int32)
    load_number, _ = words(compute)
    _, accumulate = tile_product(str(compute), rows, vectors, lanes)
    _, accumulate_narrow = tile_product(str(compute), rows, 1, lanes)
    fetch, visible, sees, has_mask, lists_bytes = (getattr(options, name) for name in ("fetch", "visible", "sees", "has_mask", "lists_bytes"))

    @jit
    def add_to_keys(args, block, n_keys, in_tile, n_panels, apart, work):
        """dV and dK of a block; ``apart`` where a query or dO that only some keys see has NaN or infinity."""
        queries, douts, scores, dscores = work + args.at_queries, work + args.at_douts, work + args.at_scores, work + args.at_dscores
        dkeys, dvalues = work + args.at_dkeys + in_tile * args.key_stride, work + args.at_dvalues + in_tile * args.value_stride
        if apart:
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

    @jit
    def add_to_queries(args, keys, block, n_keys, n_panels, dq_sum, apart, work):
        """dQ of a tile of rows; ``apart`` where a key that only some rows see has NaN or infinity."""
        for p in range(n_panels):
            begin, end = load_int64(work + args.at_ranges + p * 48 + 32), load_int64(work + args.at_ranges + p * 48 + 40)
            seen_keys, n_seen = keys + begin * args.key_stride, min(n_keys, end) - begin
            panel_dscores = work + args.at_dscores + begin * args.score_stride + p * panel_bytes
            panel_sum = dq_sum + p * args.key_columns * panel_bytes
            if n_seen > 0 and apart:
                first, last = work + args.at_first + p * panel * 4, work + args.at_last + p * panel * 4
                mask_tile, lists = work + args.at_mask_tile, work + args.at_lists + p * lists_bytes
                if has_mask:
                    fetch(args, lists, block, begin, begin + n_seen, mask_tile, work + args.at_bias_tile)
                    mask_tile += begin * panel_bytes
                add_seen_query_gradients(args, seen_keys, panel_dscores, panel_sum, block + begin, n_seen, first, last, mask_tile)
            elif n_seen > 0:
                add_query_gradients(args, seen_keys, panel_dscores, panel_sum, n_seen, work)

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

    return SimpleNamespace(add_to_keys=add_to_keys, add_to_queries=add_to_queries)
