"""Shared memory by 32-bit address."""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from .inline import I32, U32, VOID, instruction, llvm_i32, make_intrinsic, pack


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


keep_bits = instruction("red.shared.and.b32 [$0], $1;", VOID, U32, I32)
"""``keep_bits(address, bits)``: clear the others, atomically."""


def addresses(*offsets):
    """``f() -> tuple``: addresses in dynamic shared memory, offsets from its first multiple of 1024 bytes."""

    def generate(builder, args, llvm_result):
        base = _dynamic_base(builder, (), None)
        return pack(builder, llvm_result, [builder.add(base, ir.Constant(llvm_i32, offset)) for offset in offsets])

    return make_intrinsic(types.UniTuple(U32, len(offsets)), (), generate)
