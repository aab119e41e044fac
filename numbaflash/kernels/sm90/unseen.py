"""Values that no row of a tile sees must not be multiplied: a weight of 0 times NaN is NaN.

Where only the device knows what is seen (a mask, lengths), the warps of the producer's warpgroup that issue no loads stand between the loads of V
and the consumers. They look through a block of V for NaN and infinity, and replace the rows of keys that no row of the tile sees by zeros. That there
is something to replace is rare; what it costs is to look, a few percent of the consumers' instructions.
"""

from __future__ import annotations

from llvmlite import ir
from numba import cuda
from numba.cuda.types import int32

from ...ptx import pipeline, tma, warp
from ...ptx.inline import I32, U32, VOID, emit, llvm_i32, make_intrinsic
from ...ptx.straight import straight_line
from .config import INSPECTORS, ForwardConfig, SharedMemory
from .scores import Scores

inline = cuda.jit(device=True, inline="always")

ROWS = 4  # that a warp looks at together: 8 lanes a row of a panel


def build(config: ForwardConfig):
    """``inspect(stages, place, block, partial, inspector, lane, q_block, batch, head, bounds, options)``: done by every warp of the inspectors before
    the consumers may read the stage of V at that place. ``bounds`` are those of the batch entry; with a mask, ``partial`` is 0 for a block of which
    all is seen."""
    memory = SharedMemory.of(config)
    panels, panel_bytes, kv_block, q_tile, pack = memory.v_panels, memory.kv_panel_bytes, config.kv_block, config.q_tile, config.pack
    masked = config.options.masked
    of_stage = pipeline.slot(memory.v_bytes)
    scan, blank = scan_rows(config.element, panels, panel_bytes), blank_row(panels, panel_bytes)
    of_scores = Scores(kv_block, config.options)
    seen_keys, sees = of_scores.seen_keys(config.left), of_scores.sees(pack, config.left, config.right)

    is_whole = straight_line(int32, (int32, int32), lambda ops, first, end: ops.truth((first <= 0) & (end >= kv_block)))
    lies_in = straight_line(int32, (int32,) * 3, lambda ops, row, first, end: ops.truth((row >= first) & (row < end)))
    key_of = straight_line(int32, (int32, int32), lambda ops, block, row: block * kv_block + row)
    row_of = straight_line(int32, (int32, int32), lambda ops, q_block, row: q_block * q_tile + row)
    first_row = straight_line(int32, (int32,), lambda ops, inspector: inspector * ROWS)
    next_rows = straight_line(int32, (int32,), lambda ops, row: row + INSPECTORS * ROWS)
    past_rows = straight_line(int32, (int32,), lambda ops, row: row + ROWS)
    next_row = straight_line(int32, (int32,), lambda ops, row: row + 1)
    next_lanes = straight_line(int32, (int32,), lambda ops, row: row + 32)
    of_row = straight_line(int32, (int32, int32), lambda ops, suspects, row: (suspects >> ((row & (ROWS - 1)) << 3)) & 0xFF)

    @inline
    def is_seen(row, block, lane, q_block, batch, head, bounds, first, end, options):
        """Not 0 where a row of the tile sees the key of a row of V."""
        found = lies_in(row, first, end)
        if masked and found != 0:
            key, mine = key_of(block, row), lane
            found = warp.ballot(0)
            while mine < q_tile and found == 0:
                found = warp.ballot(sees(row_of(q_block, mine), key, batch, head, bounds, options))
                mine = next_lanes(mine)
        return found

    @inline
    def inspect(stages, place, block, partial, inspector, lane, q_block, batch, head, bounds, options):
        first, end = seen_keys(block, bounds)
        if partial != 0 if masked else is_whole(first, end) == 0:
            stage = of_stage(stages, place)
            rows = first_row(inspector)
            while rows < kv_block:
                suspects = scan(stage, rows, lane)
                if suspects != 0:
                    row = rows
                    while row < past_rows(rows):
                        if of_row(suspects, row) != 0 and is_seen(row, block, lane, q_block, batch, head, bounds, first, end, options) == 0:
                            blank(stage, row, lane)
                            tma.fence_async()
                        row = next_row(row)
                rows = next_rows(rows)
        warp.sync()

    return inspect


def scan_rows(element, panels, panel_bytes):
    """``f(stage, rows, lane) -> int32``: a bit for each lane that finds NaN or infinity; 8 lanes a row, of 4 rows from ``rows`` on."""
    fma = f"fma.rn.{'f16x2' if element == 'f16' else 'bf16x2'} t, v{{n}}, z, t;"  # 0 * NaN is NaN, and so is 0 * infinity
    lines = ["{.reg .b32 v0, v1, v2, v3, z, t; .reg .pred p;", "mov.b32 z, 0; mov.b32 t, 0;"]
    for panel in range(panels):
        lines.append(f"ld.shared.v4.b32 {{v0, v1, v2, v3}}, [$1+{panel * panel_bytes}];")
        lines += [fma.format(n=n) for n in range(4)]
    lines.append("setp.ne.b32 p, t, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}")

    def generate(builder, args, _):
        stage, rows, lane = args
        at = builder.add(stage, builder.shl(rows, ir.Constant(llvm_i32, 7)))
        at = builder.add(at, builder.shl(lane, ir.Constant(llvm_i32, 4)))
        return emit(builder, llvm_i32, [at], "\n".join(lines), "=r,r,~{memory}")

    return make_intrinsic(I32, (U32, I32, I32), generate)


def blank_row(panels, panel_bytes):
    """``f(stage, row, lane)``: zeros in a row of all panels, 16 bytes a lane."""

    def generate(builder, args, _):
        stage, row, lane = args
        panel, piece = builder.lshr(lane, ir.Constant(llvm_i32, 3)), builder.and_(lane, ir.Constant(llvm_i32, 7))
        at = builder.add(stage, builder.shl(row, ir.Constant(llvm_i32, 7)))
        at = builder.add(at, builder.mul(panel, ir.Constant(llvm_i32, panel_bytes)))
        at = builder.add(at, builder.shl(piece, ir.Constant(llvm_i32, 4)))
        text = f"{{.reg .pred p; .reg .b32 z; setp.lt.s32 p, $1, {8 * panels}; mov.b32 z, 0; @p st.shared.v4.b32 [$0], {{z, z, z, z}};}}"
        emit(builder, ir.VoidType(), [at, lane], text, "r,r,~{memory}")

    return make_intrinsic(VOID, (U32, I32, I32), generate)
