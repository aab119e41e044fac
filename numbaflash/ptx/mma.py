"""Matrix products of one warp (mma.sync, compute capability 8.0): 16 rows in registers times tiles in shared memory.

Tiles lie row by row, ``pitch`` bytes apart, an odd multiple of 16 so that eight rows lie in different banks. Results are fragments as
`numbaflash.ptx.fragment` has them, of a warp instead of a warpgroup.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types
from numba.cuda.types import int32

from .fragment import fragment, packed
from .inline import I32, U32, emit, llvm_f32, llvm_i32, make_intrinsic, pack, unpack
from .straight import straight_line

_FOUR = ir.LiteralStructType([llvm_i32] * 4)


def pitch(columns: int) -> int:
    """Bytes from row to row of a tile of so many 16-bit columns, a multiple of 16."""
    return 2 * columns + 16


def _load(builder, address, step, transposed=False):
    """Four 8 x 8 matrices, of which each lane names a row."""
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4+{step}];"
    return unpack(builder, emit(builder, _FOUR, [address], text, "=r,=r,=r,=r,r,~{memory}"), 4)


def _product(builder, element, a, b, c):
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
    )
    result = ir.LiteralStructType([llvm_f32] * 4)
    return unpack(builder, emit(builder, result, [*a, *b, *c], text, ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4), pure=True), 4)


def row_operand(depth: int):
    """Numba type of 16 rows of ``depth`` 16-bit elements in the registers of a warp: four words for each 16 of them."""
    return types.UniTuple(I32, depth // 4)


def along_rows(row_pitch: int):
    """``f(lane) -> offset`` from a tile: where a lane reads of an operand whose rows run along the depth of `product`."""
    return straight_line(int32, (int32,), lambda ops, lane: ((lane & 7) + (lane >> 4) * 8) * row_pitch + ((lane >> 3) & 1) * 16)


def across_rows(row_pitch: int):
    """The same of one whose rows are steps of the depth of `add_product`, and of the rows of `product` where they are in shared memory."""
    return straight_line(int32, (int32,), lambda ops, lane: (lane & 15) * row_pitch + (lane >> 4) * 16)


def product(columns: int, depth: int, element: str, row_pitch: int, rows_in_registers: bool = True):
    """``f(rows, tile) -> fragment``: 16 rows times the transpose of a tile of ``columns`` rows.

    The rows are a `row_operand`, or else lie in shared memory at `across_rows` of an address; the tile is at `along_rows` of one.
    """
    steps = depth // 16

    def generate(builder, args, llvm_result):
        rows = unpack(builder, args[0], 4 * steps) if rows_in_registers else None
        totals = [[ir.Constant(llvm_f32, 0.0)] * 4 for _ in range(columns // 8)]
        for step in range(steps):
            a = rows[4 * step : 4 * step + 4] if rows_in_registers else _load(builder, args[0], 32 * step)
            for n in range(0, columns // 8, 2):
                b = _load(builder, args[1], 8 * n * row_pitch + 32 * step)
                totals[n], totals[n + 1] = (_product(builder, element, a, b[2 * i : 2 * i + 2], totals[n + i]) for i in (0, 1))
        return pack(builder, llvm_result, [x for four in totals for x in four])

    return make_intrinsic(fragment(columns), (row_operand(depth) if rows_in_registers else U32, U32), generate)


def add_product(columns: int, depth: int, element: str, row_pitch: int):
    """``f(accumulator, a, tile) -> fragment``: adds 16 rows of ``depth`` packed elements times a tile of as many rows, at `across_rows`."""

    def generate(builder, args, llvm_result):
        total, a = unpack(builder, args[0], columns // 2), unpack(builder, args[1], depth // 4)
        for step in range(depth // 16):
            for n in range(0, columns // 8, 2):
                b = _load(builder, args[2], 16 * step * row_pitch + 16 * n, transposed=True)
                for i in (0, 1):
                    at = 4 * (n + i)
                    total[at : at + 4] = _product(builder, element, a[4 * step : 4 * step + 4], b[2 * i : 2 * i + 2], total[at : at + 4])
        return pack(builder, llvm_result, total)

    return make_intrinsic(fragment(columns), (fragment(columns), packed(depth), U32), generate)
