"""What takes no part must not be multiplied: a weight of 0 times NaN is NaN.

Where only the device knows what takes part (a mask, lengths, a bias of -inf), consumers replace it by zeros in shared memory: rows of Q and dO of
queries that see no key, which have a shift of +inf, and rows of K with NaN or infinity that no query sees. Blocks that hold such queries are those at
the end of the lengths, and what a mask hides wholly; for all others this costs to look at the shifts, and for K to look through it once a tile.

NaN in what does take part may reach the gradients of all keys of a tile, but not of those that no query sees: where one shows in dK or dV, the mask
is searched for who sees the key.
"""

from __future__ import annotations

from llvmlite import ir
from numba import cuda
from numba.cuda.types import UniTuple, int32

from ....ptx import pipeline, tma, warp
from ....ptx.index import following, zero
from ....ptx.inline import I32, U32, VOID, emit, llvm_i32, make_intrinsic
from ....ptx.straight import straight_line
from ...bands import KeyBand
from ..scores import Scores
from ..unseen import ROWS, blank_row, scan_rows
from .config import BackwardConfig, SharedMemory

inline = cuda.jit(device=True, inline="always")

# Of the 16 rows of a warp, a bit each.
first_of_warp_rows = straight_line(int32, (int32, int32), lambda ops, row, lane: row - (lane >> 2))
past_warp_rows = straight_line(int32, (int32,), lambda ops, row: row + 16)
with_bit = straight_line(
    int32, (int32,) * 3, lambda ops, bits, row, found: bits | ops.select(found != 0, ops.integer(1) << (row & 15), ops.integer(0))
)
bits_of_lane = straight_line(UniTuple(int32, 2), (int32, int32), lambda ops, bits, lane: [bits >> (lane >> 2) & 1, bits >> ((lane >> 2) + 8) & 1])

CLEAN = 7  # named barrier of the consumers


def queries(config: BackwardConfig, memory: SharedMemory):
    """``clean(place, ring, w, thread, lane)``: done by all consumers when Q is there and before it is used; waits for dO where there is something to
    do."""
    q_at, dout_at, values_at = (pipeline.slot(n) for n in (memory.q_bytes, memory.dout_bytes, memory.row_bytes))
    find, threads = _dead_rows(config.q_block), 128 * config.consumers
    blank = _blank_dead_rows(config, memory)

    @inline
    def clean(place, ring, w, thread, lane):
        shifts = values_at(ring.shifts, place)
        if find(shifts, lane) != 0:
            pipeline.wait(ring.dout_full, place)
            blank(q_at(ring.q, place), dout_at(ring.dout, place), shifts, w, thread)
            tma.fence_async()
            warp.barrier_sync(CLEAN, threads)

    return clean


def _dead_rows(q_block):
    """``f(shifts, lane) -> int32``: not 0 in all lanes if the shift of a row of the block is +inf."""
    count = q_block // 32
    lines = ["{.reg .pred p, q; .reg .f32 x;", "setp.ne.b32 p, 0, 0;"]
    for i in range(count):
        lines += [f"ld.shared.f32 x, [$1+{128 * i}];", "setp.eq.or.f32 p, x, 0f7f800000, p;"]
    lines.append("vote.sync.any.pred q, p, 0xffffffff; selp.b32 $0, 1, 0, q;}")

    def generate(builder, args, _):
        at = builder.add(args[0], builder.shl(args[1], ir.Constant(llvm_i32, 2)))
        return emit(builder, llvm_i32, [at], "\n".join(lines), "=r,r,~{memory}")

    return make_intrinsic(I32, (U32, I32), generate)


def _blank_dead_rows(config, memory):
    """``f(q, dout, shifts, w, thread)``: zeros in the rows whose shift is +inf; eight threads a row, 16 bytes each of every panel."""
    at_once = config.consumers * 16  # rows
    lines = ["{.reg .pred p; .reg .f32 x; .reg .b32 z;", "mov.b32 z, 0;"]
    for first in range(0, config.q_block, at_once):
        lines += [f"ld.shared.f32 x, [$2+{4 * first}];", "setp.eq.f32 p, x, 0f7f800000;"]
        for base, panels in (("$0", memory.loaded_qk_panels), ("$1", memory.loaded_v_panels)):
            for panel in range(panels):
                lines.append(f"@p st.shared.v4.b32 [{base}+{panel * memory.q_panel_bytes + 128 * first}], {{z, z, z, z}};")
    lines.append("}")

    def generate(builder, args, _):
        q, dout, shifts, w, thread = args
        number = builder.add(builder.shl(w, ir.Constant(llvm_i32, 7)), thread)
        offset, row = builder.shl(number, ir.Constant(llvm_i32, 4)), builder.lshr(number, ir.Constant(llvm_i32, 3))
        row_at = builder.add(shifts, builder.shl(row, ir.Constant(llvm_i32, 2)))
        emit(builder, ir.VoidType(), [builder.add(q, offset), builder.add(dout, offset), row_at], "\n".join(lines), "r,r,r,~{memory}")

    return make_intrinsic(VOID, (U32, U32, U32, I32, I32), generate)


def keys(config: BackwardConfig, memory: SharedMemory):
    """Two functions. What is seen is searched for in all query heads of the group, by a warp together.

    ``clean(s_k, n, w, thread, lane, batch, kv_head, group, bounds, options)`` is done by all consumers when K of tile n is there. Each warp cleans
    the rows from which it computes scores, or some of those that consumers share; the barrier before dQ is computed shows it to the others.

    ``seen_rows(key, lane, batch, kv_head, group, bounds, options) -> (seen0, seen1)`` for the thread's two rows, the first of which has that key.
    """
    kv_tile, masked, panels = config.kv_tile, config.options.masked, memory.loaded_qk_panels
    rows_of_warp = kv_tile // (4 * config.consumers)
    scan, blank = scan_rows(config.element, panels, memory.kv_panel_bytes), blank_row(panels, memory.kv_panel_bytes)
    seen_keys = KeyBand(kv_tile, config.q_block, config.left, config.right).seen()
    sees = Scores(config.q_block, config.of_products.options).sees(1, config.left, config.right)

    first_of_warp = straight_line(int32, (int32, int32), lambda ops, w, thread: (w * 4 + (thread >> 5)) * rows_of_warp)
    key_of = straight_line(int32, (int32, int32), lambda ops, n, row: n * kv_tile + row)
    past_warp = straight_line(int32, (int32,), lambda ops, row: row + rows_of_warp)
    next_rows = straight_line(int32, (int32,), lambda ops, row: row + ROWS)
    next_lanes = straight_line(int32, (int32,), lambda ops, row: row + 32)
    query_of = straight_line(int32, (int32, int32), lambda ops, first, lane: first + lane)
    head_of = straight_line(int32, (int32,) * 3, lambda ops, kv_head, group, member: kv_head * group + member)
    of_row = straight_line(int32, (int32, int32), lambda ops, suspects, row: (suspects >> ((row & (ROWS - 1)) << 3)) & 0xFF)

    @inline
    def is_seen(key, lane, batch, kv_head, group, bounds, options):
        """Not 0 where a query of the group sees the key."""
        found, _ = seen_keys(key, bounds)
        if masked and found != 0:
            found = warp.ballot(0)
            member = zero()
            while member < group and found == 0:
                first = zero()
                while first < bounds[0] and found == 0:
                    found = warp.ballot(sees(query_of(first, lane), key, batch, head_of(kv_head, group, member), bounds, options))
                    first = next_lanes(first)
                member = following(member)
        return found

    @inline
    def clean(s_k, n, w, thread, lane, batch, kv_head, group, bounds, options):
        rows = first_of_warp(w, thread)
        end = past_warp(rows)
        while rows < end:
            suspects = scan(s_k, rows, lane)
            if suspects != 0:
                row, past = rows, next_rows(rows)
                while row < past:
                    if of_row(suspects, row) != 0 and is_seen(key_of(n, row), lane, batch, kv_head, group, bounds, options) == 0:
                        blank(s_k, row, lane)
                        tma.fence_async()
                    row = following(row)
            rows = next_rows(rows)
        warp.sync()

    @inline
    def seen_rows(key, lane, batch, kv_head, group, bounds, options):
        bits, row = zero(), first_of_warp_rows(key, lane)
        end = past_warp_rows(row)
        while row < end:
            bits = with_bit(bits, row, is_seen(row, lane, batch, kv_head, group, bounds, options))
            row = following(row)
        return bits_of_lane(bits, lane)

    return clean, seen_rows


def queries_that_see(config: BackwardConfig):
    """Two functions, in which a warp searches for a key together.

    ``sees_a_key(query, lane, batch, head, bounds, options) -> int32``: not 0 where that query, the same in all lanes, sees one.

    ``seeing_rows(query, lane, batch, head, bounds, options) -> (sees0, sees1)`` for the thread's two rows, the first of which is that query.
    """
    sees = Scores(config.q_block, config.of_products.options).sees(1, config.left, config.right)
    key_of = straight_line(int32, (int32,) * 3, lambda ops, first, lane, end: ops.minimum(first + lane, end - 1))
    next_lanes = straight_line(int32, (int32,), lambda ops, key: key + 32)

    @inline
    def sees_a_key(query, lane, batch, head, bounds, options):
        found, first = warp.ballot(0), zero()
        while first < bounds[1] and found == 0:
            found = warp.ballot(sees(query, key_of(first, lane, bounds[1]), batch, head, bounds, options))
            first = next_lanes(first)
        return found

    @inline
    def seeing_rows(query, lane, batch, head, bounds, options):
        bits, row = zero(), first_of_warp_rows(query, lane)
        end = past_warp_rows(row)
        while row < end:
            bits = with_bit(bits, row, sees_a_key(row, lane, batch, head, bounds, options))
            row = following(row)
        return bits_of_lane(bits, lane)

    return sees_a_key, seeing_rows
