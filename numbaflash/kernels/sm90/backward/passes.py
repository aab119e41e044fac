"""What comes before and after the main backward kernel: the rows' shift and delta, an empty sum of dQ, dQ out of that sum, gradients of sinks."""

from __future__ import annotations

import math

from numba import cuda
from numba.cuda import types
from numba.cuda.types import UniTuple, float32, int32, uint64, void

from ....ptx import fragment, rows, shared, tma, warp
from ....ptx.index import following, minus, plus, warp_of, warpgroup_of, within_warp, within_warpgroup, zero
from ....ptx.straight import straight_line
from ....toolchain import KernelSource
from ...bands import BOUNDS
from .. import packed, tickets
from ..scores import Scores, element, length_of, option_types
from . import unseen
from .config import PART_ROWS, ROW_THREADS, SINK_THREADS, TICKET_BYTES, BackwardConfig, SharedMemory

LOG2E = math.log2(math.e)
WARP = 32  # threads
_ROUNDED = 2.0**-20  # how far, relatively, families differ in the LSE of a row that has only its sink


def build_rows(config: BackwardConfig) -> KernelSource:
    """For each query row ``shift = lse * log2(e)`` and ``delta = rowsum(dO * O) - dlse``, and zeros in the sum of dQ.

    Rows that see no key, those past the length of their batch entry and those that fill up the last block get a shift of +inf, which makes every
    probability 0, and a delta of 0. A block of threads takes a block of queries. With a bias that may be as low as float32 goes, the shift is the
    LSE.

    A row without keys that has a sink does not show in its LSE. It matters only where its Q or dO holds NaN or infinity, its LSE is the sink and its
    output 0: of such a row the keys are searched, and if it sees none, it is given a shift of +inf, too.
    """
    memory = SharedMemory.of(config)
    q_block, parts = config.q_block, config.parts
    lanes = max(1, 1 << (config.head_dim_v // 8 - 1).bit_length())  # of a row, eight elements each
    passes = max(1, q_block * lanes // ROW_THREADS)
    dot = rows.dot(config.element)
    sum_steps = parts * memory.part_bytes // (16 * ROW_THREADS)
    with_deltas, with_dq, deterministic = config.with_deltas, config.with_dq, config.deterministic
    unit, behind_sink, options_of = 1.0 if config.options.lowest_scores else LOG2E, config.behind_sink, config.options.of_rows
    products_of, lengths = config.of_products.options, config.options.lengths
    given = [uint64, *[types.int64] * 3, *option_types(options_of)] if config.options else []
    at_bounds = len(given)  # what a search for keys needs comes last
    at_options = at_bounds + 5
    given = types.Tuple(given + ([int32] * 5 + option_types(products_of) if behind_sink else []))
    bounds_of_entry, (sees_a_key, _) = Scores(64, products_of).bounds_of_entry(False), unseen.queries_that_see(config)
    is_packed = options_of.packed
    if is_packed:
        sequences = packed.Sequences(options_of, "q", q_block)
        order_of, seek = tickets.order_of(options_of), packed.seek(sequences)

    def query_at(m, row, first_q):
        """A row of a block in its sequence, and in the arrays."""
        query = m * q_block + row
        return query, query + first_q if is_packed else query

    def row_of_pass(ops, step, thread, m, seqlen_q):
        """(row in the block, eight elements of it, whether they exist)."""
        row, part = (step * ROW_THREADS + thread) // lanes, thread % lanes
        exists = (m * q_block + row < seqlen_q) & (part * 8 < config.head_dim_v)
        return [row, part, ops.truth(exists)]

    def addresses(ops, dout, out, strides, batch, head, m, row, part, first_q):
        query = ops.wide(query_at(m, row, first_q)[1])
        ends = []
        for base, (of_batch, of_query, of_head) in ((dout, strides[:3]), (out, strides[3:])):
            ends.append(base + ops.wide(batch) * of_batch + query * of_query + ops.wide(head) * of_head + ops.wide(part * 16))
        return ends

    def q_at(ops, given, batch, head, m, row, part, n, length, first_q):
        """(address, whether it exists) of the n-th eight elements of a lane in a row of Q."""
        q, of_batch, of_query, of_head = given[:4]
        (query, place), eight = query_at(m, row, first_q), part + n * lanes
        at = q + ops.wide(batch) * of_batch + ops.wide(place) * of_query + ops.wide(head) * of_head + ops.wide(eight * 16)
        return [at, ops.wide(ops.truth((query < length) & (eight * 8 < config.head_dim)))]

    def named_of(given):
        return {name: x for (name, _), x in zip(options_of.parameters(), given[4:at_bounds], strict=True)}

    def over_lanes(ops, x):
        for lane in (1 << i for i in range(lanes.bit_length() - 1)):
            x = x + ops.exchange([x], lane)[0]
        return x

    def is_suspect(ops, product, size, probe, lse, batch_head, head, m, row, seqlen_q, length, first_q, given):
        """1 where a row may see only its sink, and holds NaN or infinity: of an output of 0, the product is 0 or NaN."""
        product, size, probe = (over_lanes(ops, x) for x in (product, size, probe))
        query, place = query_at(m, row, first_q)
        value = ops.load_at(lse + (ops.wide(batch_head) * ops.wide(seqlen_q) + ops.wide(place)) * 4, query < length)
        sink = ops.fetch("f32", element(ops, named_of(given), "sinks", head=head), 0)
        alone = (ops.absolute(value - sink) <= ops.absolute(value) * _ROUNDED) & (size == 0.0)
        return ops.truth(alone & ((product + probe) * 0.0 != 0.0))

    def finish(ops, product, behind, lse, dlse, shifts, deltas, tile, batch_head, batch, m, row, part, seqlen_q, length, first_q, given):
        product, named = over_lanes(ops, product), named_of(given)
        query, place = query_at(m, row, first_q)
        writes = (part == 0) & (row < q_block)
        at = (ops.wide(batch_head) * ops.wide(seqlen_q) + ops.wide(place)) * 4
        inside = query < length_of(ops, options_of, named, "seqlens_q", batch, length)
        value = ops.load_at(lse + at, inside)
        seen = inside & (value != -math.inf)
        extra = ops.load_at(dlse + at, seen & (dlse != 0))
        if behind_sink:
            value = ops.select(behind != 0, ops.constant("float32", math.inf), value)  # delta is for the sink
        place = (ops.wide(tile) * q_block + ops.wide(row)) * 4
        ops.store_at(shifts + place, ops.select(seen, value * unit, math.inf), writes)
        if with_deltas:
            ops.store_at(deltas + place, ops.select(seen, product - extra, 0.0), writes)

    row_of_pass = straight_line(UniTuple(int32, 3), (int32,) * 4, row_of_pass)
    addresses = straight_line(UniTuple(uint64, 2), (uint64, uint64, UniTuple(types.int64, 6), *(int32,) * 6), addresses)
    q_at = straight_line(UniTuple(types.int64, 2), (given, *(int32,) * 8), q_at)
    is_suspect = straight_line(int32, (*(float32,) * 3, uint64, *(int32,) * 7, given), is_suspect)
    finish = straight_line(void, (float32, int32, *(uint64,) * 4, *(int32,) * 9, given), finish)
    query_of_warp = straight_line(int32, (int32,) * 4, lambda ops, m, row, thread, n: m * q_block + row - (thread & 31) // lanes + n)
    kept_behind = straight_line(
        int32, (int32,) * 4, lambda ops, suspect, thread, n, found: ops.select(((thread & 31) // lanes == n) & (found != 0), ops.integer(0), suspect)
    )
    split = straight_line(
        UniTuple(int32, 4),
        (int32,) * 3,
        lambda ops, tile, q_blocks, heads: [tile % q_blocks, tile // q_blocks // heads, tile // q_blocks % heads, tile // q_blocks],
    )
    sum_at = straight_line(
        uint64,
        (uint64, *(int32,) * 3),
        lambda ops, sums, tile, step, thread: sums + ops.wide(tile) * (parts * memory.part_bytes) + ops.wide((step * ROW_THREADS + thread) * 16),
    )
    turn_at = straight_line(uint64, (uint64, int32, int32), lambda ops, turns, tile, thread: turns + (ops.wide(tile) * parts + ops.wide(thread)) * 4)
    ticket_at = straight_line(uint64, (uint64,), lambda ops, turns: turns - TICKET_BYTES)
    clear = straight_line(void, (uint64,), lambda ops, at: ops.store_at(at, ops.constant("float32", 0.0), at != 0))

    def kernel(dout, out, lse, dlse, shifts, deltas, sums, turns, d0, d1, d2, o0, o1, o2, seqlen_q, heads, q_blocks, *given):
        tile, thread = cuda.blockIdx.x, cuda.threadIdx.x
        m, batch, head, batch_head = split(tile, q_blocks, heads)
        strides = (d0, d1, d2, o0, o1, o2)
        first_q = zero()
        length = seqlen_q
        if is_packed:
            named = given[4:at_bounds]
            spot, bounds_there = seek(m, order_of(named), given[at_bounds:at_options] if behind_sink else no_bounds(), named)
            _, m, first_q, _, _ = spot
            length = bounds_there[0]
        for step in range(passes):
            row, part, exists = row_of_pass(step, thread, m, length)
            product, size, probe, behind = no_product(), no_product(), no_product(), zero()
            if with_deltas or behind_sink:
                a, b = addresses(dout, out, strides, batch, head, m, row, part, first_q)
                product = dot(a, b, exists)
            if behind_sink:
                a, b = addresses(dout, out, strides, batch, head, m, row, part, first_q)
                size = dot(b, b, exists)
                for eight in range(q_passes):
                    at, there = q_at(given, batch, head, m, row, part, eight, length, first_q)
                    probe = sum_of(probe, dot(at, at, there))
                behind = is_suspect(product, size, probe, lse, batch_head, head, m, row, seqlen_q, length, first_q, given)
                if warp.ballot(behind) != 0:
                    bounds, options = given[at_bounds:at_options], given[at_options:]
                    if is_packed:
                        bounds = bounds_there
                    elif lengths:
                        bounds = bounds_of_entry(batch, given[at_bounds:at_options], options)
                    n = zero()
                    while n < rows_of_warp:
                        found = sees_a_key(query_of_warp(m, row, thread, n), within_warp(thread), batch, head, bounds, options)
                        behind = kept_behind(behind, thread, n, found)
                        n = following(n)
            finish(product, behind, lse, dlse, shifts, deltas, tile, batch_head, batch, m, row, part, seqlen_q, length, first_q, given)
        if with_dq:
            for step in range(sum_steps):
                rows.zero(sum_at(sums, tile, step, thread))
        if deterministic:
            if thread < parts:
                clear(turn_at(turns, tile, thread))
            if tile == 0 and thread == 0:
                clear(ticket_at(turns))

    no_bounds = straight_line(BOUNDS, (), lambda ops: [ops.integer(0)] * 5)
    q_passes, rows_of_warp = -(-config.head_dim // (8 * lanes)), 32 // lanes
    sum_of = straight_line(float32, (float32,) * 2, lambda ops, x, y: x + y)
    no_product = straight_line(float32, (), lambda ops: ops.constant("float32", 0.0))
    signature = types.void(*[types.uint64] * 8, *[types.int64] * 6, *[types.int32] * 3, given)
    return KernelSource(kernel, signature, threads=ROW_THREADS, fastmath=False)


def build_dq(config: BackwardConfig) -> KernelSource:
    """dQ, scaled and rounded, out of the sum, which holds a block of queries in parts of 64 rows in the order of registers.

    Queries that see no key get 0, whatever the keys that their neighbours see have brought into the sum. The shift tells them, but where there are
    sinks: there the mask is searched, once NaN or infinity shows.
    """
    memory = SharedMemory.of(config)
    parts, columns, by_rows = config.parts, config.part_columns, config.q_block > PART_ROWS
    load, scale, to_16bit = fragment.load_plain(columns), fragment.scale(columns), fragment.to_16bit(columns, config.element)
    select_rows = fragment.select_rows(columns)
    panel_bytes, panels = PART_ROWS * 128, columns // 64
    put = fragment.store_matrix(columns, panel_bytes)
    store_first, store_second = (tma.store_panels(4, first, panels, panel_bytes) for first in (0, panels))
    base = shared.addresses(0)

    def part_of(ops, thread, tile, sums, s_base):
        part = thread >> 7
        return [sums + (ops.wide(tile) * parts + ops.wide(part)) * memory.part_bytes, ops.wide(s_base) + ops.wide(part) * (panels * panel_bytes)]

    def place_of(ops, tile, q_blocks, heads, part):
        head = tile // q_blocks
        return [head // heads, head % heads, tile % q_blocks * config.q_block + (part * PART_ROWS if by_rows else 0), part + 1]

    def seen_rows(ops, shifts, tile, part, thread):
        """1 for each of the thread's two rows that sees a key."""
        row = (part * PART_ROWS if by_rows else 0) + (thread >> 5) * 16 + ((thread & 31) >> 2)
        at = shifts + (ops.wide(tile) * config.q_block + ops.wide(row)) * 4
        return [ops.truth(ops.load_at(at + 32 * i, at != 0) != math.inf) for i in (0, 1)]

    part_of = straight_line(UniTuple(uint64, 2), (int32, int32, uint64, int32), part_of)
    seen_rows = straight_line(UniTuple(int32, 2), (uint64, *(int32,) * 3), seen_rows)
    place_of = straight_line(UniTuple(int32, 4), (int32,) * 4, place_of)
    columns_apart, may_hide = not by_rows and parts > 1, config.may_hide_queries

    behind_sink, lengths, options_of = config.behind_sink, config.options.lengths, config.of_products.options
    is_packed = options_of.packed
    given = [int32] * 5 + option_types(options_of) if behind_sink or is_packed else []
    at_dq = len(given)
    given = types.Tuple(given + ([uint64, types.int64, types.int64] if is_packed else []))
    if is_packed:
        sequences = packed.Sequences(options_of, "q", config.q_block)
        order_of, seek = tickets.order_of(options_of), packed.seek(sequences)
        is_whole, address_from = packed.is_whole(PART_ROWS), packed.address_from
        put_first, put_second = (packed.store_rows(config.head_dim, panel_bytes, first, panels) for first in (0, panels))
    number_of = straight_line(int32, (int32, int32), lambda ops, tile, q_blocks: tile % q_blocks)
    row_in = straight_line(int32, (int32, int32), lambda ops, m, part: m * config.q_block + (part * PART_ROWS if by_rows else 0))
    bounds_of_entry, seeing_rows, spoilt = Scores(64, options_of).bounds_of_entry(False), unseen.queries_that_see(config)[1], fragment.spoilt(columns)
    query_of = straight_line(int32, (int32, int32), lambda ops, row, thread: row + (thread >> 5) * 16 + ((thread & 31) >> 2))

    def kernel(dq_map, sums, shifts, heads, q_blocks, factor, *given):
        tile, tid = cuda.blockIdx.x, cuda.threadIdx.x
        (s_base,) = base()
        part, thread = warp.shuffle_index(warpgroup_of(tid), 0), within_warpgroup(tid)
        if is_packed:
            options = given[5:at_dq]
            spot, bounds = seek(number_of(tile, q_blocks), order_of(options), given[:5], options)
            _, m, first_q, stored, _ = spot
        source, staged = part_of(tid, tile, sums, s_base)
        dq = load(source, thread)
        if may_hide:
            dq = select_rows(dq, seen_rows(shifts, tile, part, thread))
        if behind_sink and warp.ballot(spoilt(dq)) != 0:
            batch, head, row, _ = place_of(tile, q_blocks, heads, part)
            if is_packed:
                row = row_in(m, part)
            else:
                bounds, options = given[:5], given[5:]
                if lengths:
                    bounds = bounds_of_entry(batch, given[:5], options)
            dq = select_rows(dq, seeing_rows(query_of(row, thread), within_warp(thread), batch, head, bounds, options))
        put(to_16bit(scale(dq, factor)), staged, thread)
        batch, head, row, barrier = place_of(tile, q_blocks, heads, part)
        tma.fence_async()
        warp.barrier_sync(barrier, 128)
        if is_packed:
            row = row_in(m, part)
            rest = minus(stored, row)
            whole = is_whole(row, stored)
            row = plus(first_q, row)
            if whole == 0:
                dq_at, of_row, of_head = given[at_dq:]
                target = address_from(dq_at, of_row, of_head, row, head)
                if columns_apart and part == 1:
                    put_second(staged, thread, target, rest)
                else:
                    put_first(staged, thread, target, rest)
        if thread == 0 and (not is_packed or whole != 0):
            if columns_apart and part == 1:
                store_second(dq_map, staged, row, head, batch)
            else:
                store_first(dq_map, staged, row, head, batch)
            tma.wait_stores_read()

    signature = types.void(types.uint64, types.uint64, types.uint64, types.int32, types.int32, types.float32, given)
    return KernelSource(kernel, signature, threads=128 * parts, fastmath=False, tensor_maps=(0,))


def build_dsinks(config: BackwardConfig) -> KernelSource:
    """The gradients of the sinks, of which each row gives ``-exp(sink - lse) * delta``; a block for each head, always in the same order.

    The parameters: dsinks and its stride, lse, deltas; batch, seqlen_q, heads, rows of a head among the deltas; those of the options of rows.
    """
    options_of, threads = config.options.of_rows, SINK_THREADS
    given = types.Tuple(option_types(options_of))

    def named_of(values):
        return {name: x for (name, _), x in zip(options_of.parameters(), values, strict=True)}

    def add_row(ops, total, lse, deltas, row, batch, head, seqlen_q, heads, rows, given):
        batch_head = ops.wide(batch) * ops.wide(heads) + ops.wide(head)
        sink = ops.fetch("f32", element(ops, named_of(given), "sinks", head=head), 0)
        end = ops.load_at(lse + (batch_head * ops.wide(seqlen_q) + ops.wide(row)) * 4, row >= 0)
        delta = ops.load_at(deltas + (batch_head * ops.wide(rows) + ops.wide(row)) * 4, row >= 0)
        return total + ops.select(end != -math.inf, ops.exp2((sink - end) * LOG2E) * delta, 0.0)

    def over_warp(ops, total):
        for lane in (1, 2, 4, 8, 16):
            total = total + ops.exchange([total], lane)[0]
        return total

    add_row = straight_line(float32, (float32, uint64, uint64, *(int32,) * 6, given), add_row)
    over_warp = straight_line(float32, (float32,), over_warp)
    length = straight_line(
        int32,
        (int32, int32, given),
        lambda ops, batch, seqlen_q, given: length_of(ops, options_of, named_of(given), "seqlens_q", batch, seqlen_q),
    )
    next_row = straight_line(int32, (int32,), lambda ops, row: row + threads)
    write = straight_line(
        void,
        (uint64, types.int64, int32, int32, float32),
        lambda ops, dsinks, stride, head, thread, total: ops.store_at(dsinks + ops.wide(head) * stride, total * -1.0, thread == 0),
    )

    def add_packed_row(ops, total, lse, deltas, number, m, row, first_q, length, head, total_q, rows, given):
        query = m * q_block + row
        sink = ops.fetch("f32", element(ops, named_of(given), "sinks", head=head), 0)
        end = ops.load_at(lse + (ops.wide(head) * ops.wide(total_q) + ops.wide(first_q + query)) * 4, query < length)
        delta = ops.load_at(deltas + (ops.wide(head) * ops.wide(rows) + ops.wide(number * q_block + row)) * 4, query < length)
        return total + ops.select((query < length) & (end != -math.inf), ops.exp2((sink - end) * LOG2E) * delta, 0.0)

    is_packed, q_block = options_of.packed, config.q_block
    if is_packed:
        sequences = packed.Sequences(options_of, "q", q_block)
        order_of, seek = tickets.order_of(options_of), packed.seek(sequences)
        add_packed_row = straight_line(float32, (float32, uint64, uint64, *(int32,) * 8, given), add_packed_row)
    no_bounds = straight_line(BOUNDS, (), lambda ops: [ops.integer(0)] * 5)
    blocks_of = straight_line(int32, (int32,), lambda ops, rows: rows // q_block)
    next_warps = straight_line(int32, (int32,), lambda ops, number: number + threads // WARP)
    next_lanes = straight_line(int32, (int32,), lambda ops, row: row + WARP)

    def kernel(dsinks, stride, lse, deltas, batches, seqlen_q, heads, rows, *given):
        head, thread = cuda.blockIdx.x, cuda.threadIdx.x
        sums = cuda.shared.array(32, float32)  # of the warps
        total, batch = nothing(), zero()
        if is_packed:  # a block of queries a warp
            ascending = order_of(given)
            number = warp_of(thread)
            while number < blocks_of(rows):
                spot, bounds = seek(number, ascending, no_bounds(), given)
                row = within_warp(thread)
                while row < q_block:
                    total = add_packed_row(total, lse, deltas, number, spot[1], row, spot[2], bounds[0], head, seqlen_q, rows, given)
                    row = next_lanes(row)
                number = next_warps(number)
        else:
            while batch < batches:
                row, end = place(thread), length(batch, seqlen_q, given)
                while row < end:
                    total = add_row(total, lse, deltas, row, batch, head, seqlen_q, heads, rows, given)
                    row = next_row(row)
                batch = following(batch)
        total = over_warp(total)
        if within_warp(thread) == 0:
            sums[warp_of(thread)] = total
        cuda.syncthreads()
        total = over_warp(sums[within_warp(thread)])
        write(dsinks, stride, head, thread, total)

    place = straight_line(int32, (int32,), lambda ops, thread: thread)
    nothing = straight_line(float32, (), lambda ops: ops.constant("float32", 0.0))
    signature = types.void(types.uint64, types.int64, types.uint64, types.uint64, *[types.int32] * 4, given)
    return KernelSource(kernel, signature, threads=threads, fastmath=False)
