"""Waiting for asynchronous copies from global to shared memory (compute capability 8.0).

The copies themselves are started by `straight.GpuOps.copy_row`. In the simulator a copy is over when it returns.
"""

from __future__ import annotations

from . import simulated
from .inline import VOID, instruction
from .straight import SIMULATED

commit = simulated.nothing if SIMULATED else instruction("cp.async.commit_group;", VOID)
"""End a group of copies."""

wait = simulated.nothing if SIMULATED else instruction("cp.async.wait_group 0;", VOID)
"""Wait until all copies that this thread has started are over."""


def wait_but(groups):
    """Wait until all but the last so many groups of this thread are over."""
    return instruction(f"cp.async.wait_group {groups};", VOID)
