"""The backward kernel for Hopper: Algorithm 2 of FlashAttention-2, keys at rest and queries streaming by.

A block is a producer warpgroup and two consumer warpgroups. It owns a tile of keys, whose dK and dV it accumulates in
registers over all queries that see them, of all query heads that share the keys. The producer's first warp loads K and V
once a tile, and streams Q, dO and what goes with their rows through a ring. `by_keys` and `by_columns` say what the
consumers do with a block of queries, for narrow and for wide head dims; either way dQ, which sums over all keys, is added
to a float32 sum in global memory. `passes` says what comes before and after.
"""

from __future__ import annotations

from collections import namedtuple

from numba import cuda
from numba.cuda import types
from numba.cuda.types import UniTuple, int32, uint64

from ....ptx import bulk, mbarrier, pipeline, shared, tma, warp
from ....ptx.index import following, plus, preceding, warp_of, warpgroup_of, zero
from ....ptx.straight import straight_line
from ....toolchain import KernelSource
from ... import schedule
from ...bands import KeyBand
from ...schedule import heads_of, next_of_walk, tile_of_turn, walk_step_of_turn
from .. import packed, tickets
from ..scores import Scores, block_of, is_partial, next_of_list, option_types
from . import by_columns, by_keys
from .config import TICKET_BYTES, BackwardConfig, SharedMemory

inline = cuda.jit(device=True, inline="always")

# Named barriers of the first part of dQ and the warp of the producer warpgroup that goes with it; one a part.
DQ_FULL, DQ_EMPTY = by_keys.DQ_FULL, by_keys.DQ_EMPTY
MAY_ADD, ADDED = by_columns.MAY_ADD, by_columns.ADDED

Ring = namedtuple("Ring", "q dout shifts deltas q_full q_empty dout_full dout_empty ds_full ds_empty")
"""Addresses of the first stages of Q, dO and what goes with their rows, and of the barriers of all stages."""


def build(config: BackwardConfig) -> KernelSource:
    """The main kernel of one configuration."""
    q_block, kv_tile, stages, consumers, parts = config.q_block, config.kv_tile, config.stages, config.consumers, config.parts
    with_dq, with_ds, deterministic = config.with_dq, config.with_ds, config.deterministic
    memory = SharedMemory.of(config)
    work = (by_columns if config.columns_apart else by_keys).consumers(config, memory)
    prepare, enter, masked_step, plain_step, finish, leave = work.prepare, work.enter, work.masked_step, work.plain_step, work.finish, work.leave
    zero_dk, zero_dv, enters_with_a_step = work.zero_dk, work.zero_dv, work.enters_with_a_step
    clean_keys, cleans_keys = work.clean_keys, config.cleans_keys
    lengths, options_of = config.options.lengths, config.options
    band = KeyBand(kv_tile, q_block, config.left, config.right, padded=lengths)
    of_scores, listed = Scores(q_block, options_of), options_of.masked
    bounds_of_entry, walk_of_list, entry_of, rank_of = (
        of_scores.bounds_of_entry(False),
        of_scores.walk_of_list(),
        of_scores.entry(),
        of_scores.rank_of(),
    )
    # Said so that no register is kept for another tile; without options, ptxas spills for it in deterministic kernels of narrow heads.
    ends = config.one_tile and bool(options_of.lengths or listed)
    is_packed = options_of.packed
    posts_meanwhile, posts_later = is_packed and not deterministic, is_packed and deterministic
    if is_packed:
        sequences = packed.Sequences(options_of, "k", kv_tile)
        seek, order_of = packed.seek(sequences), tickets.order_of(options_of)

    load_k = tma.load_panels(4, memory.loaded_qk_panels, memory.kv_panel_bytes)
    load_v = tma.load_panels(4, memory.loaded_v_panels, memory.kv_panel_bytes, stage_bytes=0, arrives=False)
    load_q = tma.load_panels(4, memory.loaded_qk_panels, memory.q_panel_bytes, stage_bytes=memory.q_bytes)
    load_dout = tma.load_panels(4, memory.loaded_v_panels, memory.q_panel_bytes, stage_bytes=memory.dout_bytes)
    load_row, add_part = bulk.load(memory.row_bytes), bulk.add(memory.part_bytes)
    start, start_producer, advance, kv_advance = pipeline.start(0), pipeline.start(1), pipeline.advance(stages), pipeline.advance(1)
    fewer_registers, more_registers = warp.decrease_registers(config.registers[0]), warp.increase_registers(config.registers[1])
    send_by_bulk, keep_turns = with_dq and not config.columns_apart, deterministic and config.columns_apart

    addresses = shared.addresses(memory.k, memory.v, memory.q, memory.dout, memory.ds, memory.dq, memory.shifts, memory.deltas)
    barriers = shared.addresses(*(memory.barriers + 8 * n for n in (0, 1, 2, *(3 + stages * n for n in range(6)))))
    ticket_slot, place_slot = shared.addresses(memory.ticket), shared.addresses(memory.place)
    init_k_full, init_k_empty, init_v_empty = (mbarrier.init_ring(1, n) for n in (1, *config.kv_arrivals))
    init_full, init_by_warp, init_by_consumer = (mbarrier.init_ring(stages, n) for n in (1, 4 * consumers, 4))

    # Index arithmetic.
    walk_of_tile, turn_in_band = band.walk(), band.turn(config.last_keys_first)
    walk_step = straight_line(int32, (int32,), lambda ops, turn: ops.integer(config.deterministic_step)) if deterministic else walk_step_of_turn

    def order(ops, tile, kv_tiles, columns, section):
        """(tile of keys, kv head over the batch). The first keys, which most queries see under a right bound, go first, or the last."""
        block, column = schedule.order(ops, tile, kv_tiles, columns, section)
        return [block if config.last_keys_first else kv_tiles - 1 - block, column]

    def rows_at(ops, shifts, deltas, block):
        row = ops.wide(block) * memory.row_bytes
        return [shifts + row, deltas + row]

    def part_at(ops, sums, turns, part, block):
        number = ops.wide(block) * parts + ops.wide(part)
        return [sums + number * memory.part_bytes, turns + number * 4]

    order = straight_line(UniTuple(int32, 2), (int32,) * 4, order)
    rows_at = straight_line(UniTuple(uint64, 2), (uint64, uint64, int32), rows_at)
    part_at = straight_line(UniTuple(uint64, 2), (uint64, uint64, int32, int32), part_at)
    # Tiles and blocks of a sequence are counted from its own first one: coordinates and numbers over all sequences begin elsewhere.
    row_of = straight_line(
        int32, (int32,) * 3, lambda ops, m, first_query, first_q: m * q_block + first_q if is_packed else m * q_block - first_query
    )
    key_of = straight_line(int32, (int32,) * 3, lambda ops, n, first_key, first_k: n * kv_tile + first_k if is_packed else n * kv_tile - first_key)
    base_of = straight_line(int32, (int32,) * 2, lambda ops, first_q, sequence: first_q // q_block + sequence + 1)
    head_of = straight_line(int32, (int32,) * 3, lambda ops, kv_head, group, member: kv_head * group + member)

    def block_number(ops, batch, head, heads, q_blocks, m, base):
        number = (batch * heads + head) * q_blocks + m
        return number + base if is_packed else number

    block_number = straight_line(int32, (int32,) * 6, block_number)
    staged_part = straight_line(int32, (int32,) * 2, lambda ops, s_dq, part: s_dq + part * memory.part_bytes)
    ticket_at = straight_line(uint64, (uint64,), lambda ops, turns: turns - TICKET_BYTES)
    only = pipeline.start(0)

    @inline
    def post_place(tile, kv_tiles, columns, section, whole, options):
        n, _ = order(tile, kv_tiles, columns, section)
        spot, bounds = seek(n, order_of(options), whole, options)
        packed.post(place_slot()[0], spot, bounds)

    # (batch entry, tile in it, first query, first key, keys to store, number of its first block of queries, bounds) of a tile.
    @inline
    def locate(n, batch, whole, options):
        return batch, n, zero(), zero(), zero(), zero(), whole

    @inline
    def locate_within_lengths(n, batch, whole, options):
        return batch, n, zero(), zero(), zero(), zero(), bounds_of_entry(batch, whole, options)

    @inline
    def locate_packed(n, batch, whole, options):
        (sequence, tile, first_k, stored, first_q), bounds = packed.read(place_slot()[0], whole)
        return sequence, tile, first_q, first_k, stored, base_of(first_q, sequence), bounds

    locate = locate_packed if is_packed else locate_within_lengths if lengths else locate

    @inline
    def first_tile(tile):
        if deterministic and listed:  # read where it is used: a number that all warps keep from before they part costs more
            return warp.shuffle_index(shared.load(ticket_slot()[0]), 0)
        return tile

    @inline
    def next_tile(turn, block, blocks, tiles):
        if ends:
            return tiles
        return tile_of_turn(turn, block, blocks)

    # How a tile steps through blocks of queries, each for all heads of the group. Through a list, m is not a block but its entry, and (the entry
    # after it, number of that) is read ahead.
    @inline
    def find_walk(n, batch, kv_head, group, onward, bounds, options):
        """(where it begins, first plain step, first masked one after that, end)."""
        if listed:
            return walk_of_list(n, batch, kv_head, onward, options), zero(), zero(), zero()
        return walk_of_tile(n, group, onward, bounds)

    @inline
    def begin(number, onward, options):
        after = plus(number, onward)
        return entry_of(number, options), (entry_of(after, options), after)

    @inline
    def go_on(entry, member, ahead, group, onward, options):
        entry, number, member = next_of_list(entry, ahead[0], ahead[1], member, group, onward)
        return entry, member, (entry_of(number, options), number)

    @inline
    def block_in(m):
        return block_of(m) if listed else m

    @inline
    def turn_of(n, m, batch, kv_head, bounds, kv_tiles, q_blocks, options):
        if listed:
            return rank_of(n, m, batch, kv_head, q_blocks, options)
        return turn_in_band(n, m, bounds, kv_tiles)

    def kernel(
        q_map, k_map, v_map, dout_map, dk_map, dv_map, shifts, deltas, sums, turns,
        seqlen_q, seqlen_k, offset, left, right, first_query, first_key, heads, kv_heads, group, q_blocks, kv_tiles, columns, section, tiles,
        scale_log2, scale_of_dk, *options
    ):  # fmt: skip
        tid = cuda.threadIdx.x
        warpgroup = warp.shuffle_index(warpgroup_of(tid), 0)
        whole = (seqlen_q, seqlen_k, offset, left, right)
        s_k, s_v, s_q, s_dout, s_ds, s_dq, s_shifts, s_deltas = addresses()
        k_full, k_empty, v_empty, q_full, q_empty, dout_full, dout_empty, ds_full, ds_empty = barriers()
        if tid == 0:
            init_k_full(k_full)
            init_k_empty(k_empty)
            init_v_empty(v_empty)
            init_full(q_full)
            init_by_warp(q_empty)
            init_full(dout_full)
            init_by_warp(dout_empty)
            init_by_warp(ds_full)
            init_by_consumer(ds_empty)
            mbarrier.fence_init()
            if deterministic:
                shared.store(ticket_slot()[0], bulk.take_ticket(ticket_at(turns)))
        block, blocks = cuda.blockIdx.x, cuda.gridDim.x
        if posts_meanwhile and tid == 32:
            post_place(block, kv_tiles, columns, section, whole, options)
        cuda.syncthreads()
        if deterministic and not listed:  # one tile a block, in the order in which blocks start: what a tile waits for has started before it
            block = warp.shuffle_index(shared.load(ticket_slot()[0]), 0)
        turn = zero()
        tile = block
        if posts_later:
            if tid == 32:
                post_place(block, kv_tiles, columns, section, whole, options)
            cuda.syncthreads()
        if warpgroup == 0:
            fewer_registers()
            tile = first_tile(tile)
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
                        _, n, first_q, first_k, _, base, bounds = locate(n, batch, whole, options)
                        onward = walk_step(turn)
                        m, _, _, steps = find_walk(n, batch, kv_head, group, onward, bounds, options)
                        key = key_of(n, first_key, first_k)
                        pipeline.wait(k_empty, kv_place)
                        load_k(s_k, only(), k_map, k_full, key, kv_head, batch)
                        step = zero()
                        member = zero()
                        if listed:
                            m, ahead = begin(m, onward, options)
                        while m >= 0 if listed else step < steps:
                            head = head_of(kv_head, group, member)
                            shifts_at, deltas_at = rows_at(shifts, deltas, block_number(batch, head, heads, q_blocks, block_in(m), base))
                            row = row_of(block_in(m), first_query, first_q)
                            pipeline.wait(q_empty, place)
                            load_row(s_shifts, place, shifts_at, q_full)
                            load_q(s_q, place, q_map, q_full, row, head, batch)
                            pipeline.wait(dout_empty, place)
                            if with_ds:
                                if step == 0:  # V is needed with the first dO
                                    pipeline.wait(v_empty, kv_place)
                                    load_v(s_v, place, v_map, dout_full, key, kv_head, batch)
                                load_row(s_deltas, place, deltas_at, dout_full)
                            load_dout(s_dout, place, dout_map, dout_full, row, head, batch)
                            place = advance(place)
                            if listed:
                                m, member, ahead = go_on(m, member, ahead, group, onward, options)
                            else:
                                m, member = next_of_walk(m, member, group, onward)
                            step = following(step)
                        if (step == 0 if listed else steps == 0) or not with_ds:
                            pipeline.wait(v_empty, kv_place)
                        kv_place = kv_advance(kv_place)
                        turn = following(turn)
                        tile = next_tile(turn, block, blocks, tiles)
            elif send_by_bulk and role <= parts:  # -------------------------------------------------- parts of dQ leave
                part = preceding(role)
                ready, free = plus(part, DQ_FULL), plus(part, DQ_EMPTY)
                source = staged_part(s_dq, part)
                warp.barrier_arrive(free, 160)
                while tile < tiles:
                    n, column = order(tile, kv_tiles, columns, section)
                    batch, kv_head, _ = heads_of(column, kv_heads, 1)
                    _, n, first_q, first_k, _, base, bounds = locate(n, batch, whole, options)
                    onward = walk_step(turn)
                    m, _, _, steps = find_walk(n, batch, kv_head, group, onward, bounds, options)
                    step = zero()
                    member = zero()
                    if listed:
                        m, ahead = begin(m, onward, options)
                    while m >= 0 if listed else step < steps:
                        number = block_number(batch, head_of(kv_head, group, member), heads, q_blocks, block_in(m), base)
                        target, counter = part_at(sums, turns, part, number)
                        if deterministic:
                            if warp.elect() != 0:
                                bulk.wait_turn(counter, turn_of(n, block_in(m), batch, kv_head, bounds, kv_tiles, q_blocks, options))
                            cuda.syncwarp()
                        warp.barrier_sync(ready, 160)
                        if warp.elect() != 0:
                            add_part(target, source)
                            tma.wait_stores_read()
                        cuda.syncwarp()
                        warp.barrier_arrive(free, 160)
                        if deterministic and warp.elect() != 0:
                            bulk.wait_done()
                            bulk.end_turn(counter)
                        if listed:
                            m, member, ahead = go_on(m, member, ahead, group, onward, options)
                        else:
                            m, member = next_of_walk(m, member, group, onward)
                        step = following(step)
                    turn = following(turn)
                    tile = next_tile(turn, block, blocks, tiles)
                if warp.elect() != 0:
                    bulk.wait_done()
            elif keep_turns and role <= parts:  # ---------------------------------------------------- whose turn it is
                part = preceding(role)
                may_add, added = plus(part, MAY_ADD), plus(part, ADDED)
                while tile < tiles:
                    n, column = order(tile, kv_tiles, columns, section)
                    batch, kv_head, _ = heads_of(column, kv_heads, 1)
                    _, n, first_q, first_k, _, base, bounds = locate(n, batch, whole, options)
                    onward = walk_step(turn)
                    m, _, _, steps = find_walk(n, batch, kv_head, group, onward, bounds, options)
                    step = zero()
                    member = zero()
                    if listed:
                        m, ahead = begin(m, onward, options)
                    while m >= 0 if listed else step < steps:
                        _, counter = part_at(
                            sums, turns, part, block_number(batch, head_of(kv_head, group, member), heads, q_blocks, block_in(m), base)
                        )
                        if warp.elect() != 0:
                            bulk.wait_turn(counter, turn_of(n, block_in(m), batch, kv_head, bounds, kv_tiles, q_blocks, options))
                        cuda.syncwarp()
                        warp.barrier_sync(may_add, 160)
                        warp.barrier_sync(added, 160)
                        if warp.elect() != 0:
                            bulk.end_turn(counter)
                        cuda.syncwarp()
                        if listed:
                            m, member, ahead = go_on(m, member, ahead, group, onward, options)
                        else:
                            m, member = next_of_walk(m, member, group, onward)
                        step = following(step)
                    turn = following(turn)
                    tile = next_tile(turn, block, blocks, tiles)
        else:  # ------------------------------------------------------------------------------------ consumers
            more_registers()
            tile = first_tile(tile)
            ring = Ring(s_q, s_dout, s_shifts, s_deltas, q_full, q_empty, dout_full, dout_empty, ds_full, ds_empty)
            place = start()
            kv_place = start()
            while tile < tiles:
                n, column = order(tile, kv_tiles, columns, section)
                batch, kv_head, _ = heads_of(column, kv_heads, 1)
                entry, n, first_q, first_k, stored, base, bounds = locate(n, batch, whole, options)
                onward = walk_step(turn)
                m, plain, border, steps = find_walk(n, batch, kv_head, group, onward, bounds, options)
                places = s_k, s_v, s_q, s_dout, s_ds, s_dq
                my = prepare(tid, warpgroup, n, entry, kv_head, group, onward, seqlen_k, bounds, places, scale_log2, options)
                dk = zero_dk()
                dv = zero_dv()
                pipeline.wait(k_full, kv_place)
                kv_place = kv_advance(kv_place)
                if cleans_keys:
                    clean_keys(s_k, n, my.w, my.thread, my.lane, entry, kv_head, group, bounds, options)
                step = zero()
                member = zero()
                if listed:
                    m, ahead = begin(m, onward, options)
                if m >= 0 if listed else step < steps:
                    number = block_number(batch, head_of(kv_head, group, member), heads, q_blocks, block_in(m), base)
                    carried, dk, dv, place = enter(dk, dv, place, block_in(m), member, number, ring, sums, my)
                    if enters_with_a_step:
                        if listed:
                            m, member, ahead = go_on(m, member, ahead, group, onward, options)
                        else:
                            m, member = next_of_walk(m, member, group, onward)
                        step = following(step)
                    while m >= 0 if listed else step < steps:
                        number = block_number(batch, head_of(kv_head, group, member), heads, q_blocks, block_in(m), base)
                        if is_partial(warp.shuffle_index(m, 0)) == 0 if listed else step >= plain and step < border:
                            carried, dk, dv, place = plain_step(carried, dk, dv, place, block_in(m), member, number, ring, sums, my)
                        else:
                            carried, dk, dv, place = masked_step(carried, dk, dv, place, block_in(m), member, number, ring, sums, my)
                        if listed:
                            m, member, ahead = go_on(m, member, ahead, group, onward, options)
                        else:
                            m, member = next_of_walk(m, member, group, onward)
                        step = following(step)
                    dk, dv, place = finish(carried, dk, dv, place, ring, my)
                if lengths:  # known anew, not kept
                    _, column = order(tile, kv_tiles, columns, section)
                    batch, kv_head, _ = heads_of(column, kv_heads, 1)
                    entry, n, first_q, first_k, stored, base, bounds = locate(n, batch, whole, options)
                leave(dk, dv, n, bounds, kv_head, batch, dk_map, dv_map, s_k, s_v, k_empty, v_empty, scale_of_dk, first_k, stored, my)
                turn = following(turn)
                tile = next_tile(turn, block, blocks, tiles)

    signature = types.void(*[types.uint64] * 10, *[types.int32] * 15, types.float32, types.float32, types.Tuple(option_types(options_of)))
    return KernelSource(kernel, signature, threads=config.threads, fastmath=False, tensor_maps=tuple(range(6)))
