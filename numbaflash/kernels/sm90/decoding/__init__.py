"""Decoding on Hopper GPUs."""

from __future__ import annotations

from ....dispatch import Device
from ....problem import Problem

FEATURES = frozenset()


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there."""
    return ("its decode kernel is not built yet",)
