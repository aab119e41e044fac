"""`numbaflash.merge`, by the array operations of the caller's library."""

from __future__ import annotations

from functools import reduce
from math import inf

import numpy as np

from .arrays import Facts, Library, one_library
from .call import check_one_device
from .problem import DTYPES


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
    dtype, lse_dtype = check({name: library.describe(x, name) for name, x in arrays.items()}, library.one_device)
    with library.on_device(outs[0]), np.errstate(all="ignore"):
        return _merge(library, outs, lses, dtype, lse_dtype)


def _parts(name, parts) -> list:
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"{name} must be a list or tuple of arrays, one for each part of the keys; got {type(parts).__name__}")
    return list(parts)


def check(facts: dict[str, Facts], one_device: bool = True) -> tuple[str, str]:
    """dtypes of the outs and of the lses, after every check of shape, dtype and device."""
    dtype, shape = facts["outs[0]"].dtype, facts["outs[0]"].shape
    if dtype not in DTYPES:
        raise TypeError(f"outs[0] must be one of {', '.join(DTYPES)}; got dtype {dtype}")
    if len(shape) != 4:
        raise ValueError(f"outs[0] must have 4 axes (batch, seqlen_q, heads, head_dim_v); got {len(shape)} axes, shape {shape}")
    lse_dtype = "float64" if dtype == "float64" else "float32"
    batch, seqlen_q, heads, _ = shape
    for name, each in facts.items():
        kind, want, of = (dtype, shape, "outs[0]") if name.startswith("outs") else (lse_dtype, (batch, heads, seqlen_q), f"outs of {dtype}")
        if each.dtype != kind:
            raise TypeError(f"{name} must have dtype {kind}, as {of} {'has' if of == 'outs[0]' else 'have'}; got {each.dtype}")
        if each.shape != want:
            raise ValueError(f"{name} must have shape {want}; got {each.shape}")
    if one_device:
        check_one_device(facts)
    return dtype, lse_dtype


def _merge(library: Library, outs, lses, dtype, lse_dtype):
    xp = library.namespace

    def column(x):
        """(batch, heads, seqlen_q) beside (batch, seqlen_q, heads, head_dim_v)."""
        return xp.swapaxes(x, 1, 2)[..., None]

    top = reduce(xp.maximum, lses)
    finite_top = xp.where(top == -inf, 0.0, top)
    weights = [xp.exp(lse - finite_top) for lse in lses]
    total = reduce(lambda a, b: a + b, weights)
    total = xp.where(total == 0.0, 1.0, total)
    parts = (
        xp.where(column(lse) == -inf, 0.0, library.cast(out, lse_dtype) * column(weight))  # a part without a key may hold anything
        for out, lse, weight in zip(outs, lses, weights, strict=True)
    )
    acc = reduce(lambda a, b: a + b, parts)
    return library.cast(acc / column(total), dtype), top + xp.log(total)
