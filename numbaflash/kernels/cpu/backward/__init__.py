"""Gradients on the CPU, compiled by Numba: any dtype, head dim, band and strides, bitwise the same on any number of threads.

``kernel`` is the algorithm, ``config`` the choice of tiles, ``arguments`` what a launch tells the compiled code and where
things lie in the workspace, ``launch`` threads and compilation. Products, arithmetic and conversion are the forward's.
"""

from __future__ import annotations

from ....dispatch import BackwardLayouts, Device, Plan
from ....problem import Problem
from .. import FEATURES
from .. import supports as supports_features
from .config import TUNED

__all__ = ["FEATURES", "TUNED", "build_kernels", "candidates", "plan", "prepare", "resources", "supports"]


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the gradients there; empty when it can."""
    return supports_features(problem, device, FEATURES)


def plan(problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool, *, config=None) -> Plan:
    """Choose tiles, threads and workspace, or take a config; nothing is compiled. Every plan is deterministic, asked for or not."""
    from ..launch import available_threads
    from . import launch

    return launch.plan_for(problem, layouts, device, available_threads(), config)


def candidates(problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool) -> tuple:
    """Configs to measure, that of `plan` first; all give the same bits."""
    from ..launch import available_threads
    from . import config

    return config.candidates(problem, available_threads())


def prepare(plan: Plan):
    """Compile the kernel, or fetch it from the cache, and return the `Launch`."""
    from . import launch

    return launch.prepare(plan)


def build_kernels(plan: Plan) -> dict[str, bool]:
    """Compile what a plan needs, or fetch it from the cache; by name, whether it was there already."""
    from . import launch

    return launch.build_kernels(plan)


def resources(plan: Plan) -> dict:
    """What a launch takes: threads, bytes of scratch memory a thread, and the vector instructions."""
    from . import launch

    return launch.resources(plan)
