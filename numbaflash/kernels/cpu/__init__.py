"""Kernels for the CPU, compiled by Numba: any dtype, head dim, band and strides.

``forward`` is the algorithm and ``rows`` its form for few queries, ``scores`` the options, ``microkernel`` the matrix
products, ``vector``, ``exp2``, ``tanh`` and ``dropout`` the arithmetic, ``convert`` the dtypes, ``packed`` the sequences that lie
one after the other, ``config`` the choice of tiles and ``launch`` threads and compilation.
"""

from __future__ import annotations

import numba

from ...dispatch import Device, Layouts, Plan, missing
from ...problem import FORWARD_OPTIONS, PACKED_FEATURE, Problem
from .config import TUNED

__all__ = ["FEATURES", "TUNED", "build_kernels", "candidates", "plan", "prepare", "resources", "supports"]

FEATURES = frozenset(("softcap", *FORWARD_OPTIONS, "dropout", PACKED_FEATURE))
"""`Problem.features` that the kernels have, of both directions."""


def supports(problem: Problem, device: Device, features: frozenset[str] = FEATURES) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there; empty when it can."""
    if device.kind != "cpu":
        return (f"it computes on the CPU, the arrays are on {device.name}",)
    if numba.config.DISABLE_JIT:
        return ("NUMBA_DISABLE_JIT is set, and its kernels exist only compiled",)
    return tuple(missing(problem, features))


def plan(problem: Problem, layouts: Layouts, device: Device, *, config=None) -> Plan:
    """Choose tiles and threads, or take those of a config; nothing is compiled."""
    from . import launch

    return launch.plan_for(problem, layouts, device, launch.available_threads(), "forward", None, config)


def candidates(problem: Problem, layouts: Layouts, device: Device) -> tuple:
    """Configs to measure, that of `plan` first."""
    from . import config, launch

    return config.candidates(problem, launch.available_threads())


def prepare(plan: Plan):
    """Compile the kernel, or fetch it from the cache, and return the `Launch`."""
    from . import launch

    return launch.prepare(plan)


def build_kernels(plan: Plan) -> dict[str, bool]:
    """Compile what a plan needs, or fetch it from the cache; by name, whether it was there already."""
    from . import launch

    return launch.build_kernels(plan)


def resources(plan: Plan) -> dict:
    """What a launch takes: threads, bytes of workspace a thread, and the vector instructions."""
    from . import launch

    return launch.resources(plan)
