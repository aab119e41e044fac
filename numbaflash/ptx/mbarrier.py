"""Barriers in shared memory (mbarrier) that count arrivals and the bytes of bulk copies."""

from __future__ import annotations

from llvmlite import ir

from .inline import U32, VOID, emit, instruction, llvm_i32, make_intrinsic


def init_ring(count, arrivals):
    """``init(address)``: make each of so many neighbouring barriers complete a phase after so many arrivals."""

    def generate(builder, args, _):
        for i in range(count):
            at = builder.add(args[0], ir.Constant(llvm_i32, 8 * i))
            emit(builder, ir.VoidType(), [at], f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", "r,~{memory}")

    return make_intrinsic(VOID, (U32,), generate)


fence_init = instruction("fence.mbarrier_init.release.cluster;", VOID)
"""Make initialised barriers visible to the copy engine."""

arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", VOID, U32)

ARRIVE_WHERE_ZERO = "{.reg .pred p; setp.eq.s32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0];}"
"""PTX (address, number): arrive in the threads whose number is 0. A predicate, not a branch: ptxas schedules across it."""

WAIT = "{\n .reg .pred p;\n WAIT:\n mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1, 10000000;\n @p bra DONE;\n bra WAIT;\n DONE:\n }"
"""PTX (address, parity): wait for the phase of that parity to complete. A fresh barrier passes a wait for parity 1."""
