"""Decoding on CUDA cores: the forward pass over contiguous caches."""

from __future__ import annotations

from dataclasses import replace

from numbaflash.dispatch import Device, Layouts, Plan
from numbaflash.kernels import simt
from numbaflash.kernels.simt import TUNED, prepare, requests, resources
from numbaflash.problem import DECODE_FEATURES, MAX_HEAD_DIM, PAGE_TABLE, Problem, UnsupportedError

__all__ = ["FEATURES", "TUNED", "candidates", "plan", "prepare", "requests", "resources", "supports"]

FEATURES = frozenset(DECODE_FEATURES) - {PAGE_TABLE}


def supports(problem: Problem, device: Device) -> tuple[str, ...]:
    """Reasons why this family cannot compute the problem there."""
    reasons = list(simt.supports(problem, device, FEATURES))
    for name, n in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if n > MAX_HEAD_DIM:
            reasons.append(f"{name} must be at most {MAX_HEAD_DIM}; it is {n}")
    return tuple(reasons)


def candidates(problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None) -> tuple:
    """Configs to measure, that of `plan` first. With a number of parts given, there is no other: what is computed for a sequence must not depend on
    the rest of the batch."""
    found = simt.candidates(problem, layouts, device)
    return found if num_splits is None else found[:1]


def plan(problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None, *, config=None) -> Plan:
    """Choose tiles and grid, or take the tiles of a config."""
    if num_splits is not None and num_splits > 1:
        raise UnsupportedError(f"the family simt computes the keys of a sequence in one part; got num_splits={num_splits}")
    return replace(simt.plan(problem, layouts, device, config=config), direction="decode", num_splits=num_splits)
