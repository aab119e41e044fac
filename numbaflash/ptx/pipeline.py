"""A ring of stages in shared memory: where a stage lies, and the mbarriers that say it is full or empty.

``stage`` counts from 0, ``phase`` is the parity of its barriers, which turns over when the ring does. A ring of
barriers is known by the address of the first; a barrier is 8 bytes.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from . import mbarrier
from .inline import I32, U32, VOID, emit, llvm_i32, make_intrinsic, pack

BARRIER_BYTES = 8


def _constant(n):
    return ir.Constant(llvm_i32, n)


def _barrier(builder, ring, stage):
    return builder.add(ring, builder.shl(stage, _constant(3)))


def _wait(builder, args, _):
    ring, stage, phase = args
    emit(builder, ir.VoidType(), [_barrier(builder, ring, stage), phase], mbarrier.WAIT, "r,r,~{memory}")


def _release(builder, args, _):
    ring, stage, lane = args
    emit(builder, ir.VoidType(), [_barrier(builder, ring, stage), lane], mbarrier.ARRIVE_WHERE_ZERO, "r,r,~{memory}")


wait = make_intrinsic(VOID, (U32, U32, U32), _wait)
"""``wait(ring, stage, phase)`` for the stage's barrier."""

release = make_intrinsic(VOID, (U32, U32, I32), _release)
"""``release(ring, stage, lane)``: one arrival a warp, of lane 0."""

barrier = make_intrinsic(U32, (U32, U32), lambda builder, args, _: _barrier(builder, *args))
"""``barrier(ring, stage)``: the address of a stage's barrier."""


def advance(stages):
    """``advance(stage, phase) -> (stage, phase)`` of the next place in a ring of so many stages."""

    def generate(builder, args, llvm_result):
        following = builder.add(args[0], _constant(1))
        wraps = builder.icmp_unsigned("==", following, _constant(stages))
        stage = builder.select(wraps, _constant(0), following)
        phase = builder.xor(args[1], builder.zext(wraps, llvm_i32))
        return pack(builder, llvm_result, [stage, phase])

    return make_intrinsic(types.UniTuple(U32, 2), (U32, U32), generate)


def slot(stage_bytes):
    """``slot(base, stage)``: the address of a stage of so many bytes."""
    return make_intrinsic(U32, (U32, U32), lambda builder, args, _: builder.add(args[0], builder.mul(args[1], _constant(stage_bytes))))
