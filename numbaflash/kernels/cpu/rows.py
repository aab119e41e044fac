"""The forward pass for few queries, as in decoding: Algorithm 1 with the head dim in the lanes.

With a query a lane (`forward`), most lanes would stay empty. Here keys and values are read where they lie, once, as fast
as memory gives them: as many keys as a vector has lanes are multiplied with a query, each into a vector of its own, and
these are summed across lanes together; then a row of V is a few vectors that a probability is broadcast to.

Everything is in units of log2(e), p = 2**(s - m), but for kernels whose options want natural units (`scores`). Rows are named as in `forward`.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
from numba import types

from . import scores as score_options
from .arguments import arguments_at, band, part_of_keys, placing, row_address
from .config import Kernel
from .convert import COMPUTE, ITEMSIZE, elements, packing
from .driver import next_item
from .microkernel import dot_products, tile_product
from .pages import paging
from .scores import NOTHING, options_at
from .vector import Simd, add_lanes, jit, max_lane, maximum, select, words


@functools.cache
def _weighing(dtype, lanes):
    """The weighted sum of rows of ``dtype``, for one query: eight vectors of the head dim at a time, then four, then one."""
    itemsize = COMPUTE[dtype].bitwidth // 8
    stored_bytes, vector_bytes = lanes * ITEMSIZE[dtype], lanes * itemsize
    (_, eight), (_, four), (_, one) = (tile_product(dtype, 1, vectors, lanes) for vectors in (8, 4, 1))

    @jit
    def weigh(values, row_stride, n_vectors, scores, output, alpha, n_keys):
        w = 0
        while w + 8 <= n_vectors:
            eight(scores, 0, itemsize, values + w * stored_bytes, row_stride, output + w * vector_bytes, 0, n_keys, alpha)
            w += 8
        while w + 4 <= n_vectors:
            four(scores, 0, itemsize, values + w * stored_bytes, row_stride, output + w * vector_bytes, 0, n_keys, alpha)
            w += 4
        while w < n_vectors:
            one(scores, 0, itemsize, values + w * stored_bytes, row_stride, output + w * vector_bytes, 0, n_keys, alpha)
            w += 1

    return weigh


def build(kernel: Kernel):
    """Numba functions of the forward pass for few queries; see `numbaflash.kernels.cpu.forward.build`."""
    dtype, lanes, vectors = kernel.dtype, kernel.lanes, kernel.vectors
    compute = COMPUTE[dtype]
    number = np.float64 if compute == types.float64 else np.float32
    itemsize, stored_size = compute.bitwidth // 8, ITEMSIZE[dtype]
    vector_bytes = lanes * itemsize
    simd = Simd(compute, lanes)
    load, store, splat = simd.load, simd.store, simd.splat
    splat_index, lane_numbers = Simd(types.int32, lanes).splat, Simd(types.int32, lanes).lane_numbers
    load_number, store_number = words(compute)
    load_int32, store_int32 = words(types.int32)
    load_int64, _ = words(types.int64)
    load_element, store_element = elements(dtype)
    _, store_elements = elements(dtype, lanes)
    pack = packing(dtype, lanes)
    dots_in_place, dots_packed = dot_products(dtype, lanes), dot_products(str(compute), lanes)
    zero, one, minus_inf = number(0), number(1), number(-np.inf)
    options = score_options.build(kernel)
    entry_of, list_panel, look_at_mask, fetch, draw_row, change_row, weight, sink_of = (
        getattr(options, name) for name in ("entry_of", "list_panel", "look_at_mask", "fetch", "draw_row", "change_row", "weight", "sink_of")
    )
    has_lists, has_mask, has_tiles, has_sinks, has_dropout = (
        getattr(options, name) for name in ("has_lists", "has_mask", "has_tiles", "has_sinks", "has_dropout")
    )
    changes_scores, can_be_dead, lists_bytes = options.changes_scores, options.can_be_dead, options.lists_bytes
    to_natural = 1 / score_options.score_unit(kernel)
    place_of = placing(kernel)
    paged = "page_table" in kernel.options
    row_of, gather = paging(kernel)

    @jit
    def load_row(args, source, query):
        """A query times the scale, filled up with zeros."""
        for d in range(args.head_dim):
            store_number(query + d * itemsize, load_element(source + d * args.q_dim) * number(args.score_scale))
        for d in range(args.head_dim, args.key_columns):
            store_number(query + d * itemsize, zero)

    @jit
    def compute_scores(keys, key_stride, in_place, n_vectors, n_keys, query, scratch, scores, begin, end):
        """S = q K for keys begin to end of the block, begin rounded down to whole vectors; keys outside become -inf."""
        top = splat(minus_inf)
        for key in range(begin // lanes * lanes, end, lanes):
            if in_place:
                score = dots_in_place(keys, key_stride, key, n_keys - 1, query, n_vectors, scratch)
            else:
                score = dots_packed(keys, key_stride, key, n_keys - 1, query, n_vectors, scratch)
            if key < begin or end < key + lanes:
                at = splat_index(np.int32(key)) + lane_numbers()
                seen = (splat_index(np.int32(begin)) <= at) & (at < splat_index(np.int32(end)))
                score = select(seen, score, splat(minus_inf))
            store(scores + key * itemsize, score)
            top = maximum(score, top)
        return max_lane(top)

    @jit
    def update_softmax(scores, begin, end, block_top, m, l, alpha):
        """The online softmax: scores become probabilities, m and l take them in, alpha is what the past shrinks by."""
        m_old = load_number(m)
        m_new = max(m_old, block_top)
        top = splat(zero if m_new == minus_inf else m_new)
        shrink = weight(splat(m_old) - top)
        block_sum = splat(zero)
        for key in range(begin // lanes * lanes, end, lanes):
            probability = weight(load(scores + key * itemsize) - top)
            store(scores + key * itemsize, probability)
            block_sum = block_sum + probability
        for w in range(vectors):
            store(alpha + w * vector_bytes, shrink)
        store_number(m, m_new)
        store_number(l, load_number(l) * load_number(alpha) + add_lanes(block_sum))

    weigh_in_place, weigh_packed = _weighing(dtype, lanes), _weighing(str(compute), lanes)

    @jit
    def weigh_values(values, row_stride, in_place, n_vectors, scores, output, alpha, begin, end):
        """O = alpha O + p V."""
        values, scores = values + begin * row_stride, scores + begin * itemsize
        if in_place:
            weigh_in_place(values, row_stride, n_vectors, scores, output, alpha, end - begin)
        else:
            weigh_packed(values, row_stride, n_vectors, scores, output, alpha, end - begin)

    @jit
    def weigh_seen_values(values, row_stride, in_place, n_vectors, scores, output, alpha, begin, end, mask_tile):
        """`weigh_values` of those keys that the mask has, run by run: what nobody sees is not touched."""
        key = begin
        while key < end:
            while key < end and load_number(mask_tile + key * itemsize) == zero:
                key += 1
            first = key
            while key < end and load_number(mask_tile + key * itemsize) != zero:
                key += 1
            if first < key:
                weigh_values(values, row_stride, in_place, n_vectors, scores, output, alpha, first, key)
                for w in range(vectors):
                    store(alpha + w * vector_bytes, splat(one))

    @jit
    def drop_weights(scores, begin, end, keep):
        """Weights that dropout does not keep become 0, the others larger; l has taken them in before."""
        for i in range(begin // lanes * vector_bytes, end * itemsize, vector_bytes):
            store(scores + i, load(scores + i) * load(keep + i))

    @jit
    def look_at_block(args, work, n_rows, block, n_keys):
        """Whether the mask of any row has a key of the block."""
        some = False
        for r in range(n_rows):
            begin, end = seen_of_block(args, work, r, block, n_keys)
            if begin < end:
                some |= look_at_mask(args, work + args.at_lists + r * lists_bytes, block, begin, end) != NOTHING
        return some

    @jit
    def seen_of_block(args, work, r, block, n_keys):
        """Keys of a block that lie in the band of a row."""
        first, last = load_int32(work + args.at_first + r * 4), load_int32(work + args.at_last + r * 4)
        return max(0, first - block), min(n_keys, last - block)

    @jit
    def attend(args, at, q, k, v, item, work):
        """Algorithm 1 for the rows of a key/value head and (a part of) their keys; leaves m, l and O in the workspace."""
        batch, kv_head, first_row, split = place_of(args, at, item)
        entry = entry_of(args, at, batch)
        first_q, first_k = entry[5], entry[6]
        n_rows = rows_of(args, entry, first_row)
        q_head = q + batch * args.q_batch + first_q * args.q_row + kv_head * args.group * args.q_head
        query_bytes, output_bytes = args.key_columns * itemsize, args.value_columns * itemsize
        tile_first, tile_last = args.seqlen_k, 0
        for r in range(n_rows):
            source = row_address(args, q_head, args.q_row, args.q_head, first_row + r)
            load_row(args, source, work + args.at_queries + r * query_bytes)
            lo, hi = band(args, entry, first_row + r)
            store_int32(work + args.at_first + r * 4, lo)
            store_int32(work + args.at_last + r * 4, hi)
            if lo < hi:
                tile_first, tile_last = min(tile_first, lo), max(tile_last, hi)
            store_number(work + args.at_m + r * itemsize, minus_inf)
            store_number(work + args.at_l + r * itemsize, zero)
            if has_lists:
                list_panel(args, at, entry, batch, kv_head, first_row + r, work + args.at_lists + r * lists_bytes)
            if has_sinks and split == 0 and (first_row + r) // args.group < entry[0]:
                sink = sink_of(args, at, kv_head * args.group + (first_row + r) % args.group)
                if sink != minus_inf:  # as a key without a value
                    store_number(work + args.at_m + r * itemsize, sink)
                    store_number(work + args.at_l + r * itemsize, one)
        for i in range(0, n_rows * output_bytes, vector_bytes):
            store(work + args.at_output + i, splat(zero))
        tile_first, tile_last = part_of_keys(args, tile_first, tile_last, split)
        scores, alpha, scratch = work + args.at_scores, work + args.at_alpha, work + args.at_sums
        mask_tile, bias_tile = work + args.at_mask_tile, work + args.at_bias_tile
        k_head, v_head = k + kv_head * args.k_head, v + kv_head * args.v_head
        block_end = tile_first
        while block_end < tile_last:
            block, n_keys = block_end, keys_of_block(args, block_end, tile_last)
            block_end += n_keys
            if has_mask and not look_at_block(args, work, n_rows, block, n_keys):
                continue
            keys_in_place = args.k_dim == stored_size and args.key_columns == args.head_dim
            values_in_place = args.v_dim == stored_size and args.value_columns == args.head_dim_v
            if paged:
                one_page = block % args.page_size + n_keys <= args.page_size
                keys_in_place, values_in_place = keys_in_place and one_page, values_in_place and one_page
                keys, key_stride = row_of(args, at, k_head, args.k_batch, args.k_row, batch, block), args.k_row
                values, value_stride = row_of(args, at, v_head, args.v_batch, args.v_row, batch, block), args.v_row
                if not keys_in_place:
                    keys, key_stride = work + args.at_keys, query_bytes
                    gather(args, at, k_head, args.k_batch, args.k_row, args.k_dim, batch, block, n_keys, args.head_dim, keys, args.key_columns)
                if not values_in_place:
                    values, value_stride = work + args.at_values, output_bytes
                    gather(args, at, v_head, args.v_batch, args.v_row, args.v_dim, batch, block, n_keys, args.head_dim_v, values, args.value_columns)
            else:
                keys, key_stride = k_head + batch * args.k_batch + (first_k + block) * args.k_row, args.k_row
                values, value_stride = v_head + batch * args.v_batch + (first_k + block) * args.v_row, args.v_row
                if not keys_in_place:
                    pack(keys, args.k_row, args.k_dim, n_keys, args.head_dim, work + args.at_keys, n_keys, args.key_columns)
                    keys, key_stride = work + args.at_keys, query_bytes
                if not values_in_place:
                    pack(values, args.v_row, args.v_dim, n_keys, args.head_dim_v, work + args.at_values, n_keys, args.value_columns)
                    values, value_stride = work + args.at_values, output_bytes
            for r in range(n_rows):
                begin, end = seen_of_block(args, work, r, block, n_keys)
                lists = work + args.at_lists + r * lists_bytes
                if has_mask and begin < end and load_int64(lists) == NOTHING:
                    continue
                if begin < end:
                    query, output = work + args.at_queries + r * query_bytes, work + args.at_output + r * output_bytes
                    m, l = work + args.at_m + r * itemsize, work + args.at_l + r * itemsize
                    top = compute_scores(keys, key_stride, keys_in_place, args.key_columns // lanes, n_keys, query, scratch, scores, begin, end)
                    if has_tiles:
                        fetch(args, lists, block, begin, end, mask_tile, bias_tile)
                    if changes_scores or has_mask:
                        top = change_row(args, lists, scores, block, begin, end, block + begin, block + end, mask_tile, bias_tile)
                    update_softmax(scores, begin, end, top, m, l, alpha)
                    if has_dropout:
                        draw_row(args, at, lists, batch, block, begin, end, work + args.at_keep_tile)
                        drop_weights(scores, begin, end, work + args.at_keep_tile)
                    if has_mask:
                        n_vectors = args.value_columns // lanes
                        weigh_seen_values(values, value_stride, values_in_place, n_vectors, scores, output, alpha, begin, end, mask_tile)
                        continue
                    weigh_values(values, value_stride, values_in_place, args.value_columns // lanes, scores, output, alpha, begin, end)

    @jit
    def keys_of_block(args, first, last):
        """Keys of the block that begins with one: of a single page where pages are large enough, so that they are read in place."""
        n_keys = min(args.kv_tile, last - first)
        if paged and args.page_size >= args.kv_tile:
            n_keys = min(n_keys, args.page_size - first % args.page_size)
        return n_keys

    @jit
    def rows_of(args, entry, first_row):
        return min(args.q_tile, entry[3] * args.group - first_row)

    @jit
    def finish(args, at, out, lse, item, output, m, l):
        """out = O / l and lse = m + log(l), in natural units."""
        batch, kv_head, first_row, _ = place_of(args, at, item)
        head = kv_head * args.group
        entry = entry_of(args, at, batch)
        first_q = entry[5]
        out_head = out + batch * args.out_batch + first_q * args.out_row + head * args.out_head
        lse_head = lse + batch * args.lse_batch + first_q * args.lse_row + head * args.lse_head
        for r in range(rows_of(args, entry, first_row)):
            total = load_number(l + r * itemsize)
            factor = one if total == zero else one / total
            source = output + r * args.value_columns * itemsize
            if can_be_dead and total == zero:  # where every score is -inf, O may be NaN
                for d in range(0, args.value_columns, lanes):
                    store(source + d * itemsize, splat(zero))
            target = row_address(args, out_head, args.out_row, args.out_head, first_row + r)
            d = 0
            if args.out_dim == stored_size:
                while d + lanes <= args.head_dim_v:
                    store_elements(target + d * stored_size, load(source + d * itemsize) * splat(factor))
                    d += lanes
            while d < args.head_dim_v:
                store_element(target + d * args.out_dim, load_number(source + d * itemsize) * factor)
                d += 1
            if lse != 0:
                value = -np.inf if total == zero else np.float64(load_number(m + r * itemsize)) * to_natural + np.log(np.float64(total))
                place = row_address(args, lse_head, args.lse_row, args.lse_head, first_row + r)
                store_number(place, number(value))

    @jit
    def keep_part(args, work, part):
        """Put O, m and l of a part of the keys away."""
        row_bytes = args.q_tile * itemsize
        for i in range(0, row_bytes * args.value_columns, vector_bytes):
            store(part + i, load(work + args.at_output + i))
        part += row_bytes * args.value_columns
        for r in range(args.q_tile):
            store_number(part + r * itemsize, load_number(work + args.at_m + r * itemsize))
            store_number(part + row_bytes + r * itemsize, load_number(work + args.at_l + r * itemsize))

    @jit
    def merge_parts(args, parts, factors):
        """Merge the parts of the rows into the first one: the block merge of the online softmax."""
        row_bytes = args.q_tile * itemsize
        for r in range(args.q_tile):
            at_output, at_m = parts + r * args.value_columns * itemsize, parts + row_bytes * args.value_columns + r * itemsize
            m = load_number(at_m)
            for split in range(1, args.splits):
                m = max(m, load_number(at_m + split * args.partial))
            top = zero if m == minus_inf else m
            l = zero
            for split in range(args.splits):
                part = split * args.partial
                factor = weight(splat(load_number(at_m + part) - top))
                store(factors, factor)
                l += load_number(at_m + row_bytes + part) * load_number(factors)
                for i in range(0, args.value_columns * itemsize, vector_bytes):
                    scaled = load(at_output + part + i) * factor
                    store(at_output + i, scaled if split == 0 else load(at_output + i) + scaled)
            store_number(at_m, m)
            store_number(at_m + row_bytes, l)

    def thread(args_address, q, k, v, out, lse, options_address, work, partial, counter, merging):
        """Take work items until there are none; in a second round, merge their parts."""
        args, at = arguments_at(args_address), options_at(options_address)
        item = next_item(counter)
        if merging:
            row_bytes = args.q_tile * itemsize
            while item * args.splits < args.items:
                parts = partial + item * args.splits * args.partial
                merge_parts(args, parts, work + args.at_alpha)
                m = parts + row_bytes * args.value_columns
                finish(args, at, out, lse, item * args.splits, parts, m, m + row_bytes)
                item = next_item(counter)
        else:
            while item < args.items:
                attend(args, at, q, k, v, item, work)
                if args.splits == 1:
                    finish(args, at, out, lse, item, work + args.at_output, work + args.at_m, work + args.at_l)
                else:
                    keep_part(args, work, partial + item * args.partial)
                item = next_item(counter)

    return SimpleNamespace(thread=thread)
