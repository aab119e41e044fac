"""Warps and warpgroups: shuffles, votes, named barriers, register reallocation."""

from __future__ import annotations

from .inline import I32, U32, VOID, instruction

shuffle_index = instruction("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", I32, I32, I32)
"""Value of the named lane. Broadcasting an index from lane 0 tells ptxas that it is uniform over the warp."""

elect = instruction("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 $0, 1, 0, p;}", U32)
"""1 in one lane of a converged warp, 0 in the others; ptxas needs no divergence loop around what that lane issues."""

ballot = instruction("{.reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}", I32, I32)
"""``ballot(number)``: the lanes of the warp whose number is not 0, a bit each."""

total = instruction("redux.sync.add.s32 $0, $1, 0xffffffff;", I32, I32)
"""``total(number)``: the sum over the warp."""

running_total = instruction(
    "{.reg .pred p; .reg .b32 t; mov.b32 $0, $1;"
    + "".join(f"shfl.sync.up.b32 t|p, $0, {lanes}, 0, 0xffffffff; @p add.s32 $0, $0, t;" for lanes in (1, 2, 4, 8, 16))
    + "}",
    I32,
    I32,
    early=True,
)
"""``running_total(number)``: the sum over the lanes up to this one."""

first_lane = instruction("{.reg .b32 t; brev.b32 t, $1; bfind.shiftamt.u32 $0, t;}", I32, I32, pure=True)
"""``first_lane(ballot)``: the lowest bit that is set."""

sync = instruction("bar.warp.sync 0xffffffff;", VOID)
"""Wait for the other lanes of the warp, and see what they have written."""

barrier_sync = instruction("bar.sync $0, $1;", VOID, U32, U32)
"""Named barrier: arrive and wait until so many threads have arrived (barrier number, threads)."""

barrier_arrive = instruction("bar.arrive $0, $1;", VOID, U32, U32)
"""Named barrier: arrive without waiting (barrier number, threads)."""


def decrease_registers(count):
    """Give registers back so that the warpgroup keeps ``count`` a thread (a multiple of 8 from 24 to 256)."""
    return instruction(f"setmaxnreg.dec.sync.aligned.u32 {count};", VOID)


def increase_registers(count):
    """Take registers so that the warpgroup has ``count`` a thread; waits until they are free."""
    return instruction(f"setmaxnreg.inc.sync.aligned.u32 {count};", VOID)
