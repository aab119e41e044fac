"""Rows of 16-bit elements in global memory, eight elements (16 bytes) at a time."""

from __future__ import annotations

from llvmlite import ir

from .inline import F32, I32, U64, VOID, emit, llvm_f32, llvm_i32, make_intrinsic

_TO_FLOAT32 = {  # of the lower and the upper half of $1
    "f16": ("{.reg .b16 h, u; mov.b32 {h, u}, $1; cvt.f32.f16 $0, h;}", "{.reg .b16 h, u; mov.b32 {h, u}, $1; cvt.f32.f16 $0, u;}"),
    "bf16": ("shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"),
}


def _load(builder, address, valid):
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
    text = f"{{.reg .pred p; setp.ne.b32 p, $5, 0; {zeros} @p ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4];}}"
    words = emit(builder, ir.LiteralStructType([llvm_i32] * 4), [address, valid], text, "=&r,=&r,=&r,=&r,l,r,~{memory}")
    return [builder.extract_value(words, i) for i in range(4)]


def _halves(builder, word, element):
    kind = "=f,r" if element == "f16" else "=r,r"
    for text in _TO_FLOAT32[element]:
        value = emit(builder, llvm_f32 if element == "f16" else llvm_i32, [word], text, kind, pure=True)
        yield value if element == "f16" else builder.bitcast(value, llvm_f32)


def dot(element):
    """``f(a, b, valid)``: the sum of the products of eight elements each at two addresses, in float32; 0, and no access, unless valid."""

    def generate(builder, args, _):
        a, b, valid = args
        total = ir.Constant(llvm_f32, 0.0)
        for x, y in zip(_load(builder, a, valid), _load(builder, b, valid), strict=True):
            for u, v in zip(_halves(builder, x, element), _halves(builder, y, element), strict=True):
                total = emit(builder, llvm_f32, [u, v, total], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", pure=True)
        return total

    return make_intrinsic(F32, (U64, U64, I32), generate)


def _zero(builder, args, _):
    emit(builder, ir.VoidType(), args, "{.reg .f32 z; mov.f32 z, 0f00000000; st.global.v4.f32 [$0], {z, z, z, z};}", "l,~{memory}")


zero = make_intrinsic(VOID, (U64,), _zero)
"""``zero(address)``: 16 bytes."""
