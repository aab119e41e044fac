"""From a problem on a device to a plan: which kernel family runs it, how, and why not another.

A family is a package under ``numbaflash.kernels`` with the interface of `Family`. Adding one means a new folder and one
line in `FAMILIES`.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from .problem import DIFFERENTIABLE_OPTIONS, MASKS, OPTIONS, PACKED, Problem, UnsupportedError

if TYPE_CHECKING:
    from .tuned import Origin

FAMILIES = ("sm90", "simt", "cpu")
"""Kernel families, the preferred one first."""

OPERANDS = ("q", "k", "v", "out", "lse")
"""Arrays of a forward call without options, in the order in which a `Launch` takes their addresses. With a mask or packed sequences, and in
decoding, there is a workspace, last of all."""

BACKWARD_OPERANDS = ("dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv", "workspace")
"""The same of a backward call."""

OPTION_OPERANDS = (*OPTIONS, *PACKED, "seed")
"""What options and packed sequences add to a forward call. The seed of a dropout mask is a number of 64 bits in the place of an address."""

MASK_OPERANDS = ("of_queries", "of_keys", "lists", "counters")
"""Arrays of the launches that make a `numbaflash.BlockMask`, beside the mask and its words."""

APPEND_OPERANDS = ("k_new", "v_new", "k_cache", "v_cache", "seqlens_k", "page_table", "cos", "sin", "q", "rotated")
"""Arrays of a launch that writes to caches, in the order in which it takes their addresses."""

MOST_PARTS = 16
"""States that one launch merges at most."""

STATE_OPERANDS = tuple(f"{name}{n}" for name in ("part", "part_lse") for n in range(MOST_PARTS))
"""Outputs and LSE of the states that a launch merges, into ``out`` and ``lse``."""

ALL_OPERANDS = tuple(
    dict.fromkeys(
        (
            *OPERANDS,
            *OPTION_OPERANDS,
            *BACKWARD_OPERANDS,
            *(f"d{name}" for name in DIFFERENTIABLE_OPTIONS),
            *MASK_OPERANDS,
            *APPEND_OPERANDS,
            *STATE_OPERANDS,
        )
    )
)
"""Every operand that a launch may have."""


def operands(problem: Problem, direction: str = "forward") -> tuple[str, ...]:
    """Operands of a call that computes the problem, in the order in which its `Launch` takes their addresses."""
    return operands_with(problem.options, bool(problem.dropout), direction)


def operands_with(options: tuple[str, ...], dropout: bool, direction: str = "forward") -> tuple[str, ...]:
    """The same, of a problem with these arrays of `OPTIONS` and `PACKED`, with or without dropout."""
    workspace = BACKWARD_OPERANDS[-1:]
    prepared = any(name in options for name in (*MASKS, *PACKED))
    options += ("seed",) if dropout else ()
    if direction != "backward":
        return OPERANDS + options + (workspace if prepared or direction == "decode" else ())
    gradients = tuple(f"d{name}" for name in DIFFERENTIABLE_OPTIONS if name in options)
    return BACKWARD_OPERANDS[:-1] + options + gradients + workspace


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
    """Layout of every operand of a call. ``lse`` is None when nobody asked for it, and so is what the problem has not.

    ``mask`` and ``bias`` have 4 axes, ``block_mask`` 3, ``alibi_slopes`` and ``page_table`` 2, with strides of 0 along those that are broadcast.
    Packed arrays have an axis less than padded ones, as `Problem` says.
    """

    q: Layout
    k: Layout
    v: Layout
    out: Layout
    lse: Layout | None = None
    mask: Layout | None = None
    block_mask: Layout | None = None
    bias: Layout | None = None
    alibi_slopes: Layout | None = None
    sinks: Layout | None = None
    seqlens_q: Layout | None = None
    seqlens_k: Layout | None = None
    cu_seqlens_q: Layout | None = None
    cu_seqlens_k: Layout | None = None
    page_table: Layout | None = None


@dataclass(frozen=True, slots=True)
class BackwardLayouts:
    """Layout of every operand of a backward call. ``dlse`` is None without a gradient of the LSE, a gradient that nobody needs is None.

    The options lie as in `Layouts`; ``dbias`` has the axes of ``bias``.
    """

    dout: Layout
    q: Layout
    k: Layout
    v: Layout
    out: Layout
    lse: Layout
    dlse: Layout | None = None
    dq: Layout | None = None
    dk: Layout | None = None
    dv: Layout | None = None
    mask: Layout | None = None
    block_mask: Layout | None = None
    bias: Layout | None = None
    alibi_slopes: Layout | None = None
    sinks: Layout | None = None
    seqlens_q: Layout | None = None
    seqlens_k: Layout | None = None
    cu_seqlens_q: Layout | None = None
    cu_seqlens_k: Layout | None = None
    dbias: Layout | None = None
    dsinks: Layout | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a problem is going to be run; what `explain` prints is what a call uses.

    Attributes
    ----------
    family : str
    problem : Problem
    device : Device
    layouts : Layouts or BackwardLayouts
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
    direction : str
        "forward", "backward" or "decode".
    deterministic : bool
        Backward only: the same inputs give the same bits.
    workspace_bytes : int
        Memory that the caller's library allocates for the call, 256-byte aligned, of any contents: for the backward, for parts of the keys in
        decoding, and where there is a mask.
    num_splits : int or None
        Decoding only: parts into which the caller wants the keys of a sequence to be split.
    tuned : Origin or None
        The table of `numbaflash.tuned` that ``config`` comes from; None where it is the family's own choice.
    """

    family: str
    problem: Problem
    device: Device
    layouts: Layouts | BackwardLayouts
    config: Any = None
    grid: tuple[int, ...] = ()
    threads: int = 0
    shared_bytes: int = 0
    copies: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, tuple[str, ...]] = field(default_factory=dict)
    direction: str = "forward"
    deterministic: bool = False
    workspace_bytes: int = 0
    num_splits: int | None = None
    tuned: Origin | None = None


class Launch(Protocol):
    """A built kernel with its prepared arguments, safe to call from several threads at once.

    ``addresses`` are those of the `operands` of the problem, in the layouts of the plan, 0 for what there is none of.
    ``stream`` is a CUstream handle, 0 on the CPU.
    """

    def __call__(self, addresses: tuple[int, ...], stream: int) -> None: ...


class Family(Protocol):
    """What a package under ``numbaflash.kernels`` provides.

    A family whose tiles can be tuned has two things more: ``candidates(problem, layouts, device)``, as `plan` a pure function, which returns the
    configs that are worth measuring and sure to work, the one that `plan` chooses first; and ``TUNED``, the names of the fields in which they differ,
    of plain values. Its `plan` takes one of them as ``config=``. Packages of the other directions likewise.
    """

    FEATURES: frozenset[str]
    """`Problem.features` that the kernels have."""

    def supports(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """Reasons why this family cannot compute the problem there; empty when it can."""

    def plan(self, problem: Problem, layouts: Layouts, device: Device) -> Plan:
        """Choose tiles and grid: a pure function of its arguments, no compilation, no driver call."""

    def prepare(self, plan: Plan) -> Launch:
        """Build (or fetch from the cache) and load the kernel of a plan."""

    def resources(self, plan: Plan) -> dict[str, Any]:
        """Registers, spills and the like of the built kernel, for `explain`; may build it."""


class BackwardFamily(Protocol):
    """What the subpackage ``backward`` of a family provides."""

    FEATURES: frozenset[str]
    """As `Family.FEATURES`."""

    def supports(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """As `Family.supports`."""

    def plan(self, problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool) -> Plan:
        """As `Family.plan`, with the direction, determinism and workspace of the plan set."""

    def prepare(self, plan: Plan) -> Launch:
        """As `Family.prepare`."""

    def resources(self, plan: Plan) -> dict[str, Any]:
        """As `Family.resources`."""


class DecodeFamily(Protocol):
    """What the subpackage ``decoding`` of a family provides."""

    FEATURES: frozenset[str]
    """As `Family.FEATURES`."""

    def supports(self, problem: Problem, device: Device) -> tuple[str, ...]:
        """As `Family.supports`."""

    def plan(self, problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None) -> Plan:
        """As `Family.plan`, with the direction of the plan set. The keys of each sequence are computed in ``num_splits`` equal parts, as many as the
        family likes where it is None, and merged in a fixed order."""

    def prepare(self, plan: Plan) -> Launch:
        """As `Family.prepare`."""

    def resources(self, plan: Plan) -> dict[str, Any]:
        """As `Family.resources`."""


def missing(problem: Problem, features: frozenset[str]) -> list[str]:
    """Reasons why a family cannot compute a problem, of what it has beside q, k and v: its `Problem.features` that are not among these."""
    return [f"it has no {feature}" for feature in problem.features if feature not in features]


@dataclass(frozen=True, slots=True)
class ForcedConfig:
    """What `use_config` forces."""

    family: str
    direction: str
    config: Any


_forced: ContextVar[str | ForcedConfig | None] = ContextVar("numbaflash_family", default=None)
forced = _forced.get
"""What the context forces: a part of the kind of a call."""


@contextmanager
def use_family(name: str | None):
    """Within the context (of this thread or task), only the named family is considered; None means every family."""
    if name is not None and name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)} or None; got {name!r}")
    with _force(name):
        yield


@contextmanager
def use_config(name: str, direction: str, config):
    """Within the context, the named family alone is considered, and plans of the direction have this config, one of its ``candidates``.

    Tables of `numbaflash.tuned` are made with it.
    """
    with _force(ForcedConfig(name, direction, config)):
        yield


@contextmanager
def _force(what):
    token = _forced.set(what)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_family() -> str | None:
    what = _forced.get()
    return what.family if isinstance(what, ForcedConfig) else what


_ROOMS = {"forward": "", "backward": ".backward", "decode": ".decoding"}


def family(name: str, direction: str = "forward") -> Family | BackwardFamily | DecodeFamily:
    """The package of a kernel family for a direction, imported when first asked for."""
    return importlib.import_module(f"{__package__}.kernels.{name}{_ROOMS[direction]}")


def make_plan(problem: Problem, layouts: Layouts, device: Device) -> Plan:
    """Choose the first family that can compute the problem.

    Raises
    ------
    UnsupportedError
        When none can; the message names each family and its reasons.
    """
    return _first_plan("forward", problem, layouts, device)


def make_backward_plan(problem: Problem, layouts: BackwardLayouts, device: Device, deterministic: bool = False) -> Plan:
    """The same for the gradients."""
    return _first_plan("backward", problem, layouts, device, deterministic)


def make_decode_plan(problem: Problem, layouts: Layouts, device: Device, num_splits: int | None = None) -> Plan:
    """The same for decoding."""
    return _first_plan("decode", problem, layouts, device, num_splits)


def keep_workspace(plan: Plan) -> Plan:
    """The plan for a workspace that is 0 at first and is then touched by nothing but this plan's launches, one after the other: kernels may keep
    counters in it. The same plan where its family has no use for that."""
    keep = getattr(family(plan.family, plan.direction), "keep_workspace", None)
    return plan if keep is None else keep(plan)


def plan_of(name: str, direction: str, problem: Problem, layouts, device: Device, *how) -> Plan:
    """The plan of a family that can compute the problem, by the first of these that there is: the config that the context forces, that of a table of
    `numbaflash.tuned`, the family's own choice.

    Parameters
    ----------
    name, direction : str
    problem : Problem
    layouts : Layouts or BackwardLayouts
    device : Device
    *how
        What the family's ``plan`` takes beyond these: ``deterministic``, or ``num_splits``.
    """
    package, what, origin = family(name, direction), _forced.get(), None
    if isinstance(what, ForcedConfig) and (what.family, what.direction) == (name, direction):
        config = what.config
    else:
        from . import tuned

        found = tuned.find(package, name, direction, problem, layouts, device, how)
        if found is None:
            return package.plan(problem, layouts, device, *how)
        config, origin = found
    return replace(package.plan(problem, layouts, device, *how, config=config), tuned=origin)


def plan_again(plan: Plan) -> Plan:
    """The plan that the same family makes now, when what a pure function of the problem does not see has changed: the threads of the CPU."""
    how = {"forward": (), "backward": (plan.deterministic,), "decode": (plan.num_splits,)}[plan.direction]
    return plan_of(plan.family, plan.direction, plan.problem, plan.layouts, plan.device, *how)


def _first_plan(direction, problem, layouts, device, *how):
    forced = forced_family()
    rejected = {}
    for name in FAMILIES if forced is None else (forced,):
        reasons = family(name, direction).supports(problem, device)
        if not reasons:
            plan = plan_of(name, direction, problem, layouts, device, *how)
            plan.rejected.update(rejected)
            return plan
        rejected[name] = reasons
    lines = "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in rejected.items())
    what = "problem's gradients" if direction == "backward" else "problem"
    raise UnsupportedError(f"no kernel family can compute this {what} on {device.name}:{lines}")
