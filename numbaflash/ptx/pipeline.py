"""A ring of stages in shared memory: where a stage lies, and the mbarriers that say it is full or empty.

A *place* in the ring is (stage, phase): ``stage`` counts from 0, ``phase`` is the parity of its barriers, which turns over
when the ring does. A ring of barriers is known by the address of the first; a barrier is 8 bytes.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from . import mbarrier
from .inline import I32, U32, VOID, emit, llvm_i32, make_intrinsic, pack, unpack

PLACE = types.UniTuple(I32, 2)


def _constant(n):
    return ir.Constant(llvm_i32, n)


def barrier_at(builder, ring, place):
    """LLVM address of the barrier of a place."""
    return builder.add(ring, builder.shl(builder.extract_value(place, 0), _constant(3)))


def slot_at(builder, base, place, stage_bytes):
    """LLVM address of the stage of a place."""
    return builder.add(base, builder.mul(builder.extract_value(place, 0), _constant(stage_bytes)))


def _wait(builder, args, _):
    ring, place = args
    emit(builder, ir.VoidType(), [barrier_at(builder, ring, place), builder.extract_value(place, 1)], mbarrier.WAIT, "r,r,~{memory}")


def _release(builder, args, _):
    ring, place, lane = args
    emit(builder, ir.VoidType(), [barrier_at(builder, ring, place), lane], mbarrier.ARRIVE_WHERE_ZERO, "r,r,~{memory}")


wait = make_intrinsic(VOID, (U32, PLACE), _wait)
"""``wait(ring, place)`` for the barrier of the place."""

release = make_intrinsic(VOID, (U32, PLACE, I32), _release)
"""``release(ring, place, lane)``: one arrival a warp, of lane 0."""


def start(phase):
    """``start() -> place``: the first stage. A producer starts with phase 1, since a fresh "empty" barrier lets that wait pass."""
    return make_intrinsic(PLACE, (), lambda builder, args, llvm: ir.Constant(llvm, [_constant(0), _constant(phase)]))


def _turned(builder, args, llvm_result):
    stage, phase = unpack(builder, args[0], 2)
    return pack(builder, llvm_result, [stage, builder.xor(phase, _constant(1))])


turned = make_intrinsic(PLACE, (PLACE,), _turned)
"""``turned(place)``: the same stage a round before. Whoever fills a stage waits there until it has been emptied."""


def advance(stages):
    """``advance(place)``: the next place in a ring of so many stages."""

    def generate(builder, args, llvm_result):
        stage, phase = unpack(builder, args[0], 2)
        following = builder.add(stage, _constant(1))
        wraps = builder.icmp_unsigned("==", following, _constant(stages))
        return pack(builder, llvm_result, [builder.select(wraps, _constant(0), following), builder.xor(phase, builder.zext(wraps, llvm_i32))])

    return make_intrinsic(PLACE, (PLACE,), generate)


def slot(stage_bytes):
    """``slot(base, place)``: the address of a stage of so many bytes."""
    return make_intrinsic(U32, (U32, PLACE), lambda builder, args, _: slot_at(builder, *args, stage_bytes))
