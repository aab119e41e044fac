"""Shared memory by 32-bit address."""

from __future__ import annotations

from llvmlite import ir

from .inline import F32, U32, U64, VOID, instruction, llvm_i32, make_intrinsic


def _dynamic_base(builder, args, _):
    module = builder.module
    try:
        symbol = module.get_global("numbaflash_dynamic_shared")
    except KeyError:
        symbol = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), "numbaflash_dynamic_shared", addrspace=3)
        symbol.linkage, symbol.align = "external", 1024
    return builder.ptrtoint(symbol, llvm_i32)


dynamic_base = make_intrinsic(U32, (), _dynamic_base)
"""Address of the kernel's dynamic shared memory."""

store_global_f32 = instruction("st.global.f32 [$0], $1;", VOID, U64, F32)
