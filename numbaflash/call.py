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
from .arrays.streams import stream_handle
from .memory import extent, overlaps, overlaps_itself
from .problem import NEEDS, OPTIONS, PACKED, Problem, check_result, check_saved, make_decode_problem, make_packed_problem, make_problem
from .profiling import in_range

RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv", "dbias", "dsinks"), "decode": ("out", "lse")}
"""Operands that a call writes, by its direction."""

_CALLED = {"decode": {"k": "k_cache", "v": "v_cache"}}

MAX_CALLS = 2048
"""Kinds of calls kept prepared; beyond that the oldest one is forgotten."""

WORKSPACE_ALIGNMENT = 256
"""Bytes that divide the address of a workspace, whatever the library's allocator promises."""

_lock = threading.Lock()
_prepared: dict[tuple, Call] = {}
find = _prepared.get


@dataclass(frozen=True, slots=True)
class Call:
    """A prepared call, shared by all calls of its kind and by all threads.

    Attributes
    ----------
    direction : str
        "forward", "backward" or "decode".
    problem : Problem
    operands : tuple of str
        In the order in which the launch takes their addresses.
    plan : Plan or None
        None when there is nothing to launch: no result has an element, or every gradient is 0.
    launch : Launch or None
    new : dict of str to callable
        For each result, a function of a stream (None: the current one) that returns a new array in the caller's library.
    workspace : callable or None
        The same for memory of the plan's ``workspace_bytes``, and what aligning it takes.
    current_stream : callable
        The stream handle of the library's current stream; 0 on the CPU.
    index : int or None
        CUDA device, None on the CPU.
    facts : dict of str to Facts
        Of the arrays of the first call of this kind, whose addresses mean nothing later.
    simple : bool
        Nothing to do but launch: something to compute, and no copy.
    apart : callable or None
        Of the addresses of all operands, in their order: whether results that the caller gave lie wholly beside everything else and new
        ones are aligned, the quick answer to what `launch_checked` looks into. None when all results are new.
    """

    direction: str
    problem: Problem
    operands: tuple[str, ...]
    plan: dispatch.Plan | None
    launch: Callable | None
    new: dict[str, Callable]
    workspace: Callable | None
    current_stream: Callable[[], int]
    index: int | None
    facts: dict[str, Facts]
    simple: bool
    apart: Callable[..., bool] | None

    def on(self, stream) -> tuple[int | None, int]:
        """(handle of the caller's stream or None, handle of the stream to work on)."""
        if stream is None:
            return None, self.current_stream()
        if self.index is None:
            raise ValueError("stream is for arrays on a CUDA device; these are on the CPU")
        handle = stream_handle(stream, self.index)
        return handle, handle

    def launch_checked(self, library: Library, arrays: dict, addresses: dict, stream: int | None, handle: int) -> None:
        """Launch with what only some calls need: checks of addresses, and copies."""
        self.check_addresses(addresses)
        copied = {}
        for name in self.plan.copies:
            if name in arrays:
                copied[name] = self.new[name](stream) if name in self.new else library.contiguous(arrays[name], stream)
        at = addresses | {name: library.address(x) for name, x in copied.items()}
        self.launch(tuple(at[name] for name in self.operands), handle)
        for name in self.new:
            if name in copied:
                library.assign(arrays[name], copied[name], stream)

    def check_addresses(self, addresses):
        """Arrays that have elements must have memory, and results must not touch what is read, nor each other."""
        for name, given in self.facts.items():
            if not addresses[name] and 0 not in given.shape:
                raise ValueError(f"{called(name, self.direction)} has no memory: it was deleted or released before the call")
        check_apart(self.facts, addresses, self.direction)


def called(operand: str, direction: str) -> str:
    """The argument that an operand is."""
    return _CALLED.get(direction, {}).get(operand, operand)


def check_apart(facts: dict[str, Facts], addresses: dict[str, int], direction: str = "forward") -> None:
    """Results that the caller gave must not touch what is read, nor each other."""
    results = RESULTS[direction]
    places = {name: (addresses[name], each.shape, each.strides, ITEMSIZE[each.dtype]) for name, each in facts.items()}
    for result in results:
        for other in facts:
            if result in facts and other != result and overlaps(places[result], places[other]):
                use = "written" if other in results else "read"
                raise ValueError(f"{result} must not share memory with {called(other, direction)}, which is {use} in the same call")


def prepare(key, library: Library, arrays: dict, options: dict, with_lse: bool) -> Call:
    """Check, plan and build the forward call of a new kind, and remember it.

    Parameters
    ----------
    key : tuple
        Of the kind.
    library : Library
    arrays : dict
        q, k, v, the options that are arrays, and those of out and lse that were given.
    options : dict
        Those that are numbers, as `numbaflash.problem.make_problem` takes them.
    with_lse : bool
        Whether an LSE is wanted.
    """
    facts, problem = describe(library, arrays, options)
    plan = None if problem.is_empty else plan_call(problem, facts, with_lse, device_of(facts["q"]))
    return _remember(key, _call("forward", library, arrays["q"], facts, problem, plan))


def prepare_backward(key, library: Library, arrays: dict, options: dict, needs: tuple[str, ...], deterministic: bool) -> Call:
    """The same for a backward call: `arrays` holds dout, q, k, v, out, lse, and those of dlse, dq, dk and dv that were given."""
    facts, problem = describe(library, arrays, options, "backward")
    idle = problem.sees_nothing or not needs
    plan = None if idle else plan_backward_call(problem, facts, needs, deterministic, device_of(facts["q"]))
    return _remember(key, _call("backward", library, arrays["q"], facts, problem, plan))


def prepare_decode(key, library: Library, arrays: dict, options: dict, with_lse: bool, num_splits: int | None) -> Call:
    """The same for a call of `numbaflash.decode`."""
    return _remember(key, decode_call(library, arrays, options, with_lse, num_splits))


def decode_call(library: Library, arrays: dict, options: dict, with_lse: bool, num_splits: int | None, *, keeps_workspace: bool = False) -> Call:
    """Such a call, which nobody else finds."""
    facts, problem = describe(library, arrays, options, "decode")
    plan = None if problem.is_empty else plan_decode_call(problem, facts, with_lse, num_splits, device_of(facts["q"]))
    if plan is not None and keeps_workspace:
        plan = dispatch.keep_workspace(plan)
    return _call("decode", library, arrays["q"], facts, problem, plan)


def run(
    direction: str,
    library: Library,
    arrays: dict,
    results: dict,
    wanted: tuple[str, ...],
    options: dict,
    stream,
    *,
    seed: int = 0,
    needs: tuple[str, ...] = (),
    deterministic: bool = False,
    num_splits: int | None = None,
) -> dict:
    """A call of any kind, as `numbaflash.forward`, `numbaflash.backward` and `numbaflash.decode` make it. The plain ones take a shorter way there.

    Parameters
    ----------
    arrays : dict
        Inputs by operand, options among them; None for an absent one.
    results : dict
        The same of the results that the caller gave.
    wanted : tuple of str
        Results to allocate where they were not given.
    options : dict
        Those that are numbers.
    stream
        The caller's, or None.
    seed : int
        Of the dropout mask.
    needs, deterministic
        Of a backward call.
    num_splits
        Of a call that decodes.

    Returns
    -------
    dict
        The results, by operand.
    """
    arrays = {name: x for name, x in arrays.items() if x is not None}
    results = {name: x for name, x in results.items() if x is not None}
    addresses, keys = {"seed": seed}, []
    try:
        for given, inspect in ((arrays, library.inspect), (results, library.inspect_result)):
            for name, x in given.items():
                addresses[name], key = inspect(x)
                keys.append((name, key))
    except Exception:
        for name, x in (arrays | results).items():
            library.describe(x, called(name, direction))  # says for people what is wrong
        raise
    kind = (direction, library, tuple(keys), wanted, *options.values(), needs, deterministic, num_splits, dispatch.forced())
    call = find(kind)
    if call is None:
        with_lse = "lse" in wanted or "lse" in results
        if direction == "forward":
            call = prepare(kind, library, arrays | results, options, with_lse)
        elif direction == "decode":
            call = prepare_decode(kind, library, arrays | results, options, with_lse, num_splits)
        else:
            call = prepare_backward(kind, library, arrays | results, options, needs, deterministic)
    place, handle = call.on(stream)
    given = tuple(results)
    for name in wanted:
        if name not in results:
            results[name] = call.new[name](place)
            addresses[name] = library.address(results[name])
    if call.workspace is not None:
        workspace = call.workspace(place)
        addresses["workspace"] = aligned_workspace(library.address(workspace))
    everything = arrays | results
    ordered = tuple(addresses.get(name, 0) for name in call.operands)
    new_at = [addresses[name] for name in results if name not in given]
    if call.launch is None:
        call.check_addresses(addresses)
        if direction == "backward":
            for x in results.values():
                library.clear(x, place)
    elif any(at & 15 for at in new_at):  # less than every plan takes for granted: another kind
        more = {"seed": seed, "needs": needs, "deterministic": deterministic, "num_splits": num_splits}
        return run(direction, library, arrays, results, wanted, options, stream, **more)
    elif call.simple and all(addresses[name] for name in everything) and (call.apart is None or call.apart(*ordered)):
        call.launch(ordered, handle)
    else:
        call.launch_checked(library, everything, dict(zip(call.operands, ordered, strict=True)), place, handle)
    if place is not None:
        library.used_on(place, everything.values())
    for name in given:
        library.written(results[name])
    return results


def aligned_workspace(address: int) -> int:
    """The first place in a workspace where kernels may begin."""
    return address + WORKSPACE_ALIGNMENT - 1 & -WORKSPACE_ALIGNMENT


def _call(direction, library, like, facts, problem, plan) -> Call:
    launch = workspace = None
    if plan is not None:
        launch = in_range(plan, _logged(plan, dispatch.family(plan.family, direction).prepare(plan)))
        if plan.workspace_bytes:
            workspace = library.allocator(like, (-(-(plan.workspace_bytes + WORKSPACE_ALIGNMENT) // 4),), "float32")
    q = facts["q"]
    on_gpu = q.kind == "cuda"
    return Call(
        direction=direction,
        problem=problem,
        operands=dispatch.operands(problem, direction),
        plan=plan,
        launch=launch,
        new={name: library.allocator(like, _shape_of(name, problem, facts), problem.dtype_of(name)) for name in results_of(problem, direction)},
        workspace=workspace,
        current_stream=library.current_stream(q.index or 0) if on_gpu else int,
        index=q.index or 0 if on_gpu else None,
        facts=facts,
        simple=launch is not None and not plan.copies,
        apart=apart_of(facts, problem, direction) if any(name in facts for name in RESULTS[direction]) else None,
    )


def results_of(problem: Problem, direction: str) -> tuple[str, ...]:
    """Operands that a call of this problem may write."""
    return tuple(f"d{name}" for name in problem.gradients) if direction == "backward" else RESULTS[direction]


def _shape_of(name, problem, facts):
    """The gradient of a bias has as many axes as the caller's bias, which are fewer than the problem's where it is broadcast."""
    return facts["bias"].shape if name == "dbias" else problem.shape_of(name)


def _remember(key, call: Call) -> Call:
    with _lock:
        while len(_prepared) >= MAX_CALLS:
            del _prepared[next(iter(_prepared))]
        _prepared[key] = call
    return call


def apart_of(facts: dict[str, Facts], problem: Problem, direction: str):
    """See `Call.apart`. It runs in every call with given results, so it is compiled to one flat expression of the addresses."""
    operands = dispatch.operands(problem, direction)
    ends = {name: extent(0, each.shape, each.strides, ITEMSIZE[each.dtype]) for name, each in facts.items()}
    results = results_of(problem, direction)
    new, given = [name for name in results if name not in facts], [name for name in results if name in facts]
    read = [name for name in operands if name in facts and name not in given]
    conditions = [f"not ({' | '.join(new)}) & 15"] if new else []  # less alignment than plans take for granted
    conditions += given
    for n, one in enumerate(given):
        for other in (*read, *given[n + 1 :]):
            (low, high), (other_low, other_high) = ends[one], ends[other]
            conditions.append(f"not {other_low - high} < {one} - {other} < {other_high - low}")
    return eval(f"lambda {', '.join(operands)}: bool({' and '.join(conditions)})")


def forget() -> None:
    """Drop every prepared call."""
    with _lock:
        _prepared.clear()


def describe(library: Library, arrays: dict, options: dict, direction: str = "forward") -> tuple[dict[str, Facts], Problem]:
    """Facts of the arrays, and the problem they pose: every check of an argument."""
    facts = {name: library.describe(x, called(name, direction)) for name, x in arrays.items()}
    make = make_decode_problem if direction == "decode" else make_packed_problem if PACKED[0] in facts else make_problem
    problem = make(
        *(facts[name].shape for name in "qkv"),
        [facts[name].dtype for name in "qkv"],
        **options,
        **{name: (facts[name].shape, facts[name].dtype) for name in OPTIONS + PACKED if name in facts},
    )
    for name, given in facts.items():
        want = {"want_shape": _shape_of(name, problem, facts), "want_dtype": problem.dtype_of(name)}
        if name in RESULTS[direction]:
            check_result(name, given.shape, given.dtype, readonly=given.readonly, **want)
            if overlaps_itself(given.shape, given.strides, ITEMSIZE[given.dtype]):
                raise ValueError(f"{name} must give every element a place of its own; got strides {given.strides} (bytes) for shape {given.shape}")
        elif name not in NEEDS + OPTIONS + PACKED:
            check_saved(name, given.shape, given.dtype, **want)
    if library.one_device:
        check_one_device({called(name, direction): each for name, each in facts.items()})
    return facts, problem


def check_one_device(facts: dict[str, Facts]) -> None:
    if len({(each.kind, each.index) for each in facts.values() if each.index is not None}) > 1:
        shown = {"mask" if name == "block_mask" else name: each.place for name, each in facts.items()}
        raise ValueError(f"all arrays must lie on one device; got {', '.join(f'{name} on {place}' for name, place in shown.items())}")


def plan_call(problem: Problem, facts: dict[str, Facts], with_lse: bool, device: dispatch.Device) -> dispatch.Plan:
    """The plan of a problem for arrays as they lie; results that are not among the facts are new and row-major."""
    layouts, misaligned = _forward_layouts(problem, facts, with_lse)
    return _with_copies(dispatch.make_plan(problem, layouts, device), misaligned)


def plan_decode_call(problem: Problem, facts: dict[str, Facts], with_lse: bool, num_splits: int | None, device: dispatch.Device) -> dispatch.Plan:
    """The same for decoding, with the keys in so many parts."""
    layouts, misaligned = _forward_layouts(problem, facts, with_lse)
    return _with_copies(dispatch.make_decode_plan(problem, layouts, device, num_splits), misaligned)


def plan_backward_call(problem: Problem, facts: dict[str, Facts], needs, deterministic: bool, device: dispatch.Device) -> dispatch.Plan:
    """The same for the gradients of ``needs``, with a gradient of the LSE when ``dlse`` is among the facts."""
    dlse = ("dlse",) if "dlse" in facts else ()
    operands = ("dout", "q", "k", "v", "out", "lse", *dlse, *(f"d{name}" for name in needs), *problem.options)
    layouts, misaligned = _layouts(problem, facts, operands)
    plan = dispatch.make_backward_plan(problem, dispatch.BackwardLayouts(**layouts), device, deterministic)
    return _with_copies(plan, misaligned)


def _forward_layouts(problem, facts, with_lse):
    operands = dispatch.OPERANDS if with_lse else dispatch.OPERANDS[:-1]
    layouts, misaligned = _layouts(problem, facts, (*operands, *problem.options))
    return dispatch.Layouts(**layouts), misaligned


def _layouts(problem, facts, operands):
    """(layouts, those among them that stand for arrays which no kernel should read)."""
    layouts, misaligned = {}, []
    for name in operands:
        shape, itemsize = problem.shape_of(name), ITEMSIZE[problem.dtype_of(name)]
        given = _layout(facts[name], itemsize) if name in facts else None
        if given is None:
            given = dispatch.Layout(shape, contiguous_strides(shape, itemsize))
            if name in facts:
                misaligned.append(name)
        layouts[name] = _broadcast(given, shape) if name.removeprefix("d") in OPTIONS + PACKED else given
    return layouts, misaligned


def _broadcast(layout, shape):
    """An option has all axes that a kernel counts, and strides of 0 along those that it does not."""
    strides = (0,) * (len(shape) - len(layout.strides)) + layout.strides
    return dispatch.Layout(shape, tuple(0 if n == 1 else step for n, step in zip(shape, strides, strict=True)), layout.alignment)


def _with_copies(plan, misaligned):
    for name in misaligned:
        plan.copies.setdefault(name, "its elements are not aligned to their size")
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
