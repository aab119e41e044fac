"""The forward kernel for Hopper: FlashAttention's Algorithm 1 over a pipeline of TMA loads and wgmma products.

A block is a producer warpgroup and two to four consumer warpgroups. The producer streams K and V blocks, right to
left, through a ring in shared memory. Each consumer owns 64 query rows: it computes S = Q K^T, updates the running
maximum m and sum l of its rows, and adds P V to its accumulator. The product P V of one block runs on the tensor cores
while the exponentials of the next are computed (overlap within a warpgroup), and named barriers let the warpgroups
take turns at the tensor cores (ping-pong). Blocks are persistent: the next tile's Q and K are under way while the
present one ends.

Numba sees few statements: index arithmetic and what works on fragments are straight-line bodies (`numbaflash.ptx.straight`)
and intrinsics, in 32 bits, which in the loops stay in uniform registers. It also keeps the first call of a process short.
"""

from __future__ import annotations

import math
from collections import namedtuple
from functools import reduce

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.types import UniTuple, float32, int32, uint64, void

from ...ptx import bulk, fragment, mbarrier, pipeline, shared, tma, warp, wgmma
from ...ptx.index import following, minus, plus, preceding, warp_of, warpgroup_of, within_warp, zero
from ...ptx.straight import straight_line
from ...toolchain import KernelSource
from ..bands import BOUNDS, Band
from ..schedule import heads_of, tile_of_turn, tile_order
from . import packed, tickets, unseen
from .config import INSPECTORS, PLACE_BYTES, TILES_POSTED, ForwardConfig, SharedMemory
from .scores import Scores, block_of, entry_at, is_partial, next_entry, option_types

inline = cuda.jit(device=True, inline="always")

LN2 = 0.6931471805599453

# Named barriers; 0 is the whole block's.
TURN = 1  # of the first consumer; one a consumer
STAGING = 5  # of the first consumer; one a consumer

Ring = namedtuple("Ring", "k v k_full k_empty v_full v_empty")
"""Addresses of the first stages of K and V, and of their barriers."""

Consumer = namedtuple("Consumer", "q limits lane turn next_turn scratch scale_log2 seat options spot")
"""What a step of the main loop needs beside its state: the descriptor of the warpgroup's Q, the keys that the thread's rows see, ... Where blocks
come from a list, ``spot`` is (row, batch, head, bounds), from which what is hidden in one is found anew."""

NO_LSE = np.uint64(0)


def build(config: ForwardConfig) -> KernelSource:
    """The forward kernel of one configuration."""
    kv_block, stages, consumers, q_stages = config.kv_block, config.stages, config.consumers, config.q_stages
    d, dv, pack = config.padded_head_dim, config.padded_head_dim_v, config.pack
    has_left, has_right = config.left, config.right
    out_in_q, pingpong, rescale_first, negative_scale = config.out_in_q, config.pingpong, config.rescale_first, config.negative_scale
    held = config.hold > 0
    memory = SharedMemory.of(config)
    out_panels, v_panels = memory.out_panels, memory.v_panels
    rows_panel_bytes, kv_panel_bytes = memory.rows_panel_bytes, memory.kv_panel_bytes
    options_of, inspected = config.options, config.inspected
    band = Band(config.q_tile, kv_block, pack, has_left, has_right, padded=options_of.seqlens_q is not None or options_of.packed)

    # Instructions of exactly these tile shapes.
    scores = wgmma.product_shared(  # (64, kv_block) = Q (64, d) K^T (d, kv_block)
        kv_block, d, config.element, wgmma.k_major_steps(d, rows_panel_bytes), wgmma.k_major_steps(d, kv_panel_bytes)
    )
    add_values = wgmma.product_registers(dv, kv_block, config.element, wgmma.mn_major_steps(kv_block))  # (64, dv) += P (64, kv_block) V
    q_operand, k_operand = wgmma.operand(memory.q_bytes), wgmma.operand(memory.k_bytes)
    v_operand = wgmma.operand(memory.v_bytes, kv_panel_bytes)
    wait_scores, wait_scores_only = wgmma.wait(0, kv_block), wgmma.wait(1, kv_block)
    wait_out, wait_out_and_p = wgmma.wait(0, dv), wgmma.wait(0, dv, kv_block)
    zero_out, rescale, normalise = fragment.zeros(dv), fragment.scale_rows(dv), fragment.normalise_rows(dv)
    bounded, falls = config.options.bounded, config.options.falls
    if bounded:
        softmax = fragment.bounded_softmax(kv_block, config.hold, config.fma_exponentials)
    else:
        softmax = fragment.online_softmax(kv_block, config.hold, options_of.lowest_scores, falls)
    negate = fragment.negate(kv_block)
    mask_border, mask_first = fragment.mask_band(kv_block, has_left, has_right), fragment.mask_band(kv_block, has_left, True)
    p_to_16bit, out_to_16bit = fragment.to_16bit(kv_block, config.element), fragment.to_16bit(dv, config.element)
    start_statistics, finish_statistics, hold_back = fragment.start_statistics, fragment.finish_statistics, fragment.hold_back
    load_q = tma.load_panels(5, memory.qk_panels, rows_panel_bytes)
    load_k, load_v = (tma.load_panels(4, panels, kv_panel_bytes, 1 if options_of.packed else kv_block) for panels in (memory.qk_panels, v_panels))
    start, start_producer, advance, q_advance = pipeline.start(0), pipeline.start(1), pipeline.advance(stages), pipeline.advance(q_stages)
    fewer_registers, more_registers = warp.decrease_registers(config.registers[0]), warp.increase_registers(config.registers[1])

    # What options do; each of these is compiled in only where there is one that needs it.
    with_options, reads, changes, drops = bool(options_of), bool(options_of.bias), options_of.changes, options_of.dropout
    listed = options_of.masked  # a tile steps through the blocks of its list, not through a range of them
    lengths, seated = options_of.lengths, options_of.reads or changes or drops
    of_scores = Scores(kv_block, options_of)
    bounds_of_entry, take_seat, finish = of_scores.bounds_of_entry(has_right), of_scores.take_seat(pack), of_scores.finish(pack)
    fetch, fetch_first, change, drop = of_scores.fetch(False), of_scores.fetch(True), of_scores.change(), of_scores.drop()
    draw, draws_behind = of_scores.draw() if drops else None, config.draws_behind
    start_at_base, fall_to = of_scores.start() if bounded else None, of_scores.fall_to() if falls else None
    no_words = straight_line(of_scores.words, (), lambda ops: [ops.integer(0)] * len(of_scores.words))
    if listed:
        list_at, hide, no_mask_words = of_scores.list_at(), of_scores.hide(pack), of_scores.no_mask_words()
        fetch_mask, limits_anew = of_scores.fetch_mask(pack), band.limits_of_thread()
    inspect = unseen.build(config) if inspected else None
    inspected_at_ends = inspected and not config.inspected_everywhere
    is_packed = options_of.packed
    if is_packed:
        seek = packed.seek(packed.Sequences(options_of, "q", config.q_tile // pack, has_right))
        counter_of, order_of = tickets.counter_of(options_of), tickets.order_of(options_of)
        init_posted = mbarrier.init_ring(TILES_POSTED, 1)
        init_read = mbarrier.init_ring(TILES_POSTED, 4 * consumers + INSPECTORS)
        write_packed_lse, is_whole = packed.write_lse(options_of, pack), packed.is_whole(64 // pack)
        address_of_out = packed.address_of(options_of, "out", pack)

    # A ring's barriers stand together, Q's consumer by consumer.
    barriers = [memory.barriers + 8 * n for n in (0, q_stages * consumers, 2 * q_stages * consumers)]
    barriers += [barriers[2] + 8 * stages * n for n in (1, 2, 3, 4 if inspected else 2)]  # the last one: V may be read by consumers
    addresses = shared.addresses(memory.q, memory.k, memory.v, memory.out, *barriers, memory.scratch)
    places = shared.addresses(*(memory.places + n for n in (0, TILES_POSTED * PLACE_BYTES, TILES_POSTED * (PLACE_BYTES + 8))))
    init_q_full, init_q_empty = mbarrier.init_ring(q_stages * consumers, 1), mbarrier.init_ring(q_stages * consumers, 1 if out_in_q else 4)
    init_seen = mbarrier.init_ring(stages, INSPECTORS)
    init_full, init_empty = mbarrier.init_ring(stages, 1), mbarrier.init_ring(stages, 4 * consumers)  # one arrival a consumer's warp releases a stage
    # Where consumers do not wait for inspectors, the producer does: neither may be a round ahead of the other.
    init_v_empty = mbarrier.init_ring(stages, 4 * consumers + (INSPECTORS if inspected_at_ends else 0))

    # Index arithmetic.
    blocks_of_tile, blocks_of_warpgroup, limits_of_rows = band.of_tile(), band.of_warpgroup(), band.limits()

    def q_ring_of(ops, consumer, s_q, full, empty):
        return [s_q + consumer * memory.q_stride, full + consumer * (8 * q_stages), empty + consumer * (8 * q_stages)]

    def first_query_of(ops, q_block, consumer, first_q):
        query = (q_block * config.q_tile + consumer * 64) // pack
        return first_q + query if is_packed else query

    def keys_of(ops, block, first_k):
        """A coordinate of the loads: a block, or the key at which it begins."""
        return first_k + block * kv_block if is_packed else block

    def place_of_thread(ops, tid, warpgroup):
        """(consumer, thread in it, lane, first of its two rows in the tile, first column, its turn, the next one)."""
        consumer, thread = warpgroup - 1, tid & 127
        lane = thread & 31
        row = consumer * 64 + (thread >> 5) * 16 + (lane >> 2)
        return [consumer, thread, lane, row, (lane & 3) * 2, TURN + consumer, TURN + ops.select(warpgroup == consumers, ops.integer(0), warpgroup)]

    def write_lse(ops, lse, q_block, row, lane, batch, head, heads, bounds, statistics, scale_log2):
        for r, m, l in ((0, statistics[0], statistics[2]), (8, statistics[1], statistics[3])):
            packed_row = q_block * config.q_tile + row + r
            query, seqlen_q = packed_row // pack, bounds[0]
            head_row = (ops.wide(batch) * ops.wide(heads) + ops.wide(head)) * pack + ops.wide(packed_row % pack)
            value = m if options_of else ops.select(l == 0.0, ops.constant("float32", -math.inf), (m * scale_log2 + ops.log2(l)) * LN2)
            ops.store_at(lse + (head_row * ops.wide(seqlen_q) + ops.wide(query)) * 4, value, (query < seqlen_q) & ((lane & 3) == 0))

    out_of = straight_line(int32, (int32,) * 2, lambda ops, consumer, s_out: s_out + consumer * memory.out_stride)
    staging_of = straight_line(int32, (int32,), lambda ops, consumer: consumer + STAGING)
    row_of = straight_line(int32, (int32,) * 2, lambda ops, q_block, row: q_block * config.q_tile + row)
    q_ring_of = straight_line(UniTuple(int32, 3), (int32,) * 4, q_ring_of)
    first_query_of, keys_of = straight_line(int32, (int32,) * 3, first_query_of), straight_line(int32, (int32,) * 2, keys_of)
    place_of_thread = straight_line(UniTuple(int32, 7), (int32,) * 2, place_of_thread)
    write_lse = straight_line(void, (uint64, *(int32,) * 6, BOUNDS, fragment.STATISTICS, float32), write_lse)

    def make_kv_step(masked):
        @inline
        def kv_step(acc, p16, statistics, place, j, partial, ring, my):
            """S of block j, while P V of the block before it is added to the accumulator. ``partial`` is that of its entry, where there are lists."""
            v_place = place
            place = advance(place)
            if drops and not draws_behind:  # while another warpgroup has its turn, and before the scores take registers
                bits = draw(my.seat, j, my.options)
            pipeline.wait(ring.k_full, place)
            if pingpong:
                warp.barrier_sync(my.turn, 256)
            s = scores(my.q, k_operand(ring.k, place))
            if drops and draws_behind:
                bits = draw(my.seat, j, my.options)
            if rescale_first and not bounded:
                acc = rescale(acc, statistics)
            pipeline.wait(ring.v_full, v_place)
            acc = add_values(acc, p16, v_operand(ring.v, v_place))
            if pingpong:
                warp.barrier_arrive(my.next_turn, 256)
            if reads:
                words = fetch(my.seat, j, my.options)
            if listed:
                mask_words = no_mask_words()
                if partial != 0:
                    row, batch, head, bounds = my.spot
                    mask_words = fetch_mask(row, my.lane, j, batch, head, bounds[0], my.options)
            s = wait_scores_only(s)
            pipeline.release(ring.k_empty, place, my.lane)
            if negative_scale:
                s = negate(s)
            if changes:
                s = change(s, words if reads else no_words(), my.seat, j, my.options)
            if masked:
                s = mask_border(s, j, my.limits)
            if listed and partial != 0:
                row, batch, head, bounds = my.spot
                s = mask_first(s, j, limits_anew(row, my.lane, bounds))
                s = hide(s, mask_words, row, my.lane, j, batch, head, bounds[0], bounds[1], my.options)
            if falls:
                p, statistics, sums = softmax(s, statistics, my.scale_log2, fall_to(my.seat, j, my.options))
            else:
                p, statistics, sums = softmax(s, statistics, my.scale_log2)
            if held:
                hold_back(my.scratch, sums)
            acc, p = wait_out_and_p(acc, p)
            pipeline.release(ring.v_empty, v_place, my.lane)
            if not rescale_first and not bounded:
                acc = rescale(acc, statistics)
            p16 = p_to_16bit(p)
            if drops:
                p16 = drop(p16, bits, my.options)
            return acc, p16, statistics, place

        return kv_step

    masked_kv_step, kv_step = make_kv_step(True), make_kv_step(False)

    @inline
    def pass_over(j, stop, silent, place, ring, turn, next_turn, lane):
        """Release blocks j to stop, which this warpgroup's rows do not see, and cede its turns (none at block ``silent``)."""
        while j >= stop:
            # Its data must have come: a release, and the next wait, must not be taken for those of the block before or after.
            pipeline.wait(ring.k_full, place)
            pipeline.release(ring.k_empty, place, lane)
            pipeline.wait(ring.v_full, place)
            pipeline.release(ring.v_empty, place, lane)
            if pingpong and j != silent:
                warp.barrier_sync(turn, 256)
                warp.barrier_arrive(next_turn, 256)
            place = advance(place)
            j = preceding(j)
        return place

    def make_store(part):
        panels = min(out_panels, v_panels - part * out_panels)
        stage_part = fragment.store_matrix(dv, rows_panel_bytes, part * out_panels, panels)
        store_part = tma.store_panels(5, part * out_panels, panels, rows_panel_bytes)
        store_rows = packed.store_rows(config.head_dim_v, rows_panel_bytes, part * out_panels, panels, pack)

        @inline
        def stage(out16, s_out, thread, staging_barrier):
            """Panels of the output to shared memory."""
            if not out_in_q:  # the last store from here must have read
                if thread == 0:
                    tma.wait_stores_read()
                warp.barrier_sync(staging_barrier, 128)
            stage_part(out16, s_out, thread)
            tma.fence_async()
            warp.barrier_sync(staging_barrier, 128)

        @inline
        def store(out16, s_out, thread, staging_barrier, out_map, query, head, batch):
            """Panels of the output, through shared memory, by one TMA store each."""
            stage(out16, s_out, thread, staging_barrier)
            if thread == 0:
                store_part(out_map, s_out, 0, query, head, batch)

        @inline
        def store_packed(out16, s_out, thread, staging_barrier, out_map, query, head, first_q, stored, options):
            """The same of a sequence; the rows one by one where it ends among them."""
            stage(out16, s_out, thread, staging_barrier)
            if is_whole(query, stored) != 0:
                if thread == 0:
                    store_part(out_map, s_out, 0, plus(first_q, query), head, 0)
            else:
                store_rows(s_out, thread, address_of_out(plus(first_q, query), head, options), minus(stored, query))

        return store_packed if is_packed else store

    def in_turn(first, second):
        @inline
        def both(out16, s_out, thread, staging_barrier, out_map, query, head, batch):
            first(out16, s_out, thread, staging_barrier, out_map, query, head, batch)
            second(out16, s_out, thread, staging_barrier, out_map, query, head, batch)

        @inline
        def both_packed(out16, s_out, thread, staging_barrier, out_map, query, head, first_q, stored, options):
            first(out16, s_out, thread, staging_barrier, out_map, query, head, first_q, stored, options)
            second(out16, s_out, thread, staging_barrier, out_map, query, head, first_q, stored, options)

        return both_packed if is_packed else both

    store_out = reduce(in_turn, [make_store(part) for part in range(config.out_parts)])

    # The place of a tile is posted by the producer, where it is drawn by ticket; a column of -1 is that there are no more.
    @inline
    def post(turn, sequence, q_block, first_q, stored, column, bounds):
        slots, posted, has_read = places()
        place = tickets.place_of_turn(turn)
        pipeline.wait(has_read, pipeline.turned(place))
        packed.post(tickets.slot_of(slots, place), (sequence, q_block, first_q, stored, column), bounds)
        mbarrier.arrive(tickets.barrier_of(posted, place))

    @inline
    def receive(turn, lane, bounds):
        slots, posted, has_read = places()
        place = tickets.place_of_turn(turn)
        pipeline.wait(posted, place)
        spot, found = packed.read(tickets.slot_of(slots, place), bounds)
        warp.sync()
        pipeline.release(has_read, place, lane)
        return spot, found

    def kernel(
        q_map, k_map, v_map, out_map, lse, seqlen_q, seqlen_k, offset, left, right, heads, group, q_blocks, columns, section, tiles,
        scale_log2, *options
    ):  # fmt: skip
        tid = cuda.threadIdx.x
        warpgroup = warp.shuffle_index(warpgroup_of(tid), 0)
        bounds = (seqlen_q, seqlen_k, offset, left, right)
        s_q, s_k, s_v, s_out, q_full, q_empty, k_full, k_empty, v_full, v_empty, v_seen, scratch = addresses()
        ring = Ring(s_k, s_v, k_full, k_empty, v_full if inspected_at_ends else v_seen, v_empty)
        if tid == 0:
            init_q_full(q_full)
            init_q_empty(q_empty)
            init_full(k_full)
            init_empty(k_empty)
            init_full(v_full)
            init_v_empty(v_empty)
            if inspected:
                init_seen(v_seen)
            if is_packed:
                _, posted, has_read = places()
                init_posted(posted)
                init_read(has_read)
            mbarrier.fence_init()
        first_q = zero()
        first_k = zero()
        column = zero()
        cuda.syncthreads()
        block, blocks = cuda.blockIdx.x, cuda.gridDim.x
        turn = zero()
        tile = block
        q_place = start()
        if warpgroup == 0:  # ------------------------------------------------------------------------ producer
            fewer_registers()
            if tid < 32 and warp.elect() != 0:
                tma.prefetch_map(k_map)
                tma.prefetch_map(q_map)
                tma.prefetch_map(v_map)
                q_place = start_producer()
                place = start_producer()
                while tile < tiles:
                    q_block, column = tile_order(tile, q_blocks, columns, section)
                    batch, head, kv_head = heads_of(column, heads, group)
                    if is_packed:
                        upcoming_tile = bulk.take_ticket(counter_of(options))
                        spot, bounds = seek(q_block, order_of(options), (seqlen_q, seqlen_k, offset, left, right), options)
                        sequence, q_block, first_q, stored, first_k = spot
                        post(turn, sequence, q_block, first_q, stored, column, bounds)
                        batch = zero()  # the sequences lie along one axis
                    elif lengths:
                        bounds = bounds_of_entry(batch, (seqlen_q, seqlen_k, offset, left, right), options)
                    first, end = blocks_of_tile(q_block, bounds)
                    j = preceding(end)
                    if listed:  # two entries are read ahead
                        first = zero()
                        at = list_at(q_block, batch, head, options)
                        entry, at = entry_at(at), next_entry(at)
                        upcoming = entry_at(at)
                        j = block_of(entry)
                    # In the order of use: the first K, Q, then the K of each next block before the V of the present one.
                    if j >= first:
                        pipeline.wait(k_empty, place)
                        load_k(s_k, place, k_map, k_full, keys_of(j, first_k), kv_head, batch)
                    for consumer in range(consumers):
                        s_mine, full, empty = q_ring_of(consumer, s_q, q_full, q_empty)
                        pipeline.wait(empty, q_place)
                        load_q(s_mine, q_place, q_map, full, 0, first_query_of(q_block, consumer, first_q), head, batch)
                    q_place = q_advance(q_place)
                    while j >= first:
                        v_place = place
                        place = advance(place)
                        if listed:
                            following_j = block_of(upcoming)
                            at = next_entry(at)
                            if following_j >= first:
                                upcoming = entry_at(at)
                                pipeline.wait(k_empty, place)
                                load_k(s_k, place, k_map, k_full, keys_of(following_j, first_k), kv_head, batch)
                        elif j > first:
                            pipeline.wait(k_empty, place)
                            load_k(s_k, place, k_map, k_full, keys_of(preceding(j), first_k), kv_head, batch)
                        pipeline.wait(v_empty, v_place)
                        load_v(s_v, v_place, v_map, v_full, keys_of(j, first_k), kv_head, batch)
                        j = following_j if listed else preceding(j)
                    turn = following(turn)
                    tile = plus(blocks, upcoming_tile) if is_packed else tile_of_turn(turn, block, blocks)
                if is_packed:
                    post(turn, zero(), zero(), zero(), zero(), preceding(zero()), bounds)
            if inspected and tid >= 32:
                inspector, lane = preceding(warp_of(tid)), within_warp(tid)
                place = start()
                if is_packed:
                    spot, bounds = receive(turn, lane, (seqlen_q, seqlen_k, offset, left, right))
                    _, q_block, _, _, column = spot
                while column >= 0 if is_packed else tile < tiles:
                    if not is_packed:
                        q_block, column = tile_order(tile, q_blocks, columns, section)
                    batch, head, kv_head = heads_of(column, heads, group)
                    if lengths and not is_packed:
                        bounds = bounds_of_entry(batch, (seqlen_q, seqlen_k, offset, left, right), options)
                    first, end = blocks_of_tile(q_block, bounds)
                    j = preceding(end)
                    if listed:
                        first = zero()
                        at = list_at(q_block, batch, head, options)
                        entry = warp.shuffle_index(entry_at(at), 0)
                        j = block_of(entry)
                    while j >= first:
                        if listed:
                            at = next_entry(at)
                            upcoming = entry_at(at)
                        pipeline.wait(v_full, place)
                        inspect(s_v, place, j, is_partial(entry) if listed else j, inspector, lane, q_block, batch, head, bounds, options)
                        pipeline.release(v_seen, place, lane)
                        if inspected_at_ends:
                            pipeline.release(v_empty, place, lane)
                        place = advance(place)
                        if listed:
                            entry = warp.shuffle_index(upcoming, 0)
                            j = block_of(entry)
                        else:
                            j = preceding(j)
                    turn = following(turn)
                    if is_packed:
                        spot, bounds = receive(turn, lane, bounds)
                        _, q_block, _, _, column = spot
                    else:
                        tile = tile_of_turn(turn, block, blocks)
        else:  # ------------------------------------------------------------------------------------ consumers
            more_registers()
            w, thread, lane, my_row, my_column, my_turn, next_turn = place_of_thread(tid, warpgroup)
            s_q, q_full, q_empty = q_ring_of(w, s_q, q_full, q_empty)
            s_out = out_of(w, s_out)
            staging_barrier = staging_of(w)
            if pingpong and w == consumers - 1:
                warp.barrier_arrive(TURN, 256)
            place = start()
            if is_packed:
                where, bounds = receive(turn, lane, (seqlen_q, seqlen_k, offset, left, right))
                sequence, q_block, first_q, stored, column = where
            while column >= 0 if is_packed else tile < tiles:
                if not is_packed:
                    q_block, column = tile_order(tile, q_blocks, columns, section)
                if lengths and not is_packed:
                    batch, head, _ = heads_of(column, heads, group)
                    bounds = bounds_of_entry(batch, (seqlen_q, seqlen_k, offset, left, right), options)
                # Blocks from right_border on and before left_border are seen only in part.
                first, end, my_first, my_end, left_border, right_border, query = blocks_of_warpgroup(q_block, w, bounds)
                limits = limits_of_rows(row_of(q_block, my_row), my_column, bounds)
                seat = limits
                if seated:
                    batch, head, _ = heads_of(column, heads, group)
                    if is_packed:
                        batch = sequence
                    seat = take_seat(row_of(q_block, my_row), my_column, batch, head, bounds[0] if is_packed else seqlen_q, bounds, options)
                spot = limits
                if listed:
                    batch, head, _ = heads_of(column, heads, group)
                    spot = (row_of(q_block, my_row), batch, head, bounds)
                my = Consumer(q_operand(s_q, q_place), limits, lane, my_turn, next_turn, scratch, scale_log2, seat, options, spot)
                statistics = start_at_base(options) if bounded else start_statistics()
                acc = zero_out()
                if listed:
                    at = list_at(q_block, batch, head, options)
                    entry = warp.shuffle_index(entry_at(at), 0)
                    my_first = zero()
                    my_end = following(block_of(entry))
                else:
                    place = pass_over(preceding(end), my_end, first, place, ring, my_turn, next_turn, lane)
                pipeline.wait(q_full, q_place)
                if my_end > my_first:
                    j = preceding(my_end)

                    # The first block: nothing to overlap with. It may reach past the last key.
                    if listed:
                        at = next_entry(at)
                        upcoming = entry_at(at)
                    pipeline.wait(k_full, place)
                    s = scores(my.q, k_operand(s_k, place))
                    if reads:
                        words = fetch_first(seat, j, options)
                    if listed:
                        mask_words = no_mask_words()
                        if is_partial(entry) != 0:
                            mask_words = fetch_mask(spot[0], lane, j, batch, head, bounds[0], options)
                    if drops:
                        bits = draw(seat, j, options)
                    s = wait_scores(s)
                    pipeline.release(k_empty, place, lane)
                    if negative_scale:
                        s = negate(s)
                    if changes:
                        s = change(s, words if reads else no_words(), seat, j, options)
                    if listed:
                        if is_partial(entry) != 0:
                            s = mask_first(s, j, limits_anew(spot[0], lane, bounds))
                            s = hide(s, mask_words, spot[0], lane, j, batch, head, bounds[0], bounds[1], options)
                    else:
                        s = mask_first(s, j, limits)
                    if falls:
                        p, statistics, _ = softmax(s, statistics, scale_log2, fall_to(seat, j, options))
                    else:
                        p, statistics, _ = softmax(s, statistics, scale_log2)
                    p16 = p_to_16bit(p)
                    if drops:
                        p16 = drop(p16, bits, options)
                    if inspected_at_ends:
                        pipeline.wait(ring.v_full, place)
                        pipeline.wait(v_seen, place)

                    if listed:
                        entry = warp.shuffle_index(upcoming, 0)
                        while entry >= 0:
                            at = next_entry(at)
                            upcoming = entry_at(at)
                            acc, p16, statistics, place = kv_step(acc, p16, statistics, place, block_of(entry), is_partial(entry), ring, my)
                            entry = warp.shuffle_index(upcoming, 0)
                    else:
                        j = preceding(j)
                        if has_right:
                            while j >= right_border:
                                acc, p16, statistics, place = masked_kv_step(acc, p16, statistics, place, j, zero(), ring, my)
                                j = preceding(j)
                        while j >= left_border:
                            acc, p16, statistics, place = kv_step(acc, p16, statistics, place, j, zero(), ring, my)
                            j = preceding(j)
                        if has_left:
                            while j >= my_first:
                                acc, p16, statistics, place = masked_kv_step(acc, p16, statistics, place, j, zero(), ring, my)
                                j = preceding(j)

                    # The last P V. Q is free.
                    if not out_in_q:
                        pipeline.release(q_empty, q_place, lane)
                    if rescale_first and not bounded:
                        acc = rescale(acc, statistics)
                    pipeline.wait(ring.v_full, place)
                    if inspected_at_ends and has_left:
                        pipeline.wait(v_seen, place)
                    acc = wait_out(add_values(acc, p16, v_operand(s_v, place)))
                    pipeline.release(v_empty, place, lane)
                    place = advance(place)
                elif not out_in_q:
                    pipeline.release(q_empty, q_place, lane)
                if not listed:
                    place = pass_over(preceding(my_first), first, -1, place, ring, my_turn, next_turn, lane)

                if with_options:
                    _, head, _ = heads_of(column, heads, group)
                    statistics = finish(statistics, row_of(q_block, my_row), head, bounds[0], scale_log2, options)
                else:
                    statistics = finish_statistics(statistics)
                batch, head, _ = heads_of(column, heads, group)
                if is_packed and lse != NO_LSE:
                    write_packed_lse(lse, row_of(q_block, my_row), lane, first_q, stored, head, statistics, options)
                elif lse != NO_LSE:
                    write_lse(lse, q_block, my_row, lane, batch, head, heads, (seqlen_q, seqlen_k, offset, left, right), statistics, scale_log2)
                out16 = out_to_16bit(normalise(acc, statistics))
                if is_packed:
                    store_out(out16, s_out, thread, staging_barrier, out_map, query, head, first_q, stored, options)
                    if out_in_q:  # who stores rows has read, too
                        warp.barrier_sync(staging_barrier, 128)
                else:
                    store_out(out16, s_out, thread, staging_barrier, out_map, query, head, batch)
                if out_in_q and thread == 0:
                    tma.wait_stores_read()
                    mbarrier.arrive(q_empty)
                q_place = q_advance(q_place)
                turn = following(turn)
                if is_packed:
                    where, bounds = receive(turn, lane, bounds)
                    sequence, q_block, first_q, stored, column = where
                else:
                    tile = tile_of_turn(turn, block, blocks)
            if thread == 0:
                tma.wait_stores_read()

    signature = types.void(*[types.uint64] * 5, *[types.int32] * 11, types.float32, types.Tuple(option_types(options_of)))
    return KernelSource(kernel, signature, threads=config.threads, fastmath=False, tensor_maps=(0, 1, 2, 3))
