"""Consumers that own 64 keys each, for head dims up to 128: all of dK and dV of those keys are in one warpgroup's registers.

Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are register operands of dV += P^T dO and
dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K, which sums over the keys of all consumers. They take turns at it: of
two blocks of queries each computes dQ of one, and waits for the other's dS only there. So they run half a step apart, and the products of
one hide the exponentials of the other. The two parts of dQ are staged, and two warps of the producer warpgroup add them to the sum in global
memory by bulk copies.
"""

from __future__ import annotations

from collections import namedtuple

from numba import cuda
from numba.cuda.types import UniTuple, int32

from ....ptx import fragment, mbarrier, pipeline, tma, warp, wgmma
from ....ptx.index import minus, plus, zero
from ....ptx.straight import straight_line
from ...bands import KeyBand
from ...schedule import next_of_walk
from .. import packed
from . import unseen
from .config import PART_ROWS, BackwardConfig, SharedMemory
from .scores import KeyScores
from .weights import weighing
from .work import Work

inline = cuda.jit(device=True, inline="always")

# Named barriers; 0 is the whole block's.
OWN = 1  # of the first consumer; one a consumer
DQ_FULL, DQ_EMPTY = 3, 5  # of the first part of dQ: the consumer whose turn it is, and the warp that sends it away; one a part

Consumer = namedtuple("Consumer", "w thread lane limits k v ds all_ds all_k dq columns scale_log2 first_head group onward seat options spot")
"""What a step needs beside its state: descriptors, addresses, and the queries that the thread's keys are seen by."""


def consumers(config: BackwardConfig, memory: SharedMemory):
    """The work of a configuration."""
    q_block, kv_tile, d, dv_columns = config.q_block, config.kv_tile, config.padded_head_dim, config.padded_head_dim_v
    parts, part_columns, by_rows = config.parts, config.part_columns, config.q_block > PART_ROWS  # parts are rows of dQ, or columns
    with_dq, with_dk, with_dv, with_ds = config.with_dq, config.with_dk, config.with_dv, config.with_ds
    q_panel_bytes, kv_panel_bytes = memory.q_panel_bytes, memory.kv_panel_bytes

    # Instructions of exactly these tile shapes.
    def transposed(columns):  # (64 keys, q_block) = K or V (64, columns) times Q^T or dO^T
        return wgmma.product_shared(
            q_block, columns, config.element, wgmma.k_major_steps(columns, kv_panel_bytes), wgmma.k_major_steps(columns, q_panel_bytes)
        )

    scores, value_scores = transposed(d), transposed(dv_columns)
    add_dv = wgmma.product_registers(dv_columns, q_block, config.element, wgmma.mn_major_steps(q_block))  # (64, dv) += P^T (64, q_block) dO
    add_dk = wgmma.product_registers(d, q_block, config.element, wgmma.mn_major_steps(q_block))  # (64, d) += dS^T (64, q_block) Q
    part_of_dq = wgmma.product_shared(  # (64, 64) = dS (64, kv_tile) K (kv_tile, 64)
        part_columns, kv_tile, config.element, wgmma.mn_major_steps(kv_tile), wgmma.mn_major_steps(kv_tile), a_transposed=True, b_transposed=True
    )
    ds_operand, k_part_operand, wait_dq = wgmma.operand(memory.ds_bytes), wgmma.operand(0, kv_panel_bytes), wgmma.wait(0, *[part_columns] * parts)
    row_operand, q_operand, dout_operand = wgmma.operand(), wgmma.operand(memory.q_bytes), wgmma.operand(memory.dout_bytes)
    q_mn_operand, dout_mn_operand = wgmma.operand(memory.q_bytes, q_panel_bytes), wgmma.operand(memory.dout_bytes, q_panel_bytes)
    wait_scores, wait_value_scores = wgmma.wait(1 if with_ds and not config.crowded else 0, q_block), wgmma.wait(0, q_block, q_block)
    wait_dv, wait_dk = wgmma.wait(int(with_dk), dv_columns), wgmma.wait(0, d)
    scale_dk = fragment.scale(d)
    select_dk, select_dv = fragment.select_rows(d), fragment.select_rows(dv_columns)
    to_16bit, dk_to_16bit, dv_to_16bit = (fragment.to_16bit(n, config.element) for n in (q_block, d, dv_columns))
    put_ds, put_part = fragment.store_matrix(q_block, kv_panel_bytes), fragment.store_plain(part_columns)
    dk_panel_bytes = 64 * wgmma.ROW_BYTES
    put_dk, put_dv = fragment.store_matrix(d, dk_panel_bytes), fragment.store_matrix(dv_columns, kv_panel_bytes)
    store_dk = tma.store_panels(4, 0, memory.loaded_qk_panels, dk_panel_bytes)
    store_dv = tma.store_panels(4, 0, memory.loaded_v_panels, kv_panel_bytes)
    advance, only = pipeline.advance(config.stages), pipeline.start(0)
    ds_slot = pipeline.slot(memory.ds_bytes)

    # What options do; each of these is compiled in only where there is one that needs it.
    options_of, cleans, may_hide_keys = config.options, config.cleans_queries, config.may_hide_keys
    with_options, drops, crowded = bool(options_of), options_of.dropout, config.crowded
    draws_ahead = config.draws_ahead
    of_scores = KeyScores(q_block, q_block, options_of, config.left, fma_exponentials=config.fma_exponentials)
    take_seat, fetch, no_words, keep_factor = of_scores.take_seat(), of_scores.fetch(), of_scores.no_words(), of_scores.keep_factor()
    no_mask_words = of_scores.no_mask_words()
    fetches, splits = of_scores.fetches, of_scores.splits
    draw, no_kept, drop = of_scores.draw() if drops else None, of_scores.no_kept(), of_scores.drop(config.element)
    scale_dv = fragment.scale(dv_columns)
    clean = unseen.queries(config, memory) if cleans else None
    clean_keys, seen_rows = unseen.keys(config, memory) if options_of.hides else (None, None)
    masked_keys, spoilt_dk, spoilt_dv = options_of.masked, fragment.spoilt(d), fragment.spoilt(dv_columns)
    is_packed = options_of.packed
    if is_packed:
        is_whole = packed.is_whole(64)
        address_of_dk, address_of_dv = (packed.address_of(options_of, name) if name in options_of.stored else None for name in ("dk", "dv"))
        put_dk_rows = packed.store_rows(config.head_dim, dk_panel_bytes, 0, memory.loaded_qk_panels)
        put_dv_rows = packed.store_rows(config.head_dim_v, kv_panel_bytes, 0, memory.loaded_v_panels)
    first_head = straight_line(int32, (int32, int32), lambda ops, kv_head, group: kv_head * group)

    # Index arithmetic.
    band = KeyBand(kv_tile, q_block, config.left, config.right)
    limits_of_keys, seen_keys = band.limits(), band.seen()

    def place_of_thread(ops, tid, warpgroup, n):
        """(consumer, thread in it, lane, first of its two keys, first column)."""
        consumer, thread = warpgroup - 1, tid & 127
        lane = thread & 31
        return [consumer, thread, lane, n * kv_tile + consumer * 64 + (thread >> 5) * 16 + (lane >> 2), (lane & 3) * 2]

    def places_of_consumer(ops, consumer, column, s_k, s_v, s_ds):
        """(its rows of K, of V, of dS, bytes to its columns)."""
        rows = consumer * (64 * wgmma.ROW_BYTES)
        return [s_k + rows, s_v + rows, s_ds + rows, column * 4]

    place_of_thread = straight_line(UniTuple(int32, 5), (int32,) * 3, place_of_thread)
    places_of_consumer = straight_line(UniTuple(int32, 4), (int32,) * 5, places_of_consumer)
    second_ds = straight_line(int32, (int32,), lambda ops, address: address + (kv_panel_bytes if by_rows else 0))
    second_k = straight_line(int32, (int32,), lambda ops, address: address + (0 if by_rows else kv_panel_bytes))
    second_dq = straight_line(int32, (int32,), lambda ops, address: address + memory.part_bytes)
    own_ds_stage = straight_line(int32, (int32,) * 2, lambda ops, address, consumer: address + consumer * memory.ds_bytes)
    own_rows = straight_line(int32, (int32,) * 2, lambda ops, address, consumer: address + consumer * (64 * wgmma.ROW_BYTES))
    own_key = straight_line(int32, (int32,) * 2, lambda ops, n, consumer: n * kv_tile + consumer * 64)
    key_of_thread = straight_line(int32, (int32,) * 3, lambda ops, n, w, thread: n * kv_tile + w * 64 + (thread >> 5) * 16 + ((thread & 31) >> 2))

    make_weights, fetch_mask_of = weighing(config, of_scores, memory, limits_of_keys)

    @inline
    def prepare(tid, warpgroup, n, batch, kv_head, group, onward, seqlen_k, bounds, places, scale_log2, options):
        s_k, s_v, s_q, s_dout, s_ds, s_dq = places
        w, thread, lane, key, column = place_of_thread(tid, warpgroup, n)
        own_k, own_v, own_ds, columns = places_of_consumer(w, column, s_k, s_v, s_ds)
        limits = limits_of_keys(key, column, bounds)
        seat = limits
        if with_options:
            seat = take_seat(key, column, batch, seqlen_k, bounds, options)
        return Consumer(
            w, thread, lane, limits, row_operand(own_k, only()), row_operand(own_v, only()), own_ds, s_ds, s_k, s_dq, columns, scale_log2,
            first_head(kv_head, group), group, onward, seat, options, (n, batch, seqlen_k, bounds) if masked_keys else limits,
        )  # fmt: skip

    @inline
    def gather_dq(place, ring, my):
        """dQ of a block from the dS of both consumers: a stage belongs to each."""
        pipeline.wait(ring.ds_full, place)
        first = part_of_dq(ds_operand(my.all_ds, place), k_part_operand(my.all_k, only()))
        if parts == 2:
            second = part_of_dq(ds_operand(second_ds(my.all_ds), place), k_part_operand(second_k(my.all_k), only()))
            first, second = wait_dq(first, second)
        else:
            first = wait_dq(first)
        pipeline.release(ring.ds_empty, place, my.lane)
        send(first, DQ_EMPTY, my.dq, DQ_FULL, my)
        if parts == 2:
            send(second, DQ_EMPTY + 1, second_dq(my.dq), DQ_FULL + 1, my)

    @inline
    def send(part, empty, staged, full, my):
        """Stage a part of dQ for the warp that sends it away."""
        warp.barrier_sync(empty, 160)
        put_part(part, staged, my.thread)
        tma.fence_async()
        warp.barrier_arrive(full, 160)

    def make_step(masked):
        weights, gradients = make_weights(masked)
        cleans_here = cleans if masked else config.cleans_plain_queries

        @inline
        def step(carried, dk, dv, place, m, member, number, ring, sums, my):
            """A block of queries."""
            pipeline.wait(ring.q_full, place)
            if cleans_here:
                clean(place, ring, my.w, my.thread, my.lane)
            s = scores(my.k, q_operand(ring.q, place))
            pipeline.wait(ring.dout_full, place)
            if with_ds and not crowded:
                dp = value_scores(my.v, dout_operand(ring.dout, place))
            head = plus(my.first_head, member)
            words = fetch(my.seat, m, head, my.options) if fetches else no_words()
            mask_words = fetch_mask_of(m, head, my) if masked and masked_keys else no_mask_words()
            kept = no_kept()
            if draws_ahead:
                kept = carried
            elif drops:
                kept = draw(my.seat, m, head, my.options)
            p, w = weights(wait_scores(s), words, mask_words, place, m, head, ring, my)
            if splits:
                p16 = to_16bit(p)
            if with_ds and crowded:
                dp = value_scores(my.v, dout_operand(ring.dout, place))
            if with_ds:
                dp, w = wait_value_scores(dp, w)
            if not splits:
                p16 = to_16bit(w)
            if drops:
                p16 = drop(p16, kept)
            if with_dv:
                dv = add_dv(dv, p16, dout_mn_operand(ring.dout, place))
            if with_ds:
                ds16 = to_16bit(gradients(w, dp, kept, place, m, ring, my))
            if with_dq:
                pipeline.wait(ring.ds_empty, pipeline.turned(place))
                put_ds(ds16, ds_slot(my.ds, place), my.thread)
                tma.fence_async()
                cuda.syncwarp()
                pipeline.release(ring.ds_full, place, my.lane)
            if with_dk:
                dk = add_dk(dk, ds16, q_mn_operand(ring.q, place))
            if draws_ahead:  # of the next block, while the products are
                next_m, next_member = next_of_walk(m, member, my.group, my.onward)
                carried = draw(my.seat, next_m, plus(my.first_head, next_member), my.options)
            if with_dv:
                dv = wait_dv(dv)
            pipeline.release(ring.dout_empty, place, my.lane)
            if with_dk:
                dk = wait_dk(dk)
            pipeline.release(ring.q_empty, place, my.lane)
            if with_dq and place[0] == my.w:
                gather_dq(place, ring, my)
            return carried, dk, dv, advance(place)

        return step

    @inline
    def enter(dk, dv, place, m, member, number, ring, sums, my):
        """Nothing is under way."""
        if draws_ahead:
            return draw(my.seat, m, plus(my.first_head, member), my.options), dk, dv, place
        return zero(), dk, dv, place

    @inline
    def finish(carried, dk, dv, place, ring, my):
        return dk, dv, place

    @inline
    def leave(dk, dv, n, bounds, kv_head, batch, dk_map, dv_map, s_k, s_v, k_empty, v_empty, scale_of_dk, first_k, stored, my):
        """dV leaves through this consumer's rows of V, dK through its stage of dS, which it has read for the last time.

        So K can be loaded meanwhile. The other consumer cannot write to that stage before V is loaded, after all of this.
        """
        pipeline.release(k_empty, only(), my.lane)
        warp.barrier_sync(plus(my.w, OWN), 128)
        if may_hide_keys:  # NaN among the queries stays out of keys that none of them sees
            key = key_of_thread(n, my.w, my.thread)
            seen = seen_keys(key, bounds)
            if masked_keys and warp.ballot(spoilt_dk(dk) | spoilt_dv(dv)) != 0:
                seen = seen_rows(key, my.lane, batch, kv_head, my.group, bounds, my.options)
            dk, dv = select_dk(dk, seen), select_dv(dv, seen)
        if drops:
            dv = scale_dv(dv, keep_factor(my.options))
        if with_dv:
            put_dv(dv_to_16bit(dv), own_rows(s_v, my.w), my.thread)
        if with_dk:
            put_dk(dk_to_16bit(scale_dk(dk, scale_of_dk)), own_ds_stage(my.all_ds, my.w), my.thread)
        tma.fence_async()
        warp.barrier_sync(plus(my.w, OWN), 128)
        if is_packed:
            key = own_key(n, my.w)
            if is_whole(key, stored) == 0:
                if with_dv:
                    put_dv_rows(own_rows(s_v, my.w), my.thread, address_of_dv(plus(first_k, key), kv_head, my.options), minus(stored, key))
                if with_dk:
                    at = own_ds_stage(my.all_ds, my.w)
                    put_dk_rows(at, my.thread, address_of_dk(plus(first_k, key), kv_head, my.options), minus(stored, key))
                warp.barrier_sync(plus(my.w, OWN), 128)
            elif my.thread == 0:
                if with_dv:
                    store_dv(dv_map, own_rows(s_v, my.w), plus(first_k, key), kv_head, batch)
                if with_dk:
                    store_dk(dk_map, own_ds_stage(my.all_ds, my.w), plus(first_k, key), kv_head, batch)
                tma.wait_stores_read()
            if my.thread == 0:
                mbarrier.arrive(v_empty)
        elif my.thread == 0:
            key = own_key(n, my.w)
            if with_dv:
                store_dv(dv_map, own_rows(s_v, my.w), key, kv_head, batch)
            if with_dk:
                store_dk(dk_map, own_ds_stage(my.all_ds, my.w), key, kv_head, batch)
            tma.wait_stores_read()
            mbarrier.arrive(v_empty)

    steps = (enter, make_step(True), make_step(False), finish)
    return Work(prepare, fragment.zeros(d), fragment.zeros(dv_columns), *steps, leave, enters_with_a_step=False, clean_keys=clean_keys)
