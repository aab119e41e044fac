"""Consumers that share 64 keys, for head dims up to 256: each has half of the columns of their dK and dV in its registers.

Each consumer computes S^T = K Q^T and dP^T = V dO^T for half of a block's queries, and writes its half of P^T and dS^T to shared
memory. From there both multiply all 64 keys by all queries for their own columns of dV += P^T dO, dK += dS^T Q and dQ = dS K.
The part of dQ is added to the sum in global memory straight from the registers.
"""

from __future__ import annotations

from collections import namedtuple

from numba import cuda
from numba.cuda.types import UniTuple, int32, uint64

from ....ptx import fragment, mbarrier, pipeline, tma, warp, wgmma
from ....ptx.index import following, minus, plus, zero
from ....ptx.straight import straight_line
from ...bands import KeyBand
from .. import packed
from . import unseen
from .config import BackwardConfig, SharedMemory
from .scores import KeyScores
from .weights import weighing
from .work import Work

inline = cuda.jit(device=True, inline="always")

ALL = 1  # named barrier of all consumers
MAY_ADD, ADDED = 2, 5  # of the first consumer, shared with the warp that keeps its turns

Consumer = namedtuple(
    "Consumer",
    "w thread lane limits k v q_half dout_half pds first_query k_part q_part dout_part columns scale_log2 first_head group seat options spot",
)
"""What a step needs beside its state: descriptors, addresses, and the queries that the thread's keys are seen by."""


def consumers(config: BackwardConfig, memory: SharedMemory):
    """The work of a configuration."""
    q_block, kv_tile, count, parts = config.q_block, config.kv_tile, config.consumers, config.parts
    half, d_part, dv_part = q_block // count, config.part_columns, config.part_columns_v
    with_dq, with_dk, with_dv, with_ds, deterministic = config.with_dq, config.with_dk, config.with_dv, config.with_ds, config.deterministic
    q_panel_bytes, kv_panel_bytes = memory.q_panel_bytes, memory.kv_panel_bytes
    p_bytes = kv_tile * q_block * 2

    # Instructions of exactly these tile shapes.
    def transposed(columns):  # (64 keys, half of the queries) = K or V (64, columns) times Q^T or dO^T
        return wgmma.product_shared(
            half, columns, config.element, wgmma.k_major_steps(columns, kv_panel_bytes), wgmma.k_major_steps(columns, q_panel_bytes)
        )

    scores, value_scores = transposed(config.padded_head_dim), transposed(config.padded_head_dim_v)
    p_steps, rows = wgmma.k_major_steps(q_block, 0), wgmma.mn_major_steps(q_block)
    add_dv = wgmma.product_shared(dv_part, q_block, config.element, p_steps, rows, b_transposed=True, accumulate=True)  # += P^T dO
    add_dk = wgmma.product_shared(d_part, q_block, config.element, p_steps, rows, b_transposed=True, accumulate=True)  # += dS^T Q
    part_of_dq = wgmma.product_shared(  # (64, d_part) = dS (64, 64) K (64, d_part)
        d_part, kv_tile, config.element, wgmma.mn_major_steps(kv_tile), wgmma.mn_major_steps(kv_tile), a_transposed=True, b_transposed=True
    )
    row_operand, k_part_operand, p_operand = wgmma.operand(), wgmma.operand(0, kv_panel_bytes), wgmma.operand(memory.ds_bytes)
    q_operand, dout_operand = wgmma.operand(memory.q_bytes), wgmma.operand(memory.dout_bytes)
    q_mn_operand, dout_mn_operand = wgmma.operand(memory.q_bytes, q_panel_bytes), wgmma.operand(memory.dout_bytes, q_panel_bytes)
    wait_scores, wait_value_scores = wgmma.wait(1 if with_ds and not config.crowded else 0, half), wgmma.wait(0, half)
    wait_dv, wait_dk, wait_dq = wgmma.wait(with_dk + with_dq, dv_part), wgmma.wait(int(with_dq), d_part), wgmma.wait(0, d_part)
    wait_scores_before_dk, wait_value_scores_before_dk = wgmma.wait(2, half), wgmma.wait(1, half)
    wait_dv_before_dq, wait_dk_alone = wgmma.wait(1, dv_part), wgmma.wait(0, d_part)
    scale_dk = fragment.scale(d_part)
    select_dk, select_dv = fragment.select_rows(d_part), fragment.select_rows(dv_part)
    to_16bit, dk_to_16bit, dv_to_16bit = (fragment.to_16bit(n, config.element) for n in (half, d_part, dv_part))
    put_half = fragment.store_matrix(half, 0, shifted=True)
    put_dk, put_dv = fragment.store_matrix(d_part, kv_panel_bytes), fragment.store_matrix(dv_part, kv_panel_bytes)
    store_dk, store_dv = (tma.store_panels(4, 0, n, kv_panel_bytes) for n in (memory.loaded_qk_panels, memory.loaded_v_panels))
    add_part = fragment.add_plain(d_part)
    advance, only = pipeline.advance(config.stages), pipeline.start(0)
    pds_slot = pipeline.slot(memory.ds_bytes)

    # What options do; each of these is compiled in only where there is one that needs it.
    options_of, cleans, may_hide_keys = config.options, config.cleans_queries, config.may_hide_keys
    with_options, drops, crowded = bool(options_of), options_of.dropout, config.crowded
    of_scores = KeyScores(half, q_block, options_of, config.left, fma_exponentials=config.fma_exponentials)
    take_seat, fetch, no_words, keep_factor = of_scores.take_seat(), of_scores.fetch(), of_scores.no_words(), of_scores.keep_factor()
    no_mask_words = of_scores.no_mask_words()
    fetches = of_scores.fetches
    draw, no_kept, drop = of_scores.draw() if drops else None, of_scores.no_kept(), of_scores.drop(config.element)
    scale_dv = fragment.scale(dv_part)
    clean = unseen.queries(config, memory) if cleans else None
    clean_keys, seen_rows = unseen.keys(config, memory) if options_of.hides else (None, None)
    masked_keys, spoilt_dk, spoilt_dv = options_of.masked, fragment.spoilt(d_part), fragment.spoilt(dv_part)
    is_packed = options_of.packed
    if is_packed:
        is_whole = packed.is_whole(kv_tile)
        address_of_dk, address_of_dv = (packed.address_of(options_of, name) if name in options_of.stored else None for name in ("dk", "dv"))
        put_dk_rows = packed.store_rows(config.head_dim, kv_panel_bytes, 0, memory.loaded_qk_panels)
        put_dv_rows = packed.store_rows(config.head_dim_v, kv_panel_bytes, 0, memory.loaded_v_panels)
    first_head = straight_line(int32, (int32, int32), lambda ops, kv_head, group: kv_head * group)

    # Index arithmetic.
    band = KeyBand(kv_tile, q_block, config.left, config.right)
    limits_of_keys, seen_keys = band.limits(), band.seen()

    def place_of_thread(ops, tid, warpgroup, n):
        """(consumer, thread in it, lane, first of its two keys, its first query of a block, its first column there)."""
        consumer, thread = warpgroup - 1, tid & 127
        lane = thread & 31
        return [consumer, thread, lane, n * kv_tile + (thread >> 5) * 16 + (lane >> 2), consumer * half, consumer * half + (lane & 3) * 2]

    def places_of_consumer(ops, consumer, column, s_k, s_q, s_dout):
        """(its half of the rows of Q, of dO, its columns of K, of Q, of dO, bytes to its columns)."""
        rows, panels, v_panels = consumer * (half * wgmma.ROW_BYTES), consumer * (d_part // 64), consumer * (dv_part // 64)
        return [
            s_q + rows,
            s_dout + rows,
            s_k + panels * kv_panel_bytes,
            s_q + panels * q_panel_bytes,
            s_dout + v_panels * q_panel_bytes,
            column * 4,
        ]

    def part_at(ops, sums, part, block):
        return sums + (ops.wide(block) * parts + ops.wide(part)) * memory.part_bytes

    place_of_thread = straight_line(UniTuple(int32, 6), (int32,) * 3, place_of_thread)
    places_of_consumer = straight_line(UniTuple(int32, 6), (int32,) * 5, places_of_consumer)
    part_at = straight_line(uint64, (uint64, int32, int32), part_at)
    own_panels = straight_line(int32, (int32,) * 2, lambda ops, address, consumer: address + consumer * (d_part // 64 * kv_panel_bytes))
    own_v_panels = straight_line(int32, (int32,) * 2, lambda ops, address, consumer: address + consumer * (dv_part // 64 * kv_panel_bytes))
    first_key = straight_line(int32, (int32,), lambda ops, n: n * kv_tile)
    second = straight_line(int32, (int32,), lambda ops, address: address + p_bytes)

    key_of_thread = straight_line(int32, (int32,) * 2, lambda ops, n, thread: n * kv_tile + (thread >> 5) * 16 + ((thread & 31) >> 2))

    make_weights, fetch_mask_of = weighing(config, of_scores, memory, limits_of_keys)

    @inline
    def prepare(tid, warpgroup, n, batch, kv_head, group, onward, seqlen_k, bounds, places, scale_log2, options):
        s_k, s_v, s_q, s_dout, s_ds, s_dq = places
        w, thread, lane, key, first_query, column = place_of_thread(tid, warpgroup, n)
        q_half, dout_half, k_part, q_part, dout_part, columns = places_of_consumer(w, column, s_k, s_q, s_dout)
        limits = limits_of_keys(key, column, bounds)
        seat = limits
        if with_options:
            seat = take_seat(key, column, batch, seqlen_k, bounds, options)
        return Consumer(
            w, thread, lane, limits, row_operand(s_k, only()), row_operand(s_v, only()), q_half, dout_half,
            s_ds, first_query, k_part_operand(k_part, only()), q_part, dout_part, columns, scale_log2,
            first_head(kv_head, group), group, seat, options, (n, batch, seqlen_k, bounds) if masked_keys else limits,
        )  # fmt: skip

    @inline
    def settle(my):
        """Tell the warp that keeps the turns that all additions of the last block have arrived."""
        cuda.threadfence()
        warp.barrier_arrive(plus(my.w, ADDED), 160)

    @inline
    def send(dq, number, sums, my):
        """Add a part of dQ to the sum."""
        if deterministic:
            warp.barrier_sync(plus(my.w, MAY_ADD), 160)
        add_part(dq, part_at(sums, my.w, number), my.thread)

    # With overlap, dK is a block behind: its product runs while the probabilities of the next block are computed.

    def make_overlapped_step(masked, is_first):
        weights, gradients = make_weights(masked)
        cleans_here = cleans if masked else config.cleans_plain_queries

        @inline
        def step(carried, dk, dv, place, m, member, number, ring, sums, my):
            """A block of queries, but for dK, which is that of the block before it."""
            last_place = place
            if not is_first:
                place = advance(place)
            pipeline.wait(ring.q_full, place)
            if cleans_here:
                clean(place, ring, my.w, my.thread, my.lane)
            s = scores(my.k, q_operand(my.q_half, place))
            pipeline.wait(ring.dout_full, place)
            dp = value_scores(my.v, dout_operand(my.dout_half, place))
            if not is_first:
                dk = add_dk(dk, p_operand(second(my.pds), last_place), q_mn_operand(my.q_part, last_place))
            if deterministic and not is_first:
                settle(my)
            head = plus(my.first_head, member)
            words = fetch(my.seat, m, head, my.options) if fetches else no_words()
            mask_words = fetch_mask_of(m, head, my) if masked and masked_keys else no_mask_words()
            s = wait_scores(s) if is_first else wait_scores_before_dk(s)
            kept = draw(my.seat, m, head, my.options) if drops else no_kept()
            p, w = weights(s, words, mask_words, place, m, head, ring, my)
            pds = pds_slot(my.pds, place)
            p16 = to_16bit(p)
            if drops:
                p16 = drop(p16, kept)
            put_half(p16, pds, my.thread, my.first_query)
            dp = wait_value_scores(dp) if is_first else wait_value_scores_before_dk(dp)
            ds = gradients(w, dp, kept, place, m, ring, my)
            put_half(to_16bit(ds), second(pds), my.thread, my.first_query)
            tma.fence_async()
            if not is_first:
                dk = wait_dk_alone(dk)
                pipeline.release(ring.q_empty, last_place, my.lane)
            warp.barrier_sync(ALL, 128 * count)
            dv = add_dv(dv, p_operand(my.pds, place), dout_mn_operand(my.dout_part, place))
            dq = part_of_dq(p_operand(second(my.pds), place), my.k_part)
            dv = wait_dv_before_dq(dv)
            pipeline.release(ring.dout_empty, place, my.lane)
            send(wait_dq(dq), number, sums, my)
            return carried, dk, dv, place

        return step

    enter_overlapped = make_overlapped_step(True, True)

    @inline
    def enter_with_a_step(dk, dv, place, m, member, number, ring, sums, my):
        return enter_overlapped(zero(), dk, dv, place, m, member, number, ring, sums, my)

    @inline
    def finish_overlapped(carried, dk, dv, place, ring, my):
        """dK of the last block of queries."""
        dk = wait_dk_alone(add_dk(dk, p_operand(second(my.pds), place), q_mn_operand(my.q_part, place)))
        pipeline.release(ring.q_empty, place, my.lane)
        if deterministic:
            settle(my)
        return dk, dv, advance(place)

    @inline
    def enter(dk, dv, place, m, member, number, ring, sums, my):
        """Nothing is under way."""
        return zero(), dk, dv, place

    @inline
    def finish(carried, dk, dv, place, ring, my):
        if deterministic:
            settle(my)
        return dk, dv, place

    def make_step(masked):
        weights, gradients = make_weights(masked)
        cleans_here = cleans if masked else config.cleans_plain_queries

        @inline
        def step(carried, dk, dv, place, m, member, number, ring, sums, my):
            """A block of queries."""
            pipeline.wait(ring.q_full, place)
            if cleans_here:
                clean(place, ring, my.w, my.thread, my.lane)
            s = scores(my.k, q_operand(my.q_half, place))
            pipeline.wait(ring.dout_full, place)
            if with_ds and not crowded:
                dp = value_scores(my.v, dout_operand(my.dout_half, place))
            if deterministic and carried > 0:
                settle(my)  # only now, so that these products hide how long the additions of the block before take to arrive
            head = plus(my.first_head, member)
            words = fetch(my.seat, m, head, my.options) if fetches else no_words()
            mask_words = fetch_mask_of(m, head, my) if masked and masked_keys else no_mask_words()
            kept = draw(my.seat, m, head, my.options) if drops else no_kept()
            p, w = weights(wait_scores(s), words, mask_words, place, m, head, ring, my)
            if with_ds and crowded:
                dp = value_scores(my.v, dout_operand(my.dout_half, place))
            pds = pds_slot(my.pds, place)
            if with_dv:
                p16 = to_16bit(p)
                if drops:
                    p16 = drop(p16, kept)
                put_half(p16, pds, my.thread, my.first_query)
            if with_ds:
                ds = gradients(w, wait_value_scores(dp), kept, place, m, ring, my)
                put_half(to_16bit(ds), second(pds), my.thread, my.first_query)
            tma.fence_async()
            warp.barrier_sync(ALL, 128 * count)
            if with_dv:
                dv = add_dv(dv, p_operand(my.pds, place), dout_mn_operand(my.dout_part, place))
            if with_dk:
                dk = add_dk(dk, p_operand(second(my.pds), place), q_mn_operand(my.q_part, place))
            if with_dq:
                dq = part_of_dq(p_operand(second(my.pds), place), my.k_part)
            if with_dv:
                dv = wait_dv(dv)
            pipeline.release(ring.dout_empty, place, my.lane)
            if with_dk:
                dk = wait_dk(dk)
            pipeline.release(ring.q_empty, place, my.lane)
            if with_dq:
                send(wait_dq(dq), number, sums, my)
            return following(carried), dk, dv, advance(place)

        return step

    @inline
    def leave(dk, dv, n, bounds, kv_head, batch, dk_map, dv_map, s_k, s_v, k_empty, v_empty, scale_of_dk, first_k, stored, my):
        """dK and dV leave through the shared memory of K and V, whose last use is over."""
        warp.barrier_sync(ALL, 128 * count)
        if may_hide_keys:  # NaN among the queries stays out of keys that none of them sees
            key = key_of_thread(n, my.thread)
            seen = seen_keys(key, bounds)
            if masked_keys and warp.ballot(spoilt_dk(dk) | spoilt_dv(dv)) != 0:
                seen = seen_rows(key, my.lane, batch, kv_head, my.group, bounds, my.options)
            dk, dv = select_dk(dk, seen), select_dv(dv, seen)
        if drops:
            dv = scale_dv(dv, keep_factor(my.options))
        if with_dv:
            put_dv(dv_to_16bit(dv), own_v_panels(s_v, my.w), my.thread)
        if with_dk:
            put_dk(dk_to_16bit(scale_dk(dk, scale_of_dk)), own_panels(s_k, my.w), my.thread)
        tma.fence_async()
        warp.barrier_sync(ALL, 128 * count)
        if is_packed:
            key = first_key(n)
            if is_whole(key, stored) == 0:
                if with_dv and my.w == 0:
                    put_dv_rows(s_v, my.thread, address_of_dv(plus(first_k, key), kv_head, my.options), minus(stored, key))
                if with_dk and my.w == 1:
                    put_dk_rows(s_k, my.thread, address_of_dk(plus(first_k, key), kv_head, my.options), minus(stored, key))
                warp.barrier_sync(ALL, 128 * count)
            elif my.w == 0 and my.thread == 0:
                if with_dv:
                    store_dv(dv_map, s_v, plus(first_k, key), kv_head, batch)
                if with_dk:
                    store_dk(dk_map, s_k, plus(first_k, key), kv_head, batch)
                tma.wait_stores_read()
            if my.w == 0 and my.thread == 0:
                mbarrier.arrive(k_empty)
                mbarrier.arrive(v_empty)
        elif my.w == 0 and my.thread == 0:
            key = first_key(n)
            if with_dv:
                store_dv(dv_map, s_v, key, kv_head, batch)
            if with_dk:
                store_dk(dk_map, s_k, key, kv_head, batch)
            tma.wait_stores_read()
            mbarrier.arrive(k_empty)
            mbarrier.arrive(v_empty)

    if config.overlap:
        steps = (enter_with_a_step, make_overlapped_step(True, False), make_overlapped_step(False, False), finish_overlapped)
    else:
        steps = (enter, make_step(True), make_step(False), finish)
    return Work(prepare, fragment.zeros(d_part), fragment.zeros(dv_part), *steps, leave, enters_with_a_step=config.overlap, clean_keys=clean_keys)
