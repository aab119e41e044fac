"""Which tile a block computes next, where only the device knows how long tiles are: whoever is done draws a ticket.

`build` is a kernel that runs before: no ticket has been drawn, and which sides' boundaries ascend, once for all blocks. A block's first tile has its
own number; its producer draws the number of each further one while the present one is under way, and posts where it lies for the other warps.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda import types
from numba.cuda.types import UniTuple, int32, uint64

from ...ptx import pipeline
from ...ptx.straight import straight_line
from ...toolchain import KernelSource
from . import packed
from .config import PLACE_BYTES, TICKETS_THREADS
from .options import Options
from .scores import option_types

TICKETS, ORDER = 0, 4
"""Where in the workspace there is how many tickets have been drawn, and which sides ascend, as `packed.vote_on_order` has it."""


def build(options: Options) -> KernelSource:
    """A kernel of one block."""
    vote = packed.vote_on_order(packed.Sequences(options, "q", 64), TICKETS_THREADS)

    def prepare(ops, workspace, thread, ascending):
        ops.put(workspace + TICKETS, ops.integer(0), thread == 0)
        ops.put(workspace + ORDER, ascending, thread == 0)

    prepare = straight_line(types.void, (types.int64, int32, int32), prepare)

    def kernel(workspace, *given):
        ascending = vote(cuda.threadIdx.x, given)
        prepare(workspace, cuda.threadIdx.x, ascending)

    return KernelSource(kernel, types.void(types.int64, types.Tuple(option_types(options))), threads=TICKETS_THREADS, fastmath=False)


def of(options: Options):
    """Two functions of the main kernel's options: ``counter(options) -> uint64``, the address from which tickets are drawn, and ``order(options)``,
    which sides ascend."""

    def named(given):
        return dict(zip((name for name, _ in options.parameters()), given, strict=True))["tickets"]

    given = types.Tuple(option_types(options))
    return (
        straight_line(uint64, (given,), lambda ops, given: named(given) + TICKETS),
        straight_line(int32, (given,), lambda ops, given: ops.fetch("b32", named(given) + ORDER, 0)),
    )


place_of_turn = straight_line(UniTuple(int32, 2), (int32,), lambda ops, turn: [turn & 1, turn >> 1 & 1])
"""``f(turn)``: where the place of a block's n-th tile is posted, in a ring of two; who posts it waits at `pipeline.turned` of that."""

slot_of = pipeline.slot(PLACE_BYTES)
"""``f(base, place)``"""

barrier_of = pipeline.slot(8)
"""``f(ring, place)``: the barrier there."""
