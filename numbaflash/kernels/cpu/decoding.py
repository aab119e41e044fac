"""Decoding on the CPU: the forward pass over caches, contiguous or paged, with the keys in as many parts as asked for."""

from __future__ import annotations

from ...dispatch import Device, Layouts, Plan
from ...problem import DECODE_FEATURES, Problem
from . import TUNED, build_kernels, prepare, resources
from . import supports as supports_features

__all__ = ["FEATURES", "TUNED", "build_kernels", "candidates", "plan", "prepare", "resources", "supports"]

FEATURES = frozenset(DECODE_FEATURES)


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there; empty when it can."""
    return supports_features(problem, device, FEATURES)


def plan(problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None, *, config=None) -> Plan:
    """Choose tiles, parts and threads, or take those of a config; nothing is compiled."""
    from . import launch

    return launch.plan_for(problem, layouts, device, launch.available_threads(), "decode", num_splits, config)


def candidates(problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None) -> tuple:
    """Configs to measure, that of `plan` first."""
    from . import config, launch

    return config.candidates(problem, launch.available_threads(), num_splits)
