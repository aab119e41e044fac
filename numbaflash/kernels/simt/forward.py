"""Forward attention on CUDA cores: one block computes one tile of queries of one head (Algorithm 1 of FlashAttention-2).

::

    q tile -> shared memory, scaled
    for each tile of keys that some query of the tile sees:
        s = q k^T            registers; v of this tile arrives meanwhile
        change, mask         options; tiles at the border of the band or the end of the keys
        m, l, o              online softmax; p -> shared memory
        o += p v             k of the next tile arrives meanwhile
    o / l -> out, m + log l -> lse
"""

from __future__ import annotations

import numba
from numba import cuda, int32

from numbaflash.kernels.blocks.layout import LIST_START
from numbaflash.kernels.schedule import tile_order
from numbaflash.problem import PACKED
from numbaflash.ptx import cp_async
from numbaflash.toolchain import KernelSource

from . import packed, scores, tiles
from .config import Config
from .decoding import paging, parts


def build(config: Config) -> KernelSource:
    """The kernel of a config.

    Its parameters: q, k, v, out, lse (with `decoding.parts`, their sums and statistics); the factor of the scores; first and last visible key of
    query 0; q tiles; heads over the batch; query heads a key/value head; heads that run together; those of the options. Sums of row numbers stay
    within int32 (`simt.supports`).
    """
    t = tiles.Types.of(config)
    copy_q = tiles.copy_scaled(config, config.q_tile, config.dim, config.q_mask)
    paged, split, stacked = config.options.page_size > 0, config.options.split, config.options.stacked
    if paged:
        copy_k, copy_v = paging.copy_tile(config, config.dim, config.k_mask), paging.copy_tile(config, config.dim_v)
        find_pages, capacity = paging.find_pages(config), paging.capacity(config)
    else:
        copy_k, copy_v = tiles.copy_tile(config, config.kv_tile, config.dim, config.k_mask), tiles.copy_tile(config, config.kv_tile, config.dim_v)
    if split:
        tile_of_block, tiles_of_part = parts.tile_of_block(config), parts.tiles_of_part(config)
        store_sums, store_statistics = parts.store_sums(config), parts.store_statistics(config)
    zero_scores, zero_output, zero_row = (tiles.zeros(kind, config) for kind in (t.scores, t.output, t.row))
    lowest, mask = tiles.lowest(config), tiles.mask(config)
    online_softmax, store_p = tiles.online_softmax(config), tiles.store_p(config, config)
    add_qk, is_finite = tiles.add_dots(config, config, config.dim), tiles.is_finite(config)
    add_pv, add_pv_seen = tiles.add_pv(config), tiles.add_pv_seen(config)
    reduce_sum, store_output, store_lse = tiles.reduce_sum(config), tiles.store_output(config), tiles.store_lse(config)
    commit, wait = cp_async.commit, cp_async.wait

    options_of = config.options
    with_options, changed, masked = bool(options_of), options_of.changes, options_of.masked
    list_of, list_word = (scores.list_of(config), scores.list_word(config)) if masked else (None, None)
    dropped, with_sinks, finished = options_of.dropout, options_of.sinks, options_of.dropout or options_of.bias is not None
    with_lengths, padded_q, per_entry = options_of.lengths, options_of.seqlens_q is not None, options_of.per_entry
    lengths, begin_softmax, finish = scores.lengths(config), scores.begin(config, config.rows), scores.finish(config, t.output)
    everything, see, any_seen = scores.everything(config), scores.see(config, config), scores.any_seen(config)
    change, hide, mark, drop = (make(config, config) for make in (scores.change, scores.hide, scores.mark, scores.drop))
    add_pv_marked = tiles.add_pv_marked(config)
    is_packed = options_of.packed
    if is_packed:
        entries = packed.entries(config)
        ascends_q, ascends_k = (packed.ascends(config, name) for name in PACKED)
        bisect, entry_of_tile = packed.bisect(config, PACKED[0], config.q_tile), packed.entry_of_tile(config, *PACKED, config.q_tile, config.q_tile)

    real, vector = t.real, config.vector
    step, depth = config.step, config.depth
    threads, warp_size, lanes_m, lanes_n = config.threads, config.warp_size, config.lanes_m, config.lanes_n
    lane_bits = lanes_n.bit_length()
    rows, dim, dim_v, q_tile, kv_tile = config.rows, config.dim, config.dim_v, config.q_tile, config.kv_tile
    k_base = q_tile * dim
    v_base = k_base + kv_tile * dim
    p_base = v_base + kv_tile * dim_v
    q_width, kv_width = tiles.element_copy_width(config, config.q_tile), tiles.copy_width(config, config.kv_tile)
    q_mask, k_mask, p_step, p_mask = config.q_mask, config.k_mask, config.p_step, config.p_mask
    asynchronous, write_lse = config.asynchronous, config.write_lse
    bounded_left, bounded_right = config.bounded_left, config.bounded_right
    guarded = config.guarded

    def forward(q, k, v, out, lse, scale, band_first, band_last, q_tiles, batch_heads, group, section, *options):
        tile = cuda.blockIdx.x
        if split:
            tile, part = tile_of_block(tile, options)
        q_block, batch_head = tile_order(tile, q_tiles, batch_heads, section)
        heads = int32(q.shape[2])
        batch, head = batch_head // heads, batch_head % heads
        kv_head = head // group
        if is_packed:
            ascending_q, ascending_k = int32(1), int32(1)
            for entry in range(cuda.threadIdx.x, entries(options), threads):
                ascending_q &= ascends_q(entry, q.shape[1], options)
                ascending_k &= ascends_k(entry, k.shape[1], options)
            ascending_q, ascending_k = cuda.syncthreads_and(ascending_q), cuda.syncthreads_and(ascending_k)
            low, high = int32(0), entries(options)
            while high - low > 1:
                low, high = bisect(low, high, q_block, q.shape[1], options)
            batch, q_block, first_row, queries, first_key, keys, _, with_sink = entry_of_tile(
                low, q_block, q.shape[1], k.shape[1], ascending_q, ascending_k, options
            )
            q, k, v = q[:, first_row : first_row + queries], k[:, first_key : first_key + keys], v[:, first_key : first_key + keys]
        seqlen_q, seqlen_k = int32(q.shape[1]), int32(k.shape[1])
        if paged:
            seqlen_k = capacity(options)
        if with_lengths:
            seqlen_q, seqlen_k = lengths(seqlen_q, seqlen_k, batch, options)
        if per_entry:
            queries = int32(1) if stacked else seqlen_q
            band_first, band_last = int32(band_first + seqlen_k - queries), int32(band_last + seqlen_k - queries)

        thread = int32(cuda.threadIdx.x)
        warp, lane = thread // warp_size, thread % warp_size
        lane_m = (lane & 1) | (lane >> lane_bits) << 1
        lane_n = (lane >> 1) & (lanes_n - 1)
        warp_row = warp * (lanes_m * rows) + lane_m  # the thread's first query in the tile
        first_q = int32(q_block * q_tile)
        query = int32(first_q + warp_row)
        last_q = int32(min(first_q + q_tile, seqlen_q) - 1)
        first_place, last_place = first_q, last_q
        if stacked:
            first_place, last_place = int32(0), int32(0)

        # Keys that some query of the tile sees.
        begin, end = int32(0), seqlen_k
        if bounded_left:
            begin = int32(min(max(first_place + band_first, 0), seqlen_k))
        if bounded_right:
            end = int32(max(min(last_place + band_last + 1, seqlen_k), 0))
        if padded_q and first_q >= seqlen_q:
            end = int32(0)
        first_block, stop_block = int32(begin // kv_tile), int32((end + kv_tile - 1) // kv_tile)
        if split:
            first_block, stop_block = tiles_of_part(first_block, stop_block, part, options)
        block = first_block
        if masked:  # what is left of the range are the entries of a list
            own_list = list_of(q_block, batch, head, options)
            first_block, stop_block = int32(0), list_word(own_list, 0, options)
            entry = list_word(own_list, LIST_START, options)
            block = entry // 2

        memory = cuda.shared.array(0, real)
        q_row, k_row, v_row, p_row = warp_row * dim, k_base + lane_n * dim, v_base + lane_n * vector, p_base + warp_row * kv_tile
        q_key, k_key, p_key = (lane_m & q_mask) * vector, (lane_n & k_mask) * vector, (lane_m * p_step & p_mask) * vector

        m, l, o = lowest(), zero_row(), zero_output()
        if with_sinks:
            m, l = begin_softmax(query, with_sink if is_packed else seqlen_q, head, lane_n, options)
        source = batch
        if paged:
            source = find_pages(batch, block * kv_tile, thread // kv_width, begin, end, k.shape[0], options)
        if first_block < stop_block:
            copy_k(memory, k_base, k, source, block * kv_tile, kv_head, thread // kv_width, thread % kv_width)
            if asynchronous:
                commit()
            copy_q(memory, 0, q, batch, first_q, head, scale, thread // q_width, thread % q_width)

        for turn in range(first_block, stop_block):
            block, following = turn, turn + 1
            if masked:
                partial = entry % 2 or (padded_q and first_q + q_tile > seqlen_q)
                block = entry // 2
                entry = list_word(own_list, LIST_START + 1 + turn, options)
                following = entry // 2
            first_k = int32(block * kv_tile)
            if asynchronous:
                wait()
            cuda.syncthreads()  # k is here; nobody reads v any more
            if masked:
                seen = everything()
                if partial:  # which a granule may be where this tile is not
                    seen = see(query, first_k + lane_n, seqlen_q, seqlen_k, band_first, band_last, batch, head, options)
                    if not cuda.syncthreads_or(any_seen(seen)):
                        if turn + 1 < stop_block:
                            copy_k(memory, k_base, k, batch, following * kv_tile, kv_head, thread // kv_width, thread % kv_width)
                            if asynchronous:
                                commit()
                        continue
            copy_v(memory, v_base, v, source, first_k, kv_head, thread // kv_width, thread % kv_width)
            if asynchronous:
                commit()
            if paged:  # the table is read a tile ahead
                source = find_pages(batch, following * kv_tile, thread // kv_width, begin, end, k.shape[0], options)

            s = zero_scores()
            c = int32(0)
            while c < depth:
                s = add_qk(s, memory, q_row, k_row, c ^ q_key, c ^ k_key)
                c = int32(c + step)

            border = first_k + kv_tile > seqlen_k
            if bounded_left:
                border |= first_k < last_place + band_first
            if bounded_right:
                border |= first_k + kv_tile - 1 > first_place + band_last
            first, last = int32(query + band_first - first_k), int32(query + band_last - first_k)
            if with_options:
                if padded_q:
                    border |= first_q + q_tile > seqlen_q
                if masked:
                    border = partial
                else:
                    seen = everything()
                    if border:
                        seen = see(query, first_k + lane_n, seqlen_q, seqlen_k, band_first, band_last, batch, head, options)
                if changed:
                    s = change(s, query, first_k + lane_n, seqlen_q, seqlen_k, batch, head, options)
                if border:
                    s = hide(s, seen)
            elif border:
                s = mask(s, first - lane_n, last - lane_n, seqlen_k - first_k - lane_n)

            p, m, l, o = online_softmax(s, m, l, o)
            if dropped:
                p = drop(p, query, first_k + lane_n, batch, head, options)
            if with_options and border:
                p = mark(p, seen)
            store_p(memory, p_row, lane_n, p_key, p)

            if asynchronous:
                wait()
            cuda.syncthreads()  # v and p are here; nobody reads k any more
            if turn + 1 < stop_block:
                copy_k(memory, k_base, k, source, following * kv_tile, kv_head, thread // kv_width, thread % kv_width)
                if asynchronous:
                    commit()

            plain = int32(1)
            if guarded and border:
                for unit in range(thread, kv_tile * dim_v // vector, threads):
                    plain &= is_finite(memory, v_base + unit * vector)
                plain = cuda.syncthreads_and(plain)
            c = int32(0)
            if plain:
                while c < kv_tile:
                    o = add_pv(o, memory, p_row, v_row + c * dim_v, c ^ p_key)
                    c = int32(c + step)
            elif with_options:
                while c < kv_tile:
                    o = add_pv_marked(o, memory, p_row, v_row + c * dim_v, c ^ p_key)
                    c = int32(c + vector)
            else:
                while c < kv_tile:
                    o = add_pv_seen(o, memory, p_row, v_row + c * dim_v, c ^ p_key, first - c, last - c)
                    c = int32(c + vector)

        l = reduce_sum(l)
        if finished:
            o = finish(o, l, options)
        if is_packed:
            out = out[:, first_row : first_row + seqlen_q]
        if split:
            entry = part * int32(q.shape[0]) + batch
            store_sums(out, entry, query, head, lane_n * vector, o)
            store_statistics(lse, entry, head, query, lane_n == 0, m, l)
        else:
            store_output(out, batch, query, head, lane_n * vector, o, l)
        if write_lse:
            if is_packed:
                lse = lse[:, :, first_row : first_row + seqlen_q]
            store_lse(lse, batch, head, query, lane_n == 0, m, l)

    operands = t.operand, t.operand, t.operand, scores.array_type(config.compute, 4) if split else t.operand, t.lse
    signature = numba.types.void(*operands, t.real, *(numba.types.int32,) * 6, scores.option_types(config))
    return KernelSource(forward, signature, threads=threads, min_blocks=config.min_blocks)
