"""Arrays for a kind of call, the call itself, and the part of a problem that a sample of its results belongs to."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import reference
from ..block_mask import BlockMask
from ..problem import NEEDS, PACKED, Problem
from ..testing import Memory, Placement, to_float64
from ..testing.libraries import make
from ..testing.values import encode
from .places import Place
from .shapes import Call

UNUSED = np.nan
"""What slots of a cache hold that no sequence uses."""


@dataclass
class Inputs:
    """The arrays of a call.

    Attributes
    ----------
    call : Call
    arrays : dict
        By argument, in the library of the place.
    values : dict of str to ndarray
        What the options among them hold, on the host; a block mask as the array of bool that it stands for.
    """

    call: Call
    place: Place
    arrays: dict[str, Any]
    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, call: Call, place: Place, *, lengths=None, hide: bool = False) -> Inputs:
        """Random ones.

        Parameters
        ----------
        call : Call
        place : Place
        lengths : sequence of int, optional
            Of the sequences in the cache, in decoding; by default the longest possible and random ones.
        hide : bool
            Fill the unused slots of caches with NaN; only for small ones, which are made on the host.
        """
        values = {name: _values(call, name, shape, dtype, place.rng, lengths) for name, (shape, dtype) in call.arrays.items()}
        names = ("q", "k_cache", "v_cache") if call.direction == "decode" else NEEDS
        arrays = {
            name: _operand(place, shape, call.dtype, call.strides.get(name)) for name, shape in zip(names, (call.q, call.k, call.v), strict=True)
        }
        for name, x in values.items():
            dtype = call.arrays[name][1]
            if name == "block_mask":
                mask = BlockMask.from_mask(place.put(x), seqlen_q=call.q[1], seqlen_k=call.k[1])
                arrays["mask"] = mask
            elif dtype in ("float16", "bfloat16"):
                arrays[name] = place.normal(x.shape, dtype)
                values[name] = place.host(arrays[name])
            else:
                arrays[name] = place.put(x.astype(dtype))
        made = cls(call, place, arrays, values)
        if hide:
            made._hide()
        if call.latent:
            arrays["v_cache"] = arrays["k_cache"][..., : call.v[3]]
        if call.direction == "backward":
            arrays["dout"] = _operand(place, call.problem.out_shape, call.dtype, call.strides.get("dout"))
        return made

    def _hide(self):
        used = np.zeros(self.call.k[:2], bool)
        for b, length in enumerate(self.lengths_k):
            if "page_table" in self.values:
                size = self.call.k[1]
                for n, page in enumerate(self.values["page_table"][b, : -(-length // size)]):
                    used[page] |= np.arange(n * size, (n + 1) * size) < length
            else:
                used[b, :length] = True
        for name in ("k_cache", "v_cache"):
            self.arrays[name] = _where(self.place, used, self.arrays[name], self.call.dtype)

    @property
    def lengths_k(self) -> list[int]:
        """Valid keys of each batch entry."""
        problem = self.call.problem
        told = self.values.get("seqlens_k")
        return [problem.seqlen_k] * problem.batch if told is None else [min(max(int(n), 0), problem.seqlen_k) for n in told]

    def forward(self):
        """(out, lse)."""
        import numbaflash

        given = self._given()
        if self.call.direction == "decode":
            numbers = {name: x for name, x in self.call.numbers.items() if name != "num_splits"}
            return numbaflash.decode(**given, **numbers, return_lse=True)
        function = numbaflash.forward_varlen if self.call.packed else numbaflash.forward
        given.pop("dout", None)
        return function(**given, **self._numbers(), return_lse=True)

    def backward(self, out, lse):
        """Gradients by input."""
        import numbaflash

        call, given = self.call, self._given()
        if self.place.library == "jax":
            return self._differentiated(given)
        function = numbaflash.backward_varlen if call.packed else numbaflash.backward
        found = function(given.pop("dout"), given.pop("q"), given.pop("k"), given.pop("v"), out, lse, **given, **self._numbers(), **self._how())
        names = (*NEEDS, *(name for name in call.needs if name not in NEEDS))
        return {name: x for name, x in zip(names, found, strict=True) if x is not None}

    def _how(self):
        return {"deterministic": self.call.deterministic, "needs": self.call.needs}

    def _differentiated(self, given):
        import jax

        import numbaflash

        dout = given.pop("dout")
        function = numbaflash.attention_varlen if self.call.packed else numbaflash.attention
        inputs = {name: given.pop(name) for name in self.call.needs}

        def compute(inputs):
            return function(**inputs, **given, **self._numbers(), deterministic=self.call.deterministic)

        return jax.vjp(compute, inputs)[1](dout)[0]

    def _given(self):
        return dict(self.arrays)

    def _numbers(self):
        numbers = dict(self.call.numbers)
        if not self.call.packed:
            numbers = {name: x for name, x in numbers.items() if not name.startswith("max_seqlen")}
        return numbers | ({"seed": 1} if numbers.get("dropout") else {})

    def explain(self):
        """What `numbaflash.explain` says of the call."""
        import numbaflash

        given = self._given()
        if self.call.direction == "decode":
            given["k"], given["v"] = given.pop("k_cache"), given.pop("v_cache")
            return numbaflash.explain(**given, **self.call.numbers, return_lse=True, direction="decode")
        more = self._how() if self.call.direction == "backward" else {}
        return numbaflash.explain(**given, **self._numbers(), return_lse=True, direction=self.call.direction, **more)

    def place_of(self, b: int) -> tuple[int, int, int, int]:
        """Where the rows of a batch entry begin in q and in k, and how many there are of each."""
        problem = self.call.problem
        if self.call.packed:
            bounds = [reference.boundaries(self.values[name], total) for name, total in zip(PACKED, (problem.total_q, problem.total_k), strict=True)]
            (first_q, end_q), (first_k, end_k) = ((int(each[b]), int(each[b + 1])) for each in bounds)
            return first_q, first_k, end_q - first_q, end_k - first_k
        length_q = int(np.clip(self.values["seqlens_q"][b], 0, problem.seqlen_q)) if "seqlens_q" in self.values else problem.seqlen_q
        return 0, 0, length_q, self.lengths_k[b]

    def part(self, b: int, heads: slice, rows: slice) -> Part:
        """Some rows, counted within the batch entry, of the query heads of some key heads (counted as query heads; whole groups)."""
        problem, group = self.call.problem, self.call.problem.group
        first_q, first_k, length_q, length_k = self.place_of(b)
        count, offset = rows.stop - rows.start, length_k - length_q if problem.offset_per_entry else problem.offset
        kv = slice(heads.start // group, -(-heads.stop // group))
        at = slice(first_q + rows.start, first_q + rows.stop)
        entry = () if self.call.packed else (slice(b, b + 1),)
        options, told = {}, {}
        for name in ("mask", "block_mask", "bias"):
            if name in self.values:
                x = self.values[name]
                x = x.reshape((1,) * (4 - x.ndim) + x.shape)
                axes = (slice(b, b + 1), heads, rows, slice(0, length_k))
                x = x[tuple(axis if n > 1 else slice(None) for axis, n in zip(axes, x.shape, strict=True))]
                options["bias" if name == "bias" else "mask"] = x
                told |= {"bias": x.shape} if name == "bias" else {"mask": x.shape, "block_mask": None}
        if "alibi_slopes" in self.values:
            slopes = np.atleast_2d(self.values["alibi_slopes"])
            options["alibi_slopes"] = slopes[min(b, len(slopes) - 1)][heads][None]
            told["alibi"] = options["alibi_slopes"].shape
        if "sinks" in self.values:
            options["sinks"] = self.values["sinks"][heads]
        nothing = dict.fromkeys(("seqlens_q", "seqlens_k", *PACKED)) | dict.fromkeys(("pages", "page_size", "max_pages", "total_q", "total_k"), 0)
        told |= {"batch": 1, "heads": heads.stop - heads.start, "kv_heads": kv.stop - kv.start, "seqlen_q": count, "seqlen_k": length_k}
        problem = replace(problem, **(nothing | told), offset=offset + rows.start, offset_per_entry=False)
        return Part(self, problem, b, entry, at, heads, kv, slice(first_k, first_k + length_k), options)

    def rows_of(self, name: str, part: Part):
        """The values that a part has of q, k, v or dout, in float64."""
        if name in ("q", "dout"):
            return self._batched(self.arrays[name][(*part.entry, part.rows, part.heads)])
        x = self.arrays[f"{name}_cache" if self.call.direction == "decode" else name]
        if "page_table" in self.values:
            size = self.call.k[1]
            pages = np.clip(self.values["page_table"][part.b, : -(-part.problem.seqlen_k // size)], 0, self.call.k[0] - 1)
            x = x[:, :, part.kv_heads][self.place.put(pages.astype(np.int64))]
            return self.place.exact(x.reshape(1, -1, *x.shape[2:])[:, : part.problem.seqlen_k])
        return self._batched(x[(*part.entry, part.keys, part.kv_heads)])

    def _batched(self, x):
        return self.place.exact(x if len(x.shape) == 4 else x[None])


@dataclass(frozen=True)
class Part:
    """Some rows and heads of a batch entry, as a problem of its own without lengths, pages and packing."""

    inputs: Inputs
    problem: Problem
    b: int
    entry: tuple
    rows: slice
    heads: slice
    kv_heads: slice
    keys: slice
    options: dict[str, np.ndarray]

    def operands(self, *names):
        return [self.inputs.rows_of(name, self) for name in names]

    def results(self, out, lse):
        """What a call returned, of this part, with the axes of its problem."""
        out = out[(*self.entry, self.rows, self.heads)]
        lse = lse[(*self.entry, self.heads, self.rows)]
        return (out, lse) if len(out.shape) == 4 else (out[None], lse[None])

    def of_queries(self, x):
        """The same of an array with the axes of q."""
        x = x[(*self.entry, self.rows, self.heads)]
        return x if len(x.shape) == 4 else x[None]

    def of_keys(self, x):
        """The same of an array with the axes of k."""
        x = x[(*self.entry, self.keys, self.kv_heads)]
        return x if len(x.shape) == 4 else x[None]

    def __str__(self):
        first, last = self.heads.start, self.heads.stop - 1
        heads = f"head {first}" if first == last else f"heads {first}..{last}"
        return f"batch entry {self.b}, {heads}, rows {self.rows.start}..{self.rows.stop - 1}"


def _operand(place, shape, dtype, strides):
    """Random numbers with the kind of strides that a trace tells; what cannot be told apart is contiguous."""
    kind, _, axes = (strides or "contiguous").partition(" ")
    if kind == "order" and place.library != "jax":
        return place.ordered(shape, [int(axis) for axis in axes.split(",")], dtype)
    if kind == "strided" and place.library != "jax":
        return place.padded(shape, 16, dtype)
    return place.normal(shape, dtype)


def _values(call, name, shape, dtype, rng, lengths):
    """What an option holds."""
    problem = call.problem
    if name in ("mask", "block_mask"):
        seen = rng.random(shape[-2:] if name == "block_mask" else shape) < 0.75
        if name == "block_mask":  # whole blocks that are hidden, too
            blocks = rng.random([-(-n // 64) for n in shape[-2:]]) < 0.7
            seen = (seen | (rng.random(seen.shape) < 0.5)) & np.kron(blocks, np.ones((64, 64), bool))[: shape[-2], : shape[-1]]
        return seen
    if name in ("seqlens_q", "seqlens_k"):
        capacity = problem.seqlen_q if name == "seqlens_q" else problem.seqlen_k
        if lengths is not None:
            return np.array(lengths, np.int64)
        least = max(1, capacity // 2) if call.direction == "decode" else 0
        found = rng.integers(min(least, capacity), capacity + 1, shape)
        found[:1] = capacity
        return found
    if name in PACKED:
        total = call.q[0] if name == "cu_seqlens_q" else call.k[0]
        cuts = np.sort(np.random.default_rng(7).random(max(shape[0] - 2, 0)))  # the same for queries and keys
        return np.array([0, *np.floor(cuts * total).astype(int), total][: shape[0]], np.int64)
    if name == "page_table":
        pages, entries = call.k[0], int(np.prod(shape))
        order = rng.permutation(pages) if pages >= entries else rng.integers(0, max(pages, 1), entries)
        return order[:entries].reshape(shape)
    if name == "alibi_slopes":
        return rng.uniform(0.0, 0.2, shape).astype(np.float32)
    return rng.standard_normal(shape).astype("float64" if dtype == "float64" else "float32")


def _where(place, used, x, dtype):
    """The array with `UNUSED` in the rows that nobody uses."""
    values = np.where(used[..., None, None], place.host(x), UNUSED)
    memory = Memory.filled(dtype, values.shape, Placement(), 0)
    memory.view()[...] = encode(values, dtype)
    return make(memory, place.testing_library, place.device.index)[1]


def difference(place: Place, a, b, scale: float) -> float:
    """Largest difference of two arrays, in units of ``scale``, one batch entry at a time; infinite where one alone is NaN or infinite."""
    worst = 0.0
    for at in range(len(a)):
        one, other = (to_float64(place.exact(x[at])) for x in (a, b))
        apart = abs(one - other)
        both = (one == other) | ((one != one) & (other != other))
        apart = apart * ~both if bool((apart == apart).all()) else _infinite(apart, both)
        worst = max(worst, float(apart.max()) / scale if apart.shape and 0 not in apart.shape else 0.0)
    return worst


def _infinite(apart, both):
    xp = np if isinstance(apart, np.ndarray) else sys.modules["torch"]
    return xp.where(both, xp.zeros_like(apart), xp.where(apart == apart, apart, xp.full_like(apart, np.inf)))
