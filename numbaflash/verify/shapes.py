"""What is verified: the kinds of calls that a model, a command line or a trace stands for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..problem import ITEMSIZE, PACKED, Problem, make_decode_problem, make_packed_problem, make_problem

NUMBERS = {
    "forward": ("scale", "causal", "window", "softcap", "dropout", "max_seqlen_q", "max_seqlen_k"),
    "decode": ("scale", "causal", "window", "softcap"),
}
NUMBERS["backward"] = NUMBERS["forward"]
"""Options that a problem is made of, by direction."""


@dataclass(frozen=True)
class Attention:
    """The attention of one kind of layer.

    Attributes
    ----------
    heads, kv_heads, head_dim, head_dim_v, dtype
        As in `numbaflash.problem.Problem`.
    causal, window, softcap, scale
        As `numbaflash.forward` takes them.
    alibi, sinks : bool
        Whether there are slopes, and sinks.
    latent : (int, int) or None
        Head dims of the keys and of the values in a latent cache, which all query heads share: values are the first part of the keys.
    latent_scale : float or None
        Of the scores there.
    label : str
        Which layers these are.
    """

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool | str = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi: bool = False
    sinks: bool = False
    latent: tuple[int, int] | None = None
    latent_scale: float | None = None
    label: str = ""

    @property
    def numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "causal", "window", "softcap")}

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        found = {"alibi_slopes": ((self.heads,), "float32")} if self.alibi else {}
        wide = "float64" if self.dtype == "float64" else "float32"
        return found | ({"sinks": ((self.heads,), wide)} if self.sinks else {})


@dataclass(frozen=True)
class Call:
    """A kind of call.

    Attributes
    ----------
    name : str
    direction : str
        "forward", "backward" or "decode".
    q, k, v : tuple of int
        Shapes as the caller has them; those of the caches in decoding.
    dtype : str
    numbers : dict
        Options that are no arrays, as the function takes them.
    arrays : dict of str to (tuple of int, str)
        Shape and dtype of each further array, by argument; a `numbaflash.BlockMask` is "block_mask" with the shape that it tells.
    strides : dict of str to str
        Kinds of strides as a trace tells them; contiguous where there is none.
    latent : bool
        The values are a view of the keys.
    deterministic : bool
    needs : tuple of str
    count : int
        How often a trace has it.
    """

    name: str
    direction: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: str
    numbers: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    strides: dict[str, str] = field(default_factory=dict)
    latent: bool = False
    deterministic: bool = False
    needs: tuple[str, ...] = ("q", "k", "v")
    count: int = 1

    @cached_property
    def problem(self) -> Problem:
        """What is computed; TypeError or ValueError where the shapes do not fit."""
        numbers = {name: self.numbers[name] for name in NUMBERS[self.direction] if self.numbers.get(name) is not None}
        arrays = {name: told for name, told in self.arrays.items() if name != "block_mask"}
        make = make_decode_problem if self.direction == "decode" else make_problem
        if PACKED[0] in arrays:
            make = make_packed_problem
        else:
            numbers = {name: x for name, x in numbers.items() if not name.startswith("max_seqlen")}
            if "block_mask" in self.arrays:
                arrays["mask"] = (self.arrays["block_mask"][0][-4:], "bool")
        return make(self.q, self.k, self.v, (self.dtype,) * 3, **numbers, **arrays)

    @property
    def packed(self) -> bool:
        return PACKED[0] in self.arrays

    @property
    def cache_bytes(self) -> int:
        """Of keys and values that are kept, which decoding reads."""
        if self.direction != "decode":
            return 0
        return ITEMSIZE[self.dtype] * (math.prod(self.k) + (0 if self.latent else math.prod(self.v)))

    @property
    def input_bytes(self) -> int:
        """Of everything else that is read."""
        size = ITEMSIZE[self.dtype]
        total = size * math.prod(self.q) + sum(ITEMSIZE[dtype] * math.prod(shape) for shape, dtype in self.arrays.values())
        if self.direction != "decode":
            total += size * (math.prod(self.k) + math.prod(self.v))
        if self.direction == "backward":
            total += 2 * size * math.prod(self.problem.out_shape) + ITEMSIZE[self.problem.lse_dtype] * math.prod(self.problem.lse_shape)
        return total

    @property
    def result_bytes(self) -> int:
        p = self.problem
        if self.direction == "backward":
            return sum(ITEMSIZE[p.dtype_of(name)] * math.prod(p.shape_of(name)) for name in self.needs)
        return ITEMSIZE[self.dtype] * math.prod(p.out_shape) + ITEMSIZE[p.lse_dtype] * math.prod(p.lse_shape)

    @property
    def pairs(self) -> int | None:
        """Pairs of a query and a key that are computed, over batch and heads; None where only the values of an array tell."""
        p = self.problem
        if p.masked or p.seqlens_q or p.packed:
            return None
        place = np.arange(p.seqlen_q) + p.offset
        low = 0 if p.left is None else np.maximum(place - p.left, 0)
        high = p.seqlen_k - 1 if p.right is None else np.minimum(place + p.right, p.seqlen_k - 1)
        total = int(np.maximum(high - low + 1 + 0 * place, 0).sum())
        return total * p.batch * p.heads

    def __str__(self):
        return f"{self.name}: q {self.q}, k {self.k}, v {self.v}, {self.dtype}" + "".join(
            f", {name} {x}" for name, x in self.numbers.items() if x not in (None, False, 0.0)
        )


def calls_of(
    attention: Attention, *, batch: int, seqlens: tuple[int, ...], context: int | None, requests: int, page_size: int, backward: bool
) -> list[Call]:
    """Prefill, its gradients, decoding of one request and of several.

    Parameters
    ----------
    attention : Attention
    batch, seqlens
        Of prefill.
    context : int or None
        Keys in the cache of a request; None: the longest of ``seqlens``.
    requests : int
        That are decoded together.
    page_size : int
        Of their cache.
    backward : bool
        Whether there are gradients.
    """
    a, found = attention, []
    label = f", {a.label}" if a.label else ""
    of = {"dtype": a.dtype, "numbers": a.numbers, "arrays": a.arrays}
    for seqlen in seqlens:
        where = f" of {seqlen}{label}"
        rows = (batch, seqlen)
        shapes = ((*rows, a.heads, a.head_dim), (*rows, a.kv_heads, a.head_dim), (*rows, a.kv_heads, a.head_dim_v))
        found.append(Call(f"prefill{where}", "forward", *shapes, **of))
        if backward:
            found.append(Call(f"gradients{where}", "backward", *shapes, **of))
    keys = context or max(seqlens)
    kv_heads, head_dim, head_dim_v, latent = a.kv_heads, a.head_dim, a.head_dim_v, False
    if a.latent is not None:
        kv_heads, (head_dim, head_dim_v), latent = 1, a.latent, True
        of = of | {"numbers": a.numbers | {"scale": a.latent_scale}}
    for count in sorted({1, requests}):
        lengths = {"seqlens_k": ((count,), "int32")}
        rows = (count, keys)
        if count > 1:
            pages = -(-keys // page_size)
            rows = (count * pages, page_size)
            lengths["page_table"] = ((count, pages), "int32")
        told = of | {"arrays": of["arrays"] | lengths, "latent": latent}
        who = "one request" if count == 1 else f"{count} requests, paged"
        shapes = ((count, 1, a.heads, head_dim), (*rows, kv_heads, head_dim), (*rows, kv_heads, head_dim_v))
        found.append(Call(f"decode of {who}{label}", "decode", *shapes, **told))
    return found


def without_pages(call: Call) -> Call:
    """The same decoding of contiguous caches."""
    batch, pages = call.arrays["page_table"][0]
    rows = (batch, pages * call.k[1])
    arrays = {name: told for name, told in call.arrays.items() if name != "page_table"}
    return replace(call, name=call.name.replace(", paged", ""), k=(*rows, *call.k[2:]), v=(*rows, *call.v[2:]), arrays=arrays)
