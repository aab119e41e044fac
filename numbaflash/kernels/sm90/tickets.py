"""Which sides' boundaries of packed sequences ascend, and which tile a block computes next, where only the device knows how long tiles are.

`build` is a kernel that runs before all others of a call: it looks at the boundaries once for all, and no ticket has been drawn then. A block of the
forward begins with the tile of its own number; its producer draws the number of each further one while the present one is under way, so that who is
done early takes more, and posts where it lies for the other warps.
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

DRAWN, ORDER = 0, 4
"""Where, from the address on that the options have, there is how many tickets have been drawn, and which sides ascend, as `packed.vote_on_order` has
it: int32."""


def build(options: Options) -> KernelSource:
    """A kernel of one block."""
    vote, given = packed.vote_on_order(packed.Sequences(options, "q", 64), TICKETS_THREADS), types.Tuple(option_types(options))

    def put(ops, given, thread, ascending):
        at = _address(options, given)
        ops.put(at + DRAWN, ops.integer(0), thread == 0)
        ops.put(at + ORDER, ascending, thread == 0)

    put = straight_line(types.void, (given, int32, int32), put)

    def kernel(*given):
        ascending = vote(cuda.threadIdx.x, given)
        put(given, cuda.threadIdx.x, ascending)

    return KernelSource(kernel, types.void(given), threads=TICKETS_THREADS, fastmath=False)


def counter_of(options: Options):
    """``f(options) -> uint64``: the address from which tickets are drawn."""
    return straight_line(uint64, (types.Tuple(option_types(options)),), lambda ops, given: _address(options, given) + DRAWN)


def order_of(options: Options):
    """``f(options) -> int32``: which sides ascend, in any kernel after `build`."""
    return straight_line(int32, (types.Tuple(option_types(options)),), lambda ops, given: ops.fetch("b32", _address(options, given) + ORDER, 0))


def _address(options, given):
    return dict(zip((name for name, _ in options.parameters()), given, strict=True))["tickets"]


place_of_turn = straight_line(UniTuple(int32, 2), (int32,), lambda ops, turn: [turn & 1, turn >> 1 & 1])
"""``f(turn)``: where the place of a block's n-th tile is posted, in a ring of two; who posts it waits at `pipeline.turned` of that."""

slot_of = pipeline.slot(PLACE_BYTES)
"""``f(base, place)``"""

barrier_of = pipeline.slot(8)
"""``f(ring, place)``"""
