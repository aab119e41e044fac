"""Bulk copies of contiguous bytes between global and shared memory, without a tensor map.

Addresses and sizes are multiples of 16 bytes. Loads complete on an mbarrier, what is sent out in bulk groups of the issuing thread.
"""

from __future__ import annotations

from llvmlite import ir

from . import pipeline
from .inline import U32, U64, VOID, emit, instruction, make_intrinsic


def load(size):
    """``load(stages, place, source, ring)``: bytes into a stage of a ring.

    Lets the barrier of the place wait for them without arriving there: another load of the same stage, later, does that.
    """

    def generate(builder, args, _):
        stages, place, source, ring = args
        barrier, shared = pipeline.barrier_at(builder, ring, place), pipeline.slot_at(builder, stages, place, size)
        emit(builder, ir.VoidType(), [barrier], f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], {size};", "r,~{memory}")
        text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];"
        emit(builder, ir.VoidType(), [shared, source, barrier], text, "r,l,r,~{memory}")

    return make_intrinsic(VOID, (U32, pipeline.PLACE, U64, U32), generate)


def add(size):
    """``add(target, source)``: add so many bytes of float32 in shared memory to global memory, as one bulk group.

    Each element is added atomically; elements of several copies arrive in any order.
    """
    text = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], {size}; cp.async.bulk.commit_group;"
    return make_intrinsic(VOID, (U64, U32), lambda builder, args, _: emit(builder, ir.VoidType(), args, text, "l,r,~{memory}"))


wait_done = instruction("cp.async.bulk.wait_group 0;", VOID)
"""Wait until all of this thread's bulk groups are over and what they wrote is visible to it."""


def _wait_turn(builder, args, _):
    wait = "WAIT: ld.acquire.gpu.global.b32 now, [$0]; setp.ge.s32 p, now, $1; @p bra DONE; bra WAIT; DONE:"
    text = "{ .reg .pred p; .reg .b32 now;\n" + wait.replace("; ", ";\n").replace(": ", ":\n") + "\n}"
    emit(builder, ir.VoidType(), args, text, "l,r,~{memory}")


wait_turn = make_intrinsic(VOID, (U64, U32), _wait_turn)
"""``wait_turn(counter, turn)``: wait until a counter (int32) in global memory has come to a number, whoever counts it up."""

take_ticket = instruction("atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", U32, U64)
"""``take_ticket(counter) -> number``: the counter (uint32) in global memory, which is counted up: each caller gets another number."""

end_turn = instruction("fence.proxy.async; red.release.gpu.global.add.s32 [$0], 1;", VOID, U64)
"""Count up, with everything written before it visible to whoever sees the new number."""
