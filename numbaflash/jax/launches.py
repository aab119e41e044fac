"""From the options that travel with an operation to the prepared launch: what a program holds is a string, and names all but shapes."""

from __future__ import annotations

import functools
import json

from ..arrays import Facts, contiguous_strides
from ..arrays.jax import local_gpus
from ..call import MAX_CALLS, WORKSPACE_ALIGNMENT, device_of, plan_backward_call, plan_call, plan_decode_call
from ..dispatch import BACKWARD_OPERANDS, family, forced_family, use_family
from ..problem import ITEMSIZE, NEEDS, PACKED, UnsupportedError, make_decode_problem, make_packed_problem, make_problem
from ..profiling import in_range


def write_options(arrays, scale, causal, window, softcap, dropout, **more) -> str:
    """What travels with an operation; it is hashable, and XLA keeps it. The seed goes beside it: it makes no other kernel."""
    told = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "dropout": dropout, "family": forced_family()}
    return json.dumps(told | {"arrays": [name for name in arrays if name not in NEEDS], **more})


@functools.lru_cache(MAX_CALLS)
def read_options(options: str) -> dict:
    """The same read again, which nobody changes."""
    return json.loads(options)


def inputs_of(options: str) -> tuple[str, ...]:
    """Names of the arrays that an operation is given: q, k, v, and the options."""
    return (*NEEDS, *read_options(options)["arrays"])


def operands_of(direction: str, options: str) -> tuple[str, ...]:
    """Names of what XLA hands in, in its order."""
    told = read_options(options)
    if direction == "forward":
        return inputs_of(options)
    return (*BACKWARD_OPERANDS[: 7 if told.get("dlse") else 6], *told["arrays"])


def is_packed(told) -> bool:
    return PACKED[0] in told["arrays"]


def decodes(told) -> bool:
    """Whether it is an operation of `numbaflash.decode`, which tells ``num_splits``."""
    return "num_splits" in told


def problem_of(options, shapes, dtypes):
    told = read_options(options)
    arrays = zip(told["arrays"], zip(shapes[3:], dtypes[3:], strict=True), strict=True)
    numbers = {name: told[name] for name in ("scale", "causal", "window", "softcap")}
    if decodes(told):
        return make_decode_problem(*shapes[:3], dtypes[:3], **numbers, **dict(arrays))
    numbers["dropout"] = told["dropout"]
    if is_packed(told):
        numbers |= {name: told[name] for name in ("max_seqlen_q", "max_seqlen_k")}
        return make_packed_problem(*shapes[:3], dtypes[:3], **numbers, **dict(arrays))
    return make_problem(*shapes[:3], dtypes[:3], **numbers, **dict(arrays))


@functools.lru_cache(MAX_CALLS)
def forward_launch(options: str, with_lse: bool, shapes, dtypes, kind: str, index: int, alignments):
    """The prepared launch of row-major arrays on a device; None when there is nothing to launch.

    ``shapes`` and ``dtypes`` are those of `inputs_of`, ``alignments`` pairs of an operand and the bytes that divide its address, where 16 do not.
    """
    plan = forward_plan(options, with_lse, shapes, dtypes, kind, index, alignments)
    return None if plan is None else in_range(plan, family(plan.family, plan.direction).prepare(plan))


@functools.lru_cache(MAX_CALLS)
def forward_plan(options: str, with_lse: bool, shapes, dtypes, kind: str, index: int, alignments):
    problem = problem_of(options, shapes, dtypes)
    if problem.is_empty:
        return None
    facts = _facts(problem, operands_of("forward", options), kind, index, alignments)
    told, device = read_options(options), device_of(facts["q"])
    with use_family(told["family"]):
        if decodes(told):
            plan = plan_decode_call(problem, facts, with_lse, told["num_splits"], device)
        else:
            plan = plan_call(problem, facts, with_lse, device)
    _refuse_copies(plan)
    return plan


@functools.lru_cache(MAX_CALLS)
def backward_plan(options: str, shapes, dtypes, kind: str, index: int, alignments):
    told = read_options(options)
    problem = problem_of(options, shapes, dtypes)
    facts = _facts(problem, operands_of("backward", options), kind, index, alignments)
    with use_family(told["family"]):
        plan = plan_backward_call(problem, facts, tuple(told["needs"]), told["deterministic"], device_of(facts["q"]))
    _refuse_copies(plan)
    return plan


@functools.lru_cache(MAX_CALLS)
def backward_launch(*kind):
    """The prepared launch of the same, and the bytes of its workspace."""
    plan = backward_plan(*kind)
    return in_range(plan, family(plan.family, "backward").prepare(plan)), plan.workspace_bytes


def workspace_bytes(plan_of, *kind) -> int:
    """What a call needs on any GPU of this process: where a traced program is going to run is not known. The CPU's is allocated there."""
    sizes = [0]
    for index in local_gpus():
        try:
            sizes.append(plan_of(*kind, "cuda", index, ()).workspace_bytes)
        except UnsupportedError:  # said where it runs; it may run on the CPU
            continue
    return max(sizes) and max(sizes) + WORKSPACE_ALIGNMENT


def _facts(problem, names, kind, index, alignments):
    """Row-major arrays; results are among them where their place is another than that of a new array."""
    facts, alignments = {}, dict(alignments)
    for name in dict.fromkeys((*names, *alignments)):
        shape, dtype = problem.shape_of(name), problem.dtype_of(name)
        facts[name] = Facts(alignments.get(name, 16), shape, contiguous_strides(shape, ITEMSIZE[dtype]), dtype, kind, index)
    return facts


def _refuse_copies(plan):
    if plan.copies:
        told = "; ".join(f"{name}: {reason}" for name, reason in plan.copies.items())
        raise ValueError(f"the arrays must lie so that they need no copy, as XLA allocates them; pass jax.numpy.copy of them ({told})")
