"""Small index arithmetic in 32 bits, for kernels: Numba would widen ``n + 1`` to 64."""

from __future__ import annotations

from numba.cuda.types import int32

from .straight import straight_line

zero = straight_line(int32, (), lambda ops: ops.integer(0))
plus = straight_line(int32, (int32,) * 2, lambda ops, a, b: a + b)
minus = straight_line(int32, (int32,) * 2, lambda ops, a, b: a - b)
following = straight_line(int32, (int32,), lambda ops, n: n + 1)
preceding = straight_line(int32, (int32,), lambda ops, n: n - 1)

warp_of = straight_line(int32, (int32,), lambda ops, thread: thread >> 5)
"""Warp of a thread of the block."""

warpgroup_of = straight_line(int32, (int32,), lambda ops, thread: thread >> 7)
"""Warpgroup of a thread of the block."""

within_warpgroup = straight_line(int32, (int32,), lambda ops, thread: thread & 127)
"""Number of a thread of the block in its warpgroup."""

within_warp = straight_line(int32, (int32,), lambda ops, thread: thread & 31)
"""Lane of a thread of the block."""
