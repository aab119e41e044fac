"""The gradient of a bias on CUDA cores: one block sums one tile of it, over everything that the bias is broadcast along.

::

    for each batch entry, head, tile of queries, tile of keys that shares these elements of the bias:
        q, dout, k (scaled), v -> shared memory
        p = exp(q k^T + bias - lse)
        ds = p * (dout v^T - delta)   registers
        total += ds                   registers
    total -> shared memory, summed along a broadcast axis, -> dbias

Scores are computed once more for it, two products beside the five of the others; in return there is no workspace, and always the same order.
The fewer elements a bias has, the fewer blocks there are.
"""

from __future__ import annotations

import numba
from numba import cuda, int32

from numbaflash.ptx import cp_async
from numbaflash.toolchain import KernelSource

from .. import scores
from .. import tiles as shared_tiles
from . import tiles
from .config import Config


def build(config: Config) -> KernelSource:
    """The kernel of a config.

    Its parameters: dout, q, k, v, lse, dbias (4 axes, of size 1 where it is broadcast); delta of the workspace; the factor of the scores; first
    and last visible key of query 0; q tiles; k tiles; query heads a key/value head; those of the options.
    """
    t = tiles.Types.of(config)
    share, dbias_type = config.scores, scores.array_type(config.options.bias, 4)
    copy_k = shared_tiles.copy_scaled(config, config.kv_tile, config.dim, config.k_mask)
    copy_v = shared_tiles.copy_tile(config, config.kv_tile, config.dim_v, config.k_mask)
    copy_q = shared_tiles.copy_tile(config, config.q_tile, config.dim, config.q_mask)
    copy_dout = shared_tiles.copy_tile(config, config.q_tile, config.dim_v, config.q_mask)
    zero_scores, add, store_scores = shared_tiles.zeros(t.scores, config), tiles.add_scores(config), shared_tiles.store_p(config, share)
    add_qk, add_dout_v = (shared_tiles.add_dots(config, share, dim) for dim in (config.dim, config.dim_v))
    load_lse, load_delta, place_scores, afresh = tiles.load_lse(config), tiles.load_delta(config), tiles.place(config, share), tiles.afresh
    lengths, see, any_seen = scores.lengths(config), scores.see(config, share), scores.any_seen(share)
    weigh, mark, only_alive = scores.weigh(config, share, True), scores.mark(config, share), tiles.only_alive(config)
    store_dbias = tiles.store_dbias(config, dbias_type)
    commit, wait = cp_async.commit, cp_async.wait

    real, step, threads = t.real, config.step, config.threads
    depth, depth_v, dim, dim_v, q_tile, kv_tile = config.depth, config.depth_v, config.dim, config.dim_v, config.q_tile, config.kv_tile
    v_base = kv_tile * dim
    q_base = v_base + kv_tile * dim_v
    dout_base = q_base + q_tile * dim
    total_base = dout_base + q_tile * dim_v
    k_width, v_width, q_width = (
        shared_tiles.element_copy_width(config, kv_tile),
        shared_tiles.copy_width(config, kv_tile),
        shared_tiles.copy_width(config, q_tile),
    )
    asynchronous, bounded_left, bounded_right = config.asynchronous, config.bounded_left, config.bounded_right
    with_queries, with_keys = config.dbias_axes
    masked, with_lengths, per_entry = config.options.masked, config.options.lengths, config.options.per_entry
    rows, columns = q_tile if with_queries else 1, kv_tile if with_keys else 1

    def bias_gradient(dout, q, k, v, lse, dbias, delta, factor, band_first, band_last, q_tiles, kv_tiles, group, *options):
        thread = int32(cuda.threadIdx.x)
        memory = cuda.shared.array(0, real)
        batches, heads, tile = int32(q.shape[0]), int32(q.shape[2]), int32(cuda.blockIdx.x)
        own_k, first_kv_block, stop_kv_block = int32(0), int32(0), kv_tiles
        if with_keys:
            own_k, tile = tile % kv_tiles, tile // kv_tiles
            first_kv_block, stop_kv_block = own_k, own_k + 1
        own_q, first_q_block, stop_q_block = int32(0), int32(0), q_tiles
        if with_queries:
            own_q, tile = tile % q_tiles, tile // q_tiles
            first_q_block, stop_q_block = own_q, own_q + 1
        own_head, own_batch = tile % int32(dbias.shape[1]), tile // int32(dbias.shape[1])
        first_head, stop_head = own_head, own_head + 1
        if dbias.shape[1] == 1:
            stop_head = heads
        first_batch, stop_batch = own_batch, own_batch + 1
        if dbias.shape[0] == 1:
            stop_batch = batches

        total = zero_scores()
        for batch in range(first_batch, stop_batch):
            seqlen_q, seqlen_k = int32(q.shape[1]), int32(k.shape[1])
            if with_lengths:
                seqlen_q, seqlen_k = lengths(seqlen_q, seqlen_k, batch, options)
            first_of_0, last_of_0 = band_first, band_last
            if per_entry:
                first_of_0, last_of_0 = int32(band_first + seqlen_k - seqlen_q), int32(band_last + seqlen_k - seqlen_q)
            for head in range(first_head, stop_head):
                for q_block in range(first_q_block, stop_q_block):
                    first_q = int32(q_block * q_tile)
                    last_q = int32(min(first_q + q_tile, seqlen_q) - 1)
                    for kv_block in range(first_kv_block, stop_kv_block):
                        first_k = int32(kv_block * kv_tile)
                        last_k = int32(min(first_k + kv_tile, seqlen_k) - 1)
                        work = last_q >= first_q and last_k >= first_k
                        if bounded_left:
                            work &= last_k >= first_q + first_of_0
                        if bounded_right:
                            work &= first_k <= last_q + last_of_0
                        if not work:
                            continue
                        thread = afresh(thread)
                        s_query, s_key, q_swizzle, k_swizzle = place_scores(thread)
                        query, key = int32(first_q + s_query), int32(first_k + s_key)
                        seen = see(query, key, seqlen_q, seqlen_k, first_of_0, last_of_0, batch, head, options)
                        if masked and not cuda.syncthreads_or(any_seen(seen)):
                            continue
                        cuda.syncthreads()  # nobody reads the tiles any more
                        kv_head = head // group
                        copy_q(memory, q_base, q, batch, first_q, head, thread // q_width, thread % q_width)
                        copy_dout(memory, dout_base, dout, batch, first_q, head, thread // q_width, thread % q_width)
                        copy_v(memory, v_base, v, batch, first_k, kv_head, thread // v_width, thread % v_width)
                        if asynchronous:
                            commit()
                        copy_k(memory, 0, k, batch, first_k, kv_head, factor, thread // k_width, thread % k_width)
                        if asynchronous:
                            wait()
                        cuda.syncthreads()

                        p, ds = zero_scores(), zero_scores()
                        c = int32(0)
                        while c < depth:
                            p = add_qk(p, memory, q_base + s_query * dim, s_key * dim, c ^ q_swizzle, c ^ k_swizzle)
                            c = int32(c + step)
                        c = int32(0)
                        while c < depth_v:
                            ds = add_dout_v(ds, memory, dout_base + s_query * dim_v, v_base + s_key * dim_v, c ^ q_swizzle, c ^ k_swizzle)
                            c = int32(c + step)
                        row_lse, row_delta = load_lse(lse, batch, head, query), load_delta(delta, int32(batch * heads + head), query)
                        _, ds, _ = weigh(p, ds, row_lse, row_delta, query, key, seqlen_q, seqlen_k, batch, head, options)
                        total = add(total, mark(ds, only_alive(seen, row_lse)))

        thread = afresh(thread)
        s_query, s_key, _, _ = place_scores(thread)
        store_scores(memory, total_base + s_query * kv_tile, s_key, 0, total)
        cuda.syncthreads()
        if not with_queries:
            for column in range(thread, kv_tile, threads):
                x = real(0.0)
                for row in range(q_tile):
                    x += memory[total_base + row * kv_tile + column]
                memory[total_base + column] = x
            cuda.syncthreads()
        if not with_keys:
            for row in range(thread, rows, threads):
                x = real(0.0)
                for column in range(kv_tile):
                    x += memory[total_base + row * kv_tile + column]
                memory[total_base + row * kv_tile] = x
            cuda.syncthreads()
        for n in range(thread, rows * columns, threads):
            row, column = n // columns, n % columns
            x = memory[total_base + row * kv_tile + column]
            store_dbias(dbias, own_batch, own_head, own_q * rows + row, own_k * columns + column, x)

    operands = (t.operand,) * 4 + (t.lse, dbias_type, t.delta)
    signature = numba.types.void(*operands, t.real, *(numba.types.int32,) * 5, scores.option_types(config))
    return KernelSource(bias_gradient, signature, threads=threads)
