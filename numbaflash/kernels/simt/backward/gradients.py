"""The gradients' products on CUDA cores: one block keeps one tile of keys of one key/value head (Algorithm 2 of
FlashAttention-2, keys outside, queries inside).

::

    k tile (scaled), v tile -> shared memory
    for each query head of the group, for each tile of queries that sees some key of the tile:
        p = exp(q k^T - lse)          registers -> shared memory (with options p and ds together, after both products)
        dv += p^T dout                registers
        ds = p * (dout v^T - delta)   registers -> shared memory
        dk += ds^T q                  registers
        dq += ds k                    added up in the workspace; q and dout of the next tile arrive meanwhile
    dk, dv -> results

dk and dv of a group are thus summed in registers. Blocks of other keys add to the same dq: in any order, or each in its turn.
"""

from __future__ import annotations

import numba
from numba import cuda, int32

from numbaflash.kernels.blocks.layout import LIST_START
from numbaflash.kernels.schedule import tile_order
from numbaflash.problem import PACKED
from numbaflash.ptx import cp_async
from numbaflash.toolchain import KernelSource

from .. import packed, scores
from .. import tiles as shared_tiles
from . import tiles, walk
from .config import Config


def build(config: Config) -> KernelSource:
    """The kernel of a config.

    Its parameters: dout, q, k, v, lse, dk, dv; delta, sums and turns of the workspace; the factor of the scores that makes
    their exponential the weight, and that of dk; first and last visible key of query 0; q tiles; k tiles; key/value heads over
    the batch; query heads a key/value head; key/value heads that run together; those of the options.
    """
    t = tiles.Types.of(config)
    copy_k = shared_tiles.copy_scaled(config, config.kv_tile, config.dim, config.k_mask)
    copy_v = shared_tiles.copy_tile(config, config.kv_tile, config.dim_v, config.k_mask)
    copy_q = shared_tiles.copy_tile(config, config.q_tile, config.dim, config.q_mask)
    copy_dout = shared_tiles.copy_tile(config, config.q_tile, config.dim_v, config.q_mask)
    zero_scores, zero_dq, zero_dk, zero_dv = (shared_tiles.zeros(kind, config) for kind in (t.scores, t.dq, t.dk, t.dv))
    add_qk, add_dout_v = (shared_tiles.add_dots(config, config.scores, dim) for dim in (config.dim, config.dim_v))
    hide, store_scores, load_scores = tiles.hide(config), shared_tiles.store_p(config, config.scores), tiles.load_scores(config)
    is_finite = shared_tiles.is_finite(config)
    load_lse, load_delta = tiles.load_lse(config), tiles.load_delta(config)
    softmax, softmax_gradient = tiles.softmax(config), tiles.softmax_gradient(config)
    add_dv, add_dv_seen = (tiles.add_transposed(config, config.dv, config.dim_v, guard) for guard in (tiles.PLAIN, tiles.BANDED))
    add_dk, add_dk_seen = (tiles.add_transposed(config, config.dk, config.dim, guard) for guard in (tiles.PLAIN, tiles.BANDED))
    add_dq, add_dq_seen = (tiles.add_dq(config, guard) for guard in (tiles.PLAIN, tiles.BANDED))
    add_sums = tiles.add_sums(config)
    store_dk, store_dv = (tiles.store_rows(config, share, tiles.chunk(config, share)) for share in (config.dk, config.dv))
    place_scores, place_dq = tiles.place(config, config.scores), tiles.place(config, config.dq, 1, config.vector)
    place_dk, place_dv = (tiles.place(config, share, tiles.chunk(config, share), config.vector) for share in (config.dk, config.dv))
    afresh = tiles.afresh
    step_up, step_down, turn_of = walk.step_up(config), walk.step_down(config), walk.turn(config)

    options_of, share = config.options, config.scores
    with_options, masked, with_lengths, per_entry = bool(options_of), options_of.masked, options_of.lengths, options_of.per_entry
    list_of, list_word = (scores.list_of(config), scores.list_word(config)) if masked else (None, None)
    rank_of = scores.rank_of(config) if options_of.ranked else None
    # A query whose scores are all -inf has no gradients, whatever dout holds there, and a bias may do that anywhere.
    scattered = options_of.bias is not None
    lengths, see, everything, any_seen = scores.lengths(config), scores.see(config, share), scores.everything(share), scores.any_seen(share)
    weigh, mark, only_alive = scores.weigh(config, share, config.with_ds), scores.mark(config, share), tiles.only_alive(config)
    zero_row = shared_tiles.zeros(t.row, config)
    add_dv_marked, add_dk_marked = (
        tiles.add_transposed(config, share, dim, tiles.MARKED) for share, dim in ((config.dv, config.dim_v), (config.dk, config.dim))
    )
    add_dq_marked = tiles.add_dq(config, tiles.MARKED)
    is_packed = options_of.packed
    if is_packed:
        entries, (ascends_q, ascends_k) = packed.entries(config), (packed.ascends(config, name) for name in PACKED)
        bisect = packed.bisect(config, PACKED[1], config.kv_tile)
        entry_of_tile = packed.entry_of_tile(config, *PACKED[::-1], config.kv_tile, config.q_tile)
    commit, wait = cp_async.commit, cp_async.wait

    real, vector, step = t.real, config.vector, config.step
    depth, depth_v, dim, dim_v = config.depth, config.depth_v, config.dim, config.dim_v
    threads, lanes_m, k_mask = config.threads, config.lanes_m, config.k_mask
    q_tile, kv_tile = config.q_tile, config.kv_tile
    v_base = kv_tile * dim
    q_base = v_base + kv_tile * dim_v
    dout_base = q_base + q_tile * dim
    p_base = dout_base + q_tile * dim_v
    ds_base = p_base + (config.buffers - 1) * q_tile * kv_tile
    k_width, v_width, q_width = (
        shared_tiles.element_copy_width(config, kv_tile),
        shared_tiles.copy_width(config, kv_tile),
        shared_tiles.copy_width(config, q_tile),
    )
    asynchronous, ordered, walks_down, one_buffer = config.asynchronous, config.ordered, config.walks_down, config.buffers == 1
    with_dq, with_dk, with_dv, with_ds = config.with_dq, config.with_dk, config.with_dv, config.with_ds
    bounded_left, bounded_right = config.bounded_left, config.bounded_right
    guarded = config.guarded or scattered

    def gradients(
        dout,
        q,
        k,
        v,
        lse,
        dk_out,
        dv_out,
        delta,
        sums,
        turns,
        factor,
        scale,
        band_first,
        band_last,
        q_tiles,
        kv_tiles,
        batch_kv_heads,
        group,
        section,
        *options,
    ):
        thread = int32(cuda.threadIdx.x)
        memory = cuda.shared.array(0, real)
        tile = int32(cuda.blockIdx.x)
        if ordered:  # blocks take their tiles in the order in which they start, so nobody waits for one that has not
            ticket = cuda.shared.array(0, int32)
            if thread == 0:
                ticket[0] = cuda.atomic.add(turns, 0, 1)
            cuda.syncthreads()
            tile = ticket[0]
            cuda.syncthreads()
        block, batch_kv_head = tile_order(tile, kv_tiles, batch_kv_heads, section)
        kv_block = int32(kv_tiles - 1 - block)  # first keys first: with a causal mask most queries see them
        kv_heads, heads = int32(k.shape[2]), int32(q.shape[2])
        batch, kv_head = batch_kv_head // kv_heads, batch_kv_head % kv_heads
        if is_packed:
            ascending_q, ascending_k = int32(1), int32(1)
            for entry in range(thread, entries(options), threads):
                ascending_q &= ascends_q(entry, q.shape[1], options)
                ascending_k &= ascends_k(entry, k.shape[1], options)
            ascending_q, ascending_k = cuda.syncthreads_and(ascending_q), cuda.syncthreads_and(ascending_k)
            low, high = int32(0), entries(options)
            while high - low > 1:
                low, high = bisect(low, high, kv_block, k.shape[1], options)
            batch, kv_block, first_key, keys, first_row, queries, first_tile, _ = entry_of_tile(
                low, kv_block, k.shape[1], q.shape[1], ascending_k, ascending_q, options
            )
            q, dout, lse = q[:, first_row : first_row + queries], dout[:, first_row : first_row + queries], lse[:, :, first_row : first_row + queries]
            k, v, delta = k[:, first_key : first_key + keys], v[:, first_key : first_key + keys], delta[:, first_row : first_row + queries]
        seqlen_q, seqlen_k = int32(q.shape[1]), int32(k.shape[1])
        if with_lengths:
            seqlen_q, seqlen_k = lengths(seqlen_q, seqlen_k, batch, options)
        if per_entry:
            band_first, band_last = int32(band_first + seqlen_k - seqlen_q), int32(band_last + seqlen_k - seqlen_q)

        first_k = int32(kv_block * kv_tile)
        last_k = int32(min(first_k + kv_tile, seqlen_k) - 1)

        # Queries that see some key of the tile.
        begin, end = int32(0), seqlen_q
        if bounded_right:
            begin = int32(max(first_k - band_last, 0))
        if bounded_left:
            end = int32(min(last_k - band_first + 1, seqlen_q))
        if with_lengths and first_k >= seqlen_k:
            end = int32(0)
        first_block, stop_block = int32(begin // q_tile), int32((end + q_tile - 1) // q_tile)
        head, q_block = int32(kv_head * group), first_block
        if walks_down:
            q_block = int32(stop_block - 1)
        stop_head = int32(head + group if begin < end else head)
        if masked:  # of a list, blocks are counted by its entries
            own_list = list_of(kv_block, batch, kv_head, options)
            first_block, stop_block = int32(0), list_word(own_list, 0, options)
            stop_head = int32(head + group if stop_block > 0 else head)
            turn = first_block
            entry = list_word(own_list, LIST_START, options)
            q_block = entry // 2

        dk, dv = zero_dk(), zero_dv()
        plain_k = int32(1)
        if head < stop_head:
            first_q = int32(q_block * q_tile)
            copy_q(memory, q_base, q, batch, first_q, head, thread // q_width, thread % q_width)
            copy_dout(memory, dout_base, dout, batch, first_q, head, thread // q_width, thread % q_width)
            if with_ds:
                copy_v(memory, v_base, v, batch, first_k, kv_head, thread // v_width, thread % v_width)
            if asynchronous:
                commit()
            copy_k(memory, 0, k, batch, first_k, kv_head, factor, thread // k_width, thread % k_width)
            if guarded and with_dq:
                cuda.syncthreads()
                c = int32(thread * vector)
                while c < kv_tile * dim:
                    plain_k &= is_finite(memory, c)
                    c = int32(c + threads * vector)
                plain_k = int32(cuda.syncthreads_and(plain_k))

        last_number = int32(-1)
        while head < stop_head:
            thread = afresh(thread)
            s_query, s_key, q_swizzle, k_swizzle = place_scores(thread)
            first_q = int32(q_block * q_tile)
            if is_packed:
                batch_head = int32(head)
                q_number = int32(head * q_tiles + first_tile + q_block)
            else:
                batch_head = int32(batch * heads + head)
                q_number = int32(batch_head * q_tiles + q_block)
            if asynchronous:
                wait()
            cuda.syncthreads()  # q and dout are here; nobody reads p and ds any more, everyone has added to dq
            if ordered:
                if thread == 0 and last_number >= 0:
                    cuda.atomic.add(turns, 1 + last_number, 1)
                last_number = q_number
            work = int32(1)
            if masked:
                partial = entry % 2 or first_q + q_tile > seqlen_q
                seen = everything()
                if partial:  # which a granule may be where this tile is not
                    seen = see(first_q + s_query, first_k + s_key, seqlen_q, seqlen_k, band_first, band_last, batch, head, options)
                    work = int32(cuda.syncthreads_or(any_seen(seen)))
            if work:
                p = zero_scores()
                c = int32(0)
                while c < depth:
                    p = add_qk(p, memory, q_base + s_query * dim, s_key * dim, c ^ q_swizzle, c ^ k_swizzle)
                    c = int32(c + step)
                if with_options:
                    ds, row_delta = zero_scores(), zero_row()
                    if with_ds:
                        c = int32(0)
                        while c < depth_v:
                            ds = add_dout_v(ds, memory, dout_base + s_query * dim_v, v_base + s_key * dim_v, c ^ q_swizzle, c ^ k_swizzle)
                            c = int32(c + step)
                        row_delta = load_delta(delta, batch_head, first_q + s_query)
                else:
                    p = softmax(p, load_lse(lse, batch, head, first_q + s_query))

                border = first_k + kv_tile > seqlen_k or first_q + q_tile > seqlen_q
                if bounded_left:
                    border |= first_k < first_q + q_tile - 1 + band_first
                if bounded_right:
                    border |= first_k + kv_tile - 1 > first_q + band_last
                if masked:
                    border = partial
                if scattered:
                    border = True
                first, last = int32(first_q + band_first - first_k), int32(first_q + band_last - first_k)  # of the tile's first query
                if with_options:
                    row_lse = load_lse(lse, batch, head, first_q + s_query)
                    if not masked:
                        seen = everything()
                        if border:
                            seen = see(first_q + s_query, first_k + s_key, seqlen_q, seqlen_k, band_first, band_last, batch, head, options)
                    p, _, ds = weigh(p, ds, row_lse, row_delta, first_q + s_query, first_k + s_key, seqlen_q, seqlen_k, batch, head, options)
                    if border:
                        seen = only_alive(seen, row_lse)
                        p = mark(p, seen)
                        ds = mark(ds, seen)
                elif border:
                    p = hide(p, first + s_query - s_key, last + s_query - s_key, seqlen_k - first_k - s_key, seqlen_q - first_q - s_query)
                plain = int32(1)
                if guarded and border:
                    c = int32(thread * vector)
                    while c < q_tile * (dim + dim_v):
                        plain &= is_finite(memory, q_base + c)
                        c = int32(c + threads * vector)
                    plain = int32(cuda.syncthreads_and(plain))

                if with_dv:
                    store_scores(memory, p_base + s_query * kv_tile, s_key, q_swizzle, p)
                    cuda.syncthreads()  # p is here
                    thread = afresh(thread)
                    dv_key, dv_column, _, _ = place_dv(thread)
                    c = int32(0)
                    if plain:
                        while c < q_tile:
                            dv = add_dv(dv, memory, p_base + c * kv_tile, dv_key, dout_base + c * dim_v, dv_column)
                            c = int32(c + step)
                    elif with_options:
                        while c < q_tile:
                            dv = add_dv_marked(dv, memory, p_base + c * kv_tile, dv_key, dout_base + c * dim_v, dv_column)
                            c = int32(c + lanes_m)
                    else:
                        while c < q_tile:
                            seeing, unseeing = dv_key - last - c, dv_key - first - c
                            dv = add_dv_seen(dv, memory, p_base + c * kv_tile, dv_key, dout_base + c * dim_v, dv_column, seeing, unseeing)
                            c = int32(c + lanes_m)

                if with_ds:
                    thread = afresh(thread)
                    s_query, s_key, q_swizzle, k_swizzle = place_scores(thread)
                    if not with_options:
                        ds = zero_scores()
                        c = int32(0)
                        while c < depth_v:
                            ds = add_dout_v(ds, memory, dout_base + s_query * dim_v, v_base + s_key * dim_v, c ^ q_swizzle, c ^ k_swizzle)
                            c = int32(c + step)
                        if with_dv:
                            p = load_scores(memory, p_base + s_query * kv_tile, s_key, q_swizzle)
                        ds = softmax_gradient(p, ds, load_delta(delta, batch_head, first_q + s_query))
                        if border:
                            ds = hide(ds, first + s_query - s_key, last + s_query - s_key, seqlen_k - first_k - s_key, seqlen_q - first_q - s_query)
                    if one_buffer and with_dv:
                        cuda.syncthreads()  # nobody reads p any more
                    store_scores(memory, ds_base + s_query * kv_tile, s_key, q_swizzle, ds)
                    cuda.syncthreads()  # ds is here

                if with_dk:
                    thread = afresh(thread)
                    dk_key, dk_column, _, _ = place_dk(thread)
                    c = int32(0)
                    if plain:
                        while c < q_tile:
                            dk = add_dk(dk, memory, ds_base + c * kv_tile, dk_key, q_base + c * dim, dk_column)
                            c = int32(c + step)
                    elif with_options:
                        while c < q_tile:
                            dk = add_dk_marked(dk, memory, ds_base + c * kv_tile, dk_key, q_base + c * dim, dk_column)
                            c = int32(c + lanes_m)
                    else:
                        while c < q_tile:
                            seeing, unseeing = dk_key - last - c, dk_key - first - c
                            dk = add_dk_seen(dk, memory, ds_base + c * kv_tile, dk_key, q_base + c * dim, dk_column, seeing, unseeing)
                            c = int32(c + lanes_m)

            if ordered and thread == 0:
                before = turn_of(kv_block, first_q, band_first)
                if masked:
                    before = rank_of(own_list, q_block, options)
                while cuda.atomic.add(turns, 1 + q_number, 0) < before:
                    continue
                cuda.threadfence()
            cuda.syncthreads()  # nobody reads q and dout any more
            thread = afresh(thread)
            if walks_down:
                heads_before = 0 if is_packed else batch * heads
                head, q_block = step_down(q_number, first_q, q_tiles, heads_before, stop_head, group, first_k, band_last)
            elif masked:
                head, turn = step_up(head, turn, first_block, stop_block)
                entry = list_word(own_list, LIST_START + turn, options)
                q_block = entry // 2
            else:
                head, q_block = step_up(head, q_block, first_block, stop_block)
            if head < stop_head:
                copy_q(memory, q_base, q, batch, q_block * q_tile, head, thread // q_width, thread % q_width)
                copy_dout(memory, dout_base, dout, batch, q_block * q_tile, head, thread // q_width, thread % q_width)
                if asynchronous:
                    commit()
            if with_dq and work:
                dq_query, dq_column, q_swizzle, _ = place_dq(thread)
                dq = zero_dq()
                c = int32(0)
                ds_row = ds_base + dq_query * kv_tile
                if plain_k or not border:
                    while c < kv_tile:
                        dq = add_dq(dq, memory, ds_row, c * dim, dq_column ^ (c & k_mask) * vector, c ^ q_swizzle)
                        c = int32(c + step)
                elif with_options:
                    while c < kv_tile:
                        dq = add_dq_marked(dq, memory, ds_row, c * dim, dq_column ^ (c & k_mask) * vector, c ^ q_swizzle)
                        c = int32(c + vector)
                else:
                    while c < kv_tile:
                        dq = add_dq_seen(
                            dq,
                            memory,
                            ds_row,
                            c * dim,
                            dq_column ^ (c & k_mask) * vector,
                            c ^ q_swizzle,
                            first + dq_query - c,
                            last + dq_query - c,
                        )
                        c = int32(c + vector)
                add_sums(sums, q_number, thread, dq)
                if ordered:
                    cuda.threadfence()

        if ordered:
            cuda.syncthreads()
            if thread == 0 and last_number >= 0:
                cuda.atomic.add(turns, 1 + last_number, 1)
        thread = afresh(thread)
        if with_dk:
            dk_key, dk_column, _, _ = place_dk(thread)
            if is_packed:
                dk_out = dk_out[:, first_key : first_key + seqlen_k]
            store_dk(dk_out, batch, first_k + dk_key, kv_head, dk_column, dk, scale)
        if with_dv:
            dv_key, dv_column, _, _ = place_dv(thread)
            if is_packed:
                dv_out = dv_out[:, first_key : first_key + seqlen_k]
            store_dv(dv_out, batch, first_k + dv_key, kv_head, dv_column, dv, real(1.0))

    arrays = (t.operand,) * 4 + (t.lse,) + (t.operand,) * 2 + (t.delta, t.sums, t.turns)
    signature = numba.types.void(*arrays, t.real, t.real, *(numba.types.int32,) * 7, scores.option_types(config))
    return KernelSource(gradients, signature, threads=threads, min_blocks=config.min_blocks)
