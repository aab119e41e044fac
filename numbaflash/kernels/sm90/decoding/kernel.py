"""The decode kernel: a few queries of a head against all that came before, at the speed of memory.

Keys and values are read once, so what counts is that every multiprocessor has loads under way all the time. Each warp is on its own: it copies 16
or 32 keys and values a step into a ring of its own in shared memory, some steps ahead, multiplies them by mma.sync with the up to 16 rows of a tile
(queries times the heads that share the key head), and keeps its own softmax and output (Algorithm 1 of FlashAttention-2). At the end of a part the
warps of the block merge theirs. Where there are more rows, or wider ones, the warps share the keys of one ring instead and divide the rows, or the
columns of the output. Who computes which keys is in `schedule`.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import types
from numba.cuda.types import UniTuple, int32, uint64

from ....ptx import bulk, cp_async, dependent, fragment, mma, shared, warp
from ....ptx.index import following, plus, warp_of, within_warp, zero
from ....ptx.straight import straight_line
from ....toolchain import KernelSource
from ...bands import BOUNDS, Band
from ..scores import Scores, option_types
from . import merging
from .config import FOUND_BYTES, MERGE_TILES, Q_TILE, DecodeConfig, SharedMemory, merge_shares_of
from .loading import SEEN, STRIDES, Loads, head_of, table_of
from .schedule import SIZES, WORDS, Shares, entry_of_unit, seek, share_of

inline = cuda.jit(device=True, inline="always")


def _signature(config: DecodeConfig, pointers: int, strides: int, integers: int):
    kinds = [types.uint64] * pointers + [types.int64] * strides + [types.int32] * integers
    return types.void(*kinds, types.float32, types.Tuple(option_types(config.options)))


def build(config: DecodeConfig) -> KernelSource:
    """The main kernel of one configuration."""
    memory, loads, shares = SharedMemory.of(config), Loads(config), Shares(config)
    of_scores, partials = Scores(config.keys, config.options), merging.Partials(config, config.share_tiles)
    band = Band(Q_TILE, config.keys, config.group, config.left, config.right)
    keys, warps, stages, shared_keys = config.keys, config.warps, config.stages, config.division != "keys"
    shared_q, of_rows, of_columns = config.shared_q, config.division == "rows", config.division == "columns"
    paged, balanced, few_items, last_merges = config.page_size > 0, config.balanced, config.few_items, config.last_merges
    step_of_steps = 1 if shared_keys else warps

    total_of, find = seek(shares)
    entry_at, part_at, found_by, fixed_part = shares.entry(), shares.part(), shares.found(), shares.fixed_part()
    find_pages, load, load_q, copy_q = loads.find_pages(), loads.load(), loads.load_q(), loads.copy_q()
    head_at = head_of(paged)

    scores = mma.product(keys, config.depth, config.element, memory.k_pitch, rows_in_registers=not shared_q)
    add_values = mma.add_product(config.warp_columns, keys, config.element, memory.v_pitch)
    rows_at, columns_at, q_at = mma.along_rows(memory.k_pitch), mma.across_rows(memory.v_pitch), mma.across_rows(memory.k_pitch)
    softmax = fragment.online_softmax(keys, 0, config.options.lowest_scores)
    zero_out, rescale, negate = fragment.zeros(config.warp_columns), fragment.scale_rows(config.warp_columns), fragment.negate(keys)
    mask, limits_of, to_16bit = fragment.mask_band(keys, config.left, True), band.limits(), fragment.to_16bit(keys, config.element)
    wait_for_stage = cp_async.wait_but(stages - 2)
    start_statistics, negative_scale, changes = fragment.start_statistics, config.negative_scale, config.options.changes
    take_seat, change, finish = of_scores.take_seat(config.group), of_scores.change(), of_scores.finish(config.group)
    no_words = straight_line(of_scores.words, (), lambda ops: [ops.integer(0)] * len(of_scores.words))

    put, merge_warps, own, store = partials.put(), partials.merge_warps(), partials.own(), partials.store()
    as_statistics, write, write_lse = partials.as_statistics(), partials.write(), partials.write_lse()
    nothing, add, parts_of = partials.nothing(), partials.add(), shares.parts()

    def seen_of(ops, last, bounds):
        """The keys of a part that some query sees: (first, one past the last). What comes before the part is not asked for."""
        _, end, offset, left, _ = bounds
        return [ops.maximum(offset - left, ops.integer(0)) if config.left else ops.integer(0), ops.minimum(end, last * config.tile)]

    def steps_of(ops, first, last, warp, bounds):
        """(a warp's first step, one past the last)."""
        most = (bounds[1] + (keys - 1)) // keys
        if shared_keys:
            return [first, ops.minimum(last, most)]
        return [first * warps + warp, ops.minimum(last * warps, most)]

    def plain_of(ops, first_row, bounds):
        """The keys that all rows of a tile see: (first, one past the last)."""
        seqlen_q, end, offset, left, right = bounds
        query = first_row // config.group
        last = ops.minimum((first_row + (Q_TILE - 1)) // config.group, seqlen_q - 1)
        if config.right:
            end = ops.minimum(end, query + offset + right + 1)
        return [ops.maximum(last + offset - left, ops.integer(0)) if config.left else ops.integer(0), end]

    seen_of = straight_line(SEEN, (int32, BOUNDS), seen_of)
    steps_of = straight_line(UniTuple(int32, 2), (int32, int32, int32, BOUNDS), steps_of)
    plain_of = straight_line(SEEN, (int32, BOUNDS), plain_of)
    is_border = straight_line(int32, (int32, SEEN), lambda ops, step, plain: ops.truth((step * keys < plain[0]) | ((step + 1) * keys > plain[1])))
    first_row_of = straight_line(int32, (int32, int32), lambda ops, row_tile, row_warp: (row_tile * config.row_warps + row_warp) * Q_TILE)
    row_of = straight_line(int32, (int32, int32), lambda ops, first_row, lane: first_row + (lane >> 2))
    column_of = straight_line(int32, (int32,), lambda ops, lane: (lane & 3) * 2)
    next_step = straight_line(int32, (int32,), lambda ops, step: step + step_of_steps)
    ring_of = straight_line(int32, (int32, int32), lambda ops, base, warp: base if shared_keys else base + warp * (stages * memory.stage_bytes))
    stage_of = straight_line(int32, (int32, int32), lambda ops, ring, stage: ring + stage * memory.stage_bytes)
    next_stage = straight_line(int32, (int32,), lambda ops, stage: ops.select(stage == stages - 1, ops.integer(0), stage + 1))
    values_of = straight_line(int32, (int32, int32), lambda ops, stage, offset: stage + offset + memory.v)
    at = straight_line(int32, (int32, int32), lambda ops, address, offset: address + offset)
    result_of = straight_line(int32, (int32, int32), lambda ops, base, warp: base + warp * memory.results_bytes)
    statistics_of = straight_line(int32, (int32, int32), lambda ops, base, warp: base + warp * 512)
    columns_of = straight_line(int32, (int32, int32), lambda ops, offset, warp: offset + warp * (2 * config.warp_columns))
    q_rows_of = straight_line(int32, (int32, int32), lambda ops, offset, warp: offset + warp * (Q_TILE * memory.k_pitch))
    rescales = straight_line(int32, (fragment.STATISTICS,), lambda ops, s: ops.truth((s[4] != 1.0) | (s[5] != 1.0)))
    units_of = straight_line(int32, (SIZES,), lambda ops, sizes: sizes[0] * sizes[1] * sizes[2] * sizes[3])
    fewer = straight_line(int32, (int32, int32), lambda ops, a, b: ops.minimum(a, b))

    def put_found(ops, found, words, begins, thread):
        at = found + ops.wide(words[2 if few_items else 1]) * FOUND_BYTES
        for n, word in enumerate(words):
            ops.put(at + 4 * n, word, (begins != 0) & (thread == 0))

    put_found = straight_line(types.void, (uint64, WORDS, int32, int32), put_found)
    counter_of = straight_line(uint64, (uint64, int32), lambda ops, counters, item: counters + ops.wide(item) * 4)
    is_last = straight_line(int32, (int32, int32), lambda ops, ticket, count: ops.truth(ticket == count - 1))
    reset = straight_line(types.void, (uint64, int32), lambda ops, counter, thread: ops.put(counter, ops.integer(0), thread == 0))
    next_parts = straight_line(int32, (int32,), lambda ops, number: number + config.merged_at_once)
    q_of = straight_line(
        uint64,
        (uint64, STRIDES, int32, int32),
        lambda ops, q, strides, entry, head: q + ops.wide(entry) * strides[0] + ops.wide(head * config.group) * strides[2],
    )
    places = shared.addresses(0, memory.q, memory.statistics)

    def kernel(
        q, k, v, out, lse, table, found, slots,
        q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head, table_batch, table_page,
        seqlen_q, seqlen_k, offset, left, right, batch, heads, row_tiles, pages, parts, blocks,
        scale_log2, options,
    ):  # fmt: skip
        thread, block = cuda.threadIdx.x, cuda.blockIdx.x
        lane, number = within_warp(thread), warp.shuffle_index(warp_of(thread), 0)
        loader = thread if shared_keys else lane
        base, s_q, s_statistics = places()
        ring, s_result = ring_of(base, number), result_of(base, number)
        k_lane, v_lane, q_lane = rows_at(lane), columns_at(lane), q_at(lane)
        row_warp, share = zero(), number
        if of_columns:
            v_lane = columns_of(v_lane, number)
        if of_rows:
            row_warp, share = number, zero()
            q_lane = q_rows_of(q_lane, number)
        all_bounds, sizes = (seqlen_q, seqlen_k, offset, left, right), (batch, heads, row_tiles, parts)
        q_strides, k_strides, v_strides = (q_batch, q_row, q_head), (k_batch, k_row, k_head), (v_batch, v_row, v_head)
        out_strides = (out_batch, out_row, out_head)

        dependent.wait()
        entry, start, place, total = zero(), zero(), zero(), zero()
        if balanced:
            total = total_of(lane, all_bounds, sizes, options)
            blocks = fewer(blocks, total)
            place, stop = share_of(total, block, blocks)
            if block >= blocks:
                place = stop
            else:
                entry, start = find(place, lane, all_bounds, sizes, options)
        else:
            place, stop = plus(place, block), units_of(sizes)
        words = (zero(), block, zero(), zero())
        while place < stop:
            if not balanced:
                entry = entry_of_unit(place, sizes)
            bounds, costs = entry_at(entry, all_bounds, sizes, options)
            line_end = plus(start, costs[1])
            if balanced and place >= line_end:
                start = line_end
                entry = following(entry)
                bounds, costs = entry_at(entry, all_bounds, sizes, options)
            part = part_at(place, stop, start, costs[0], block, bounds, sizes) if balanced else fixed_part(place, bounds, sizes)
            head, row_tile, first, last, slot, end, _ = part

            first_row = first_row_of(row_tile, row_warp)
            row = row_of(first_row, lane)
            seen, plain = seen_of(last, bounds), plain_of(first_row, bounds)
            limits = limits_of(row, column_of(lane), bounds)
            q_source, k_source, v_source = q_of(q, q_strides, entry, head), head_at(k, k_strides, entry, head), head_at(v, v_strides, entry, head)
            own_table = table_of(table, table_batch, table_page, pages, entry)
            step, last_step = steps_of(first, last, number, bounds)
            stage = zero()
            ahead = step
            found_pages = find_pages(ahead, loader, seen, own_table)
            if shared_q:
                copy_q(s_q, q_source, q_strides, first_row_of(row_tile, zero()), thread, seqlen_q)
            for _ in range(stages - 1):
                load(stage_of(ring, stage), ahead, loader, found_pages, seen, k_source, v_source)
                cp_async.commit()
                stage = next_stage(stage)
                ahead = next_step(ahead)
                found_pages = find_pages(ahead, loader, seen, own_table)
            rows = at(s_q, q_lane) if shared_q else load_q(q_source, q_strides, row, lane, seqlen_q)
            seat = take_seat(row, column_of(lane), entry, head, seqlen_q, bounds, options)
            if shared_q and not shared_keys:  # which other warps have copied, too
                wait_for_stage()
                cuda.syncthreads()
            acc, statistics = zero_out(), start_statistics()
            free, stage = stage, zero()
            while step < last_step:
                wait_for_stage()
                if shared_keys:
                    cuda.syncthreads()
                else:
                    warp.sync()
                load(stage_of(ring, free), ahead, loader, found_pages, seen, k_source, v_source)
                cp_async.commit()
                ahead = next_step(ahead)
                found_pages = find_pages(ahead, loader, seen, own_table)
                here = stage_of(ring, stage)
                s = scores(rows, at(here, k_lane))
                if negative_scale:
                    s = negate(s)
                if changes:
                    s = change(s, no_words(), seat, step, options)
                if is_border(step, plain) != 0:
                    s = mask(s, step, limits)
                p, statistics, _ = softmax(s, statistics, scale_log2)
                if warp.ballot(rescales(statistics)) != 0:
                    acc = rescale(acc, statistics)
                acc = add_values(acc, to_16bit(p), values_of(here, v_lane))
                free = stage
                stage = next_stage(stage)
                step = next_step(step)
            cp_async.wait()
            dependent.let_begin()
            if shared_keys:
                partial = own(acc, statistics)
                cuda.syncthreads()
            else:
                cuda.syncthreads()
                put(s_result, statistics_of(s_statistics, number), lane, acc, statistics)
                cuda.syncthreads()
                partial = merge_warps(base, s_statistics, number, lane, scale_log2)
                cuda.syncthreads()
            complete = slot < 0
            if not complete:
                store(slots, slot, row_warp, share, lane, partial)
                if last_merges:
                    origin, count, item = parts_of(part, entry, block, blocks, total, costs[0], sizes)
                    counter = counter_of(found, item)
                    cuda.threadfence()
                    cuda.syncthreads()
                    if thread == 0:
                        shared.store(s_statistics, bulk.take_ticket(counter))
                    cuda.syncthreads()
                    if is_last(shared.load(s_statistics), count) != 0:
                        complete = True
                        cuda.threadfence()
                        partial, number_of_part = nothing(), zero()
                        while number_of_part < count:
                            partial = add(partial, slots, origin, row_warp, number_of_part, count, share, lane, scale_log2)
                            number_of_part = next_parts(number_of_part)
                        reset(counter, thread)
                    cuda.syncthreads()
            if complete:
                values, statistics = as_statistics(partial)
                statistics = finish(statistics, row, head, seqlen_q, scale_log2, options)
                write(out, out_strides, entry, head, row, share, lane, seqlen_q, values, statistics)
                write_lse(lse, entry, head, row, share, lane, heads, seqlen_q, statistics)
            if last_merges:
                place = end if balanced else plus(place, blocks)
            elif balanced:
                begins, words = found_by(part, entry, block, blocks, total, sizes)
                if few_items:
                    put_found(found, words, begins, thread)
                place = end
            else:
                place = plus(place, blocks)
        if balanced and not (few_items or last_merges):
            put_found(found, words, following(zero()), thread)

    return KernelSource(kernel, _signature(config, 8, 14, 11), threads=config.threads, min_blocks=config.blocks, fastmath=False)


def build_merge(config: DecodeConfig) -> KernelSource:
    """The kernel that merges what several blocks have computed of an item. Each of its blocks has a share of the columns of an item; its
    warps take turns at the partial results."""
    partials, of_scores = merging.Partials(config, MERGE_TILES), Scores(config.keys, config.options)
    nothing, add, put_share, merge_shares = partials.nothing(), partials.add(), partials.put_share(), partials.merge_shares(config.merge_warps)
    as_statistics, write, write_lse, finish = partials.as_statistics(), partials.write(), partials.write_lse(), of_scores.finish(config.group)
    merge_warps = config.merge_warps
    balanced, shares, row_warps = config.balanced, merge_shares_of(config), config.row_warps
    share_bytes = MERGE_TILES * 32 * 4 * config.kept
    places = shared.addresses(0, merge_warps * share_bytes)

    def item_of(ops, block, found, sizes):
        """(where its partial results come from, how many there are, entry, head, tile of queries)"""
        item, (_, heads, row_tiles, parts) = block // (shares * row_warps), sizes
        origin, count = item, parts
        if balanced:
            count, origin, item, _ = (ops.as_integer(x) for x in ops.floats_at("global", found + ops.wide(item) * FOUND_BYTES, 0, 4))
        return [origin, count, item // (heads * row_tiles), item // row_tiles % heads, item % row_tiles]

    item_of = straight_line(UniTuple(int32, 5), (int32, uint64, SIZES), item_of)
    share_of_block = straight_line(int32, (int32,), lambda ops, block: block % shares)
    row_warp_of = straight_line(int32, (int32,), lambda ops, block: block // shares % row_warps)
    results_of = straight_line(int32, (int32, int32), lambda ops, base, warp: base + warp * share_bytes)
    statistics_of = straight_line(int32, (int32, int32), lambda ops, base, warp: base + warp * 512)
    next_part = straight_line(int32, (int32,), lambda ops, part: part + merge_warps * config.merged_at_once)
    row_of = straight_line(int32, (int32,) * 3, lambda ops, row_tile, row_warp, lane: (row_tile * row_warps + row_warp) * Q_TILE + (lane >> 2))

    def kernel(out, lse, found, slots, out_batch, out_row, out_head, seqlen_q, batch, heads, row_tiles, parts, scale_log2, options):
        thread = cuda.threadIdx.x
        lane, number = within_warp(thread), warp.shuffle_index(warp_of(thread), 0)
        dependent.wait()
        origin, count, entry, head, row_tile = item_of(cuda.blockIdx.x, found, (batch, heads, row_tiles, parts))
        if count > 0:
            share, row_warp = share_of_block(cuda.blockIdx.x), row_warp_of(cuda.blockIdx.x)
            results, statistics_at = places()
            partial, part = nothing(), number
            while part < count:
                partial = add(partial, slots, origin, row_warp, part, count, share, lane, scale_log2)
                part = next_part(part)
            put_share(results_of(results, number), statistics_of(statistics_at, number), lane, partial)
            cuda.syncthreads()
            if number == 0:
                values, statistics = as_statistics(merge_shares(results, statistics_at, lane, scale_log2))
                row = row_of(row_tile, row_warp, lane)
                statistics = finish(statistics, row, head, seqlen_q, scale_log2, options)
                write(out, (out_batch, out_row, out_head), entry, head, row, share, lane, seqlen_q, values, statistics)
                write_lse(lse, entry, head, row, share, lane, heads, seqlen_q, statistics)

    return KernelSource(kernel, _signature(config, 4, 3, 5), threads=32 * merge_warps, fastmath=False)
