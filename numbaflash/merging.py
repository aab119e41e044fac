"""`numbaflash.merge`: by one kernel on a GPU, else by the array operations of the caller's library."""

from __future__ import annotations

import threading
from functools import reduce
from math import inf

import numpy as np

from .arrays import ITEMSIZE, Facts, Library, contiguous_strides, one_library
from .call import MAX_CALLS, check_one_device, device_of
from .dispatch import MOST_PARTS
from .problem import DTYPES

_lock = threading.Lock()
_prepared: dict = {}


def merge(outs, lses):
    """See `numbaflash.merge`."""
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if len(outs) != len(lses):
        raise ValueError(f"outs and lses must have the same length; got {len(outs)} and {len(lses)}")
    if not outs:
        raise ValueError("outs must hold at least one partial result; got none")
    arrays = {f"outs[{i}]": x for i, x in enumerate(outs)} | {f"lses[{i}]": x for i, x in enumerate(lses)}
    library = one_library(**arrays)
    if library.merge is not None:
        return library.merge(outs, lses)
    facts = {name: library.describe(x, name) for name, x in arrays.items()}
    dtype, lse_dtype = check(facts, library.one_device)
    if library.builds_on_device and facts["outs[0]"].kind == "cuda":
        return by_kernel(library, outs[0], facts, dtype, lse_dtype)
    with library.on_device(outs[0]), np.errstate(all="ignore"):
        return by_operations(library, outs, lses, dtype, lse_dtype)


def _parts(name, parts) -> list:
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"{name} must be a list or tuple of arrays, one for each part of the keys; got {type(parts).__name__}")
    return list(parts)


def check(facts: dict[str, Facts], one_device: bool = True) -> tuple[str, str]:
    """dtypes of the outs and of the lses, after every check of shape, dtype and device."""
    dtype, shape = facts["outs[0]"].dtype, facts["outs[0]"].shape
    if dtype not in DTYPES:
        raise TypeError(f"outs[0] must be one of {', '.join(DTYPES)}; got dtype {dtype}")
    if len(shape) not in (3, 4):
        raise ValueError(
            "outs[0] must have 4 axes (batch, seqlen_q, heads, head_dim_v), or 3 (total_q, heads, head_dim_v) where sequences are packed; "
            f"got {len(shape)} axes, shape {shape}"
        )
    lse_dtype = "float64" if dtype == "float64" else "float32"
    *leading, rows, heads, _ = shape
    for name, each in facts.items():
        kind, want, of = (dtype, shape, "outs[0]") if name.startswith("outs") else (lse_dtype, (*leading, heads, rows), f"outs of {dtype}")
        if each.dtype != kind:
            raise TypeError(f"{name} must have dtype {kind}, as {of} {'has' if of == 'outs[0]' else 'have'}; got {each.dtype}")
        if each.shape != want:
            raise ValueError(f"{name} must have shape {want}; got {each.shape}")
    if one_device:
        check_one_device(facts)
    return dtype, lse_dtype


def by_kernel(library: Library, like, facts: dict[str, Facts], dtype, lse_dtype, stream=None):
    """The merge on a GPU, as many parts at a time as a launch takes; what they become on the way stays in the dtype that is computed in.

    ``like`` is an array of the library on the device of all that the facts describe, outputs and then LSE.
    """
    facts = list(facts.values())
    states = list(zip(facts[: len(facts) // 2], facts[len(facts) // 2 :], strict=True))
    kept = []  # until the launches that read it have been made
    while True:
        groups = [states[n : n + MOST_PARTS] for n in range(0, len(states), MOST_PARTS)]
        merged = [_launch(library, like, group, dtype if len(groups) == 1 else lse_dtype, lse_dtype, stream) for group in groups]
        if len(groups) == 1:
            return merged[0][:2]
        kept.append(merged)
        states = [state for _, _, state in merged]


def _launch(library: Library, like, states, result, lse_dtype, stream):
    """A merged state: (out, lse, facts of both)."""
    outs, lses = zip(*states, strict=True)
    index, shapes = outs[0].index or 0, (outs[0].shape, lses[0].shape)
    arrays = [library.allocator(like, shape, dtype)(stream) for shape, dtype in zip(shapes, (result, lse_dtype), strict=True)]
    made = tuple(
        Facts(library.address(x), shape, contiguous_strides(shape, ITEMSIZE[dtype]), dtype, "cuda", index)
        for x, shape, dtype in zip(arrays, shapes, (result, lse_dtype), strict=True)
    )
    if 0 not in shapes[0]:
        layouts = [tuple((each.shape, each.strides) for each in side) for side in (outs, lses, made)]
        kind = (outs[0].dtype, result, index, *layouts)
        launch = _prepared.get(kind) or _prepare(kind, outs[0], result, *layouts)
        handle = library.current_stream(index)() if stream is None else stream
        launch(tuple(each.address for each in (*outs, *lses, *made)), handle)
    return *arrays, made


def _prepare(kind, like, result, outs, lses, merged):
    from .kernels.states.launch import prepare

    launch = prepare(like.dtype, result, list(outs), list(lses), *merged, device_of(like))
    with _lock:
        while len(_prepared) >= MAX_CALLS:
            del _prepared[next(iter(_prepared))]
        _prepared[kind] = launch
    return launch


def by_operations(library: Library, outs, lses, dtype, lse_dtype):
    """The merge by array operations, which the library differentiates where it differentiates those."""
    xp = library.namespace

    def column(x):
        """(..., heads, rows) beside (..., rows, heads, columns)."""
        return xp.swapaxes(x, -1, -2)[..., None]

    top = library.constant(reduce(xp.maximum, lses))
    finite_top = xp.where(top == -inf, 0.0, top)
    weights = [xp.exp(lse - finite_top) for lse in lses]
    total = reduce(lambda a, b: a + b, weights)
    nothing = total == 0.0
    total = xp.where(nothing, 1.0, total)
    parts = (
        xp.where(column(lse) == -inf, 0.0, library.cast(out, lse_dtype)) * column(weight)  # a part without a key may hold anything
        for out, lse, weight in zip(outs, lses, weights, strict=True)
    )
    acc = reduce(lambda a, b: a + b, parts)
    return library.row_major(library.cast(acc / column(total), dtype)), library.row_major(xp.where(nothing, -inf, finite_top + xp.log(total)))
