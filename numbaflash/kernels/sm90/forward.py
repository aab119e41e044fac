"""The forward kernel for Hopper: FlashAttention's Algorithm 1 over a pipeline of TMA loads and wgmma products.

A block is a producer warpgroup and one to three consumer warpgroups. The producer streams K and V blocks, right to
left, through a ring in shared memory. Each consumer owns 64 query rows: it computes S = Q K^T, updates the running
maximum m and sum l of its rows, and adds P V to its accumulator. The product P V of one block runs on the tensor cores
while the exponentials of the next are computed (overlap within a warpgroup), and named barriers let the warpgroups
take turns at the tensor cores (ping-pong). Blocks are persistent: the next tile's Q and K are under way while the
present one ends.

Numba widens sums of 32-bit integers to 64 bits, hence the many casts: in the loops only 32-bit arithmetic stays in
uniform registers.
"""

from __future__ import annotations

from collections import namedtuple
from functools import reduce

import numpy as np
from numba import cuda
from numba.cuda import types

from ...ptx import fragment, math, mbarrier, pipeline, shared, tma, warp, wgmma
from ...toolchain import KernelSource
from ..schedule import tile_of_turn, tile_order
from .config import ForwardConfig, SharedMemory

u32, u64, i32, i64, f32 = np.uint32, np.uint64, np.int32, np.int64, np.float32
inline = cuda.jit(device=True, inline="always")

MINUS_INF = f32(-np.inf)
LN2 = f32(0.6931471805599453)

# Named barriers; 0 is the whole block's.
TURN = 1  # of the first consumer; one a consumer
STAGING = 5  # of the first consumer; one a consumer

Ring = namedtuple("Ring", "k_full k_empty v_full v_empty")
"""Addresses of the first stage's barriers."""

Operands = namedtuple("Operands", "q k v")
"""Low words of the descriptors of the warpgroup's Q and of the first stage's K and V."""

Rows = namedtuple("Rows", "key0 key1 column")
"""The keys beside the thread's two rows, and its first column of a tile."""


def build(config: ForwardConfig) -> KernelSource:
    """The forward kernel of one configuration."""
    q_tile, kv_block, stages, consumers = config.q_tile, config.kv_block, config.stages, config.consumers
    d, dv, pack = config.padded_head_dim, config.padded_head_dim_v, config.pack
    has_left, has_right = config.left, config.right
    out_in_q, pingpong, rescale_first, negative_scale = config.out_in_q, config.pingpong, config.rescale_first, config.negative_scale
    held = config.hold > 0
    memory = SharedMemory.of(config)
    out_panels = memory.out_panels
    q_stages, q_slots = config.q_stages, config.q_stages * consumers
    qk_panels, v_panels = memory.qk_panels, memory.v_panels
    rows_panel_bytes, kv_panel_bytes = memory.rows_panel_bytes, memory.kv_panel_bytes
    k_bytes, v_bytes, q_stride, out_stride = memory.k_bytes, memory.v_bytes, memory.q_stride, memory.out_stride
    off_q, off_k, off_v, off_out, off_barriers, off_scratch = memory.q, memory.k, memory.v, memory.out, memory.barriers, memory.scratch

    # Instructions of exactly these tile shapes.
    scores = wgmma.product_shared(  # (64, kv_block) = Q (64, d) K^T (d, kv_block)
        kv_block, d, config.element, wgmma.k_major_steps(d, rows_panel_bytes), wgmma.k_major_steps(d, kv_panel_bytes), k_bytes
    )
    add_values = wgmma.product_registers(  # (64, dv) += P (64, kv_block) V
        dv, kv_block, config.element, wgmma.mn_major_steps(kv_block), v_bytes
    )
    wait_scores, wait_scores_only = wgmma.wait(0, kv_block), wgmma.wait(1, kv_block)
    wait_out, wait_out_and_p = wgmma.wait(0, dv), wgmma.wait(0, dv, kv_block)
    zero_out, rescale, normalise = fragment.zeros(dv), fragment.scale_rows(dv), fragment.normalise_rows(dv)
    online_softmax, negate = fragment.online_softmax(kv_block, config.hold), fragment.negate(kv_block)
    keep_to, keep_from = fragment.keep_columns_to(kv_block), fragment.keep_columns_from(kv_block)
    p_to_16bit, out_to_16bit = fragment.to_16bit(kv_block, config.element), fragment.to_16bit(dv, config.element)
    hold_back = fragment.hold_back
    load_q = tma.load_panels(5, qk_panels, rows_panel_bytes)
    load_k, load_v = tma.load_panels(4, qk_panels, kv_panel_bytes), tma.load_panels(4, v_panels, kv_panel_bytes)
    advance, k_slot, v_slot = pipeline.advance(stages), pipeline.slot(k_bytes), pipeline.slot(v_bytes)
    q_advance, q_slot = pipeline.advance(q_stages), pipeline.slot(q_stride)
    fewer_registers, more_registers = warp.decrease_registers(config.registers[0]), warp.increase_registers(config.registers[1])
    k_major, mn_major = u32(wgmma.descriptor_low()), u32(wgmma.descriptor_low(kv_panel_bytes))

    @inline
    def kv_range(q_block, seqlen_q, seqlen_k, offset, left, right):
        """First KV block that a q tile needs, and one past the last."""
        first = i32(0)
        end = i32((seqlen_k + i32(kv_block - 1)) // i32(kv_block))
        if has_right:
            last_row = i32(min(q_block * i32(q_tile) + i32(q_tile - 1), seqlen_q * i32(pack) - i32(1)) // i32(pack))
            end = i32(max(i32(0), min(end, (last_row + offset + right) // i32(kv_block) + i32(1))))
        if has_left:
            first_row = i32(q_block * i32(q_tile) // i32(pack))
            first = i32(max(i32(0), min(end, (first_row + offset - left) // i32(kv_block))))
        return first, end

    @inline
    def quad_sum(x):
        x += warp.shuffle_xor(x, i32(1))
        return x + warp.shuffle_xor(x, i32(2))

    @inline
    def mask_band(s, j, rows, left, right):
        origin = i32(i32(j * i32(kv_block)) + rows.column)
        if has_right:
            s = keep_to(s, i32(rows.key0 + right - origin), i32(rows.key1 + right - origin))
        if has_left:
            s = keep_from(s, i32(rows.key0 - left - origin), i32(rows.key1 - left - origin))
        return s

    def make_kv_step(masked):
        @inline
        def kv_step(
            acc, p16, m0, m1, l0, l1, b0, b1, stage, phase, j, ring, operands, rows, my_turn, next_turn, lane, scratch, left, right, scale_log2
        ):  # fmt: skip
            """S of block j, while P V of the block before it is added to the accumulator."""
            v_stage, v_phase = stage, phase
            stage, phase = advance(stage, phase)
            pipeline.wait(ring.k_full, stage, phase)
            if pingpong:
                warp.barrier_sync(my_turn, u32(256))
            s = scores(operands.q, operands.k, stage)
            if rescale_first:
                acc = rescale(acc, b0, b1)
            pipeline.wait(ring.v_full, v_stage, v_phase)
            acc = add_values(acc, p16, operands.v, v_stage)
            if pingpong:
                warp.barrier_arrive(next_turn, u32(256))
            s = wait_scores_only(s)
            pipeline.release(ring.k_empty, stage, lane)
            if negative_scale:
                s = negate(s)
            if masked:
                s = mask_band(s, j, rows, left, right)
            p, m0, m1, l0, l1, a0, a1, h0, h1 = online_softmax(s, m0, m1, l0, l1, scale_log2)
            if held:
                hold_back(scratch, h0, h1)
            acc, p = wait_out_and_p(acc, p)
            pipeline.release(ring.v_empty, v_stage, lane)
            if rescale_first:
                b0, b1 = a0, a1
            else:
                acc = rescale(acc, a0, a1)
            return acc, p_to_16bit(p), m0, m1, l0, l1, b0, b1, stage, phase

        return kv_step

    masked_kv_step, kv_step = make_kv_step(True), make_kv_step(False)

    @inline
    def pass_over(j, stop, silent, stage, phase, ring, my_turn, next_turn, lane):
        """Release blocks j to stop, which this warpgroup's rows do not see, and cede its turns (none at block ``silent``)."""
        while j >= stop:
            # Its data must have come: a release, and the next wait, must not be taken for those of the block before or after.
            pipeline.wait(ring.k_full, stage, phase)
            pipeline.release(ring.k_empty, stage, lane)
            pipeline.wait(ring.v_full, stage, phase)
            pipeline.release(ring.v_empty, stage, lane)
            if pingpong and j != silent:
                warp.barrier_sync(my_turn, u32(256))
                warp.barrier_arrive(next_turn, u32(256))
            stage, phase = advance(stage, phase)
            j = i32(j - i32(1))
        return stage, phase

    def make_store(part):
        panels = min(out_panels, v_panels - part * out_panels)
        stage_part = fragment.store_matrix(dv, rows_panel_bytes, part * out_panels, panels)
        store_part = tma.store_panels(5, part * out_panels, panels, rows_panel_bytes)

        @inline
        def store(out16, s_out, staging_row, lane, leader, staging_barrier, out_map, row, head, batch):
            """Panels of the output, through shared memory, by one TMA store each."""
            if not out_in_q:  # the last store from here must have read
                if leader:
                    tma.wait_stores_read()
                warp.barrier_sync(staging_barrier, u32(128))
            row_at = s_out + staging_row * i32(wgmma.ROW_BYTES)
            stage_part(out16, row_at, (staging_row & i32(7)) << i32(4), (lane >> i32(4)) * i32(16))
            tma.fence_async()
            warp.barrier_sync(staging_barrier, u32(128))
            if leader:
                store_part(out_map, s_out, i32(0), row, head, batch)

        return store

    def in_turn(first, second):
        @inline
        def both(out16, s_out, staging_row, lane, leader, staging_barrier, out_map, row, head, batch):
            first(out16, s_out, staging_row, lane, leader, staging_barrier, out_map, row, head, batch)
            second(out16, s_out, staging_row, lane, leader, staging_barrier, out_map, row, head, batch)

        return both

    store_out = reduce(in_turn, [make_store(part) for part in range(config.out_parts)])

    @inline
    def store_lse(lse, row, batch, head, heads, seqlen_q, m, l, scale_log2):
        query = row // i32(pack)
        if query < seqlen_q:
            head_row = (i64(batch) * i64(heads) + i64(head)) * i64(pack) + i64(row % i32(pack))
            value = MINUS_INF if l == f32(0) else (m * scale_log2 + math.log2(l)) * LN2
            shared.store_global_f32(lse + u64((head_row * i64(seqlen_q) + i64(query)) * i64(4)), value)

    def kernel(
        q_map, k_map, v_map, out_map, lse, seqlen_q, seqlen_k, offset, left, right, heads, group, q_blocks, columns, section, tiles, scale_log2
    ):  # fmt: skip
        tid = i32(cuda.threadIdx.x)
        warpgroup = warp.shuffle_index(i32(tid >> i32(7)), i32(0))
        base = u32(u32(shared.dynamic_base() + u32(1023)) & u32(0xFFFFFC00))
        s_q, s_k, s_v, s_out = u32(base + u32(off_q)), u32(base + u32(off_k)), u32(base + u32(off_v)), u32(base + u32(off_out))
        q_full = u32(base + u32(off_barriers))  # a barrier is 8 bytes; Q has one a consumer and stage, K and V one a stage
        q_empty = u32(q_full + u32(8 * q_slots))
        k_full = u32(q_empty + u32(8 * q_slots))
        k_empty = u32(k_full + u32(8 * stages))
        v_full = u32(k_empty + u32(8 * stages))
        v_empty = u32(v_full + u32(8 * stages))
        ring = Ring(k_full, k_empty, v_full, v_empty)
        if tid == 0:
            for s in range(q_slots):
                mbarrier.init(q_full + u32(8 * s), u32(1))
                mbarrier.init(q_empty + u32(8 * s), u32(1 if out_in_q else 4))
            for s in range(stages):  # one arrival a consumer's warp releases a stage
                mbarrier.init(k_full + u32(8 * s), u32(1))
                mbarrier.init(k_empty + u32(8 * s), u32(4 * consumers))
                mbarrier.init(v_full + u32(8 * s), u32(1))
                mbarrier.init(v_empty + u32(8 * s), u32(4 * consumers))
            mbarrier.fence_init()
        cuda.syncthreads()
        block, blocks = i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
        turn = i32(0)
        tile = block
        stage = u32(0)
        if warpgroup == 0:  # ------------------------------------------------------------------------ producer
            fewer_registers()
            if tid < 32 and warp.elect() != u32(0):
                tma.prefetch_map(k_map)
                tma.prefetch_map(q_map)
                tma.prefetch_map(v_map)
                q_stage = u32(0)
                q_phase = u32(1)  # a fresh "empty" barrier lets the first wait pass
                phase = u32(1)
                while tile < tiles:
                    q_block, column = tile_order(tile, q_blocks, columns, section)
                    batch, head = i32(column // heads), i32(column % heads)
                    kv_head = i32(head // group)
                    first, end = kv_range(q_block, seqlen_q, seqlen_k, offset, left, right)
                    j = i32(end - i32(1))
                    # In the order of use: the first K, Q, then the K of each next block before the V of the present one.
                    if j >= first:
                        pipeline.wait(k_empty, stage, phase)
                        load_k(k_slot(s_k, stage), k_map, pipeline.barrier(k_full, stage), j * i32(kv_block), kv_head, batch)
                    for consumer in range(consumers):
                        at = u32(q_stage * u32(consumers) + u32(consumer))
                        pipeline.wait(q_empty, at, q_phase)
                        row = (q_block * i32(q_tile) + i32(64) * consumer) // i32(pack)
                        load_q(q_slot(s_q, at), q_map, pipeline.barrier(q_full, at), i32(0), row, head, batch)
                    q_stage, q_phase = q_advance(q_stage, q_phase)
                    while j >= first:
                        v_stage, v_phase = stage, phase
                        stage, phase = advance(stage, phase)
                        if j > first:
                            pipeline.wait(k_empty, stage, phase)
                            load_k(k_slot(s_k, stage), k_map, pipeline.barrier(k_full, stage), (j - i32(1)) * i32(kv_block), kv_head, batch)
                        pipeline.wait(v_empty, v_stage, v_phase)
                        load_v(v_slot(s_v, v_stage), v_map, pipeline.barrier(v_full, v_stage), j * i32(kv_block), kv_head, batch)
                        j = i32(j - i32(1))
                    turn = i32(turn + i32(1))
                    tile = i32(tile_of_turn(turn, block, blocks))
        else:  # ------------------------------------------------------------------------------------ consumers
            more_registers()
            w = i32(warpgroup - i32(1))
            thread = i32(tid & i32(127))
            lane = i32(thread & i32(31))
            leader = thread == 0
            my_row = i32(w * i32(64) + (thread >> i32(5)) * i32(16) + (lane >> i32(2)))  # the first of two in the tile, 8 apart
            my_column = i32((lane & i32(3)) * i32(2))
            s_out = u32(s_out + u32(u32(w) * u32(out_stride)))
            staging_row = i32((thread >> i32(5)) * i32(16) + (lane & i32(15)))
            staging_barrier = u32(u32(STAGING) + u32(w))
            scratch = u32(base + u32(off_scratch))
            k_low, v_low = u32(k_major | u32(s_k >> u32(4))), u32(mn_major | u32(s_v >> u32(4)))
            my_turn = u32(u32(TURN) + u32(w))
            next_turn = u32(TURN) if w == i32(consumers - 1) else u32(my_turn + u32(1))
            if pingpong and w == i32(consumers - 1):
                warp.barrier_arrive(u32(TURN), u32(256))
            q_stage = u32(0)
            q_phase = u32(0)
            phase = u32(0)
            while tile < tiles:
                q_block, column = tile_order(tile, q_blocks, columns, section)
                first, end = kv_range(q_block, seqlen_q, seqlen_k, offset, left, right)
                # Two rows of queries; with packed heads, `pack` neighbouring rows are one query.
                row0 = i32(q_block * i32(q_tile) + my_row)
                row1 = i32(row0 + i32(8))
                rows = Rows(i32(row0 // i32(pack) + offset), i32(row1 // i32(pack) + offset), my_column)
                # The blocks that this warpgroup's rows see; those from right_border on and before left_border only in part.
                row_first = i32(q_block * i32(q_tile) + w * i32(64))
                row_last = i32(min(row_first + i32(63), seqlen_q * i32(pack) - i32(1)))
                my_first, my_end = first, end
                if has_right:
                    my_end = i32(max(first, min(end, (row_last // i32(pack) + offset + right) // i32(kv_block) + i32(1))))
                if has_left:
                    my_first = i32(max(first, (row_first // i32(pack) + offset - left) // i32(kv_block)))
                if row_last < row_first or my_first >= my_end:
                    my_first, my_end = first, first
                right_border, left_border = my_end, my_first
                if has_right:
                    right_border = i32(max(my_first, (row_first // i32(pack) + offset + right + i32(1)) // i32(kv_block)))
                if has_left:
                    left_border = i32(max(my_first, (row_last // i32(pack) + offset - left + i32(kv_block - 1)) // i32(kv_block)))
                q_at = u32(q_stage * u32(consumers) + u32(w))
                operands = Operands(u32(k_major | u32(q_slot(s_q, q_at) >> u32(4))), k_low, v_low)
                m0, m1, l0, l1, b0, b1 = MINUS_INF, MINUS_INF, f32(0), f32(0), f32(1), f32(1)
                acc = zero_out()
                stage, phase = pass_over(i32(end - i32(1)), my_end, first, stage, phase, ring, my_turn, next_turn, lane)
                pipeline.wait(q_full, q_at, q_phase)
                if my_end > my_first:
                    j = i32(my_end - i32(1))

                    # The first block: nothing to overlap with. It may reach past the last key.
                    pipeline.wait(k_full, stage, phase)
                    s = wait_scores(scores(operands.q, operands.k, stage))
                    pipeline.release(k_empty, stage, lane)
                    if negative_scale:
                        s = negate(s)
                    last = i32(seqlen_k - i32(1) - j * i32(kv_block) - my_column)
                    s = mask_band(keep_to(s, last, last), j, rows, left, right)
                    p, m0, m1, l0, l1, a0, a1, h0, h1 = online_softmax(s, m0, m1, l0, l1, scale_log2)
                    p16 = p_to_16bit(p)
                    j = i32(j - i32(1))

                    if has_right:
                        while j >= right_border:
                            acc, p16, m0, m1, l0, l1, b0, b1, stage, phase = masked_kv_step(
                                acc, p16, m0, m1, l0, l1, b0, b1, stage, phase, j,
                                ring, operands, rows, my_turn, next_turn, lane, scratch, left, right, scale_log2,
                            )  # fmt: skip
                            j = i32(j - i32(1))
                    while j >= left_border:
                        acc, p16, m0, m1, l0, l1, b0, b1, stage, phase = kv_step(
                            acc, p16, m0, m1, l0, l1, b0, b1, stage, phase, j,
                            ring, operands, rows, my_turn, next_turn, lane, scratch, left, right, scale_log2,
                        )  # fmt: skip
                        j = i32(j - i32(1))
                    if has_left:
                        while j >= my_first:
                            acc, p16, m0, m1, l0, l1, b0, b1, stage, phase = masked_kv_step(
                                acc, p16, m0, m1, l0, l1, b0, b1, stage, phase, j,
                                ring, operands, rows, my_turn, next_turn, lane, scratch, left, right, scale_log2,
                            )  # fmt: skip
                            j = i32(j - i32(1))

                    # The last P V. Q is free.
                    if not out_in_q:
                        pipeline.release(q_empty, q_at, lane)
                    if rescale_first:
                        acc = rescale(acc, b0, b1)
                    pipeline.wait(v_full, stage, phase)
                    acc = wait_out(add_values(acc, p16, operands.v, stage))
                    pipeline.release(v_empty, stage, lane)
                    stage, phase = advance(stage, phase)
                elif not out_in_q:
                    pipeline.release(q_empty, q_at, lane)
                stage, phase = pass_over(i32(my_first - i32(1)), first, i32(-1), stage, phase, ring, my_turn, next_turn, lane)

                l0, l1 = quad_sum(l0), quad_sum(l1)
                # A row that saw nothing has l = 0, and its accumulator may be 0 * NaN: it is replaced by 0, not scaled.
                inverse0 = f32(0) if l0 == f32(0) else math.reciprocal(l0)
                inverse1 = f32(0) if l1 == f32(0) else math.reciprocal(l1)
                batch, head = i32(column // heads), i32(column % heads)
                if lse != u64(0) and (lane & i32(3)) == 0:
                    store_lse(lse, row0, batch, head, heads, seqlen_q, m0, l0, scale_log2)
                    store_lse(lse, row1, batch, head, heads, seqlen_q, m1, l1, scale_log2)
                out16 = out_to_16bit(normalise(acc, inverse0, inverse1))
                row = i32(row_first // i32(pack))
                store_out(out16, s_out, staging_row, lane, leader, staging_barrier, out_map, row, head, batch)
                if out_in_q and leader:
                    tma.wait_stores_read()
                    mbarrier.arrive(pipeline.barrier(q_empty, q_at))
                q_stage, q_phase = q_advance(q_stage, q_phase)
                turn = i32(turn + i32(1))
                tile = i32(tile_of_turn(turn, block, blocks))
            if leader:
                tma.wait_stores_read()

    signature = types.void(*[types.uint64] * 5, *[types.int32] * 11, types.float32)
    return KernelSource(kernel, signature, threads=config.threads, fastmath=False, tensor_maps=(0, 1, 2, 3))
