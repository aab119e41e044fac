"""The forward pass: FlashAttention's Algorithm 1 on tiles that stay in cache.

A work item is one tile of queries of one key/value head and its way through the keys. The rows of the tile are the
queries of all query heads that share the key/value head, query by query, so that grouped heads read keys and values
once. They are packed transposed, with the scale and log2(e) multiplied in: a panel of ``kernel.panel`` rows lies in the
lanes of a few vectors. The scores of a panel are held transposed too, [key][row]: the running maximum m and sum l of a
row stay in one lane, nothing is ever reduced across lanes, and both products broadcast a number of K or V to all rows.

Everything here is in units of log2(e), p = 2**(s - m), but for kernels whose options want natural units (`scores`).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import types

from . import scores as score_options
from .arguments import arguments_at, band, part_of_keys, placing, row_address
from .config import Kernel
from .convert import COMPUTE, ITEMSIZE, elements, packing
from .driver import next_item
from .finite import finite_test
from .microkernel import tile_product
from .scores import NOTHING, SOMETHING, options_at
from .transpose import transposing
from .vector import Simd, any_lane, fma, jit, maximum, select, words


def build(kernel: Kernel):
    """Numba functions of the forward pass for one kernel; nothing is compiled yet.

    Returns
    -------
    namespace
        ``thread(args, q, k, v, out, lse, options, work, partial, counter, merging)`` is the entry, called on each thread; all are
        addresses, but for the flag ``merging``. The others are its steps.
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
    _, store_int32 = words(types.int32)
    load_number, store_number = words(compute)
    load_element, store_element = elements(dtype)
    load_rows, store_rows = transposing(dtype, lanes)
    product, accumulate = tile_product(str(compute), rows, vectors, lanes)
    pack, all_finite = packing(dtype, lanes), finite_test(compute, lanes)
    zero, one, minus_inf = number(0), number(1), number(-np.inf)
    options = score_options.build(kernel)
    entry_of, list_panel, look_at_mask, fetch, draw, change_scores, visible, weight, sink_of = (
        getattr(options, name)
        for name in ("entry_of", "list_panel", "look_at_mask", "fetch", "draw", "change_scores", "visible", "weight", "sink_of")
    )
    has_lists, has_mask, has_tiles, has_sinks, has_dropout = (
        getattr(options, name) for name in ("has_lists", "has_mask", "has_tiles", "has_sinks", "has_dropout")
    )
    changes_scores, can_be_dead, lists_bytes = options.changes_scores, options.can_be_dead, options.lists_bytes
    to_natural = 1 / score_options.score_unit(kernel)
    place_of = placing(kernel)

    # A tile of queries

    @jit
    def list_rows(args, queries, operand, row_stride, head_stride, first_row, addresses):
        """Addresses of the rows of a panel. Lanes past the last row repeat it: they compute and store the same again."""
        last_row = queries * args.group - 1
        for lane in range(panel):
            store_int64(addresses + lane * 8, row_address(args, operand, row_stride, head_stride, min(first_row + lane, last_row)))

    @jit
    def list_bands(args, entry, first_row, first, last, ranges):
        """Keys that each row of a panel sees, and into ``ranges`` those that some row sees and those that all rows see."""
        some_first, some_last, all_first, all_last = args.seqlen_k, 0, 0, args.seqlen_k
        last_row = entry[3] * args.group - 1
        for lane in range(panel):
            lo, hi = band(args, entry, min(first_row + lane, last_row))
            store_int32(first + lane * 4, lo)
            store_int32(last + lane * 4, hi)
            if lo < hi:
                some_first, some_last = min(some_first, lo), max(some_last, hi)
            all_first, all_last = max(all_first, lo), min(all_last, hi)
        store_int64(ranges, some_first)
        store_int64(ranges + 8, some_last)
        store_int64(ranges + 16, all_first)
        store_int64(ranges + 24, all_last)

    @jit
    def pack_queries(args, addresses, queries):
        """Transpose a panel of queries, times the scale."""
        factor = number(args.score_scale)
        d = 0
        if args.q_dim == stored_size:
            while d + lanes <= args.head_dim:
                for w in range(vectors):
                    target = queries + d * panel_bytes + w * vector_bytes
                    load_rows(addresses + w * lanes * 8, d * stored_size, factor, target, panel_bytes)
                d += lanes
        while d < args.head_dim:
            for lane in range(panel):
                element = load_element(load_int64(addresses + lane * 8) + d * args.q_dim)
                store_number(queries + d * panel_bytes + lane * itemsize, element * factor)
            d += 1

    @jit
    def clear_state(args, m, l, output):
        """m = -inf, l = 0, O = 0, for a panel."""
        for w in range(vectors):
            store(m + w * vector_bytes, splat(minus_inf))
            store(l + w * vector_bytes, splat(zero))
        for i in range(vectors * args.value_columns):
            store(output + i * vector_bytes, splat(zero))

    @jit
    def take_sinks(args, at, entry, kv_head, first_row, m, l):
        """The sink of a row as a key without a value: m is its logit and l is 1."""
        last_row = entry[3] * args.group - 1
        for lane in range(panel):
            row = min(first_row + lane, last_row)
            sink = sink_of(args, at, kv_head * args.group + row % args.group)
            if row // args.group < entry[0] and sink != minus_inf:
                store_number(m + lane * itemsize, sink)
                store_number(l + lane * itemsize, one)

    # The steps of one key block and one panel of queries

    @jit
    def compute_scores(args, keys, key_stride, queries, scores, begin, end):
        """S = K Q, transposed, for keys begin to end of the block."""
        for key in range(begin, end, rows):
            product(keys + key * key_stride, key_stride, itemsize, queries, panel_bytes, scores + key * panel_bytes, panel_bytes, args.head_dim)

    @jit
    def mask_scores(scores, block, begin, end, first, last, mask_tile):
        """Scores of keys that a row does not see become -inf."""
        for key in range(begin, end):
            at = splat_index(np.int32(block + key))
            for w in range(vectors):
                in_tile = key * panel_bytes + w * vector_bytes
                place = scores + in_tile
                seen = visible(load_index(first + w * lanes * 4), load_index(last + w * lanes * 4), at, mask_tile + in_tile)
                store(place, select(seen, load(place), splat(minus_inf)))

    @jit
    def update_softmax(scores, begin, end, m, l, alpha):
        """The online softmax: scores become probabilities, m and l take them in, alpha is what the past shrinks by."""
        for w in range(vectors):
            column = scores + w * vector_bytes
            m_old = load(m + w * vector_bytes)
            m0, m1, m2, m3 = m_old, m_old, m_old, m_old  # four chains: a maximum takes several cycles
            for key in range(begin, end, 4):
                place = column + key * panel_bytes
                m0 = maximum(load(place), m0)
                m1 = maximum(load(place + panel_bytes), m1)
                m2 = maximum(load(place + 2 * panel_bytes), m2)
                m3 = maximum(load(place + 3 * panel_bytes), m3)
            m_new = maximum(maximum(m0, m1), maximum(m2, m3))
            top = select(m_new == splat(minus_inf), splat(zero), m_new)  # no key so far: -inf - 0, not -inf - -inf
            shrink = weight(m_old - top)
            block_sum = splat(zero)
            for key in range(begin, end):
                place = column + key * panel_bytes
                probability = weight(load(place) - top)
                store(place, probability)
                block_sum = block_sum + probability
            store(m + w * vector_bytes, m_new)
            store(l + w * vector_bytes, fma(load(l + w * vector_bytes), shrink, block_sum))
            store(alpha + w * vector_bytes, shrink)

    @jit
    def drop_weights(scores, begin, end, keep):
        """Weights that dropout does not keep become 0, the others larger; l has taken them in before."""
        for i in range(begin * panel_bytes, end * panel_bytes, vector_bytes):
            store(scores + i, load(scores + i) * load(keep + i))

    @jit
    def weigh_values(args, values, value_stride, scores, output, alpha, begin, n_keys):
        """O = alpha O + V P, transposed."""
        values, scores = values + begin * value_stride, scores + begin * panel_bytes
        for column in range(0, args.value_columns, rows):
            target = output + column * panel_bytes
            accumulate(values + column * itemsize, itemsize, value_stride, scores, panel_bytes, target, panel_bytes, n_keys, alpha)

    @jit
    def weigh_seen_values(args, values, value_stride, scores, output, alpha, block, begin, end, first, last, mask_tile):
        """`weigh_values` where a row that only some queries see has NaN or infinity: the other queries keep out of it."""
        for column in range(args.head_dim_v):
            for w in range(vectors):
                place = output + column * panel_bytes + w * vector_bytes
                lo, hi = load_index(first + w * lanes * 4), load_index(last + w * lanes * 4)
                total = load(place) * load(alpha + w * vector_bytes)
                for key in range(begin, end):
                    at = splat_index(np.int32(block + key))
                    value = splat(load_number(values + key * value_stride + column * itemsize))
                    in_tile = key * panel_bytes + w * vector_bytes
                    total = select(visible(lo, hi, at, mask_tile + in_tile), fma(value, load(scores + in_tile), total), total)
                store(place, total)

    # A work item

    @jit
    def attend(args, at, q, k, v, item, work):
        """Algorithm 1 for a tile of queries and (a part of) their keys; leaves m, l and O in the workspace."""
        batch, kv_head, first_row, split = place_of(args, at, item)
        entry = entry_of(args, at, batch)
        first_q, first_k = entry[5], entry[6]
        q_head = q + batch * args.q_batch + first_q * args.q_row + kv_head * args.group * args.q_head
        n_panels = panels_of(args, entry, first_row)
        tile_first, tile_last = args.seqlen_k, 0
        for p in range(n_panels):
            row, ranges, addresses = first_row + p * panel, work + args.at_ranges + p * 32, work + args.at_addresses
            list_rows(args, entry[3], q_head, args.q_row, args.q_head, row, addresses)
            pack_queries(args, addresses, work + args.at_queries + p * args.head_dim * panel_bytes)
            list_bands(args, entry, row, work + args.at_first + p * panel * 4, work + args.at_last + p * panel * 4, ranges)
            tile_first, tile_last = min(tile_first, load_int64(ranges)), max(tile_last, load_int64(ranges + 8))
            output = work + args.at_output + p * args.value_columns * panel_bytes
            clear_state(args, work + args.at_m + p * panel_bytes, work + args.at_l + p * panel_bytes, output)
            if has_lists:
                list_panel(args, at, entry, batch, kv_head, row, work + args.at_lists + p * lists_bytes)
            if has_sinks and split == 0:
                take_sinks(args, at, entry, kv_head, row, work + args.at_m + p * panel_bytes, work + args.at_l + p * panel_bytes)
        tile_first, tile_last = part_of_keys(args, tile_first, tile_last, split)
        # A tile of one panel reads keys and values once. Larger ones reread them, and want them close together.
        read_once = args.q_tile == panel and stored_size == itemsize
        for block in range(tile_first, tile_last, args.kv_tile):
            n_keys = min(args.kv_tile, tile_last - block)
            if has_mask and not look_at_block(args, work, n_panels, block, n_keys):
                continue
            keys, key_stride = k + batch * args.k_batch + (first_k + block) * args.k_row + kv_head * args.k_head, args.k_row
            values, value_stride = v + batch * args.v_batch + (first_k + block) * args.v_row + kv_head * args.v_head, args.v_row
            padded = (n_keys + rows - 1) // rows * rows  # the register tile is filled up with keys that nobody sees
            if not (read_once and args.k_dim == itemsize and n_keys == padded):
                pack(keys, args.k_row, args.k_dim, n_keys, args.head_dim, work + args.at_keys, padded, args.head_dim)
                keys, key_stride = work + args.at_keys, args.head_dim * itemsize
            if not (read_once and args.v_dim == itemsize and args.head_dim_v == args.value_columns):
                pack(values, args.v_row, args.v_dim, n_keys, args.head_dim_v, work + args.at_values, n_keys, args.value_columns)
                values, value_stride = work + args.at_values, args.value_columns * itemsize
            for p in range(n_panels):
                attend_block(args, at, batch, work, p, block, n_keys, keys, key_stride, values, value_stride)

    @jit
    def look_at_block(args, work, n_panels, block, n_keys):
        """Whether the masks of any panel have a key of the block."""
        some = False
        for p in range(n_panels):
            begin, n_seen = seen_of_block(work + args.at_ranges + p * 32, block, n_keys)
            if begin < n_seen:
                some |= look_at_mask(args, work + args.at_lists + p * lists_bytes, block, begin, n_seen) != NOTHING
        return some

    @jit
    def seen_of_block(ranges, block, n_keys):
        """Keys of a block that lie in a band of the panel, from whole register tiles on."""
        return max(0, load_int64(ranges) - block) // rows * rows, min(n_keys, load_int64(ranges + 8) - block)

    @jit
    def attend_block(args, at, batch, work, p, block, n_keys, keys, key_stride, values, value_stride):
        """One key block and one panel of queries."""
        ranges = work + args.at_ranges + p * 32
        begin, n_seen = seen_of_block(ranges, block, n_keys)
        if begin >= n_seen:
            return
        end = (n_seen + rows - 1) // rows * rows
        all_first, all_last = load_int64(ranges + 16) - block, load_int64(ranges + 24) - block
        full_begin = max(begin, min(n_seen, all_first))  # keys before it and from full_end on are masked: some rows do
        full_end = max(full_begin, min(n_seen, all_last))  # not see them
        lists, mask_tile, bias_tile = work + args.at_lists + p * lists_bytes, work + args.at_mask_tile, work + args.at_bias_tile
        if has_mask:
            if load_int64(lists) == NOTHING:
                return
            if load_int64(lists) == SOMETHING:
                full_begin, full_end = begin, begin
        if has_tiles:
            fetch(args, lists, block, begin, n_seen, mask_tile, bias_tile)
        scores, alpha = work + args.at_scores, work + args.at_alpha
        queries = work + args.at_queries + p * args.head_dim * panel_bytes
        output = work + args.at_output + p * args.value_columns * panel_bytes
        m, l = work + args.at_m + p * panel_bytes, work + args.at_l + p * panel_bytes
        first, last = work + args.at_first + p * panel * 4, work + args.at_last + p * panel * 4

        compute_scores(args, keys, key_stride, queries, scores, begin, end)
        if changes_scores:
            change_scores(args, lists, scores, panel_bytes, block, begin, end, bias_tile, bias_tile)
        mask_scores(scores, block, begin, full_begin, first, last, mask_tile)
        mask_scores(scores, block, full_end, end, first, last, mask_tile)
        update_softmax(scores, begin, end, m, l, alpha)
        if has_dropout:
            drop_weights(scores, begin, end, draw(args, at, lists, batch, block, begin, end, work + args.at_keep_tile))
        columns = args.head_dim_v
        if all_finite(values, value_stride, begin, full_begin, columns) and all_finite(values, value_stride, full_end, n_seen, columns):
            weigh_values(args, values, value_stride, scores, output, alpha, begin, n_seen - begin)
        else:
            weigh_seen_values(args, values, value_stride, scores, output, alpha, block, begin, n_seen, first, last, mask_tile)

    @jit
    def panels_of(args, entry, first_row):
        """Panels of the tile that begins at a row."""
        return (min(args.q_tile, entry[3] * args.group - first_row) + panel - 1) // panel

    @jit
    def finish(args, at, out, lse, item, output, m, l, addresses):
        """out = O / l and lse = m + log(l), in natural units, transposed back to rows. Overwrites l."""
        batch, kv_head, first_row, _ = place_of(args, at, item)
        head = kv_head * args.group
        entry = entry_of(args, at, batch)
        queries, first_q = entry[3], entry[5]
        out_head = out + batch * args.out_batch + first_q * args.out_row + head * args.out_head
        lse_head = lse + batch * args.lse_batch + first_q * args.lse_row + head * args.lse_head
        for p in range(panels_of(args, entry, first_row)):
            row, panel_m, panel_l = first_row + p * panel, m + p * panel_bytes, l + p * panel_bytes
            if lse != 0:
                list_rows(args, queries, lse_head, args.lse_row, args.lse_head, row, addresses)
                for lane in range(panel):
                    total, top = np.float64(load_number(panel_l + lane * itemsize)), np.float64(load_number(panel_m + lane * itemsize))
                    store_number(load_int64(addresses + lane * 8), number(-np.inf if total == 0 else top * to_natural + np.log(total)))
            for w in range(vectors):
                total = load(panel_l + w * vector_bytes)
                if can_be_dead and any_lane(total == splat(zero)):  # where every score is -inf, O may be NaN
                    for column in range(args.value_columns):
                        place = output + (p * args.value_columns + column) * panel_bytes + w * vector_bytes
                        store(place, select(total == splat(zero), splat(zero), load(place)))
                store(panel_l + w * vector_bytes, splat(one) / select(total == splat(zero), splat(one), total))
            list_rows(args, queries, out_head, args.out_row, args.out_head, row, addresses)
            panel_output = output + p * args.value_columns * panel_bytes
            d = 0
            if args.out_dim == stored_size:
                while d + lanes <= args.head_dim_v:
                    for w in range(vectors):
                        source = panel_output + d * panel_bytes + w * vector_bytes
                        store_rows(source, panel_bytes, panel_l + w * vector_bytes, addresses + w * lanes * 8, d * stored_size)
                    d += lanes
            while d < args.head_dim_v:
                for lane in range(panel):
                    value = load_number(panel_output + d * panel_bytes + lane * itemsize) * load_number(panel_l + lane * itemsize)
                    store_element(load_int64(addresses + lane * 8) + d * args.out_dim, value)
                d += 1

    # Parts of the keys, each a work item

    @jit
    def keep_part(args, work, part):
        """Put O, m and l of a part of the keys away."""
        row_bytes = args.q_tile * itemsize
        copy(work + args.at_output, part, row_bytes * args.value_columns)
        copy(work + args.at_m, part + row_bytes * args.value_columns, row_bytes)
        copy(work + args.at_l, part + row_bytes * (args.value_columns + 1), row_bytes)

    @jit
    def copy(source, target, n_bytes):
        for i in range(0, n_bytes, vector_bytes):
            store(target + i, load(source + i))

    @jit
    def merge_parts(args, parts):
        """Merge the parts of a tile into the first one: the block merge of the online softmax."""
        row_bytes = args.q_tile * itemsize
        for p in range(args.q_tile // panel):
            for w in range(vectors):
                at_output = parts + p * args.value_columns * panel_bytes + w * vector_bytes
                at_m = parts + row_bytes * args.value_columns + p * panel_bytes + w * vector_bytes
                at_l = at_m + row_bytes
                m = load(at_m)
                for split in range(1, args.splits):
                    m = maximum(load(at_m + split * args.partial), m)
                top = select(m == splat(minus_inf), splat(zero), m)
                l = splat(zero)
                for split in range(args.splits):
                    part = split * args.partial
                    factor = weight(load(at_m + part) - top)
                    l = fma(load(at_l + part), factor, l)
                    for column in range(args.value_columns):
                        place = at_output + column * panel_bytes
                        scaled = load(place + part) * factor
                        store(place, scaled if split == 0 else load(place) + scaled)
                store(at_m, m)
                store(at_l, l)

    def thread(args_address, q, k, v, out, lse, options_address, work, partial, counter, merging):
        """Take work items until there are none; in a second round, merge their parts."""
        args, at = arguments_at(args_address), options_at(options_address)
        item = next_item(counter)
        if merging:
            row_bytes = args.q_tile * itemsize
            while item * args.splits < args.items:
                parts = partial + item * args.splits * args.partial
                merge_parts(args, parts)
                m = parts + row_bytes * args.value_columns
                finish(args, at, out, lse, item * args.splits, parts, m, m + row_bytes, work + args.at_addresses)
                item = next_item(counter)
        else:
            while item < args.items:
                attend(args, at, q, k, v, item, work)
                if args.splits == 1:
                    finish(args, at, out, lse, item, work + args.at_output, work + args.at_m, work + args.at_l, work + args.at_addresses)
                else:
                    keep_part(args, work, partial + item * args.partial)
                item = next_item(counter)

    return SimpleNamespace(
        thread=thread,
        pack=pack,
        pack_queries=pack_queries,
        list_rows=list_rows,
        compute_scores=compute_scores,
        update_softmax=update_softmax,
        weigh_values=weigh_values,
        all_finite=all_finite,
        finish=finish,
    )
