"""`numbaflash.merge`: one kernel on GPUs, elsewhere the array operations of the caller's library."""

from __future__ import annotations

from functools import reduce
from math import inf

import numpy as np

from .arrays import ITEMSIZE, Facts, Library, one_library
from .call import check_one_device, device_of, find, remember
from .dispatch import Layout, alignment_of
from .problem import DTYPES


def merge(outs, lses):
    """See `numbaflash.merge`."""
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if len(outs) != len(lses):
        raise ValueError(f"outs and lses must have the same length; got {len(outs)} and {len(lses)}")
    if not outs:
        raise ValueError("outs must hold at least one partial result; got none")
    library = one_library(**named(outs, lses))
    if library.merge is not None:
        return library.merge(outs, lses)
    return merge_states(library, outs, lses)


def merge_states(library: Library, outs, lses, stream: int | None = None):
    """The same of arrays of one library that are not to be differentiated, on a stream or the current one."""
    kind = None
    if library.builds_on_device:
        try:
            found = [library.inspect(x) for x in (*outs, *lses)]
        except Exception:
            check(library, outs, lses)  # says for people what is wrong
            raise
        kind = ("merge", library, *(key for _, key in found))
        prepared = find(kind)
        if prepared is not None:
            return prepared(library, [at for at, _ in found], stream)
    facts = check(library, outs, lses)
    if kind is None or facts["outs[0]"].kind == "cpu":
        return by_operations(library, outs, lses, facts["outs[0]"].dtype)
    return remember(kind, _Prepared(library, outs[0], facts))(library, [at for at, _ in found], stream)


def named(outs, lses) -> dict:
    return {f"outs[{i}]": x for i, x in enumerate(outs)} | {f"lses[{i}]": x for i, x in enumerate(lses)}


def _parts(name, parts) -> list:
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"{name} must be a list or tuple of arrays, one for each part of the keys; got {type(parts).__name__}")
    return list(parts)


def check(library: Library, outs, lses) -> dict[str, Facts]:
    """Facts of all arrays, after every check of shape, dtype and device."""
    facts = {name: library.describe(x, name) for name, x in named(outs, lses).items()}
    dtype, shape = facts["outs[0]"].dtype, facts["outs[0]"].shape
    if dtype not in DTYPES:
        raise TypeError(f"outs[0] must be one of {', '.join(DTYPES)}; got dtype {dtype}")
    if len(shape) not in (3, 4):
        raise ValueError(
            "outs[0] must have 4 axes (batch, seqlen_q, heads, head_dim_v), or 3 axes (total_q, heads, head_dim_v); "
            f"got {len(shape)} axes, shape {shape}"
        )
    *batch, seqlen_q, heads, _ = shape
    for name, each in facts.items():
        kind, want, of = (dtype, shape, "outs[0]") if name.startswith("outs") else (_lse_dtype(dtype), (*batch, heads, seqlen_q), f"outs of {dtype}")
        if each.dtype != kind:
            raise TypeError(f"{name} must have dtype {kind}, as {of} {'has' if of == 'outs[0]' else 'have'}; got {each.dtype}")
        if each.shape != want:
            raise ValueError(f"{name} must have shape {want}; got {each.shape}")
    if library.one_device:
        check_one_device(facts)
    return facts


def _lse_dtype(dtype):
    return "float64" if dtype == "float64" else "float32"


class _Prepared:
    """A kind of merge on a GPU: its launches, and the arrays that they need."""

    def __init__(self, library: Library, like, facts: dict[str, Facts]):
        from .kernels.states.launch import rooms

        out, lse = facts["outs[0]"], facts["lses[0]"]
        for name, each in facts.items():
            if any(step % ITEMSIZE[each.dtype] for step in (each.address, *each.strides)):
                raise ValueError(f"{name} must have elements that are aligned to their size; got strides {each.strides} (bytes). Copy it first")
        self._facts, self._device, self._count = facts, device_of(out), len(facts) // 2
        self._new = [library.allocator(like, each.shape, each.dtype) for each in (out, lse)]
        self._rooms = [[library.allocator(like, each.shape, lse.dtype) for each in (out, lse)]] * rooms(self._count)
        self._current_stream = library.current_stream(self._device.index)
        self._launches = {}  # by whether results are aligned

    def __call__(self, library, addresses, stream):
        out, lse = (new(stream) for new in self._new)
        if 0 in self._facts["lses[0]"].shape:
            return out, lse
        for (name, each), at in zip(self._facts.items(), addresses, strict=True):
            if not at and 0 not in each.shape:
                raise ValueError(f"{name} has no memory: it was deleted or released before the call")
        carried = [[new(stream) for new in room] for room in self._rooms]
        places = [[library.address(x) for x in results] for results in ((out, lse), *carried)]
        aligned = not any(at & 15 for at, _ in places)
        launch = self._launches.get(aligned) or self._launch(aligned)
        handle = self._current_stream() if stream is None else stream
        launch(addresses[: self._count], addresses[self._count :], *places[0], places[1:], handle)
        return out, lse

    def _launch(self, aligned):
        from .kernels.states.launch import Merge

        states = ([_layout(each, n) for name, each in self._facts.items() if name.startswith(kind)] for kind, n in (("outs", 4), ("lses", 3)))
        found = self._launches[aligned] = Merge(self._facts["outs[0]"].dtype, *states, aligned=aligned, device=self._device)
        return found


def _layout(facts: Facts, axes: int) -> Layout:
    """With the axis of the batch that packed sequences have not."""
    lead = axes - len(facts.shape)
    return Layout((1,) * lead + facts.shape, (0,) * lead + facts.strides, alignment_of(facts.address))


def by_operations(library: Library, outs, lses, dtype: str):
    """By operations that the library can record and differentiate: a row of -inf has gradients of 0, whatever its out holds."""
    xp, compute = library.namespace, _lse_dtype(dtype)

    def column(x):
        """(batch, heads, seqlen_q) beside (batch, seqlen_q, heads, head_dim_v)."""
        return xp.swapaxes(x, -1, -2)[..., None]

    with library.on_device(outs[0]), np.errstate(all="ignore"):
        top = library.constant(reduce(xp.maximum, lses))
        top = xp.where(top == -inf, 0.0, top)
        weights = [xp.exp(lse - top) for lse in lses]
        total = reduce(lambda a, b: a + b, weights)
        some = xp.where(total == 0.0, 1.0, total)
        parts = (
            xp.where(column(lse) == -inf, 0.0, library.cast(out, compute)) * column(weight)
            for out, lse, weight in zip(outs, lses, weights, strict=True)
        )
        acc = reduce(lambda a, b: a + b, parts)
        return library.cast(acc / column(some), dtype), xp.where(total == 0.0, -inf, top + xp.log(some))
