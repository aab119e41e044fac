"""The backward kernel for Hopper: Algorithm 2 of FlashAttention-2, keys at rest and queries streaming by.

A block is a producer warpgroup and two consumer warpgroups, each of which owns 64 keys of the block's tile: its rows of
dK and dV are accumulated in registers over all queries that see them, of all query heads that share the keys. Scores are
computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are register operands of dV += P^T dO and
dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K, which sums over the keys of all consumers. Each consumer
computes a 64 x 64 part of dQ, and warps of the producer warpgroup add it to a float32 sum in global memory by bulk copies.

`passes` says what comes before and after.
"""

from __future__ import annotations

from collections import namedtuple

from numba import cuda
from numba.cuda import types
from numba.cuda.types import UniTuple, int32, uint64

from ....ptx import bulk, fragment, mbarrier, pipeline, shared, tma, warp, wgmma
from ....ptx.straight import straight_line
from ....toolchain import KernelSource
from ... import schedule
from ...bands import KeyBand
from ...schedule import heads_of, tile_of_turn
from .config import PART, BackwardConfig, SharedMemory

inline = cuda.jit(device=True, inline="always")

# Named barriers; 0 is the whole block's.
ALL = 1  # all consumers: dS is complete, K has been read
DQ_FULL = 2  # of the first consumer; one a consumer, with the warp that sends its part of dQ away
DQ_EMPTY = 5
STAGING = 8  # of the first consumer; one a consumer

Ring = namedtuple("Ring", "q dout shifts deltas q_full q_empty dout_full dout_empty")
"""Addresses of the first stages of Q, dO and what goes with their rows, and of their barriers."""

Consumer = namedtuple("Consumer", "w thread lane limits k v ds ds_read k_part dq part_ready part_free columns scale_log2")
"""What a step of the main loop needs beside its state: descriptors, addresses, and the queries that the thread's keys are seen by."""

zero = straight_line(int32, (), lambda ops: ops.integer(0))
following = straight_line(int32, (int32,), lambda ops, n: n + 1)
warpgroup_of = straight_line(int32, (int32,), lambda ops, thread: thread >> 7)
warp_of = straight_line(int32, (int32,), lambda ops, thread: thread >> 5)
flip = straight_line(int32, (int32,), lambda ops, stage: stage ^ 1)


def build(config: BackwardConfig) -> KernelSource:
    """The main kernel of one configuration."""
    q_block, kv_tile, stages, consumers = config.q_block, config.kv_tile, config.stages, config.consumers
    d, dv = config.padded_head_dim, config.padded_head_dim_v
    with_dq, with_dk, with_dv, with_ds, deterministic = config.with_dq, config.with_dk, config.with_dv, config.with_ds, config.deterministic
    memory = SharedMemory.of(config)
    q_panel_bytes, kv_panel_bytes = memory.q_panel_bytes, memory.kv_panel_bytes
    parts = q_block // PART * memory.qk_panels  # of dq in a step; one a consumer, or one in all
    by_rows = q_block > PART  # the parts are rows of dq, or columns
    band = KeyBand(kv_tile, q_block, config.left, config.right)

    # Instructions of exactly these tile shapes.
    def transposed(columns):  # (64 keys, q_block) = K or V (64, columns) times Q^T or dO^T
        return wgmma.product_shared(
            q_block, columns, config.element, wgmma.k_major_steps(columns, kv_panel_bytes), wgmma.k_major_steps(columns, q_panel_bytes)
        )

    scores, value_scores = transposed(d), transposed(dv)
    add_dv = wgmma.product_registers(dv, q_block, config.element, wgmma.mn_major_steps(q_block))  # (64, dv) += P^T (64, q_block) dO
    add_dk = wgmma.product_registers(d, q_block, config.element, wgmma.mn_major_steps(q_block))  # (64, d) += dS^T (64, q_block) Q
    part_of_dq = wgmma.product_shared(  # (64, 64) = dS (64, kv_tile) K (kv_tile, 64)
        PART, kv_tile, config.element, wgmma.mn_major_steps(kv_tile), wgmma.mn_major_steps(kv_tile), a_transposed=True, b_transposed=True
    )
    row_operand, k_part_operand = wgmma.operand(), wgmma.operand(0, kv_panel_bytes)
    q_operand, dout_operand = wgmma.operand(memory.q_bytes), wgmma.operand(memory.dout_bytes)
    q_mn_operand, dout_mn_operand = wgmma.operand(memory.q_bytes, q_panel_bytes), wgmma.operand(memory.dout_bytes, q_panel_bytes)
    wait_scores = wgmma.wait(1 if with_ds else 0, q_block)
    wait_value_scores = wgmma.wait(0, q_block, q_block)
    wait_dv_alone, wait_dk_alone = wgmma.wait(0, dv), wgmma.wait(0, d)
    wait_dq_dv, wait_dv_before_dk, wait_dq = wgmma.wait(1 if with_dk else 0, PART, dv), wgmma.wait(1, dv), wgmma.wait(1 if with_dk else 0, PART)
    zero_dk, zero_dv, scale_dk = fragment.zeros(d), fragment.zeros(dv), fragment.scale(d)
    probabilities, score_gradients = fragment.probabilities(q_block), fragment.score_gradients(q_block)
    mask = fragment.mask_band(q_block, True, config.left, 0.0)
    to_16bit, dk_to_16bit, dv_to_16bit = (fragment.to_16bit(n, config.element) for n in (q_block, d, dv))
    put_ds, put_part = fragment.store_matrix(q_block, kv_panel_bytes), fragment.store_plain(PART)
    put_dk, put_dv = fragment.store_matrix(d, kv_panel_bytes), fragment.store_matrix(dv, kv_panel_bytes)
    store_dk, store_dv = tma.store_panels(4, 0, memory.qk_panels, kv_panel_bytes), tma.store_panels(4, 0, memory.v_panels, kv_panel_bytes)
    load_k, load_v = tma.load_panels(4, memory.qk_panels, kv_panel_bytes), tma.load_panels(4, memory.v_panels, kv_panel_bytes)
    load_q, load_dout = tma.load_panels(4, memory.qk_panels, q_panel_bytes), tma.load_panels(4, memory.v_panels, q_panel_bytes)
    load_row, add_part = bulk.load(memory.row_bytes), bulk.add(memory.part_bytes)
    start, start_producer, advance, kv_advance = pipeline.start(0), pipeline.start(1), pipeline.advance(stages), pipeline.advance(1)
    fewer_registers, more_registers = warp.decrease_registers(config.registers[0]), warp.increase_registers(config.registers[1])

    barriers = [memory.barriers + 8 * n for n in (0, 1, *(2 + stages * n for n in range(4)))]
    addresses = shared.addresses(memory.k, memory.v, memory.q, memory.dout, memory.ds, memory.dq, memory.shifts, memory.deltas, *barriers)
    loads_of_kv = 2 if with_ds else 1
    init_kv_full, init_kv_empty = mbarrier.init_ring(1, loads_of_kv), mbarrier.init_ring(1, consumers)
    init_q_full, init_dout_full = mbarrier.init_ring(stages, 2), mbarrier.init_ring(stages, 2 if with_ds else 1)
    init_empty = mbarrier.init_ring(stages, 4 * consumers)

    # Index arithmetic.
    blocks_of_tile, limits_of_keys = band.of_tile(), band.limits()

    def order(ops, tile, kv_tiles, columns, section):
        """(tile of keys, kv head over the batch): the first keys, which most queries see under a causal band, first."""
        block, column = schedule.order(ops, tile, kv_tiles, columns, section)
        return [kv_tiles - 1 - block, column]

    def rows_at(ops, shifts, deltas, batch, head, heads, m, q_blocks):
        row = ((ops.wide(batch) * ops.wide(heads) + ops.wide(head)) * ops.wide(q_blocks) + ops.wide(m)) * memory.row_bytes
        return [shifts + row, deltas + row]

    def part_at(ops, sums, turns, part, batch, head, heads, m, q_blocks):
        number = ((ops.wide(batch) * ops.wide(heads) + ops.wide(head)) * ops.wide(q_blocks) + ops.wide(m)) * parts + ops.wide(part)
        return [sums + number * memory.part_bytes, turns + number * 4]

    def turn_of(ops, tile, m, bounds):
        """How many tiles of keys add to the same block of dq before this one: those of earlier keys that the block sees."""
        _, _, offset, left, _ = bounds
        first = ops.maximum((m * q_block + offset - left) // kv_tile, ops.integer(0)) if config.left else ops.integer(0)
        return tile - first

    def place_of_thread(ops, tid, warpgroup):
        """(consumer, thread in it, lane, first of its two keys in the tile, first column)."""
        consumer, thread = warpgroup - 1, tid & 127
        lane = thread & 31
        return [consumer, thread, lane, consumer * 64 + (thread >> 5) * 16 + (lane >> 2), (lane & 3) * 2]

    def places_of_consumer(ops, consumer, column, s_k, s_v, s_ds, s_dq):
        """(its rows of K, of V, of dS, the part of dS and of K that make its part of dQ, where that part is staged, bytes to its columns)."""
        part = ops.minimum(consumer, ops.integer(parts - 1))
        rows = consumer * (64 * wgmma.ROW_BYTES)
        ds_read, k_part = (s_ds + part * kv_panel_bytes, s_k) if by_rows else (s_ds, s_k + part * kv_panel_bytes)
        return [s_k + rows, s_v + rows, s_ds + rows, ds_read, k_part, s_dq + consumer * memory.part_bytes, column * 4]

    order = straight_line(UniTuple(int32, 2), (int32,) * 4, order)
    rows_at = straight_line(UniTuple(uint64, 2), (uint64, uint64, *(int32,) * 5), rows_at)
    part_at = straight_line(UniTuple(uint64, 2), (uint64, uint64, *(int32,) * 6), part_at)
    turn_of = straight_line(int32, (int32, int32, UniTuple(int32, 5)), turn_of)
    place_of_thread = straight_line(UniTuple(int32, 5), (int32,) * 2, place_of_thread)
    places_of_consumer = straight_line(UniTuple(int32, 7), (int32,) * 6, places_of_consumer)
    row_of = straight_line(int32, (int32,) * 2, lambda ops, m, first_query: m * q_block - first_query)
    key_of = straight_line(int32, (int32,) * 2, lambda ops, n, first_key: n * kv_tile - first_key)
    key_row_of = straight_line(int32, (int32,) * 2, lambda ops, n, row: n * kv_tile + row)
    own_key_of = straight_line(int32, (int32,) * 2, lambda ops, n, consumer: n * kv_tile + consumer * 64)
    head_of = straight_line(int32, (int32,) * 3, lambda ops, kv_head, group, member: kv_head * group + member)
    plus = straight_line(int32, (int32,) * 2, lambda ops, a, b: a + b)
    ds_at = straight_line(int32, (int32,) * 2, lambda ops, address, stage: address + stage * memory.ds_bytes)
    values_at = pipeline.slot(memory.row_bytes)

    def make_step(masked):
        @inline
        def step(dk, dv, place, ds_stage, m, ring, my):
            """A block of queries."""
            pipeline.wait(ring.q_full, place)
            s = scores(my.k, q_operand(ring.q, place))
            pipeline.wait(ring.dout_full, place)
            if with_ds:
                dp = value_scores(my.v, dout_operand(ring.dout, place))
            p = probabilities(wait_scores(s), plus(values_at(ring.shifts, place), my.columns), my.scale_log2)
            if masked:
                p = mask(p, m, my.limits)
            if with_ds:
                dp, p = wait_value_scores(dp, p)
            if with_dv:
                dv = add_dv(dv, to_16bit(p), dout_mn_operand(ring.dout, place))
            if with_ds:
                ds = score_gradients(p, dp, plus(values_at(ring.deltas, place), my.columns))
                if masked:
                    ds = mask(ds, m, my.limits)
                ds16 = to_16bit(ds)
            if with_dq:
                put_ds(ds16, ds_at(my.ds, ds_stage), my.thread)
                tma.fence_async()
                warp.barrier_sync(ALL, 128 * consumers)
                dq = part_of_dq(row_operand(ds_at(my.ds_read, ds_stage), place_zero()), my.k_part)
            if with_dk:
                dk = add_dk(dk, ds16, q_mn_operand(ring.q, place))
            if with_dq and with_dv:
                dq, dv = wait_dq_dv(dq, dv)
            elif with_dq:
                dq = wait_dq(dq)
            elif with_dv:
                dv = wait_dv_before_dk(dv) if with_dk else wait_dv_alone(dv)
            pipeline.release(ring.dout_empty, place, my.lane)
            if with_dq:
                if my.w < parts:
                    warp.barrier_sync(my.part_free, 160)
                    put_part(dq, my.dq, my.thread)
                    tma.fence_async()
                    warp.barrier_arrive(my.part_ready, 160)
            if with_dk:
                dk = wait_dk_alone(dk)
            pipeline.release(ring.q_empty, place, my.lane)
            return dk, dv, advance(place), flip(ds_stage)

        return step

    masked_step, plain_step = make_step(True), make_step(False)
    place_zero = pipeline.start(0)

    def kernel(
        q_map, k_map, v_map, dout_map, dk_map, dv_map, shifts, deltas, sums, turns,
        seqlen_q, seqlen_k, offset, left, right, first_query, first_key, heads, kv_heads, group, q_blocks, kv_tiles, columns, section, tiles,
        scale_log2, scale_of_dk,
    ):  # fmt: skip
        tid = cuda.threadIdx.x
        warpgroup = warp.shuffle_index(warpgroup_of(tid), 0)
        bounds = (seqlen_q, seqlen_k, offset, left, right)
        s_k, s_v, s_q, s_dout, s_ds, s_dq, s_shifts, s_deltas, kv_full, kv_empty, q_full, q_empty, dout_full, dout_empty = addresses()
        if tid == 0:
            init_kv_full(kv_full)
            init_kv_empty(kv_empty)
            init_q_full(q_full)
            init_empty(q_empty)
            init_dout_full(dout_full)
            init_empty(dout_empty)
            mbarrier.fence_init()
        cuda.syncthreads()
        block, blocks = cuda.blockIdx.x, cuda.gridDim.x
        turn = zero()
        tile = block
        if warpgroup == 0:
            fewer_registers()
            role = warp.shuffle_index(warp_of(tid), 0)
            if role == 0:  # ----------------------------------------------------------------------- loads
                if warp.elect() != 0:
                    tma.prefetch_map(k_map)
                    tma.prefetch_map(v_map)
                    tma.prefetch_map(q_map)
                    tma.prefetch_map(dout_map)
                    place = start_producer()
                    kv_place = start_producer()
                    while tile < tiles:
                        n, column = order(tile, kv_tiles, columns, section)
                        batch, kv_head, _ = heads_of(column, kv_heads, 1)
                        first, _, _, end = blocks_of_tile(n, bounds)
                        key = key_of(n, first_key)
                        pipeline.wait(kv_empty, kv_place)
                        load_k(s_k, place_zero(), k_map, kv_full, key, kv_head, batch)
                        if with_ds:
                            load_v(s_v, place_zero(), v_map, kv_full, key, kv_head, batch)
                        kv_place = kv_advance(kv_place)
                        member = zero()
                        while member < group:
                            head = head_of(kv_head, group, member)
                            m = first
                            while m < end:
                                shifts_at, deltas_at = rows_at(shifts, deltas, batch, head, heads, m, q_blocks)
                                row = row_of(m, first_query)
                                pipeline.wait(q_empty, place)
                                load_q(s_q, place, q_map, q_full, row, head, batch)
                                load_row(s_shifts, place, shifts_at, q_full)
                                pipeline.wait(dout_empty, place)
                                load_dout(s_dout, place, dout_map, dout_full, row, head, batch)
                                if with_ds:
                                    load_row(s_deltas, place, deltas_at, dout_full)
                                place = advance(place)
                                m = following(m)
                            member = following(member)
                        turn = following(turn)
                        tile = tile_of_turn(turn, block, blocks)
            elif with_dq and role <= parts:  # ------------------------------------------------------ parts of dQ leave
                part = preceding(role)
                ready, free = plus(part, DQ_FULL), plus(part, DQ_EMPTY)
                source = staged_part(s_dq, part)
                warp.barrier_arrive(free, 160)
                while tile < tiles:
                    n, column = order(tile, kv_tiles, columns, section)
                    batch, kv_head, _ = heads_of(column, kv_heads, 1)
                    first, _, _, end = blocks_of_tile(n, bounds)
                    member = zero()
                    while member < group:
                        head = head_of(kv_head, group, member)
                        m = first
                        while m < end:
                            target, counter = part_at(sums, turns, part, batch, head, heads, m, q_blocks)
                            warp.barrier_sync(ready, 160)
                            if warp.elect() != 0:
                                if deterministic:
                                    bulk.wait_turn(counter, turn_of(n, m, bounds))
                                add_part(target, source)
                                if deterministic:
                                    bulk.wait_done()
                                    bulk.end_turn(counter)
                                else:
                                    tma.wait_stores_read()
                            cuda.syncwarp()
                            warp.barrier_arrive(free, 160)
                            m = following(m)
                        member = following(member)
                    turn = following(turn)
                    tile = tile_of_turn(turn, block, blocks)
                if warp.elect() != 0:
                    bulk.wait_done()
        else:  # ------------------------------------------------------------------------------------ consumers
            more_registers()
            w, thread, lane, my_row, my_column = place_of_thread(tid, warpgroup)
            own_k, own_v, own_ds, ds_read, k_part, own_dq, my_columns = places_of_consumer(w, my_column, s_k, s_v, s_ds, s_dq)
            staging = plus(w, STAGING)
            ring = Ring(s_q, s_dout, s_shifts, s_deltas, q_full, q_empty, dout_full, dout_empty)
            place = start()
            kv_place = start()
            ds_stage = zero()
            while tile < tiles:
                n, column = order(tile, kv_tiles, columns, section)
                batch, kv_head, _ = heads_of(column, kv_heads, 1)
                first, plain_first, plain_end, end = blocks_of_tile(n, bounds)
                my = Consumer(
                    w, thread, lane, limits_of_keys(key_row_of(n, my_row), my_column, bounds),
                    row_operand(own_k, place_zero()), row_operand(own_v, place_zero()), own_ds, ds_read, k_part_operand(k_part, place_zero()),
                    own_dq, plus(w, DQ_FULL), plus(w, DQ_EMPTY), my_columns, scale_log2,
                )  # fmt: skip
                dk = zero_dk()
                dv = zero_dv()
                pipeline.wait(kv_full, kv_place)
                kv_place = kv_advance(kv_place)
                member = zero()
                while member < group:
                    m = first
                    while m < plain_first:
                        dk, dv, place, ds_stage = masked_step(dk, dv, place, ds_stage, m, ring, my)
                        m = following(m)
                    while m < plain_end:
                        dk, dv, place, ds_stage = plain_step(dk, dv, place, ds_stage, m, ring, my)
                        m = following(m)
                    if config_left:
                        while m < end:
                            dk, dv, place, ds_stage = masked_step(dk, dv, place, ds_stage, m, ring, my)
                            m = following(m)
                    member = following(member)

                # dK and dV leave through the shared memory of this consumer's rows of K and V, whose last use is over.
                warp.barrier_sync(ALL, 128 * consumers)
                if with_dv:
                    put_dv(dv_to_16bit(dv), own_v, thread)
                if with_dk:
                    put_dk(dk_to_16bit(scale_dk(dk, scale_of_dk)), own_k, thread)
                tma.fence_async()
                warp.barrier_sync(staging, 128)
                if thread == 0:
                    key = own_key_of(n, w)
                    if with_dv:
                        store_dv(dv_map, own_v, key, kv_head, batch)
                    if with_dk:
                        store_dk(dk_map, own_k, key, kv_head, batch)
                    tma.wait_stores_read()
                    mbarrier.arrive(kv_empty)
                turn = following(turn)
                tile = tile_of_turn(turn, block, blocks)

    config_left = config.left
    preceding = straight_line(int32, (int32,), lambda ops, n: n - 1)
    staged_part = straight_line(int32, (int32,) * 2, lambda ops, s_dq, part: s_dq + part * memory.part_bytes)
    signature = types.void(*[types.uint64] * 10, *[types.int32] * 15, types.float32, types.float32)
    return KernelSource(kernel, signature, threads=config.threads, fastmath=False, tensor_maps=tuple(range(6)))
