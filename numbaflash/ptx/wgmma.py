"""Warpgroup matrix products (wgmma): 64 x N tiles accumulated in registers by 128 threads.

Operands in shared memory are panels of 64 16-bit columns, a row of 128 bytes, in the 128-byte swizzle in which TMA
writes them; eight rows are 1024 bytes. Register operands are fragments (`numbaflash.ptx.fragment`).

Every product here issues one committed group and returns at once. Its result may not be touched before a `wait` has
carried it through, and issue and wait belong in one loop iteration: ptxas serialises an accumulator that is in flight
over a back edge.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from .fragment import fragment, packed
from .inline import U32, emit, llvm_f32, llvm_i32, make_intrinsic, pack, unpack
from .pipeline import PLACE

PANEL = 64
"""Columns of a panel."""

ROW_BYTES = 128
"""Bytes of a panel's row."""


# A matrix descriptor is 64 bits. Only its low word varies: address >> 4, and above it the distance of two panels >> 4
# (for an operand contiguous along its 64-column axis; unused for one contiguous along K). The high word says: 128-byte
# swizzle, 1024 bytes from one group of eight rows to the next. 32-bit arithmetic on the low word keeps ptxas in uniform registers.
_HIGH_WORD = (1 << 30) | (1024 >> 4)


def descriptor_low(leading_bytes=16):
    """Low word of a descriptor without its address, which enters as ``| address >> 4``."""
    return (leading_bytes >> 4) << 16


def _step(name, low, step):
    """PTX that makes the descriptor ``name`` of a low word advanced by ``step``."""
    return [f"add.u32 l{name}, {low}, {step};", f"mov.b64 {name}, {{l{name}, {_HIGH_WORD}}};"]


def k_major_steps(columns, panel_bytes):
    """Descriptor increments that walk an operand contiguous along K, 16 columns a step, over its panels."""
    return [(k // 4) * (panel_bytes >> 4) + (k % 4) * 2 for k in range(columns // 16)]


def mn_major_steps(rows):
    """Descriptor increments that walk an operand whose rows run along K, 16 rows a step."""
    return [k * (16 * ROW_BYTES >> 4) for k in range(rows // 16)]


def operand(stage_bytes=0, leading_bytes=16):
    """``f(address, place) -> low``: the low word of the descriptor of a stage (of so many bytes) of a ring at an address."""

    def generate(builder, args, _):
        low = builder.or_(builder.lshr(args[0], ir.Constant(llvm_i32, 4)), ir.Constant(llvm_i32, descriptor_low(leading_bytes)))
        return builder.add(low, builder.mul(builder.extract_value(args[1], 0), ir.Constant(llvm_i32, stage_bytes >> 4)))

    return make_intrinsic(U32, (U32, PLACE), generate)


def _registers(count, start=0):
    return "{" + ", ".join(f"${start + i}" for i in range(count)) + "}"


def product_shared(n, k, dtype, a_steps, b_steps, *, a_transposed=False, b_transposed=False, accumulate=False):
    """``f(a, b) -> fragment``: A (64 x k) times B (k x n), both in shared memory, by the low words of their descriptors.

    With ``accumulate``, ``f(accumulator, a, b)`` adds the product.
    """
    count = n // 2

    def generate(builder, args, llvm_result):
        tied = unpack(builder, args[0], count) if accumulate else []
        at = count + len(tied)
        lines = ["{", ".reg .b64 a, b;", ".reg .b32 la, lb;", "wgmma.fence.sync.aligned;"]
        for step in range(k // 16):
            lines += [
                *_step("a", f"${at}", a_steps[step]),
                *_step("b", f"${at + 1}", b_steps[step]),
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {_registers(count)}, a, b, "
                f"{int(step > 0 or accumulate)}, 1, 1, {int(a_transposed)}, {int(b_transposed)};",
            ]
        lines += ["wgmma.commit_group.sync.aligned;", "}"]
        constraints = ",".join(["=f"] * count + [str(i) for i in range(len(tied))] + ["r", "r", "~{memory}"])
        values = emit(builder, ir.LiteralStructType([llvm_f32] * count), [*tied, *args[-2:]], "\n".join(lines), constraints)
        return pack(builder, llvm_result, unpack(builder, values, count))

    return make_intrinsic(fragment(n), (*[fragment(n)] * accumulate, U32, U32), generate)


def product_registers(n, k, dtype, b_steps):
    """``f(accumulator, a, b) -> fragment``: adds A (64 x k, packed registers) times B (k x n, n contiguous, by its descriptor's low word)."""
    count, packed_count = n // 2, k // 4

    def generate(builder, args, llvm_result):
        first_a = 2 * count
        descriptor_b = first_a + packed_count
        lines = ["{", ".reg .b64 b;", ".reg .b32 lb;", "wgmma.fence.sync.aligned;"]
        for step in range(k // 16):
            lines += [
                *_step("b", f"${descriptor_b}", b_steps[step]),
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {_registers(count)}, "
                f"{_registers(4, first_a + 4 * step)}, b, 1, 1, 1, 1;",
            ]
        lines += ["wgmma.commit_group.sync.aligned;", "}"]
        constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * (packed_count + 1) + ["~{memory}"])
        values = [*unpack(builder, args[0], count), *unpack(builder, args[1], packed_count), args[2]]
        result = emit(builder, ir.LiteralStructType([llvm_f32] * count), values, "\n".join(lines), constraints)
        return pack(builder, llvm_result, unpack(builder, result, count))

    return make_intrinsic(fragment(n), (fragment(n), packed(k), U32), generate)


def wait(pending, *columns):
    """Wait until at most ``pending`` groups are in flight.

    The intrinsic takes and returns fragments of those numbers of columns (one, or a tuple of several): tying them
    through the wait keeps every use behind it.
    """
    kinds = [fragment(n) for n in columns]
    result = kinds[0] if len(kinds) == 1 else types.Tuple(kinds)

    def generate(builder, args, llvm_result):
        values = [v for arg, n in zip(args, columns, strict=True) for v in unpack(builder, arg, n // 2)]
        count = len(values)
        constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["~{memory}"])
        tied = emit(builder, ir.LiteralStructType([llvm_f32] * count), values, f"wgmma.wait_group.sync.aligned {pending};", constraints)
        tied = unpack(builder, tied, count)
        if len(kinds) == 1:
            return pack(builder, llvm_result, tied)
        parts, start = [], 0
        for arg, n in zip(args, columns, strict=True):
            parts.append(pack(builder, arg.type, tied[start : start + n // 2]))
            start += n // 2
        return pack(builder, llvm_result, parts)

    return make_intrinsic(result, kinds, generate)
