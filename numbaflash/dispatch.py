"""From a problem on a device to a plan: which kernel family runs it, how, and why not another.

A family is a package under ``numbaflash.kernels`` with the interface of `Family`. Adding one means a new folder and one
line in `FAMILIES`.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from .problem import Problem, UnsupportedError

FAMILIES = ("sm90", "simt", "cpu")
"""Kernel families, the preferred one first."""

OPERANDS = ("q", "k", "v", "out", "lse")


@dataclass(frozen=True, slots=True)
class Device:
    """Where the arrays lie.

    Attributes
    ----------
    kind : str
        "cpu" or "cuda".
    index : int
        CUDA device ordinal, 0 on the CPU.
    capability : tuple of int
        Compute capability (major, minor); (0, 0) on the CPU.
    sm_count : int
        Streaming multiprocessors; 0 on the CPU.
    name : str
        As the driver reports it.
    """

    kind: str
    index: int = 0
    capability: tuple[int, int] = (0, 0)
    sm_count: int = 0
    name: str = "cpu"


CPU = Device("cpu")


@dataclass(frozen=True, slots=True)
class Layout:
    """How one operand lies in memory: strides in bytes (any sign, 0 for broadcast) and the alignment of its address.

    ``alignment`` is the largest power of two, up to 16, that divides the address in bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = 16


def contiguous_strides(shape, itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a row-major array."""
    strides = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layout of every operand of a call. ``lse`` is None when nobody asked for it."""

    q: Layout
    k: Layout
    v: Layout
    out: Layout
    lse: Layout | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a problem is going to be run; what `explain` prints is what a call uses.

    Attributes
    ----------
    family : str
    problem : Problem
    device : Device
    layouts : Layouts
        As the kernel sees them: a copied operand is contiguous here.
    config : object
        The family's frozen tuning choice (tile sizes, stages, ...).
    grid : tuple of int
    threads : int
        Threads a block (CPU: threads in all).
    shared_bytes : int
        Dynamic shared memory a block.
    copies : dict of str to str
        Operands that are copied before (inputs) or after (results) the kernel, with the reason.
    rejected : dict of str to tuple of str
        Families ahead of the chosen one, each with its reasons.
    """

    family: str
    problem: Problem
    device: Device
    layouts: Layouts
    config: Any = None
    grid: tuple[int, ...] = ()
    threads: int = 0
    shared_bytes: int = 0
    copies: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Launch(Protocol):
    """A built kernel with its prepared arguments, safe to call from several threads at once.

    Pointers are addresses in bytes, in the layouts of the plan; ``lse`` is 0 when there is none.
    ``stream`` is a CUstream handle, 0 on the CPU.
    """

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, stream: int) -> None: ...


class Family(Protocol):
    """What a package under ``numbaflash.kernels`` provides."""

    def supports(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Reasons why this family cannot compute the problem there; empty when it can."""

    def plan(self, problem: Problem, layouts: Layouts, device: Device) -> Plan:
        """Choose tiles and grid: a pure function of its arguments, no compilation, no driver call."""

    def prepare(self, plan: Plan) -> Launch:
        """Build (or fetch from the cache) and load the kernel of a plan."""

    def resources(self, plan: Plan) -> dict[str, Any]:
        """Registers, spills and the like of the built kernel, for `explain`; may build it."""


_forced: ContextVar[str | None] = ContextVar("numbaflash_family", default=None)


@contextmanager
def use_family(name: str | None):
    """Within the context (of this thread or task), only the named family is considered; None means every family."""
    if name is not None and name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)} or None; got {name!r}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_family() -> str | None:
    return _forced.get()


def family(name: str) -> Family:
    """The package of a kernel family, imported when first asked for."""
    return importlib.import_module(f"{__package__}.kernels.{name}")


def make_plan(problem: Problem, layouts: Layouts, device: Device) -> Plan:
    """Choose the first family that can compute the problem.

    Raises
    ------
    UnsupportedError
        When none can; the message names each family and its reasons.
    """
    forced = _forced.get()
    rejected = {}
    for name in FAMILIES if forced is None else (forced,):
        reasons = family(name).supports(problem, device)
        if not reasons:
            plan = family(name).plan(problem, layouts, device)
            plan.rejected.update(rejected)
            return plan
        rejected[name] = reasons
    lines = "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items())
    raise UnsupportedError(f"no kernel family can compute this problem on {device.name}:{lines}")
