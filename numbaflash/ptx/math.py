"""Approximate single-precision functions of the special-function unit, and exact ones that LLVM would not pick."""

from __future__ import annotations

from .inline import F32, instruction

log2 = instruction("lg2.approx.ftz.f32 $0, $1;", F32, F32, pure=True)
reciprocal = instruction("rcp.approx.ftz.f32 $0, $1;", F32, F32, pure=True)
