"""Shared memory by 32-bit address."""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from .inline import I32, U32, VOID, emit, instruction, llvm_i32, make_intrinsic, pack, unpack


def _dynamic_base(builder, args, _):
    module = builder.module
    try:
        symbol = module.get_global("numbaflash_dynamic_shared")
    except KeyError:
        symbol = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), "numbaflash_dynamic_shared", addrspace=3)
        symbol.linkage, symbol.align = "external", 1024
    above = builder.add(builder.ptrtoint(symbol, llvm_i32), ir.Constant(llvm_i32, 1023))
    return builder.and_(above, ir.Constant(llvm_i32, -1024))


store = instruction("st.shared.u32 [$0], $1;", VOID, U32, U32)
"""``store(address, value)``"""

load = instruction("ld.shared.u32 $0, [$1];", I32, U32)
"""``load(address) -> int32``"""


def put_words(count):
    """``put(address, words)``: so many int32, a multiple of four, from a multiple of 16 bytes on."""

    def generate(builder, args, _):
        words = unpack(builder, args[1], count)
        for i in range(0, count, 4):
            text = f"st.shared.v4.b32 [$0+{4 * i}], {{$1, $2, $3, $4}};"
            emit(builder, ir.VoidType(), [args[0], *words[i : i + 4]], text, "r,r,r,r,r,~{memory}")

    return make_intrinsic(VOID, (U32, types.UniTuple(I32, count)), generate)


def get_words(count):
    """``get(address) -> words``: the same read anew at each call."""
    four = ir.LiteralStructType([llvm_i32] * 4)

    def generate(builder, args, llvm_result):
        words = []
        for i in range(0, count, 4):
            words += unpack(
                builder, emit(builder, four, [args[0]], f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{4 * i}];", "=r,=r,=r,=r,r,~{memory}"), 4
            )
        return pack(builder, llvm_result, words)

    return make_intrinsic(types.UniTuple(I32, count), (U32,), generate)


def addresses(*offsets):
    """``f() -> tuple``: addresses in dynamic shared memory, offsets from its first multiple of 1024 bytes."""

    def generate(builder, args, llvm_result):
        base = _dynamic_base(builder, (), None)
        return pack(builder, llvm_result, [builder.add(base, ir.Constant(llvm_i32, offset)) for offset in offsets])

    return make_intrinsic(types.UniTuple(U32, len(offsets)), (), generate)
