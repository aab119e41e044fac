"""Approximate single-precision functions of the special-function unit, and exact ones that LLVM would not pick."""

from __future__ import annotations

from .inline import F32, instruction

exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", F32, F32, pure=True)
log2 = instruction("lg2.approx.ftz.f32 $0, $1;", F32, F32, pure=True)
reciprocal = instruction("rcp.approx.ftz.f32 $0, $1;", F32, F32, pure=True)
maximum = instruction("max.f32 $0, $1, $2;", F32, F32, F32, pure=True)
"""The larger argument; the other one where one is NaN."""
