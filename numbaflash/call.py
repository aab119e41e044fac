"""The road of a call: the first of a kind is checked, planned and prepared, later ones look the prepared call up.

A kind is everything but the addresses: library, shapes, strides, dtypes, device, alignment, options, and a forced family.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from . import dispatch
from .arrays import ITEMSIZE, Facts, Library, contiguous_strides
from .memory import extent, overlaps, overlaps_itself
from .problem import Problem, check_result, make_problem

RESULTS = ("out", "lse")
MAX_CALLS = 2048
"""Kinds of calls kept prepared; beyond that the oldest one is forgotten."""

_lock = threading.Lock()
_prepared: dict[tuple, Call] = {}
find = _prepared.get


@dataclass(frozen=True, slots=True)
class Call:
    """A prepared call, shared by all calls of its kind and by all threads.

    Attributes
    ----------
    plan : Plan or None
        None when the result has no element.
    launch : Launch or None
    new_out, new_lse : callable
        Of a stream (None: the current one), a new array in the caller's library.
    current_stream : callable
        The stream handle of the library's current stream; 0 on the CPU.
    index : int or None
        CUDA device, None on the CPU.
    facts : dict of str to Facts
        Of the arrays of the first call of this kind, whose addresses mean nothing later.
    simple : bool
        Nothing to do but launch: something to compute, and no copy.
    apart : callable or None
        Of five addresses: whether results that the caller gave lie wholly beside everything else, the quick answer to what
        `launch_checked` looks into. None when the results are new.
    """

    plan: dispatch.Plan | None
    launch: Callable | None
    new_out: Callable
    new_lse: Callable
    current_stream: Callable[[], int]
    index: int | None
    facts: dict[str, Facts]
    simple: bool
    apart: Callable[[int, int, int, int, int], bool] | None

    def launch_checked(self, library: Library, arrays: dict, addresses: dict, stream: int | None, handle: int) -> None:
        """Launch with what only some calls need: checks of addresses, and copies."""
        self._check_addresses(arrays, addresses)
        copied = {}
        for name in self.plan.copies:
            if name in arrays:
                copied[name] = self._new_result(name, stream) if name in RESULTS else library.contiguous(arrays[name], stream)
        at = addresses | {name: library.address(x) for name, x in copied.items()}
        self.launch(*(at[name] for name in dispatch.OPERANDS), handle)
        for name in RESULTS:
            if name in copied:
                library.assign(arrays[name], copied[name], stream)

    def _new_result(self, name, stream):
        return (self.new_out if name == "out" else self.new_lse)(stream)

    def _check_addresses(self, arrays, addresses):
        """Arrays that have elements must have memory, and results must not touch what is read, nor each other."""
        for name in arrays:
            if not addresses[name] and not (name in self.facts and 0 in self.facts[name].shape):
                raise ValueError(f"{name} has no memory: it was deleted or released before the call")
        check_apart(self.facts, addresses)


def check_apart(facts: dict[str, Facts], addresses: dict[str, int]) -> None:
    """Results that the caller gave must not touch what is read, nor each other."""
    places = {name: (addresses[name], each.shape, each.strides, ITEMSIZE[each.dtype]) for name, each in facts.items()}
    for result in RESULTS:
        for other in facts:
            if result in facts and other != result and overlaps(places[result], places[other]):
                use = "read" if other in "qkv" else "written"
                raise ValueError(f"{result} must not share memory with {other}, which is {use} in the same call")


def prepare(key, library: Library, arrays: dict, options: dict, with_lse: bool) -> Call:
    """Check, plan and build the call of a new kind, and remember it.

    Parameters
    ----------
    key : tuple
        Of the kind.
    library : Library
    arrays : dict
        q, k, v and those of out and lse that were given.
    options : dict
        scale, causal and window.
    with_lse : bool
        Whether an LSE is wanted.
    """
    facts, problem = describe(library, arrays, options)
    plan = launch = None
    if not problem.is_empty:
        plan = plan_call(problem, facts, with_lse, device_of(facts["q"]))
        launch = dispatch.family(plan.family).prepare(plan)
        launch = _logged(plan, launch)
    q = facts["q"]
    on_gpu = q.kind == "cuda"
    call = Call(
        plan=plan,
        launch=launch,
        new_out=library.allocator(arrays["q"], problem.out_shape, problem.dtype),
        new_lse=library.allocator(arrays["q"], problem.lse_shape, problem.lse_dtype),
        current_stream=library.current_stream(q.index or 0) if on_gpu else int,
        index=q.index or 0 if on_gpu else None,
        facts=facts,
        simple=launch is not None and not plan.copies,
        apart=_apart(facts) if any(name in facts for name in RESULTS) else None,
    )
    with _lock:
        while len(_prepared) >= MAX_CALLS:
            del _prepared[next(iter(_prepared))]
        _prepared[key] = call
    return call


def _apart(facts: dict[str, Facts]):
    """See `Call.apart`."""
    ends = []
    for name in dispatch.OPERANDS:
        if name in facts:
            given = facts[name]
            ends += extent(0, given.shape, given.strides, ITEMSIZE[given.dtype])
        else:
            ends += [0, 0]
    q_low, q_high, k_low, k_high, v_low, v_high, out_low, out_high, lse_low, lse_high = ends
    has_out, has_lse = (name in facts for name in RESULTS)

    def touches_input(low, high, q, k, v):
        return (q + q_low < high and low < q + q_high) or (k + k_low < high and low < k + k_high) or (v + v_low < high and low < v + v_high)

    def apart(q, k, v, out, lse):
        low, high = out + out_low, out + out_high
        if has_lse:
            other_low, other_high = lse + lse_low, lse + lse_high
            if not lse or touches_input(other_low, other_high, q, k, v) or (has_out and other_low < high and low < other_high):
                return False
        elif lse & 15:  # a new array of less alignment than plans take for granted
            return False
        return not touches_input(low, high, q, k, v) if has_out else not out & 15

    return apart


def forget() -> None:
    """Drop every prepared call."""
    with _lock:
        _prepared.clear()


def describe(library: Library, arrays: dict, options: dict) -> tuple[dict[str, Facts], Problem]:
    """Facts of the arrays, and the problem they pose: every check of an argument."""
    facts = {name: library.describe(x, name) for name, x in arrays.items()}
    problem = make_problem(
        *(facts[name].shape for name in "qkv"),
        [facts[name].dtype for name in "qkv"],
        **options,
    )
    for name, wanted, dtype in (("out", problem.out_shape, problem.dtype), ("lse", problem.lse_shape, problem.lse_dtype)):
        if name in facts:
            given = facts[name]
            check_result(name, given.shape, given.dtype, want_shape=wanted, want_dtype=dtype, readonly=given.readonly)
            if overlaps_itself(given.shape, given.strides, ITEMSIZE[dtype]):
                raise ValueError(f"{name} must give every element a place of its own; got strides {given.strides} (bytes) for shape {given.shape}")
    if library.one_device:
        check_one_device(facts)
    return facts, problem


def check_one_device(facts: dict[str, Facts]) -> None:
    if len({(each.kind, each.index) for each in facts.values() if each.index is not None}) > 1:
        raise ValueError(f"all arrays must lie on one device; got {', '.join(f'{name} on {each.place}' for name, each in facts.items())}")


def plan_call(problem: Problem, facts: dict[str, Facts], with_lse: bool, device: dispatch.Device) -> dispatch.Plan:
    """The plan of a problem for arrays as they lie; results that are not among the facts are new and row-major."""
    layouts, misaligned = {}, {}
    for name, shape, dtype in (
        ("q", problem.q_shape, problem.dtype),
        ("k", problem.k_shape, problem.dtype),
        ("v", problem.v_shape, problem.dtype),
        ("out", problem.out_shape, problem.dtype),
        ("lse", problem.lse_shape, problem.lse_dtype),
    ):
        layouts[name] = dispatch.Layout(shape, contiguous_strides(shape, ITEMSIZE[dtype]))
        if name in facts:
            given = _layout(facts[name], ITEMSIZE[dtype])
            if given is None:
                misaligned[name] = "its elements are not aligned to their size"
            else:
                layouts[name] = given
    if not with_lse:
        layouts["lse"] = None
    plan = dispatch.make_plan(problem, dispatch.Layouts(**layouts), device)
    for name, reason in misaligned.items():
        plan.copies.setdefault(name, reason)
    return plan


def device_of(facts: Facts) -> dispatch.Device:
    if facts.kind == "cpu":
        return dispatch.CPU
    from . import toolchain

    return toolchain.device(facts.index or 0)


def _layout(facts: Facts, itemsize: int) -> dispatch.Layout | None:
    """None for an array that no kernel should read: an element across the boundary of its size.

    An axis of one element has the stride of a row-major array, whatever its library says, so that one kernel serves all.
    """
    plain = contiguous_strides(facts.shape, itemsize)
    strides = plain if 0 in facts.shape else tuple(p if n == 1 else s for n, s, p in zip(facts.shape, facts.strides, plain, strict=True))
    if any(step % itemsize for step in (facts.address, *strides)):
        return None
    return dispatch.Layout(facts.shape, strides, min(16, facts.address & -facts.address or 16))


def _logged(plan, launch):
    """Log the plan, and let the launch log each call, as ``NUMBAFLASH_LOG`` asks."""
    from .toolchain.log import logger  # sets the logger up

    logger.info("plan: %s on %s for %s", plan.family, plan.device.name, plan.problem)
    if not logger.isEnabledFor(logging.DEBUG):
        return launch

    def announced(*arguments):
        logger.debug("launch: %s on %s for %s", plan.family, plan.device.name, plan.problem)
        launch(*arguments)

    return announced
