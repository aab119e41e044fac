"""Launches that overlap with the one before them on the stream (programmatic dependent launch, compute capability 9.0).

A kernel that `numbaflash.toolchain.prepare` makes ``overlapping`` may begin as soon as every block of the kernel before it has let it, or ended.
What that kernel has written is there after `wait`, for plain loads (not for those of data that nobody writes).
"""

from __future__ import annotations

from .inline import VOID, instruction

let_begin = instruction("griddepcontrol.launch_dependents;", VOID)
"""Let the next launch begin, as far as this block goes."""

wait = instruction("griddepcontrol.wait;", VOID)
"""Wait until the launch before this one is over."""
