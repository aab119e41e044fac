"""The gradient of a bias: one block sums one tile of it, over everything that the bias is broadcast along.

::

    for each batch entry, head, block of queries, tile of keys that shares these elements of the bias:
        Q, dO, K, V, and what goes with the rows -> shared memory
        S^T = K Q^T,  dP^T = V dO^T
        total += P^T * (dP^T - delta)       registers
    total -> shared memory, summed along a broadcast axis, -> dbias

Scores are computed once more for it, two products beside the five of the others; in return there is no workspace, no addition that others may come
ahead of, and always the same order. The fewer elements a bias has, the fewer blocks there are. Blocks have no producer: several of them at work on a
multiprocessor hide what one waits for. Nothing needs cleaning: NaN of a query or a key that takes no part stays in its own pairs, which are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda
from numba.cuda import types
from numba.cuda.types import UniTuple, int32, uint64, void

from ....ptx import bulk, fragment, mbarrier, pipeline, shared, tma, warp, wgmma
from ....ptx.index import following, plus, warpgroup_of, within_warpgroup, zero
from ....ptx.straight import straight_line
from ....toolchain import KernelSource
from ...bands import BOUNDS, KeyBand
from ..scores import Scores, option_types
from .config import BackwardConfig, BiasMemory
from .scores import KeyScores

Q_BLOCK, KV_TILE, THREADS = BiasMemory.q_block, BiasMemory.kv_tile, BiasMemory.threads
_FOUR, _FIVE = UniTuple(int32, 4), UniTuple(int32, 5)
_PITCH = KV_TILE + 1  # of the sums of a query in shared memory: neighbours lie in other banks


@dataclass(frozen=True)
class Parts:
    """What a block sums up. ``by_query`` and ``by_key`` say whether the bias has those axes; else a block sums over them."""

    by_query: bool
    by_key: bool
    left: bool
    right: bool

    def own(self):
        """``f(tile, bias_heads, q_blocks, kv_tiles) -> (batch entry, head, block of queries, tile of keys)`` of the bias, for a block of threads."""

        def body(ops, tile, bias_heads, q_blocks, kv_tiles):
            own = [ops.integer(0), ops.integer(0)]
            if self.by_key:
                own[1], tile = tile % kv_tiles, tile // kv_tiles
            if self.by_query:
                own[0], tile = tile % q_blocks, tile // q_blocks
            return [tile // bias_heads, tile % bias_heads, *own]

        return straight_line(_FOUR, (int32,) * 4, body)

    def shares(self):
        """``f(bias_batches, bias_heads, batches, heads, q_blocks, kv_tiles) -> (...)``: how many batch entries, heads, blocks of queries and tiles of
        keys share an element of the bias, and all together."""

        def body(ops, bias_batches, bias_heads, batches, heads, q_blocks, kv_tiles):
            one = ops.integer(1)
            counts = [ops.select(bias_batches == 1, batches, one), ops.select(bias_heads == 1, heads, one)]
            counts += [one if self.by_query else q_blocks, one if self.by_key else kv_tiles]
            return [*counts, counts[0] * counts[1] * counts[2] * counts[3]]

        return straight_line(_FIVE, (int32,) * 6, body)

    def of_turn(self):
        """``f(turn, own, shares) -> (batch entry, head, block of queries, tile of keys)`` that a block comes to."""

        def body(ops, turn, own, shares):
            found = []
            for first, count in zip(reversed(own), reversed(shares[:4]), strict=True):
                found.append(first + turn % count)
                turn = turn // count
            return found[::-1]

        return straight_line(_FOUR, (int32, _FOUR, _FIVE), body)

    def is_work(self):
        """``f(m, n, bounds) -> int32``: 1 where a query of block m may see a key of tile n."""

        def body(ops, m, n, bounds):
            length_q, length_k, offset, left, right = bounds
            query, key = m * Q_BLOCK, n * KV_TILE
            last_query, last_key = ops.minimum(query + Q_BLOCK, length_q) - 1, ops.minimum(key + KV_TILE, length_k) - 1
            seen = (last_query >= query) & (last_key >= key)
            if self.left:
                seen &= last_key >= query + offset - left
            if self.right:
                seen &= key <= last_query + offset + right
            return ops.truth(seen)

        return straight_line(int32, (int32, int32, BOUNDS), body)


def build(config: BackwardConfig) -> KernelSource:
    """The kernel of one configuration.

    Its parameters: maps of q, k, v and dout; dbias (4 axes, of size 1 where it is broadcast), shifts and deltas; those of the band; first query and
    key that the maps hold; batch entries, heads, query heads a key head, blocks of queries, tiles of keys, rows of a head among the shifts; the scale
    in base 2; those of the options.
    """
    memory, element, d, dv = BiasMemory.of(config), config.element, config.padded_head_dim, config.padded_head_dim_v
    options_of, (by_query, by_key) = config.options, config.dbias_axes
    parts = Parts(by_query, by_key, config.left, config.right)
    own_part, shares_of, part_of_turn, is_work = parts.own(), parts.shares(), parts.of_turn(), parts.is_work()
    q_steps, kv_steps = ([wgmma.k_major_steps(n, size) for n in (d, dv)] for size in (memory.q_panel_bytes, memory.kv_panel_bytes))
    scores, value_scores = (wgmma.product_shared(Q_BLOCK, n, element, kv_steps[i], q_steps[i]) for i, n in enumerate((d, dv)))
    wait_scores, wait_value_scores = wgmma.wait(1, Q_BLOCK), wgmma.wait(0, Q_BLOCK)
    operand, only, flip = wgmma.operand(), pipeline.start(0), pipeline.advance(1)
    load_k, load_v = (tma.load_panels(4, n, memory.kv_panel_bytes, arrives=False) for n in (memory.qk_panels, memory.v_panels))
    load_q = tma.load_panels(4, memory.qk_panels, memory.q_panel_bytes, arrives=False)
    load_dout, load_row = tma.load_panels(4, memory.v_panels, memory.q_panel_bytes), bulk.load(memory.row_bytes)
    addresses = shared.addresses(memory.k, memory.v, memory.q, memory.dout, memory.shifts, memory.deltas, memory.barrier)
    init = mbarrier.init_ring(1, 1)

    lengths, masked, drops = options_of.lengths, options_of.masked, options_of.dropout
    bounds_of_entry = Scores(Q_BLOCK, options_of).bounds_of_entry(False)
    of_scores = KeyScores(Q_BLOCK, Q_BLOCK, options_of, config.left, of_bias=True)
    take_seat, fetch, weigh, differentiate = of_scores.take_seat(), of_scores.fetch(), of_scores.weigh(True), of_scores.differentiate(True)
    draw, no_kept = of_scores.draw() if options_of.dropout else None, of_scores.no_kept()
    fetch_mask, no_mask_words = of_scores.fetch_mask() if options_of.masked else None, of_scores.no_mask_words()
    limits_of_keys, column_values = KeyBand(KV_TILE, Q_BLOCK, config.left, config.right).limits(), fragment.column_values(Q_BLOCK)
    block = fragment.fragment(Q_BLOCK)
    add = straight_line(block, (block, block), lambda ops, a, b: [x + y for x, y in zip(a, b, strict=True)])
    nothing = fragment.zeros(Q_BLOCK)

    # Index arithmetic.
    def place_of_thread(ops, thread, w):
        """(first of its two keys in the tile, first column, bytes to it)."""
        column = (thread & 3) * 2
        return [w * 64 + (thread >> 5) * 16 + ((thread & 31) >> 2), column, column * 4]

    def rows_at(ops, shifts, deltas, batch, head, heads, m, rows):
        at = ((ops.wide(batch) * ops.wide(heads) + ops.wide(head)) * ops.wide(rows) + ops.wide(m * Q_BLOCK)) * 4
        return [shifts + at, deltas + at]

    def put(ops, sums, key, column, total):
        """The sums of a block lie by query, then by key."""
        for i, x in enumerate(total):
            ops.store(sums, column * _PITCH + key, (8 * (i >> 2) + (i & 1)) * _PITCH + 8 * (i >> 1 & 1), [x])

    def write(ops, dbias, batch, head, query, key, x):
        inside = (query < dbias.shape[2]) & (key < dbias.shape[3])
        value = x if dtype == "float32" else ops.bits_of(dtype, x)
        ops.store_row(ops.place(dbias, (batch, head, query, key)), [value], inside)

    dtype = options_of.bias.dtype
    dbias_type = types.Array(types.float32 if dtype == "float32" else types.uint16, 4, "A")
    place_of_thread = straight_line(UniTuple(int32, 3), (int32, int32), place_of_thread)
    rows_at = straight_line(UniTuple(uint64, 2), (uint64, uint64, *(int32,) * 5), rows_at)
    put = straight_line(void, (types.Array(types.float32, 1, "C"), int32, int32, block), put)
    write = straight_line(void, (dbias_type, *(int32,) * 4, types.float32), write)
    own_rows = straight_line(int32, (int32, int32), lambda ops, address, w: address + w * (64 * wgmma.ROW_BYTES))
    query_of = straight_line(int32, (int32, int32), lambda ops, m, first: m * Q_BLOCK - first)
    key_of = straight_line(int32, (int32, int32), lambda ops, n, first: n * KV_TILE - first)
    kv_head_of = straight_line(int32, (int32, int32), lambda ops, head, group: head // group)
    rows, columns = Q_BLOCK if by_query else 1, KV_TILE if by_key else 1

    def kernel(
        q_map, k_map, v_map, dout_map, dbias, shifts, deltas, seqlen_q, seqlen_k, offset, left, right, first_query, first_key,
        batches, heads, group, q_blocks, kv_tiles, rows_of_head, scale_log2, *options
    ):  # fmt: skip
        tid = cuda.threadIdx.x
        w, thread = warp.shuffle_index(warpgroup_of(tid), 0), within_warpgroup(tid)
        s_k, s_v, s_q, s_dout, s_shifts, s_deltas, full = addresses()
        if tid == 0:
            init(full)
            mbarrier.fence_init()
        own = own_part(cuda.blockIdx.x, dbias.shape[1], q_blocks, kv_tiles)
        shares = shares_of(dbias.shape[0], dbias.shape[1], batches, heads, q_blocks, kv_tiles)
        bounds = (seqlen_q, seqlen_k, offset, left, right)
        own_key, column, bytes_to_column = place_of_thread(thread, w)
        total, place, turn = nothing(), only(), zero()
        while turn < shares[4]:
            batch, head, m, n = part_of_turn(turn, own, shares)
            if lengths:
                bounds = bounds_of_entry(batch, (seqlen_q, seqlen_k, offset, left, right), options)
            if is_work(m, n, bounds) != 0:
                cuda.syncthreads()  # nobody reads the operands any more
                if tid == 0:
                    kv_head, query, key = kv_head_of(head, group), query_of(m, first_query), key_of(n, first_key)
                    shifts_at, deltas_at = rows_at(shifts, deltas, batch, head, heads, m, rows_of_head)
                    load_row(s_shifts, only(), shifts_at, full)
                    load_row(s_deltas, only(), deltas_at, full)
                    load_k(s_k, only(), k_map, full, key, kv_head, batch)
                    load_q(s_q, only(), q_map, full, query, head, batch)
                    load_v(s_v, only(), v_map, full, key, kv_head, batch)
                    load_dout(s_dout, only(), dout_map, full, query, head, batch)
                key = plus(key_of(n, 0), own_key)
                seat = take_seat(key, column, batch, seqlen_k, bounds, options)
                words = fetch(seat, m, head, options)
                mask_words = fetch_mask(key, column, m, batch, head, bounds[0], seqlen_k, options) if masked else no_mask_words()
                pipeline.wait(full, place)
                place = flip(place)
                s = scores(operand(own_rows(s_k, w), only()), operand(s_q, only()))
                dp = value_scores(operand(own_rows(s_v, w), only()), operand(s_dout, only()))
                limits, shift = limits_of_keys(key, column, bounds), column_values(plus(s_shifts, bytes_to_column))
                _, p = weigh(wait_scores(s), shift, words, mask_words, seat, m, head, limits, scale_log2, options)
                kept = draw(seat, m, head, options) if drops else no_kept()
                total = add(total, differentiate(p, wait_value_scores(dp), kept, column_values(plus(s_deltas, bytes_to_column)), options))
            turn = following(turn)

        cuda.syncthreads()
        sums = cuda.shared.array(0, types.float32)
        put(sums, own_key, column, total)
        cuda.syncthreads()
        if not by_query:
            for at in range(tid, KV_TILE, THREADS):
                x = sums[at]
                for row in range(1, Q_BLOCK):
                    x += sums[row * _PITCH + at]
                sums[at] = x
            cuda.syncthreads()
        if not by_key:
            for row in range(tid, rows, THREADS):
                x = sums[row * _PITCH]
                for at in range(1, KV_TILE):
                    x += sums[row * _PITCH + at]
                sums[row * _PITCH] = x
            cuda.syncthreads()
        own_batch, own_head, own_m, own_n = own
        for number in range(tid, rows * columns, THREADS):
            row, at = number // columns, number % columns
            write(dbias, own_batch, own_head, own_m * rows + row, own_n * columns + at, sums[row * _PITCH + at])

    signature = types.void(
        *[types.uint64] * 4, dbias_type, types.uint64, types.uint64, *[types.int32] * 13, types.float32, types.Tuple(option_types(options_of))
    )
    return KernelSource(kernel, signature, threads=THREADS, fastmath=False, tensor_maps=(0, 1, 2, 3))
